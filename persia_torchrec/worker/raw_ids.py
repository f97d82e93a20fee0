"""The ids of a raw slot: how PERSIA lays out what it does not pool.

A sample has as many places as the slot's ``sample_fixed_size`` says. Its first ids take
them in their order; further ids are left out, and places without an id are empty. Each
different id of the batch is looked up once, and a place names its row, from 1:

    samples [7, 8], [], [8, 9, 9]    ids     7  8  9
    of 2 places each                 places  1  2 | 0  0 | 2  3

Dimension key:
    B: samples
    L: ids of the slot in the batch
    N: different ids that have a place
    F: places a sample
"""

from dataclasses import dataclass

import numpy as np

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import Positions, unique_ids
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.worker.bags import Bags
from persia_torchrec.worker.pooling import Lengths


@dataclass(frozen=True, slots=True)
class RawIds:
    """The ids of a raw slot, and where they stand.

    Attributes:
        ids: uint64 ``(N,)``, in the order of their first appearance.
        places: int32 ``(B, F)``: which id stands there, from 1; 0 where none does.
    """

    ids: Ids
    places: Positions

    def bags(self) -> Bags:
        """Return each id as a bag of its own."""
        return Bags(self.ids, np.ones(len(self.ids), dtype=np.int32))


def raw_ids(bags: Bags, num_places: int) -> RawIds:
    """Give the ids of each sample their places.

    Args:
        bags: of the slot.
        num_places: F, at least 1.

    Example:
        >>> ids = np.array([7, 8, 8, 9, 9], dtype=np.uint64)
        >>> raw = raw_ids(Bags(ids, np.array([2, 0, 3], dtype=np.int32)), 2)
        >>> raw.ids.tolist(), raw.places.tolist()
        ([7, 8, 9], [[1, 2], [0, 0], [2, 3]])
    """
    kept, at = _first_ids(read_only(bags.ids), read_only(bags.lengths), num_places)
    unique = unique_ids(kept)
    places_BF = np.zeros((len(bags.lengths), num_places), dtype=np.int32)
    places_BF.reshape(-1)[at] = unique.inverse + 1
    return RawIds(unique.ids, places_BF)


@compiled
def _first_ids(
    ids_L: Ids, lengths_B: Lengths, num_places: int
) -> tuple[Ids, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the first ids of each sample, and the places that they take."""
    kept = np.empty(len(ids_L), dtype=np.uint64)
    at = np.empty(len(ids_L), dtype=np.int64)
    num_kept = start = 0
    for b in range(len(lengths_B)):
        for column in range(min(lengths_B[b], num_places)):
            kept[num_kept] = ids_L[start + column]
            at[num_kept] = b * num_places + column
            num_kept += 1
        start += lengths_B[b]
    return kept[:num_kept], at[:num_kept]
