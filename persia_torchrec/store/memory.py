"""Memory of rows: layout of weights and optimizer state, and free slots.

Rows of one width share an arena: one stretch of memory of ``capacity`` equal slots, of
which only the used ones cost anything. A row is a header of two 8-byte words, then its
table's columns, so that finding, touching and reading a row share their first cache
line:

    word 0    id                                    (free slot: next free slot + 1)
    word 1    owner (16 bits) | tick (48 bits)      (free slot: 0)
    [word 2   frequency (32 bits) | step of the last update (32 bits)]
    [word 3   step of its creation (32 bits) | second of the last update (32 bits)]
    weights (D float32, or D halves), optimizer state (S float32), padding to 8 bytes

``owner`` is the number of the table plus one; ``tick`` the request that last used the
row (see ``recency.py``). Words 2 and 3 are metadata, if the table keeps any. The loops
see all arenas as one directory, a uint64 array with a line per arena:

    base | bytes per slot | slots ever used | head of the free list + 1 | tags | slots

A row's tag is the lowest byte of its tick, kept a second time in an array of its own, a
byte per slot: scans filter by last use without reading the rows. Base and tags are
distances from the directory in bytes, so that the directory means the same to any
process that maps a memory file, wherever (``docs/formats/memory.md``). ``slots`` may be
read.

WHAT A LOOP TAKES: the *layout* of a table, one uint64 array that stands for twenty
arguments. The loop unpacks it with :func:`store_at` and :func:`rows_at`.
"""

import mmap
from typing import NamedTuple, Protocol

import numba
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Ids, Slots, Words
from persia_torchrec.errors import StoreError
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit import kernel
from persia_torchrec.jit.compiled import compiled, inlined, inlined_kernel
from persia_torchrec.jit.float16 import FP32, round_to_nearest, widen
from persia_torchrec.table import TableSpec

Tally = npt.NDArray[np.int64]
Layout = npt.NDArray[np.uint64]
Log = np.uint64 | None
"""Address of the log of what changes (``undo_log.py``); None in private memory."""
TableAt = tuple[Layout, Log]
"""What a loop takes that changes rows: a table's layout, and the log."""
TablesAt = tuple[Words, Log]
"""What a loop takes that changes rows of several tables: the addresses of their
layouts, uint64 ``(T,)``, and the log."""


class ScannedRows(NamedTuple):
    """Rows ``(N, D + S)`` of different ids; ``next_slot`` is None at the end."""

    ids: Ids
    rows: Floats
    next_slot: int | None


BASE, STRIDE, USED, FREE, TAGS, SLOTS = range(6)
"""Columns of the directory of arenas."""

MAX_ARENAS = 2**13
MAX_TABLES = 2**16 - 2

STORE, ARENA, OWNER, DIM, DTYPE, WEIGHTS, STATE, NUM_STATE = range(8)
HAS_METADATA, SCRATCH, FILL, SEED, INITIAL_STATE, STEP, NOW_S, PINNED = range(8, 16)
TO_NEAREST, NUM_COLUMNS = 16, 17
"""Columns of a table's layout. Addresses: of the store's arrays, of ``DIM`` floats to
widen a row in, of the initializer's numbers, of the state of a new row. Bytes of a row
at which its weights and its state begin. Numbers: of its arena, of the table plus one,
of weights and of floats of state, of the weight dtype. Whether rows carry metadata; the
seed; the table's step, and the second of the current request; whether rows stay when
the store is full; whether updates in 16 bits are rounded to the nearest."""

HITS, MISSES, INSERTED, REJECTED, ROWS, TICK = range(6)
EVICTED, EXPIRED_STEPS, EXPIRED_SECONDS, EXPIRED_NORM = range(6, 10)
LEFT_AT, LEFT_ROOM, CAPACITY, MISSED, NOT_FINITE = range(10, 15)
CHANGE, SWEPT_ARENA, SWEPT_SLOT, LOADING, PINNED_ROWS = range(15, 20)
RUNNING_S, HAS_LARGE, NO_ROOM = 20, 21, 22
NUM_TALLIES = 23
"""Columns of the tally: ids found, ids not found, rows made, ids rejected a row, rows
in use, tick of the current request; rows that left because the store was full, because
of their age in steps, in seconds, because of their norm; address at which the next row
to leave is noted, or 0, and for how many there is room (see ``change_log.py``); rows
that the store may hold; gradients without a row, and with NaN or an infinity; what
change is in progress (see ``NO_CHANGE``); arena and slot where the next slice of a
sweep begins; whether the rows of a checkpoint, and of increments, are being loaded;
rows that stay when the store is full; the running time (see ``expiry.py``); whether
rows may hold numbers that are not moderate (see ``finite.py``); rows of writes that
found no room."""

