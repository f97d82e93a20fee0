"""Rows: where weights and optimizer state stand, and which slots are free.

Rows of one width share an arena: one stretch of memory of ``capacity`` equal slots, of
which only the used ones cost anything. A row is a header of two 8-byte words and then
floats, so that finding, touching and reading a row share their first cache line:

    word 0    id                                    (free slot: next free slot + 1)
    word 1    owner (16 bits) | tick (48 bits)      (free slot: 0)
    float 4.. weights (D floats), optimizer state (S floats), padding to 8 bytes

``owner`` is the number of the table plus one; ``tick`` says when the row was last used
(see ``recency.py``). The loops see all arenas as one directory, a uint64 array with a
line an arena:

    base address | bytes a slot | slots ever used | head of the free list + 1
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.store.memory import load_word, reserve, store_word

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

HEADER_FLOATS = 4
"""Floats that the header takes; the weights begin there."""

BASE, STRIDE, USED, FREE = range(4)
"""Columns of the directory of arenas."""

OWNER_SHIFT = np.uint64(48)
TICK_MASK = np.uint64(2**48 - 1)
WORD = np.uint64(8)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


@dataclass(frozen=True, slots=True)
class Arena:
    """The slots of all rows of one width.

    Attributes:
        words_a_row: 8-byte words a slot, header included.
        floats: float32 ``(capacity, 2 * words_a_row)``; the same memory as ``words``.
        words: uint64 ``(capacity, words_a_row)``.
    """

    words_a_row: int
    floats: Floats
    words: Words

    @classmethod
    def reserve(cls, capacity: int, words_a_row: int) -> "Arena":
        """Reserve address space for ``capacity`` rows.

        Raises:
            StoreError: the operating system refuses.
        """
        memory = reserve(capacity * words_a_row)
        return cls(
            words_a_row,
            memory.view(np.float32).reshape(capacity, 2 * words_a_row),
            memory.reshape(capacity, words_a_row),
        )

    def directory_line(self) -> list[int]:
        """Return this arena's line of the directory, all slots unused."""
        return [self.words.ctypes.data, self.words_a_row * 8, 0, 0]


def words_a_row(num_floats: int) -> int:
    """Return the 8-byte words of a row of ``num_floats`` weights and state floats."""
    return (HEADER_FLOATS + num_floats + 1) // 2


@compiled
def address_of(arenas: Words, arena: np.uint64, slot: np.uint64) -> np.uint64:
    """Return the address of a row's header."""
    return arenas[arena, BASE] + slot * arenas[arena, STRIDE]


@compiled
def take_slot(arenas: Words, arena: np.uint64) -> np.uint64:
    """Return a free slot; the caller has seen to it that there is one."""
    head = arenas[arena, FREE]
    if head == _ZERO:
        slot = arenas[arena, USED]
        arenas[arena, USED] = slot + _ONE
        return slot
    slot = head - _ONE
    arenas[arena, FREE] = load_word(address_of(arenas, arena, slot))
    return slot


@compiled
def free_slot(arenas: Words, arena: np.uint64, slot: np.uint64) -> None:
    """Put a slot on its arena's free list."""
    address = address_of(arenas, arena, slot)
    store_word(address, arenas[arena, FREE])
    store_word(address + WORD, _ZERO)
    arenas[arena, FREE] = slot + _ONE
