"""Eviction order (LRU, LFU), exact and without a linked list.

Each touch appends the row's slot to a log, which is written in sequence, and stamps the
row's header with the tick of the request (a linked list would cost three random memory
accesses):

    log    [tick 1] a b c  [tick 2] a d  [tick 3] a ...
    tick   a: 3   b: 1   c: 1   d: 2

A record is *current* when its row's tick is that of the mark before it; every row has
exactly one current record, and the first one of the log is that of the least recently
used row. A slot takes one word of 4 bytes, a mark four: a word that no slot has, the
arena whose slots follow, and the tick's two halves. Every request has a tick of its
own, and touches a row once at most. A freed row has tick 0, which no mark has.

When the log is 1.5 times what its rows need, it is compacted from front to back, a few
records with each request, and what is appended meanwhile too. A record whose row has
another tag (the lowest byte of its tick) is dropped, without reading the row; one in
256 of the old records stays until the next compaction, or until it is skipped at the
front. What the rows need is counted when compaction reaches the tail it started with.

    0  HEAD          WRITE        READ                      TAIL
    .. | compacted   | free       | to be compacted         |

With one log per class of rows, the first current record of the lowest class is the row
that leaves. LFU's classes are frequencies:

    class(f) = f if f < 16 else 12 + floor(log2(f))
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Words
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.jit.kernel import BEGIN, NO_LOG
from persia_torchrec.store import memory
from persia_torchrec.store.memory import WORD, RowsAt, StoreMemory
from persia_torchrec.store.undo_log import UndoLog

NUM_LFU_CLASSES = 44
"""Classes of frequencies that fit 32 bits."""

LOG, HEAD, HEAD_TICK, HEAD_ARENA, WRITE, WRITE_TICK, READ, READ_TICK = range(8)
READ_ARENA, TAIL, TAIL_TICK, TRIGGER, COMPACTING, OLD_TAIL, SIZE = range(8, 15)
"""Columns of the directory of logs: bytes from the log's own line to its words; offsets
and, of those within a segment, its tick and arena; the length at which compaction
starts, whether it is running, the tail it started with; the words that may be used."""

NONE = np.uint64(2**64 - 1)
"""What :func:`pop_oldest` returns when there is no row."""

NO_TICK = np.uint64(2**62)
"""A tick that no request reaches."""

MARK = np.uint64(2**32 - 1)
"""The word with which a mark begins."""

MARK_WORDS = 4
_WORDS_PER_ROW = 14
"""Room in a log: each row a segment of its own, compacted when twice as long, a third
appended meanwhile."""
_SPARE_WORDS = 64
_MARGIN_WORDS = 64
"""Words after the end that may be read ahead, but never hold a record."""
_READ_PER_TOUCH = 4
_SPARE_BYTES = 64
_TOUCH_BYTES = 24  # kept of a row that is used
_MOST_KEPT = np.uint64(2**23)
_LOOK_AHEAD = np.uint64(16)
_HALF = np.uint64(4)
_BYTE = np.uint64(255)
_S32, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_ALL = 2**62
_LINE_BYTES = np.uint64(8 * (SIZE + 1))


class RecencyLogs:
    """One log per class of rows: a directory, uint64 ``(classes, 15)``, and memory."""

    def __init__(
        self, capacity_rows: int, num_classes: int, source: StoreMemory
    ) -> None:
        self._memory = source
        lines = source.area(memory.LOGS).reshape(-1, SIZE + 1)
        self.directory: Words = lines[:num_classes]
        if source.is_new:
            num_words = _WORDS_PER_ROW * capacity_rows + 64 * _SPARE_WORDS
            self.words = [source.reserve(num_words // 2)[0] for _ in self.directory]
            self._begin()
        else:
            places = [
                memory.address_at(line, int(line[LOG])) for line in self.directory
            ]
            self.words = [source.find(place) for place in places]
            for line, words in zip(self.directory.tolist(), self.words, strict=True):
                offsets = [line[at] for at in (HEAD, WRITE, READ, TAIL, OLD_TAIL)]
                fits = max(offsets) <= line[SIZE] <= 2 * words.size - _MARGIN_WORDS
                memory.require_sound(fits, "a directory of logs")

    def clear(self) -> None:
        """Drop all records."""
        self.words = [self._memory.emptied(words)[0] for words in self.words]
        self._begin()

    def make_room(
        self, arenas: Words, num_touches: int, undo_log: UndoLog | None = None
    ) -> None:
        """Make room for the touches of one request, even more than the capacity.

        ``undo_log`` keeps what that changes.
        """
        needed, log = num_touches + MARK_WORDS, NO_LOG
        if undo_log is not None:
            log = undo_log.log
            self.make_room_to_keep(num_touches, undo_log)
        if compact_for(self.directory, arenas, num_touches, log):
            return
        for number, line in enumerate(self.directory):
            self._commit(number, int(line[TAIL]) + needed)
        if all(self.directory[:, TAIL] + np.uint64(needed) <= self.directory[:, SIZE]):
            return
        if undo_log is not None:
            undo_log.make_room(self.size_bytes + _SPARE_BYTES * len(self.directory))
            keep_records(self.directory, log)
        for number, line in enumerate(self.directory):
            for _ in range(2):  # ends the compaction that is running, then compacts all
                if int(line[TAIL]) + needed > int(line[SIZE]):
                    line[TRIGGER] = 0
                    compact(self.directory, number, arenas, _ALL)
            if int(line[TAIL]) + needed > int(line[SIZE]):
                self._enlarge(number, int(line[TAIL]) + needed, undo_log)

    def make_room_to_keep(
        self, num_touches: int, undo_log: UndoLog, num_bytes: int = 0
    ) -> int:
        """Make room to keep what :func:`compact_for` and touches write over.

        And ``num_bytes`` besides. Returns the bytes of these, and of all touches.
        """
        num_kept = num_bytes + _TOUCH_BYTES * num_touches
        of_logs = bytes_to_keep(self.directory, num_touches, undo_log.log)
        undo_log.make_room(of_logs + num_kept)
        return num_kept

    def _begin(self) -> None:
        self.directory[:, LOG + 1 :] = 0  # where a log is must be known at any moment
        self.directory[:, TRIGGER] = _SPARE_WORDS
        for number, line in enumerate(self.directory):
            line[LOG] = memory.distance(line, self.words[number])
            self._commit(number, 1)

    def _commit(self, number: int, num_words: int) -> None:
        """Allocate memory for so many words of a log, or for all it may have."""
        words, line = self.words[number], self.directory[number]
        if num_words > line[SIZE]:
            num_bytes = 4 * (num_words + _MARGIN_WORDS)
            num_allocated = self._memory.commit(
                words, min(num_bytes // 8 + 1, words.size)
            )
            line[SIZE] = 2 * num_allocated - _MARGIN_WORDS

    def _enlarge(self, number: int, num_words: int, undo_log: UndoLog | None) -> None:
        """Move a log to where it may have more words."""
        old, line = self.words[number], self.directory[number]
        num_used = int(line[TAIL]) // 2 + 1
        [larger] = self._memory.reserve((num_words + _MARGIN_WORDS) // 2 + 1)
        self._memory.commit(larger, larger.size)
        larger[:num_used] = old[:num_used]
        self.words[number] = larger
        line[LOG] = memory.distance(line, larger)
        line[SIZE] = 2 * larger.size - _MARGIN_WORDS
        self._memory.publish(self._memory.tables)  # with the new reservation
        if undo_log is None:
            self._memory.emptied(old)
        else:
            undo_log.replaced.append(old)

    @property
    def size_bytes(self) -> int:
        """Bytes of the logs in use."""
        return 4 * int(self.directory[:, TAIL].sum())


@inlined
def classify(frequency: np.uint64) -> np.uint64:
    """Return the class of rows that were looked up so often."""
    if frequency < np.uint64(16):
        return frequency
    class_ = np.uint64(12)
    while frequency > _ONE:
        frequency >>= _ONE
        class_ += _ONE
    return class_


def classify_all(frequencies_N: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Return the class of each frequency; uint8 ``(N,)``."""
    _, num_bits_N = np.frexp(frequencies_N)
    classes_N = np.where(frequencies_N < 16, frequencies_N, num_bits_N + 11)
    return classes_N.astype(np.uint8)


