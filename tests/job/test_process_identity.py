"""Who a process is, and whether it runs."""

import subprocess
import sys

from persia_torchrec.job.process_identity import ProcessIdentity


def test_a_supervisor_that_had_ended_when_it_was_read_may_have_a_successor():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    supervisor = ProcessIdentity.of(ended.pid)
    assert supervisor.has_ended()
    assert not supervisor.is_last()


def test_a_process_of_its_name_that_runs_is_seen():
    sleeping = subprocess.Popen(["sleep", "600"])
    known = ProcessIdentity.of(sleeping.pid)
    assert not known.is_last()
    sleeping.kill()
    sleeping.wait()
    assert known.has_ended()
