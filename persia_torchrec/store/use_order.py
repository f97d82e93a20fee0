"""Which place each row had in the request that used it last.

A row's header says in which request it was last used, and the log of uses says in which
order the rows of a request were. What a checkpoint keeps is both, and so the log is
copied when a dump begins, at once; then it is read a few records at a time:

    log     [tick 3] a b c   [tick 4] b d          places     a: 0   c: 2   b: 0   d: 1

A record that is not current any more says nothing. Rows that are used while this goes
on get no place: they are newer than all others, and nearly in order by their ticks.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.store.memory import (
    load_word,
    prefetch,
    reserve,
    store_half_word,
)
from persia_torchrec.store.recency import (
    CLEANING,
    HEAD,
    MARK,
    MARK_WORDS,
    READ,
    TAIL,
    WRITE,
    RecencyLogs,
)
from persia_torchrec.store.rows import TICK_MASK, USED, WORD, Words, address_of

Numbers = npt.NDArray[np.uint32]

_AT, _TICK, _ARENA, _PLACE = range(4)  # places of the cursor
_LOOK_AHEAD = 16
_FOUR = np.uint64(4)
_S32 = np.uint64(32)


class _Part(NamedTuple):
    """A stretch of a log: its records, and the tick and arena of the first."""

    records: Numbers
    tick: np.uint64
    arena: np.uint64


class UseOrder:
    """The places of rows in their requests. The store's thread owns it.

    Args:
        logs: of the store; the records in use are copied.
        directory: of the arenas, kept: the store must not be cleared.
    """

    def __init__(self, logs: RecencyLogs, directory: Words) -> None:
        self._parts = _copied(logs)
        self._directory = directory
        num_used = directory[:, USED].tolist()
        self._places = [reserve(num // 2 + 1).view(np.uint32) for num in num_used]
        addresses = [places.ctypes.data for places in self._places]
        self._addresses = np.array(addresses, dtype=np.uint64)
        self._cursor = np.zeros(4, dtype=np.uint64)
        self._begin_part()

    def advance(self, num_records: int) -> bool:
        """Read a few more records; return whether there are others behind them."""
        if not self._parts:
            return False
        records = self._parts[0].records
        stop = min(int(self._cursor[_AT]) + num_records, len(records))
        _number(records, stop, self._cursor, self._directory, self._addresses)
        if int(self._cursor[_AT]) >= len(records):
            self._parts.pop(0)
            self._begin_part()
        return bool(self._parts)

    def places(self, arena: int, start: int, stop: int) -> Numbers:
        """Return the places of some slots of an arena, a view."""
        return self._places[arena][start:stop]

    def _begin_part(self) -> None:
        if self._parts:
            _, tick, arena = self._parts[0]
            if tick != self._cursor[_TICK]:
                self._cursor[_PLACE] = 0
            self._cursor[_AT], self._cursor[_TICK] = 0, tick
            self._cursor[_ARENA] = arena


def _copied(logs: RecencyLogs) -> list[_Part]:
    parts = []
    for line, words in zip(logs.directory, logs.words, strict=True):
        records = words.view(np.uint32)
        ends = [(HEAD, TAIL)]
        if line[CLEANING]:
            ends = [(HEAD, WRITE), (READ, TAIL)]
        for begin, end in ends:
            copied = records[int(line[begin]) : int(line[end])].copy()
            if len(copied):
                parts.append(_Part(copied, line[begin + 1], line[begin + 2]))
    return parts


@compiled
def _number(
    records: Numbers, stop: int, cursor: Words, arenas: Words, addresses_A: Words
) -> None:
    """Write the places of the rows of the next records.

    Args:
        records: of a part of a log.
        stop: bound behind the last record to read; a mark is read as a whole.
        cursor: uint64 ``(4,)``, where the reading has come to; moved.
        arenas: the directory of arenas.
        addresses_A: uint64, where the places of each arena's slots are.
    """
    at, tick = np.int64(cursor[_AT]), cursor[_TICK]
    arena, place = cursor[_ARENA], cursor[_PLACE]
    while at < stop:
        slot = np.uint64(records[at])
        if slot == MARK:
            new = np.uint64(records[at + 2]) | (np.uint64(records[at + 3]) << _S32)
            if new != tick:
                place = np.uint64(0)
            tick, arena = new, np.uint64(records[at + 1])
            at += MARK_WORDS
            continue
        if at + _LOOK_AHEAD < len(records):
            ahead = np.uint64(records[at + _LOOK_AHEAD])  # perhaps no slot
            prefetch(address_of(arenas, arena, ahead))
        word = load_word(address_of(arenas, arena, slot) + WORD)
        if word & TICK_MASK == tick:
            store_half_word(addresses_A[arena] + _FOUR * slot, place)
        place += np.uint64(1)
        at += 1
    cursor[_AT], cursor[_TICK] = np.uint64(at), tick
    cursor[_ARENA], cursor[_PLACE] = arena, place
