"""The ids of a batch on their way: each once in its table, grouped by server.

A batch repeats popular ids many times. A lookup asks for each id once and spreads the
answer out again; a gradient goes the other way, summed over the repeats. Shard of an id
= farmhash64(id) % num_shards, or, in a table with shared rows, farmhash64(id %
shared_rows) % num_shards: then an id is where its shared row is.

One call serves all tables. The unique ids stand in the order group, shard, table, and
there in the order of their first appearance (a counting sort), so that the same batch
is always asked for in the same order. A group is all tables of one dim, so that what
one shard has of a group is one range of ids, of rows and of gradients:

    table a   7  3  9  3        shard of 3, 4, 5 is 0, of 7, 9 is 1
    table b   4  9  5

    ids       3  4  5 | 7  9  9       shard 0: a has 3, b has 4 and 5
    inverse   3  0  4  0   1  5  2    ids[inverse] are the ids that were given

Before that, as PERSIA computes it: ids of different feature groups are told apart by a
prefix, the group's number in the top ``n`` bits, and the id is reduced into the rest.
In a slot with a hash stack, which has few rows, each id is replaced by a bucket per
round, and its embedding is the sum of theirs. The hash is FarmHash's 64-bit fingerprint
of an id's eight little-endian bytes.

Dimension key:
    L: ids in the batch, repeats included, and the buckets that stand for hashed ones
    R: rounds of a hash stack
    K: keys of a batch; F: features, which may share keys and tables
    T: tables
    U: unique ids of one group, U <= L
    P: shards
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats, Ids, Offsets, Positions
from persia_torchrec.errors import BatchError
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import (
    compiled,
    inlined,
    read_only,
    report_compilation,
)

_K2 = np.uint64(0x9AE16A3B2F90404F)
_MUL = np.uint64((0x9AE16A3B2F90404F + 16) % 2**64)
_S25, _S27, _S37, _S39, _S47 = (np.uint64(bits) for bits in (25, 27, 37, 39, 47))


@compiled
def farmhash64_of(id_: np.uint64) -> np.uint64:
    """Hash one id: FarmHash Fingerprint64, the branch for 8 to 16 bytes."""
    a = id_ + _K2
    b = id_
    c = ((b >> _S37) | (b << _S27)) * _MUL + a
    d = (((a >> _S25) | (a << _S39)) + b) * _MUL
    t = (c ^ d) * _MUL
    t ^= t >> _S47
    t = (d ^ t) * _MUL
    t ^= t >> _S47
    return t * _MUL


@compiled
def farmhash64(ids_L: Ids) -> Ids:
    """Hash each id; uint64 ``(L,)``."""
    hashes_L = np.empty_like(ids_L)
    for i in range(len(ids_L)):
        hashes_L[i] = farmhash64_of(ids_L[i])
    return hashes_L


def hash_stack(ids_L: Ids, rounds: int, size: int) -> Ids:
    """Replace each id by one bucket a round.

    PERSIA's formula: with ``h_0 = id`` and ``h_r = farmhash64(h_(r-1))``, the bucket of
    round r is ``h_r % size + (r - 1) * size``, r = 1 .. R. Returns uint64 ``(L * R,)``:
    the buckets of the first id, then those of the second, ...

    Example:
        >>> hash_stack(np.array([12, 23], dtype=np.uint64), 2, 10).tolist()
        [2, 18, 5, 10]
    """
    return _hash_stack(read_only(ids_L), rounds, np.uint64(size))


@compiled
def _hash_stack(ids_L: Ids, rounds: int, size: np.uint64) -> Ids:
    buckets = np.empty(len(ids_L) * rounds, dtype=np.uint64)
    for i in range(len(ids_L)):
        hash_ = ids_L[i]
        for r in range(rounds):
            hash_ = farmhash64_of(hash_)
            buckets[i * rounds + r] = hash_ % size + np.uint64(r) * size
    return buckets


def add_prefix(ids_L: Ids, prefix: int, prefix_bits: int) -> Ids:
    """Move ids into the id space of their feature group.

    PERSIA's formula: ``id % (2**(64 - prefix_bits) - 1) + prefix``, with the prefix of
    ``config.index_prefix`` and PERSIA's ``feature_index_prefix_bit``.

    Example:
        >>> ids = np.array([16000000000000000], dtype=np.uint64)
        >>> add_prefix(ids, 450359962737049600, 12).tolist()
        [452849163854938115]
    """
    return ids_L % np.uint64(2 ** (64 - prefix_bits) - 1) + np.uint64(prefix)


_MAX_IDS = 2**31 - 1
"""Most ids that one batch may hold, since positions are int32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NONE, _FIRST = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_4, _32, _64 = np.uint64(4), np.uint64(32), np.uint64(64)
_AHEAD = 16
"""Ids whose buckets are on their way."""


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


