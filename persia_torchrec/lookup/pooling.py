"""From rows to one vector per bag, and from its gradient back to the rows.

    pooled[b]            = scale(b) * sum of rows[inverse[j]] for j in bag b
    gradient of rows[u]  = sum over every occurrence j of u of scale(b) * grad[b]

scale is 1 (sum), 1 / n (mean) or 1 / sqrt(n) (sqrt) for a bag of n ids, as fbgemm's.
All features of a batch stand side by side in one array, each in its own columns:

    sample 0  | feature 0 | feature 1 | ...         a block of samples
    sample 1  |           |           |             is walked feature by feature

The array is larger than the caches. So the loops walk it in its own order, a few
samples at a time, with a cursor into the ids of each feature, and prefetch rows. Rows
are found by address, and so lie where the replies of servers have them.

Dimensions: B samples, F features, L ids of one feature, U unique ids of its table, D
embedding dim, T sum of the dims of all features.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Lengths, Positions
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.jit.intrinsics import (
    copy_bytes,
    floats_at,
    load_u32,
    load_u64,
    prefetch,
    store_u64,
)
from persia_torchrec.lookup.bags import POOLINGS
from persia_torchrec.routing.route import unique_ids
from persia_torchrec.rpc import float_codec

Plan = npt.NDArray[np.uint64]

_MEAN = POOLINGS.index("mean")
_SQRT = POOLINGS.index("sqrt")
_FLOAT_ONE = np.float32(1)

# Samples that are walked together: few enough that the array is walked in its order,
# and several, so that the plan of a feature is not read for every bag.
_BLOCK = 4
_BYTES_AHEAD = 512  # of rows that are on their way at once
# Columns of a plan, a row per feature; the first, second and fourth are addresses.
_ROWS, _INVERSE, _NUM_IDS, _LENGTHS, _ROW_BYTES, _POOLING, _COLUMN_BYTES = range(7)
_ONE = np.uint64(1)
_4, _8 = np.uint64(4), np.uint64(8)
_LINE = np.uint64(64)
_UNWRITTEN = _ONE  # a bit of an address that float32 leave free


class RowPieces(NamedTuple):
    """Rows of one dim in the order of their ids, in one array or several.

    Attributes:
        dim: float32 per row.
        addresses: uint64 ``(U,)``: where each row is; odd for one that has not been
            written, which the first gradient overwrites.
        pieces: the arrays, which must outlive the addresses.
    """

    dim: int
    addresses: npt.NDArray[np.uint64]
    pieces: Sequence[Floats]

    @classmethod
    def of(cls, pieces: Sequence[Floats], *, written: bool = True) -> "RowPieces":
        """Find the rows of float32 ``(N, D)``, C-contiguous, one after the other."""
        dim = pieces[0].shape[1]
        starts, nums = [], []
        for piece in pieces:
            assert piece.flags.c_contiguous, "rows follow one another"
            starts.append(_address(piece))
            nums.append(len(piece))
        addresses_U = np.empty(sum(nums), dtype=np.uint64)
        tag = np.uint64(0) if written else _UNWRITTEN
        _find_rows(
            np.array(starts, dtype=np.uint64),
            np.array(nums, dtype=np.uint64),
            np.uint64(4 * dim),
            tag,
            addresses_U,
        )
        return cls(dim, addresses_U, pieces)

    def take(self, inverse_L: Positions) -> Floats:
        """Return the row of each id, float32 ``(L, D)``."""
        out_LD = np.empty((len(inverse_L), self.dim), dtype=np.float32)
        _take(self.addresses, np.ascontiguousarray(inverse_L), out_LD)
        return out_LD

    def clear_unwritten(self) -> None:
        """Write zeros where no gradient came."""
        _clear_unwritten(self.addresses, self.dim)


class BagsInRoute(NamedTuple):
    """The bags of features whose ids were routed together: their arrays are shared.

    Attributes:
        rows: of each group.
        groups: int64 ``(F,)``, the group of each feature.
        inverse: int32, which row of its group each id is; a feature has ``nums`` of
            them from ``starts`` on, int64 ``(F,)`` each.
        lengths: int32; those of a feature begin at ``length_starts``, int64 ``(F,)``.
        own_lengths: instead of these, by the index of a feature.
        poolings: int64 ``(F,)``, of ``POOLINGS``.
    """

    rows: Sequence[RowPieces]
    groups: npt.NDArray[np.int64]
    inverse: Positions
    starts: npt.NDArray[np.int64]
    nums: npt.NDArray[np.int64]
    lengths: Lengths
    length_starts: npt.NDArray[np.int64]
    own_lengths: Mapping[int, Lengths]
    poolings: npt.NDArray[np.int64]


def pool(bags: BagsInRoute, num_samples: int) -> Floats:
    """Pool the bags of all features, in their order; float32 ``(B, T)``."""
    plan_F7, width, _kept = _plan(bags)
    out_BT = np.empty((num_samples, width), dtype=np.float32)
    _pool(plan_F7, out_BT)
    return out_BT


def add_gradients(grads_BT: Floats, bags: BagsInRoute) -> None:
    """Add the gradient of each bag, float32 ``(B, T)``, to the ``rows`` in it.

    Of rows that were not written, the first gradient is the sum so far.
    """
    plan_F7, _, _kept = _plan(bags)
    _add_gradients(np.ascontiguousarray(grads_BT), plan_F7)


def warm_up() -> None:
    """Compile, or load, the loops of a lookup; the first time on a machine is slow."""
    float_codec.warm_up()
    unique = unique_ids(np.array([1, 2, 1], dtype=np.uint64), num_shards=2)
    rows = RowPieces.of([np.zeros((2, 4), dtype=np.float32)], written=False)
    rows.clear_unwritten()
    rows.take(unique.inverse)
    lengths = np.array([3], dtype=np.int32)
    one = np.zeros(1, dtype=np.int64)  # group, start and pooling of the one feature
    bags = BagsInRoute(
        [rows], one, unique.inverse, one, np.array([3]), lengths, one, {}, one
    )
    add_gradients(pool(bags, 1), bags)


def _plan(bags: BagsInRoute) -> tuple[Plan, int, list[object]]:
    """Return what the loops need to know, the width T, and what must outlive it."""
    inverse = np.ascontiguousarray(bags.inverse)
    lengths = np.ascontiguousarray(bags.lengths)
    plan_F7 = np.zeros((len(bags.groups), 7), dtype=np.int64)
    addresses = np.array([_address(rows.addresses) for rows in bags.rows], np.int64)
    row_bytes = np.array([4 * rows.dim for rows in bags.rows], np.int64)[bags.groups]
    plan_F7[:, _ROWS] = addresses[bags.groups]
    plan_F7[:, _INVERSE] = _address(inverse) + 4 * bags.starts
    plan_F7[:, _NUM_IDS] = bags.nums
    plan_F7[:, _LENGTHS] = _address(lengths) + 4 * bags.length_starts
    for f, own in bags.own_lengths.items():
        plan_F7[f, _LENGTHS] = _address(own)
    plan_F7[:, _ROW_BYTES] = row_bytes
    plan_F7[:, _POOLING] = bags.poolings
    row_bytes[:-1].cumsum(out=plan_F7[1:, _COLUMN_BYTES])
    kept: list[object] = [inverse, lengths, bags]
    return plan_F7.view(np.uint64), int(row_bytes.sum()) // 4, kept


def _address(array: npt.NDArray[np.generic]) -> int:
    """Return where an array begins; faster than by ``ctypes``."""
    address: int = array.__array_interface__["data"][0]
    return address


@compiled
def _find_rows(
    starts_N: Plan, nums_N: Plan, row_bytes: np.uint64, tag: np.uint64, out_U: Plan
) -> None:
    u = 0
    for n in range(len(starts_N)):
        address = starts_N[n] | tag
        for _ in range(nums_N[n]):
            out_U[u] = address
            address += row_bytes
            u += 1


@compiled
def _clear_unwritten(addresses_U: Plan, dim: int) -> None:
    for u in range(len(addresses_U)):
        if addresses_U[u] & _UNWRITTEN:
            addresses_U[u] ^= _UNWRITTEN
            row = numba.carray(floats_at(addresses_U[u]), (dim,))
            for d in range(dim):
                row[d] = np.float32(0)


@compiled
def _take(addresses_U: Plan, inverse_L: Positions, out_LD: Floats) -> None:
    dim = out_LD.shape[1]
    row_bytes = np.uint64(4 * dim)
    out, ahead = np.uint64(out_LD.ctypes.data), max(_BYTES_AHEAD // (4 * dim), 1)
    for j in range(len(inverse_L)):
        if j + ahead < len(inverse_L):
            _prefetch(addresses_U[inverse_L[j + ahead]], row_bytes)
        copy_bytes(out, addresses_U[inverse_L[j]], row_bytes)
        out += row_bytes


@compiled
def scale_of(length: np.int32, pooling: int) -> np.float32:
    """Return what a bag's sum is multiplied by; the number of ids is not 0."""
    if pooling == _MEAN:
        return _FLOAT_ONE / np.float32(length)
    if pooling == _SQRT:
        return _FLOAT_ONE / np.sqrt(np.float32(length))
    return _FLOAT_ONE


