"""Which server holds which id, and a batch in the order of the servers.

Shard of an id = farmhash64(id) % num_shards. To ask every server with one contiguous
piece, the unique ids are reordered by shard (a counting sort, stable):

    ids       7   3   9   4
    shard     1   0   1   0
    by shard  3   4 | 7   9       offsets = [0, 2, 4]
    place     2   0   3   1       place[u]: where ids[u] went

Dimension key:
    U: unique ids
    P: shards
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.routing.hashing import Ids, farmhash64_of

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class ShardedIds:
    """Unique ids, grouped by the shard that holds them.

    Attributes:
        ids: uint64 ``(U,)``; shard ``p`` holds ``ids[offsets[p]:offsets[p + 1]]``.
        offsets: int64 ``(P + 1,)``.
        place: int32 ``(U,)``; the ``u``-th id given is now ``ids[place[u]]``.
    """

    ids: Ids
    offsets: npt.NDArray[np.int64]
    place: Positions

    def of_shard(self, shard: int) -> Ids:
        """Return the ids of one shard, a view."""
        return self.ids[self.offsets[shard] : self.offsets[shard + 1]]

    def grouped(self, values: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """Return values of the ids given, ``(U, ...)``, in the order of ``ids``."""
        values_by_shard = np.empty_like(values)
        values_by_shard[self.place] = values
        return values_by_shard


def split_by_shard(ids_U: Ids, num_shards: int) -> ShardedIds:
    """Group ids by the shard that holds them.

    Args:
        ids_U: uint64 ``(U,)``, may be empty, not changed.
        num_shards: number of servers, at least 1.

    Returns:
        The ids grouped by shard; within a shard they keep their order.

    Example:
        >>> split = split_by_shard(np.arange(5, dtype=np.uint64), 2)
        >>> split.ids[split.place].tolist()
        [0, 1, 2, 3, 4]
    """
    return ShardedIds(*_split(read_only(ids_U), num_shards))


@compiled
def is_of_shard(ids_N: Ids, shard: int, num_shards: int) -> npt.NDArray[np.bool_]:
    """Return for each id whether a shard holds it; bool ``(N,)``."""
    is_own_N = np.empty(len(ids_N), dtype=np.bool_)
    for n in range(len(ids_N)):
        is_own_N[n] = farmhash64_of(ids_N[n]) % np.uint64(num_shards) == shard
    return is_own_N


@compiled
def group_by_shard(
    ids_U: Ids,
    num_shards: int,
    grouped_U: Ids,
    offsets_P1: npt.NDArray[np.int64],
    place_U: Positions,
) -> None:
    """Write what :class:`ShardedIds` holds.

    Args:
        ids_U: uint64 ``(U,)``.
        num_shards: number of servers, at least 1.
        grouped_U: uint64 ``(U,)``, overwritten.
        offsets_P1: int64 ``(P + 1,)``, all zero, overwritten.
        place_U: int32 ``(U,)``, overwritten.
    """
    if num_shards == 1:
        for u in range(len(ids_U)):
            grouped_U[u], place_U[u] = ids_U[u], u
        offsets_P1[1] = len(ids_U)
        return
    for u in range(len(ids_U)):
        place_U[u] = np.int32(farmhash64_of(ids_U[u]) % np.uint64(num_shards))
        offsets_P1[place_U[u] + 1] += 1
    for p in range(num_shards):
        offsets_P1[p + 1] += offsets_P1[p]
    cursor = offsets_P1[:-1].copy()
    for u in range(len(ids_U)):
        shard = place_U[u]
        place_U[u] = cursor[shard]
        grouped_U[cursor[shard]] = ids_U[u]
        cursor[shard] += 1


@compiled
def _split(ids_U: Ids, num_shards: int) -> tuple[Ids, npt.NDArray[np.int64], Positions]:
    grouped = np.empty(len(ids_U), dtype=np.uint64)
    offsets = np.zeros(num_shards + 1, dtype=np.int64)
    place = np.empty(len(ids_U), dtype=np.int32)
    group_by_shard(ids_U, num_shards, grouped, offsets, place)
    return grouped, offsets, place
