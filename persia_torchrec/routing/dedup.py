"""Send each id once: unique ids, and the way back.

A batch repeats popular ids many times. A lookup asks for each id once and spreads the
answer out again; a gradient goes the other way, summed over the repeats.

The unique ids come in the order of their first appearance, so that the same batch is
always asked for in the same order; a hash table of twice the batch's length, thrown
away afterwards, finds the repeats.

Dimension key:
    L: ids in the batch, repeats included
    U: unique ids, U <= L
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.errors import BatchError
from persia_torchrec.routing.hashing import Ids

Positions = npt.NDArray[np.int32]
Counts = npt.NDArray[np.uint32]

MAX_IDS = 2**31 - 1
"""Most ids that one batch may hold, since positions are int32."""


@dataclass(frozen=True, slots=True)
class UniqueIds:
    """Unique ids of a batch and where each came from.

    Attributes:
        ids: uint64 ``(U,)``, in the order of first appearance.
        inverse: int32 ``(L,)``; ``ids[inverse]`` is the original batch.
    """

    ids: Ids
    inverse: Positions

    @property
    def counts(self) -> Counts:
        """How often each id occurs, uint32 ``(U,)``; counted each time it is asked.

        Example:
            >>> unique_ids(np.array([7, 3, 7], dtype=np.uint64)).counts.tolist()
            [2, 1]
        """
        return count_repeats(self.inverse, len(self.ids))


def unique_ids(ids_L: Ids) -> UniqueIds:
    """Find the unique ids of a batch.

    Args:
        ids_L: uint64 ``(L,)``, any order, may be empty.

    Returns:
        The unique ids in the order of their first appearance, with their inverse.

    Raises:
        BatchError: ``ids_L`` is not a flat uint64 array, or is too long.

    Example:
        >>> unique = unique_ids(np.array([7, 3, 7], dtype=np.uint64))
        >>> unique.ids.tolist(), unique.inverse.tolist()
        ([7, 3], [0, 1, 0])
    """
    require_ids(ids_L)
    return UniqueIds(*_unique(read_only(ids_L)))


def count_repeats(inverse_L: Positions, num_unique: int) -> Counts:
    """Count how often each unique id occurs.

    Args:
        inverse_L: int32 ``(L,)``, which unique id each id is.
        num_unique: how many unique ids there are.

    Returns:
        uint32 ``(num_unique,)``.
    """
    return _count(read_only(inverse_L), num_unique)


def require_ids(ids_L: Ids) -> None:
    """Refuse what are no ids of a batch.

    Raises:
        BatchError: ``ids_L`` is not a flat uint64 array, or is too long.
    """
    if ids_L.dtype != np.uint64 or ids_L.ndim != 1:
        raise BatchError(
            "ids must be a flat uint64 array. "
            f"Received: dtype={ids_L.dtype}, shape={ids_L.shape}."
        )
    if len(ids_L) > MAX_IDS:
        raise BatchError(
            f"A batch holds at most {MAX_IDS} ids. Received: {len(ids_L)}."
        )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_64 = np.uint64(64)


@compiled
def num_buckets(num_ids: int) -> int:
    """Return how large a hash table is: a power of two, twice the ids at least."""
    num = 2
    while num < 2 * num_ids:
        num *= 2
    return num


@compiled
def find_repeats(
    ids_L: Ids, buckets: Positions, unique_L: Ids, inverse_L: Positions
) -> int:
    """Write the unique ids of a batch, and which of them each id is.

    Args:
        ids_L: uint64 ``(L,)``.
        buckets: int32, overwritten, as many as :func:`num_buckets` says: position in
            ``unique_L``, or -1.
        unique_L: uint64, at least as long as there are unique ids, overwritten from
            the front.
        inverse_L: int32 ``(L,)``, overwritten.

    Returns:
        How many ids are unique.
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
def _unique(ids_L: Ids) -> tuple[Ids, Positions]:
    buckets = np.empty(num_buckets(len(ids_L)), dtype=np.int32)
    unique = np.empty(len(ids_L), dtype=np.uint64)
    inverse = np.empty(len(ids_L), dtype=np.int32)
    count = find_repeats(ids_L, buckets, unique, inverse)
    return unique[:count].copy(), inverse


@compiled
def _count(inverse_L: Positions, num_unique: int) -> Counts:
    counts = np.zeros(num_unique, dtype=np.uint32)
    for i in range(len(inverse_L)):
        counts[inverse_L[i]] += np.uint32(1)
    return counts
