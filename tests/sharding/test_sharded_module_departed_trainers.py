"""A trainer that goes away fails the others soon, with an error that names it.

No trainer here sets ``joint_timeout_s``: a wait for it would last 15 minutes.
"""

import contextlib
import json
import re
import sys

import pytest
from torch.distributed import run

from tests.sharding import departing
from tests.sharding.departing import DEPARTURES
from tests.support.ports import draw_port
from tests.support.processes import Processes
from tests.support.remote_job import Servers
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    """Let one of two trainers go away, in each way; return what they left behind."""
    folder = tmp_path_factory.mktemp("trainers")
    with contextlib.ExitStack() as stack:
        started = {how: stack.enter_context(Servers()) for how in DEPARTURES}
        addresses = {how: servers.addresses for how, servers in started.items()}
        processes = stack.enter_context(Processes(folder))
        running = processes.start("trainers", departing.run_all, addresses, folder)
        assert running.status() == 0, running.output()
    return folder


@pytest.mark.parametrize(
    ("how", "status"), [("raises", 1), ("is killed", -9), ("ends early", 0)]
)
def test_a_trainer_that_goes_away_is_named_long_before_the_time_limit(
    parted, how, status
):
    ends = json.loads((parted / "ends.json").read_text())
    pid, *departed = ends[f"{how} 1"]
    _, *survivor = ends[f"{how} 0"]
    assert (survivor, departed) == ([0], [status])
    heard = json.loads((parted / f"{how}.json").read_text())
    said = "its connection was lost"
    if how != "is killed" and sys.version_info >= (3, 13):  # forked ones say so there
        said = "its script has ended"
    who = rf"rank 1 \(process {pid} on \S+: {said}\)"
    assert re.search(rf"Step [1-4] .* all 2 trainers.*none of {who}", heard["error"])


@pytest.mark.long
def test_on_two_machines_of_torchrun_the_error_reports_what_the_other_raised(tmp_path):
    with Servers() as servers, Processes(tmp_path) as processes:
        port = draw_port()
        agents = [
            processes.start(
                f"agent {node}", run_agent, node, port, servers.addresses, cwd=ROOT
            )
            for node in range(2)
        ]
        statuses = [started.status() for started in agents]
    outputs = [started.output() for started in agents]
    assert statuses == [1, 1]
    assert "ValueError: a bug of its own" in outputs[1]
    who = r"rank 1 \(process \d+ on \S+: it raised ValueError: a bug of its own\)"
    assert re.search(rf"RemoteError: .*Step 4 .*none of {who}", outputs[0]), outputs[0]
    assert re.search(rf"had ended before this one: {who}", outputs[0]), outputs[0]


def run_agent(node, port, addresses):
    """Be torchrun on one of two machines."""
    run.main(
        [
            *("--nproc-per-node", "1", "--nnodes", "2", "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("-m", "tests.sharding.departing", *addresses),
        ]
    )
