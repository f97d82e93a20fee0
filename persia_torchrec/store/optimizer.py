"""One optimizer step on the rows of one request.

The formulas stand in ``embedding/optim.py``, which also says how fbgemm's and torch's
agree with them. Each loop below walks the rows in the order of the request, so that an
id that comes twice is updated twice, one after the other. A row is

    header (4 floats) | weights (D) | state (S)

Dimension key:
    N: ids of one request
    D: embedding dim
"""

import numpy as np

from persia_torchrec.compiled import compiled
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.kernels import MISSING, Slots
from persia_torchrec.store.memory import prefetch
from persia_torchrec.store.rows import HEADER_FLOATS, Floats
from persia_torchrec.table import TableSpec

_OFF = np.float32(np.inf)
_AHEAD = 8
_LINE = np.uint64(64)
_ONE = np.uint64(1)


def apply_gradients(
    table: TableSpec, floats: Floats, slots_N: Slots, grads_ND: Floats, step: int
) -> None:
    """Move rows by their gradients.

    Args:
        table: whose optimizer and weight bound to use.
        floats: float32 ``(C, >= 4 + D + S)``, the arena of these rows; changed.
        slots_N: int64 ``(N,)``; a ``MISSING`` slot is skipped, with its gradient.
        grads_ND: float32 ``(N, D)``.
        step: number of this update request of the table, from 1 (Adam's ``t``).

    Raises:
        ConfigError: an optimizer that this server does not know.
    """
    f32 = np.float32
    bound = f32(table.weight_bound) if table.weight_bound else _OFF
    rows = (floats, slots_N, grads_ND)
    match table.optimizer:
        case SGD(lr, momentum, weight_decay):
            _step_sgd(*rows, f32(lr), f32(momentum), f32(weight_decay), bound)
        case Adagrad() as opt:
            step_rows = _step_rowwise if opt.vectorwise_shared else _step_adagrad
            decays = (f32(opt.weight_decay), f32(opt.g_square_momentum))
            step_rows(*rows, f32(opt.lr), *decays, f32(opt.eps), bound)
        case Adam(lr, (beta1, beta2), weight_decay, eps):
            # In double precision: 1 - beta and 1 - beta**t lose digits in float32.
            rate = lr / (1 - beta1**step)
            root_scale = 1 / np.sqrt(1 - beta2**step)
            scales = (f32(rate), f32(root_scale))
            betas = (f32(beta1), f32(1 - beta1), f32(beta2), f32(1 - beta2))
            _step_adam(*rows, *scales, *betas, f32(weight_decay), f32(eps), bound)
        case _:
            raise ConfigError(f"No loop for the optimizer {table.optimizer!r}.")


@compiled
def _prefetch_row(floats: Floats, slots_N: Slots, i: int, num_floats: int) -> None:
    """Ask for the memory of the row that comes at place ``i``, if one does."""
    if i >= len(slots_N) or slots_N[i] == MISSING:
        return
    stride = np.uint64(4 * floats.shape[1])
    address = np.uint64(floats.ctypes.data) + np.uint64(slots_N[i]) * stride
    stop = address + np.uint64(4 * (HEADER_FLOATS + num_floats))
    while address < stop:
        prefetch(address)
        address += _LINE
    prefetch(stop - _ONE)


@compiled
def _bounded(weight: np.float32, bound: np.float32) -> np.float32:
    # Written so that it becomes two vector instructions, and so that NaN stays NaN.
    weight = bound if weight > bound else weight
    return -bound if weight < -bound else weight


