"""The ids of a batch on their way: each once in its table, grouped by server.

A batch repeats popular ids many times. A lookup asks for each id once and spreads the
answer out again; a gradient goes the other way, summed over the repeats. The unique ids
come in the order of their first appearance, so that the same batch is always asked for
in the same order. Shard of an id = farmhash64(id) % num_shards, or, in a table with
shared rows, farmhash64(id % shared_rows) % num_shards: then an id is where its shared
row is. Within a shard, the ids keep their order (a counting sort):

    ids       7   3   9   3   4
    unique    7   3   9   4
    shard     1   0   1   0
    by shard  3   4 | 7   9       offsets = [0, 2, 4]
    inverse   2   0   3   0   1   by_shard[inverse] are the ids

One call serves all tables: a batch has many, with little work on each.

Dimension key:
    L: ids in the batch, repeats included
    T: tables
    U: unique ids of one table, U <= L
    P: shards
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import BatchError
from persia_torchrec.jit.compiled import compiled, inlined, read_only
from persia_torchrec.routing.hashing import Ids, farmhash64_of

Positions = npt.NDArray[np.int32]
Counts = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

_MAX_IDS = 2**31 - 1
"""Most ids that one batch may hold, since positions are int32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_64 = np.uint64(64)


class ShardedIds(NamedTuple):
    """Unique ids of one table, grouped by the shard that holds them.

    Attributes:
        ids: uint64 ``(U,)``; shard ``p`` holds ``ids[offsets[p]:offsets[p + 1]]``.
        offsets: int64 ``(P + 1,)``.
        inverse: int32 ``(L,)``; ``ids[inverse]`` are the ids that were given.
    """

    ids: Ids
    offsets: Offsets
    inverse: Positions


def route_ids(
    ids_L: Ids,
    num_ids: Sequence[int],
    num_shards: int,
    shared_rows: Sequence[int] = (),
) -> tuple[list[ShardedIds], Positions]:
    """Find the unique ids of each table, and group them by the shard that holds them.

    ``ids_L`` are uint64, one table after the other, of which each has ``num_ids``, and
    so many ``shared_rows``; by default none has any. The second result is the
    ``inverse`` of all tables, one after the other.

    Example:
        >>> tables, inverse = route_ids(np.array([7, 3, 7, 7], np.uint64), [3, 1], 1)
        >>> [split.ids.tolist() for split in tables], inverse.tolist()
        ([[7, 3], [7]], [0, 1, 0, 0])
    """
    if ids_L.dtype != np.uint64 or ids_L.ndim != 1 or len(ids_L) > _MAX_IDS:
        raise BatchError(
            f"ids must be a flat uint64 array of at most {_MAX_IDS}. "
            f"Received: dtype={ids_L.dtype}, shape={ids_L.shape}."
        )
    shared_T = np.array(shared_rows or [0] * len(num_ids), dtype=np.uint64)
    unique, starts, offsets, inverse_L = _route(
        read_only(ids_L), np.array(num_ids, dtype=np.int64), shared_T, num_shards
    )
    tables, first, begin = [], 0, 0
    for last, num, offsets_P1 in zip(starts.tolist(), num_ids, offsets, strict=True):
        inverse = inverse_L[begin : begin + num]
        tables.append(ShardedIds(unique[first:last], offsets_P1, inverse))
        first, begin = last, begin + num
    return tables, inverse_L


def unique_ids(ids_L: Ids, num_shards: int = 1, shared_rows: int = 0) -> ShardedIds:
    """Find the unique ids of one table, uint64; see :func:`route_ids`."""
    (table,), _ = route_ids(ids_L, [ids_L.size], num_shards, [shared_rows])
    return table


@compiled
def count_repeats(inverse_L: Positions, num_unique: int) -> Counts:
    """Count how often each unique id occurs; uint32 ``(num_unique,)``."""
    counts = np.zeros(num_unique, dtype=np.uint32)
    for i in range(len(inverse_L)):
        counts[inverse_L[i]] += np.uint32(1)
    return counts


def is_of_shard(
    ids_N: Ids, shard: int, num_shards: int, shared_rows: int = 0
) -> npt.NDArray[np.bool_]:
    """Return for each id of a table whether a shard holds it; bool ``(N,)``."""
    return _is_of_shard(ids_N, shard, num_shards, np.uint64(shared_rows))


