import ast
import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from persia_torchrec.components import jobs
from torchx.runner import get_runner

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.roles import JobSettings
from tests.support.components import (
    BOOK,
    COMPONENTS,
    CONFIGS,
    ROLES_FILE,
    SCHEDULERS,
    SCRIPTS,
    WORDS,
    cfg_of,
    load,
)
from tests.support.repository import ROOT
from tests.support.script_jobs import INFER


def train(**changes):
    arguments = {**SCRIPTS, **CONFIGS, "restarts": 0, "max_retries": 0, **changes}
    app = load("train")(**arguments)
    return {role.name: role for role in app.roles}


@pytest.fixture
def runner():
    with get_runner() as runner:
        yield runner


def test_every_component_is_listed_here():
    functions = {
        function.name
        for function in ast.parse(Path(jobs.__file__).read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name[0] != "_"
    }
    assert functions == set(COMPONENTS)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_is_understood_by_every_scheduler(
    runner, tmp_path, name, scheduler
):
    app = load(name)(**COMPONENTS[name])
    request = str(runner.dryrun(app, scheduler, cfg_of(scheduler, tmp_path)))
    for role in app.roles:
        assert role.args[1] == "persia_torchrec.job.supervisor"
        assert role.args[1] in request
        assert role.name.isalpha()


def test_the_coordinator_is_the_first_role_and_has_the_number_of_the_others():
    roles = train(servers=2, embedding_workers=3, data_loaders=4)
    counts = {name: role.num_replicas for name, role in roles.items()}
    assert list(counts) == ["coordinator", "server", "worker", "loader", "trainer"]
    assert list(counts.values()) == [1, 2, 3, 4, 1]
    arguments = roles["coordinator"].args
    assert arguments[2] == "--port"
    assert arguments[4:] == [
        *("--servers", "2"),
        *("--embedding-workers", "3"),
        *("--data-loaders", "4"),
        *("--trainers", "1"),
    ]


@pytest.mark.parametrize(
    "name", ["train", "serve", "coordinator", "data_loader", "nn_worker"]
)
def test_a_job_is_rejected_where_the_file_is_of_servers_without_one(tmp_path, name):
    path = tmp_path / "global_config.yml"
    path.write_text(INFER)
    with pytest.raises(
        ConfigError, match=r"must belong to a job that trains. Received"
    ):
        load(name)(**{**COMPONENTS[name], "global_config": str(path)})


def test_a_coordinator_by_itself_has_the_numbers_and_the_place_of_the_job():
    counts = {"servers": 2, "embedding_workers": 0, "trainers": 12}
    given = {**BOOK, **CONFIGS, **counts, "nproc_per_node": 4, "restarts": 0}
    [role] = load("coordinator")(**given).roles
    assert role.args[1:] == [
        *("persia_torchrec.job.coordinator", "--port", "29400"),
        *("--servers", "2", "--embedding-workers", "0", "--data-loaders", "1"),
        *("--trainers", "12", "--predictors", "0", "--nproc-per-node", "4"),
    ]
    assert role.env["PERSIA_STORE_HOST"] == BOOK["host"]
    assert role.num_replicas == 1
    assert role.max_retries == 0


def test_a_job_may_have_no_embedding_workers():
    roles = train(embedding_workers=0, data_loaders=2)
    assert list(roles) == ["coordinator", "server", "loader", "trainer"]
    arguments = roles["coordinator"].args
    assert arguments[arguments.index("--embedding-workers") + 1] == "0"


def test_a_job_of_torchrec_has_servers_and_trainers_and_no_yaml():
    app = load("train_torchrec")(
        **COMPONENTS["train_torchrec"],
        servers=2,
        trainers=3,
        capacity=5000,
        increments_dir="/all/increments",
        restarts=0,
        max_retries=0,
    )
    roles = {role.name: role for role in app.roles}
    counts = {name: role.num_replicas for name, role in roles.items()}
    assert counts == {"coordinator": 1, "server": 2, "trainer": 3}
    arguments = roles["coordinator"].args[4:]
    assert arguments == ["--servers", "2", "--trainers", "3"]
    assert roles["server"].args[1:] == [
        *("persia_torchrec.server", "--eviction", "lru", "--capacity", "5000"),
        *("--increments-dir", "/all/increments"),
    ]
    for role in roles.values():
        files = [value for name, value in role.env.items() if name.endswith("_CONFIG")]
        assert files == ["", ""]  # also where the shell has exported one


def test_every_role_has_the_address_of_the_job_and_its_index():
    for role in train(port=29400, trainers=2, env={"LOG_LEVEL": "DEBUG"}).values():
        assert role.env == {
            "PERSIA_STORE_PORT": "29400",
            "PERSIA_STORE_HOST": "",
            "PERSIA_STORE_HOST_ENV": "${rank0_env}",
            "PERSIA_JOB_TOKEN_FILE": os.environ["PERSIA_JOB_TOKEN_FILE"],
            "PERSIA_JOB_ID": "${app_id}",
            "PERSIA_JOIN_TIMEOUT_S": "600",
            "REPLICA_INDEX": "${replica_id}",
            "REPLICA_SIZE": str(role.num_replicas),
            "PERSIA_EMBEDDING_CONFIG": "embedding.yml",
            "PERSIA_GLOBAL_CONFIG": "global.yml",
            "PERSIA_METRICS_PORT": "",  # also where the shell has exported one
            "PYTHONUNBUFFERED": "1",
            "LOG_LEVEL": "DEBUG",
        }


def test_the_coordinator_has_the_port_of_metrics_and_others_take_later_ones(
    monkeypatch, tmp_path
):
    def ports(**given):
        roles = train(metrics_port=9464, **given)
        return {name: role.env["PERSIA_METRICS_PORT"] for name, role in roles.items()}

    assert ports() == {
        "coordinator": "9464",
        **dict.fromkeys(("server", "worker", "loader", "trainer"), "9465"),
    }
    own = ports(roles="server.env.PERSIA_METRICS_PORT=9600")
    assert (own["server"], own["worker"]) == ("9600", "9465")
    alone = load("embedding_server")(**COMPONENTS["embedding_server"], metrics_port=7)
    assert alone.roles[0].env["PERSIA_METRICS_PORT"] == "7"
    for port in (-1, 65_536):
        with pytest.raises(ConfigError, match=r"metrics_port must be in \[0, 65535\]"):
            train(metrics_port=port)


def test_roles_that_serve_metrics_have_the_token_of_http_if_there_is_one(
    monkeypatch, tmp_path
):
    def tokens(**given):
        found = (
            role.env.get("PERSIA_HTTP_TOKEN_FILE") for role in train(**given).values()
        )
        return set(found)

    assert tokens(metrics_port=9464) == {None}
    monkeypatch.setenv("PERSIA_HTTP_TOKEN_FILE", str(tmp_path / "token"))
    assert tokens() == {None}
    assert tokens(metrics_port=9464) == {str(tmp_path / "token")}


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_role_learns_how_long_a_start_may_take(name):
    for role in load(name)(**COMPONENTS[name], join_timeout_s=2.5).roles:
        assert role.env["PERSIA_JOIN_TIMEOUT_S"] == "2.5"


def test_no_two_roles_share_their_variables():
    variables = [id(role.env) for role in train().values()]
    assert len(set(variables)) == len(variables)


def test_a_port_is_chosen_when_none_is_named():
    assert int(train()["server"].env["PERSIA_STORE_PORT"]) > 0


def test_a_script_keeps_its_arguments_as_in_a_shell():
    roles = train()
    launcher = ["-m", "persia_torchrec.job.script"]
    assert roles["trainer"].args == [*launcher, "trainer", "train.py", "--epochs", "2"]
    assert roles["loader"].args == [*launcher, "loader", "my loader.py"]


def test_a_script_may_be_a_module():
    given = {"nn_worker": "-m pkg.train --epochs 2", "data_loader": "-m pkg.load"}
    roles = train(**given)
    launcher = ["-m", "persia_torchrec.job.script"]
    words = ["-m", "pkg.train", "--epochs", "2"]
    assert roles["trainer"].args == [*launcher, "trainer", *words]
    assert roles["loader"].args == [*launcher, "loader", "-m", "pkg.load"]
    assert train(**given, restarts=3)["trainer"].args[-5:] == ["--", *words]
    for wrong in ("-m", "--epochs 2"):
        with pytest.raises(ConfigError, match="must be a file, or -m and the name of"):
            train(nn_worker=wrong)


def test_servers_and_workers_have_their_index():
    roles = train(servers=2, eviction="lfu")
    assert roles["server"].args[1:] == ["persia_torchrec.server", "--eviction", "lfu"]
    assert roles["worker"].args[1:] == ["persia_torchrec.worker"]
    for name, size in (("server", "2"), ("worker", "1")):
        assert roles[name].env["REPLICA_INDEX"] == "${replica_id}"
        assert roles[name].env["REPLICA_SIZE"] == size


def test_servers_apply_gradients_as_an_argument_or_the_roles_file_says(tmp_path):
    flags = ["--optimizer-engine", "fbgemm"]
    file = tmp_path / "roles.yml"
    file.write_text("server: {optimizer_engine: fbgemm}")
    for given in (
        {"optimizer_engine": "fbgemm"},
        {"roles_file": str(file)},
        {"roles": "server.optimizer_engine=fbgemm", "optimizer_engine": "fbgemm"},
    ):
        roles = train(**given)
        assert roles["server"].args[-2:] == flags
        assert not any("engine" in word for word in roles["trainer"].args)
    assert flags[0] not in train()["server"].args  # what global_config.yml says holds
    name = "embedding_server"
    (role,) = load(name)(**COMPONENTS[name], optimizer_engine="fbgemm").roles
    assert role.args[-2:] == flags


def test_roles_that_recover_have_a_supervisor():
    changes = {"python": "python3.12", "port": 29400}
    roles = train(restarts=3, memory_dir="/fast", **changes)
    survives = {
        "coordinator": ["--host", "all", "--port", "29400"],
        "server": ["--port", "0", "--memory-dir", "/fast"],
        "worker": ["--port", "0", "--memory-dir", "private"],
        "loader": ["--memory-dir", "private"],
        "trainer": ["--memory-dir", "private"],
    }
    own = {name: role.args for name, role in train(**changes).items()}
    own["coordinator"] += ["--recovery-timeout-s", "600.0", "--restarts", "3"]
    own["server"] += ["--run-dir", "runs/${app_id}"]
    script = ["--nproc-per-node", "1", "--", "train.py", "--epochs", "2"]
    own["trainer"] = ["-m", "persia_torchrec.job.torchrun", *script]
    for name, role in roles.items():
        supervisor = ["-m", "persia_torchrec.job.supervisor", *survives[name]]
        assert role.args == [*supervisor, "--", "python3.12", *own[name]]
    private = ["--memory-dir", "private", "--"]
    _, server, _, predictor = serve(restarts=3).values()
    assert server.args[2:7] == ["--port", "0", *private]
    assert predictor.args[2:5] == private


def test_torchrun_starts_several_nn_workers_in_each_replica():
    roles = train(trainers=8, nproc_per_node=4)
    assert roles["trainer"].num_replicas == 2
    torchrun = ["-m", "persia_torchrec.job.torchrun", "--nproc-per-node", "4"]
    assert roles["trainer"].args[:7] == [*torchrun, "--max-restarts", "0", "--"]
    assert roles["coordinator"].args[10:] == [
        *("--trainers", "8", "--nproc-per-node", "4")
    ]
    restarted = load("nn_worker")(**COMPONENTS["nn_worker"], nproc_per_node=4)
    assert "--max-restarts" not in restarted.roles[0].args


@pytest.mark.parametrize("name", ["train", "train_torchrec", "serve"])
def test_slurm_and_volcano_restart_the_whole_job(runner, tmp_path, name):
    arguments = COMPONENTS[name]
    if name == "train":
        arguments = {**arguments, "env": {"PERSIA_CHECKPOINT_DIR": "/all/run"}}
    app = load(name)(**arguments)
    script = str(runner.dryrun(app, "slurm", cfg_of("slurm", tmp_path)))
    assert "export TORCHX_MAX_RETRIES=3" in script
    assert "--requeue" in script
    assert 'PERSIA_JOB_ID="$SLURM_JOB_ID"' in script
    job = yaml.safe_load(str(runner.dryrun(app, "kubernetes", {"queue": "default"})))
    assert job["spec"]["maxRetry"] == 3
    restarts = [
        {"event": event, "action": "RestartJob"}
        for event in ("PodEvicted", "PodFailed")
    ]
    assert all(task["policies"] == restarts for task in job["spec"]["tasks"])
    job_id = job["metadata"]["name"]
    for task in job["spec"]["tasks"]:
        (container,) = task["template"]["spec"]["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env["PERSIA_JOB_ID"] == job_id  # the same in each start
        if name == "train" and task["name"] == "server-0":
            assert container["command"][-2:] == ["--run-dir", f"/all/run/{job_id}"]
            assert '--run-dir /all/run/"$SLURM_JOB_ID"' in script
    for given, number in (({"max_retries": 0}, 0), ({"restarts": 0}, 3)):
        once = load(name)(**arguments, **given)
        assert {role.max_retries for role in once.roles} == {number}


def test_a_job_may_continue_another():
    for given in ({"run_dir": "/all/7"}, {"env": {"PERSIA_RUN_DIR": "/all/7"}}):
        roles = train(restarts=3, **given)
        assert roles["server"].args[-2:] == ["--run-dir", "/all/7"]
        assert roles["trainer"].env["PERSIA_RUN_DIR"] == "/all/7"


def slurm_steps(runner, folder, **changes):
    """Return what srun runs, by role and index, each a list of words."""
    app = load("train")(**{**COMPONENTS["train"], **changes})
    script = str(runner.dryrun(app, "slurm", cfg_of("slurm", folder)))
    steps = re.search(r"^srun (.*?)^exitcode", script, re.DOTALL | re.MULTILINE)[1]
    found = {}
    for step in steps.split(":\\\n"):
        words = shlex.split(step)
        log = next(word for word in words if word.startswith("--error="))
        found[log.removesuffix(".err").partition("$SLURM_JOB_ID-")[2]] = words
    return found


def variables_of(words):
    """Return the variables that ``env`` sets, which are all that srun passes on."""
    assert [word for word in words if word.startswith("--export")] == ["--export=ALL"]
    words = words[words.index("env") + 1 :]
    return dict(word.split("=", 1) for word in words[: words.index("python3")])


AWKWARD = {
    "NICS": "eth0,eth1",
    "NOTE": "it's,LOG_LEVEL=DEBUG",
    "JSON": '{"a": "b c"}',
    "NOTHING": "",
    "URL": "http://h/?a=b&c=$HOME",
    "TWO": "a$$b",
    "LINES": "a\nb",
}


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "DB_PASSWORD"),
        *("db_password_2", "TOKEN", "AZURE_STORAGE_CONNECTION_STRING", "WANDB_API_KEY"),
    ],
)
def test_a_secret_is_on_no_command_line_of_slurm(runner, tmp_path, name):
    must = rf"env must hold no secret on Slurm.*Received: {name}\..*shell.*file"
    for changes in (
        {"env": {name: "hunter2"}},
        {"roles": f"server.env.{name}=hunter2"},
    ):
        with pytest.raises(ConfigError, match=must) as caught:
            slurm_steps(runner, tmp_path, **changes)
        assert "hunter2" not in str(caught.value)


