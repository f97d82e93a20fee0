"""Weights in 16 bits: against NumPy's halves, and bits of float32 one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia_torchrec import Constant
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.jit.compiled import compiled
from persia_torchrec.jit.float16 import (
    BF16,
    FP16,
    round_stochastically,
    round_to_nearest,
    widen,
)
from persia_torchrec.jit.intrinsics import floats_at, halves_at
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store
from tests.support.servers import ids_of

DTYPES = {"fp16": FP16, "bf16": BF16}
LARGEST = {"fp16": 65504.0, "bf16": float(2**128 - 2**120)}
ALL_HALVES = np.arange(2**16, dtype=np.uint16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
weights = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.floats(width=32, allow_nan=False)
    | st.floats(-70000, 70000, width=32)
    | st.floats(-(2.0**-13), 2.0**-13, width=32),
)


def values_of(halves, dtype):
    """Return what bits mean, as float64."""
    if dtype == "fp16":
        return halves.view(np.float16).astype(np.float64)
    words = halves.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return words.view(np.float32).astype(np.float64)


def all_values(dtype):
    """Return every finite value, in ascending order, zero once."""
    values = values_of(ALL_HALVES, dtype)
    return np.unique(values[np.isfinite(values)])


VALUES = {dtype: all_values(dtype) for dtype in DTYPES}


def nearest(weights, dtype):
    """Return the bits of the nearest values, ties to the even bits."""
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return np.clip(weights, -65504, 65504).astype(np.float16).view(np.uint16)
    bits = []
    for word in weights.view(np.uint32).tolist():
        upper, lower = word >> 16, word & 0xFFFF
        is_up = lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1)
        bits.append(upper + is_up)
    return np.array(bits, dtype=np.uint16)


def neighbours(weights, dtype):
    """Return the largest value that is not above, and the smallest not below."""
    weights = np.clip(weights.astype(np.float64), -LARGEST[dtype], LARGEST[dtype])
    values = VALUES[dtype]
    below = values[np.searchsorted(values, weights, side="right") - 1]
    return below, values[np.searchsorted(values, weights, side="left")]


@compiled
def run_to_nearest(weights, halves, dtype):
    w = floats_at(np.uint64(weights.ctypes.data))
    round_to_nearest(w, halves_at(np.uint64(halves.ctypes.data)), len(halves), dtype)


@compiled
def run_stochastically(weights, halves, dtype, seed):
    w = floats_at(np.uint64(weights.ctypes.data))
    h = halves_at(np.uint64(halves.ctypes.data))
    round_stochastically(w, h, len(halves), dtype, seed)


@compiled
def run_widen(halves, weights, dtype):
    h = halves_at(np.uint64(halves.ctypes.data))
    widen(h, floats_at(np.uint64(weights.ctypes.data)), len(halves), dtype)


def to_nearest(weights, dtype):
    halves = np.full(len(weights), 0x1234, dtype=np.uint16)
    run_to_nearest(np.ascontiguousarray(weights), halves, DTYPES[dtype])
    return halves


def stochastically(weights, dtype, seed):
    halves = np.full(len(weights), 0x1234, dtype=np.uint16)
    weights = np.ascontiguousarray(weights)
    run_stochastically(weights, halves, DTYPES[dtype], np.uint64(seed))
    return halves


def widened(halves, dtype):
    out = np.full(len(halves), 7, dtype=np.float32)
    run_widen(np.ascontiguousarray(halves), out, DTYPES[dtype])
    return out


@pytest.mark.slow
@each_dtype
def test_every_half_is_widened_to_its_value_and_rounds_to_itself(dtype):
    wide = widened(ALL_HALVES, dtype)
    values = values_of(ALL_HALVES, dtype)
    np.testing.assert_array_equal(wide, values)
    is_finite = np.isfinite(values)
    halves, wide = ALL_HALVES[is_finite], wide[is_finite]
    assert np.array_equal(to_nearest(wide, dtype), halves)
    for seed in range(20):
        assert np.array_equal(
            values_of(stochastically(wide, dtype, seed), dtype), values[is_finite]
        )


@each_dtype
@given(weights=weights)
def test_rounding_takes_the_nearest_and_of_two_the_even_one(dtype, weights):
    if dtype == "bf16":
        weights = weights[np.isfinite(weights)]
    assert np.array_equal(to_nearest(weights, dtype), nearest(weights, dtype))


@each_dtype
def test_ties_round_to_even(dtype):
    values = VALUES[dtype]
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    assert np.array_equal(to_nearest(middles, dtype), nearest(middles, dtype))
    for towards in (np.float32(-np.inf), np.float32(np.inf)):
        near = np.nextafter(middles, towards)
        assert np.array_equal(to_nearest(near, dtype), nearest(near, dtype))


@each_dtype
@given(weights=weights, seed=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_takes_one_of_the_two_neighbours(dtype, weights, seed):
    weights = weights[np.abs(weights) <= LARGEST[dtype]]
    below, above = neighbours(weights, dtype)
    rounded = values_of(stochastically(weights, dtype, seed), dtype)
    assert ((rounded == below) | (rounded == above)).all()


@each_dtype
@given(weights=weights, seed=st.integers(0, 2**64 - 1))
def test_the_same_seed_rounds_the_same_way(dtype, weights, seed):
    first = stochastically(weights, dtype, seed)
    assert np.array_equal(first, stochastically(weights, dtype, seed))


@each_dtype
def test_each_seed_and_each_weight_of_a_row_is_rounded_by_its_own_number(dtype):
    weights = np.full(256, 1 + 2**-12, dtype=np.float32)
    rows = np.array([stochastically(weights, dtype, seed) for seed in range(256)])
    other = np.array(
        [stochastically(weights, dtype, seed << 32) for seed in range(256)]
    )
    is_up = rows != 0x3C00 if dtype == "fp16" else rows != 0x3F80
    assert len({tuple(row) for row in rows}) > 200 or dtype == "bf16"
    assert 0 < is_up.mean() < 1
    assert is_up.any(axis=0).mean() > 0.9
    assert is_up.any(axis=1).mean() > 0.9
    assert np.array_equal(rows, other)


@each_dtype
@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
@pytest.mark.parametrize(
    "place", ["normal", "negative", "smallest", "subnormal", "large subnormal"]
)
def test_the_mean_of_stochastic_rounding_is_right(dtype, share, place):
    zero = np.searchsorted(VALUES[dtype], 0)
    at = {
        "normal": np.searchsorted(VALUES[dtype], 1.0),
        "negative": np.searchsorted(VALUES[dtype], -3.0),
        "smallest": zero,
        "subnormal": zero - 5,
        "large subnormal": zero + 900,
    }[place]
    below, above = VALUES[dtype][at : at + 2]
    weight = np.float32(below + share * (above - below))
    weights = np.full(4096, weight, dtype=np.float32)
    num = 64
    rounded = [
        values_of(stochastically(weights, dtype, s * 977), dtype) for s in range(num)
    ]
    is_up = np.array(rounded) == above
    expected = (float(weight) - below) / (above - below)
    sigma = np.sqrt(expected * (1 - expected) / is_up.size)
    assert abs(is_up.mean() - expected) < 4 * sigma + 1e-6


@each_dtype
def test_exact_values_stay_whatever_the_number_that_is_drawn(dtype):
    # Near 1023 steps of 2**-24 a float32 has 14 digits for what is added.
    values = (np.arange(1000, 1024) * 2.0**-24).astype(np.float32)
    if dtype == "bf16":
        values = widened(to_nearest(values, dtype), dtype)
    weights = np.tile(values, 4000)
    for seed in range(4):
        rounded = values_of(stochastically(weights, dtype, seed), dtype)
        assert np.array_equal(rounded, weights)


@each_dtype
@pytest.mark.parametrize("rounds", [to_nearest, lambda w, d: stochastically(w, d, 3)])
def test_nan_and_zero_are_unchanged(dtype, rounds):
    weights = np.array([np.nan, -np.nan, 0.0, -0.0], dtype=np.float32)
    rounded = values_of(rounds(weights, dtype), dtype)
    assert np.isnan(rounded[:2]).all()
    assert not rounded[2:].any()
    signalling = np.array([0x7F800001, 0xFF80FFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(values_of(rounds(signalling, dtype), dtype)).all()


@pytest.mark.parametrize("rounds", [to_nearest, lambda w, d: stochastically(w, d, 3)])
def test_no_half_becomes_infinite_and_no_infinity_a_number_of_bf16(rounds):
    large = [65504, 65505, 65519.996, 65520, 1e5, 3e38, np.inf]
    weights = np.array([*large, *(-w for w in large)], dtype=np.float32)
    expected = [65504.0] * len(large) + [-65504.0] * len(large)
    assert values_of(rounds(weights, "fp16"), "fp16").tolist() == expected
    infinite = np.array([np.inf, -np.inf], dtype=np.float32)
    assert values_of(rounds(infinite, "bf16"), "bf16").tolist() == [np.inf, -np.inf]


def tables(dim, optimizer, **settings):
    """Return a store with a table of each weight dtype, and the tables' numbers."""
    store = EmbeddingStore(1000)
    return store, {
        dtype: store.add_table(
            TableSpec(
                name=dtype, dim=dim, optimizer=optimizer, weight_dtype=dtype, **settings
            )
        )
        for dtype in ("fp32", "fp16", "bf16")
    }