COUNTERS = {
    "hits": HITS,
    "misses": MISSES,
    "inserted": INSERTED,
    "rejected": REJECTED,
    "evictions": EVICTED,
    "expired_steps": EXPIRED_STEPS,
    "expired_seconds": EXPIRED_SECONDS,
    "expired_norm": EXPIRED_NORM,
    "gradients_missed": MISSED,
    "gradients_refused": NOT_FINITE,
    "writes_without_room": NO_ROOM,
}
"""Columns that are counted since the start, by the names of counters."""

NO_CHANGE, REQUEST, LOAD, CLEAR = range(4)
"""What changes the store right now: nothing; a request that would be undone; a load; a
clear, which would be done once more (see ``undo_log.py``)."""

FREQUENCY, LAST_STEP, FIRST_STEP, LAST_S = (np.uint64(at) for at in (16, 20, 24, 28))
"""Bytes of a row at which its metadata stand, each a uint32."""

MISSING = np.uint32(2**32 - 1)
"""Slot of an id that has no row."""

POSITION_BITS = 24
"""Bits of a use that hold a row's, or an id's, position in its request."""

LARGEST_TICK = 2 ** (64 - POSITION_BITS) - 1
"""The largest tick of a use. Later requests have it, too: their rows are in a file as
those of one request, and a store that reads it gives them ticks of 48 bits again."""

OWNER_SHIFT = np.uint64(48)
TICK_MASK = np.uint64(2**48 - 1)
WORD = np.uint64(8)

_HEADER_BYTES = _METADATA_BYTES = 16
DTYPES = ("fp32", "fp16", "bf16")
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
_MANY = 2**40
"""Length of arrays that the loops see by address: no index is ever checked."""
_ZERO, _ONE, _S3 = np.uint64(0), np.uint64(1), np.uint64(3)
_TWO_WORDS = np.uint64(2)
_LINE_BYTES = np.uint64(8 * (SLOTS + 1))


def reserve(num_words: int) -> Words:
    """Reserve zeroed words, aligned to a page, that cost nothing until written."""
    num_bytes = max(num_words * 8, 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError, ValueError) as exc:
        raise StoreError(
            "The operating system must grant address space for the store's capacity. "
            f"Received: {exc} for {num_bytes} bytes. Lower the capacity, or allow "
            "overcommitted memory (vm.overcommit_memory)."
        ) from exc
    return np.frombuffer(memory, dtype=np.uint64, count=num_words)


def require_sound(holds: object, what: str) -> None:
    """Raise StoreError unless numbers in a memory file fit what else is there."""
    if not holds:
        raise StoreError(
            f"A memory file must have valid {what}. Received: a damaged one. "
            "Delete the file, and load a checkpoint."
        )


