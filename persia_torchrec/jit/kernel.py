"""Building blocks of kernels, which the store compiles into its loops.

The store compiles a kernel, and the functions that it calls, which must be names of its
module; this package loads no compiler. A fast kernel reads its numbers before the loop:
for all the compiler knows, a store to the row might change them. It computes in one
type: ``float32`` constants, no Python floats, no mixture of signed and unsigned
integers. A choice of two numbers is an expression, written so that NaN stays NaN.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Pointer = npt.NDArray[np.float32]
"""Where float32 numbers begin. It has no length, and no negative indices."""

F = TypeVar("F", bound=Callable[..., object])
W = TypeVar("W", np.uint64, npt.NDArray[np.uint64])
"""A word, in compiled code; or words, in plain code."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: added to a word, it gives an unlike one."""

ZERO = np.float32(0)
ONE = np.float32(1)
_LEAST_SQUARES, _MOST_SQUARES = np.float32(1e-20), np.float32(1e37)
_INFINITE = np.float32(np.inf)

_MUL_A = np.uint64(0xBF58476D1CE4E5B9)
_MUL_B = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_LOW = np.uint64(2**32 - 1)


def as_written(function: F) -> F:
    """Keep the order of a kernel's operations on floats, as IEEE 754 defines it."""
    vars(function)["is_as_written"] = True
    return function


def prefetch(address: np.uint64) -> None:
    """Load the cache line at an address ahead of its use; compiled code only."""


vars(prefetch)["intrinsic"] = "prefetch"


@as_written
def divide(dividend: np.float32, divisor: np.float32) -> np.float32:
    """Divide before a loop, not in it, where ``fastmath`` would move the division."""
    return dividend / divisor


def sum_of_squares(x: Pointer, dim: int) -> np.float32:
    """Return the squared length of a vector."""
    total = ZERO
    for d in range(dim):
        total += x[d] * x[d]
    return total


def length_of(x: Pointer, dim: int) -> np.float32:
    """Return the Euclidean norm of a vector, whatever its magnitude.

    Where squares overflow, or lose digits, the vector is divided by its largest
    magnitude.
    """
    squares = sum_of_squares(x, dim)
    if _LEAST_SQUARES < squares < _MOST_SQUARES:
        return np.float32(np.sqrt(squares))
    largest = ZERO
    for d in range(dim):
        size = abs(x[d])
        largest = size if size > largest else largest
    if not ZERO < largest < _INFINITE:
        return np.float32(np.sqrt(squares))
    squares = ZERO
    for d in range(dim):
        scaled = divide(x[d], largest)
        squares += scaled * scaled
    return np.float32(largest * np.sqrt(squares))


def splitmix64(word: W) -> W:
    """Return 64 bits each of which depends on every bit of a word; one to one.

    The end of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014). It is unlike the hashes that spread ids over servers and
    over the index, so that the ids of one server look random here.
    """
    word = (word ^ (word >> _S30)) * _MUL_A
    word = (word ^ (word >> _S27)) * _MUL_B
    return word ^ (word >> _S31)


def mulhi(hash_: W, num: np.uint64) -> W:
    """Return ``hash_ * num // 2**64``: a number in ``[0, num)`` for a 64-bit hash."""
    hash_high, hash_low = hash_ >> _S32, hash_ & _LOW
    num_high, num_low = num >> _S32, num & _LOW
    middle = hash_high * num_low + ((hash_low * num_low) >> _S32)
    carried = hash_low * num_high + (middle & _LOW)
    high: W = hash_high * num_high + (middle >> _S32) + (carried >> _S32)
    return high


# THE LOG OF WHAT CHANGES
#
# What a request changes in a memory file is kept before, so that another process can
# undo it. The addresses and numbers of the log are words at its own address:
#
#     END    bytes from there to the end of what is kept
#     STOP   bytes from there to the end of what may be written
#     LOST   whether something could not be kept
#     BEGIN  bytes from there to the first word that is kept
#
# What is kept: words as they were, and a word that says where they are and how many,
# behind them, since the newest is undone first.

NO_LOG = np.uint64(0)
"""The address of the log where nothing is kept."""

END, STOP, LOST, BEGIN = (np.uint64(8 * word) for word in range(4))
"""Bytes from the address of the log to its own words."""

BEFORE = np.uint64(933_888)
"""Bytes of the memory before the log, so that what is kept has an offset in words."""

NUM_BITS = np.uint64(24)
IS_ROW = np.uint64(2**23)
"""The last word says in its lower bits how many words are kept, and whether they are of
a row; the upper ones are their offset in the memory, in words."""

_S3 = np.uint64(3)
_WORD, _ONE_WORD = np.uint64(8), np.uint64(1)


def load_word(address: np.uint64) -> np.uint64:
    """Return the word at an address; compiled code only."""
    raise NotImplementedError(address)


def store_word(address: np.uint64, word: np.uint64) -> None:
    """Write a word to an address; compiled code only."""


def copy_bytes(target: np.uint64, source: np.uint64, num_bytes: np.uint64) -> None:
    """Copy bytes from one address to another; compiled code only."""


def fence() -> None:
    """Keep writes in their order, for a reader of the memory of a killed process."""


vars(load_word)["intrinsic"] = "load_u64"
vars(store_word)["intrinsic"] = "store_u64"
vars(copy_bytes)["intrinsic"] = "copy_bytes"
vars(fence)["intrinsic"] = "fence"


def keep_words(log: np.uint64, address: np.uint64, num_words: np.uint64) -> None:
    """Keep words that are about to change; ``log`` is the log's address."""
    if log != NO_LOG:
        _keep(log, address, num_words, num_words)


def keep_row(log: np.uint64, address: np.uint64, num_words: np.uint64) -> None:
    """Keep words of a row, its tick among them."""
    if log != NO_LOG:
        _keep(log, address, num_words, num_words | IS_ROW)


def _keep(
    log: np.uint64, address: np.uint64, num_words: np.uint64, what: np.uint64
) -> None:
    end, num_bytes = load_word(log + END), num_words << _S3
    if end + num_bytes + _WORD > load_word(log + STOP):
        store_word(log + LOST, _ONE_WORD)
        fence()
        return
    copy_bytes(log + end, address, num_bytes)
    offset = (address - log + BEFORE) >> _S3
    store_word(log + end + num_bytes, (offset << NUM_BITS) | what)
    fence()
    store_word(log + END, end + num_bytes + _WORD)
    fence()
