"""How often ids of a table with blocks were seen: read, and ranked ahead of time.

A row's statistics are ``acc`` (float64), ``cur`` and t (float32), the last words of its
state. They are brought up to the t that is asked for when they are read.

At the end of a period the frequencies of all rows are ranked. To read all of them at
once would hold the server, so they are read in the last updates before, ``GROUP_SLOTS``
slots in each, as they will be at the end if the id is not seen any more. An id that is
seen after its row was read replaces what was read:

    slots    [ read, in sorted runs ..... | next group | .... ]
    seen     runs of what is not true any more, runs of what is true instead

The update that ends the period reads the rest, which is all where there is one group,
and selects the thresholds from the runs. A row that leaves after it was read may still
be ranked. What was read ends with the process; the next one reads more in each update.

Dimension key:
    K: rows, each once
    R: runs
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.embedding.usage import KEPT, LEAST, NUM_STATISTICS, Doubles
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, compiled_as_written, read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Layout, Slots, Words

GROUP_SLOTS = 2**13
"""Slots whose statistics an update reads, at least."""

_NEGLIGIBLE = 1e-7
_AHEAD = 12
_STATISTICS_BYTES = np.uint64(4 * NUM_STATISTICS)
_4, _8, _12 = (np.uint64(num) for num in (4, 8, 12))
_ZERO, _ONE, _S32 = np.uint64(0), np.uint64(1), np.uint64(32)
_HIGHEST_BIT = 62  # of a positive float64


class Ranking:
    """The frequencies at the end of period ``t`` of the rows that were read so far.

    The store's thread owns it. ``is_begun`` once rows were read.
    """

    def __init__(self, layout: Layout, capacity_rows: int, t: int) -> None:
        self.t, self._layout, self._num_read = t, layout, 0
        self._acc_C = memory.reserve(capacity_rows).view(np.float64)
        self._runs: list[Doubles] = []
        self._untrue: list[Doubles] = []

    def read(self, num_used: int, num_left: int) -> None:
        """Read some slots, so that all are read ``num_left`` updates later."""
        num_slots = max(num_used - self._num_read, 0)
        num_slots = min(max(GROUP_SLOTS, -(-num_slots // (num_left + 1))), num_slots)
        end = self._num_read + num_slots
        run = _read_group(self._layout, self._num_read, end, self.t, self._acc_C)
        self._runs.append(np.sort(run))
        self._num_read = end

    def replace(self, slots_K: Slots, acc_K: Doubles, cur_K: Doubles) -> None:
        """Take over what has been counted of rows; ``acc`` and ``cur`` as before t."""
        is_read_K = slots_K < self._num_read
        slots_K, acc_K, cur_K = slots_K[is_read_K], acc_K[is_read_K], cur_K[is_read_K]
        cur_K = cur_K.astype(np.float32).astype(np.float64)  # as rows keep it
        acc_K = KEPT * acc_K + (1 - KEPT) * cur_K
        untrue_K = self._acc_C[slots_K]
        self._acc_C[slots_K] = acc_K
        self._untrue.append(np.sort(untrue_K[untrue_K >= LEAST]))
        self._runs.append(np.sort(acc_K[acc_K >= LEAST]))

    def count(self) -> int:
        """Return how many rows have been seen often enough to be ranked."""
        return sum(map(len, self._runs)) - sum(map(len, self._untrue))

    def select(self, ranks: npt.NDArray[np.int64]) -> Doubles:
        """Return the frequencies that so many rows come before, the highest first."""
        runs = self._runs + self._untrue
        addresses_R = np.array([run.ctypes.data for run in runs], dtype=np.uint64)
        lengths_R = np.array([len(run) for run in runs], dtype=np.int64)
        num_true = len(self._runs)
        return np.array(
            [_select(addresses_R, lengths_R, num_true, rank) for rank in ranks.tolist()]
        )


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
def _read_group(
    layout: Layout, start: int, end: int, t: int, acc_C: Doubles
) -> Doubles:
    """Read the rows in slots ``[start, end)``; return what will be ranked of them."""
    rows = memory.rows_at(memory.store_at(layout), layout)
    at = rows.state + rows.state_bytes - _STATISTICS_BYTES
    found, num = np.empty(end - start, dtype=np.float64), 0
    for slot in range(start, end):
        address = rows.base + np.uint64(slot) * rows.stride
        if slot + _AHEAD < end:
            ahead = address + np.uint64(_AHEAD) * rows.stride
            cpu.prefetch(ahead)
            loops.prefetch_lines(ahead + at, _STATISTICS_BYTES)
        if memory.owner_at(address) == rows.owner:
            acc, _ = _bring_up(address + at, t)
            acc_C[slot] = acc
            if acc >= LEAST:
                found[num] = acc
                num += 1
    return found[:num]


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


@compiled
def _select(
    addresses_R: Words, lengths_R: npt.NDArray[np.int64], num_true: int, rank: int
) -> float:
    """Return the number that ``rank`` others come before, the highest first.

    Runs of positive numbers are in ascending order; those from ``num_true`` on count
    against the others. Positive floats are ordered as their bits are: these are found
    from the highest on, and each run is searched where the number can still be.
    """
    num_runs = len(lengths_R)
    begin_R, end_R = np.zeros(num_runs, dtype=np.int64), lengths_R.copy()
    middle_R = np.empty(num_runs, dtype=np.int64)
    bits = _ZERO
    for bit in range(_HIGHEST_BIT, -1, -1):
        wanted = bits | (_ONE << np.uint64(bit))
        num_above = 0  # or equal
        for run in range(num_runs):
            low, high = begin_R[run], end_R[run]
            while low < high:
                middle = (low + high) >> 1
                word = cpu.load_u64(addresses_R[run] + _8 * np.uint64(middle))
                if word < wanted:
                    low = middle + 1
                else:
                    high = middle
            middle_R[run] = low
            num = lengths_R[run] - low
            num_above += num if run < num_true else -num
        if num_above > rank:
            bits = wanted
            begin_R[:] = middle_R
        else:
            end_R[:] = middle_R
    return cpu.double_of(bits)
