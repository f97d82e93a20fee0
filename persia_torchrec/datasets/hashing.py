"""The xxh3_64 of many short texts at once, in NumPy; the library hashes one at a time.

XXH3 reads a text of 1 to 16 bytes as one or two numbers, flips bits by numbers of its
own, and mixes. The algorithm and its constants are those of Yann Collet's specification
(xxHash, doc/xxhash_spec.md, "XXH3 Algorithm Overview"), with seed 0.

Dimension key:
    U: texts
"""

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

MAX_SHORT = 16
"""Bytes of the longest text that is short."""

_WORD = 8

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
_LOW = np.uint64(0xFFFFFFFF)


def hash_short(raw: bytes, starts: Int64s, sizes: Int64s) -> UInt64s:
    """Return the xxh3_64 of texts of 1 to 16 bytes.

    Args:
        raw: all texts.
        starts: of each in ``raw``, ``(U,)``.
        sizes: of each in bytes, ``(U,)``.

    Returns:
        uint64 ``(U,)``; 0 for texts of another size.
    """
    hashes = np.zeros(len(starts), np.uint64)
    padded = raw + bytes(_WORD)
    words = np.ndarray((len(raw) + 1,), "<u8", padded, strides=(1,))  # at each byte
    for low, high, mix in ((1, 3, _of_3), (4, 8, _of_8), (9, 16, _of_16)):
        those = np.flatnonzero((sizes >= low) & (sizes <= high))
        if len(those):
            hashes[those] = mix(words, starts[those], sizes[those].astype(np.uint64))
    return hashes


def _of_3(words: UInt64s, starts: Int64s, sizes: UInt64s) -> UInt64s:
    byte = np.uint64(0xFF)
    last = (sizes - np.uint64(1)).astype(np.int64)
    first = words[starts] & byte
    middle = words[starts + (sizes >> np.uint64(1)).astype(np.int64)] & byte
    number: UInt64s = words[starts + last] & byte
    number |= (sizes << np.uint64(8)) | (first << np.uint64(16))
    number |= middle << np.uint64(24)
    number ^= _FLIP_3
    number ^= number >> np.uint64(33)
    number *= _PRIME_2
    number ^= number >> np.uint64(29)
    number *= _PRIME_3
    number ^= number >> np.uint64(32)
    return number


def _of_8(words: UInt64s, starts: Int64s, sizes: UInt64s) -> UInt64s:
    half = np.uint64(32)
    first = words[starts] & _LOW
    last = words[starts + sizes.astype(np.int64) - 4] & _LOW
    number: UInt64s = (last + (first << half)) ^ _FLIP_8
    number ^= _rotated(number, 49) ^ _rotated(number, 24)
    number *= _MIX_2
    number ^= (number >> np.uint64(35)) + sizes
    number *= _MIX_2
    number ^= number >> np.uint64(28)
    return number


def _of_16(words: UInt64s, starts: Int64s, sizes: UInt64s) -> UInt64s:
    low = words[starts] ^ _FLIP_LOW
    high = words[starts + sizes.astype(np.int64) - _WORD] ^ _FLIP_HIGH
    number: UInt64s = sizes + low.byteswap() + high + _folded_product(low, high)
    number ^= number >> np.uint64(37)
    number *= _MIX_1
    number ^= number >> np.uint64(32)
    return number


def _rotated(numbers: UInt64s, bits: int) -> UInt64s:
    rotated: UInt64s = numbers << np.uint64(bits)
    rotated |= numbers >> np.uint64(64 - bits)
    return rotated


def _folded_product(a: UInt64s, b: UInt64s) -> UInt64s:
    """Return the lower half of the 128 bits of a product xor its upper half."""
    half = np.uint64(32)
    a_low, a_high, b_low, b_high = a & _LOW, a >> half, b & _LOW, b >> half
    lows, crossed, others = a_low * b_low, a_high * b_low, a_low * b_high
    carried = (lows >> half) + (crossed & _LOW) + (others & _LOW)
    upper: UInt64s = (
        a_high * b_high + (crossed >> half) + (others >> half) + (carried >> half)
    )
    upper ^= a * b
    return upper
