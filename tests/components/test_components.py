import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.runner import get_runner
from torchx.specs.finder import get_component

from persia_torchrec.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = {"embedding_config": "embedding.yml", "global_config": "global.yml"}
SCRIPTS = {"nn_worker": "train.py --epochs 2", "data_loader": "'my loader.py'"}
BOOK = {"host": "10.0.0.7", "port": 29400}
SCHEDULERS = ["local_cwd", "slurm", "kubernetes"]

COMPONENTS = {
    "job.py:train": {**SCRIPTS, **CONFIGS, "port": 29400},
    "inference.py:serve": {**CONFIGS, "checkpoint": "runs/7", "port": 29400},
    "roles.py:embedding_server": {**BOOK, **CONFIGS, "replicas": 2},
    "roles.py:embedding_worker": {**BOOK, **CONFIGS},
    "roles.py:data_loader": {**BOOK, **CONFIGS, "script": "loader.py"},
    "roles.py:nn_worker": {**BOOK, **CONFIGS, "script": "train.py", "gpus": 1},
}


def load(name):
    return get_component(f"{ROOT / 'components'}/{name}").fn


def train(**changes):
    arguments = {**SCRIPTS, **CONFIGS, **changes}
    app = load("job.py:train")(**arguments)
    return {role.name: role for role in app.roles}


def cfg_of(scheduler, folder):
    return {
        "local_cwd": {"log_dir": str(folder)},
        "slurm": {"partition": "debug"},
        "kubernetes": {"queue": "default"},
    }[scheduler]


@pytest.fixture
def runner():
    with get_runner() as runner:
        yield runner


def test_every_component_is_listed_here():
    functions = {
        f"{path.name}:{function.name}"
        for path in (ROOT / "components").glob("*.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name[0] != "_"
    }
    assert functions == set(COMPONENTS)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_is_understood_by_every_scheduler(
    runner, tmp_path, name, scheduler
):
    if scheduler == "kubernetes" and not importlib.util.find_spec("kubernetes"):
        pytest.skip("torchx needs the package kubernetes to speak to it")
    app = load(name)(**COMPONENTS[name])
    request = str(runner.dryrun(app, scheduler, cfg_of(scheduler, tmp_path)))
    for role in app.roles:
        assert role.args[1] in request
        assert role.name.isalpha()


def test_the_coordinator_is_the_first_role_and_has_the_number_of_the_others():
    roles = train(embedding_servers=2, embedding_workers=3, data_loaders=4)
    counts = {name: role.num_replicas for name, role in roles.items()}
    assert list(counts) == ["coordinator", "server", "worker", "loader", "trainer"]
    assert list(counts.values()) == [1, 2, 3, 4, 1]
    arguments = roles["coordinator"].args
    assert arguments[2] == "--port"
    assert arguments[4:] == [
        *("--num-servers", "2"),
        *("--num-workers", "3"),
        *("--num-loaders", "4"),
        *("--num-trainers", "1"),
    ]


def test_every_role_has_the_address_of_the_job_and_its_index():
    for role in train(port=29400, nn_workers=2, env={"LOG_LEVEL": "DEBUG"}).values():
        assert role.env == {
            "PERSIA_STORE_PORT": "29400",
            "PERSIA_STORE_HOST_ENV": "${rank0_env}",
            "PERSIA_JOB_ID": "${app_id}",
            "REPLICA_INDEX": "${replica_id}",
            "REPLICA_SIZE": str(role.num_replicas),
            "PERSIA_EMBEDDING_CONFIG": "embedding.yml",
            "PERSIA_GLOBAL_CONFIG": "global.yml",
            "PYTHONUNBUFFERED": "1",
            "LOG_LEVEL": "DEBUG",
        }


def test_no_two_roles_share_their_variables():
    variables = [id(role.env) for role in train().values()]
    assert len(set(variables)) == len(variables)


def test_a_port_is_chosen_when_none_is_named():
    assert int(train()["server"].env["PERSIA_STORE_PORT"]) > 0


def test_a_script_keeps_its_arguments_as_in_a_shell():
    roles = train()
    launcher = ["-m", "persia_torchrec.launch.script"]
    assert roles["trainer"].args == [*launcher, "trainer", "train.py", "--epochs", "2"]
    assert roles["loader"].args == [*launcher, "loader", "my loader.py"]


def test_servers_and_workers_have_their_index():
    roles = train(embedding_servers=2, eviction="lfu")
    assert roles["server"].args[1:] == ["persia_torchrec.server", "--eviction", "lfu"]
    assert roles["worker"].args[1:] == ["persia_torchrec.worker"]
    for name, size in (("server", "2"), ("worker", "1")):
        assert roles[name].env["REPLICA_INDEX"] == "${replica_id}"
        assert roles[name].env["REPLICA_SIZE"] == size


def test_image_and_interpreter_are_passed_on_unchanged():
    for role in train(image="registry/persia:1", python="python3.12").values():
        assert (role.image, role.entrypoint) == ("registry/persia:1", "python3.12")


def test_only_the_nn_workers_ask_for_gpus():
    gpus = {name: role.resource.gpu for name, role in train(nn_worker_gpus=2).items()}
    assert gpus.pop("trainer") == 2
    assert set(gpus.values()) == {0}


def test_a_job_without_loaders_leaves_the_role_out():
    assert "loader" not in train(data_loaders=0, data_loader="")


def test_a_single_role_has_the_host():
    name = "roles.py:embedding_server"
    (role,) = load(name)(**COMPONENTS[name]).roles
    assert role.env["PERSIA_STORE_HOST"] == "10.0.0.7"
    assert "PERSIA_STORE_HOST_ENV" not in role.env
    assert "PERSIA_JOB_ID" not in role.env  # it joins whichever job is there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_servers": 0}, r"embedding_servers must be >= 1\. Received: 0"),
        ({"eviction": "fifo"}, r"eviction must be lru or lfu\. Received: 'fifo'"),
        ({"embedding_workers": 0}, "embedding_workers must be >= 1"),
        ({"data_loaders": -1}, "data_loaders must be >= 1"),
        ({"nn_workers": 0}, "nn_workers must be >= 1"),
        ({"nn_worker_gpus": -1}, "nn_worker_gpus must be >= 0"),
        ({"port": 65_536}, r"\[1, 65535\]\. Received: 65536"),
        ({"nn_worker": ""}, "nn_worker must name a file"),
        ({"data_loader": " "}, "data_loader must name a file"),
        ({"embedding_config": ""}, "embedding_config must name a file"),
        ({"global_config": ""}, "global_config must name a file"),
        ({"nn_worker": "'train.py"}, "as in a shell"),
        ({"env": {"REPLICA_INDEX": "1"}}, r"sets itself\. Received: \['REPLICA_INDEX'"),
        ({"env": {"NICS": "eth0,eth1"}}, "no comma"),
        ({"embedding_config": "a,b.yml"}, "no comma"),
    ],
)
def test_an_invalid_argument_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        train(**changes)


