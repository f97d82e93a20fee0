"""The index: from (table, id) to a slot.

One open-addressing table of 8-byte entries for all tables of the server, probed
linearly:

    entry     hash (32 bits) | slot + 1 (32 bits)        0: empty
    home      (hash * number of buckets) >> 32

The entry does not hold the id: where the hash fits, the row's own header, which the
lookup touches anyway, says whether it is the row that is sought. So eight entries
share a cache line, and an index of n buckets costs 8 n bytes.

Because an entry holds the hash from which its home follows, a removal can close the
gap behind itself (no tombstones), and the index grows without looking at any row. The
home rises with the hash, so that growing copies from front to back.
"""

import numpy as np

from persia_torchrec.compiled import compiled
from persia_torchrec.store.memory import load_word, reserve
from persia_torchrec.store.rows import OWNER_SHIFT, WORD, Words

MAX_ROWS = 2**32 - 2
"""Rows that the 32-bit slot numbers can tell apart."""

_MAX_LOAD = 0.7
_GROWTH = 1.5
_MIN_BUCKETS = 1024

_MUL_A = np.uint64(0xBF58476D1CE4E5B9)
_MUL_B = np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S32 = np.uint64(32)
_S29 = np.uint64(29)
_LOW = np.uint64(2**32 - 1)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)

NOT_FOUND = np.uint64(2**64 - 1)
"""What :func:`find_slot` returns for an id that has no row."""


def empty_index() -> Words:
    """Return the buckets of an index without entries."""
    return reserve(_MIN_BUCKETS)


def with_room_for(buckets: Words, num_rows: int) -> Words:
    """Return an index that can hold ``num_rows``: the same one, or a larger copy."""
    if num_rows <= len(buckets) * _MAX_LOAD:
        return buckets
    larger = reserve(int(max(num_rows / _MAX_LOAD, len(buckets) * _GROWTH)) + 1)
    _copy_entries(buckets, larger)
    return larger


@compiled
def hash_of(id_: np.uint64, owner: np.uint64) -> np.uint64:
    """Return a 32-bit hash of an id and its owner, as uint64."""
    x = id_ ^ (owner * _GOLDEN)
    x = (x ^ (x >> _S32)) * _MUL_A
    x = (x ^ (x >> _S29)) * _MUL_B
    return x >> _S32


@compiled
def home_of(buckets: Words, hash_: np.uint64) -> np.uint64:
    """Return the bucket where the probing for a hash begins."""
    return (hash_ * np.uint64(len(buckets))) >> _S32


@compiled
def find_slot(
    buckets: Words,
    base: np.uint64,
    stride: np.uint64,
    id_: np.uint64,
    owner: np.uint64,
    hash_: np.uint64,
) -> np.uint64:
    """Return the slot of an id, or ``NOT_FOUND``.

    Args:
        buckets: the index.
        base: address of the arena of the owner's rows.
        stride: bytes a slot there.
        id_: the id.
        owner: number of its table plus one.
        hash_: what :func:`hash_of` returns for both.
    """
    last = np.uint64(len(buckets) - 1)
    bucket = home_of(buckets, hash_)
    while True:
        entry = buckets[bucket]
        if entry == _ZERO:
            return NOT_FOUND
        if entry >> _S32 == hash_:
            slot = (entry & _LOW) - _ONE
            address = base + slot * stride
            if (
                load_word(address) == id_
                and load_word(address + WORD) >> OWNER_SHIFT == owner
            ):
                return slot
        bucket = _ZERO if bucket == last else bucket + _ONE


@compiled
def likely_slot(buckets: Words, hash_: np.uint64) -> np.uint64:
    """Return the slot of the first entry whose hash fits, without reading the row."""
    last = np.uint64(len(buckets) - 1)
    bucket = home_of(buckets, hash_)
    while True:
        entry = buckets[bucket]
        if entry == _ZERO:
            return NOT_FOUND
        if entry >> _S32 == hash_:
            return (entry & _LOW) - _ONE
        bucket = _ZERO if bucket == last else bucket + _ONE


@compiled
def add_entry(buckets: Words, hash_: np.uint64, slot: np.uint64) -> None:
    """Enter a slot; the caller has seen to it that there is room."""
    last = np.uint64(len(buckets) - 1)
    bucket = home_of(buckets, hash_)
    while buckets[bucket] != _ZERO:
        bucket = _ZERO if bucket == last else bucket + _ONE
    buckets[bucket] = (hash_ << _S32) | (slot + _ONE)


@compiled
def remove_entry(buckets: Words, hash_: np.uint64, slot: np.uint64) -> None:
    """Take out a slot that is in the index, and close the gap it leaves.

    Each entry behind the gap, up to the next empty bucket, moves into it unless its
    home lies between the gap and itself.
    """
    num = np.uint64(len(buckets))
    gap = home_of(buckets, hash_)
    wanted = (hash_ << _S32) | (slot + _ONE)
    while buckets[gap] != wanted:
        gap = _ZERO if gap + _ONE == num else gap + _ONE
    bucket = gap
    while True:
        bucket = _ZERO if bucket + _ONE == num else bucket + _ONE
        entry = buckets[bucket]
        if entry == _ZERO:
            break
        home = home_of(buckets, entry >> _S32)
        from_home = bucket - home if bucket >= home else bucket + num - home
        from_gap = bucket - gap if bucket >= gap else bucket + num - gap
        if from_home >= from_gap:
            buckets[gap] = entry
            gap = bucket
    buckets[gap] = _ZERO


@compiled
def _copy_entries(buckets: Words, larger: Words) -> None:
    for i in range(len(buckets)):
        entry = buckets[i]
        if entry != _ZERO:
            add_entry(larger, entry >> _S32, (entry & _LOW) - _ONE)
