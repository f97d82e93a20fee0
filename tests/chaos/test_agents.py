"""torchrun's agents on two machines, which are killed while their NN workers wait."""

import contextlib
import sys

import pytest

from persia_torchrec.job import supervisor
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from tests.support.faults import kill
from tests.support.processes import Processes, is_running, parent_of, wait_until
from tests.support.repository import ROOT
from tests.support.script_jobs import Job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MEET_AND_WAIT = """
import os, pathlib, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
is_over = torch.zeros(1)
while not is_over:
    time.sleep(0.05)
    is_over[0] = pathlib.Path("go").exists()
    dist.all_reduce(is_over, dist.ReduceOp.MIN)
print("through", os.environ["RANK"])
"""


def start_agents(processes, job):
    """Start agents with supervisors as on two machines, of one NN worker each."""
    (processes.folder / "train.py").write_text(MEET_AND_WAIT)
    flags = ["--nnodes", "2", "--nproc-per-node", "1"]
    agents = []
    for node in range(2):
        own = [*flags, "--node-rank", str(node), "--", "train.py"]
        command = [sys.executable, "-m", "persia_torchrec.job.torchrun", *own]
        variables = {"PERSIA_STORE_PORT": str(job.port), "PYTHONPATH": str(ROOT)}
        agents.append(
            processes.start(
                f"agent-{node}",
                supervisor.main,
                ["--memory-dir", "private", "--", *command],
                env=variables,
            )
        )
    return agents


@pytest.mark.parametrize("victim", ["NN worker", "agent", "supervisor"])
@pytest.mark.parametrize("node", [0, 1])
def test_both_machines_start_again(tmp_path, node, victim):
    with Processes(tmp_path) as processes:
        job = Job(processes, trainer=2, recovers=True)
        agents = start_agents(processes, job)
        with contextlib.closing(AddressBook.join("localhost", job.port)) as book:
            records = [MemberRecord(book, "trainer", rank) for rank in range(2)]
            for record in records:
                wait_until(
                    record.process,
                    record.who,
                    details=job.coordinator.output,
                )
            before = [record.process() for record in records]
            supervisors = {p.pid: p.supervisor.pid for p in before}
            pids = {parent_of(supervisors[p.pid]): p.pid for p in before}
            pid = pids[agents[node].pid]
            victims = {"NN worker": pid, "agent": parent_of(pid)}
            kill(victims.get(victim, supervisors[pid]))

            def are_new():
                return all(
                    record.process().pid not in pids.values() for record in records
                )

            wait_until(are_new, "both are back", details=job.coordinator.output)
            wait_until(lambda: not any(map(is_running, pids.values())), "both ended")
            assert book.state() == ("running", "")
        (tmp_path / "go").touch()
        assert job.coordinator.status() == 0, job.coordinator.output()
        assert [agent.status() for agent in agents] == [0, 0]
        output = "".join(agent.output() for agent in agents)
        assert output.count("through") == 2
        assert "Traceback" not in output
