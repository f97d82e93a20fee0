"""The life of a service that stands alone, and of one that another process started."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from persia_torchrec.job.lifetime import Lifetime, NoBook
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

TELL_OF_COMPILATION = """
from persia_torchrec.job.lifetime import ChildLifetime
with ChildLifetime() as life:
    life.report_compiling(True)
    life.report_compiling(False)
"""
END_WITH_THE_INPUT = """
from persia_torchrec.job.lifetime import ChildLifetime, report_ready
with ChildLifetime() as life:
    life.call_at_end(lambda: report_ready("at the end"))
    report_ready("tcp://a:1")
    life.wait_for_end()
"""

SERVE = """
import sys
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.lifetime import run_service

def serve():
    for text in sys.argv[1:]:
        raise ConfigError(text)

sys.exit(run_service("persia_torchrec.server", serve))
"""


def test_it_ends_by_a_signal_and_a_second_one_tells_again(monkeypatch):
    monkeypatch.setattr("persia_torchrec.timeouts.SAME_SIGNAL_S", 0.0)
    called = threading.Event()
    with Lifetime() as life:
        life.call_at_end(called.set)
        os.kill(os.getpid(), signal.SIGTERM)
        life.wait_for_end()
        assert called.wait(DEADLINE_S)
        assert not life.told_again.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(life.told_again.is_set, "the second signal is seen")


def test_a_service_that_stands_alone_is_told_nothing_of_others():
    book = NoBook()
    book.tell("updates", "7")
    assert book.note("updates") is None
    assert book.address("server", 0) is None
    assert book.claim_note("slots", "a: 1") == "a: 1"
    assert book.recovery_s == 0.0


def test_a_child_reports_its_parent_when_it_compiles():
    command = [sys.executable, "-c", TELL_OF_COMPILATION]
    told = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True
    )
    assert told.stdout == "compiling\ncompiled\n"


def test_a_child_of_a_cluster_outlives_signals_and_ends_with_its_input():
    command = [sys.executable, "-c", END_WITH_THE_INPUT]
    variables = {**os.environ, "PERSIA_PARENT_FD": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as child:
        assert child.stdout.readline() == "ready tcp://a:1\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
        assert child.poll() is None
        told, _ = child.communicate("\n", DEADLINE_S)
    assert (told, child.returncode) == ("ready at the end\n", 0)


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_of_a_service_is_a_line_and_its_status_is_1(fails):
    command = [sys.executable, "-c", SERVE, *["port must be free."][: int(fails)]]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == int(fails)
    assert ("ConfigError: port must be free." in ended.stderr) == fails
    assert "Traceback" not in ended.stderr