@inlined
def touch(
    logs: np.uint64,
    class_: np.uint64,
    rows: RowsAt,
    address: np.uint64,
    slot: np.uint64,
    tick: np.uint64,
) -> None:
    """Make the row whose header is at ``address`` the most recently used of a class.

    ``logs`` is the address of the directory. All touches of a tick are of one arena. A
    pinned row has no record, so that it never leaves.
    """
    if not rows.is_pinned:
        line = logs + class_ * _LINE_BYTES
        if cpu.load_u64(line + WORD * np.uint64(TAIL_TICK)) != tick:
            _append_mark(line, TAIL, tick, rows.arena)
            cpu.store_u64(line + WORD * np.uint64(TAIL_TICK), tick)
        _append(line, TAIL, slot)
    cpu.store_u64(address + WORD, (rows.owner << memory.OWNER_SHIFT) | tick)
    cpu.store_u8(rows.tags + slot, tick)


@inlined
def pop_oldest(logs: Words, arenas: Words, spared: np.uint64 = NO_TICK) -> np.uint64:
    """Take out the record of the next row to leave; return ``arena << 32 | slot``.

    Rows that were used since the tick ``spared`` do not leave.
    """
    for class_ in range(len(logs)):
        row = _pop_oldest_of(logs, np.uint64(class_), arenas)
        if row != NONE:
            if logs[class_, HEAD_TICK] < spared:
                return row
            logs[class_, HEAD] -= _ONE  # all others of the class were used later
    return NONE


