import multiprocessing
import os
import signal
import time

import pytest

from persia_torchrec import timeouts
from persia_torchrec.job.signals import (
    END_SIGNALS,
    EndSignals,
    compiles_here,
    end_daemons,
    outlive_end_signals,
)
from tests.support.processes import DEADLINE_S, Processes

pytestmark = pytest.mark.multiprocess


def fail_at_each_signal():
    read, write = os.pipe()

    def react(name):
        os.write(write, name.encode())
        raise ValueError("the signal is round")

    with EndSignals(react):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
            assert os.read(read, 64) == number.name.encode()


def test_signals_are_received_after_one_whose_reaction_failed(tmp_path):
    with Processes(tmp_path) as processes:
        process = processes.start("process", fail_at_each_signal)
        assert process.status() == 0, process.output()
        assert process.output().count("ValueError: the signal is round") == 3


def fork_a_child_that_leaves():
    before = signal.getsignal(signal.SIGTERM)
    with EndSignals(print):
        child = os.fork()
    if child == 0:
        os._exit(3 if signal.getsignal(signal.SIGTERM) is before else 4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_leaves_the_block_with_the_previous_handlers(tmp_path):
    with Processes(tmp_path) as processes:
        assert processes.start("process", fork_a_child_that_leaves).status() == 3


def handle_by_itself():
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("script"))
    with EndSignals(heard.append) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.ignore()
    os.kill(os.getpid(), signal.SIGINT)
    assert heard == ["script"]


def test_the_handler_of_a_script_stays_and_what_is_ignored_ends_nothing(tmp_path):
    with Processes(tmp_path) as processes:
        process = processes.start("process", handle_by_itself)
        assert process.status() == 0, process.output()


def be_told_of_what_is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    heard, handled = [], []
    with EndSignals(heard.append, handler=lambda n, _: handled.append(n)) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (heard, handled) == ([], [])
        signals.interrupt(signal.SIGHUP)  # which another process has got
    assert handled == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_signal_that_is_ignored_ends_the_job_only_where_it_is_not(tmp_path):
    with Processes(tmp_path) as processes:
        process = processes.start("process", be_told_of_what_is_ignored)
        assert process.status() == 0, process.output()


def be_told_while_a_child_lives():
    until = multiprocessing.get_context("fork").Event()
    began_s = time.monotonic()
    with EndSignals(print):
        child = multiprocessing.get_context("fork").Process(target=until.wait)
        child.start()
    took_s = time.monotonic() - began_s
    until.set()
    child.join()
    assert took_s < timeouts.SIGNALS_CLOSE_S


def test_a_child_that_lives_does_not_delay_the_end_of_the_block(tmp_path):
    with Processes(tmp_path) as processes:
        process = processes.start("process", be_told_while_a_child_lives)
        assert process.status() == 0, process.output()


def outlive(connection):
    outlive_end_signals()
    connection.send("ready")
    connection.poll(DEADLINE_S)


def end_a_daemon_that_outlives_signals():
    here, there = multiprocessing.Pipe()
    daemon = multiprocessing.get_context("fork").Process(
        target=outlive, args=(there,), daemon=True
    )
    daemon.start()
    assert here.recv() == "ready"
    for number in END_SIGNALS:
        os.kill(daemon.pid, number)
    end_daemons()
    daemon.join()
    assert daemon.exitcode == -signal.SIGKILL


def test_a_daemon_that_outlives_signals_ends_with_its_parent(tmp_path):
    with Processes(tmp_path) as processes:
        process = processes.start("process", end_a_daemon_that_outlives_signals)
        assert process.status() == 0, process.output()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("numba.core.compiler", True),
        ("torch._dynamo.convert_frame", True),
        ("torch._dynamo.eval_frame", False),  # also runs what is compiled
        ("numba.core.typing", False),
    ],
)
def test_a_main_thread_compiles_within_a_compiler(module, expected):
    frame = {"__name__": module, "compiles_here": compiles_here}
    exec("def compile(): return compiles_here()", frame)
    assert frame["compile"]() == expected
    assert not compiles_here()
