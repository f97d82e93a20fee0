"""The histogram of how stale rows were, put together from what the servers count."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

Histogram = npt.NDArray[np.int64]

_PREFIX = "staleness_"


def staleness_histogram(counters: Iterable[Mapping[str, int]]) -> Histogram:
    """Add up the ``staleness_0``, ``staleness_1``, ... of each server's counters.

    Returns:
        int64, one element a staleness, up to the largest that any server has seen.
    """
    total: dict[int, int] = {0: 0}
    for of_server in counters:
        for name, num in of_server.items():
            if name.startswith(_PREFIX):
                staleness = int(name.removeprefix(_PREFIX))
                total[staleness] = total.get(staleness, 0) + num
    histogram: Histogram = np.zeros(max(total) + 1, dtype=np.int64)
    histogram[list(total)] = list(total.values())
    return histogram