def serve(**changes):
    arguments = {**CONFIGS, "checkpoint": "runs/7", **changes}
    app = load("inference.py:serve")(**arguments)
    return {role.name: role for role in app.roles}


def test_an_inference_job_has_no_trainers():
    roles = serve(embedding_servers=2, embedding_workers=3, predictors=4)
    counts = {name: role.num_replicas for name, role in roles.items()}
    assert counts == {"coordinator": 1, "server": 2, "worker": 3, "predictor": 4}
    assert next(iter(counts)) == "coordinator"
    assert roles["coordinator"].args[4:] == [
        *("--num-servers", "2", "--num-workers", "3", "--num-predictors", "4")
    ]
    assert roles["server"].args[-2:] == ["--checkpoint", "runs/7"]
    assert roles["worker"].args[-1] == "--learn-tables"
    assert roles["predictor"].args[1:] == [
        *("persia_torchrec.serving", "--checkpoint", "runs/7"),
        *("--host", "127.0.0.1", "--port", "8080", "--workers-of-job"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": ""}, "checkpoint must name a file"),
        ({"predictors": 0}, "predictors must be >= 1"),
        ({"http_port": 0}, r"http_port must be in \[1, 65535\], with"),
        ({"http_port": 65_535, "predictors": 2}, "Received: 65535, and 2 predictors"),
        ({"http_host": ""}, "http_host must name"),
    ],
)
def test_invalid_settings_of_an_inference_job_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        serve(**changes)


@pytest.mark.multiprocess
def test_plain_torchx_run_is_the_example_and_its_arguments_can_be_changed(tmp_path):
    command = [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun"]
    changed = subprocess.run(
        [*command, "--", "--embedding_servers", "3"],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "'examples/adult_income/train.py'" in changed
    assert "'num_replicas': 3" in changed
    assert "'runs/torchx/" in changed


def test_every_file_that_torchxconfig_names_is_there():
    text = (ROOT / ".torchxconfig").read_text()
    files = [word for word in text.split() if word.startswith("examples/")]
    assert len(files) == 4
    assert [name for name in files if not (ROOT / name).is_file()] == []