def test_a_password_in_a_url_is_on_no_command_line_of_slurm(runner, tmp_path):
    url = "http://user:hunter2@proxy:3128"
    with pytest.raises(ConfigError, match="Received: HTTPS_PROXY"):
        slurm_steps(runner, tmp_path, env={"HTTPS_PROXY": url})


def test_variables_that_are_no_secrets_are_taken_on_slurm(runner, tmp_path):
    given = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SHARED_CREDENTIALS_FILE": "/shared/aws",
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "512",
        "HF_TOKEN": "",
        "KEY": "item",
    }
    for words in slurm_steps(runner, tmp_path, env=given).values():
        assert variables_of(words).items() >= given.items()


def test_a_job_s_variables_win_on_slurm_and_are_not_cut(runner, tmp_path):
    steps = slurm_steps(
        runner, tmp_path, env=AWKWARD, roles="server.env.LOG_LEVEL=DEBUG"
    )
    for name, words in steps.items():
        found = variables_of(words)
        assert found.items() >= AWKWARD.items()
        assert found["PERSIA_STORE_PORT"] == "29400"
        assert found["PERSIA_STORE_HOST"] == ""  # of another job, if the shell has one
        assert found["REPLICA_INDEX"] == name.rpartition("-")[2]
        assert found["PERSIA_JOB_ID"] == "$SLURM_JOB_ID"
    assert variables_of(steps["server-0"])["LOG_LEVEL"] == "DEBUG"


