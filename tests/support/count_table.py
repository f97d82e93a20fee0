"""A table whose weights count updates, the feature that looks it up, and a push."""

import time

import numpy as np

from persia_torchrec import Constant
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.lookup.bags import Bags, FeatureSpec
from persia_torchrec.table import TableSpec
from tests.support.servers import DEADLINE_S, ids_of

# With these, the weight of an id is the number of updates it has seen.
COUNT = TableSpec(name="count", dim=1, optimizer=SGD(1.0), initializer=Constant(0))
FEATURE = FeatureSpec(name="count", key="count", table="count")
ONE_UPDATE = (np.full((1, 1), -1, dtype=np.float32),)


def bags_of(*ids):
    lengths = np.array([len(ids)], dtype=np.int32)
    return {"count": Bags(ids_of(*ids), lengths)}


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
