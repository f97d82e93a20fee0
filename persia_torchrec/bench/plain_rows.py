"""The least that a lookup and an update can be: two plain loops over rows in memory.

The rows are as wide as the store's and hold the same floats, but there is no index, no
recency and no check: where each row stands is known beforehand. What these loops take
is the memory of the machine and the arithmetic of the optimizer.

Dimension key:
    N: rows of one request
    R: all rows
    D: embedding dim
    W: floats a row, its header included
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.bench.expected import ExpectedRows, require_equal
from persia_torchrec.bench.filled_store import FILL
from persia_torchrec.bench.workload import Numbers, ids_of, weights_of
from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.store.lookup import prefetch_row
from persia_torchrec.store.memory import copy_bytes, unowned
from persia_torchrec.store.rows import Arena
from persia_torchrec.store.steps import step_plan, step_row_at
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.precision import Floats

_HEADER_FLOATS = 4
_AHEAD = 8


class PlainRows:
    """Rows in memory, gathered and updated by their places.

    Args:
        spec: the table.
        num_rows: R.
    """

    def __init__(self, spec: TableSpec, num_rows: int) -> None:
        self._spec = spec
        self._width = spec.dim + spec.num_state_floats
        words_a_row = (_HEADER_FLOATS + self._width + 1) // 2
        self._floats = Arena.reserve(num_rows, words_a_row).floats
        self._num_updates = 1  # number of the next, as Adam counts
        self._out_ND = np.zeros((num_rows, spec.dim), dtype=np.float32)
        self._expected = ExpectedRows(spec, num_rows, num_rows)
        state = spec.optimizer.initial_state(spec.dim)
        for start in range(0, num_rows, FILL):
            ids_N = ids_of(np.arange(start, min(start + FILL, num_rows)))
            rows = self._floats[start : start + len(ids_N), _HEADER_FLOATS:]
            rows[:, : spec.dim] = weights_of(ids_N, spec.dim)
            rows[:, spec.dim : self._width] = state

    def steady(
        self, requests: Sequence[Numbers], grads: Sequence[Floats]
    ) -> list[tuple[float, float]]:
        """Gather rows and update them, request after request, then check all.

        Args:
            requests: numbers of rows, each without repeats. The first only warms up.
            grads: float32 ``(N, D)`` a request.

        Returns:
            For each request but the first, the seconds of its lookup and its update.

        Raises:
            StoreError: a row, or its optimizer state, is not what it should be.
        """
        places = [read_only(numbers_N.astype(np.uint64)) for numbers_N in requests]
        found = [np.zeros_like(grads_ND) for grads_ND in grads]
        seconds = []
        for t, (places_N, grads_ND, kept_ND) in enumerate(
            zip(places, grads, found, strict=True)
        ):
            plan = step_plan(
                self._spec.optimizer, self._spec.dim, self._num_updates + t
            )
            out_ND = self._out_ND[: len(places_N)]
            start = time.perf_counter()
            _gather(places_N, self._floats, out_ND)
            middle = time.perf_counter()
            _update(places_N, self._floats, grads_ND, plan.kind, plan.numbers)
            end = time.perf_counter()
            seconds.append((middle - start, end - middle))
            kept_ND[:] = out_ND
        self._num_updates += len(requests)
        for numbers_N, grads_ND, kept_ND in zip(requests, grads, found, strict=True):
            expected_ND = self._expected.weights(numbers_N)
            require_equal("plain lookup", ids_of(numbers_N), kept_ND, expected_ND)
            self._expected.update(numbers_N, grads_ND)
        last = requests[-1]
        rows_NW = self._floats[last, _HEADER_FLOATS : _HEADER_FLOATS + self._width]
        expected_NW = self._expected.floats(last)
        require_equal("plain update", ids_of(last), rows_NW, expected_NW)
        return seconds[1:]


@compiled
def _gather(slots_N: npt.NDArray[np.uint64], floats_RW: Floats, out_ND: Floats) -> None:
    """Copy the weights of rows, each asked for some rows ahead."""
    out_ND, floats_RW = unowned(out_ND), unowned(floats_RW)
    base, stride = np.uint64(floats_RW.ctypes.data), np.uint64(4 * floats_RW.shape[1])
    begin, num_bytes = np.uint64(4 * _HEADER_FLOATS), np.uint64(4 * out_ND.shape[1])
    target = np.uint64(out_ND.ctypes.data)
    for i in range(len(slots_N)):
        if i + _AHEAD < len(slots_N):
            prefetch_row(base + slots_N[i + _AHEAD] * stride, begin + num_bytes)
        copy_bytes(target, base + slots_N[i] * stride + begin, num_bytes)
        target += num_bytes


@compiled
def _update(
    slots_N: npt.NDArray[np.uint64],
    floats_RW: Floats,
    grads_ND: Floats,
    kind: int,
    numbers: Floats,
) -> None:
    """Step rows, each asked for some rows ahead."""
    floats_RW, numbers = unowned(floats_RW), unowned(numbers)
    base, stride = np.uint64(floats_RW.ctypes.data), np.uint64(4 * floats_RW.shape[1])
    begin, dim = np.uint64(4 * _HEADER_FLOATS), grads_ND.shape[1]
    num_bytes = np.uint64(4 * dim)
    grad = np.uint64(grads_ND.ctypes.data)
    for i in range(len(slots_N)):
        if i + _AHEAD < len(slots_N):
            prefetch_row(base + slots_N[i + _AHEAD] * stride, stride)
        weights = base + slots_N[i] * stride + begin
        step_row_at(kind, numbers, weights, weights + num_bytes, grad, dim)
        grad += num_bytes
