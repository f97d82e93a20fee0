"""A trainer of a job whose data end at different steps, pass after pass.

The file ``end`` in its folder says how many passes there are; until it is there, more
follow. A trainer notes each step that it has counted in ``steps``, and the pass that it
begins in ``pass 0``. Trainer 0 leaves the counts of all ids in ``counts.npy``, and each
its dense half, as ``dense 0.npy``.
"""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from persia_torchrec import EmbeddingClient
from persia_torchrec.sharding.training_blocks import join
from persia_torchrec.training.recoverable import recoverable
from tests.support.uneven_trainers import (
    IDS_OF_A_TRAINER,
    ids_of_trainer,
    make_counts,
    train_step,
)

MOST_STEPS = int(os.environ.get("MOST_STEPS", "40"))  # of a trainer in a pass
SAVE_STEPS = int(os.environ.get("SAVE_STEPS", "10"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))


def num_steps_of(rank: int, number: int, most: int = MOST_STEPS) -> int:
    """Return how many steps a trainer has in a pass; it may have none."""
    return int(np.random.default_rng([number, rank]).integers(0, most))


def passes() -> itertools.takewhile:
    """Return the numbers of the passes, up to one that ``end`` names."""

    def is_left(number: int) -> bool:
        end = Path("end")
        return not end.exists() or number < int(end.read_text())

    return itertools.takewhile(is_left, itertools.count())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    client = EmbeddingClient.of_job()
    model, sharder, optimizer = make_counts(client)
    state = {"model": model, "optimizer": optimizer}
    saves = {"interval_s": 0, "save_steps": SAVE_STEPS}
    with (
        recoverable(None, state, client, sharder, **saves) as run,
        Path("steps").open("ab", buffering=0) as steps,
    ):
        for number in passes():
            Path(f"pass {rank}").write_text(f"{number}")
            with join(model):
                for id_ in run.skip(ids_of_trainer(rank, num_steps_of(rank, number))):
                    train_step(model, optimizer, id_)
                    run.step()
                    steps.write(b".")
                    time.sleep(PAUSE_S)
    sharder.flush()
    dist.barrier()
    dense = [p.detach().numpy().ravel() for p in model.module.dense.parameters()]
    np.save(f"dense {rank}.npy", np.concatenate(dense))
    if rank == 0:
        ids = np.arange(dist.get_world_size() * IDS_OF_A_TRAINER, dtype=np.uint64)
        np.save("counts.npy", -client.read("id", ids)[:, 0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
