"""A trainer of a job: it takes rows from the job's queue, and counts them on servers.

The first one leaves the counts in ``counts.npy``. Each notes its steps in ``steps``.
"""

import os
import time
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from persia_torchrec import EmbeddingClient
from persia_torchrec.training import schedule
from persia_torchrec.training.recoverable import recoverable
from tests.support.queued_trainers import make_data, make_model

SLOW_FROM = 400  # steps, after which they take a while, until the kills are over


def pause(num_steps):
    if not Path("calm").exists():
        time.sleep(0.02 if num_steps < SLOW_FROM else 1.0)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = make_data(Path("rows"), batch_size=8 + dist.get_rank())
    client = EmbeddingClient.of_job()
    model, sharder, optimizer, together = make_model(client)
    state = {"model": model, "optimizer": optimizer, "data": data}
    saves = {"interval_s": 0, "save_steps": 5}
    if os.environ["SAVES"] == "deltas":  # one after each step, and checkpoints between
        schedule._LEAST_INTERVAL = 0
        saves = {"interval_s": 0, "save_steps": 20, "delta_interval_s": 1e-9}
    with (
        recoverable(None, state, client, sharder, **saves) as run,
        together(),
        Path("steps").open("ab", buffering=0) as steps,
    ):
        # One batch is ahead, as in a train pipeline.
        for batch, _ in pairwise(chain(run.skip(data), [None])):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            run.step()
            steps.write(b".")
            pause(run.num_steps)
    sharder.flush()
    dist.barrier()
    if dist.get_rank() == 0:
        num_rows = int(os.environ["NUM_ROWS"])
        counts = client.read("id", np.arange(num_rows, dtype=np.uint64))
        np.save("counts.npy", counts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