def look_up(store, table, ids):
    out = np.empty((len(ids), store.tables[table].dim), dtype=np.float32)
    store.lookup(table, ids, out, training=True)
    return out


@pytest.mark.parametrize("optimizer", [SGD(1.0), Adagrad(0.002, 1.0)])
def test_small_updates_add_up_in_16_bits_as_they_do_in_32(optimizer):
    # Of a step of 0.001, a weight of 1 or 2 keeps nothing in bf16 if it is rounded to
    # the nearest, where the last bit is 1 / 128.
    dim, num_steps = 16, 300
    store, numbers = tables(dim, optimizer, initializer=Constant(2.0))
    ids = np.arange(50, dtype=np.uint64)
    grads = np.full((len(ids), dim), 0.001, dtype=np.float32)
    if isinstance(optimizer, Adagrad):
        grads[:] = 0.5
    moved = {}
    for dtype, table in numbers.items():
        look_up(store, table, ids)
        for _ in range(num_steps):
            store.update(table, ids, grads)
        moved[dtype] = look_up(store, table, ids) - 2
    for dtype in ("fp16", "bf16"):
        state = store.read(numbers[dtype], ids)[:, dim:]
        assert np.array_equal(state, store.read(numbers["fp32"], ids)[:, dim:])
        expected = moved["fp32"].mean()
        assert expected < -0.05
        assert moved[dtype].mean() == pytest.approx(expected, rel=0.05)
        assert moved[dtype].std() > 0  # each weight by chances of its own
    one_step = widened(to_nearest(np.float32([1.999]), "bf16"), "bf16")
    assert one_step == 2