@compiled
def _is_of_shard(
    ids_N: Ids, shard: int, num_shards: int, shared_rows: np.uint64
) -> npt.NDArray[np.bool_]:
    is_own_N = np.empty(len(ids_N), dtype=np.bool_)
    for n in range(len(ids_N)):
        is_own_N[n] = _shard_of(ids_N[n], shared_rows, num_shards) == shard
    return is_own_N


@inlined
def _shard_of(id_: np.uint64, shared_rows: np.uint64, num_shards: int) -> np.uint64:
    if shared_rows != _ZERO:
        id_ %= shared_rows
    return farmhash64_of(id_) % np.uint64(num_shards)


@compiled
def _route(
    ids_L: Ids, num_ids_T: Offsets, shared_T: Ids, num_shards: int
) -> tuple[Ids, Offsets, Offsets, Positions]:
    """Return the unique ids of all tables, their ends, offsets, and the inverse."""
    num_tables = len(num_ids_T)
    unique = np.empty(len(ids_L), dtype=np.uint64)
    inverse_L = np.empty(len(ids_L), dtype=np.int32)
    offsets = np.zeros((num_tables, num_shards + 1), dtype=np.int64)
    ends_T = np.empty(num_tables, dtype=np.int64)
    longest = 0
    for t in range(num_tables):
        longest = max(longest, num_ids_T[t])
    buckets = np.empty(_num_buckets(longest), dtype=np.int32)
    first = begin = 0
    for t in range(num_tables):
        end = begin + num_ids_T[t]
        inverse = inverse_L[begin:end]
        used = buckets[: _num_buckets(num_ids_T[t])]
        last = first + _find_repeats(ids_L[begin:end], used, unique[first:], inverse)
        ids_U = unique[first:last]
        _group_by_shard(ids_U, inverse, shared_T[t], num_shards, offsets[t])
        first, begin, ends_T[t] = last, end, last
    return unique[:first], ends_T, offsets, inverse_L


@compiled
def _num_buckets(num_ids: int) -> int:
    """Return how large a hash table is: a power of two, twice the ids at least."""
    num = 2
    while num < 2 * num_ids:
        num *= 2
    return num


@compiled
def _find_repeats(
    ids_L: Ids, buckets: Positions, unique_L: Ids, inverse_L: Positions
) -> int:
    """Write the unique ids, and which of them each id is; return how many there are.

    ``buckets`` are a hash table, overwritten: indices into ``unique_L``, or -1.
    """
    buckets[:] = -1
    shift = _64  # multiplicative hashing takes the top bits
    while (_ONE << (_64 - shift)) < np.uint64(len(buckets)):
        shift -= _ONE
    last = np.uint64(len(buckets) - 1)
    count = 0
    for i in range(len(ids_L)):
        id_ = ids_L[i]
        bucket = ((id_ ^ (id_ >> np.uint64(32))) * _GOLDEN) >> shift
        while True:
            found = buckets[bucket]
            if found < 0:
                buckets[bucket] = count
                unique_L[count] = id_
                inverse_L[i] = count
                count += 1
                break
            if unique_L[found] == id_:
                inverse_L[i] = found
                break
            bucket = (bucket + _ONE) & last
    return count


@compiled
def _group_by_shard(
    ids_U: Ids,
    inverse_L: Positions,
    shared_rows: np.uint64,
    num_shards: int,
    offsets_P1: Offsets,
) -> None:
    """Reorder unique ids and their inverse; ``offsets_P1`` are zeros, overwritten."""
    if num_shards == 1:
        offsets_P1[1] = len(ids_U)
        return
    given_U = ids_U.copy()
    place_U = np.empty(len(ids_U), dtype=np.int32)
    for u in range(len(ids_U)):
        place_U[u] = np.int32(_shard_of(ids_U[u], shared_rows, num_shards))
        offsets_P1[place_U[u] + 1] += 1
    for p in range(num_shards):
        offsets_P1[p + 1] += offsets_P1[p]
    cursor = offsets_P1[:-1].copy()
    for u in range(len(ids_U)):
        shard = place_U[u]
        place_U[u] = cursor[shard]
        ids_U[cursor[shard]] = given_U[u]
        cursor[shard] += 1
    for i in range(len(inverse_L)):
        inverse_L[i] = place_U[inverse_L[i]]