class Area(NamedTuple):
    """A fixed stretch of a memory file: its first byte, and its words."""

    offset: int
    num_words: int

    def of(self, words: Words) -> Words:
        """Return its words, of those of the file."""
        return words[self.offset // 8 : self.offset // 8 + self.num_words]


TALLY = Area(4096, 64)
CURSOR = Area(4608, 64)
LOGS = Area(8192, 64 * 15)
ARENAS = Area(16384, MAX_ARENAS * 6)
STEPS = Area(409_600, 2**16)
RECOVERY = Area(int(kernel.BEFORE), 64)
"""The small arrays of a store: its tally, the index's cursor, the directories of logs
and of arenas, the steps of the tables; what completes or undoes a request."""


class StoreMemory(Protocol):
    """What the arrays of a store are made of. The store's thread owns it.

    ``is_new`` says that all areas are zero; else ``tables`` are what was published
    last, as JSON.
    """

    is_new: bool
    tables: bytes

    def area(self, area: Area) -> Words:
        """Return an area; the same memory at every call only in a memory file."""

    def reserve(self, *num_words: int) -> list[Words]:
        """Reserve zeroed words that cost nothing until used, in several stretches."""

    def find(self, address: int) -> Words:
        """Return what was reserved, by its address."""

    def commit(self, words: Words, num_words: int) -> int:
        """Allocate the first words of a reservation; return how many may be used."""

    def emptied(self, *stretches: Words) -> list[Words]:
        """Give back the memory of one reservation; return zeroed words like it."""

    def publish(self, tables: bytes) -> None:
        """Replace ``tables``, all or nothing."""

    def rewind(self) -> None:
        """Give back what was reserved since the last :meth:`publish`."""

    def close(self, *, is_clean: bool = True) -> None:
        """End the use of the memory, whole if ``is_clean``. May be called twice."""


class PrivateMemory:
    """Memory that ends with its process: see :class:`StoreMemory`."""

    is_new = True
    tables = b""

    def __init__(self) -> None:
        self._head = reserve(STEPS.offset // 8 + STEPS.num_words)

    def area(self, area: Area) -> Words:
        """Return an area of the head."""
        return area.of(self._head)

    def reserve(self, *num_words: int) -> list[Words]:
        """Reserve words, side by side: so all may have huge pages, and few of them."""
        return np.split(reserve(sum(num_words)), np.cumsum(num_words)[:-1])

    def find(self, address: int) -> Words:
        """Fail: private memory is always new."""
        raise AssertionError(address)

    def commit(self, words: Words, num_words: int) -> int:
        """Return all words: the operating system allocates them when written."""
        return words.size

    def emptied(self, *stretches: Words) -> list[Words]:
        """Return other words; the memory goes with the last view of the old ones."""
        others = self.reserve(*(words.size for words in stretches))
        pairs = zip(others, stretches, strict=True)
        return [other.reshape(words.shape) for other, words in pairs]

    def publish(self, tables: bytes) -> None:
        """Do nothing: no other process reads this memory."""

    def rewind(self) -> None:
        """Do nothing: the memory goes with the last view of it."""

    def close(self, *, is_clean: bool = True) -> None:
        """Do nothing: the memory goes with the last view of it."""


def distance(begin: npt.NDArray[np.uint64], end: npt.NDArray[np.uint64]) -> int:
    """Return the bytes from one array to another, modulo 2**64."""
    return int(end.ctypes.data - begin.ctypes.data) % 2**64


def address_at(begin: Words, num_bytes: int) -> int:
    """Return the address that is at a :func:`distance` from an array."""
    return int(begin.ctypes.data + num_bytes) % 2**64


class Arenas:
    """The slots of all rows: ``words`` per arena, ``(capacity, words per row)``.

    ``directory`` has a line per arena, and stays where it is; ``tags`` a byte per slot.
    """

    def __init__(self, capacity_rows: int, source: StoreMemory, num: int = 0) -> None:
        self._capacity, self._memory = capacity_rows, source
        self._lines = source.area(ARENAS).reshape(MAX_ARENAS, -1)
        self.directory: Words = self._lines[:num]
        self.words: list[Words] = []
        self.tags: list[Words] = []
        for base, stride, used, free, tags, slots in self.directory.tolist():
            words = source.find(address_at(self._lines, base))
            num_words = capacity_rows * stride // 8
            fits = stride % 8 == 0 < stride and num_words <= words.size
            fits &= free <= used <= slots <= capacity_rows
            self.tags.append(source.find(address_at(self._lines, tags)))
            fits &= capacity_rows // 8 < self.tags[-1].size
            require_sound(fits, "a directory of arenas")
            self.words.append(words[:num_words].reshape(capacity_rows, -1))

    def add(self, words_per_row: int) -> None:
        """Add an arena for rows of so many words."""
        number, num_words = len(self.words), self._capacity * words_per_row
        if number == MAX_ARENAS:
            raise StoreError(
                f"The rows of a server must have at most {MAX_ARENAS} different sizes. "
                "Received: one more. Start more servers with fewer tables each."
            )
        words, tags = self._memory.reserve(num_words, self._capacity // 8 + 1)
        self.words.append(words.reshape(self._capacity, words_per_row))
        self.tags.append(tags)
        self.directory = self._lines[: number + 1]
        self._begin(number)

    def drop(self, num_arenas: int) -> None:
        """Drop the last arenas, which have no rows."""
        del self.words[num_arenas:], self.tags[num_arenas:]
        self.directory = self._lines[:num_arenas]

    def clear(self) -> None:
        """Drop all rows."""
        for number, both in enumerate(zip(self.words, self.tags, strict=True)):
            self.words[number], self.tags[number] = self._memory.emptied(*both)
            self._begin(number)

    def make_room(self, arena: int, num_rows: int) -> None:
        """Allocate the memory of slots for more rows."""
        line = self._lines[arena]
        num_slots = min(int(line[USED]) + num_rows, self._capacity)
        if num_slots > line[SLOTS]:
            self._commit(arena, num_slots)

    def _begin(self, number: int) -> None:
        """Write the line of an arena without rows."""
        line, words, tags = self._lines[number], self.words[number], self.tags[number]
        places = distance(self._lines, words), distance(self._lines, tags)
        for column in (FREE, USED, SLOTS):  # one by one: each is at most the next
            line[column] = 0
        line[BASE], line[STRIDE], line[TAGS] = places[0], words.strides[0], places[1]
        self._commit(number, 0)

    def _commit(self, number: int, num_slots: int) -> None:
        words = self.words[number]
        num_words = self._memory.commit(words, num_slots * words.shape[1])
        num_slots = min(num_words // words.shape[1], self._capacity)
        self._memory.commit(self.tags[number], num_slots // 8 + 1)
        self._lines[number, SLOTS] = num_slots


def build_layout(spec: TableSpec, number: int, *, has_metadata: bool) -> Layout:
    """Return a layout ``(17,)`` without addresses, arena, seed, step and time."""
    dtype = DTYPES.index(spec.weight_dtype)
    layout = np.zeros(NUM_COLUMNS, dtype=np.uint64)
    layout[OWNER] = number + 1
    layout[DIM], layout[NUM_STATE] = spec.row_dim, spec.num_row_floats
    layout[DTYPE], layout[HAS_METADATA] = dtype, has_metadata
    layout[WEIGHTS] = _HEADER_BYTES + _METADATA_BYTES * has_metadata
    weight_floats = spec.row_dim if dtype == FP32 else (spec.row_dim + 1) // 2
    layout[STATE] = int(layout[WEIGHTS]) + 4 * weight_floats
    return layout


class StoreAt(NamedTuple):
    """The store's own arrays; the loops see them as views without an owner.

    ``lines`` and ``cursor`` are the index's, ``arenas`` and ``logs`` directories;
    ``log`` is the address of the log of what changes, or 0.
    """

    lines: Words
    cursor: Words
    arenas: Words
    logs: Words
    tally: Tally
    log: np.uint64


class RowsAt(NamedTuple):
    """Where a table's rows are, as plain numbers.

    ``base`` and ``tags`` are addresses for slot 0, ``stride`` the bytes per slot;
    ``weights`` and ``state`` are the bytes of a row at which these begin. ``slots``
    may be read.
    """

    base: np.uint64
    stride: np.uint64
    tags: np.uint64
    slots: np.uint64
    arena: np.uint64
    owner: np.uint64
    dim: np.int64
    dtype: np.int64
    weights: np.uint64
    weight_bytes: np.uint64
    state: np.uint64
    state_bytes: np.uint64
    has_metadata: bool
    is_pinned: bool


keep_words = inlined_kernel(kernel.keep_words)
keep_row = inlined_kernel(kernel.keep_row)
"""Keep words as they are, in the log of what changes."""


@inlined
def log_address(log: Log) -> np.uint64:
    """Return the address of the log, or 0: a constant, where there is none."""
    if log is None:
        return _ZERO
    return log


@inlined
def layout_at(address: np.uint64) -> Layout:
    """Return the layout of a table, by its address."""
    layout: Layout = numba.carray(cpu.words_at(address), (NUM_COLUMNS,))
    return layout


@inlined
def store_at(layout: Layout) -> StoreAt:
    """Return the arrays of the store that a table is in, to read them."""
    return changing_store_at(layout, _ZERO)


@inlined
def changing_store_at(layout: Layout, log: np.uint64) -> StoreAt:
    """Return the arrays of the store that a table is in, to change them."""
    array = cpu.words_at(layout[STORE])
    return StoreAt(
        numba.carray(cpu.words_at(array[0]), (_MANY, 8)),
        numba.carray(cpu.words_at(array[1]), (_MANY,)),
        numba.carray(cpu.words_at(array[2]), (_MANY, 6)),
        numba.carray(cpu.words_at(array[3]), (np.int64(array[5]), 15)),
        numba.carray(cpu.integers_at(array[4]), (_MANY,)),
        log,
    )


@inlined
def arena_address(arenas: Words, arena: np.uint64, column: int) -> np.uint64:
    """Return the address of slot 0 (``BASE``) or of its tag (``TAGS``)."""
    return np.uint64(arenas.ctypes.data) + arenas[arena, column]


@inlined
def rows_at(store: StoreAt, layout: Layout) -> RowsAt:
    """Return where the rows of a table are."""
    arena = layout[ARENA]
    size = np.uint64(4 if layout[DTYPE] == FP32 else 2)
    return RowsAt(
        arena_address(store.arenas, arena, BASE),
        store.arenas[arena, STRIDE],
        arena_address(store.arenas, arena, TAGS),
        store.arenas[arena, SLOTS],
        arena,
        layout[OWNER],
        np.int64(layout[DIM]),
        np.int64(layout[DTYPE]),
        layout[WEIGHTS],
        layout[DIM] * size,
        layout[STATE],
        layout[NUM_STATE] * np.uint64(4),
        layout[HAS_METADATA] != _ZERO,
        layout[PINNED] != _ZERO,
    )


@inlined
def read_weights(rows: RowsAt, address: np.uint64, target: np.uint64) -> None:
    """Copy the weights of the row at an address to float32 at another one."""
    if rows.dtype == FP32:
        cpu.copy_bytes(target, address + rows.weights, rows.weight_bytes)
    else:
        halves = cpu.halves_at(address + rows.weights)
        widen(halves, cpu.floats_at(target), rows.dim, rows.dtype)


@inlined
def read_row(rows: RowsAt, address: np.uint64, target: np.uint64) -> None:
    """Copy weights and state of a row; as float32, both stand side by side."""
    if rows.dtype == FP32:
        num_bytes = rows.weight_bytes + rows.state_bytes
        cpu.copy_bytes(target, address + rows.weights, num_bytes)
    else:
        read_weights(rows, address, target)
        state = target + np.uint64(4 * rows.dim)
        cpu.copy_bytes(state, address + rows.state, rows.state_bytes)


@inlined
def write_weights(rows: RowsAt, address: np.uint64, source: np.uint64) -> None:
    """Write float32 at an address to the weights of a row, rounded to the nearest."""
    if rows.dtype == FP32:
        cpu.copy_bytes(address + rows.weights, source, rows.weight_bytes)
    else:
        halves = cpu.halves_at(address + rows.weights)
        round_to_nearest(cpu.floats_at(source), halves, rows.dim, rows.dtype)


@inlined
def write_row(rows: RowsAt, address: np.uint64, source: np.uint64) -> None:
    """Overwrite weights and state of a row."""
    if rows.dtype == FP32:
        num_bytes = rows.weight_bytes + rows.state_bytes
        cpu.copy_bytes(address + rows.weights, source, num_bytes)
    else:
        write_weights(rows, address, source)
        state = source + np.uint64(4 * rows.dim)
        cpu.copy_bytes(address + rows.state, state, rows.state_bytes)


@compiled
def read_rows(layout: Layout, slots_N: Slots, out_NW: Floats) -> None:
    """Copy weights and state of rows, ``(N, D + S)``; ``MISSING`` reads zeros."""
    rows = rows_at(store_at(layout), layout)
    target = np.uint64(out_NW.ctypes.data)
    for i in range(len(slots_N)):
        if slots_N[i] == MISSING:
            out_NW[i, :] = np.float32(0)
        else:
            address = rows.base + np.uint64(slots_N[i]) * rows.stride
            read_row(rows, address, target)
        target += np.uint64(4 * out_NW.shape[1])


@compiled
def write_rows(layout: Layout, slots_N: Slots, rows_NK: Floats) -> None:
    """Overwrite weights ``(N, D)``, or also state ``(N, D + S)``; skip ``MISSING``."""
    rows = rows_at(store_at(layout), layout)
    source = np.uint64(rows_NK.ctypes.data)
    state_bytes = np.uint64(4 * (rows_NK.shape[1] - rows.dim))
    for i in range(len(slots_N)):
        if slots_N[i] != MISSING:
            address = rows.base + np.uint64(slots_N[i]) * rows.stride
            write_weights(rows, address, source)
            state = source + np.uint64(4 * rows.dim)
            cpu.copy_bytes(address + rows.state, state, state_bytes)
        source += np.uint64(4 * rows_NK.shape[1])


@inlined
def locate_row(arenas: Words, arena: np.uint64, slot: np.uint64) -> np.uint64:
    """Return the address of a row's header."""
    return arena_address(arenas, arena, BASE) + slot * arenas[arena, STRIDE]


@inlined
def owner_at(address: np.uint64) -> np.uint64:
    """Return the owner of the row at an address; 0 if the slot is free."""
    return cpu.load_u64(address + WORD) >> OWNER_SHIFT


@inlined
def tick_at(address: np.uint64) -> np.uint64:
    """Return the tick at which the row at an address was last used."""
    return cpu.load_u64(address + WORD) & TICK_MASK


@inlined
def is_row_of(rows: RowsAt, slot: np.uint64, id_: np.uint64) -> bool:
    """Return whether a slot, perhaps one of another arena, has the row of an id."""
    if slot >= rows.slots:
        return False
    address = rows.base + slot * rows.stride
    return cpu.load_u64(address) == id_ and owner_at(address) == rows.owner


@inlined
def take_slot(arenas: Words, arena: np.uint64, log: np.uint64) -> np.uint64:
    """Return a free slot; the caller has made sure that there is one."""
    _keep_free_list(arenas, arena, log)
    head = arenas[arena, FREE]
    if head == _ZERO:
        slot = arenas[arena, USED]
        arenas[arena, USED] = slot + _ONE
    else:
        slot = head - _ONE
        arenas[arena, FREE] = cpu.load_u64(locate_row(arenas, arena, slot))
    keep_words(log, locate_row(arenas, arena, slot), _TWO_WORDS)
    return slot


@inlined
def free_slot(arenas: Words, arena: np.uint64, slot: np.uint64, log: np.uint64) -> None:
    """Put a slot on its arena's free list."""
    _keep_free_list(arenas, arena, log)
    address = locate_row(arenas, arena, slot)
    keep_row(log, address, arenas[arena, STRIDE] >> _S3)
    cpu.store_u64(address, arenas[arena, FREE])
    cpu.store_u64(address + WORD, _ZERO)
    arenas[arena, FREE] = slot + _ONE
    tag = arena_address(arenas, arena, TAGS) + slot
    cpu.store_u8(tag, cpu.load_u8(tag) ^ _ONE)  # no longer that of its last use


@inlined
def _keep_free_list(arenas: Words, arena: np.uint64, log: np.uint64) -> None:
    """Keep the columns ``USED`` and ``FREE`` of an arena, which stand side by side."""
    line = np.uint64(arenas.ctypes.data) + arena * _LINE_BYTES
    keep_words(log, line + WORD * np.uint64(USED), _TWO_WORDS)


@inlined
def is_finite(values: cpu.Pointer, dim: np.int64) -> bool:
    """Return whether ``dim`` float32 hold neither NaN nor an infinity."""
    # Zero times a finite number is zero, times any other NaN: one vector pass.
    total = np.float32(0)
    for d in range(dim):
        total += values[d] * np.float32(0)
    return total == np.float32(0)