@compiled
def _step_sgd(
    floats: Floats,
    slots_N: Slots,
    grads_ND: Floats,
    lr: np.float32,
    momentum: np.float32,
    weight_decay: np.float32,
    bound: np.float32,
) -> None:
    dim = grads_ND.shape[1]
    for i in range(len(slots_N)):
        _prefetch_row(floats, slots_N, i + _AHEAD, 2 * dim)
        if slots_N[i] == MISSING:
            continue
        w = floats[slots_N[i]][HEADER_FLOATS : HEADER_FLOATS + dim]
        g = grads_ND[i]
        if momentum == np.float32(0):
            for d in range(dim):
                w[d] = _bounded(w[d] - lr * (g[d] + weight_decay * w[d]), bound)
        else:
            b = floats[slots_N[i]][HEADER_FLOATS + dim : HEADER_FLOATS + 2 * dim]
            for d in range(dim):
                b[d] = momentum * b[d] + (g[d] + weight_decay * w[d])
                w[d] = _bounded(w[d] - lr * b[d], bound)


@compiled
def _step_adagrad(
    floats: Floats,
    slots_N: Slots,
    grads_ND: Floats,
    lr: np.float32,
    weight_decay: np.float32,
    momentum: np.float32,
    eps: np.float32,
    bound: np.float32,
) -> None:
    dim = grads_ND.shape[1]
    for i in range(len(slots_N)):
        _prefetch_row(floats, slots_N, i + _AHEAD, 2 * dim)
        if slots_N[i] == MISSING:
            continue
        w = floats[slots_N[i]][HEADER_FLOATS : HEADER_FLOATS + dim]
        a = floats[slots_N[i]][HEADER_FLOATS + dim : HEADER_FLOATS + 2 * dim]
        g = grads_ND[i]
        for d in range(dim):
            grad = g[d] + weight_decay * w[d]
            a[d] = momentum * a[d] + grad * grad
            w[d] = _bounded(w[d] - lr * grad / (np.sqrt(a[d]) + eps), bound)


@compiled
def _step_rowwise(
    floats: Floats,
    slots_N: Slots,
    grads_ND: Floats,
    lr: np.float32,
    weight_decay: np.float32,
    momentum: np.float32,
    eps: np.float32,
    bound: np.float32,
) -> None:
    dim = grads_ND.shape[1]
    for i in range(len(slots_N)):
        _prefetch_row(floats, slots_N, i + _AHEAD, dim + 1)
        if slots_N[i] == MISSING:
            continue
        w = floats[slots_N[i]][HEADER_FLOATS : HEADER_FLOATS + dim]
        a = floats[slots_N[i]][HEADER_FLOATS + dim : HEADER_FLOATS + dim + 1]
        g = grads_ND[i]
        total = np.float32(0)
        for d in range(dim):
            grad = g[d] + weight_decay * w[d]
            total += grad * grad
        a[0] = momentum * a[0] + total / np.float32(dim)
        rate = lr / (np.sqrt(a[0]) + eps)
        for d in range(dim):
            w[d] = _bounded(w[d] - rate * (g[d] + weight_decay * w[d]), bound)


@compiled
def _step_adam(
    floats: Floats,
    slots_N: Slots,
    grads_ND: Floats,
    rate: np.float32,
    root_scale: np.float32,
    beta1: np.float32,
    rest1: np.float32,
    beta2: np.float32,
    rest2: np.float32,
    weight_decay: np.float32,
    eps: np.float32,
    bound: np.float32,
) -> None:
    dim = grads_ND.shape[1]
    for i in range(len(slots_N)):
        _prefetch_row(floats, slots_N, i + _AHEAD, 3 * dim)
        if slots_N[i] == MISSING:
            continue
        w = floats[slots_N[i]][HEADER_FLOATS : HEADER_FLOATS + dim]
        m = floats[slots_N[i]][HEADER_FLOATS + dim : HEADER_FLOATS + 2 * dim]
        v = floats[slots_N[i]][HEADER_FLOATS + 2 * dim : HEADER_FLOATS + 3 * dim]
        g = grads_ND[i]
        for d in range(dim):
            grad = g[d] + weight_decay * w[d]
            m[d] = beta1 * m[d] + rest1 * grad
            v[d] = beta2 * v[d] + rest2 * grad * grad
            denominator = np.sqrt(v[d]) * root_scale + eps
            w[d] = _bounded(w[d] - rate * m[d] / denominator, bound)
