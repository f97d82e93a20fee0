"""A private Slurm of Debian's packages on loopback, and jobs that torchx submits to it.

``slurmctld`` and one ``slurmd`` for each node run as the user of the tests, without
munge, with their files in one folder. Components of a heterogeneous job share no node:
each replica of a job takes one. The name of a node is an address, which a job looks up.

torchx asks ``sacct`` for the state of a job, which clusters with accounting have; here
a script in its place asks ``squeue``.
"""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import pytest

from tests.support.adult_income import DATA
from tests.support.local_job import ONE_SLOT
from tests.support.ports import draw_port, draw_ports
from tests.support.processes import DEADLINE_S, kill_all, parent_of, wait_until
from tests.support.repository import ROOT
from tests.support.torchx_jobs import COVERAGE, MARK, marked

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
CONF = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
MinJobAge=3600
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs={cpus} RealMemory=8000"
)
SACCT = """#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -j) job=$2; shift;; esac; shift; done
echo 'JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode'
squeue -h -a -t all ${job:+-j $job} -o '%i|%j|%P|%a|%C|%T|0:0' |
    sed 's/|COMPLETING|/|RUNNING|/; s/|CONFIGURING|/|PENDING|/'
"""
TORCHX = (sys.executable, "-m", "torchx.cli.main")
TORCHX_RUN = (*TORCHX, "run", "-s", "slurm")
JOB = (*TORCHX_RUN, "persia.train")
EXAMPLE = ROOT / "examples/adult_income"
PAUSED_LOADER = f"""
import os, pathlib, sys, time
sys.path.insert(0, "{EXAMPLE}")
import data_loader

batches = data_loader.batches

def paused(*arguments, **settings):
    for number, batch in enumerate(batches(*arguments, **settings)):
        while number == 200 and not pathlib.Path("go").exists():
            time.sleep(0.05)
        time.sleep(float(os.environ.get("PACE_S", "0")))
        yield batch

data_loader.batches = paused
data_loader.main()
"""
WAITING_TRAINER = """
import os, pathlib, time
names = "NICS", "NOTE", "LOG_LEVEL"
print("the trainer waits, with", *map(os.environ.get, names), flush=True)
print("it has", len(os.sched_getaffinity(0)), "processors", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}
START_S, LOOK_S = 30.0, 0.3
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def private_slurm(folder: Path, num_nodes: int) -> "Iterator[PrivateSlurm]":
    """Give a Slurm, or skip the test and say why there is none."""
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"needs Slurm (make system): there is no {', '.join(missing)}")
    with PrivateSlurm(folder, num_nodes, path) as slurm:
        yield slurm


class PrivateSlurm:
    """A Slurm, whose processes end with the one that has started them.

    Args:
        folder: of its files.
        num_nodes: each takes one replica of a job.
        path: where its programs are.
    """

    def __init__(self, folder: Path, num_nodes: int, path: str) -> None:
        self._folder = folder
        self._nodes = [f"127.0.1.{index + 1}" for index in range(num_nodes)]
        spools = [f"spool/{node}" for node in self._nodes]
        for name in ("bin", "state", "run", "log", *spools):
            (folder / name).mkdir(parents=True)
        (folder / "slurm.conf").write_text(self._conf())
        sacct = folder / "bin/sacct"
        sacct.write_text(SACCT)
        sacct.chmod(0o755)
        own = [str(sacct.parent), str(Path(sys.executable).parent)]
        self.env = {
            "PATH": os.pathsep.join([*own, path]),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self._start("slurmctld", "-c")
            for node in self._nodes:
                self._start("slurmd", "-N", node)
            wait_until(
                lambda: self._is_up() or self._has_ended(),
                "Slurm starts",
                START_S,
                details=self._log,
            )
            if self._has_ended():
                pytest.skip(f"needs a Slurm that starts here: {self._log()}")
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def call(self, *command: str) -> str:
        """Run a command of Slurm; return what it prints."""
        run = subprocess.run(
            command,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        return run.stdout.strip()

    def look_for_jobs(self) -> None:
        """Have pending jobs looked at, as any event in a cluster does."""
        for weight in ("2", "1"):
            node = f"NodeName={self._nodes[0]}"
            self.call("scontrol", "update", node, f"Weight={weight}")

    def _conf(self) -> str:
        host = socket.gethostname().partition(".")[0]
        port, *ports = draw_ports(1 + len(self._nodes))
        nodes = zip(self._nodes, ports, strict=True)
        return CONF.format(
            host=host,
            port=port,
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=self._folder,
            nodes="\n".join(
                NODE.format(node, host, own, cpus=len(os.sched_getaffinity(0)))
                for node, own in nodes
            ),
        )

    def _start(self, *command: str) -> None:
        daemon = subprocess.Popen(
            [command[0], "-D", *command[1:]],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        self._daemons.append(daemon)

    def _is_up(self) -> bool:
        idle = f"{len(self._nodes)} idle"
        return self.call("sinfo", "-h", "-o", "%D %t") == idle

    def _has_ended(self) -> bool:
        return any(daemon.poll() is not None for daemon in self._daemons)

    def _log(self) -> str:
        logs = sorted((self._folder / "log").iterdir())
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def _end(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(START_S)
            except subprocess.TimeoutExpired:
                kill_all(daemon.pid)
                daemon.wait()


class SlurmJob:
    """One job of a private Slurm; leaves no process behind.

    Args:
        slurm: where it runs.
        folder: in which it is submitted and runs, with the logs; the home of both.
        command: that submits it, as ``TORCHX_RUN`` and a component.
        variables: set for the command, from which the job has them.

    Attributes:
        id: Slurm's name of the job.
        handle: torchx's.
    """

    def __init__(
        self,
        slurm: PrivateSlurm,
        folder: Path,
        *command: object,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._slurm, self._folder = slurm, folder
        self._mark = f"{MARK}={uuid.uuid4()}"
        self._runs, self._next_look = True, 0.0
        name, value = self._mark.split("=")
        self._env = {
            **slurm.env,
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            name: value,
            **{key: os.environ[key] for key in os.environ if key in COVERAGE},
            **(variables or {}),
        }
        self.id = self._run(*map(str, command)).strip().rpartition("/")[2]
        self.handle = f"slurm://torchx/{self.id}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._slurm.call("scancel", self.id)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.pids(), "all processes end", START_S)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def torchx(self, *words: str) -> str:
        """Run a command of torchx; return what it writes to stdout."""
        return self._run(*TORCHX, *words)

    def pids(self, command: str = "") -> list[int]:
        """Return the job's processes, or those of a command."""
        return marked(self._mark, command)

    def pid(self, module: str, index: int) -> int:
        """Return a process of a role, which its supervisor has started."""
        replica = f"REPLICA_INDEX={index}".encode()
        [found] = [
            pid
            for pid in self.pids(f"-m persia_torchrec.{module}")
            if replica in _read(pid, "environ").split(b"\0")
            and b"supervisor" not in _read(pid, "cmdline")
        ]
        return found

    def kill_step(self, module: str, index: int) -> None:
        """Kill the processes of a replica with Slurm's own, as those of a lost host."""
        pid = self.pid(module, index)
        while _read(pid, "comm").strip() != b"slurmstepd":
            pid = parent_of(pid)
        kill_all(pid)

    def states(self) -> set[str]:
        """Return what Slurm says of the components of the job."""
        return {
            *self._slurm.call(
                "squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T"
            ).split()
        }

    def output(self) -> str:
        """Return what Slurm, and all processes of the job, have written so far."""
        logs = sorted(self._folder.glob(f"slurm-{self.id}*"))
        return "".join(log.read_text() for log in logs)

    def has_printed(self, text: str, times: int = 1) -> None:
        """Wait until the job has written a text; fail the test if it ends before."""
        wait_until(
            lambda: self.output().count(text) >= times or not self._is_running(),
            f"the job prints {text!r}",
            details=self.output,
        )
        assert self.output().count(text) >= times, self.output()

    def wait(self) -> set[str]:
        """Wait until the job and its processes have ended; return what Slurm says."""
        wait_until(
            lambda: not (self._is_running() or self.pids()),
            "the job ends",
            details=self.output,
        )
        return self.states()

    def _run(self, *command: str) -> str:
        run = subprocess.run(
            command,
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def _is_running(self) -> bool:
        now = time.monotonic()
        if self._runs and now > self._next_look:
            self._runs = not RUNNING.isdisjoint(self.states())
            self._next_look = now + LOOK_S
        return self._runs


def adult_income(
    slurm: PrivateSlurm, folder: Path, *arguments: object, **variables: str
) -> SlurmJob:
    """Submit the example; its loader waits for a file, "go", before the last part."""
    folder.mkdir(exist_ok=True)
    (folder / "load.py").write_text(PAUSED_LOADER)
    return SlurmJob(
        slurm,
        folder,
        *(*JOB, "--nn_worker", EXAMPLE / "train.py", "--data_loader", "load.py"),
        *("--embedding_config", EXAMPLE / "embedding_config.yml"),
        *("--global_config", EXAMPLE / "global_config.yml"),
        *("--servers", 2, "--port", draw_port(), *arguments),
        variables={**DATA, **variables},
    )


def waiting_job(
    slurm: PrivateSlurm, folder: Path, script: str, *arguments: object, **variables: str
) -> SlurmJob:
    """Submit a job of four replicas, whose trainer runs a script."""
    (folder / "train.py").write_text(script)
    (folder / "embedding.yml").write_text(ONE_SLOT)
    (folder / "global.yml").write_text("{}")
    files = ("--embedding_config", "embedding.yml", "--global_config", "global.yml")
    words = ("--nn_worker", "train.py", "--data_loader", "none", "--data_loaders", 0)
    command = (*JOB, *words, *files, *arguments)
    return SlurmJob(slurm, folder, *command, variables=variables)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
