"""The step of one row, by itself and in a table: against NumPy, fbgemm and torch.

In float32, where products may be fused with sums and sums taken in another order. What
a step adds to a number may be far larger than what is left of it, so that the error is
measured against the largest number of the row, before and after the step.
"""

import re
from functools import cache

import numba
import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.optim import (
    FTRL,
    LAMB,
    LARS,
    SGD,
    Adagrad,
    AdagradDecay,
    Adam,
    AdamAsync,
    AdamW,
    RowwiseAdam,
    RowwiseLAMB,
)
from persia_torchrec.jit.compiled import compiled, inlined_kernel, specialized
from persia_torchrec.jit.intrinsics import floats_at
from persia_torchrec.store.finite import bound_weights
from tests.support.optimizers import EVERY_OPTIMIZER, optimizers_by_kind
from tests.support.reference import Row, step
from tests.support.toy_optimizer import SignWithMemory
from tests.support.trained_elsewhere import batches, train_with_fbgemm, train_with_torch
from tests.support.trained_table import EVERY_DIM, train_table

pytestmark = pytest.mark.slow

RTOL = ATOL = 4e-6
FBGEMMS_DIMS = [4, 8, 64]

DRAWN = optimizers_by_kind(st.just(0.0) | st.floats(1e-3, 2), st.floats(1e-3, 2))


def float32s(*numbers):
    return np.array(numbers, dtype=np.float32)


@cache
def build_step(kernel):
    step_weights = inlined_kernel(kernel)

    def run(numbers, weights, state, grad):
        p = floats_at(np.uint64(numbers.ctypes.data))
        w = floats_at(np.uint64(weights.ctypes.data))
        s = floats_at(np.uint64(state.ctypes.data))
        g = floats_at(np.uint64(grad.ctypes.data))
        step_weights(p, w, s, g, len(weights))

    return specialized(run, kernel)


@compiled
def run_bound(weights, bound):
    bound_weights(floats_at(np.uint64(weights.ctypes.data)), len(weights), bound)


def step_row(optimizer, t, weights, state, grad):
    """Step the row that these arrays are."""
    numbers = float32s(*optimizer.step_numbers(len(weights), t))
    for floats in (weights, state, grad):
        assert floats.dtype == np.float32
        assert floats.flags.c_contiguous
    build_step(optimizer.kernel)(numbers, weights, state, grad)


def bound_row(weights, bound):
    run_bound(weights, np.float32(bound))


class Rows:
    """Rows that are stepped one after the other."""

    def __init__(self, optimizer, weights):
        num, dim = weights.shape
        self.optimizer = optimizer
        self.weights = weights.astype(np.float32)
        self.state = np.tile(optimizer.initial_state(dim), (num, 1))
        self.num_steps = 0

    def step(self, rows, grads):
        self.num_steps += 1
        grads = grads.astype(np.float32)
        grads.flags.writeable = False
        for row, grad in zip(rows, grads, strict=True):
            weights, state = self.weights[row], self.state[row]
            step_row(self.optimizer, self.num_steps, weights, state, grad)


def train_rows(weights, steps, optimizer):
    rows = Rows(optimizer, weights)
    for numbers, grads in steps:
        rows.step(numbers, grads)
    return rows


by_rows_and_tables = pytest.mark.parametrize("train_here", [train_rows, train_table])


def step_one(optimizer, weights, grad):
    """Return weights and state of a new row after its first step."""
    rows = Rows(optimizer, np.array([weights]))
    rows.step([0], np.array([grad]))
    return rows.weights[0], rows.state[0]


