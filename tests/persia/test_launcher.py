"""What each command turns into; whole jobs are in tests/integration."""

import importlib
import json
import os
import subprocess
import sys
import tomllib

import pytest

from persia_torchrec import env
from persia_torchrec.persia import launcher
from tests.support.processes import DEADLINE_S, Processes
from tests.support.repository import ROOT
from tests.support.script_jobs import INFER, Job

pytestmark = pytest.mark.slow

SLOTS = "slots_config: {item: {dim: 4}}"
CONFIGS = ["--embedding-config", "e.yml", "--global-config", "g.yml"]


class Became(Exception):  # noqa: N818  # not an error
    """Raised where a command would turn into a process."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command)
        self.command = command


@pytest.fixture(autouse=True)
def _an_environment_of_its_own(monkeypatch, tmp_path):
    def become(file, command):
        assert file == command[0] == sys.executable
        raise Became(command[1:])

    monkeypatch.setattr(os, "environ", {"PERSIA_STORE_PORT": "29400"})
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.yml").write_text(SLOTS)
    for name in (
        "g.yml",
        "train.py",
        "load.py",
        "script.py",
        "a.py",
        "pkg.py",
        "other.py",
        "other.yml",
    ):
        (tmp_path / name).touch()


def becomes(*arguments):
    """Return the command that one of the launcher's turns into, as one line."""
    with pytest.raises(Became) as became:
        launcher.main(arguments)
    return " ".join(became.value.command)


def configs():
    """Return the paths that the process finds in its environment."""
    return env.embedding_config_path(), env.global_config_path()


def rejection_of(arguments):
    """Return the message with which a command ends."""
    with pytest.raises(SystemExit) as rejected:
        launcher.main(arguments)
    return rejected.value.code


def test_a_parameter_server_has_persias_default_port_and_index():
    command = "embedding-parameter-server"
    assert becomes(command, *CONFIGS) == "-m persia_torchrec.server --port 8888"
    assert configs() == ("e.yml", "g.yml")
    assert (env.get_replica_index(), env.get_replica_size()) == (0, 1)
    others = ["--port", "10001", "--replica-index", "1", "--replica-size", "3"]
    assert "--port 10001" in becomes(command, *CONFIGS, *others)
    assert (env.get_replica_index(), env.get_replica_size()) == (1, 3)


def test_an_embedding_worker_has_persias_default_port_and_index():
    assert becomes("embedding-worker", *CONFIGS, "--replica-size", "2") == (
        "-m persia_torchrec.worker --port 8887"
    )
    assert configs() == ("e.yml", "g.yml")
    assert (env.get_replica_index(), env.get_replica_size()) == (0, 2)


def test_all_commands_may_have_a_supervisor():
    def supervised(flags, command):
        supervisor = f"-m persia_torchrec.job.supervisor {flags}"
        return f"{supervisor} -- {sys.executable} -m persia_torchrec.{command}"

    server = becomes("embedding-parameter-server", *CONFIGS, "--restarts")
    flags = "--port 8888 --memory-dir auto"
    assert server == supervised(flags, "server --port 8888")
    worker = becomes("embedding-worker", *CONFIGS, "--restarts", "--port", "9000")
    flags = "--port 9000 --memory-dir private"
    assert worker == supervised(flags, "worker --port 9000")
    loader = becomes("data-loader", "load.py", "--restarts")
    command = "job.script loader load.py"
    assert loader == supervised("--memory-dir private", command)
    trainers = becomes("nn-worker", "train.py", "--restarts")
    flags = "--nproc-per-node 1 --nnodes 1 --node-rank 0 --max-restarts 3"
    command = f"job.torchrun {flags} -- train.py"
    assert trainers == supervised("--memory-dir private", command)
    coordinator = becomes("coordinator", "--restarts")
    command = "job.coordinator --port 29400"
    assert coordinator.startswith(supervised("--host all --port 29400", command))


def test_the_previous_name_of_a_flag_is_taken_with_a_warning(caplog):
    words = ("embedding-parameter-server", *CONFIGS)
    now = becomes(*words, "--restarts")
    assert becomes(*words, "--recover") == now
    assert "--recover is called --restarts now" in caplog.text


def test_a_server_learns_what_applies_gradients():
    flags = ("--optimizer-engine", "fbgemm")
    server = becomes("embedding-parameter-server", *CONFIGS, *flags)
    assert server == "-m persia_torchrec.server --port 8888 --optimizer-engine fbgemm"


