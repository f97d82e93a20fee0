"""Make a request whole that a killed process has begun, when its memory is opened.

A request changes the memory in two parts. The first one would be undone, the second
one would be completed; one word, ``CHANGE`` of the tally, says which:

    NO_CHANGE --begin()--> REQUEST --keep()--> COMMIT --> NO_CHANGE
                           lookups, sweeps     updates, writes, notes
                           undone              completed

UNDO. Words are kept in a log before they change (``embedding/kernel.py``): first the
logs' directory, tally and cursor of the index, then entries, records and rows where
they are written over. Undoing writes them back, the newest first, so that of a word
that was kept twice the older one counts. It may be interrupted, and begin again.

COMPLETION. What is left to do is copied to the memory, arrays and all, before the word
is written. An update changes rows one by one; ``PROGRESS`` says how many are done:

    image of row i | PROGRESS = i, busy | row i changes | PROGRESS = i + 1

A row that was changing gets its image back, and the update continues with it. A block
of rows is done likewise, with all their images. How many gradients of this update had
no row, or were refused, is counted again: both follow from what is there; the counts of
previous ones are kept. The rest is done once more.

Only the order of instructions matters, not that of caches: the kernel keeps what a
killed process has written. ``fence`` binds the compiler.
"""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from persia_torchrec import intrinsics as cpu
from persia_torchrec.compiled import compiled, inlined, read_only
from persia_torchrec.embedding.kernel import (
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
    Floats,
    Ids,
    Slots,
    StoreMemory,
    Tally,
    Words,
)

PROGRESS, IMAGES, CHANGES = (np.uint64(8 * word) for word in (4, 5, 6))
"""Bytes of the area, behind the log's own words: how far the completion is; bytes from
the area to the images and to what is to be done."""

CHANGE_BITS = 40
"""Of ``PROGRESS``, above twice the rows that are done, and one for busy."""

UPDATE, WRITE, STEP, CLEAR = range(4)
"""Kinds of changes that are completed."""

