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
def _split(ids_U: Ids, num_shards: int) -> tuple[Ids, npt.NDArray[np.int64], Positions]:
    shard_of = np.empty(len(ids_U), dtype=np.int32)
    offsets = np.zeros(num_shards + 1, dtype=np.int64)
    for u in range(len(ids_U)):
        shard_of[u] = np.int32(farmhash64_of(ids_U[u]) % np.uint64(num_shards))
        offsets[shard_of[u] + 1] += 1
    for p in range(num_shards):
        offsets[p + 1] += offsets[p]
    cursor = offsets[:-1].copy()
    grouped = np.empty_like(ids_U)
    place = np.empty(len(ids_U), dtype=np.int32)
    for u in range(len(ids_U)):
        shard = shard_of[u]
        place[u] = cursor[shard]
        grouped[cursor[shard]] = ids_U[u]
        cursor[shard] += 1
    return grouped, offsets, place