class IdGroup(NamedTuple):
    """Unique ids of tables whose rows have one width, by shard and then by table.

    Attributes:
        tables: the names of the tables, in their order.
        ids: uint64 ``(U,)``; shard ``p`` holds ``ids[offsets[p]:offsets[p + 1]]``.
        offsets: int64 ``(P + 1,)``.
        num_ids: int64 ``(P, T)``: how many of them each table has there.
    """

    tables: tuple[str, ...]
    ids: Ids
    offsets: Offsets
    num_ids: Offsets

    @classmethod
    def of(cls, table: str, ids: ShardedIds) -> "IdGroup":
        """Return the ids of one table as a group."""
        num_ids = ids.offsets[1:] - ids.offsets[:-1]
        return cls((table,), ids.ids, ids.offsets, num_ids[:, None])

    def ranges_of(self, index: int) -> list[tuple[int, int]]:
        """Return where the ids of one of the tables stand, a range for each shard."""
        starts = self.offsets[:-1] + self.num_ids[:, :index].sum(axis=1)
        stops = starts + self.num_ids[:, index]
        return list(zip(starts.tolist(), stops.tolist(), strict=True))


class FeatureColumns(NamedTuple):
    """What a route must know of each feature, uint64 ``(F,)``, in their order.

    A feature takes the ids of a key, which are ``hash_stack``-ed if it has rounds, and
    moved by ``add_prefix`` if it has a modulus.
    """

    keys: Ids
    tables: Ids
    rounds: Ids
    sizes: Ids
    moduli: Ids
    prefixes: Ids


