"""The xxh3_64 of many short texts at once; the library hashes one at a time.

XXH3 reads a text of 1 to 16 bytes as one or two numbers, flips bits by numbers of its
own, and mixes. The algorithm and its constants are those of Yann Collet's specification
(xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Overview"), with seed 0.

Dimension key:
    U: texts
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from persia_torchrec.jit.compiled import compiled, inlined

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

MAX_SHORT = 16
"""Bytes of the longest text that is short."""

_SPACE = 32

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
_EIGHT, _HALF = np.uint64(8), np.uint64(32)


@compiled
def hash_short(
    raw: npt.NDArray[np.uint8],
    offsets: npt.NDArray[Any],
    of_empty: np.uint64,
    hashes: UInt64s,
    sizes: npt.NDArray[np.int32],
) -> int:
    """Hash texts of at most 16 bytes, without the spaces at their ends.

    Args:
        raw: all texts, one after the other, not to be written to.
        offsets: where each begins, and the end of the last one, ``(U + 1,)``.
        of_empty: the hash of a text without bytes.
        hashes: written: uint64 ``(U,)``; 0 for longer texts.
        sizes: written: int32 ``(U,)``, in bytes, without the spaces.

    Returns:
        How many texts are longer.
    """
    num_long = 0
    for i in range(len(hashes)):
        start, stop = offsets[i], offsets[i + 1]
        while start < stop and raw[start] == _SPACE:
            start += 1
        while stop > start and raw[stop - 1] == _SPACE:
            stop -= 1
        size = stop - start
        sizes[i] = size
        if size == 0:
            hashes[i] = of_empty
        elif size <= 3:
            hashes[i] = _of_3(raw, start, size)
        elif size <= 8:
            hashes[i] = _of_8(raw, start, size)
        elif size <= MAX_SHORT:
            hashes[i] = _of_16(raw, start, size)
        else:
            hashes[i] = np.uint64(0)
            num_long += 1
    return num_long


@inlined
def _word(raw: npt.NDArray[np.uint8], start: int, num_bytes: int) -> np.uint64:
    """Return bytes as a little-endian number."""
    number = np.uint64(0)
    for i in range(num_bytes):
        number |= np.uint64(raw[start + i]) << (_EIGHT * np.uint64(i))
    return np.uint64(number)


@inlined
def _of_3(raw: npt.NDArray[np.uint8], start: int, size: int) -> np.uint64:
    first, middle = np.uint64(raw[start]), np.uint64(raw[start + (size >> 1)])
    number = np.uint64(raw[start + size - 1]) | (np.uint64(size) << _EIGHT)
    number |= (first << np.uint64(16)) | (middle << np.uint64(24))
    number ^= _FLIP_3
    number ^= number >> np.uint64(33)
    number *= _PRIME_2
    number ^= number >> np.uint64(29)
    number *= _PRIME_3
    number ^= number >> _HALF
    return np.uint64(number)


@inlined
def _of_8(raw: npt.NDArray[np.uint8], start: int, size: int) -> np.uint64:
    first, last = _word(raw, start, 4), _word(raw, start + size - 4, 4)
    number = (last + (first << _HALF)) ^ _FLIP_8
    number ^= _rotated(number, 49) ^ _rotated(number, 24)
    number *= _MIX_2
    number ^= (number >> np.uint64(35)) + np.uint64(size)
    number *= _MIX_2
    number ^= number >> np.uint64(28)
    return np.uint64(number)


@inlined
def _of_16(raw: npt.NDArray[np.uint8], start: int, size: int) -> np.uint64:
    low = _word(raw, start, 8) ^ _FLIP_LOW
    high = _word(raw, start + size - 8, 8) ^ _FLIP_HIGH
    swapped = np.uint64(0)
    for i in range(8):
        byte = (low >> (_EIGHT * np.uint64(i))) & _BYTE
        swapped |= byte << (_EIGHT * np.uint64(7 - i))
    number = np.uint64(size) + swapped + high + _folded_product(low, high)
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


SLACK = 6
"""How many elements :func:`take_ragged` may write beyond the end of the values."""


@compiled
def take_ragged(
    values: Int64s,
    starts: npt.NDArray[Any],
    offsets: Int64s,
    taken: Int64s,
) -> None:
    """Copy rows of several values each, from anywhere.

    Up to ``SLACK`` values are copied without a loop, whose end a processor cannot
    predict: those after a row are written over by the next one.

    Args:
        values: of all rows, not to be written to.
        starts: where each row that is wanted begins; likewise.
        offsets: where it is to begin, and the end of the last one; likewise.
        taken: written: their values, and ``SLACK`` more.
    """
    last = len(values) - SLACK
    for i in range(len(starts)):
        start, at = np.uint64(starts[i]), np.uint64(offsets[i])
        size = offsets[i + 1] - offsets[i]
        if size <= SLACK and starts[i] <= last:
            for j in range(SLACK):
                taken[at + np.uint64(j)] = values[start + np.uint64(j)]
        else:
            for j in range(size):
                taken[at + np.uint64(j)] = values[start + np.uint64(j)]