@inlined
def _row_at(plan_F7: Plan, f: int, j: np.uint64) -> np.uint64:
    """Return where the address of the row of a feature's ``j``-th id is."""
    return plan_F7[f, _ROWS] + _8 * load_u32(plan_F7[f, _INVERSE] + _4 * j)


@inlined
def _prefetch(address: np.uint64, num_bytes: np.uint64) -> None:
    end = address + num_bytes
    while address < end:
        prefetch(address)
        address += _LINE


@inlined
def _prefetch_row(plan_F7: Plan, f: int, j: np.uint64) -> None:
    """Prefetch the row of a feature's ``j``-th id, if there are so many."""
    if j < plan_F7[f, _NUM_IDS]:
        _prefetch(load_u64(_row_at(plan_F7, f, j)), plan_F7[f, _ROW_BYTES])


@compiled
def _pool(plan_F7: Plan, out_BT: Floats) -> None:
    num_samples, num_features = len(out_BT), len(plan_F7)
    out, out_bytes = np.uint64(out_BT.ctypes.data), np.uint64(4 * out_BT.shape[1])
    cursors_F = np.zeros(num_features, dtype=np.uint64)
    for start in range(0, num_samples, _BLOCK):
        stop = min(start + _BLOCK, num_samples)
        for f in range(num_features):
            row_bytes, pooling = plan_F7[f, _ROW_BYTES], int(plan_F7[f, _POOLING])
            dim = np.int64(row_bytes // _4)
            ahead = max(np.uint64(_BYTES_AHEAD) // row_bytes, _ONE)
            j = cursors_F[f]
            for b in range(start, stop):
                length = load_u32(plan_F7[f, _LENGTHS] + _4 * np.uint64(b))
                target = out + np.uint64(b) * out_bytes + plan_F7[f, _COLUMN_BYTES]
                pooled = numba.carray(floats_at(target), (dim,))
                for i in range(length):
                    _prefetch_row(plan_F7, f, j + ahead)
                    address = load_u64(_row_at(plan_F7, f, j))
                    row = numba.carray(floats_at(address), (dim,))
                    j += _ONE
                    for d in range(dim):
                        pooled[d] = row[d] if i == 0 else pooled[d] + row[d]
                if length == 0:
                    for d in range(dim):
                        pooled[d] = np.float32(0)
                elif pooling != 0 and length > 1:
                    scale = scale_of(np.int32(length), pooling)
                    for d in range(dim):
                        pooled[d] *= scale
            cursors_F[f] = j


@inlined
def _add_row(at: np.uint64, scale: np.float32, grad_D: Floats) -> None:
    """Add a gradient to the row whose address is at ``at``, or write it there."""
    address = load_u64(at)
    if address & _UNWRITTEN:
        address ^= _UNWRITTEN
        store_u64(at, address)
        row = numba.carray(floats_at(address), grad_D.shape)
        for d in range(len(grad_D)):
            row[d] = np.float32(0) + scale * grad_D[d]
    else:
        row = numba.carray(floats_at(address), grad_D.shape)
        for d in range(len(grad_D)):
            row[d] += scale * grad_D[d]


@compiled
def _add_gradients(grads_BT: Floats, plan_F7: Plan) -> None:
    num_samples, num_features = len(grads_BT), len(plan_F7)
    grads = np.uint64(grads_BT.ctypes.data)
    grads_bytes = np.uint64(4 * grads_BT.shape[1])
    cursors_F = np.zeros(num_features, dtype=np.uint64)
    for start in range(0, num_samples, _BLOCK):
        stop = min(start + _BLOCK, num_samples)
        for f in range(num_features):
            row_bytes, pooling = plan_F7[f, _ROW_BYTES], int(plan_F7[f, _POOLING])
            dim = np.int64(row_bytes // _4)
            ahead = max(np.uint64(_BYTES_AHEAD) // row_bytes, _ONE)
            j = cursors_F[f]
            for b in range(start, stop):
                length = load_u32(plan_F7[f, _LENGTHS] + _4 * np.uint64(b))
                source = grads + np.uint64(b) * grads_bytes + plan_F7[f, _COLUMN_BYTES]
                grad = numba.carray(floats_at(source), (dim,))
                scale = scale_of(np.int32(length), pooling)
                for _ in range(length):
                    _prefetch_row(plan_F7, f, j + ahead)
                    at = _row_at(plan_F7, f, j)
                    j += _ONE
                    _add_row(at, scale, grad)
            cursors_F[f] = j
