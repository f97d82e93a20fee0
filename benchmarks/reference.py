"""What rows must hold: ids, their first weights, and the same updates in NumPy.

Every id has a number, counted from 0, whose mixed bits it is. The number also tells the
row's weights, so that a row of another id is noticed. The formulas are those of
``embedding/optim.py``, in double precision; no code is shared with what is measured.

Dimension key:
    N: ids of one request
    D: embedding dim
    S: optimizer-state floats per row, W = D + S
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.embedding.initializer import Uniform
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam, Optimizer
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.table import TableSpec

Numbers = npt.NDArray[np.int64]

OPTIMIZERS: dict[str, Optimizer] = {
    "adagrad": Adagrad(lr=0.05),
    "rowwise_adagrad": Adagrad(lr=0.05, vectorwise_shared=True),
    "sgd": SGD(lr=0.05),
    "adam": Adam(lr=0.05),
}

INITIAL_WEIGHT = 0.25
"""Every weight of a row that a lookup makes."""

_RELATIVE, _ABSOLUTE = np.float32(1e-4), np.float32(1e-5)
"""Single precision, and sums in another order, explain no larger difference."""

_MUL_A = np.uint64(0xFF51AFD7ED558CCD)
_MUL_B = np.uint64(0xC4CEB9FE1A85EC53)
_ONE, _S33, _S41 = np.uint64(1), np.uint64(33), np.uint64(41)
_NO_SLOT = -1
_STEP = 2_654_435_761
"""A prime above every number of rows: its multiples modulo that number come once."""


def table_of(dim: int, optimizer: str = "adagrad") -> TableSpec:
    """Return the table that is measured; its optimizer is one of ``OPTIMIZERS``."""
    name, kind = f"dim{dim}", OPTIMIZERS[optimizer]
    constant = Uniform(INITIAL_WEIGHT, INITIAL_WEIGHT)
    return TableSpec(name=name, dim=dim, optimizer=kind, initializer=constant)


def ids_of(numbers_N: Numbers) -> Ids:
    """Return the ids of numbers, uint64 ``(N,)``, all different."""
    ids_N = numbers_N.astype(np.uint64)
    ids_N = (ids_N ^ (ids_N >> _S33)) * _MUL_A  # each step can be undone
    ids_N = (ids_N ^ (ids_N >> _S33)) * _MUL_B
    return ids_N ^ (ids_N >> _S33)


def scattered(numbers_N: Numbers, num: int) -> Numbers:
    """Permute the numbers below ``num``."""
    return numbers_N * _STEP % num


def chunks(stop: int, start: int = 0, size: int = 65_536) -> Iterator[Numbers]:
    """Yield the numbers from ``start`` to ``stop``, some at a time."""
    for first in range(start, stop, size):
        yield np.arange(first, min(first + size, stop))


def weights_of(ids_N: Ids, dim: int) -> Floats:
    """Return the weights written for ids, float32 ``(N, D)`` in ``[-1, 1)``."""
    factors_D = ids_of(np.arange(1, dim + 1)) | _ONE  # odd: keeps all bits of the id
    bits_ND = (ids_N[:, None] * factors_D) >> _S41
    return bits_ND.astype(np.float32) * np.float32(2.0**-22) - np.float32(1)


def first_rows(spec: TableSpec, numbers_N: Numbers, num_filled: int) -> Floats:
    """Return rows before any update, float32 ``(N, W)``.

    Those of the numbers below ``num_filled`` were written; a lookup makes the others.
    """
    rows_NW = np.empty((len(numbers_N), spec.dim + spec.num_state_floats), np.float32)
    rows_NW[:, : spec.dim] = weights_of(ids_of(numbers_N), spec.dim)
    rows_NW[numbers_N >= num_filled, : spec.dim] = INITIAL_WEIGHT
    rows_NW[:, spec.dim :] = spec.optimizer.initial_state(spec.dim)
    return rows_NW


class ExpectedRows:
    """Weights and optimizer state that the rows of one table must have.

    Only rows that have been asked for take memory. All numbers are below
    ``num_numbers``; ``num_filled`` is that of :func:`first_rows`.
    """

    def __init__(self, spec: TableSpec, num_filled: int, num_numbers: int) -> None:
        self._spec, self._num_filled = spec, num_filled
        self._num_updates = self._num_made = 0
        # Slots are given in the order of the first request.
        self._slots = np.full(num_numbers, _NO_SLOT, dtype=np.int32)
        width = spec.dim + spec.num_state_floats
        self._floats = np.empty((num_numbers, width), dtype=np.float32)

    def floats(self, numbers_N: Numbers) -> Floats:
        """Return weights and state of numbers without repeats, float32 ``(N, W)``."""
        new = numbers_N[self._slots[numbers_N] == _NO_SLOT]
        made = np.arange(self._num_made, self._num_made + len(new))
        self._floats[made] = first_rows(self._spec, new, self._num_filled)
        self._slots[new] = made
        self._num_made += len(new)
        return self._floats[self._slots[numbers_N]]

    def check(self, what: str, numbers_N: Numbers, rows: Floats) -> None:
        """Compare rows, with or without their state; a wrong one is a StoreError."""
        expected = self.floats(numbers_N)[:, : rows.shape[1]]
        require_equal(what, ids_of(numbers_N), rows, expected)

    def update(self, numbers_N: Numbers, grads_ND: Floats, num_times: int = 1) -> None:
        """Apply an update of numbers, all of them ``num_times``, one after the other.

        The numbers have no repeats, the gradients are float32 ``(num_times * N, D)``.
        """
        self._num_updates += 1
        rows_NW = self.floats(numbers_N)
        for once_ND in np.split(grads_ND, num_times):
            rows_NW = stepped(self._spec.optimizer, rows_NW, once_ND, self._num_updates)
        self._floats[self._slots[numbers_N]] = rows_NW


def stepped(optimizer: Optimizer, rows_NW: Floats, grads_ND: Floats, t: int) -> Floats:
    """Return rows after step ``t``, from 1, float32 ``(N, W)``.

    An optimizer, or a setting of it, that has no formula here is a ConfigError.
    """
    dim = grads_ND.shape[1]
    w_ND, state_NS = np.split(rows_NW.astype(np.float64), [dim], axis=1)
    g_ND = grads_ND.astype(np.float64)
    match optimizer:
        case SGD(lr, 0, 0):
            parts = [w_ND - lr * g_ND]
        case Adagrad(lr, _, 0, 1, eps, is_rowwise):
            squares = g_ND * g_ND
            state_NS += squares.mean(axis=1, keepdims=True) if is_rowwise else squares
            parts = [w_ND - lr * g_ND / (np.sqrt(state_NS) + eps), state_NS]
        case Adam(lr, (beta1, beta2), 0, eps):
            m_ND, v_ND = np.split(state_NS, [dim], axis=1)
            m_ND = beta1 * m_ND + (1 - beta1) * g_ND
            v_ND = beta2 * v_ND + (1 - beta2) * g_ND * g_ND
            m_hat_ND, v_hat_ND = m_ND / (1 - beta1**t), v_ND / (1 - beta2**t)
            parts = [w_ND - lr * m_hat_ND / (np.sqrt(v_hat_ND) + eps), m_ND, v_ND]
        case _:
            raise ConfigError(f"No benchmark for the optimizer {optimizer!r}.")
    return np.concatenate(parts, axis=1).astype(np.float32)


def is_equal(rows: Floats, expected: Floats) -> npt.NDArray[np.bool_]:
    """Return for each number whether it is as expected, within single precision."""
    # As np.isclose, several times as fast; NaN and inf are never right.
    allowed = np.abs(expected) * _RELATIVE + _ABSOLUTE
    return np.asarray(np.abs(rows - expected) <= allowed)


def require_equal(what: str, ids_N: Ids, rows: Floats, expected: Floats) -> None:
    """End the benchmark if rows of ids are not as expected, with a StoreError."""
    require(f"{what}: shape", received=rows.shape, expected=expected.shape)
    is_wrong = ~is_equal(rows, expected)
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0].tolist()
        raise StoreError(
            f"{what}: rows must be what NumPy computes. {is_wrong.any(axis=1).sum()} "
            f"of {len(rows)} are not, the first at {row}, column {column}. "
            f"Received: {rows[row, column]} for id {ids_N[row]}, instead of "
            f"{expected[row, column]}."
        )


def require(what: str, *, received: object, expected: object) -> None:
    """End the benchmark if anything else is not as expected, with a StoreError."""
    if received != expected:
        raise StoreError(f"{what} must be {expected}. Received: {received}.")
