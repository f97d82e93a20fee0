"""Two trainers of which one goes away without a word to the other.

``python -m tests.sharding.departing ADDRESSES`` is one of them under torchrun: rank 1
raises after some steps, and rank 0 continues until it receives the error.
"""

import contextlib
import json
import multiprocessing
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from persia_torchrec import SGD
from persia_torchrec.errors import RemoteError
from tests.support.faults import kill_self
from tests.support.groups import trainer_of_group
from tests.support.two_trainers import Counting, Model, Trainer, batches, train

NUM_STEPS = 3
"""Steps that both take."""


@dataclass(frozen=True)
class Departure:
    """How one trainer goes away.

    Attributes:
        staleness: of both trainers.
        has_dense: they have a dense half, whose gradients are reduced.
    """

    staleness: int
    has_dense: bool

    def trainer(self, addresses):
        if self.has_dense:
            return Trainer(addresses, Model, SGD(0.1), staleness=self.staleness)
        return Counting(addresses, staleness=self.staleness)


DEPARTURES = {
    "raises": Departure(staleness=0, has_dense=True),
    "is killed": Departure(staleness=8, has_dense=False),
    "ends early": Departure(staleness=1, has_dense=False),
}


def group(how: str, rank: int, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Be one of two trainers."""
    return trainer_of_group(rank, 2, folder / f"group that {how}")


def steps(trainer, rank: int, num: int | None = None) -> None:
    """Train; for ever, without a number of steps."""
    for number in count() if num is None else range(num):
        if isinstance(trainer, Counting):
            trainer.step()
        else:
            train(trainer.model, batches(rank, 1, seed=number))


def depart(how: str, addresses, folder: Path) -> None:
    """Be rank 1, and go away."""
    with group(how, 1, folder):
        trainer = DEPARTURES[how].trainer(addresses)
        steps(trainer, 1, NUM_STEPS)
        match how:
            case "raises":
                raise ValueError("a bug of its own")
            case "is killed":
                kill_self()
            case _:
                trainer.sharder.flush()


def remain(how: str, addresses, folder: Path) -> None:
    """Be rank 0; leave in the folder what it heard of the other."""
    with group(how, 0, folder), DEPARTURES[how].trainer(addresses) as trainer:
        steps(trainer, 0, NUM_STEPS)
        try:
            steps(trainer, 0)
        except RemoteError as exc:
            heard = {"error": str(exc)}
    (folder / f"{how}.json").write_text(json.dumps(heard))


def run_all(addresses, folder: Path) -> None:
    """Have a pair of trainers part in each way; leave their ends in the folder.

    They are forked: TorchRec is imported once.
    """
    fork = multiprocessing.get_context("fork")
    trainers = {
        (how, rank): fork.Process(target=run, args=(how, addresses[how], folder))
        for how in DEPARTURES
        for rank, run in enumerate((remain, depart))
    }
    for trainer in trainers.values():
        trainer.start()
    ends = {}
    for (how, rank), trainer in trainers.items():
        trainer.join()
        ends[f"{how} {rank}"] = (trainer.pid, trainer.exitcode)
    (folder / "ends.json").write_text(json.dumps(ends))


def main(addresses: list[str]) -> None:
    """Be one of two trainers under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer = DEPARTURES["raises"].trainer(addresses)
    steps(trainer, rank, NUM_STEPS)
    if rank == 1:
        raise ValueError("a bug of its own")
    steps(trainer, rank)


if __name__ == "__main__":
    main(sys.argv[1:])