_BUSY, _TWO = np.uint64(1), np.uint64(2)
_S3 = np.uint64(3)
_HEADER_BYTES = _IMAGE_BYTES = np.uint64(16)
_NUM_MASK = np.uint64(IS_ROW - np.uint64(1))
_AHEAD_BYTES = 2**16
_KEPT_BYTES = 2**26
_COPIED_BYTES = np.uint64(2**16)
_LARGEST_MEMORY = 2**20
_RESERVED_WORDS = 2**33, 2**33, 2**30
_PLACES = tuple(int(place) // 8 for place in (BEGIN, CHANGES, IMAGES))
_HEAD_WORDS = _CHANGE_WORDS = 8
_COUNTS = 6  # the words of a change behind these two are for what it counts
_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_SLOTS = read_only(np.empty(0, dtype=np.uint32))
_NO_VALUES = read_only(np.empty((0, 0), dtype=np.float32))


class UpdateResult(NamedTuple):
    """How many gradients were not applied.

    ``num_missed`` had no row, of which ``num_unadmitted`` were never admitted, the
    others evicted; ``num_refused`` held NaN or an infinity.
    """

    num_missed: int
    num_refused: int
    num_unadmitted: int = 0


class Change(NamedTuple):
    """What a request does at its end; all arrays are read-only.

    ``values`` are gradients ``(N, D)``, or rows ``(N, K)``; ``step`` is the table's,
    afterwards; ``hints`` are slots.
    """

    kind: int
    table: int = 0
    step: int = 0
    ids: Ids = _NO_IDS
    hints: Slots = _NO_SLOTS
    values: Floats = _NO_VALUES


@dataclass(slots=True)
class Request:
    """Several calls of a store that are one change: see ``EmbeddingStore.request``.

    ``results`` are those of its updates, in their order, when it has ended; ``before``
    the gradients missed and refused before it; ``steps`` those of tables at its end.
    """

    results: list[UpdateResult] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    notes: list[tuple[int, int]] = field(default_factory=list)
    results_at: list[int] = field(default_factory=list)
    now_s: int = 0
    before: list[int] = field(default_factory=lambda: [0, 0])
    steps: dict[int, int] = field(default_factory=dict)
    has_begun: bool = False

    def note(self, offset: int, value: int) -> None:
        """Set one of the store's notes, together with the rows."""
        self.notes.append((offset, value % 2**64))

    def note_results(self, offset: int) -> None:
        """Set three notes: sums of ``results``, missed, refused, unadmitted."""
        self.results_at.append(offset)


class Recovery:
    """The log and the changes in a memory file. Owned by the store's thread.

    Attributes:
        log: the address that loops take.
        replaced: reservations to give back when the change has ended.
    """

    def __init__(self, source: StoreMemory, tally: Tally, num_arenas: int) -> None:
        self._memory, self._tally = source, tally
        self._area = source.area(RECOVERY)
        self.log = np.uint64(self._area.ctypes.data)
        self.replaced: list[Words] = []
        if source.is_new:
            stretches = source.reserve(*_RESERVED_WORDS)
            for place, words in zip(_PLACES, stretches, strict=True):
                self._area[place] = memory.distance(self._area, words)
        else:
            places = [int(self._area[place]) for place in _PLACES]
            stretches = [
                source.find(memory.address_at(self._area, place)) for place in places
            ]
        self._undo, self._redo, self._images = stretches
        self._num_bytes = [0, 0, 0]  # that may be used of each
        self._starts: list[int] = []  # of the changes
        for number in range(3):
            self._allocate(number, _AHEAD_BYTES)
        if tally[memory.CHANGE] == memory.REQUEST:
            arenas = source.area(memory.ARENAS).reshape(memory.MAX_ARENAS, -1)
            _undo(self.log, arenas[:num_arenas])
            tally[memory.CHANGE] = memory.NO_CHANGE

    def begin(self, cursor: Words, logs: Words) -> None:
        """Begin a change that would be undone."""
        if self._num_bytes[0] > _KEPT_BYTES:
            self._memory.emptied(self._undo)
            self._num_bytes[0] = 0
            self._allocate(0, _AHEAD_BYTES)
        _begin(self.log, self._tally, cursor, logs)

    def make_room(self, num_bytes: int) -> None:
        """Make room to keep more of what changes."""
        end, begin = self._area[int(END) // 8], self._area[int(BEGIN) // 8]
        needed = int(end - begin) + num_bytes + _AHEAD_BYTES
        if needed > self._num_bytes[0]:
            self._allocate(0, needed)

    def keep_all(self, words: Words) -> None:
        """Keep words whose changes are not kept one by one, if they are few."""
        if words.nbytes > _LARGEST_MEMORY:
            self._area[int(LOST) // 8] = 1
            return
        self.make_room(words.nbytes + 8)
        _keep_all(self.log, words)

    def keep(self, request: Request, image_bytes: int) -> None:
        """Copy to the memory what a request does at its end; from here on it is done.

        ``image_bytes`` is what the images of rows take that change at the same time.
        """
        if self._num_bytes[1] > _KEPT_BYTES:
            self._memory.emptied(self._redo)
            self._num_bytes[1] = 0
        self._allocate(2, image_bytes)
        changes = request.changes
        start = _HEAD_WORDS + sum(map(_count_words, changes))
        last = [*itertools.chain(*request.notes), *request.results_at]
        self._allocate(1, 8 * (start + len(last)))
        if last:
            self._redo[start : start + len(last)] = np.array(last, dtype=np.uint64)
        self._redo[:_HEAD_WORDS] = (
            len(changes),
            len(request.notes),
            *request.before,
            request.now_s,
            len(request.results_at),
            0,
            0,
        )
        start, self._starts = _HEAD_WORDS, []
        for change in changes:
            self._starts.append(start)
            kind, table, step, ids_N, hints_N, values_NK = change
            line = kind, table, step, *values_NK.shape, len(hints_N), 0, 0
            _keep_change(self._redo[start:], line, ids_N, hints_N, values_NK)
            start += _count_words(change)
        self.begin_change(0)
        self._tally[memory.CHANGE] = memory.COMMIT

    def begin_change(self, number: int) -> None:
        """Note that the completion is at the first row of a change."""
        self._area[int(PROGRESS) // 8] = number << CHANGE_BITS

    def keep_counts(self, number: int, missed: int, refused: int) -> None:
        """Keep what an update has counted, before another change may hide it."""
        start = self._starts[number] + _COUNTS
        self._redo[start : start + 2] = missed, refused

    def counts(self, number: int) -> tuple[int, int]:
        """Return what an update has counted that was done before another change."""
        start = self._starts[number] + _COUNTS
        missed, refused = self._redo[start : start + 2].tolist()
        return missed, refused

    def resume(self) -> tuple[Request, int, int]:
        """Return a request to complete, at which change it is, and how many rows of it.

        A row that was changing is as it was before.
        """
        if int(self._area[int(PROGRESS) // 8]) & 1:
            _restore(self.log)
            self._area[int(PROGRESS) // 8] &= np.uint64(2**64 - 2)
        head = self._redo[:_HEAD_WORDS].tolist()
        num_changes, num_notes, missed, refused, now_s, num_results, *_ = head
        request = Request(now_s=now_s, before=[missed, refused])
        start, self._starts = _HEAD_WORDS, []
        for _ in range(num_changes):
            self._starts.append(start)
            change = self._read(start)
            request.changes.append(change)
            start += _count_words(change)
        stop = start + 2 * num_notes
        notes = self._redo[start:stop].reshape(-1, 2).tolist()
        request.notes = [(offset, value) for offset, value in notes]
        request.results_at = self._redo[stop : stop + num_results].tolist()
        progress = int(self._area[int(PROGRESS) // 8])
        return request, progress >> CHANGE_BITS, progress % 2**CHANGE_BITS // 2

    def end(self) -> None:
        """End a change: the memory is whole."""
        self._tally[memory.CHANGE] = memory.NO_CHANGE
        while self.replaced:
            self._memory.emptied(self.replaced.pop())

    def _allocate(self, number: int, num_bytes: int) -> None:
        if num_bytes <= self._num_bytes[number]:
            return
        words = (self._undo, self._redo, self._images)[number]
        usable = 8 * self._memory.commit(words, -(-num_bytes // 8))
        self._num_bytes[number] = usable
        if number == 0:
            self._area[int(STOP) // 8] = self._area[int(BEGIN) // 8] + np.uint64(usable)

    def _read(self, start: int) -> Change:
        line = self._redo[start : start + _CHANGE_WORDS].tolist()
        kind, table, step, num, width, num_hints, *_ = line
        ids, hints, values = self._places(start, (num, width), num_hints)
        arrays = read_only(ids), read_only(hints), read_only(values)
        return Change(kind, table, step, *arrays)

    def _places(
        self, start: int, shape: tuple[int, int], num_hints: int
    ) -> tuple[Ids, Slots, Floats]:
        """Return where ids, hints and values of a change are."""
        begin = start + _CHANGE_WORDS
        middle = begin + shape[0]
        end = middle + (num_hints + 1) // 2
        num = shape[0] * shape[1]
        hints = self._redo[middle:end].view(np.uint32)[:num_hints]
        values = self._redo[end : end + (num + 1) // 2].view(np.float32)[:num]
        return self._redo[begin:middle], hints, values.reshape(shape)


def _count_words(change: Change) -> int:
    num_halves = (len(change.hints) + 1) // 2 + (change.values.size + 1) // 2
    return _CHANGE_WORDS + len(change.ids) + num_halves


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
def _keep_change(
    to: Words, line: tuple[int, ...], ids_N: Ids, hints_N: Slots, values_NK: Floats
) -> None:
    """Copy a change: its numbers, and its arrays behind them, each padded to words."""
    for word in range(len(line)):
        to[word] = np.uint64(line[word])
    at = np.uint64(to.ctypes.data) + np.uint64(8 * _CHANGE_WORDS)
    at = _copy(at, np.uint64(ids_N.ctypes.data), np.uint64(8 * ids_N.size))
    at = _copy(at, np.uint64(hints_N.ctypes.data), np.uint64(4 * hints_N.size))
    _copy(at, np.uint64(values_NK.ctypes.data), np.uint64(4 * values_NK.size))


@inlined
def _copy(to: np.uint64, source: np.uint64, num_bytes: np.uint64) -> np.uint64:
    """Copy bytes; return where the next word is.

    Of more bytes at once, the copy would be written past the caches.
    """
    begin = np.uint64(0)
    while begin < num_bytes:
        num = min(num_bytes - begin, _COPIED_BYTES)
        cpu.copy_bytes(to + begin, source + begin, num)
        begin += num
    return to + (((num_bytes + np.uint64(7)) >> _S3) << _S3)


@compiled
def _keep_all(log: np.uint64, words: Words) -> None:
    memory.keep_words(log, np.uint64(words.ctypes.data), np.uint64(words.size))


@compiled
def _undo(log: np.uint64, arenas: Words) -> None:
    begin = log + cpu.load_u64(log + BEGIN)
    at = log + cpu.load_u64(log + END)
    while at > begin:
        what = cpu.load_u64(at - WORD)
        num_bytes = (what & _NUM_MASK) << _S3
        at -= WORD + num_bytes
        address = log - BEFORE + ((what >> NUM_BITS) << _S3)
        cpu.copy_bytes(address, at, num_bytes)
        if what & IS_ROW != np.uint64(0):
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


class Completion(NamedTuple):
    """Where an update notes how far it is: see the head of the file.

    ``log`` is 0 in private memory, where nothing is noted; ``images`` an address;
    ``start`` the progress when the loop began.
    """

    log: np.uint64
    images: np.uint64
    start: np.uint64


@inlined
def completion_at(log: np.uint64) -> Completion:
    """Return where an update notes how far it is."""
    if log == NO_LOG:
        return Completion(NO_LOG, NO_LOG, NO_LOG)
    images = log + cpu.load_u64(log + IMAGES)
    return Completion(log, images, cpu.load_u64(log + PROGRESS))


@inlined
def begin_row(at: Completion, i: int, address: np.uint64, num_bytes: np.uint64) -> None:
    """Keep the image of the i-th row, which is about to change."""
    if at.log != NO_LOG:
        keep_image(at.log, at.images + WORD, address, num_bytes)
        begin_rows(at, i, 1)


@inlined
def begin_rows(at: Completion, i: int, num: int) -> None:
    """Note that so many rows change, the i-th first; their images are kept."""
    cpu.store_u64(at.images, np.uint64(num))
    cpu.fence()
    cpu.store_u64(at.log + PROGRESS, at.start + _TWO * np.uint64(i) + _BUSY)
    cpu.fence()


@inlined
def end_rows(at: Completion, stop: int) -> None:
    """Note that rows have changed, and which is the next one."""
    if at.log != NO_LOG:
        cpu.fence()
        cpu.store_u64(at.log + PROGRESS, at.start + _TWO * np.uint64(stop))
        cpu.fence()


@inlined
def keep_image(
    log: np.uint64, to: np.uint64, address: np.uint64, num_bytes: np.uint64
) -> np.uint64:
    """Keep what an update may change of a row; return the address of the next image.

    ``address`` and ``num_bytes`` are those of the row.
    """
    changing, num_bytes = address + _HEADER_BYTES, num_bytes - _HEADER_BYTES
    cpu.store_u64(to, changing - log)
    cpu.store_u64(to + WORD, num_bytes)
    cpu.copy_bytes(to + _IMAGE_BYTES, changing, num_bytes)
    return to + _IMAGE_BYTES + num_bytes


@compiled
def _restore(log: np.uint64) -> None:
    """Put the images of rows back."""
    at = log + cpu.load_u64(log + IMAGES)
    num = cpu.load_u64(at)
    at += WORD
    while num > np.uint64(0):
        num_bytes = cpu.load_u64(at + WORD)
        cpu.copy_bytes(log + cpu.load_u64(at), at + _IMAGE_BYTES, num_bytes)
        at += _IMAGE_BYTES + num_bytes
        num -= np.uint64(1)