@inlined
def first_to_leave(logs: Words) -> int:
    """Return the class from which the next row leaves, if only the front is seen."""
    for class_ in range(len(logs) - 1):
        if logs[class_, HEAD] < _end_of_front(logs, class_):
            return class_
    return len(logs) - 1


@inlined
def slot_to_leave(logs: Words, class_: int, num_ahead: int) -> np.uint64:
    """Guess the slot of the row that leaves after some others of its class.

    It may be no slot, or one of another arena than ``logs[class_, HEAD_ARENA]``.
    """
    offset = logs[class_, HEAD] + np.uint64(num_ahead)
    if offset >= _end_of_front(logs, class_):
        return MARK
    return cpu.load_u32(_words_at(_line_at(logs, np.uint64(class_))) + _HALF * offset)


@inlined
def _line_at(logs: Words, c: np.uint64) -> np.uint64:
    """Return the address of a line of the directory."""
    return np.uint64(logs.ctypes.data) + c * _LINE_BYTES


@inlined
def _words_at(line: np.uint64) -> np.uint64:
    """Return the address of the words of the log whose line is at an address."""
    return line + cpu.load_u64(line)


@inlined
def _end_of_front(logs: Words, class_: int | np.uint64) -> np.uint64:
    return logs[class_, WRITE] if logs[class_, COMPACTING] else logs[class_, TAIL]


@compiled
def compact_for(logs: Words, arenas: Words, num_touches: int, log: np.uint64) -> bool:
    """Compact logs that are too long; return whether the touches of a request fit."""
    needed = num_touches + MARK_WORDS
    fits = True
    for class_ in range(len(logs)):
        if log != NO_LOG:
            _keep_overwritten(logs, np.uint64(class_), np.uint64(needed), log)
        compact(logs, class_, arenas, _READ_PER_TOUCH * needed)
        if np.int64(logs[class_, TAIL]) + needed > np.int64(logs[class_, SIZE]):
            fits = False
    return fits


