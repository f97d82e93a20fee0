"""Compiled loops of a cache of rows: which row is in which slot, and what moves.

A prototype for the benchmark ``cache``. All tables share the slots. A row that misses
gets the slot of one that leaves, which a hand finds that goes round: it passes by slots
that batches in flight need, and those that were used since, up to ``MOST`` times.

Dimension key: L ids of a batch, T tables, P servers, C slots, W floats a row, N rows
that miss or leave.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Ids, Offsets, Positions
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.routing.route import farmhash64_of

MOST = 3

_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_0, _1, _16, _32, _LOW = (np.uint64(n) for n in (0, 1, 16, 32, 2**32 - 1))
_AHEAD = 12  # ids whose entries are on their way


class SlotMap(NamedTuple):
    """Which row is in which slot.

    Attributes:
        entries: uint64 ``(E, 2)``, open addressing, a power of two: id; table << 32 |
            slot + 1, or 0.
        ids: uint64 ``(C,)``, of the row in each slot; ``tables``, int32, likewise.
        last: int64 ``(C,)``, the latest batch that needs the slot.
        counters: uint8 ``(C,)``, up to ``MOST``.
        state: int64: the hand, slots in use, unique ids of the latest batch.
    """

    entries: Ids
    ids: Ids
    tables: Positions
    last: Offsets
    counters: npt.NDArray[np.uint8]
    state: Offsets

    @classmethod
    def empty(cls, num_slots: int) -> "SlotMap":
        """Return a map without rows."""
        num_entries = 1 << max((2 * num_slots - 1).bit_length(), 4)
        return cls(
            np.zeros((num_entries, 2), np.uint64),
            np.zeros(num_slots, np.uint64),
            np.zeros(num_slots, np.int32),
            np.full(num_slots, -1, np.int64),
            np.zeros(num_slots, np.uint8),
            np.zeros(3, np.int64),
        )


class Moved(NamedTuple):
    """Rows that miss, or leave, by server and then table; room for L of them.

    Attributes:
        ids, slots: uint64, int32.
        segments: int64 ``(P, T, 2)``: the table's number there, how many rows.
        offsets: int64 ``(P + 1,)``: where those of a server begin.
    """

    ids: Ids
    slots: Positions
    segments: Offsets
    offsets: Offsets


@compiled
def plan(
    ids_L: Ids,
    at: tuple[int, int],
    known: SlotMap,
    slots_L: Positions,
    missed: Moved,
    left: Moved,
) -> bool:
    """Give each id a slot; tell which rows miss and leave; False: there is no room.

    Each table has as many of the ids, one after the other. ``at`` is the number of the
    batch, and of the first one that has not been trained: slots that it or a later one
    needs are not given away.
    """
    step, oldest = at
    num_samples = len(ids_L) // missed.segments.shape[1]
    later = np.empty(len(ids_L), dtype=np.int32)
    num_later = _find_slots(ids_L, (step, num_samples), known, slots_L, later)
    new, tables = np.empty(num_later, np.int32), np.empty(num_later, np.int32)
    gone, gone_tables = np.empty(num_later, np.int32), np.empty(num_later, np.int32)
    gone_ids, new_ids = np.empty(num_later, np.uint64), np.empty(num_later, np.uint64)
    base = np.uint64(known.entries.ctypes.data)
    chosen = np.empty(num_later, np.int32)  # some ahead, so that entries are on the way
    num_new = num_gone = num_chosen = 0
    for k in range(num_later):
        i = later[k]
        t = i // num_samples
        table = np.uint64(t)
        if k + _AHEAD < num_later:
            j = later[k + _AHEAD]
            home = _home(known.entries, ids_L[j], np.uint64(j // num_samples))
            cpu.prefetch(base + home * _16)
        entry = _find(known.entries, ids_L[i], table)
        if known.entries[entry, 1] != _0:  # it has missed before in this batch
            slots_L[i] = np.int64(known.entries[entry, 1] & _LOW) - 1
            continue
        if known.state[1] < len(known.ids):
            slot = known.state[1]
            known.state[1] += 1
        else:
            while num_chosen < min(num_gone + _AHEAD, num_gone + num_later - k):
                slot = _next_slot(known, oldest)
                if slot < 0:
                    return False
                chosen[num_chosen], known.last[slot] = slot, step
                home = _home(
                    known.entries, known.ids[slot], np.uint64(known.tables[slot])
                )
                cpu.prefetch(base + home * _16)
                num_chosen += 1
            slot = np.int64(chosen[num_gone])
            gone_ids[num_gone], gone_tables[num_gone] = (
                known.ids[slot],
                known.tables[slot],
            )
            gone[num_gone] = slot
            num_gone += 1
            _remove(known.entries, known.ids[slot], np.uint64(known.tables[slot]))
            entry = _find(known.entries, ids_L[i], table)  # it may have moved
        known.entries[entry, 0] = ids_L[i]
        known.entries[entry, 1] = (table << _32) | np.uint64(slot + 1)
        known.ids[slot], known.tables[slot] = ids_L[i], t
        known.last[slot], known.counters[slot] = step, 0
        slots_L[i] = slot
        new_ids[num_new], new[num_new], tables[num_new] = ids_L[i], slot, t
        num_new += 1
    known.state[2] += num_new
    _group(new_ids[:num_new], new, tables, missed)
    _group(gone_ids[:num_gone], gone, gone_tables, left)
    return True


@compiled
def _find_slots(
    ids_L: Ids, at: tuple[int, int], known: SlotMap, slots_L: Positions, out: Positions
) -> int:
    """Give ids that hit their slots; return how many miss, and write which.

    ``at`` is the number of the batch, and how many ids each table has.
    """
    step, num_samples = at
    base = np.uint64(known.entries.ctypes.data)
    num_later = num_unique = 0
    for first in range(0, len(ids_L), num_samples):
        table, stop = np.uint64(first // num_samples), first + num_samples
        for i in range(first, stop):
            if i + _AHEAD < stop:
                home = _home(known.entries, ids_L[i + _AHEAD], table)
                cpu.prefetch(base + home * _16)
            word = known.entries[_find(known.entries, ids_L[i], table), 1]
            if word == _0:
                out[num_later] = i
                num_later += 1
                continue
            slot = np.int64(word & _LOW) - 1
            slots_L[i] = slot
            if known.last[slot] != step:
                num_unique += 1
                known.last[slot] = step
                known.counters[slot] = min(known.counters[slot] + 1, MOST)
    known.state[2] = num_unique
    return num_later


@inlined
def _next_slot(known: SlotMap, oldest: int) -> int:
    """Return the slot of the row that leaves; -1: batches in flight need all."""
    num_slots, hand = len(known.ids), known.state[0]
    for _ in range((MOST + 2) * num_slots):
        slot = hand
        hand = hand + 1 if hand + 1 < num_slots else 0
        if known.last[slot] >= oldest:
            continue
        if known.counters[slot] == 0:
            known.state[0] = hand
            return int(slot)
        known.counters[slot] -= 1
    return -1


@compiled
def _group(ids_N: Ids, slots_N: Positions, tables_N: Positions, out: Moved) -> None:
    """Write rows in the order of a request to each server; a counting sort."""
    num_servers, num_tables, _ = out.segments.shape
    where_N = np.empty(len(ids_N), dtype=np.int32)
    starts = np.zeros(num_servers * num_tables + 1, dtype=np.int64)
    for n in range(len(ids_N)):
        server = np.int64(farmhash64_of(ids_N[n]) % np.uint64(num_servers))
        where_N[n] = server * num_tables + tables_N[n]
        starts[where_N[n] + 1] += 1
    for k in range(num_servers * num_tables):
        out.segments[k // num_tables, k % num_tables, 1] = starts[k + 1]
        starts[k + 1] += starts[k]
    for p in range(num_servers + 1):
        out.offsets[p] = starts[p * num_tables]
    for n in range(len(ids_N)):
        at = starts[where_N[n]]
        out.ids[at], out.slots[at] = ids_N[n], slots_N[n]
        starts[where_N[n]] = at + 1


@inlined
def _home(entries: Ids, id_: np.uint64, table: np.uint64) -> Any:
    mixed = (id_ ^ (table * _MIX)) * _GOLDEN
    return ((mixed ^ (mixed >> _32)) * _GOLDEN >> _32) & np.uint64(len(entries) - 1)


@inlined
def _find(entries: Ids, id_: np.uint64, table: np.uint64) -> Any:
    """Return the entry of a row, or the empty one where it would be."""
    at, mask = _home(entries, id_, table), np.uint64(len(entries) - 1)
    while True:
        word = entries[at, 1]
        if word == _0 or (entries[at, 0] == id_ and (word >> _32) == table):
            return at
        at = (at + _1) & mask


@inlined
def _remove(entries: Ids, id_: np.uint64, table: np.uint64) -> None:
    """Remove a row, and move those back that had to give way to it."""
    mask = np.uint64(len(entries) - 1)
    hole = _find(entries, id_, table)
    at = (hole + _1) & mask
    while entries[at, 1] != _0:
        home = _home(entries, entries[at, 0], entries[at, 1] >> _32)
        if ((at - home) & mask) >= ((at - hole) & mask):
            entries[hole, 0], entries[hole, 1] = entries[at, 0], entries[at, 1]
            hole = at
        at = (at + _1) & mask
    entries[hole, 1] = _0


@compiled
def gather(rows_CW: Floats, slots_N: Positions, out_NW: Floats) -> None:
    """Copy rows of slots."""
    for n in range(len(slots_N)):
        slot = np.int64(slots_N[n])
        for w in range(rows_CW.shape[1]):
            out_NW[n, w] = rows_CW[slot, w]


@compiled
def scatter(rows_NW: Floats, slots_N: Positions, rows_CW: Floats) -> None:
    """Copy rows to slots."""
    for n in range(len(slots_N)):
        slot = np.int64(slots_N[n])
        for w in range(rows_CW.shape[1]):
            rows_CW[slot, w] = rows_NW[n, w]


@compiled
def copy(numbers: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Copy numbers, ids or slots, without Python's lock."""
    for n in range(len(out)):
        out[n] = numbers[n]


@compiled
def train(slots_L: Positions, rows_CW: Floats) -> None:
    """Subtract 1 from each weight of a row for each id, and add 1 to its state."""
    last = rows_CW.shape[1] - 1
    for n in range(len(slots_L)):
        slot = np.int64(slots_L[n])
        for d in range(last):
            rows_CW[slot, d] -= np.float32(1)
        rows_CW[slot, last] += np.float32(1)
