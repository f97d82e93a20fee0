"""The xxh3_64 of many short texts at once; the library hashes one at a time.

XXH3 reads a text of 1 to 16 bytes as one or two little-endian numbers, flips bits by
numbers of its own, and mixes. The algorithm and its constants are those of Yann
Collet's specification (xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Overview"), with
seed 0.

Dimension key:
    U: texts
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.datasets.arrow_types import plain
from persia_torchrec.datasets.columns import EMPTY, Int64s, require
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.jit.intrinsics import load_u8, load_u32, load_u64

UInt64s = npt.NDArray[np.uint64]

MAX_SHORT = 16
"""Bytes of the longest text that is short."""

_SPACE = np.uint64(32)

# Of the specification: primes, and pairs of words of its default secret, xored.
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    ),
    "<u8",
)
_FLIP_3 = (_SECRET[0] ^ (_SECRET[0] >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
_FLIP_8 = _SECRET[1] ^ _SECRET[2]
_FLIP_LOW, _FLIP_HIGH = _SECRET[3] ^ _SECRET[4], _SECRET[5] ^ _SECRET[6]
_PRIME_2, _PRIME_3 = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_MIX_1, _MIX_2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LOW, _BYTE = np.uint64(0xFFFFFFFF), np.uint64(0xFF)
_ZERO, _ONE, _THREE = np.uint64(0), np.uint64(1), np.uint64(3)
_FOUR, _EIGHT, _SHORT = np.uint64(4), np.uint64(8), np.uint64(MAX_SHORT)
_HALF = np.uint64(32)


def hash_texts(texts: Any) -> UInt64s:
    """Return the xxh3_64 of each text of an Arrow array, uint64 ``(U,)``.

    Spaces at its ends are no part of a text. An empty one, or a null, has the hash of
    ``EMPTY``.
    """
    arrow = require("pyarrow")
    is_small = texts.type in (arrow.string(), arrow.binary())
    if not is_small and texts.type != arrow.large_string():
        texts = texts.cast(arrow.large_binary())
    hashes, sizes = np.empty(len(texts), np.uint64), np.empty(len(texts), np.int32)
    _, ends, data = texts.buffers()
    if not len(texts):
        return hashes
    offsets = np.frombuffer(ends, np.int32 if is_small else np.int64)
    offsets = offsets[texts.offset :][: len(texts) + 1]
    raw = 0 if data is None else data.address
    of_empty = hash_of(EMPTY)
    if hash_short(raw, offsets, np.uint64(of_empty), hashes, sizes):
        those = np.flatnonzero(sizes > MAX_SHORT)
        _hash_long(texts, those, hashes)
    if texts.null_count:
        hashes[texts.is_null().to_numpy(zero_copy_only=False)] = of_empty
    return hashes


def hash_of(text: bytes) -> int:
    """Return the xxh3_64 of a text."""
    return int(require("xxhash").xxh3_64_intdigest(text))


def _hash_long(texts: Any, those: Int64s, hashes: UInt64s) -> None:
    """Hash long texts by the library, each distinct one once."""
    arrow = require("pyarrow")
    encoded = texts.take(arrow.array(those)).cast(arrow.large_binary())
    encoded = encoded.dictionary_encode()
    distinct = [hash_of(text.strip(b" ")) for text in encoded.dictionary.to_pylist()]
    indices = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    hashes[those] = np.array(distinct or [0], np.uint64)[indices]


def hashes_of(texts: Any) -> UInt64s:
    """Return a hash for each text; of a dictionary each text is hashed once."""
    arrow = require("pyarrow")
    if not arrow.types.is_dictionary(texts.type):
        return hash_texts(texts)
    hashes_U, indices = hash_texts(plain(texts.dictionary)), texts.indices
    if indices.null_count:
        none = len(hashes_U)
        hashes_U = np.append(hashes_U, np.uint64(hash_of(EMPTY)))
        indices = indices.cast(arrow.int64()).fill_null(none)
    hashes_L: UInt64s = hashes_U[indices.to_numpy(zero_copy_only=False)]
    return hashes_L


@compiled
def hash_short(
    raw: int,
    offsets: npt.NDArray[Any],
    of_empty: np.uint64,
    hashes: UInt64s,
    sizes: npt.NDArray[np.int32],
) -> int:
    """Hash texts of at most 16 bytes, without the spaces at their ends.

    Args:
        raw: the address of all texts, one after the other.
        offsets: where each begins, and the end of the last one, ``(U + 1,)``.
        of_empty: the hash of a text without bytes.
        hashes: written: uint64 ``(U,)``; 0 for longer texts.
        sizes: written: int32 ``(U,)``, in bytes, without the spaces.

    Returns:
        How many texts are longer.
    """
    num_long, first = 0, np.uint64(raw)
    for i in range(len(hashes)):
        start, stop = first + np.uint64(offsets[i]), first + np.uint64(offsets[i + 1])
        while start < stop and load_u8(start) == _SPACE:
            start += _ONE
        while stop > start and load_u8(stop - _ONE) == _SPACE:
            stop -= _ONE
        size = stop - start
        sizes[i] = size
        if size == _ZERO:
            hashes[i] = of_empty
        elif size <= _THREE:
            hashes[i] = _of_3(start, size)
        elif size <= _EIGHT:
            hashes[i] = _of_8(start, size)
        elif size <= _SHORT:
            hashes[i] = _of_16(start, size)
        else:
            hashes[i] = np.uint64(0)
            num_long += 1
    return num_long


@inlined
def _of_3(start: np.uint64, size: np.uint64) -> np.uint64:
    first, middle = load_u8(start), load_u8(start + (size >> _ONE))
    number = load_u8(start + size - _ONE) | (size << _EIGHT)
    number |= (first << np.uint64(16)) | (middle << np.uint64(24))
    number ^= _FLIP_3
    number ^= number >> np.uint64(33)
    number *= _PRIME_2
    number ^= number >> np.uint64(29)
    number *= _PRIME_3
    number ^= number >> _HALF
    return np.uint64(number)


@inlined
def _of_8(start: np.uint64, size: np.uint64) -> np.uint64:
    first, last = load_u32(start), load_u32(start + size - _FOUR)
    number = (last + (first << _HALF)) ^ _FLIP_8
    number ^= _rotated(number, 49) ^ _rotated(number, 24)
    number *= _MIX_2
    number ^= (number >> np.uint64(35)) + size
    number *= _MIX_2
    number ^= number >> np.uint64(28)
    return np.uint64(number)


@inlined
def _of_16(start: np.uint64, size: np.uint64) -> np.uint64:
    low = load_u64(start) ^ _FLIP_LOW
    high = load_u64(start + size - _EIGHT) ^ _FLIP_HIGH
    swapped = np.uint64(0)
    for i in range(8):
        byte = (low >> (_EIGHT * np.uint64(i))) & _BYTE
        swapped |= byte << (_EIGHT * np.uint64(7 - i))
    number = size + swapped + high + _folded_product(low, high)
    number ^= number >> np.uint64(37)
    number *= _MIX_1
    number ^= number >> _HALF
    return np.uint64(number)


@inlined
def _rotated(number: np.uint64, bits: int) -> np.uint64:
    return (number << np.uint64(bits)) | (number >> np.uint64(64 - bits))


@inlined
def _folded_product(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the lower half of the 128 bits of a product xor its upper half."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    lows, crossed, others = a_low * b_low, a_high * b_low, a_low * b_high
    carried = (lows >> _HALF) + (crossed & _LOW) + (others & _LOW)
    upper = a_high * b_high + (crossed >> _HALF) + (others >> _HALF)
    return (upper + (carried >> _HALF)) ^ (a * b)
