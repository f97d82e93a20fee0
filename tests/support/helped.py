"""What the data loaders of the helper's tests do; those that train are beside it."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from persia_torchrec.ctx import DataCtx
from persia_torchrec.env import get_replica_index, get_replica_size
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch

NUM_BATCHES = 6
SLOTS = {"slots_config": {"age": {"dim": 4}}}


def send():
    """Send this loader's part of the batches: by threads in a block, then without."""
    numbers = range(get_replica_index(), NUM_BATCHES, get_replica_size())
    with DataCtx() as ctx, ThreadPoolExecutor(2) as pool:
        list(pool.map(ctx.send_data, map(make_batch, numbers[::2])))
    ctx = DataCtx()
    for number in numbers[1::2]:
        ctx.send_data(make_batch(number))


def make_batch(number):
    ids = [np.array([number], dtype=np.uint64)]
    label = Label(np.zeros((1, 1), dtype=np.float32))
    return PersiaBatch([IDTypeFeature("age", ids)], labels=[label])


if __name__ == "__main__":
    sys.exit(send())