def test_srun_gets_the_processors_of_a_role(runner, tmp_path):
    steps = slurm_steps(runner, tmp_path, roles="server.cpu=8 trainer.cpu=500m")
    cpus = {
        name: [word for word in words if word.startswith("--cpus")]
        for name, words in steps.items()
    }
    assert cpus.pop("server-0") == ["--cpus-per-task=8"]
    assert cpus.pop("trainer-0") == ["--cpus-per-task=1"]
    assert set(map(len, cpus.values())) == {0}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_two_dollars_arrive_as_two(runner, tmp_path, scheduler):
    given = {"nn_worker": "train.py 'a$$b' $${app_id}", "env": {"TWO": "a$$b"}}
    app = load("train")(**{**COMPONENTS["train"], **given})
    cfg = cfg_of(scheduler, tmp_path)
    request = runner.dryrun(app, scheduler, cfg).request
    if scheduler == "local_cwd":
        [replica] = request.role_params["trainer"]
        words, variables = replica.args, replica.env
    elif scheduler == "slurm":
        replica = request.replicas["trainer-0"]
        words, variables = (
            replica.args,
            variables_of(["--export=ALL", "env", *replica.args]),
        )
    else:  # which makes one of two, too
        pod = request.resource["spec"]["tasks"][-1]["template"]
        [container] = pod["spec"]["containers"]
        words = [word.replace("$$", "$") for word in container["command"]]
        variables = {
            one["name"]: one.get("value", "").replace("$$", "$")
            for one in container["env"]
        }
    assert words[-2:] == ["a$$b", "$${app_id}"]
    assert variables["TWO"] == "a$$b"


