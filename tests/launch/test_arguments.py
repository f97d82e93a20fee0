"""Arguments of components: of a command line, of .torchxconfig, by previous names."""

import inspect
from typing import Literal, get_origin

import pytest
from torchx.runner import get_runner

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.arguments import parse_pairs
from persia_torchrec.parsing.settings import SETTINGS
from tests.support.components import COMPONENTS, CONFIGS, SCRIPTS, load

pytestmark = pytest.mark.slow

EMPTY = inspect.Parameter.empty
COMPONENTS_OF_A_ROLE = [name for name, given in COMPONENTS.items() if "host" in given]
TWO_OF_THREE = {"trainers": 6, "nproc_per_node": 3}
JOB = "persia.train"
VARIABLES = {
    "PERSIA_NN_WORKER_ENTRY": "a train.py",
    "PERSIA_DATALOADER_ENTRY": "load.py",
    "PERSIA_EMBEDDING_CONFIG": "e.yml",
    "PERSIA_GLOBAL_CONFIG": "g.yml",
}
CONFIG = {**SCRIPTS, **CONFIGS}  # of .torchxconfig


def start(*words, component=JOB, config=None):
    """Return the roles of a job, as a command line of torchx starts them."""
    with get_runner(component_defaults={component: config or {}}) as runner:
        info = runner.dryrun_component(component, [*words], "local_cwd", {})
    return {role.name: role for role in info._app.roles}


def files_of(roles):
    """Return scripts and files that the roles are started with."""
    variables = roles["server"].env
    names = "PERSIA_EMBEDDING_CONFIG", "PERSIA_GLOBAL_CONFIG"
    scripts = [roles[name].args[-1] for name in ("trainer", "loader")]
    return [*scripts, *(variables[name] for name in names)]


def test_variables_of_the_launcher_are_not_read(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        start()
    assert files_of(start(config=CONFIG)) == ["2", "my loader.py", *CONFIGS.values()]


def test_words_win_over_torchxconfig():
    words = ["--nn_worker", "other.py", "--global_config=o.yml"]
    roles = start(*words, config=CONFIG)
    assert roles["trainer"].args[-1] == "other.py"
    assert roles["server"].env["PERSIA_GLOBAL_CONFIG"] == "o.yml"


@pytest.mark.parametrize(
    ("name", "previous", "present"),
    [
        ("train", "embedding_servers 2", {"servers": 2}),
        ("train", "nn_workers 2 --nproc_per_node 3", TWO_OF_THREE),
        ("train", "nn_worker_gpus 2", {"gpus": 2}),
        ("train", "recover False", {"restarts": 0, "max_retries": 0}),
        ("train", "recover True", {}),
        ("train", "max_restarts 7", {"restarts": 7}),
        ("train", "resume_dir /all/7", {"run_dir": "/all/7"}),
        ("train_torchrec", "incremental_dir /i", {"increments_dir": "/i"}),
        ("embedding_server", "replicas 3", {"servers": 3}),
        ("embedding_worker", "replicas 3", {"embedding_workers": 3}),
        ("data_loader", "replicas 3", {"data_loaders": 3}),
        ("data_loader", "script other.py", {"data_loader": "other.py"}),
        ("nn_worker", "replicas 2 --nproc_per_node 3", TWO_OF_THREE),
        ("nn_worker", "script other.py", {"nn_worker": "other.py"}),
    ],
)
def test_previous_names_of_arguments_are_taken_with_a_warning(
    caplog, name, previous, present
):
    given = {k: v for k, v in COMPONENTS[name].items() if k not in present}
    words = [word for one in given.items() for word in (f"--{one[0]}", str(one[1]))]
    started = start(*words, *f"--{previous}".split(), component=f"persia.{name}")
    assert "is called --" in caplog.text
    expected = {role.name: role for role in load(name)(**given | present).roles}
    for role, one in started.items():
        other = expected[role]
        assert (one.args, one.num_replicas) == (other.args, other.num_replicas)
        assert one.env.items() >= other.env.items()  # torchx adds to it
        assert one.resource == other.resource


@pytest.mark.parametrize("name", COMPONENTS)
def test_arguments_are_as_they_are_declared(name):
    doc = " ".join(load(name).__doc__.split())
    for argument in inspect.signature(load(name)).parameters.values():
        of = SETTINGS.get(argument.name)
        if of is None or (argument.name == "port" and name in COMPONENTS_OF_A_ROLE):
            continue
        assert f"{argument.name}: {of.help}" in doc
        kind = str if get_origin(of.kind) in (Literal, dict) else of.kind
        assert argument.annotation is kind
        if argument.name != "predictors" and argument.default not in ("", EMPTY):
            assert argument.default == of.default


@pytest.mark.parametrize("name", COMPONENTS)
def test_variables_of_every_component_are_words_with_any_value(name):
    given = {"env": "URL=http://h/?a=b,NICS=eth0,eth1,NOTHING=", **COMPONENTS[name]}
    words = [word for n, value in given.items() for word in (f"--{n}", str(value))]
    roles = start(*words, component=f"persia.{name}")
    for role in roles.values():
        expected = {"URL": "http://h/?a=b", "NICS": "eth0,eth1", "NOTHING": ""}
        assert role.env.items() >= expected.items()


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", {}),
        ("A=1", {"A": "1"}),
        ("A=1,B=2;C=3", {"A": "1", "B": "2", "C": "3"}),
        (" A = 1 , B = 2 ", {"A": "1", "B": "2"}),
        ("A=1,2;3,B=4", {"A": "1,2;3", "B": "4"}),
        ("A=''", {"A": ""}),
        ("A=", {"A": ""}),
        ("A=,B=", {"A": "", "B": ""}),
        ("A=b=c=", {"A": "b=c="}),
    ],
)
def test_variables_are_parsed_as_torchx_does_and_with_equal_signs(text, pairs):
    assert parse_pairs("env", text) == pairs


@pytest.mark.parametrize("text", ["A", "my var=1", "A=1,my-var=2", "=1", "2A=1"])
def test_a_word_without_variable_is_rejected(text):
    with pytest.raises(ConfigError, match="env must be NAME=value,NAME=value"):
        parse_pairs("env", text)
