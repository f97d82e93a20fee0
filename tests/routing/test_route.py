from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import BatchError
from persia_torchrec.routing.route import (
    FeatureColumns,
    IdGroup,
    add_prefix,
    farmhash64,
    hash_stack,
    is_of_shard,
    route_features,
    split_rows,
    sum_by_id,
    unique_ids,
)
from tests.support import reference
from tests.support.strategies import id_arrays

nums_shards = st.integers(1, 9)


@given(id_arrays(), nums_shards)
def test_the_inverse_restores_the_batch(ids_L, num_shards):
    unique = unique_ids(ids_L, num_shards)
    assert unique.inverse.dtype == np.int32
    assert np.array_equal(unique.ids[unique.inverse], ids_L)
    assert sorted(set(unique.inverse.tolist())) == list(range(len(unique.ids)))


@given(id_arrays())
def test_unique_ids_come_once_and_in_the_order_of_their_first_appearance(ids_L):
    assert unique_ids(ids_L).ids.tolist() == list(dict.fromkeys(ids_L.tolist()))


@given(id_arrays(), nums_shards)
def test_a_shard_gets_the_ids_whose_hash_names_it_in_their_order(ids_L, num_shards):
    split = unique_ids(ids_L, num_shards)
    assert len(split.offsets) == num_shards + 1
    for shard in range(num_shards):
        of_shard = split.ids[slice(*split.offsets[shard : shard + 2])]
        assert is_of_shard(of_shard, shard, num_shards).all()
        assert of_shard.tolist() == [
            id_
            for id_ in dict.fromkeys(ids_L.tolist())
            if reference.farmhash64(id_) % num_shards == shard
        ]


@given(st.integers(0, 63))
def test_ids_that_differ_in_any_one_bit_are_distinguished(bit):
    ids = np.arange(8, dtype=np.uint64) << np.uint64(bit)
    distinct = len(set(ids.tolist()))
    assert len(unique_ids(np.tile(ids, 3)).ids) == distinct


def test_a_large_batch_is_distinguished_too():
    ids = np.random.default_rng(0).integers(0, 30_000, 100_000, dtype=np.uint64)
    unique = unique_ids(ids)
    assert np.array_equal(np.sort(unique.ids), np.unique(ids))
    assert np.array_equal(unique.ids[unique.inverse], ids)


def test_a_batch_whose_ids_are_not_contiguous_keeps_them():
    ids = np.array([[7, 0], [3, 0], [7, 0]], dtype=np.uint64)[:, 0]
    unique = unique_ids(ids)
    assert unique.ids.tolist() == [7, 3]
    assert unique.inverse.tolist() == [0, 1, 0]


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_consecutive_ids_are_spread_evenly(num_shards):
    ids = np.arange(70_000, dtype=np.uint64)
    fractions = np.diff(unique_ids(ids, num_shards).offsets) / len(ids)
    assert np.abs(fractions - 1 / num_shards).max() < 0.01


@pytest.mark.parametrize(
    "ids",
    [np.array([1, 2]), np.array([0.5]), np.zeros((2, 2), np.uint64), np.uint64(3)],
)
def test_ids_other_than_a_flat_uint64_array_are_rejected(ids):
    message = rf"ids must be a flat uint64 array .*Received: dtype={ids.dtype}, shape="
    with pytest.raises(BatchError, match=message):
        unique_ids(ids)


@st.composite
def routes(draw):
    """Draw keys, features of some of them, and which group each table is in."""
    keys = draw(st.lists(id_arrays(), min_size=1, max_size=4))
    groups = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
    groups = np.unique(groups, return_inverse=True)[1].astype(np.int64)
    features = st.tuples(
        st.integers(0, len(keys) - 1),
        st.integers(0, len(groups) - 1),
        st.sampled_from([(0, 0), (1, 7), (3, 5)]),
        st.sampled_from([(0, 0), (2**56 - 1, 3 << 56)]),
    )
    return keys, groups, draw(st.lists(features, min_size=1, max_size=5))


