"""A trainer of a job that is stopped by signals, and started again.

It counts its steps in ``steps``, and is slow from the one at which signals come. At the
end trainer 0 leaves what the servers have counted in ``counts.npy``, and its weights.
"""

import contextlib
import json
import os
import time
from pathlib import Path

PAUSE_S = 0.05


def main(cell: dict) -> None:
    # Workers that are spawned import this file, and none of that.
    import numpy as np
    import torch
    import torch.distributed as dist

    from persia_torchrec import EmbeddingClient, join, recoverable
    from tests.resume.loaders import OF_JOBS, WORK_QUEUE, Given
    from tests.resume.training import Training, to_batch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    training = Training(EmbeddingClient.of_job(), cell["loop"], cell["seed"])
    num_samples, num_passes = cell["num_samples"], cell["num_passes"]
    given = Given(Path(), num_samples, cell["is_shuffled"], num_passes, rank, size)
    loader = OF_JOBS[cell["loader"]](given)
    state = {"model": training.model, "optimizer": training.optimizer}
    state |= {"data": loader} if cell["in_state"] else {}
    saves = {"interval_s": 0, "save_steps": cell["save_steps"]}
    client = EmbeddingClient.of_job()
    is_queued = cell["loader"] == WORK_QUEUE
    with (
        recoverable(None, state, client, training.sharders, **saves) as run,
        Path(f"steps {rank}").open("ab", buffering=0) as steps,
        join(training.model) if is_queued else contextlib.nullcontext(),
    ):
        for number in [0] if is_queued else run.epochs(num_passes):
            first = number * num_samples * size
            batches = (to_batch(batch, first) for batch in run.skip(loader))
            for _ in training.steps(batches):
                steps.write(b".")
                if 0 < cell["stop"] <= run.num_steps + 1:
                    time.sleep(PAUSE_S)
                run.step()
    training.sharders.flush()
    dist.barrier()
    if rank == 0:
        np.save("weights.npy", training.weights(num_samples * size))
        np.save("counts.npy", training.counts(num_passes * num_samples * size))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(os.environ["CELL"]))