def test_a_component_has_the_arguments_of_its_roles_alone():
    shared = {field.name for field in dataclasses.fields(JobSettings)}
    offered = {}
    for name in COMPONENTS:
        parameters = inspect.signature(load(name)).parameters
        offered[name] = shared & parameters.keys()
        lines = load(name).__doc__.splitlines()
        documented = {line.strip().partition(":")[0] for line in lines}
        assert parameters.keys() <= documented
    whole = shared - {"host"}
    assert offered["train"] == whole
    assert offered["train_torchrec"] == whole - CONFIGS.keys()
    of_training = {"memory_dir", "nproc_per_node", "optimizer_engine", "run_dir"}
    assert offered["serve"] == whole - of_training
    of_jobs = {"recovery_timeout_s", "max_retries", "run_dir"}
    jobs = {"train", "train_torchrec", "serve"}
    single = {name: found for name, found in offered.items() if name not in jobs}
    of_coordinators = {"recovery_timeout_s"}
    for name, found in single.items():
        own = of_coordinators if name == "coordinator" else set()
        assert found & of_jobs == own
        assert ("memory_dir" in found) == name.endswith("server")
        assert ("optimizer_engine" in found) == name.endswith("server")
        assert ("imports" in found) == name.startswith("embedding")


def test_image_and_interpreter_are_passed_on_unchanged():
    for role in train(image="registry/persia:1", python="python3.12").values():
        assert (role.image, role.entrypoint) == ("registry/persia:1", "python3.12")


