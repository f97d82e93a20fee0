"""What becomes of an id before it is looked up, as PERSIA computes it.

Ids of different feature groups are told apart by a prefix: the group's number takes the
top ``n`` bits, the id is reduced into the rest. In a slot with a hash stack, which has
few rows, each id is replaced by a bucket per round, and its embedding is the sum of
theirs. The hash is FarmHash's 64-bit fingerprint of an id's eight little-endian bytes.

Dimension key:
    L: ids, in any order
    R: rounds of a hash stack
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.jit.compiled import compiled, read_only

Ids = npt.NDArray[np.uint64]

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
