"""Undo log: rolls back a transaction that a crash interrupted, when memory is opened.

One word, ``CHANGE`` of the tally, says what is in progress:

    NO_CHANGE --begin()--> REQUEST --end()--> NO_CHANGE       would be undone
                              '--begin_clear()--> CLEAR --'   would be done once more

Words are kept in a log before they change (``jit/kernel.py``): first the logs'
directory, tally and cursor of the index, then entries, records, rows and notes where
they are written over. Undoing writes them back, the newest first, so that of a word
that was kept twice the older one counts. It may be interrupted, and begin again.

    END before | row, without its header | word: where it is | 0 ... 0 | END after
               '-- aligned to 64 bytes                               --'

The rows of updates are most of it. They are kept past the caches, in whole lines: what
is kept is hardly ever read. Such stores are in memory before the kernel gives the core
to another process. A word of zeros keeps nothing.

A clear is not undone. It ends a request, whose notes are kept in the log as they shall
be: doing it once more drops all rows, and writes these.

Only the order of instructions matters, not that of caches: the kernel keeps what a
killed process has written. ``fence`` binds the compiler.
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Slots, Words
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined
from persia_torchrec.jit.kernel import (
    BEFORE,
    BEGIN,
    END,
    IS_ROW,
    LOST,
    NO_LOG,
    NUM_BITS,
    STOP,
)
from persia_torchrec.store import memory
from persia_torchrec.store.memory import (
    RECOVERY,
    STRIDE,
    TAGS,
    WORD,
    Layout,
    StoreMemory,
    Tally,
)

PROMISED = np.uint64(32)
"""Bytes of the area, behind the log's own words: from there to the end of what a clear
shall leave, which is kept behind ``END``."""

ROW_BYTES = 192
"""What keeping a row takes besides its bytes, at most."""

_S3 = np.uint64(3)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_HEADER_BYTES = np.uint64(16)
_LINE, _IN_LINE = np.uint64(64), np.uint64(63)
_NUM_MASK = np.uint64(IS_ROW - np.uint64(1))
_AHEAD_BYTES = 2**16
_KEPT_BYTES = 2**28
_LARGEST_MEMORY = 2**20
_RESERVED_WORDS = 2**33


class UndoLog:
    """The log in a memory file. Owned by the store's thread.

    Attributes:
        log: the address that loops take.
        replaced: reservations to give back when the change has ended.
    """

    def __init__(self, source: StoreMemory, tally: Tally, num_arenas: int) -> None:
        self._memory, self._tally = source, tally
        self._area = source.area(RECOVERY)
        self._arenas = source.area(memory.ARENAS).reshape(memory.MAX_ARENAS, -1)
        self.log = np.uint64(self._area.ctypes.data)
        self.replaced: list[Words] = []
        begin = int(BEGIN) // 8
        if source.is_new:
            [self._words] = source.reserve(_RESERVED_WORDS)
            self._area[begin] = memory.distance(self._area, self._words)
        else:
            address = memory.address_at(self._area, int(self._area[begin]))
            self._words = source.find(address)
        self._num_bytes = 0  # that may be used
        self._allocate(_AHEAD_BYTES)
        memory.require_sound(num_arenas <= memory.MAX_ARENAS, "a number of arenas")
        begin_at, end_at = (int(self._area[int(at) // 8]) for at in (BEGIN, END))
        is_whole = source.is_new or begin_at <= end_at <= begin_at + self._num_bytes
        if tally[memory.CHANGE] in (memory.REQUEST, memory.CLEAR):
            memory.require_sound(is_whole, "an end of the log of what changes")
        if tally[memory.CHANGE] == memory.REQUEST:
            _restore(self.log, BEGIN, END, self._arenas[:num_arenas])
            tally[memory.CHANGE] = memory.NO_CHANGE

    def begin(self, cursor: Words, logs: Words) -> None:
        """Begin a change that would be undone."""
        if self._num_bytes > _KEPT_BYTES:
            self._memory.emptied(self._words)
            self._num_bytes = 0
            self._allocate(_AHEAD_BYTES)
        _begin(self.log, self._tally, cursor, logs)

    def make_room(self, num_bytes: int) -> None:
        """Make room to keep more of what changes."""
        end, begin = self._area[int(END) // 8], self._area[int(BEGIN) // 8]
        needed = int(end - begin) + num_bytes + _AHEAD_BYTES
        if needed > self._num_bytes:
            self._allocate(needed)

    def keep(self, words: Words) -> None:
        """Keep words that are about to change, for which there is room."""
        _keep(self.log, words)

    def keep_some(self, words: Words, which_K: npt.NDArray[np.int64]) -> None:
        """Keep some words that are about to change, for which there is room."""
        _keep_some(self.log, words, which_K)

    def keep_all(self, words: Words) -> None:
        """Keep words whose changes are not kept one by one, if they are few."""
        if words.nbytes > _LARGEST_MEMORY:
            self._area[int(LOST) // 8] = 1
            return
        self.make_room(words.nbytes + 8)
        _keep(self.log, words)

    def keep_rows(self, layout: Layout, slots_N: Slots) -> None:
        """Keep all but the headers of rows, for which there is room."""
        _keep_rows(self.log, layout, slots_N)

    def note(self, notes: Words, values_N2: Words) -> None:
        """Set notes, ``(offset, value)`` each, for which there is room."""
        _note(self.log, notes, values_N2)

    def begin_clear(self, notes: Words, values_N2: Words) -> None:
        """Have the rest of the request done once more, not undone: a clear, and notes.

        Before it, the log had room for the notes.
        """
        _promise(self.log, notes, values_N2)
        self._tally[memory.CHANGE] = memory.CLEAR

    def end_clear(self) -> None:
        """Write what a clear shall leave, all rows having been dropped."""
        _restore(self.log, END, PROMISED, self._arenas[:0])

    def end(self) -> None:
        """End a change: the memory is whole."""
        self._tally[memory.CHANGE] = memory.NO_CHANGE
        while self.replaced:
            self._memory.emptied(self.replaced.pop())

    def _allocate(self, num_bytes: int) -> None:
        self._num_bytes = 8 * self._memory.commit(self._words, -(-num_bytes // 8))
        stop = self._area[int(BEGIN) // 8] + np.uint64(self._num_bytes)
        self._area[int(STOP) // 8] = stop


@compiled
def _begin(log: np.uint64, tally: Tally, cursor: Words, logs: Words) -> None:
    cpu.store_u64(log + END, cpu.load_u64(log + BEGIN))
    cpu.store_u64(log + LOST, np.uint64(0))
    cpu.fence()
    tally[memory.CHANGE] = memory.REQUEST
    cpu.fence()
    # The directory of logs comes first: see recency.py.
    memory.keep_words(log, np.uint64(logs.ctypes.data), np.uint64(logs.size))
    memory.keep_words(log, np.uint64(tally.ctypes.data), np.uint64(memory.NUM_TALLIES))
    memory.keep_words(log, np.uint64(cursor.ctypes.data), np.uint64(cursor.size))


@compiled
def _keep(log: np.uint64, words: Words) -> None:
    memory.keep_words(log, np.uint64(words.ctypes.data), np.uint64(words.size))


@compiled
def _keep_some(log: np.uint64, words: Words, which_K: npt.NDArray[np.int64]) -> None:
    for which in which_K:
        at = np.uint64(words.ctypes.data) + np.uint64(8 * which)
        memory.keep_words(log, at, _ONE)


@compiled
def _note(log: np.uint64, notes: Words, values_N2: Words) -> None:
    """Set words, and keep what they were."""
    for n in range(len(values_N2)):
        at = np.uint64(notes.ctypes.data) + (values_N2[n, 0] << _S3)
        memory.keep_words(log, at, _ONE)
        cpu.store_u64(at, values_N2[n, 1])


@compiled
def _promise(log: np.uint64, notes: Words, values_N2: Words) -> None:
    """Keep what words shall be."""
    to = log + cpu.load_u64(log + END)
    for n in range(len(values_N2)):
        at = np.uint64(notes.ctypes.data) + (values_N2[n, 0] << _S3)
        cpu.store_u64(to, values_N2[n, 1])
        cpu.store_u64(to + WORD, _describe(log, at, _ONE))
        to += WORD + WORD
    cpu.store_u64(log + PROMISED, to - log)
    cpu.fence()


@inlined
def _describe(log: np.uint64, address: np.uint64, num_words: np.uint64) -> np.uint64:
    """Return the word that says what an entry of the log keeps."""
    return ((address - log + BEFORE) >> _S3 << NUM_BITS) | num_words


@compiled
def _restore(log: np.uint64, from_: np.uint64, to: np.uint64, arenas: Words) -> None:
    """Write what is kept, between where two words of the log say, the newest first."""
    begin = log + cpu.load_u64(log + from_)
    at = log + cpu.load_u64(log + to)
    while at > begin:
        what = cpu.load_u64(at - WORD)
        num_bytes = (what & _NUM_MASK) << _S3
        at -= WORD + num_bytes
        address = log - BEFORE + ((what >> NUM_BITS) << _S3)
        cpu.copy_bytes(address, at, num_bytes)
        if what & IS_ROW != _ZERO:
            _restore_tag(arenas, address)


@inlined
def _restore_tag(arenas: Words, address: np.uint64) -> None:
    """Write the tag of the row that an address is in: that of its last use."""
    for number in range(len(arenas)):
        arena = np.uint64(number)
        base, stride = (
            memory.locate_row(arenas, arena, np.uint64(0)),
            arenas[arena, STRIDE],
        )
        if base <= address < base + arenas[arena, memory.SLOTS] * stride:
            slot = (address - base) // stride
            tag = memory.arena_address(arenas, arena, TAGS) + slot
            cpu.store_u8(tag, cpu.load_u64(base + slot * stride + WORD))


@inlined
def keep_use(log: np.uint64, address: np.uint64, has_metadata: bool) -> None:
    """Keep what a use changes of the row at an address: its tick, and its frequency."""
    if log == NO_LOG:
        return
    to = log + cpu.load_u64(log + END)
    if to + _LINE > log + cpu.load_u64(log + STOP):
        cpu.store_u64(log + LOST, _ONE)
        cpu.fence()
        return
    cpu.store_u64(to, cpu.load_u64(address + WORD))
    what = _describe(log, address + WORD, _ONE)
    if has_metadata:
        to += WORD
        cpu.store_u64(to, cpu.load_u64(address + _HEADER_BYTES))
        what += _ONE
    cpu.store_u64(to + WORD, what | IS_ROW)
    cpu.fence()
    cpu.store_u64(log + END, to + _HEADER_BYTES - log)
    cpu.fence()


@inlined
def keep_updated(log: np.uint64, address: np.uint64, num_bytes: np.uint64) -> None:
    """Keep what an update may change of a row: all but its header.

    ``address`` and ``num_bytes`` are those of the row.
    """
    if log == NO_LOG:
        return
    to = log + cpu.load_u64(log + END)
    source, stop = address + _HEADER_BYTES, address + num_bytes
    if to + num_bytes + np.uint64(ROW_BYTES) > log + cpu.load_u64(log + STOP):
        cpu.store_u64(log + LOST, _ONE)
        cpu.fence()
        return
    while to & _IN_LINE != _ZERO:
        cpu.store_u64(to, _ZERO)
        to += WORD
    while source + _LINE <= stop:
        cpu.stream_line(to, source)
        source += _LINE
        to += _LINE
    while source < stop:
        cpu.stream_u64(to, cpu.load_u64(source))
        source += WORD
        to += WORD
    num_words = (num_bytes - _HEADER_BYTES) >> _S3
    cpu.stream_u64(to, _describe(log, address + _HEADER_BYTES, num_words))
    to += WORD
    while to & _IN_LINE != _ZERO:
        cpu.stream_u64(to, _ZERO)
        to += WORD
    cpu.fence()
    cpu.store_u64(log + END, to - log)
    cpu.fence()


@compiled
def _keep_rows(log: np.uint64, layout: Layout, slots_N: Slots) -> None:
    rows = memory.rows_at(memory.store_at(layout), layout)
    for i in range(len(slots_N)):
        if slots_N[i] != memory.MISSING:
            address = rows.base + np.uint64(slots_N[i]) * rows.stride
            keep_updated(log, address, rows.stride)