@compiled
def bytes_to_keep(logs: Words, num_touches: int, log: np.uint64) -> int:
    """Return the bytes that the log needs for what :func:`compact_for` keeps in it."""
    num_bytes = np.uint64(0)
    for class_ in range(len(logs)):
        needed = np.uint64(num_touches + MARK_WORDS)
        for begin, end in _overwritten(logs, np.uint64(class_), needed, log):
            if begin < end:
                num_bytes += _HALF * (end - begin) + np.uint64(_SPARE_BYTES)
    return int(num_bytes)


@compiled
def keep_records(logs: Words, log: np.uint64) -> None:
    """Keep all records of the logs."""
    for class_ in range(len(logs)):
        c = np.uint64(class_)
        _keep_range(_line_at(logs, c), _ZERO, logs[c, TAIL], log)


@compiled
def _keep_overwritten(
    logs: Words, c: np.uint64, needed: np.uint64, log: np.uint64
) -> None:
    """Keep the records of a log over which a request writes."""
    for begin, end in _overwritten(logs, c, needed, log):
        _keep_range(_line_at(logs, c), begin, end, log)


@inlined
def _overwritten(
    logs: Words, c: np.uint64, needed: np.uint64, log: np.uint64
) -> tuple[tuple[np.uint64, np.uint64], tuple[np.uint64, np.uint64]]:
    """Return begin and end of what compaction and touches may write over, in words.

    Behind the tail that a log had when the change began there was nothing.
    """
    kept = log + cpu.load_u64(log + BEGIN) + c * _LINE_BYTES  # see undo_log.py
    stop, tail = cpu.load_u64(kept + WORD * np.uint64(TAIL)), logs[c, TAIL]
    begin = end = _ZERO
    if logs[c, COMPACTING] or tail >= logs[c, TRIGGER]:
        begin = logs[c, WRITE] if logs[c, COMPACTING] else _ZERO
        # At its end the tail comes down to what has been written.
        end = begin + np.uint64(_READ_PER_TOUCH + 1) * needed + np.uint64(_SPARE_WORDS)
    return (begin, min(end, stop)), (tail, min(tail + needed, stop))


@inlined
def _keep_range(
    line: np.uint64, begin: np.uint64, end: np.uint64, log: np.uint64
) -> None:
    begin = (begin >> _ONE) << _ONE
    while begin < end:
        num = min(end - begin, _MOST_KEPT)
        address = _words_at(line) + _HALF * begin
        memory.keep_words(log, address, (num + _ONE) >> _ONE)
        begin += num


@compiled
def compact(logs: Words, class_: int, arenas: Words, num_words: int) -> None:
    """Continue compacting a log, reading ``num_words``; or start if it is too long."""
    c = np.uint64(class_)
    if not logs[c, COMPACTING]:
        if logs[c, TAIL] < logs[c, TRIGGER]:
            return
        logs[c, READ] = logs[c, HEAD]
        logs[c, READ_TICK] = logs[c, HEAD_TICK]
        logs[c, READ_ARENA] = logs[c, HEAD_ARENA]
        logs[c, HEAD] = logs[c, WRITE] = logs[c, WRITE_TICK] = _ZERO
        logs[c, OLD_TAIL] = logs[c, TAIL]  # where a mark will be
        logs[c, COMPACTING] = _ONE
    stop = min(logs[c, TAIL], logs[c, READ] + np.uint64(num_words))
    line = _line_at(logs, c)
    while True:
        if logs[c, READ] == logs[c, OLD_TAIL]:
            logs[c, TRIGGER] = logs[c, WRITE] + (logs[c, WRITE] >> _ONE)
            logs[c, TRIGGER] += np.uint64(_SPARE_WORDS)
        if logs[c, READ] >= stop:
            break
        if cpu.load_u32(_words_at(line) + _HALF * logs[c, READ]) == MARK:
            _read_mark(logs, c, READ)
        else:
            _compact_segment(logs, c, line, arenas, stop)
    if logs[c, READ] >= logs[c, TAIL]:
        logs[c, TAIL] = logs[c, WRITE]
        logs[c, TAIL_TICK] = _ZERO  # the next touch begins with a mark
        logs[c, COMPACTING] = _ZERO


