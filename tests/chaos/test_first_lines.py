"""Faults of a job, as its operator sees them: the first line of ``status``.

It has who, since when, and a command. The command is run as it is printed, by a shell;
then the job trains on, or the command has said why not. A signal, a full file system, a
limit of memory, a network that is cut, a port or a script makes the fault.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.endless_script import SCRIPT
from tests.support.hosts import Hosts, run_on
from tests.support.persia_scripts import DATA_LOADER, Scripts
from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S, wait_until
from tests.support.repository import ROOT
from tests.support.torchx_jobs import TorchxJob

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LINE = re.compile(r"(?P<text>.*), for (?P<since>[\dhms.]+)\. Run: (?P<command>.+)")
FULL = "No space left on device"
FEATURES = "        features ="
IMPORTS = "import pathlib, resource, time,"
MANY_IDS = """
        ids = torch.randint(0, 100_000, (6,))
"""
STEP = "        run.step()\n"
HANGS = """
        while pathlib.Path('hang').exists():
            time.sleep(0.02)
"""
NEEDS_MEMORY = """
        if pathlib.Path('short').exists():
            used = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
            limit = used * resource.getpagesize() + 2**26
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            torch.zeros(2**28)
"""


class Operator:
    """Looks at the jobs of a home, and runs what is printed, maybe on a host."""

    def __init__(self, home, run=None):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
        token = "PERSIA_JOB_TOKEN_FILE"
        self._env = {"HOME": str(home), "PATH": path, token: os.environ[token]}
        self._home = home
        self._run_there = run

    def run(self, command):
        """Run a command by a shell; return its result, with all that it prints."""
        if self._run_there is not None:
            output = self._run_there(command, self._env, self._home)
            return subprocess.CompletedProcess(command, 0, output)
        return subprocess.run(
            command,
            shell=True,
            cwd=self._home,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def start(self, command):
        """Begin a command that does not end by itself, in a session of its own."""
        return subprocess.Popen(
            command,
            shell=True,
            cwd=self._home,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def reads(self, pattern, job=""):
        """Wait until the first line has a text; return its command."""
        last = ""

        def has_it():
            nonlocal last
            last, _, _ = self.run(f"persia-torchrec status {job}").stdout.partition(
                "\n"
            )
            found = LINE.fullmatch(last)
            return found is not None and re.search(pattern, found["text"])

        wait_until(has_it, pattern, details=lambda: last)
        return LINE.fullmatch(last)["command"]

    def status(self):
        return json.loads(self.run("persia-torchrec status --json").stdout)

    def step(self):
        with contextlib.suppress(ValueError):  # the coordinator begins again
            return self.status()["step"] or 0
        return 0

    def sees_it_train(self, beyond=5):
        """Wait until steps are made, from now on."""
        before = self.step()
        wait_until(lambda: self.step() > before + beyond, "the job trains on")


@pytest.fixture
def operator(tmp_path):
    return Operator(tmp_path)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a training, whose script may be changed."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments, before="", more="", run="run"):
            script = SCRIPT.replace("import time,", IMPORTS)
            for place, lines in ((FEATURES, before), (STEP, more)):
                script = script.replace(place, lines.lstrip("\n") + place)
            (tmp_path / "train.py").write_text(script)
            job = TorchxJob(
                tmp_path,
                *("persia.train_torchrec", "--script", "train.py", "--resume_dir", run),
                *("--embedding_servers", "2", *arguments),
                cwd=tmp_path,
            )
            stack.enter_context(job)
            job.has_printed("checkpoint-00000002")
            return job

        yield begin


def process_of(operator, role, index=0):
    """Return the number of a process, as ``status`` has it."""
    [pid] = [
        one["pid"]
        for one in operator.status()["members"]
        if (one["role"], one["index"]) == (role, index)
    ]
    return pid


def test_a_server_that_is_killed(start, operator):
    start()
    os.kill(process_of(operator, "server", 1), signal.SIGKILL)
    command = operator.reads(r"^server 1 was killed: process \d+ has ended")
    assert "joined the job" in operator.run(command).stdout
    operator.sees_it_train()


def test_a_server_that_hangs(start, operator):
    start()
    os.kill(process_of(operator, "server"), signal.SIGSTOP)
    command = operator.reads(r"^server 0 is lost: no heartbeat comes from process \d+")
    assert "is killed: server 0 is started again" in operator.run(command).stdout
    operator.sees_it_train()


def test_a_server_that_is_full(start, operator):
    start("--capacity", "10", before=MANY_IDS)
    command = operator.reads(r"^server \d is full, and evicts [\d,]+ rows a second")
    assert command.endswith("--servers 3")
    with operator.start(command) as scaled:
        try:
            wait_until(
                lambda: (
                    sum(
                        one["role"] == "server" and one["state"] == "running"
                        for one in operator.status().get("members", ())
                    )
                    == 3
                ),
                "three servers run",
                details=lambda: operator.run("persia-torchrec ps --all").stdout,
            )
            operator.sees_it_train()
            operator.run("persia-torchrec stop --no-save")
        finally:
            os.killpg(scaled.pid, signal.SIGTERM)
            scaled.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize("tmpfs", ["size=4m"], indirect=True)
def test_a_disk_that_is_full(start, operator, tmpfs):
    disk = Path(tmpfs).parents[1] / "root" / "tmp"
    start(run=f"{disk}/run")
    junk = disk / "junk"
    with junk.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    command = operator.reads(rf"^trainer 0: the last \d+ saves failed: .*{FULL}")
    assert FULL in operator.run(command).stdout
    operator.sees_it_train()
    junk.unlink()
    wait_until(lambda: not operator.status()["failed_saves"], "a save succeeds")


def test_a_trainer_that_hangs(start, operator, tmp_path):
    start(more=HANGS)
    (tmp_path / "hang").touch()
    command = operator.reads(
        r"^trainer 0 is stalled: process \d+ sends heartbeats, and makes no step"
    )
    (tmp_path / "hang").unlink()  # or it would hang again
    assert "is killed: trainer 0 is started again" in operator.run(command).stdout
    operator.sees_it_train()


def test_a_trainer_whose_memory_is_short(start, operator, tmp_path):
    start(more=NEEDS_MEMORY)
    (tmp_path / "short").touch()
    command = operator.reads(r"^trainer 0 has failed: .*(memory|Memory)")
    (tmp_path / "short").unlink()
    assert "memory" in operator.run(command).stdout
    operator.sees_it_train()


@pytest.mark.parametrize("name", ["port", "metrics_port"])
def test_a_port_that_another_job_has(start, operator, tmp_path, name):
    taken = (f"--{name}", str(draw_port()))
    start(*taken)
    first, script = operator.status()["job"], tmp_path / "train.py"
    words = ["persia.train_torchrec", "--script", str(script), *taken]
    (tmp_path / "second").mkdir()
    home = {"HOME": str(tmp_path)}
    with TorchxJob(tmp_path / "second", *words, cwd=tmp_path, variables=home) as second:
        assert second.wait().status != 0
    [second] = [
        one["job"]
        for one in json.loads(operator.run("persia-torchrec ps --all --json").stdout)
        if one["job"] != first
    ]
    who = rf"^the job has failed: .*{taken[1]}.* Job {first} has it"
    command = operator.reads(who, job=second)
    assert f"Job {first} has it" in operator.run(command).stdout
    operator.sees_it_train()  # the first one


def test_a_network_that_is_cut(tmp_path, processes):
    """That of a host, whose processes cannot be killed from here."""
    again = ["--restarts", "3", "--python", sys.executable]
    with Hosts(2) as network:
        here, there = network.all
        roles = dict.fromkeys(("coordinator", "loader", "worker", "trainer"), here)
        start = Scripts(tmp_path).start
        operator = Operator(tmp_path, partial(run_there, processes, here))
        with start(
            *again,
            num_batches=10**6,
            hosts={**roles, "server": there},
            PYTHONPATH=str(ROOT),
        ) as job:
            job.has_printed("current idx: 5 ")
            network.cut(there)
            command = operator.reads(r"^server 0 is lost: no heartbeat comes from")
            told = operator.run(command).stdout
            assert "which is not this one. Run one of:" in told
            network.mend(there)
            operator.sees_it_train()


def test_a_loader_that_raises(tmp_path):
    scripts = Scripts(tmp_path)
    raising = (
        "            assert number < 20, 'row 7 has no label'\n            ctx.send"
    )
    scripts.write(
        "data_loader.py", DATA_LOADER.replace("            ctx.send", raising)
    )
    again = ["--restarts", "3", "--python", sys.executable]
    operator = Operator(tmp_path)
    with scripts.start(*again, num_batches=10**6, PYTHONPATH=str(ROOT)) as job:
        assert job.wait().status != 0
    command = operator.reads(r"^the job has failed: loader 0: AssertionError: row 7 ")
    assert "row 7 has no label" in operator.run(command).stdout


def run_there(processes, host, command, env, cwd):
    """Run a command on a host; return what it prints."""
    name = f"command-{len(processes.started)}"
    running = processes.start(
        name,
        run_on,
        host,
        os.system,
        command,
        env=env,
        inherits=False,
        cwd=cwd,
    )
    running.process.join(DEADLINE_S)
    return running.output()
