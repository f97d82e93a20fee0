"""Batches of the one feature that the tests of workers have."""

from itertools import chain

import numpy as np

from persia_torchrec.lookup.bags import Bags, FeatureSpec
from tests.support.servers import ids_of

FEATURE = FeatureSpec(name="item", key="item", table="item")


def bags_of(*samples: list[int], name: str = "item") -> dict[str, Bags]:
    """Return the bags of a feature, as bags_of([7, 8], [], [7])."""
    lengths = np.array([len(sample) for sample in samples], dtype=np.int32)
    return {name: Bags(ids_of(*chain.from_iterable(samples)), lengths)}