@compiled
def _compact_segment(
    logs: Words, c: np.uint64, line: np.uint64, arenas: Words, stop: np.uint64
) -> None:
    """Compact records up to the next mark, or to ``stop``.

    Nothing branches on whether a record is current, which cannot be foreseen: each is
    written, and counts as written only if it is current.
    """
    arena, tick = logs[c, READ_ARENA], logs[c, READ_TICK]
    tags, tag = memory.arena_address(arenas, arena, memory.TAGS), tick & _BYTE
    log, read = _words_at(line), logs[c, READ]
    begins_segment = logs[c, WRITE_TICK] != tick
    if begins_segment:
        _append_mark(line, WRITE, tick, arena)
    first = write = logs[c, WRITE]
    while read < stop:
        slot = cpu.load_u32(log + _HALF * read)
        if slot == MARK:
            break
        ahead = cpu.load_u32(log + _HALF * (read + _LOOK_AHEAD))
        cpu.prefetch(tags + ahead)  # perhaps no slot: any address may be asked
        read += _ONE
        cpu.store_u32(log + _HALF * write, slot)
        write += _ONE if cpu.load_u8(tags + slot) == tag else _ZERO
    if write > first:
        logs[c, WRITE_TICK] = tick
    elif begins_segment:
        write -= np.uint64(MARK_WORDS)
    logs[c, READ], logs[c, WRITE] = read, write


@inlined
def _pop_oldest_of(logs: Words, c: np.uint64, arenas: Words) -> np.uint64:
    while True:
        if logs[c, HEAD] >= _end_of_front(logs, c):
            if not logs[c, COMPACTING]:
                return NONE
            # Nothing compacted is left: continue with the rest as it is.
            logs[c, HEAD] = logs[c, READ]
            logs[c, HEAD_TICK] = logs[c, READ_TICK]
            logs[c, HEAD_ARENA] = logs[c, READ_ARENA]
            logs[c, COMPACTING] = _ZERO
            continue
        word = cpu.load_u32(_words_at(_line_at(logs, c)) + _HALF * logs[c, HEAD])
        if word == MARK:
            _read_mark(logs, c, HEAD)
            continue
        logs[c, HEAD] += _ONE
        arena = logs[c, HEAD_ARENA]
        address = memory.locate_row(arenas, arena, word)
        if memory.tick_at(address) == logs[c, HEAD_TICK]:
            return (arena << _S32) | word


@inlined
def _append(line: np.uint64, end: int, word: np.uint64) -> None:
    end_at = line + WORD * np.uint64(end)
    offset = cpu.load_u64(end_at)
    cpu.store_u32(_words_at(line) + _HALF * offset, word)
    cpu.store_u64(end_at, offset + _ONE)


@inlined
def _append_mark(line: np.uint64, end: int, tick: np.uint64, arena: np.uint64) -> None:
    _append(line, end, MARK)
    _append(line, end, arena)
    _append(line, end, tick & _LOW)
    _append(line, end, tick >> _S32)


@inlined
def _read_mark(logs: Words, c: np.uint64, at: int) -> None:
    """Take the tick and the arena of the mark at HEAD or READ, and step over it."""
    address = _words_at(_line_at(logs, c)) + _HALF * logs[c, at]
    low = cpu.load_u32(address + np.uint64(8))
    logs[c, at + 1] = low | (cpu.load_u32(address + np.uint64(12)) << _S32)
    logs[c, at + 2] = cpu.load_u32(address + _HALF)
    logs[c, at] += np.uint64(MARK_WORDS)
