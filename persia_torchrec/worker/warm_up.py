"""Compile, or load, every loop of the embedding worker before the first batch."""

import numpy as np

from persia_torchrec.routing.dedup import count_repeats
from persia_torchrec.routing.tables import route_ids
from persia_torchrec.wire import precision
from persia_torchrec.worker.pooling import FeatureBags, add_gradients, pool


def warm_up() -> None:
    """Run every loop once; the first time on a machine this takes some seconds."""
    precision.warm_up()
    ids = np.array([1, 2, 1], dtype=np.uint64)
    routed = route_ids(ids, [3], num_shards=2)
    counts = count_repeats(routed.inverse, len(routed.tables[0].ids))
    assert sorted(counts.tolist()) == [1, 2]
    rows = np.zeros((2, 4), dtype=np.float32)
    lengths = np.array([3], dtype=np.int32)
    bags = [FeatureBags(rows, routed.inverse, lengths, "sum")]
    add_gradients(pool(bags, 1), bags)
