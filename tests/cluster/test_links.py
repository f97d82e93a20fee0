"""Links between hosts that are cut: for a while, and for longer than the job waits."""

import re
import sys
import time

import pytest

from tests.support.hosts import Hosts
from tests.support.persia_scripts import Scripts
from tests.support.processes import wait_until
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

RECOVER = ["--restarts", "3", "--python", sys.executable]


def start(folder, network, *arguments, num_batches):
    """Start a job whose roles are on three hosts, with an NN worker on two of them."""
    one, two, three = network.all
    hosts = {
        "coordinator": one,
        "loader": one,
        "worker": one,
        "server": two,
        "trainer 0": two,
        "trainer 1": three,
    }
    sizes = ["--servers", "2", "--trainers", "2"]
    given = [*sizes, *arguments]
    variables = {"PYTHONPATH": str(ROOT)}
    return Scripts(folder).start(
        *given, num_batches=num_batches, hosts=hosts, **variables
    )


def num_steps(job):
    return job.output().count("current idx: ")


@pytest.mark.parametrize("seconds", [5, 20])
def test_a_link_that_is_cut_for_a_while_heals(tmp_path, seconds):
    """Of each host in turn, in the midst of a training."""
    num_batches = 600
    with (
        Hosts(3) as network,
        start(tmp_path, network, *RECOVER, num_batches=num_batches) as job,
    ):
        job.has_printed("current idx: 5 ")
        for host in network.all:
            network.cut(host)
            time.sleep(seconds)
            before = num_steps(job)
            assert before < num_batches
            network.mend(host)
            wait_until(
                lambda before=before: num_steps(job) > before + 10,
                "training continues",
                details=job.output,
            )
        ended = job.wait()
    assert ended.status == 0, ended.output
    trained = re.findall(r"rank (\d): trained (\d+) batches", ended.output)
    assert sorted(trained) == [("0", "300"), ("1", "300")]


@pytest.mark.parametrize(
    ("host", "lost"),
    [(0, "server|trainer"), (1, "server 0|server 1|trainer 0"), (2, "trainer 1")],
)
@pytest.mark.parametrize("recovers", [True, False])
def test_a_link_that_is_cut_for_longer_fails_the_job(tmp_path, host, lost, recovers):
    arguments = [*RECOVER, "--recovery_timeout_s", "10"] if recovers else []
    with (
        Hosts(3) as network,
        start(tmp_path, network, *arguments, num_batches=10**6) as job,
    ):
        job.has_printed("current idx: 5 ")
        network.cut(network.all[host])
        ended = job.wait()
    assert ended.status != 0
    last = ended.logs["coordinator 0"].splitlines()[-1]
    why = "its host does not answer"
    limit = ", and was not back within 10 s" if recovers else ""
    assert re.search(rf"job failed: ({lost})[ \d]*was lost: .*{why}{limit}", last), last
    for member, log in ended.logs.items():
        is_restarted = recovers and member == "loader 0"
        assert is_restarted or "Traceback" not in log, log
        assert member == "coordinator 0" or re.search(
            rf"{member} (ends: .* has failed|lost the coordinator)", log
        ), log