_ONE_FEATURE = FeatureColumns(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


class Route(NamedTuple):
    """Where the ids of a batch go.

    Attributes:
        ids: uint64, of all groups, one after the other.
        counts: uint32, how often each of them occurs in the batch.
        num_ids: int64 ``(P, T)``: how many of them each table has on each shard.
        inverse: int32 ``(L,)``: which of its group's each id is, feature by feature.
        starts: int64 ``(F + 1,)``: where a feature begins in ``inverse``.
    """

    ids: Ids
    counts: Counts
    num_ids: Offsets
    inverse: Positions
    starts: Offsets

    def by_group(
        self, groups: Sequence[tuple[str, ...]]
    ) -> tuple[list[IdGroup], list[Counts]]:
        """Return the ids of groups of tables, and how often each of them occurs.

        The names of all tables are in the order of ``num_ids``.
        """
        found, counts, table, first = [], [], 0, 0
        for names in groups:
            num_PT = self.num_ids[:, table : table + len(names)]
            offsets = np.zeros(len(num_PT) + 1, dtype=np.int64)
            np.cumsum(num_PT.sum(axis=1), out=offsets[1:])
            last = first + int(offsets[-1])
            found.append(IdGroup(names, self.ids[first:last], offsets, num_PT))
            counts.append(self.counts[first:last])
            table, first = table + len(names), last
        return found, counts


def route_features(
    ids_L: Ids,
    starts_K: Offsets,
    features: FeatureColumns,
    groups_T: Offsets,
    shared_T: Ids,
    num_shards: int,
) -> Route:
    """Find the unique ids of each table, by group and shard.

    ``ids_L`` are uint64, those of key ``k`` from ``starts_K[k]`` to ``starts_K[k +
    1]``. ``groups_T`` are ascending numbers of the tables' groups from 0, ``shared_T``
    how many shared rows each has.
    """
    _require_ids(ids_L)
    return Route(
        *_route(
            read_only(ids_L),
            read_only(starts_K),
            features,
            groups_T,
            shared_T,
            num_shards,
        )
    )


def split_rows(
    flat: npt.NDArray[np.float32],
    starts_T: npt.NDArray[np.int64],
    widths_T: npt.NDArray[np.int64],
) -> list[npt.NDArray[np.float32]]:
    """Return the rows of each table, ``(N, D)``, of those of all, flat: views.

    Table t has ``starts_T[t + 1] - starts_T[t]`` rows of ``widths_T[t]`` numbers.
    """
    nums, widths = np.diff(starts_T).tolist(), widths_T.tolist()
    found, begin = [], 0
    for num, width in zip(nums, widths, strict=True):
        found.append(flat[begin : begin + num * width].reshape(num, width))
        begin += num * width
    return found


def _require_ids(ids_L: Ids) -> None:
    if ids_L.dtype != np.uint64 or ids_L.ndim != 1 or len(ids_L) > _MAX_IDS:
        raise BatchError(
            f"ids must be a flat uint64 array of at most {_MAX_IDS}. "
            f"Received: dtype={ids_L.dtype}, shape={ids_L.shape}."
        )


def unique_ids(ids_L: Ids, num_shards: int = 1, shared_rows: int = 0) -> ShardedIds:
    """Find the unique ids of one table, and group them by the shard that holds them.

    Example:
        >>> unique = unique_ids(np.array([7, 3, 7], np.uint64))
        >>> unique.ids.tolist(), unique.inverse.tolist()
        ([7, 3], [0, 1, 0])
    """
    _require_ids(ids_L)
    starts_K = read_only(np.array([0, ids_L.size]))
    shared_T = np.array([shared_rows], dtype=np.uint64) if shared_rows else _NONE
    ids, _, num_PT, inverse, _ = _route(
        read_only(ids_L), starts_K, _ONE_FEATURE, _FIRST, shared_T, num_shards
    )
    offsets = np.zeros(num_shards + 1, dtype=np.int64)
    num_PT.cumsum(out=offsets[1:])
    return ShardedIds(ids, offsets, inverse)


def warm_up() -> None:
    """Compile, or load, the loop of :func:`unique_ids`; log it if it is compiled."""
    with report_compilation():
        unique_ids(np.zeros(1, np.uint64))


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
    ids_L: Ids,
    starts_K: Offsets,
    features: FeatureColumns,
    groups_T: Offsets,
    shared_T: Ids,
    num_shards: int,
) -> tuple[Ids, Counts, Offsets, Positions, Offsets]:
    num_features, num_tables = len(features.keys), len(groups_T)
    starts_F = np.zeros(num_features + 1, dtype=np.int64)
    totals_T = np.zeros(num_tables, dtype=np.int64)
    for f in range(num_features):
        k = np.int64(features.keys[f])
        num = starts_K[k + 1] - starts_K[k]
        num *= max(np.int64(features.rounds[f]), 1)
        starts_F[f + 1] = starts_F[f] + num
        totals_T[np.int64(features.tables[f])] += num
    unique = np.empty(starts_F[-1], dtype=np.uint64)
    counts = np.empty(starts_F[-1], dtype=np.uint32)
    inverse_L = np.empty(starts_F[-1], dtype=np.int32)
    longest = 0
    for t in range(num_tables):
        longest = max(longest, totals_T[t])
    buckets = np.empty(_num_buckets(longest), dtype=np.int32)
    firsts_T = np.zeros(num_tables + 1, dtype=np.int64)
    for t in range(num_tables):
        used, first = buckets[: _num_buckets(totals_T[t])], firsts_T[t]
        used[:] = -1
        found, count = (used, unique[first:], counts[first:]), 0
        for f in range(num_features):
            if np.int64(features.tables[f]) == t:
                k = np.int64(features.keys[f])
                of_key = ids_L[starts_K[k] : starts_K[k + 1]]
                inverse = inverse_L[starts_F[f] : starts_F[f + 1]]
                count = _find_repeats(of_key, features, f, found, inverse, count)
        firsts_T[t + 1] = first + count
    num_unique = firsts_T[-1]
    num_PT = np.zeros((num_shards, num_tables), dtype=np.int64)
    ids, counted = unique[:num_unique], counts[:num_unique]
    place_U = _group(ids, counted, firsts_T, groups_T, shared_T, num_PT)
    for f in range(num_features):
        first = firsts_T[np.int64(features.tables[f])]
        for j in range(starts_F[f], starts_F[f + 1]):
            inverse_L[j] = place_U[first + inverse_L[j]]
    return ids, counted, num_PT, inverse_L, starts_F