def test_only_the_nn_workers_ask_for_gpus():
    gpus = {name: role.resource.gpu for name, role in train(gpus=2).items()}
    assert gpus.pop("trainer") == 2
    assert set(gpus.values()) == {0}


def test_a_job_without_loaders_leaves_the_role_out():
    assert "loader" not in train(data_loaders=0, data_loader="")


def test_a_single_role_has_the_host():
    name = "embedding_server"
    (role,) = load(name)(**COMPONENTS[name]).roles
    assert role.env["PERSIA_STORE_HOST"] == "10.0.0.7"
    assert "PERSIA_STORE_HOST_ENV" not in role.env
    assert "PERSIA_JOB_ID" not in role.env  # it joins whichever job is there


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servers": 0}, r"servers must be >= 1\. Received: 0"),
        (
            {"optimizer_engine": "fast"},
            r"must be one of compiled, fbgemm\. Received: 'fast'",
        ),
        (
            {"optimizer_engine": "compiled", "roles": "server.optimizer_engine=fbgemm"},
            r"must be the same, or one .* left out\. Received: compiled and fbgemm",
        ),
        ({"roles": "trainer.optimizer_engine=fbgemm"}, "optimizer_engine"),
        ({"eviction": "fifo"}, r"eviction must be lru or lfu\. Received: 'fifo'"),
        ({"embedding_workers": -1}, "embedding_workers must be >= 1"),
        ({"data_loaders": -1}, "data_loaders must be >= 1"),
        ({"trainers": 0}, "trainers must be >= 1"),
        ({"gpus": -1}, "gpus must be >= 0"),
        ({"nproc_per_node": 0}, r"nproc_per_node must be >= 1\. Received: 0"),
        ({"join_timeout_s": 0}, r"join_timeout_s must be > 0\. Received: 0"),
        ({"port": 65_536}, r"\[1, 65535\]\. Received: 65536"),
        ({"nn_worker": ""}, "nn_worker must name a file"),
        ({"data_loader": " "}, "data_loader must name a file"),
        ({"embedding_config": ""}, "embedding_config must name a file"),
        ({"global_config": ""}, "global_config must name a file"),
        ({"nn_worker": "'train.py"}, "as in a shell"),
        ({"env": {"my var": "1"}}, "Variables must have names.*Received: 'my var'"),
        ({"env": {"REPLICA_INDEX": "1"}}, r"sets itself\. Received: \['REPLICA_INDEX'"),
    ],
)
def test_an_invalid_argument_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        train(**changes)


