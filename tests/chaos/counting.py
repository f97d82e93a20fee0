"""The data loader of a job that counts: an id's weight is how often it was trained.

It sends the batches up to the number in the file ``end``, if there is one. Its NN
worker is ``counting_trainer.py``.
"""

import itertools
from pathlib import Path

import numpy as np

from persia_torchrec.ctx import DataCtx
from persia_torchrec.env import get_replica_index, get_replica_size
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch

CONFIG = """
feature_index_prefix_bit: 8
slots_config:
  item: {dim: 4}
"""
NUM_SHARED = 200  # ids that many batches have
NUM_OWN = 24  # ids that no other batch has: each server has some of them
NUM_SAMPLES = 8


def shared_ids(number):
    """Return the ids of a batch that others have, too; some occur twice."""
    return np.random.default_rng(number).integers(0, NUM_SHARED, 2 * NUM_SAMPLES)


def own_ids(number):
    """Return the ids of a batch that no other has."""
    return NUM_SHARED + NUM_OWN * number + np.arange(NUM_OWN)


def all_ids(num_batches):
    """Return all ids of the first batches."""
    return np.arange(NUM_SHARED + NUM_OWN * num_batches)


def make_batch(number):
    """Return the same batch for the same number."""
    ids = np.concatenate([own_ids(number), shared_ids(number)]).astype(np.uint64)
    samples = np.split(ids, NUM_SAMPLES)
    labels = np.array([[sample.sum() % 3 == 0] for sample in samples], np.float32)
    return PersiaBatch([IDTypeFeature("item", samples)], labels=[Label(labels)])


def main():
    end = Path("end")
    with DataCtx() as ctx:
        for number in itertools.count(get_replica_index(), get_replica_size()):
            if end.exists() and number >= int(end.read_text()):
                break
            ctx.send_data(make_batch(number))


if __name__ == "__main__":
    main()
