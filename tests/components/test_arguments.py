"""Arguments of components: those of a command line, of variables, of .torchxconfig."""

import importlib
import logging
import sys

import pytest
from persia_torchrec.components import jobs
from torchx.runner import get_runner
from torchx.specs import finder

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.arguments import parse_pairs
from tests.support.components import BOOK, COMPONENTS, CONFIGS, SCRIPTS

pytestmark = pytest.mark.slow

TORCHX = "/opt/venv/bin/torchx"
MODULE = "/opt/site-packages/torchx/cli/main.py"
JOB = "persia.train"
VARIABLES = {
    "PERSIA_NN_WORKER_ENTRY": "a train.py",
    "PERSIA_DATALOADER_ENTRY": "load.py",
    "PERSIA_EMBEDDING_CONFIG": "e.yml",
    "PERSIA_GLOBAL_CONFIG": "g.yml",
}
CONFIG = {**SCRIPTS, **CONFIGS}  # of .torchxconfig


@pytest.fixture(autouse=True)
def _logs(caplog):
    caplog.set_level(logging.INFO)


@pytest.fixture(autouse=True)
def _forget():
    """Forget what components have read of variables when they were imported."""
    yield
    importlib.reload(jobs)
    finder._components = None


def start(monkeypatch, *words, program=TORCHX, component=JOB, config=None, options=()):
    """Return the roles of a job, as a command line of torchx starts them."""
    argv = [program, "run", "-s", "local_cwd", *options, component, *words]
    monkeypatch.setattr(sys, "argv", argv)
    importlib.reload(jobs)  # as in a process of torchx
    monkeypatch.setattr(finder, "_components", None)
    defaults = {component: config or {}}
    with get_runner(component_defaults=defaults) as runner:
        info = runner.dryrun_component(component, [*words], "local_cwd", {})
    return {role.name: role for role in info._app.roles}


def files_of(roles):
    """Return scripts and files that the roles are started with."""
    variables = roles["server"].env
    names = "PERSIA_EMBEDDING_CONFIG", "PERSIA_GLOBAL_CONFIG"
    scripts = [roles[name].args[-1] for name in ("trainer", "loader")]
    return [*scripts, *(variables[name] for name in names)]


@pytest.mark.parametrize("program", [TORCHX, MODULE])
@pytest.mark.parametrize("config", [{}, CONFIG])
def test_variables_win_over_torchxconfig(monkeypatch, caplog, program, config):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    roles = start(monkeypatch, program=program, config=config)
    assert files_of(roles) == list(VARIABLES.values())
    for name in VARIABLES:
        [line] = [line for line in caplog.messages if name in line]
        assert ("and not that of .torchxconfig" in line) == bool(config)


def test_words_win_over_variables(monkeypatch, caplog):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    words = ["--nn_worker", "other.py", "--global_config=o.yml"]
    roles = start(monkeypatch, *words, config=CONFIG)
    assert files_of(roles) == ["other.py", "load.py", "e.yml", "o.yml"]
    for name in ("PERSIA_NN_WORKER_ENTRY", "PERSIA_GLOBAL_CONFIG"):
        [line] = [line for line in caplog.messages if name in line]
        assert "is ignored" in line
        assert "is on the command line" in line


def test_variables_are_ignored_with_a_line_where_nothing_reports_the_two_apart(
    monkeypatch, caplog
):
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", "e.yml")
    roles = start(monkeypatch, program="/usr/bin/pytest", config=CONFIG)
    assert files_of(roles)[2] == CONFIGS["embedding_config"]
    [line] = [line for line in caplog.messages if "PERSIA_EMBEDDING_CONFIG" in line]
    assert "e.yml is ignored, as embedding_config is given: embedding.yml" in line


def test_an_argument_without_a_variable_must_be_given(monkeypatch):
    monkeypatch.setenv("PERSIA_NN_WORKER_ENTRY", "train.py")
    with pytest.raises(SystemExit):
        start(monkeypatch)


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("data_loader", "PERSIA_DATALOADER_ENTRY"),
        ("nn_worker", "PERSIA_NN_WORKER_ENTRY"),
    ],
)
def test_a_single_role_takes_its_script_of_the_variable(monkeypatch, name, variable):
    for one, value in VARIABLES.items():
        monkeypatch.setenv(one, value)
    component = f"persia.{name}"
    words = [f"--{flag}={value}" for flag, value in BOOK.items()]
    [role] = start(monkeypatch, *words, component=component).values()
    assert role.args[-1] == VARIABLES[variable]


@pytest.mark.parametrize("name", COMPONENTS)
def test_variables_of_every_component_are_words_with_any_value(monkeypatch, name):
    given = {"env": "URL=http://h/?a=b,NICS=eth0,eth1,NOTHING=", **COMPONENTS[name]}
    words = [word for n, value in given.items() for word in (f"--{n}", str(value))]
    roles = start(monkeypatch, *words, component=f"persia.{name}")
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


@pytest.mark.parametrize("flag", [["-cfg"], ["--scheduler_args"]])
def test_an_option_that_the_scheduler_does_not_have_is_rejected(monkeypatch, flag):
    words = [f"--{name}={value}" for name, value in CONFIG.items()]
    with pytest.raises(
        ConfigError,
        match=r"must name options of local: .*log_dir.*Received: account, qos\.",
    ):
        start(monkeypatch, *words, options=[*flag, "log_dir=runs,qos=a,account=ml"])
    start(monkeypatch, *words, options=[*flag, "log_dir=runs"])