def serve(**changes):
    arguments = {**CONFIGS, "checkpoint": "runs/7", "restarts": 0, **changes}
    app = load("serve")(**arguments)
    return {role.name: role for role in app.roles}


def test_an_inference_job_has_no_trainers():
    roles = serve(servers=2, embedding_workers=3, predictors=4)
    counts = {name: role.num_replicas for name, role in roles.items()}
    assert counts == {"coordinator": 1, "server": 2, "worker": 3, "predictor": 4}
    assert next(iter(counts)) == "coordinator"
    assert roles["coordinator"].args[4:] == [
        *("--servers", "2", "--embedding-workers", "3", "--predictors", "4")
    ]
    assert roles["server"].args[-2:] == ["--checkpoint", "runs/7"]
    assert roles["worker"].args[-1] == "--learn-tables"
    assert roles["predictor"].args[1:] == [
        *("persia_torchrec.serving", "--checkpoint", "runs/7"),
        *("--host", "127.0.0.1", "--port", "8080", "--workers-of-job"),
        *("--device", "auto"),
    ]
    on_gpu = serve(device="cuda")["predictor"]
    assert on_gpu.args[-2:] == ["--device", "cuda"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": ""}, "checkpoint must name a file"),
        ({"predictors": 0}, "predictors must be >= 1"),
        ({"http_port": 0}, r"http_port must be in \[1, 65535\], with"),
        ({"http_port": 65_535, "predictors": 2}, "Received: 65535, and 2 predictors"),
        ({"http_host": ""}, "http_host must name"),
        ({"device": "mps"}, "device must be auto, cpu or cuda. Received: 'mps'"),
    ],
)
def test_invalid_settings_of_an_inference_job_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        serve(**changes)


