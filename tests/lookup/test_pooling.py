from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.lookup.bags import POOLINGS
from persia_torchrec.lookup.pooling import BagsInRoute, RowPieces, add_gradients, pool
from tests.support import reference

POOLING = st.sampled_from(POOLINGS)
MEAN = POOLINGS.index("mean")


class Feature(NamedTuple):
    """The bags of one feature, and the rows of its table, or the sums of gradients."""

    rows: RowPieces
    inverse: np.ndarray  # int32 (L,)
    lengths: np.ndarray  # int32 (B,)
    pooling: str

    @staticmethod
    def side_by_side(features):
        """Return the bags of features, each with a group of its own."""
        nums = np.array([len(f.inverse) for f in features])
        num_bags = np.array([len(f.lengths) for f in features])
        return BagsInRoute(
            [f.rows for f in features],
            np.arange(len(features)),
            np.concatenate([f.inverse for f in features]),
            np.cumsum(nums) - nums,
            nums,
            np.concatenate([f.lengths for f in features]),
            np.cumsum(num_bags) - num_bags,
            {},
            np.array([POOLINGS.index(f.pooling) for f in features]),
        )


@st.composite
def batches(draw):
    """Bags of some features, and how many samples they have."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_samples = draw(st.integers(0, 9))
    dims = draw(st.lists(st.sampled_from([1, 3, 8, 17, 64]), min_size=1, max_size=4))
    features = []
    for dim in dims:
        rows = rng.standard_normal((rng.integers(1, 6), dim)).astype(np.float32)
        longest = draw(st.sampled_from([1, 4]))
        lengths = rng.integers(0, longest + 1, num_samples, dtype=np.int32)
        inverse = rng.integers(0, len(rows), lengths.sum(), dtype=np.int32)
        pieces = np.split(rows, [rng.integers(0, len(rows) + 1)])  # of two servers
        features.append(Feature(RowPieces.of(pieces), inverse, lengths, draw(POOLING)))
    return features, num_samples


def matrix(feature):
    """The rows of a feature as one array."""
    return np.concatenate(feature.rows.pieces)


@given(batches())
def test_bags_are_pooled_as_in_the_reference(batch):
    features, num_samples = batch
    pooled = pool(Feature.side_by_side(features), num_samples)
    expected = [
        reference.pool(matrix(f)[f.inverse], f.lengths, f.pooling) for f in features
    ]
    assert pooled.dtype == np.float32
    assert pooled.flags.c_contiguous
    np.testing.assert_allclose(
        pooled, np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("written", [True, False])
@given(batch=batches())
def test_gradients_are_summed_over_every_occurrence_of_a_row(batch, written):
    features, num_samples = batch
    dims = [f.rows.dim for f in features]
    rng = np.random.default_rng(num_samples)
    grads = rng.standard_normal((num_samples, sum(dims))).astype(np.float32)
    ones = [np.ones_like(matrix(f)) for f in features]
    sums = [
        f._replace(rows=RowPieces.of([one], written=written))
        for f, one in zip(features, ones, strict=True)
    ]
    add_gradients(grads, Feature.side_by_side(sums))
    for f in sums:
        f.rows.clear_unwritten()
    of_features = np.split(grads, np.cumsum(dims)[:-1], axis=1)
    for f, of_feature, added in zip(features, of_features, ones, strict=True):
        expected = np.full(added.shape, float(written))
        bag_of = np.repeat(np.arange(num_samples), f.lengths)
        for row, b in zip(f.inverse, bag_of, strict=True):
            expected[row] += reference.scale(f.lengths[b], f.pooling) * of_feature[b]
        np.testing.assert_allclose(added, expected, rtol=1e-5, atol=1e-5)


def test_features_that_share_a_table_add_to_the_same_rows():
    rows = np.zeros((2, 1), dtype=np.float32)
    inverse, lengths = np.array([0, 1, 1], dtype=np.int32), np.ones(3, dtype=np.int32)
    features = [
        Feature(RowPieces.of([rows]), inverse, lengths, "sum"),
        Feature(RowPieces.of([rows]), inverse[::-1], lengths, "sum"),
    ]
    grads = np.array([[1, 8], [2, 16], [4, 32]], dtype=np.float32)
    add_gradients(grads, Feature.side_by_side(features))
    assert rows.tolist() == [[1 + 32], [2 + 4 + 8 + 16]]


def test_arrays_that_are_parts_of_others_are_read_right():
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    inverse = np.arange(12, dtype=np.int32)[::4]  # 0, 4, 8
    lengths = np.array([[1, 9], [0, 9], [1, 9]], dtype=np.int32)[:, 0]
    one = np.zeros(1, dtype=np.int64)
    of_ids = inverse[:2], one, one + 2
    bags = BagsInRoute(
        [RowPieces.of([rows])], one, *of_ids, lengths, one, {}, one + MEAN
    )
    assert pool(bags, 3).tolist() == [[0, 1], [0, 0], [8, 9]]
    grads = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    add_gradients(grads, bags)
    assert rows[[0, 4]].tolist() == [[0, 3], [16, 19]]


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [
        ("sum", [[4, 8], [0, 0], [1, 2]]),
        ("mean", [[1, 2], [0, 0], [1, 2]]),
        ("sqrt", [[2, 4], [0, 0], [1, 2]]),
    ],
)
def test_an_id_counts_as_often_as_it_comes_and_an_empty_bag_gives_zeros(
    pooling, pooled
):
    rows = np.array([[1, 2]], dtype=np.float32)
    inverse = np.zeros(5, dtype=np.int32)
    lengths = np.array([4, 0, 1], dtype=np.int32)
    bags = Feature(RowPieces.of([rows]), inverse, lengths, pooling)
    assert pool(Feature.side_by_side([bags]), 3).tolist() == pooled


def test_a_row_is_taken_from_the_piece_that_has_it():
    pieces = np.arange(4, dtype=np.float32).reshape(2, 2), np.full((1, 2), 9, "f4")
    taken = RowPieces.of(pieces).take(np.array([2, 0, 1, 2], dtype=np.int32))
    assert taken.tolist() == [[9, 9], [0, 1], [2, 3], [9, 9]]
