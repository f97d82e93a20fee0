"""The bags of each row, by which the gradient of a row is a sum over bags.

    forward    bag k = rows[rows_L[offsets[k] : offsets[k + 1]]]        summed
    backward   row u = gradients[bags_L[...]], over the bags that have it

So both ways are the same operator, ``embedding_bag``, which sums rows of a matrix; the
backward pass sorts nothing and gives the same result each time. One bag is one serial
thread per column on a GPU. So no bag of the backward pass has more than ``LONGEST``: a
row that occurs more often is summed in chunks, and further levels sum the chunks:

    level 0    the first chunk of each row, U of them; then all other chunks
    level 1    of each row of several chunks, these chunks; its sums replace the first
    ...        in the same way, until no row has several chunks

All of it is int32 and stands in one array, part after part, so that it reaches a device
by one copy. Scales are float32 of the same bits.

Dimensions: B samples, F features of one dim, L ids of these, U unique rows, E chunks
that are not the first of their row, H rows of several chunks.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats, Lengths, Offsets, Positions
from persia_torchrec.jit.compiled import compiled, read_only
from persia_torchrec.lookup.pooling import scale_of
from persia_torchrec.lookup.sharded_lookup import GroupFeatures, RoutedBatch

LONGEST = 128
"""Rows that one bag of the backward pass has at most."""

_ONE = np.float32(1)


class IndexParts(NamedTuple):
    """What an index has beside bags and rows.

    ``each_id``: every id is a bag of its own, feature by feature. ``scales``: of each
    id, by the pooling of its bag. ``sources``: what is needed for weights of ids.
    """

    each_id: bool
    scales: bool
    sources: bool


class IndexSizes(NamedTuple):
    """The lengths of the parts of an index, in their order.

    Attributes:
        parts: of those below; 0 where one is not wanted.

            offsets        B * F + 1: where each bag begins, in the order sample,
                           feature; none if each id is a bag
            rows           L: the row of each id, in the order of the bags
            bags           L: the bags of each row, chunk by chunk
            starts         U + E + 1: where each chunk begins in ``bags``
            scales         L: float32, of each of ``rows``
            chunk_scales   L: float32, of each of ``bags``
            sources        L: the position of each of ``rows`` in the batch's ids
            chunk_sources  L: the position of each of ``bags`` in ``rows``
            bag_of         L: the bag of each of ``rows``
        levels: of each further level, three parts: the chunks that are summed, where
            each sum begins, and H: which sums of the previous level these replace.
    """

    parts: tuple[int, ...]
    levels: tuple[int, ...]

    @property
    def total(self) -> int:
        """How long all parts are."""
        return sum(self.parts) + sum(self.levels)


class _Batch(NamedTuple):
    """Ids of a batch, as in a ``RoutedBatch``."""

    inverse: Positions
    starts: Offsets
    lengths: Lengths
    bag_starts: Offsets
    id_starts: Offsets
    num_bags: int


class _Parts(NamedTuple):
    """The parts of an index that ids fill, see :class:`IndexSizes`."""

    offsets: Positions
    rows: Positions
    bags: Positions
    scales: Floats
    chunk_scales: Floats
    sources: Positions
    chunk_sources: Positions
    bag_of: Positions


def most_numbers(batch: RoutedBatch, group: int, wanted: IndexParts) -> int:
    """Return how long the index of a group's rows is, at most."""
    features = batch.plan.of_groups[group]
    num_ids = int((batch.starts[1:] - batch.starts[:-1])[features.indices].sum())
    num = (2 + 2 * wanted.scales + 3 * wanted.sources) * num_ids
    num += len(batch.occurrences[group]) + 8 * (num_ids // LONGEST + 1) + 64
    if wanted.each_id:
        return num
    num_bags_K = batch.bag_starts[1:] - batch.bag_starts[:-1]
    return num + int(num_bags_K[features.keys].sum()) + 1


def build_index(
    batch: RoutedBatch, group: int, wanted: IndexParts, out: Positions
) -> IndexSizes:
    """Write the index of a group's rows, and return its sizes.

    The features of a group stand in their order. ``out`` has :func:`most_numbers`.
    """
    features = batch.plan.of_groups[group]
    key = int(features.keys[0])  # all features have as many bags
    of_batch = _Batch(
        batch.inverse,
        batch.starts,
        batch.lengths,
        batch.bag_starts,
        batch.id_starts,
        int(batch.bag_starts[key + 1] - batch.bag_starts[key]),
    )
    counts_U = read_only(batch.occurrences[group])
    found = _build(of_batch, features, wanted, counts_U, out).tolist()
    levels = found[10 : 10 + 3 * found[9]]
    return IndexSizes(tuple(found[:9]), tuple(levels))


@compiled
def _build(
    batch: _Batch,
    features: GroupFeatures,
    wanted: IndexParts,
    counts_U: Counts,
    out: Positions,
) -> Offsets:
    num_ids = np.int64(0)
    for f in features.indices:
        num_ids += batch.starts[f + 1] - batch.starts[f]
    num_extra = 0
    for u in range(len(counts_U)):
        num_extra += (int(counts_U[u]) - 1) // LONGEST
    sizes = np.zeros(10 + 3 * 6, dtype=np.int64)
    sizes[0] = 0 if wanted.each_id else batch.num_bags * len(features.indices) + 1
    sizes[1] = sizes[2] = num_ids
    sizes[3] = len(counts_U) + num_extra + 1
    sizes[4] = sizes[5] = num_ids if wanted.scales else 0
    sizes[6] = sizes[7] = sizes[8] = num_ids if wanted.sources else 0
    ends = np.cumsum(sizes[:9])
    starts = out[ends[2] : ends[3]]
    cursor_U, hot = _start_chunks(counts_U, num_extra, starts)
    floats = out.view(np.float32)
    parts = _Parts(
        out[: ends[0]],
        out[ends[0] : ends[1]],
        out[ends[1] : ends[2]],
        floats[ends[3] : ends[4]],
        floats[ends[4] : ends[5]],
        out[ends[5] : ends[6]],
        out[ends[6] : ends[7]],
        out[ends[7] : ends[8]],
    )
    is_single = not wanted.each_id and _write_offsets(batch, features, parts.offsets)
    _fill(batch, features, wanted, is_single, parts, cursor_U)
    for by_chunk in (parts.bags, out[ends[4] : ends[5]], parts.chunk_sources):
        _move_chunks(counts_U, hot, cursor_U, by_chunk)
    _build_levels(counts_U, num_extra, sizes, out[ends[8] :])
    return sizes


@compiled
def _start_chunks(
    counts_U: Counts, num_extra: int, starts: Positions
) -> tuple[Positions, Positions]:
    """Write where chunks begin; return where rows begin, and rows of several chunks.

    The first is where all bags of each row would stand one row after the other.
    """
    num_rows = len(counts_U)
    cursor_U = np.empty(num_rows, dtype=np.int32)
    hot = np.empty(num_extra, dtype=np.int32)
    at = whole = num_hot = 0
    for u in range(num_rows):
        starts[u], cursor_U[u] = at, whole
        count = int(counts_U[u])
        whole += count
        at += min(count, LONGEST)
        if count > LONGEST:
            hot[num_hot] = u
            num_hot += 1
    chunk = num_rows
    starts[chunk] = at
    for h in range(num_hot):
        left = int(counts_U[hot[h]]) - LONGEST
        while left > 0:
            at += min(left, LONGEST)
            left -= LONGEST
            chunk += 1
            starts[chunk] = at
    return cursor_U, hot[:num_hot]


@compiled
def _move_chunks(
    counts_U: Counts, hot: Positions, stops_U: Positions, out: Positions
) -> None:
    """Move what stands row by row to its chunks: the first ones, then all others."""
    if len(hot) == 0 or len(out) == 0:
        return
    num_others = 0
    for u in hot:
        num_others += int(counts_U[u]) - LONGEST
    others = np.empty(num_others, dtype=out.dtype)
    to, begin, moved = 0, 0, 0
    for h in range(len(hot) + 1):
        # From the last row of several chunks up to the first chunk of the next one.
        stop, skipped = len(out), 0
        if h < len(hot):
            skipped = int(counts_U[hot[h]]) - LONGEST
            stop = stops_U[hot[h]] - skipped
        for i in range(begin, stop):
            out[to] = out[i]
            to += 1
        begin = stop + skipped
        others[moved : moved + skipped] = out[stop:begin]
        moved += skipped
    out[to:] = others


@compiled
def _write_offsets(batch: _Batch, features: GroupFeatures, offsets: Positions) -> bool:
    """Write where each bag begins; return whether each has one id."""
    num_features = len(features.indices)
    is_single = True
    for n in range(num_features):
        first, is_one = batch.bag_starts[features.keys[n]], features.rounds[n] == 1
        for b in range(first, first + batch.num_bags):
            is_one &= batch.lengths[b] == 1
        is_single &= is_one
    if is_single:
        for bag in range(len(offsets)):
            offsets[bag] = bag
        return True
    for n in range(num_features):
        first, rounds = batch.bag_starts[features.keys[n]], features.rounds[n]
        for b in range(batch.num_bags):
            length = batch.lengths[first + b] * rounds
            offsets[b * num_features + n + 1] = length
    offsets[0] = 0
    for bag in range(batch.num_bags * num_features):
        offsets[bag + 1] += offsets[bag]
    return False


@compiled
def _fill(
    batch: _Batch,
    features: GroupFeatures,
    wanted: IndexParts,
    is_single: bool,
    parts: _Parts,
    cursor_U: Positions,
) -> None:
    """Write each id where its bag is, and where its row is; a counting sort.

    The bags of a row stand one after the other, whatever their number; ``cursor_U``
    moves from where they begin to where they end. It goes from feature to feature: the
    rows of one are few, and stay in the caches, while samples of all features are often
    the same power of two apart, of which a cache holds few.
    """
    each_id, with_scales, with_sources = wanted
    offsets, rows_L, bags_L = parts.offsets, parts.rows, parts.bags
    scales_L, chunk_scales_L = parts.scales, parts.chunk_scales
    sources_L, chunk_sources_L = parts.sources, parts.chunk_sources
    num_features, k, scale = len(features.indices), 0, _ONE
    for n in range(num_features):
        f, key = features.indices[n], features.keys[n]
        j, num_bags = batch.starts[f], 1 if each_id else batch.num_bags
        to_source = batch.id_starts[key] - j
        for b in range(num_bags):
            bag = b * num_features + n
            if each_id:
                length = batch.starts[f + 1] - j
            elif is_single:
                k, length = bag, 1
            else:
                k = offsets[bag]
                length = offsets[bag + 1] - k
            if with_scales and length > 0:
                scale = scale_of(np.int32(length), features.poolings[n])
            for _ in range(length):
                u = np.uint32(batch.inverse[j])
                at = np.uint32(cursor_U[u])
                rows_L[k] = u
                bags_L[at] = k if each_id else bag
                if with_scales:
                    scales_L[k] = chunk_scales_L[at] = scale
                if with_sources:
                    sources_L[k] = j + to_source
                    chunk_sources_L[at] = k
                    parts.bag_of[k] = bag
                j, k = j + 1, k + 1
                cursor_U[u] = at + 1


@compiled
def _build_levels(
    counts_U: Counts, num_extra: int, sizes: Offsets, out: Positions
) -> None:
    """Write the levels that sum chunks; their number and sizes into ``sizes``."""
    num_hot, chunk = 0, len(counts_U)
    hot = np.empty((num_extra, 3), dtype=np.int64)  # sum, other chunks: first, number
    for u in range(len(counts_U)):
        num = (int(counts_U[u]) - 1) // LONGEST
        if num > 0:
            hot[num_hot, 0], hot[num_hot, 1], hot[num_hot, 2] = u, chunk, num
            num_hot += 1
            chunk += num
    at = 0
    while num_hot > 0:
        level = sizes[9]
        num_chunks = extra = 0
        for h in range(num_hot):
            num_chunks += 1 + hot[h, 2]
            extra += hot[h, 2] // LONGEST
        chunks = out[at : at + num_chunks]
        at += num_chunks
        starts = out[at : at + num_hot + extra + 1]
        at += num_hot + extra + 1
        replaced = out[at : at + num_hot]
        at += num_hot
        sizes[10 + 3 * level] = len(chunks)
        sizes[11 + 3 * level] = len(starts)
        sizes[12 + 3 * level] = len(replaced)
        sizes[9] = level + 1
        num_hot = _fill_level(hot, num_hot, chunks, starts, replaced)


@compiled
def _fill_level(
    hot: npt.NDArray[np.int64],
    num_hot: int,
    chunks: Positions,
    starts: Positions,
    replaced: Positions,
) -> int:
    """Write one level; replace ``hot`` by what the next one sums, return its number."""
    at = 0
    for h in range(num_hot):
        starts[h], replaced[h] = at, hot[h, 0]
        chunks[at] = hot[h, 0]
        at += 1
        for i in range(min(hot[h, 2], LONGEST - 1)):
            chunks[at] = hot[h, 1] + i
            at += 1
    num_next, chunk = 0, num_hot
    for h in range(num_hot):
        first, begun = hot[h, 1], LONGEST - 1
        num = hot[h, 2] // LONGEST
        for i in range(begun, hot[h, 2]):
            if (i - begun) % LONGEST == 0:
                starts[chunk + (i - begun) // LONGEST] = at
            chunks[at] = first + i
            at += 1
        if num > 0:
            hot[num_next, 0], hot[num_next, 1], hot[num_next, 2] = h, chunk, num
            num_next += 1
            chunk += num
    starts[chunk] = at
    return num_next