@pytest.fixture
def roles_file(tmp_path):
    path = tmp_path / "roles.yml"
    path.write_text(ROLES_FILE)
    return str(path)


def test_each_pod_gets_what_its_role_asks_for(runner, roles_file):
    arguments = {**COMPONENTS["train"], "roles_file": roles_file, "roles": WORDS}
    app = load("train")(**arguments)
    job = yaml.safe_load(str(runner.dryrun(app, "kubernetes", {"queue": "default"})))
    pods = {task["name"]: task["template"]["spec"] for task in job["spec"]["tasks"]}
    servers = [f"server-{index}" for index in range(3)]
    trainers = ["trainer-0", "trainer-1"]
    assert list(pods) == ["coordinator-0", *servers, "worker-0", "loader-0", *trainers]
    containers = {name: pod["containers"][0] for name, pod in pods.items()}
    limits = {name: c["resources"]["limits"] for name, c in containers.items()}
    assert limits == {
        "coordinator-0": {"cpu": "500m", "memory": "2148M"},
        **{name: {"cpu": "16000m", "memory": "68720M"} for name in servers},
        "worker-0": {},
        "loader-0": {},
        **{name: {"nvidia.com/gpu": "1"} for name in trainers},
    }
    images = {name: container["image"] for name, container in containers.items()}
    assert images.pop("loader-0") == "registry/loader:1"
    assert set(images.values()) == {"registry/job:7"}
    claim = {"claimName": "census"}
    for pod in pods.values():
        assert pod["volumes"][1] == {"name": "mount-0", "persistentVolumeClaim": claim}
    host = {"name": "mount-1", "hostPath": {"path": "/mnt/ssd"}}
    assert pods["server-2"]["volumes"][2:] == [host]
    mounts = containers["worker-0"]["volumeMounts"][1:]
    assert [(m["mountPath"], m["readOnly"]) for m in mounts] == [
        *(("/data", True), ("/b", False), ("/d", True))
    ]
    env = {e["name"]: e.get("value") for e in containers["trainer-1"]["env"]}
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (env["LOG_LEVEL"], env["REPLICA_SIZE"]) == ("INFO", "2")
    env = {e["name"]: e.get("value") for e in containers["loader-0"]["env"]}
    assert env["LOG_LEVEL"] == "a b"
    flags = containers["coordinator-0"]["command"]
    assert flags[flags.index("--servers") + 1] == "3"


def test_slurm_gets_processors_memory_and_gpus(runner, tmp_path, roles_file):
    arguments = {**COMPONENTS["train"], "roles_file": roles_file}
    app = load("train")(**arguments)
    script = str(runner.dryrun(app, "slurm", cfg_of("slurm", tmp_path)))
    assert script.count("--cpus-per-task=8 --mem=65536") == 3
    assert script.count("--gpus-per-task=1") == 2


def test_every_component_takes_settings_of_its_roles(roles_file):
    for name, arguments in COMPONENTS.items():
        # Arguments that the file would contradict.
        given = {k: v for k, v in arguments.items() if k not in ("servers", "gpus")}
        app = load(name)(**given, roles_file=roles_file, roles="all.cpu=3 server.cpu=7")
        for role in app.roles:
            cpus = {"server": 7, "coordinator": 0.5}
            assert role.resource.cpu == cpus.get(role.name, 3)