@given(routes(), st.integers(1, 4))
def test_a_group_stands_by_shard_and_then_by_table(given, num_shards):
    keys, groups, features = given
    starts = np.cumsum([0, *map(len, keys)])
    columns = [(k, t, *stack, *prefix) for k, t, stack, prefix in features]
    columns = FeatureColumns(*np.array(columns, dtype=np.uint64).T.copy())
    shared = np.zeros(len(groups), dtype=np.uint64)
    route = route_features(
        np.concatenate(keys), starts, columns, groups, shared, num_shards
    )
    hashed = []
    for k, _, (rounds, size), (modulus, prefix) in features:
        ids = hash_stack(keys[k], rounds, size) if rounds else keys[k]
        hashed.append(add_prefix(ids, prefix, 8) if modulus else ids)
    ids, counts = [], []
    bases = np.zeros(len(groups), dtype=np.int64)
    for group in range(int(groups[-1]) + 1):
        members = np.flatnonzero(groups == group)
        bases[members] = len(ids)
        for shard in range(num_shards):
            for t in members:
                pieces = [h for h, f in zip(hashed, features, strict=True) if f[1] == t]
                counted = Counter(i for piece in pieces for i in piece.tolist())
                own = [
                    id_
                    for id_ in counted
                    if reference.farmhash64(id_) % num_shards == shard
                ]
                assert route.num_ids[shard, t] == len(own)
                ids += own
                counts += [counted[id_] for id_ in own]
    assert route.ids.tolist() == ids
    assert route.counts.tolist() == counts
    for f, expected in enumerate(hashed):
        places = route.inverse[route.starts[f] : route.starts[f + 1]]
        found = route.ids[bases[features[f][1]] + places]
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("num", [0, 1, 500])
def test_the_gradients_of_an_id_are_summed_in_their_order(num):
    generator = np.random.default_rng(num)
    ids = generator.integers(0, 7, num, dtype=np.uint64)
    grads = generator.standard_normal((num, 5)).astype(np.float32)
    unique, sums = sum_by_id(ids, grads)
    expected = np.zeros((len(unique.ids), 5), dtype=np.float32)
    np.add.at(expected, unique.inverse, grads)
    np.testing.assert_array_equal(unique.ids[unique.inverse], ids)
    np.testing.assert_array_equal(sums, expected)


def test_features_are_routed_by_group_shard_and_table():
    """One of table a, one of b, and the first key again as buckets of c."""
    ids = np.array([7, 3, 9, 3, 4, 9, 5], np.uint64)
    columns = [[0, 1, 0], [0, 1, 2], [0, 0, 2], [0, 0, 10], [0, 0, 0], [0, 0, 0]]
    features = FeatureColumns(*np.array(columns, np.uint64))
    groups, shared = np.array([0, 0, 1]), np.zeros(3, np.uint64)
    route = route_features(ids, np.array([0, 4, 7]), features, groups, shared, 2)
    found, counts = route.by_group([("a", "b"), ("c",)])
    stops = [*route.starts[1:], len(route.inverse)]
    given = ids[:4], ids[4:], hash_stack(ids[:4], 2, 10)
    for feature, (group, index) in enumerate([(0, 0), (0, 1), (1, 0)]):
        own = route.inverse[route.starts[feature] : stops[feature]]
        assert found[group].ids[own].tolist() == given[feature].tolist()
        repeats = Counter(given[feature].tolist())
        for shard, (start, stop) in enumerate(found[group].ranges_of(index)):
            here = found[group].ids[start:stop]
            assert (farmhash64(here) % np.uint64(2) == shard).all()
            assert [repeats.pop(id_) for id_ in here.tolist()] == (
                counts[group][start:stop].tolist()
            )
        assert not repeats


def test_flat_rows_are_split_by_table():
    rows = split_rows(
        np.arange(12, dtype=np.float32), np.array([0, 1, 3]), np.array([2, 5])
    )
    assert [of_table.tolist() for of_table in rows] == [
        [[0, 1]],
        [[2, 3, 4, 5, 6], [7, 8, 9, 10, 11]],
    ]


def test_ids_of_shared_rows_are_where_their_row_is():
    ids = unique_ids(np.arange(40, dtype=np.uint64), 3, shared_rows=5)
    ranges = IdGroup.of("a", ids).ranges_of(0)
    for shard, (start, stop) in enumerate(ranges):
        of_rows = farmhash64(ids.ids[start:stop] % np.uint64(5))
        assert (of_rows % np.uint64(3) == shard).all()
    assert ranges[-1][1] == 40