@compiled
def _num_buckets(num_ids: int) -> int:
    """Return how large a hash table is: a power of two, twice the ids at least."""
    num = 2
    while num < 2 * num_ids:
        num *= 2
    return num


@compiled
def _find_repeats(
    ids_L: Ids,
    features: FeatureColumns,
    f: int,
    found: tuple[Positions, Ids, Counts],
    inverse_L: Positions,
    count: int,
) -> int:
    """Write the unique ids, and which of them each id is; return how many there are.

    ``found`` are, of a table: a hash table, indices of unique ids, or -1; the unique
    ids; how often each occurs. ``count`` of them are there from other features.
    """
    buckets, unique, counts = found
    rounds, size = int(features.rounds[f]), features.sizes[f]
    modulus, prefix = features.moduli[f], features.prefixes[f]
    shift = _64  # multiplicative hashing takes the top bits
    while (_ONE << (_64 - shift)) < np.uint64(len(buckets)):
        shift -= _ONE
    if rounds == 0 and modulus == _ZERO:
        return _find_plain_repeats(ids_L, found, shift, inverse_L, count)
    last = np.uint64(len(buckets) - 1)
    j = 0
    for i in range(len(ids_L)):
        hash_ = ids_L[i]
        for r in range(max(rounds, 1)):
            id_ = hash_
            if rounds > 0:
                hash_ = farmhash64_of(hash_)
                id_ = hash_ % size + np.uint64(r) * size
            if modulus != _ZERO:
                id_ = id_ % modulus + prefix
            bucket = _bucket_of(id_, shift)
            while True:
                u = buckets[bucket]
                if u < 0:
                    buckets[bucket] = u = count
                    unique[u], counts[u] = id_, 0
                    count += 1
                    break
                if unique[u] == id_:
                    break
                bucket = (bucket + _ONE) & last
            counts[u] += np.uint32(1)
            inverse_L[j] = u
            j += 1
    return count


@compiled
def _find_plain_repeats(
    ids_L: Ids,
    found: tuple[Positions, Ids, Counts],
    shift: np.uint64,
    inverse_L: Positions,
    count: int,
) -> int:
    """Do what :func:`_find_repeats` does where ids are neither hashed nor moved."""
    buckets, unique, counts = found
    at, last = np.uint64(buckets.ctypes.data), np.uint64(len(buckets) - 1)
    for i in range(len(ids_L)):
        if i + _AHEAD < len(ids_L):
            cpu.prefetch(at + _4 * _bucket_of(ids_L[i + _AHEAD], shift))
        id_ = ids_L[i]
        bucket = _bucket_of(id_, shift)
        u = buckets[bucket]
        while u >= 0 and unique[u] != id_:
            bucket = (bucket + _ONE) & last
            u = buckets[bucket]
        if u < 0:
            buckets[bucket] = u = count
            unique[u], counts[u] = id_, 0
            count += 1
        counts[u] += np.uint32(1)
        inverse_L[i] = u
    return count


