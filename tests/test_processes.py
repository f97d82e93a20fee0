"""What is known of processes of this host."""

import os
import signal
import subprocess
import sys

from persia_torchrec import processes
from tests.support.processes import wait_until


def test_a_process_has_a_start_until_it_ends_even_before_it_is_waited_for():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        start = processes.start_of(child.pid)
        assert int(start) >= int(processes.start_of(os.getpid()))
        assert child.pid in processes.children_of(os.getpid())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.start_of(child.pid) == ""
        assert child.pid not in processes.children_of(os.getpid())
    assert processes.children_of(child.pid) == set()


def test_the_table_is_of_this_boot_and_namespace():
    table = processes.process_table()
    assert table.endswith(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115


def test_a_process_that_computes_has_a_ready_thread_until_it_is_stopped():
    with subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) as busy:
        wait_until(lambda: processes.has_ready_thread(busy.pid), "it computes")
        os.kill(busy.pid, signal.SIGSTOP)
        os.waitpid(busy.pid, os.WUNTRACED)  # it is stopped
        assert not processes.has_ready_thread(busy.pid)
        busy.kill()
    assert not processes.has_ready_thread(busy.pid)