def test_a_file_may_leave_the_loaders_out():
    assert "loader" not in train(roles="loader.replicas=0")
    assert train(roles="loader.replicas=3")["loader"].num_replicas == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("servr.cpu=8", r"servr is unknown\. Did you mean 'server'"),
        ("server.cpus=8", r"server\.cpus is unknown\. Did you mean 'cpu'"),
        ("server.cpu=all", "server: cpu and memory must be numbers, with one of"),
        ("server.memory=64GiB", "Received: '64GiB'"),
        ("server.cpu=0", r"server: cpu must be > 0\. Received: 0"),
        ("server.memory=-1", "memory must be > 0"),
        (
            "server.memory=64",
            "at least 64Mi. Received: 64, which is 64 bytes. Write 64G",
        ),
        (
            "server.memory=512m",
            "Received: '512m', which is 0.512 bytes. Write 512Gi or",
        ),
        ("server.memory=0.5", "at least 64Mi. Received: '0.5'"),
        ("all.memory=64k", "at least 64Mi. Received: '64k', which is 64000 bytes"),
        ("server.cpu=8Gi", "cpu must be a number of processors, for example 8 or 500m"),
        ("server.cpu=0.0001", "at least 1m. Received: '0.0001'"),
        ("server.env.my-var=1", "letters, digits and _, and no digit first. Received"),
        ("server.env.2ND=1", "Variables must have names"),
        ("loader.secrets.a.b=c/d", "Variables must have names"),
        ("server.volumes=My_Claim:/d", "a claim's name of lower case.*'My_Claim:/d'"),
        ("all.volumes=shm:/dev/shm", "none at /dev/shm, which is memory"),
        ("all.volumes=shm:/dev/shm/", "none at /dev/shm, which is memory"),
        ("server.volumes=a:/d,b:/d/", "one volume at a path"),
        ("trainer.gpus=one", r"trainer\.gpus must be an integer"),
        ("trainer.gpus=-1", r"trainer\.gpus must be .*Received: '-1'"),
        ("server.volumes=data", "CLAIM:/PATH or /PATH_OF_HOST:/PATH.*'data'"),
        ("server.volumes=a:/d,b:/d", "one volume at a path"),
        ("all.volumes=a:/d server.volumes=b:/d", "one volume at a path"),
        ("all.replicas=2", r"all\.replicas must be left out"),
        ("coordinator.replicas=2", r"coordinator\.replicas must be left out"),
        ("server.replicas=0", "servers must be >= 1"),
        ("server.env.REPLICA_INDEX=1", r"sets itself\. Received: \['REPLICA_INDEX'"),
    ],
)
def test_an_invalid_setting_is_rejected(words, message):
    with pytest.raises(ConfigError, match=message):
        train(roles=words)


def test_an_argument_and_a_setting_must_not_differ():
    same = "must be the same, or one of them left out"
    with pytest.raises(ConfigError, match=rf"{same}\. Received: 3 and 2"):
        train(servers=3, roles="server.replicas=2")
    with pytest.raises(
        ConfigError,
        match=rf"gpus and trainer.gpus {same}\. Received: 1 and 2",
    ):
        train(gpus=1, roles="trainer.gpus=2")
    assert train(gpus=2, roles="trainer.gpus=2")["trainer"].resource.gpu == 2


def test_a_file_with_a_mistake_is_named(tmp_path):
    path = tmp_path / "roles.yml"
    with pytest.raises(ConfigError, match=r"roles\.yml must be a text file"):
        train(roles_file=str(path))
    path.write_text("server: {env: {THREADS: 8}}")
    with pytest.raises(ConfigError, match=r"roles\.yml: server\.env\.THREADS must"):
        train(roles_file=str(path))
    path.write_text("server: {cpu: 8}\n---\nserver: {cpu: 9}")
    with pytest.raises(ConfigError, match="must be one document"):
        train(roles_file=str(path))


@pytest.mark.multiprocess
def test_plain_torchx_run_is_the_example_and_its_arguments_can_be_changed(tmp_path):
    command = [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun"]
    changed = subprocess.run(
        [*command, "--", "--servers", "3"],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "'examples/adult_income/train.py'" in changed
    assert "'num_replicas': 3" in changed
    assert "/runs/persia-" in changed


def test_every_file_that_torchxconfig_names_is_there():
    text = (ROOT / ".torchxconfig").read_text()
    files = [word for word in text.split() if word.startswith("examples/")]
    assert len(files) == 4
    assert [name for name in files if not (ROOT / name).is_file()] == []