def test_a_data_loader_runs_the_script_named_before_its_options_or_after():
    runs = "-m persia_torchrec.job.script loader load.py"
    assert becomes("data-loader", "load.py") == runs
    options = ["--replica-index", "1", "--replica-size", "2"]
    assert becomes("data-loader", "load.py", *options) == runs
    assert becomes("data-loader", *options, "load.py") == runs
    assert (env.get_replica_index(), env.get_replica_size()) == (1, 2)


def test_words_behind_two_dashes_are_a_scripts_arguments(monkeypatch):
    module = ["-m", "pkg.train", "--epochs", "2"]
    loads = "-m persia_torchrec.job.script loader"
    index = ["--replica-size", "2"]
    words = ["load.py", *index, "--", "--epochs", "2", "--", "a"]
    assert becomes("data-loader", *words) == f"{loads} load.py --epochs 2 -- a"
    assert becomes("data-loader", *index, "--", *words[:1]) == f"{loads} load.py"
    assert becomes("data-loader", "--", *module) == f"{loads} {' '.join(module)}"
    trains = becomes("nn-worker", "--restarts", "--", *module)
    assert trains.endswith(f"--max-restarts 3 -- {' '.join(module)}")
    message = "must be a file, or -m and the name of a module"
    assert message in rejection_of(["nn-worker", "--", "--epochs", "2"])
    words = ["coordinator", "--port", "1", "--", "a"]
    assert "must be of a script, of nn-worker or data-loader" in rejection_of(words)


def test_nn_workers_are_started_by_torchrun():
    of_node = ["--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1"]
    assert becomes("nn-worker", "train.py", *of_node) == (
        f"-m persia_torchrec.job.torchrun {' '.join(of_node)} --max-restarts 3 "
        "-- train.py"
    )


def test_files_may_be_given_by_the_environment(monkeypatch):
    for name, value in {
        "PERSIA_EMBEDDING_CONFIG": "e.yml",
        "PERSIA_GLOBAL_CONFIG": "g.yml",
        "PERSIA_NN_WORKER_ENTRY": "train.py",
        "PERSIA_DATALOADER_ENTRY": "load.py",
    }.items():
        monkeypatch.setenv(name, value)
    assert becomes("nn-worker").endswith(" -- train.py")
    assert becomes("nn-worker", "other.py").endswith(" -- other.py")
    assert becomes("data-loader").endswith(" loader load.py")
    assert becomes("embedding-worker").endswith("worker --port 8887")
    assert becomes("embedding-parameter-server").endswith("server --port 8888")
    assert configs() == ("e.yml", "g.yml")
    becomes("embedding-worker", "--global-config", "other.yml")
    assert configs() == ("e.yml", "other.yml")


def test_the_coordinator_is_given_the_number_of_processes_per_role():
    assert becomes("coordinator") == (
        "-m persia_torchrec.job.coordinator --port 29400 --learn server --learn worker "
        "--learn loader --learn trainer"
    )
    assert becomes("coordinator", "--data-loaders", "0") == (
        "-m persia_torchrec.job.coordinator --port 29400 --data-loaders 0 "
        "--learn server --learn worker --learn trainer"
    )
    assert env.join_timeout_s() == 600
    counts = [
        "--join-timeout-s",
        "3",
        "--embedding-parameter-servers",
        "4",
        "--embedding-workers",
        "3",
    ]
    counts += ["--data-loaders", "0", "--nn-workers", "2", "--port", "1234"]
    assert becomes("coordinator", *counts) == (
        "-m persia_torchrec.job.coordinator --port 1234 --servers 4 "
        "--embedding-workers 3 --data-loaders 0 --trainers 2"
    )
    assert env.join_timeout_s() == 3  # the process reads it there
    becomes("data-loader", "load.py")
    assert env.join_timeout_s() == 3


def test_a_job_is_on_this_machine_unless_a_host_is_named(monkeypatch, capsys):
    becomes("coordinator")
    assert env.is_local_job()
    assert "listens for this machine only" in capsys.readouterr().err
    monkeypatch.setenv("PERSIA_STORE_HOST", "node7")
    becomes("coordinator")
    assert capsys.readouterr().err == ""
    assert env.job_store() == ("node7", 29400, "")
    assert not env.is_local_job()


