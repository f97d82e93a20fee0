"""A command that is started again, and what outlives it."""

import os
import re
import signal
import subprocess
import sys

import pytest

from persia_torchrec.job import supervisor
from persia_torchrec.job.signals import START_AGAIN
from persia_torchrec.job.survivable_memory import AUTO, PRIVATE
from persia_torchrec.rpc.addresses import open_listening
from tests.support.faults import kill
from tests.support.processes import DEADLINE_S, children_of, is_running, wait_until
from tests.support.repository import ROOT

KILLED = "process was ended by SIGKILL; restarting it"
LISTENS = """
import os, signal, socket
listener = socket.socket(fileno=int(os.environ["PERSIA_LISTEN_FD"]))
memory = int(os.environ["PERSIA_MEMORY_FD"] or -1)
print("at", listener.getsockname(), flush=True)
if os.environ["PERSIA_RESTARTS"] == "0":
    if memory >= 0:
        os.pwrite(memory, b"kept", 2**30)
    os.kill(os.getpid(), signal.SIGKILL)
print("memory", os.pread(memory, 4, 2**30) if memory >= 0 else None)
"""
SAYS_WHERE_IT_IS = """
echo $$ is under $PPID, restart $PERSIA_RESTARTS.
[ $PERSIA_RESTARTS = 0 ] && exec sleep 600
exit 0
"""
pytestmark = pytest.mark.multiprocess


