"""Trainers wait for one that waits for servers, whatever their own group allows."""

import pytest
import torch.distributed as dist

from persia_torchrec.errors import JobError
from persia_torchrec.training.checkpoint import at_first
from tests.support import groups
from tests.support.faults import kill_self
from tests.training import exchanging_trainers

WORKS = ("tell", "resume", "load", "save", "ask_the_clock", "share_files")


@pytest.mark.long
@pytest.mark.multiprocess
def test_trainers_wait_for_longer_than_their_group_allows(processes, tmp_path):
    exchange = exchanging_trainers.exchange, str(tmp_path / "run")
    for output in groups.run(processes, "trainer", *exchange):
        for work in WORKS:
            assert f"{work} is done" in output


def end_while_others_wait(rank):
    dist.init_process_group("gloo")
    at_first(lambda: None)
    if rank == 1:
        kill_self()
    with pytest.raises(JobError, match="All trainers must take"):
        at_first(lambda: None)


@pytest.mark.multiprocess
def test_a_trainer_that_has_ended_is_noticed_at_once(processes):
    groups.run_group_to_a_kill(
        processes, "trainer", end_while_others_wait, lambda rank: rank
    )