@inlined
def _bucket_of(id_: np.uint64, shift: np.uint64) -> np.uint64:
    return ((id_ ^ (id_ >> _32)) * _GOLDEN) >> shift


@compiled
def _group(
    ids: Ids,
    counts: Counts,
    firsts_T: Offsets,
    groups_T: Offsets,
    shared_T: Ids,
    num_PT: Offsets,
) -> Positions:
    """Reorder ids and counts, table by table, to group, shard, table.

    ``num_PT`` are zeros, overwritten. Returns the place of each in its group.
    """
    num_shards, num_tables = num_PT.shape
    place_U = np.zeros(len(ids), dtype=np.int32)  # at first the shard
    for t in range(num_tables):
        if num_shards == 1:
            num_PT[0, t] = firsts_T[t + 1] - firsts_T[t]
            continue
        for u in range(firsts_T[t], firsts_T[t + 1]):
            p = np.int64(_shard_of(ids[u], shared_T[t], num_shards))
            place_U[u] = p
            num_PT[p, t] += 1
    cursor_PT, base_T = _starts(num_PT, groups_T)
    if num_shards == 1:
        for t in range(num_tables):
            for u in range(firsts_T[t], firsts_T[t + 1]):
                place_U[u] = u - base_T[t]
        return place_U
    given_U, given_counts = ids.copy(), counts.copy()
    for t in range(num_tables):
        for u in range(firsts_T[t], firsts_T[t + 1]):
            p = place_U[u]
            at = cursor_PT[p, t]
            cursor_PT[p, t] = at + 1
            ids[at], counts[at] = given_U[u], given_counts[u]
            place_U[u] = at - base_T[t]
    return place_U


@compiled
def _starts(num_PT: Offsets, groups_T: Offsets) -> tuple[Offsets, Offsets]:
    """Return where each table begins on each shard, and where its group begins."""
    num_shards, num_tables = num_PT.shape
    starts_PT = np.empty((num_shards, num_tables), dtype=np.int64)
    base_T = np.empty(num_tables, dtype=np.int64)
    at = first = 0
    while first < num_tables:
        last = first
        while last < num_tables and groups_T[last] == groups_T[first]:
            base_T[last] = at
            last += 1
        for p in range(num_shards):
            for t in range(first, last):
                starts_PT[p, t] = at
                at += num_PT[p, t]
        first = last
    return starts_PT, base_T


def sum_by_id(ids_N: Ids, grads_ND: Floats) -> tuple[ShardedIds, Floats]:
    """Add up the gradients of each id, in the order in which they are given.

    Args:
        ids_N: uint64 ``(N,)``, of one table.
        grads_ND: float32 ``(N, D)``.

    Returns:
        The unique ids, and the sum of each, float32 ``(U, D)``.
    """
    unique = unique_ids(ids_N)
    sums_UD = np.zeros((len(unique.ids), grads_ND.shape[1]), dtype=np.float32)
    grads_ND = read_only(np.ascontiguousarray(grads_ND))
    _sum_repeats(read_only(unique.inverse), grads_ND, sums_UD)
    return unique, sums_UD


@compiled
def _sum_repeats(inverse_N: Positions, grads_ND: Floats, sums_UD: Floats) -> None:
    for i in range(len(inverse_N)):
        grad_D, sum_D = grads_ND[np.uint64(i)], sums_UD[np.uint64(inverse_N[i])]
        for d in range(len(sum_D)):
            sum_D[d] += grad_D[d]
