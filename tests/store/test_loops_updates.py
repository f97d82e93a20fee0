"""How tables of a store are updated, with weights of 32 and of 16 bits.

In float32 sums may be taken in another order: ``RTOL`` and ``ATOL`` say how near the
weights must be after all steps. Weights kept in 16 bits must be as near as their last
bit lets them be. ``test_steps.py`` has the steps of all optimizers, of tables too.
"""

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from persia_torchrec.embedding.initializer import Constant
from persia_torchrec.embedding.optim import FTRL, LAMB, SGD, Adagrad, Adam, RowwiseAdam
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore, UpdateResult
from persia_torchrec.table import TableSpec
from tests.support.optimizers import EVERY_OPTIMIZER
from tests.support.servers import ids_of
from tests.support.trained_elsewhere import NUM_ROWS, batches, train_with_fbgemm
from tests.support.trained_table import EVERY_DIM, OneTable, train_table

RTOL = ATOL = 4e-6

LAST_BITS = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""Of a weight in [1, 2), the distance to the next one; or a little more than that."""


@pytest.mark.parametrize("dim", EVERY_DIM)
def test_a_shared_accumulator_takes_the_mean_of_the_decayed_squares(dim):
    # Not left to fbgemm, which ignores the weight decay of this optimizer on CPUs.
    weights, [(rows, grads), *_] = batches(dim, some_rows=False)
    optimizer = Adagrad(0.1, 0.5, 0.3, g_square_momentum=0.25, vectorwise_shared=True)
    table = OneTable(optimizer, weights)
    table.step(rows, grads)
    decayed = grads.astype(np.float64) + 0.3 * weights[rows]
    kept = 0.25 * 0.5 + (decayed**2).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(table.state[rows], kept, rtol=RTOL)
    expected = weights[rows] - 0.1 * decayed / np.sqrt(kept)
    np.testing.assert_allclose(table.weights[rows], expected, rtol=RTOL, atol=ATOL)


def test_an_accumulator_forgets_at_the_rate_of_its_momentum():
    optimizer = Adagrad(1.0, 2.0, g_square_momentum=0.5, eps=0)
    table = OneTable(optimizer, np.zeros((1, 2), dtype=np.float32))
    table.step([0], np.array([[1, 2]], dtype=np.float32))
    table.step([0], np.array([[0, 0]], dtype=np.float32))
    assert table.state.tolist() == [[1.0, 2.5]]


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(1.0),
        SGD(1.0, momentum=0.5),
        Adagrad(9.0),
        Adagrad(9.0, vectorwise_shared=True),
        Adam(9.0),
    ],
)
def test_the_weight_bound_clamps_the_weights_and_not_the_state(optimizer):
    grads = np.array([[-3, 3, 0]], dtype=np.float32)
    weights = np.array([[0, 0, 0.5]], dtype=np.float32)
    bounded = OneTable(optimizer, weights, weight_bound=0.25)
    free = OneTable(optimizer, weights)
    for table in (bounded, free):
        table.step([0], grads)
    assert bounded.weights.tolist() == [[0.25, -0.25, 0.25]]
    assert np.abs(free.weights).max() > 0.25
    assert np.array_equal(bounded.state, free.state)


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_gradient_that_is_not_finite_is_rejected_and_the_others_are_applied(name):
    weights = np.ones((3, 3), dtype=np.float32)
    table, other = (OneTable(EVERY_OPTIMIZER[name], weights) for _ in range(2))
    before = table.store.read(0, table.ids)
    bad = [[1, np.nan, 1], [1, 1, 1], [-np.inf, 0, 0]]
    result = table.store.update(0, table.ids, np.array(bad, dtype=np.float32))
    assert result == UpdateResult(0, 2)
    after = table.store.read(0, table.ids)
    assert np.array_equal(after[[0, 2]], before[[0, 2]])
    other.step([1], np.ones((1, 3), dtype=np.float32))
    assert np.array_equal(after[1], other.store.read(0, table.ids)[1])
    assert not np.array_equal(after[1], before[1])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_one_step_of_16_bits_is_that_of_32_rounded_to_a_neighbour(name, dtype):
    weights, [(rows, grads), *_] = batches(8, some_rows=True)
    halves = OneTable(EVERY_OPTIMIZER[name], weights, weight_dtype=dtype)
    # The same weights to begin with: those that 16 bits can hold.
    whole = OneTable(EVERY_OPTIMIZER[name], halves.weights)
    for table in (halves, whole):
        table.step(rows, grads)
    assert np.array_equal(halves.state, whole.state)
    error = np.abs(halves.weights - whole.weights)
    size = np.maximum(np.abs(whole.weights), 2.0**-14)
    assert (error < LAST_BITS[dtype] * size).all()
    others = np.setdiff1d(np.arange(NUM_ROWS), rows)
    assert np.array_equal(halves.weights[others], whole.weights[others])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("optimizer", "fbgemms", "settings"),
    [
        (SGD(0.1), EmbOptimType.EXACT_SGD, {}),
        (Adagrad(0.1, 0, eps=1e-3), EmbOptimType.EXACT_ADAGRAD, {"eps": 1e-3}),
    ],
)
def test_a_table_of_16_bits_trains_nearly_as_one_of_32_on_fbgemm(
    optimizer, fbgemms, settings, dtype
):
    weights, steps = batches(64, some_rows=True)
    expected, _ = train_with_fbgemm(
        weights, steps, fbgemms, learning_rate=0.1, **settings
    )
    table = train_table(weights, steps, optimizer, weight_dtype=dtype)
    error = table.weights - expected
    # Weights stay below 2; each of nine roundings errs by less than the last bit.
    last_bit = 2 * LAST_BITS[dtype]
    assert np.abs(expected).max() < 2
    assert np.abs(error).max() < 9 * last_bit
    assert np.sqrt((error**2).mean()) < 1.5 * last_bit
    assert abs(error.mean()) < last_bit / 8
    assert error.any()


@pytest.mark.parametrize("optimizer", [Adam(0.1), RowwiseAdam(0.1), LAMB(0.1)])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_state_is_kept_beside_weights_of_any_dtype(optimizer, dtype):
    weights, steps = batches(3, some_rows=True)
    table = train_table(weights, steps, optimizer, weight_dtype=dtype)
    whole = train_table(weights, steps, optimizer)
    # The state of these follows from the gradients alone.
    assert np.array_equal(table.state, whole.state)
    assert table.state.all()


def test_the_correction_of_adams_means_does_not_run_out_of_digits():
    # 1 - 0.999999 ** t has two digits in float32; the first step must be lr.
    optimizer = Adam(0.5, (0.9, 0.999999), eps=0)
    table = OneTable(optimizer, np.zeros((1, 1), dtype=np.float32))
    table.step([0], np.ones((1, 1), dtype=np.float32))
    assert table.store.read(0, ids_of(0))[0, 0] == pytest.approx(-0.5, rel=1e-3)


def stepped(optimizer, dtype, engine="compiled", **settings):
    """Return a store with rows 0 and 1, which were stepped once."""
    spec = TableSpec(
        name="a",
        dim=8,
        optimizer=optimizer,
        weight_dtype=dtype,
        initializer=Constant(0.5),
        **settings,
    )
    store = EmbeddingStore(10, optimizer_engine=engine)
    store.add_table(spec)
    out = np.empty((2, 8), dtype=np.float32)
    store.lookup(0, ids_of(0, 1), out, training=True)
    store.update(0, ids_of(0, 1), np.full((2, 8), 0.1, dtype=np.float32))
    return store


@pytest.mark.parametrize("dtype", LAST_BITS)
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_step_that_would_leave_a_row_not_finite_moves_nothing(name, dtype):
    store, num_refused = stepped(EVERY_OPTIMIZER[name], dtype), 0
    for size in (1e20, -3e38, 3e38):
        before = store.read(0, ids_of(0, 1))
        grads = np.full((2, 8), 0.1, dtype=np.float32)
        grads[0] = size
        rejected = store.update(0, ids_of(0, 1), grads).num_refused
        after = store.read(0, ids_of(0, 1))
        assert np.isfinite(after).all()
        assert not rejected or (after[0] == before[0]).all()
        num_refused += rejected
    assert store.counters()["gradients_refused"] == num_refused
    store.update(0, ids_of(0, 1), np.full((2, 8), -0.3, dtype=np.float32))
    later = store.read(0, ids_of(0, 1))
    assert num_refused < 3 or (later[0] != after[0]).any()
    assert (later[1] != after[1]).any()


@pytest.mark.parametrize("settings", [{}, {"weight_bound": 2.0}])
@pytest.mark.parametrize("dtype", LAST_BITS)
@pytest.mark.parametrize(
    "optimizer", [SGD(9.0), Adagrad(0.1), Adagrad(0.1, vectorwise_shared=True)]
)
def test_fbgemm_leaves_rows_finite_too(optimizer, dtype, settings):
    fused, fbgemm = (
        stepped(optimizer, dtype, engine, **settings)
        for engine in ("compiled", "fbgemm")
    )
    for size in (1e20, -3e38, 3e38, 0.1):
        grads = np.full((2, 8), 0.1, dtype=np.float32)
        grads[0] = size
        results = [s.update(0, ids_of(0, 1), grads) for s in (fused, fbgemm)]
        assert results[0] == results[1]
        rows = [s.read(0, ids_of(0, 1)) for s in (fused, fbgemm)]
        assert np.isfinite(rows).all()
        np.testing.assert_allclose(*rows, rtol=1e-2)


@pytest.mark.parametrize(
    "optimizer",
    [Adagrad(0.1, 0, eps=0), FTRL(0.1, initial_accumulator_value=0), Adam(eps=0)],
)
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_a_division_by_zero_moves_nothing(optimizer, size):
    spec = TableSpec(name="a", dim=2, optimizer=optimizer, initializer=Constant(0.5))
    store = EmbeddingStore(10)
    store.add_table(spec)
    store.lookup(0, ids_of(1), np.empty((1, 2), np.float32), training=True)
    store.update(0, ids_of(1), np.full((1, 2), size, dtype=np.float32))
    assert np.isfinite(store.read(0, ids_of(1))).all()


@pytest.mark.parametrize("engine", ["compiled", "fbgemm"])
def test_rows_that_were_written_large_are_looked_at(engine):
    store = stepped(SGD(1.0), "fp32", engine)
    store.write(0, ids_of(0), np.full((1, 8), 3e38, dtype=np.float32))
    grads = np.full((2, 8), -1e9, dtype=np.float32)
    store.update(0, ids_of(0, 1), grads)
    store.write(0, ids_of(0), np.full((1, 8), np.nan, dtype=np.float32))
    assert store.update(0, ids_of(0, 1), grads).num_refused == 1
    store.clear()
    assert store.rows.tally[memory.HAS_LARGE] == 0


@pytest.mark.parametrize("is_stochastic", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_no_weight_exceeds_the_bound_in_any_dtype(dtype, is_stochastic):
    bound = np.float32(0.3)
    weights = np.zeros((3, 7), dtype=np.float32)
    grads = np.tile(np.array([-1.0, 1.0, -1e6], dtype=np.float32)[:, None], 7)
    settings = {"weight_dtype": dtype, "stochastic_rounding": is_stochastic}
    steps = [([0, 1, 2], grads)] * 5
    table = train_table(weights, steps, SGD(1.0), weight_bound=0.3, **settings)
    assert np.abs(table.weights).max() <= bound
    assert np.abs(table.weights).min() >= bound * (1 - 2**-7)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_bound_on_the_norm_holds_up_to_a_rounding_of_each_weight(dtype):
    weights, steps = batches(8, some_rows=False)
    optimizer = Adagrad(1.0, vectorwise_shared=True, max_norm=0.3)
    table = train_table(weights, steps, optimizer, weight_dtype=dtype)
    roundings = np.abs(table.weights) * 2.0 ** (-10 if dtype == "fp16" else -7)
    norms = np.linalg.norm(np.abs(table.weights) - roundings, axis=1)
    assert norms.max() <= 0.3
