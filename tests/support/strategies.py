"""What Hypothesis draws ids from, and batches."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia_torchrec.persia.batch import (
    DTYPES,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)

EDGE_IDS = (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
"""Where signs, halves and overflows would show."""

ids = st.sampled_from(EDGE_IDS) | st.integers(0, 20) | st.integers(0, 2**64 - 1)
"""One id: often one that repeats, or one at an edge of what 64 bits hold."""


def id_arrays(max_size: int = 60) -> st.SearchStrategy[np.ndarray]:
    """Return arrays of ids, uint64 ``(N,)``."""
    return hnp.arrays(np.uint64, st.integers(0, max_size), elements=ids)


def ids_of_one_hash(hash_: int, owner: int, num: int) -> list[int]:
    """Return ids that the store's index hashes to one value, its steps undone.

    Args:
        hash_: in ``[0, 2**32)``.
        owner: number of the table plus one.
        num: how many.
    """
    ids = []
    for low in range(num):
        x = (hash_ << 32 | low) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
        x ^= x >> 29 ^ x >> 58
        x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
        x ^= x >> 32
        ids.append(x ^ owner * 0x9E3779B97F4A7C15 % 2**64)
    return ids


names = st.text(min_size=1, max_size=8)


@st.composite
def id_features(draw, name, num_samples):
    if draw(st.booleans()):
        data = draw(hnp.arrays(np.uint64, num_samples, elements=ids))
        return IDTypeFeatureWithSingleID(name, data)
    samples = hnp.arrays(np.uint64, st.integers(0, 4), elements=ids)
    return IDTypeFeature(
        name, draw(st.lists(samples, min_size=num_samples, max_size=num_samples))
    )


@st.composite
def dense_arrays(draw, num_samples):
    shape = (num_samples, *draw(st.lists(st.integers(0, 3), max_size=2)))
    return draw(hnp.arrays(draw(st.sampled_from(DTYPES)), shape))


@st.composite
def batches(draw):
    """Any ``PersiaBatch`` there can be, small."""
    num_samples = draw(st.integers(1, 5))
    dense = st.lists(dense_arrays(num_samples), max_size=3)
    unique_names = st.lists(names, min_size=1, max_size=3, unique=True)
    batch = PersiaBatch(
        [draw(id_features(name, num_samples)) for name in draw(unique_names)],
        [NonIDTypeFeature(data, f"d{i}") for i, data in enumerate(draw(dense))],
        [Label(np.zeros(num_samples)), *(Label(data) for data in draw(dense))],
        requires_grad=draw(st.booleans()),
        meta=draw(st.none() | st.binary(max_size=20)),
    )
    batch.batch_id = draw(st.none() | st.integers(0, 2**63 - 1))
    return batch
