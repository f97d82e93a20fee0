"""The ids of a whole batch on their way: unique in their table, grouped by server.

    ids of all tables, one table after the other
      -> unique ids of each table, in the order of their first appearance  (dedup.py)
      -> grouped by the shard that holds them                              (shard.py)
      -> for each id of the batch, its place among its table's grouped ids

One call for all tables: a batch has many, and what a call costs would be more than the
work on a table.

Dimension key:
    L: ids in the batch, repeats included, of all tables
    T: tables
    U: unique ids of one table
    P: shards
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import (
    MAX_IDS,
    Positions,
    find_repeats,
    num_buckets,
    require_ids,
)
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds, group_by_shard

Stops = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoutedIds:
    """Ids of several tables.

    Attributes:
        tables: the unique ids of each, grouped by shard.
        inverse: int32 ``(L,)``: which of its table's grouped ids each id is.
    """

    tables: list[ShardedIds]
    inverse: Positions


def route_ids(ids_L: Ids, num_ids: Sequence[int], num_shards: int) -> RoutedIds:
    """Find the unique ids of each table, and group them by the shard that holds them.

    Args:
        ids_L: uint64 ``(L,)``, one table after the other.
        num_ids: how many of them each table has; L together.
        num_shards: number of servers, at least 1.

    Raises:
        BatchError: ``ids_L`` is not a flat uint64 array, or is too long.

    Example:
        >>> routed = route_ids(np.array([7, 3, 7, 7], dtype=np.uint64), [3, 1], 1)
        >>> [split.ids.tolist() for split in routed.tables], routed.inverse.tolist()
        ([[7, 3], [7]], [0, 1, 0, 0])
    """
    if ids_L.dtype != np.uint64 or ids_L.ndim != 1 or len(ids_L) > MAX_IDS:
        require_ids(ids_L)
    stops_T = np.cumsum(num_ids, dtype=np.int64)
    flat, starts, offsets, place, inverse_L = _route(
        read_only(ids_L), read_only(stops_T), num_shards
    )
    bounds = starts.tolist()
    tables = [
        ShardedIds(flat[start:stop], offsets_P1, place[start:stop])
        for start, stop, offsets_P1 in zip(bounds, bounds[1:], offsets, strict=False)
    ]
    return RoutedIds(tables, inverse_L)


@compiled
def _route(
    ids_L: Ids, stops_T: Stops, num_shards: int
) -> tuple[Ids, Stops, Stops, Positions, Positions]:
    num_tables = len(stops_T)
    unique = np.empty(len(ids_L), dtype=np.uint64)
    inverse_L = np.empty(len(ids_L), dtype=np.int32)
    place = np.empty(len(ids_L), dtype=np.int32)
    offsets = np.zeros((num_tables, num_shards + 1), dtype=np.int64)
    starts = np.zeros(num_tables + 1, dtype=np.int64)
    longest = begin = 0
    for t in range(num_tables):
        longest = max(longest, stops_T[t] - begin)
        begin = stops_T[t]
    buckets = np.empty(num_buckets(longest), dtype=np.int32)
    begin = 0
    for t in range(num_tables):
        end, first = stops_T[t], starts[t]
        inverse = inverse_L[begin:end]
        num = find_repeats(
            ids_L[begin:end],
            buckets[: num_buckets(end - begin)],
            unique[first:],
            inverse,
        )
        last = first + num
        ids_U, place_U = unique[first:last], place[first:last]
        group_by_shard(ids_U.copy(), num_shards, ids_U, offsets[t], place_U)
        if num_shards > 1:
            for i in range(len(inverse)):
                inverse[i] = place_U[inverse[i]]
        begin, starts[t + 1] = end, last
    num_unique = starts[num_tables]
    return unique[:num_unique], starts, offsets, place[:num_unique], inverse_L
