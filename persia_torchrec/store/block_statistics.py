"""How often ids of a table with blocks were seen: read, and ranked.

A row's statistics are ``acc`` (float64), ``cur`` and t (float32), the last words of its
state. They are brought up to the t that is asked for when they are read. When a period
has ended all rows are read and ranked, a slice at a time: each slice is sorted, and a
frequency of a rank is found by bisecting its bits, which a search in each slice counts.

Dimension key:
    K: rows, each once
    S: slices; R: ranks
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Doubles, Slots, Words
from persia_torchrec.embedding.usage import KEPT, LEAST, NUM_STATISTICS
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled_as_written, read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Layout

_NEGLIGIBLE = 1e-7
_AHEAD = 12
_STATISTICS_BYTES = np.uint64(4 * NUM_STATISTICS)
_4, _8, _12 = (np.uint64(num) for num in (4, 8, 12))
_S32, _1 = np.uint64(32), np.uint64(1)
_LARGEST = np.uint64(2**63 - 1)

Int64s = npt.NDArray[np.int64]


class Ranking:
    """Finds the frequencies at some ranks, when ``t`` periods have ended.

    Until it is over no row of the table may leave or be counted; a new one may come.
    """

    def __init__(self, layout: Layout, num_used: int, t: int) -> None:
        """Begin with the first of ``num_used`` slots of the table's arena."""
        self._layout, self._t = layout, t
        self._acc_K: Doubles = np.empty(num_used, dtype=np.float64)
        self._ends_S, self._slot = [0], 0

    @property
    def is_read(self) -> bool:
        """Whether all rows are read."""
        return self._slot == len(self._acc_K)

    def read(self, num_slots: int) -> int:
        """Read the rows of the next slots; return of how many."""
        begin, num = self._slot, self._ends_S[-1]
        self._slot = min(begin + num_slots, len(self._acc_K))
        into = self._acc_K[num:]
        num = _read_range(self._layout, self._t, (begin, self._slot), into)
        into[:num].sort()
        self._ends_S.append(self._ends_S[-1] + num)
        return self._slot - begin

    def find(self, ranks: Callable[[int], Int64s]) -> Doubles | None:
        """Return the frequencies at ranks, when all rows are read.

        Args:
            ranks: given how many rows are ranked, how many come before each, the most
                frequent ones first, ``(R,)``.

        Returns:
            float64 ``(R,)``; None: no row was seen often enough.
        """
        num, ends_S = self._ends_S[-1], np.array(self._ends_S)
        if not num:
            return None
        bits_K = read_only(self._acc_K[:num].view(np.uint64))
        places_R = num - 1 - ranks(num)
        return _select(bits_K, ends_S, places_R)


def read_statistics(
    layout: Layout, slots_K: Slots, t: int
) -> tuple[Doubles, Doubles, npt.NDArray[np.bool_]]:
    """Return ``acc`` and ``cur`` of rows, when ``t`` periods have ended.

    And whether an id has been seen since.
    """
    acc_K, cur_K = np.empty(len(slots_K)), np.empty(len(slots_K))
    is_seen_K = np.empty(len(slots_K), dtype=np.bool_)
    _read(layout, read_only(slots_K), t, (acc_K, cur_K), is_seen_K)
    return acc_K, cur_K, is_seen_K


@compiled_as_written
def _read(
    layout: Layout,
    slots_K: Slots,
    t: int,
    into: tuple[Doubles, Doubles],
    is_seen_K: npt.NDArray[np.bool_],
) -> None:
    acc_K, cur_K = into
    rows = memory.rows_at(memory.store_at(layout), layout)
    at = rows.base + rows.state + rows.state_bytes - _STATISTICS_BYTES
    for k in range(len(slots_K)):
        if k + _AHEAD < len(slots_K):
            ahead = at + np.uint64(slots_K[k + _AHEAD]) * rows.stride
            loops.prefetch_lines(ahead, _STATISTICS_BYTES)
        address = at + np.uint64(slots_K[k]) * rows.stride
        acc_K[k], cur_K[k] = _bring_up(address, t)
        is_seen_K[k] = _since(address) >= t


@compiled_as_written
def _read_range(layout: Layout, t: int, slots: tuple[int, int], into_K: Doubles) -> int:
    """Read the rows of slots; return how many are ranked, which are written."""
    rows, num = memory.rows_at(memory.store_at(layout), layout), 0
    at = rows.state + rows.state_bytes - _STATISTICS_BYTES
    begin, end = slots
    for slot in range(begin, end):
        address = rows.base + np.uint64(slot) * rows.stride
        if slot + _AHEAD < end:
            ahead = address + np.uint64(_AHEAD) * rows.stride
            cpu.prefetch(ahead)
            loops.prefetch_lines(ahead + at, _STATISTICS_BYTES)
        if memory.owner_at(address) == rows.owner:
            acc, _ = _bring_up(address + at, t)
            if acc >= LEAST:
                into_K[num] = acc
                num += 1
    return num


@compiled_as_written
def _select(bits_K: Words, ends_S: Int64s, places_R: Int64s) -> Doubles:
    """Return the numbers at places of the order of all, whose slices are sorted.

    ``bits_K`` are theirs, which have the order of the numbers: none is negative.
    """
    found_R = np.empty(len(places_R), dtype=np.float64)
    for r in range(len(places_R)):
        low, high = np.uint64(0), _LARGEST
        while low < high:  # the least word that more are at or below than the place
            middle = low + ((high - low) >> _1)
            num = np.int64(0)
            for s in range(len(ends_S) - 1):
                num += _count_up_to(bits_K, ends_S[s], ends_S[s + 1], middle)
            if num > places_R[r]:
                high = middle
            else:
                low = middle + _1
        found_R[r] = cpu.double_of(low)
    return found_R


@compiled_as_written
def _count_up_to(
    bits_K: Words, begin: np.int64, end: np.int64, word: np.uint64
) -> np.int64:
    """Return how many words of a sorted slice are at most another."""
    low, high = begin, end
    while low < high:
        middle = (low + high) >> 1
        if bits_K[middle] <= word:
            low = middle + 1
        else:
            high = middle
    return low - begin


@compiled_as_written
def _bring_up(address: np.uint64, t: int) -> tuple[np.float64, np.float64]:
    """Return ``acc`` and ``cur`` of the statistics at an address, as of t."""
    low, high = cpu.load_u32(address), cpu.load_u32(address + _4)
    acc = cpu.double_of(low | (high << _S32))
    cur = np.float64(cpu.from_bits(np.uint32(cpu.load_u32(address + _8))))
    since = _since(address)
    while since < t and (acc > _NEGLIGIBLE or cur > 0.0):
        acc = np.float64(KEPT * acc + (1 - KEPT) * cur)
        cur = np.float64(0)
        since += np.int64(1)
    return acc, cur


@compiled_as_written
def _since(address: np.uint64) -> np.int64:
    """Return when statistics were brought up to date."""
    return np.int64(cpu.from_bits(np.uint32(cpu.load_u32(address + _12))))