def supervise(words):
    """Run a supervisor that does not wait long, and no nohup keeps from ending."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    supervisor._FIRST_DELAY_S = 0.01
    return supervisor.main(words)


def start(processes, *command, flags=()):
    return processes.start("supervisor", supervise, [*flags, "--", *command])


def shell(processes, text):
    return start(processes, "sh", "-c", text)


def test_a_command_is_started_again_until_it_ends_by_itself(processes):
    text = "echo start $PERSIA_RESTARTS; [ $PERSIA_RESTARTS = 2 ] && exit 0; kill -9 $$"
    running = shell(processes, text)
    assert running.status() == 0
    starts = re.findall(r"start (\d)", running.output())
    assert starts == ["0", "1", "2"]
    assert running.output().count(KILLED) == 2


def test_a_command_may_ask_to_be_started_again(processes):
    again = f"[ $PERSIA_RESTARTS = 1 ] && exit 0; exit {START_AGAIN}"
    running = shell(processes, again)
    assert running.status() == 0
    assert "process has failed; restarting it" in running.output()


@pytest.mark.parametrize("status", [0, 1, 3])
def test_another_status_is_that_of_the_supervisor(processes, status):
    running = shell(processes, f"echo started; exit {status}")
    assert running.status() == status
    assert running.output() == "started\n"


def test_a_command_that_never_joins_its_job_is_given_up(processes):
    running = shell(processes, "echo started; kill -SEGV $$")
    assert running.status() == 128 + signal.SIGSEGV
    assert running.output().count("started\n") == 4
    assert "was ended by SIGSEGV, 4 times in a row before" in running.output()


def test_a_command_that_has_joined_its_job_is_started_again_any_number_of_times(
    processes,
):
    text = "[ $PERSIA_RESTARTS = 6 ] && exit 0; kill -41 $PPID; kill -9 $$"
    running = shell(processes, text)
    assert running.status() == 0
    assert running.output().count(KILLED) == 6


@pytest.mark.parametrize(
    ("number", "heard"),
    [
        (signal.SIGTERM, "TERM"),
        (signal.SIGINT, "INT"),
        (signal.SIGHUP, "TERM"),
    ],
)
def test_a_signal_ends_the_command_and_then_the_supervisor(processes, number, heard):
    text = (
        f"trap 'echo heard; exit 4' {heard}; echo at work; while :; do sleep 0.05; done"
    )
    running = shell(processes, text)
    running.has_printed("at work")
    running.send(number)
    assert running.status() == 4
    assert running.output().count("heard") == 1


def test_a_command_that_does_not_end_is_killed(processes):
    text = "trap '' TERM; echo $$ at work.; while :; do sleep 0.05; done"
    flags = ["--end-timeout-s", "0"]
    running = start(processes, "sh", "-c", text, flags=flags)
    running.has_printed("at work.")
    running.send(signal.SIGTERM)
    assert running.status() == 128 + signal.SIGKILL


@pytest.mark.parametrize("memory_dir", ["", AUTO, PRIVATE, "a folder"])
def test_socket_and_memory_outlive_the_command(processes, tmp_path, memory_dir):
    folder = str(tmp_path) if memory_dir == "a folder" else memory_dir
    flags = ["--port", "0", "--memory-dir", folder]
    running = start(processes, sys.executable, "-S", "-c", LISTENS, flags=flags)
    assert running.status() == 0, running.output()
    first, second = re.findall(r"^at (.*)", running.output(), re.M)
    assert first == second
    kept = None if memory_dir == PRIVATE else b"kept"
    assert f"memory {kept}" in running.output()
    says = running.output().count("memory that survives the process:")
    assert says == (memory_dir in (AUTO, "a folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.log"]


def test_a_command_ends_with_the_process_that_started_its_supervisor(processes):
    command = [sys.executable, "-m", "persia_torchrec.job.supervisor", "--"]
    command += ["sh", "-c", "echo $$ $PPID at work.; exec sleep 600"]
    parent = processes.start("parent", subprocess.run, command)
    parent.has_printed("at work.")
    pids = re.search(r"(\d+) (\d+) at work\.", parent.output())
    parent.send(signal.SIGKILL)
    for pid in map(int, pids.groups()):
        wait_until(
            lambda pid=pid: not is_running(pid), "it ends", details=parent.output
        )
    assert "parent process exited" in parent.output()


def start_again(processes, *, kill_outer=False):
    """Start a command, and kill the process above its supervisor; return both pids."""
    running = shell(processes, SAYS_WHERE_IT_IS)
    running.has_printed("restart 0.")
    command, inner = re.search(r"(\d+) is under (\d+)", running.output()).groups()
    if kill_outer:
        running.send(signal.SIGKILL)
        wait_until(lambda: "forked a replacement" in running.output(), "it is replaced")
    return running, int(command), int(inner)


def has_started_again(running, *ended):
    """Wait for the next start of the command, and for its end."""
    wait_until(
        lambda: "restart 1." in running.output(), "another", details=running.output
    )
    command, inner = re.findall(r"(\d+) is under (\d+)", running.output())[1]
    for pid in (*ended, int(command), int(inner)):
        wait_until(lambda pid=pid: not is_running(pid), f"{pid} ends")


def test_a_command_whose_supervisor_is_killed_starts_again_under_another(processes):
    running, command, inner = start_again(processes)
    kill(inner)
    has_started_again(running, command, inner)
    assert running.status() == 0
    assert "a supervisor was ended by SIGKILL" in running.output()


def test_a_command_and_its_supervisor_may_be_killed_at_once(processes):
    running, command, inner = start_again(processes)
    kill(command, inner)
    has_started_again(running, command, inner)
    assert running.status() == 0


def test_a_supervisor_that_is_killed_while_its_command_is_down_is_replaced(processes):
    flags = ["--", "sh", "-c", SAYS_WHERE_IT_IS.replace("exec sleep 600", "kill -9 $$")]
    running = processes.start("supervisor", _be_slow, flags)
    running.has_printed("; restarting it")
    inner = int(re.search(r"is under (\d+)", running.output())[1])
    kill(inner)
    has_started_again(running, inner)
    assert running.status() == 0


def _be_slow(words):
    supervisor._FIRST_DELAY_S = supervisor._LAST_DELAY_S = 600.0
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return supervisor.main(words)


def test_the_process_above_a_supervisor_may_be_killed_and_then_any_other(processes):
    running, command, inner = start_again(processes, kill_outer=True)
    assert is_running(command)
    kill(command, inner)
    has_started_again(running, command, inner)


def test_a_process_that_waits_for_a_supervisor_ends_with_it(processes):
    running, _, inner = start_again(processes, kill_outer=True)
    children = children_of(inner)
    assert len(children) == 2
    os.kill(inner, signal.SIGTERM)
    for pid in (inner, *children):
        wait_until(lambda pid=pid: not is_running(pid), f"{pid} ends")
    assert "restart 1." not in running.output()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "must be given a command, after --"),
        (["--port", "65536", "--", "true"], "port must be in [0, 65535]. Received: 65"),
        (["--", "no-such-command"], "The command must be executable. Receiv"),
        (["--memory-dir", "nowhere", "--", "true"], "memory_dir must be auto, private"),
    ],
)
def test_an_invalid_command_line_is_an_error(processes, words, message):
    running = processes.start("supervisor", supervise, words)
    assert running.status() == 1
    assert message in running.output()
    assert "Traceback" not in running.output()


def test_a_command_whose_port_is_taken_says_so_by_itself(processes):
    with open_listening() as other:
        port = str(other.getsockname()[1])
        command = ["-m", "persia_torchrec.job.coordinator", "--num-trainers", "1"]
        words = ["--port", port, "--", sys.executable, *command, "--port", port]
        running = processes.start("supervisor", supervise, words)
        assert running.status() == 1
    assert f"must be able to listen on port {port}. Received: " in running.output()


def test_a_supervisor_imports_nothing_that_takes_time():
    code = (
        "import sys, persia_torchrec.job.supervisor;"
        "print({'numpy', 'torch', 'zmq', 'msgspec', 'asyncio'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert ended.stdout == "set()\n"