def test_a_verbose_launcher_shows_what_it_starts(monkeypatch, capsys):
    monkeypatch.setenv("PERSIA_LAUNCHER_VERBOSE", "1")
    becomes("data-loader", "load.py")
    assert "persia_torchrec.job.script loader load.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nn-worker"], "FILE, or PERSIA_NN_WORKER_ENTRY, must name the file"),
        (
            ["embedding-parameter-server", *CONFIGS, "--memory-dir", "/fast"],
            "memory_dir must be left out, as it has no effect without restarts",
        ),
        (["data-loader"], "FILE, or PERSIA_DATALOADER_ENTRY, must name the file"),
        (["coordinator", "--join-timeout-s", "0"], "(--join-timeout-s) must be a numb"),
        (["embedding-worker"], "--embedding-config, or PERSIA_EMBEDDING_CONFIG, must"),
        (
            ["embedding-parameter-server", "--embedding-config", "e.yml"],
            "--global-config, or PERSIA_GLOBAL_CONFIG, must name the file",
        ),
        (
            ["embedding-worker", *CONFIGS, "--replica-index", "1"],
            "--replica-index must be in [0, 1), below --replica-size. Received: 1",
        ),
        (
            ["nn-worker", "train.py", "--nproc-per-node", "0"],
            "--nproc-per-node must be >= 1. Received: 0",
        ),
        (
            ["nn-worker", "train.py", "--node-rank", "2", "--nnodes", "2"],
            "--node-rank must be in [0, 2), below --nnodes. Received: 2",
        ),
        (
            ["embedding-parameter-server", *CONFIGS, "--embedding-config", "no.yml"],
            "no.yml must be a text file that can be read",
        ),
        *(
            ([command, *CONFIGS, *flags], message)
            for command in ("embedding-worker", "embedding-parameter-server")
            for flags, message in (
                (["--embedding-config", "no.yml"], "no.yml must be a text file"),
                (["--global-config", "no.yml"], "no.yml must be a text file that can"),
                (["--global-config", "e.yml"], "e.yml: slots_config is unknown"),
                (["--embedding-config", "g.yml"], "g.yml must have the key 'slots_con"),
            )
        ),
        *(
            ([command, *words], message)
            for command in ("nn-worker", "data-loader")
            for words, message in (
                (["no.py"], "The script must exist. Received: 'no.py', looked for in"),
                (["--", "-m", "no.t"], "The module must exist. Received: 'no.t', look"),
            )
        ),
    ],
)
def test_an_invalid_command_ends_with_the_reason(arguments, message):
    assert message in rejection_of(arguments)


def test_the_installed_command_is_this_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["persia-launcher"].partition(":")
    assert getattr(importlib.import_module(module), function) is launcher.main