def test_an_update_rounds_by_the_id_and_the_step_and_by_nothing_else():
    rows = []
    for ids in (ids_of(3, 1, 2), ids_of(2, 3)):
        store, numbers = tables(8, SGD(0.001), initializer=Constant(1.0))
        look_up(store, numbers["bf16"], ids)
        for _ in range(9):
            store.update(numbers["bf16"], ids, np.ones((len(ids), 8), np.float32))
        rows.append(store.read(numbers["bf16"], ids_of(2, 3)))
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0][0], rows[0][1])


@pytest.mark.parametrize(("dim", "saved"), [(1, 0), (2, 0), (5, 8), (8, 16), (64, 128)])
def test_weights_take_two_bytes_each_and_a_row_whole_words(dim, saved):
    store, numbers = tables(dim, SGD(0.5))
    ids = np.arange(40, dtype=np.uint64)
    weights = np.random.default_rng(dim).normal(0, 1, (40, dim)).astype(np.float32)
    sizes = {}
    for dtype, table in numbers.items():
        alone = EmbeddingStore(1000)
        alone.add_table(store.tables[table])
        look_up(alone, 0, ids)
        sizes[dtype] = alone.counters()["bytes"]
        store.write(table, ids, weights)
    for dtype, table in numbers.items():
        found = store.read(table, ids)
        if dtype == "fp32":
            assert np.array_equal(found, weights)
        else:
            halves = nearest(weights.ravel(), dtype)
            assert np.array_equal(found.ravel(), values_of(halves, dtype))
            assert sizes["fp32"] - sizes[dtype] == 40 * saved
        assert np.array_equal(look_up(store, table, ids), found)
    check_store(store)