def assert_near(found, expected, before, *, spread=0.0):
    largest = max(np.abs(expected).max(initial=0), np.abs(before).max(initial=0))
    atol = 4e-6 * largest + spread + 1e-30
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def state_at(optimizer, dim, t, rng):
    """Return what the state of a row may be before step ``t``."""
    state = optimizer.initial_state(dim)
    state += rng.uniform(0, 3, len(state)).astype(np.float32)
    if isinstance(optimizer, AdagradDecay):
        state[dim] = rng.integers(0, (t - 1) // optimizer.decay_step, endpoint=True)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
@given(
    data=st.data(),
    dim=st.integers(1, 70),
    first_step=st.integers(1, 100),
    scale=st.sampled_from([1e-2, 1.0, 10.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_moves_by_the_formula(kind, data, dim, first_step, scale, seed):
    optimizer = data.draw(DRAWN[kind])
    rng = np.random.default_rng(seed)
    weights = rng.uniform(-1, 1, dim).astype(np.float32)
    state = state_at(optimizer, dim, first_step, rng)
    for t in range(first_step, first_step + 3):
        grad = rng.normal(0, scale, dim).astype(np.float32)
        grad[rng.random(dim) < 0.1] = 0
        # The gradient and the L2 penalty may almost cancel each other out.
        row, nudged = (
            Row(weights.astype(np.float64), state.astype(np.float64)) for _ in range(2)
        )
        step(optimizer, row, grad.astype(np.float64), t)
        step(optimizer, nudged, grad.astype(np.float64) * (1 + 2**-20), t)
        before = weights.copy(), state.copy()
        step_row(optimizer, t, weights, state, grad)
        spread = np.abs(nudged.weights - row.weights).max()
        assert_near(weights, row.weights, before[0], spread=spread)
        states = np.array([state, row.state, before[1]])
        if isinstance(optimizer, FTRL):  # z is a sum of such products
            roots = row.state[:dim] ** -optimizer.lr_power
            states[2, dim:] = np.abs(before[0]) * roots / optimizer.lr
        # Means, roots and counts are of different sizes: each is measured by itself.
        second = dim if len(state) > dim else 0
        for part in np.split(states, [second], axis=1):
            assert_near(*part)


@pytest.mark.parametrize("dim", FBGEMMS_DIMS)
@pytest.mark.parametrize(
    ("optimizer", "fbgemms", "settings"),
    [
        (SGD(0.1), EmbOptimType.EXACT_SGD, {}),
        (
            Adagrad(0.1, initial_accumulator_value=0, eps=1e-3),
            EmbOptimType.EXACT_ADAGRAD,
            {"eps": 1e-3},
        ),
        (
            Adagrad(0.1, 0, eps=1e-8, vectorwise_shared=True),
            EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            {"eps": 1e-8},
        ),
        # The CPU kernel ignores the decay. If this fails, the docstring is out of date.
        (
            Adagrad(0.1, 0, eps=1e-8, vectorwise_shared=True),
            EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            {"eps": 1e-8, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        ),
    ],
)
@by_rows_and_tables
def test_training_is_as_on_fbgemm(optimizer, fbgemms, settings, dim, train_here):
    weights, steps = batches(dim, some_rows=True)
    expected, state = train_with_fbgemm(
        weights, steps, fbgemms, learning_rate=0.1, **settings
    )
    trained = train_here(weights, steps, optimizer)
    np.testing.assert_allclose(trained.weights, expected, rtol=RTOL, atol=ATOL)
    if state is not None:
        np.testing.assert_allclose(trained.state, state, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dim", EVERY_DIM)
@pytest.mark.parametrize(
    ("optimizer", "make_torchs"),
    [
        (
            SGD(0.1, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        ),
        (
            SGD(0.1, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
        ),
        (
            Adagrad(0.1, 0.5, weight_decay=0.1, eps=1e-3),
            lambda p: torch.optim.Adagrad(
                p, 0.1, initial_accumulator_value=0.5, weight_decay=0.1, eps=1e-3
            ),
        ),
        (
            Adam(0.1, (0.8, 0.99), weight_decay=0.1, eps=1e-3),
            lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.99), 1e-3, 0.1),
        ),
        (
            AdamW(0.1, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.99), 1e-3, 0.1),
        ),
        (AdamW(), torch.optim.AdamW),
    ],
)
@by_rows_and_tables
def test_training_is_as_on_torch(optimizer, make_torchs, dim, train_here):
    weights, steps = batches(dim, some_rows=False)
    expected = train_with_torch(weights, steps, make_torchs)
    trained = train_here(weights, steps, optimizer)
    np.testing.assert_allclose(trained.weights, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dim", EVERY_DIM)
@by_rows_and_tables
def test_adam_moves_only_the_rows_of_a_batch_as_torchs_sparse_one_does(dim, train_here):
    weights, steps = batches(dim, some_rows=True)
    expected = train_with_torch(
        weights, steps, lambda p: torch.optim.SparseAdam(p, 0.1), sparse=True
    )
    trained = train_here(weights, steps, Adam(0.1))
    np.testing.assert_allclose(trained.weights, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("dim", EVERY_DIM)
@pytest.mark.parametrize(
    ("rowwise", "full"),
    [
        (
            Adagrad(0.1, weight_decay=0.1, vectorwise_shared=True),
            Adagrad(0.1, weight_decay=0.1),
        ),
        (RowwiseAdam(0.1, weight_decay=0.1), AdamW(0.1, weight_decay=0.1)),
        (RowwiseLAMB(0.1, weight_decay=0.1), LAMB(0.1, weight_decay=0.1)),
    ],
)
def test_one_mean_a_row_is_enough_where_all_gradients_of_a_row_are_equal(
    rowwise, full, dim
):
    weights, steps = batches(dim, some_rows=True)
    steps = [(rows, np.repeat(grads[:, :1], dim, axis=1)) for rows, grads in steps]
    # Decay adds the weights, which must then be equal too.
    weights = np.repeat(weights[:, :1], dim, axis=1)
    found = train_rows(weights, steps, rowwise).weights
    expected = train_rows(weights, steps, full).weights
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_accumulator_decays_once_for_every_period_that_began():
    optimizer = AdagradDecay(
        1, initial_accumulator_value=1, decay_step=10, decay_rate=0.5
    )
    weights, grad = float32s(0, 0), float32s(0, 0)
    # The row was last updated in period 2, and it is now step 59: three later.
    state = float32s(64, 6, 2)
    step_row(optimizer, 59, weights, state, grad)
    assert state.tolist() == [8, 1, 5]
    step_row(optimizer, 59, weights, state, grad)
    assert state.tolist() == [8, 1, 5]
    step_row(optimizer, 60, weights, state, grad)
    assert state.tolist() == [4, 1, 6]


@pytest.mark.parametrize("first", [2**24 - 50, 2**25 - 50, 2**28, 2**40])
def test_periods_beyond_what_a_float_counts_decay_by_as_much_in_all(first):
    spacing = int(np.spacing(np.float32(first + 200)))
    optimizer = AdagradDecay(
        1, decay_step=1, decay_rate=0.5 ** (1 / spacing), initial_accumulator_value=1e-9
    )
    weights, state, grad = float32s(0), float32s(2.0**20, first), float32s(0)
    for period in range(first, first + 8 * spacing + 1, max(spacing // 64, 1)):
        step_row(optimizer, period, weights, state, grad)
    assert state[0] == pytest.approx(2.0**12, rel=0.02)


def test_an_accumulator_does_not_grow_when_a_server_counts_again():
    optimizer = AdagradDecay(1, decay_step=10, decay_rate=0.5)
    state = float32s(64, 2)
    step_row(optimizer, 1, float32s(0), state, float32s(1))
    assert state.tolist() == [65, 2]


@pytest.mark.parametrize(
    "optimizer", [LARS(0.5, eta=0.1, momentum=0), LARS(0.5, eta=0.1)]
)
def test_lars_steps_in_proportion_to_the_row(optimizer):
    weights, _ = step_one(optimizer, [3.0, 4.0], [0.0, 10.0])
    np.testing.assert_allclose(weights, [3, 4 - 0.5 * 0.1 * 5], rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (LARS(0.5, eta=0.1), [-1, -2]),
        (LARS(0.5, eta=0.1, momentum=0, weight_decay=0.1), [-1, -2]),
        (LAMB(0.5), [-0.5, -0.5]),
        (RowwiseLAMB(0.5), [-0.5 * 2 / 10**0.5, -0.5 * 4 / 10**0.5]),
    ],
)
def test_a_zero_row_moves_as_if_its_length_were_that_of_the_step(optimizer, expected):
    weights, _ = step_one(optimizer, [0.0, 0.0], [2.0, 4.0])
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_row_without_weights_and_gradient_stays(name):
    weights, state = step_one(EVERY_OPTIMIZER[name], [0.0] * 9, [0.0] * 9)
    assert weights.tolist() == [0] * 9
    assert np.isfinite(state).all()


def test_lamb_moves_a_row_by_its_own_length():
    weights = np.array([3.0, 4.0])
    moved, _ = step_one(LAMB(0.1), weights, [7.0, -0.1])
    # The first quotient of the means is the gradient's sign.
    np.testing.assert_allclose(moved, weights - 0.1 * 5 / 2**0.5 * np.array([1, -1]))


@pytest.mark.parametrize("cls", [LAMB, RowwiseLAMB])
def test_lamb_survives_a_direction_whose_square_is_nearly_zero(cls):
    # The square of the direction is 1e-42, which float32 holds with two digits.
    weights, _ = step_one(cls(0.1, eps=1), [1.0], [1e-21])
    assert weights[0] == pytest.approx(0.9, rel=1e-2)


def test_ftrl_makes_a_weight_zero_until_its_gradients_exceed_l1():
    rows = Rows(FTRL(0.1, l1=1), np.zeros((1, 2)))
    rows.step([0], np.array([[0.75, -1.5]]))
    assert rows.weights[0, 0] == 0
    assert rows.weights[0, 1] > 0
    rows.step([0], np.array([[0.75, 1.5]]))
    assert rows.weights[0, 0] < 0
    assert rows.weights[0, 1] == 0


@pytest.mark.parametrize("power", [-0.5, -0.3, 0.0])
def test_ftrl_without_any_gradient_leaves_zero_and_no_nan(power):
    optimizer = FTRL(0.1, lr_power=power, initial_accumulator_value=0)
    weights, state = step_one(optimizer, [0.5] * 9, [0.0] * 9)
    assert weights.tolist() == [0] * 9
    assert state.tolist() == [0] * 18


def test_ftrl_keeps_of_the_initial_weights_what_its_docstring_says():
    optimizer = FTRL(0.1, initial_accumulator_value=1)
    weights, _ = step_one(optimizer, [0.5], [3.0])
    kept = 1 - (1 / 10) ** 0.5
    np.testing.assert_allclose(weights, [0.5 * kept - 0.1 * 3 / 10**0.5], rtol=1e-5)


@pytest.mark.parametrize("dim", EVERY_DIM)
def test_ftrl_without_penalties_trains_as_adagrad_after_the_first_step(dim):
    rng = np.random.default_rng(dim)
    first, *rest = rng.standard_normal((6, 1, dim))
    ftrl = Rows(FTRL(0.1), rng.uniform(-1, 1, (1, dim)))
    ftrl.step([0], first)
    adagrad = Rows(Adagrad(0.1, eps=0), ftrl.weights)
    adagrad.state[:] = ftrl.state[:, :dim]
    for grads in rest:
        ftrl.step([0], grads)
        adagrad.step([0], grads)
    np.testing.assert_allclose(ftrl.weights, adagrad.weights, rtol=1e-4, atol=1e-5)


def test_ftrl_without_power_is_gradient_descent_from_zero():
    rows = Rows(FTRL(0.1, lr_power=0), np.ones((1, 2)))
    for grads in ([[1.0, 2.0]], [[3.0, -1.0]]):
        rows.step([0], np.array(grads))
    np.testing.assert_allclose(rows.weights, [[-0.4, -0.1]], rtol=1e-6)


@pytest.mark.parametrize("dim", EVERY_DIM)
def test_adam_async_is_adam_where_eps_does_not_matter(dim):
    weights, steps = batches(dim, some_rows=True)
    found = train_rows(weights, steps, AdamAsync(0.1, eps=1e-30)).weights
    expected = train_rows(weights, steps, Adam(0.1, eps=1e-30)).weights
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=ATOL)


def test_adam_async_adds_eps_to_the_root_before_it_is_corrected():
    weights, _ = step_one(AdamAsync(1, betas=(0, 0.75), eps=1), [0.0], [4.0])
    np.testing.assert_allclose(weights, [-4 * 0.5 / (2 + 1)], rtol=1e-6)


def test_nesterovs_step_sees_the_gradient_a_second_time():
    optimizer = AdamAsync(1, betas=(0.5, 0), eps=1e-30, use_nesterov=True)
    weights, state = step_one(optimizer, [0.0], [4.0])
    assert state[0] == 2  # m; the direction is 0.5 * 2 + 0.5 * 4, its rate 1 / 0.5
    np.testing.assert_allclose(weights, [-2 * 3 / 4], rtol=1e-6)


def test_rmsprop_takes_the_momentum_that_beta1_says():
    def train(beta1):
        betas = (beta1, 0.75)
        optimizer = AdamAsync(1, betas=betas, eps=3, apply_sparse_rmsprop=True)
        return train_rows(
            np.zeros((1, 1)),
            [([0], np.array([[2.0]])), ([0], np.zeros((1, 1)))],
            optimizer,
        )

    assert train(0.0).weights == [[-1]]  # 2 / sqrt(0.25 * 4 + 3)
    assert train(0.5).weights == [[-1.5]]
    assert train(0.5).state.tolist() == [[0.5, 0.75]]


def test_the_correction_of_adams_means_does_not_run_out_of_digits():
    # 1 - 0.999999 ** t has two digits in float32; the first step must be lr.
    for optimizer in (Adam(0.5, (0.9, 0.999999)), AdamW(0.5, betas=(0.9, 0.999999))):
        weights, _ = step_one(optimizer, [0.0], [1.0])
        assert weights[0] == pytest.approx(-0.5, rel=1e-3)


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
@pytest.mark.parametrize("dim", [1, 5, 16, 67])
def test_a_step_changes_its_row_and_nothing_else(name, dim):
    optimizer = EVERY_OPTIMIZER[name]
    state = optimizer.initial_state(dim)
    memory = np.full(dim + len(state) + 4, 7, dtype=np.float32)
    memory[2 : 2 + dim] = 0.5
    memory[2 + dim : -2] = state
    grad = np.ones(dim, dtype=np.float32)
    grad.flags.writeable = False
    step_row(optimizer, 1, memory[2 : 2 + dim], memory[2 + dim : -2], grad)
    assert memory[:2].tolist() == memory[-2:].tolist() == [7, 7]
    assert (memory[2 : 2 + dim] != 0.5).all()


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_nan_is_not_hidden(name):
    weights, _ = step_one(
        EVERY_OPTIMIZER[name], [0.5] * 9, [1.0] * 4 + [np.nan] + [1.0] * 4
    )
    assert np.isnan(weights[4])


@pytest.mark.parametrize("dim", [1, 4, 19])
def test_a_bound_clamps_weights_and_keeps_what_is_not_a_number(dim):
    weights = np.linspace(-2, 2, dim, dtype=np.float32)
    weights[-1] = np.nan
    free = weights.copy()
    expected = np.clip(weights, -0.5, 0.5)
    bound_row(weights, 0.5)
    np.testing.assert_array_equal(weights, expected)
    bound_row(free, np.inf)
    np.testing.assert_array_equal(
        free[:-1], np.linspace(-2, 2, dim, dtype=np.float32)[:-1]
    )


KERNELS = {
    kernel.__name__: kernel
    for kernel in (optimizer.kernel for optimizer in EVERY_OPTIMIZER.values())
} | {"from outside of the package": SignWithMemory().kernel}


@pytest.mark.parametrize("name", KERNELS)
def test_a_loop_is_made_of_vectors_of_single_precision(name):
    step_weights = inlined_kernel(KERNELS[name])

    @numba.njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
    def step(numbers, weights, state, grad):
        w = floats_at(np.uint64(weights.ctypes.data))
        s = floats_at(np.uint64(state.ctypes.data))
        g = floats_at(np.uint64(grad.ctypes.data))
        p = floats_at(np.uint64(numbers.ctypes.data))
        step_weights(p, w, s, g, len(weights))

    step(*(float32s(*[0.5] * num) for num in (11, 8, 20, 8)))
    (code,) = step.inspect_llvm().values()
    assert re.search(r"store <\d+ x float>", code)
    assert "fpext" not in code


@pytest.mark.parametrize("size", [1e-30, 1e-23, 1e-15, 1.0, 1e15])
@pytest.mark.parametrize("optimizer", [LAMB(0.1), RowwiseLAMB(0.1), LARS(0.1, eta=1.0)])
def test_a_step_is_in_proportion_to_the_row_whatever_its_magnitude(optimizer, size):
    weights = np.array([[0.5, -2.0, 1.0, 0.25]], dtype=np.float32)
    grads = np.array([[1.0, 2.0, -1.0, 3.0]], dtype=np.float32)
    whole = train_rows(weights, [([0], grads)], optimizer)
    scaled = train_rows(weights * np.float32(size), [([0], grads)], optimizer)
    np.testing.assert_allclose(scaled.weights / size, whole.weights, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e19, 1e30])
def test_a_step_of_lars_does_not_depend_on_the_magnitude_of_the_gradient(size):
    weights = np.array([[0.5, -2.0, 1.0, 0.25]], dtype=np.float32)
    grads = np.array([[1.0, 2.0, -1.0, 3.0]], dtype=np.float32)
    optimizer = LARS(0.1, eta=1.0, momentum=0)
    whole = train_rows(weights, [([0], grads)], optimizer)
    scaled = train_rows(weights, [([0], grads * np.float32(size))], optimizer)
    np.testing.assert_allclose(scaled.weights, whole.weights, rtol=1e-5)


@pytest.mark.parametrize(
    "optimizer", [SGD(1e-30, weight_decay=1e30), Adam(1e-20, weight_decay=1e20)]
)
def test_a_row_is_looked_at_where_the_weight_decay_is_absurd(optimizer):
    assert not optimizer.stays_finite
