"""The processes of a job that are killed: a data loader, and an embedding worker."""

import signal
import sys
from collections.abc import Sequence

import numpy as np

from persia_torchrec.ctx import DataCtx
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.worker import __main__ as worker
from tests.local_job import batch_of

NUM_IDS = 20


def make_batches(num: int) -> list[PersiaBatch]:
    """Return the same batches in each process."""
    rng = np.random.default_rng(7)
    return [batch_of(*rng.integers(0, NUM_IDS, (4, 3)).tolist()) for _ in range(num)]


def load(num: int, index: int, size: int) -> None:
    """Send this loader's part of the batches."""
    with DataCtx() as ctx:
        for batch in make_batches(num)[index::size]:
            ctx.send_data(batch)


def load_and_stay(num: int) -> None:
    """Send all batches, and wait as a process of a job does for its end."""
    load(num, 0, 1)
    print("waits")  # the test waits for it
    signal.pause()


def work(arguments: Sequence[str]) -> int:
    """Run an embedding worker."""
    sys.argv = ["worker", *arguments]
    return worker.main()