def test_the_module_runs_as_the_command(monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    command = [sys.executable, "-m", "persia_torchrec.launcher"]
    ended = subprocess.run(
        [*command, "coordinator"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("persia-launcher: The coordinator, without --port")


def test_without_a_coordinator_nothing_starts(monkeypatch):
    monkeypatch.delenv("PERSIA_STORE_PORT")
    for arguments in (["nn-worker", "a.py"], ["data-loader", "a.py"], ["coordinator"]):
        assert "PERSIA_STORE_PORT is not set" in rejection_of(arguments)


def test_inference_needs_no_coordinator(monkeypatch, tmp_path):
    monkeypatch.delenv("PERSIA_STORE_PORT")
    for command in ("embedding-worker", "embedding-parameter-server"):
        (tmp_path / "g.yml").write_text("")
        assert "PERSIA_STORE_PORT is not set" in rejection_of([command, *CONFIGS])
        (tmp_path / "g.yml").write_text(INFER)
        becomes(command, *CONFIGS)
        (tmp_path / "g.yml").write_text("zzz: 1")
        assert "zzz is unknown" in rejection_of([command, *CONFIGS])


@pytest.mark.parametrize("command", ["coordinator", "nn-worker", "data-loader"])
def test_training_roles_are_rejected_for_inference(monkeypatch, tmp_path, command):
    (tmp_path / "g.yml").write_text(INFER)
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", "g.yml")
    arguments = [command] if command == "coordinator" else [command, "script.py"]
    assert "must belong to a job that trains. Received: job_t" in rejection_of(
        arguments
    )


@pytest.mark.parametrize(
    ("url", "store"),
    [
        ("nats://0.0.0.0:4333", ("localhost", 4333)),
        ("nats://nats", ("nats", 4222)),
        ("nats://user:word@10.0.0.7:4222/,nats://10.0.0.8:4222", ("10.0.0.7", 4222)),
        ("localhost:4222", ("localhost", 4222)),
        ("nats://[fd00::7]", ("fd00::7", 4222)),
        ("nats://user@10.0.0.7", ("10.0.0.7", 4222)),
    ],
)
def test_the_place_of_nats_is_that_of_the_coordinator(monkeypatch, capsys, url, store):
    monkeypatch.delenv("PERSIA_STORE_PORT")
    monkeypatch.setenv("PERSIA_NATS_URL", url)
    for words in (["data-loader", "load.py"], ["coordinator"]):
        becomes(*words)
        assert env.job_store() == (*store, "")
        told = capsys.readouterr().err
        assert f"roles meet at the coordinator at {store[0]}:{store[1]}. Start" in told
        assert "PERSIA_STORE_PORT and PERSIA_STORE_HOST say where it is" in told
        assert "word" not in told
        assert "user" not in told


@pytest.mark.parametrize(
    "place", ["user:word@nats:port", "user:word/@nats:1", "user:w"]
)
def test_a_url_of_no_port_is_rejected_with_what_to_set(monkeypatch, place):
    monkeypatch.delenv("PERSIA_STORE_PORT")
    monkeypatch.setenv("PERSIA_NATS_URL", f"nats://{place}")
    told = rejection_of(["coordinator"])
    assert "PERSIA_NATS_URL must be nats://HOST:PORT, where the coordinator is" in told
    assert "set PERSIA_STORE_PORT and PERSIA_STORE_HOST" in told
    assert "word" not in told
    assert "user" not in told


def test_a_coordinator_that_is_named_is_not_looked_for_at_that_of_nats(
    monkeypatch, capsys
):
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://nats:4222")
    becomes("data-loader", "load.py")
    assert env.job_store() == ("localhost", 29400, "")
    assert "at the coordinator at localhost:29400" in capsys.readouterr().err


@pytest.mark.parametrize("name", env.REJECTED)
def test_an_unsupported_variable_is_rejected_with_the_reason(monkeypatch, name):
    harmless, reason = env.REJECTED[name]
    monkeypatch.setenv(name, harmless)
    becomes("data-loader", "load.py")
    monkeypatch.setenv(name, "nats://0.0.0.0:4222")
    error = rejection_of(["data-loader", "load.py"])
    assert f"{name} must not be set. Received: 'nats://0.0.0.0:4222'" in error
    assert reason in error


def test_an_unknown_command_is_rejected_with_a_list_of_commands(capsys):
    with pytest.raises(SystemExit):
        launcher.main(["trainer", "train.py"])
    assert "'embedding-parameter-server'" in capsys.readouterr().err


TELL = """
import json, os
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, {name: int(os.environ[name]) for name in names})
if dist.get_rank() == 0:
    print(json.dumps(ranks))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_nn_workers_of_two_nodes_rendezvous(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "train.py").write_text(TELL)
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=3)
        nodes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "persia_torchrec.persia.launcher"),
                    *("nn-worker", "train.py", "--nnodes", "2"),
                    *("--node-rank", str(node), "--nproc-per-node", str(2 - node)),
                ],
                cwd=tmp_path,
                env={
                    "PATH": os.defpath,
                    "PYTHONPATH": str(ROOT),
                    "PERSIA_STORE_PORT": str(job.port),
                    "PERSIA_JOB_TOKEN_FILE": os.environ["PERSIA_JOB_TOKEN_FILE"],
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in (1, 0)
        ]
        try:
            output = "".join(node.communicate(timeout=DEADLINE_S)[0] for node in nodes)
        finally:
            for node in nodes:
                node.kill()
        assert [node.returncode for node in nodes] == [0, 0]
        assert job.coordinator.status() == 0
    (line,) = [line for line in output.splitlines() if line.startswith("[")]
    keys = ["RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"]
    found = [[rank[key] for key in keys] for rank in json.loads(line)]
    pair, single = [(0, 2), (1, 2)], [(0, 1)]  # torchrun orders the nodes itself
    nodes = [pair, single] if found[1][1] == 0 else [single, pair]
    assert found == [
        [rank, node, local, size, 3]
        for rank, (node, (local, size)) in enumerate(
            (node, place) for node, places in enumerate(nodes) for place in places
        )
    ]
