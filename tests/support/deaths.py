"""Stores whose process dies before any of the instructions that write to their file.

The file is mapped read-only. An instruction that writes to it faults; the handler of
the fault counts it, lets it write, and has the processor trap behind it; the handler of
the trap takes the right to write away again. Before the store whose number it is told,
the process ends. So what is counted is the machine code as it is shipped, in its own
order: numba's, NumPy's, the interpreter's and the C library's. Memory that is given
back counts too. This needs the trap flag of x86.
Of a copy by one instruction, which has a store for each byte, some count.
"""

import ctypes
import fcntl
import gc
import mmap
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numba
import numpy as np

from persia_torchrec import AdmitBloom
from persia_torchrec.embedding.optim import SGD, Adam
from persia_torchrec.jit import intrinsics
from persia_torchrec.server.dedup import Streams
from persia_torchrec.store import memory, memory_file, row_copy
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.index import BOUNDARY
from persia_torchrec.store.recency import TAIL, TRIGGER
from persia_torchrec.table import TableSpec, with_parts
from tests.support import kills
from tests.support.consistency import check_store
from tests.support.servers import ids_of

ARE_POSSIBLE = platform.machine() == "x86_64"

_DIED, _ERROR = 77, 1
_SIGTRAP = int(signal.SIGTRAP)
_NEVER = 2**63
_READ, _WRITE = mmap.PROT_READ, mmap.PROT_WRITE
_ADDRESS = np.uint64(16)  # of a siginfo_t: the address of a fault
_FLAGS = np.uint64(40 + 8 * 17)  # of a ucontext_t: the flags of the processor
_TRAP = np.uint64(2**8)  # of the flags
_INSTRUCTION = np.uint64(40 + 8 * 16)  # of a ucontext_t: its address
_REP, _TWO_BYTES = np.uint64(0xF3), np.uint64(0x0F)  # prefixes of instructions
_IN_LINE = np.uint64(63)
_FILE_BYTES = np.uint64(memory_file.FILE_BYTES)
_IN_PAGE, _PAGES = (np.uint64(n) for n in (mmap.PAGESIZE - 1, 2 * mmap.PAGESIZE))
_SA_SIGINFO = 4


class _Action(ctypes.Structure):
    """struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_protect, _exit = _libc.mprotect, _libc._exit
_protect.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
_exit.argtypes, _exit.restype = [ctypes.c_int], None

# Shared with the forks: where the watched memory begins, how many stores have begun,
# before which one the process dies; the pages that the last one writes to, and the
# address of its instruction.
_shared = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint64)
_BEGIN, _NUM, _LAST, _AT, _BY = (
    np.uint64(_shared.ctypes.data + 8 * n) for n in range(5)
)


@cache
def _handler():
    """Compile the handler of faults and traps."""
    load, store, load_u8 = intrinsics.load_u64, intrinsics.store_u64, intrinsics.load_u8

    @numba.njit
    def is_repeated(by):
        return load_u8(by) == _REP and load_u8(by + np.uint64(1)) != _TWO_BYTES

    @numba.cfunc("void(int32, uint64, uint64)")
    def handle(number, info, context):
        begin, flags = load(_BEGIN), context + _FLAGS
        if number == _SIGTRAP:
            store(flags, load(flags) & ~_TRAP)
            _protect(load(_AT), _PAGES, _READ)
            return
        address = load(info + _ADDRESS)
        if address - begin >= _FILE_BYTES:
            _exit(_ERROR)
        by = load(context + _INSTRUCTION)
        if by != load(_BY) or not address & _IN_LINE or not is_repeated(by):
            store(_NUM, load(_NUM) + np.uint64(1))
            if load(_NUM) == load(_LAST):
                _exit(_DIED)
        store(_BY, by)
        store(flags, load(flags) | _TRAP)
        store(_AT, address & ~_IN_PAGE)
        _protect(load(_AT), _PAGES, _READ | _WRITE)

    return handle


def watch(begin):
    """Count from now on what writes to the file that is mapped at an address."""
    _shared[0] = begin
    for number in (signal.SIGSEGV, signal.SIGTRAP):
        action = _Action(handler=_handler().address, flags=_SA_SIGINFO)
        assert _libc.sigaction(number, ctypes.byref(action), None) == 0
    assert _protect(begin, memory_file.FILE_BYTES, _READ) == 0


class _WatchedMap(mmap.mmap):
    """A file that is watched as soon as it is mapped, if ``is_on``."""

    is_on = False

    def __new__(cls, file, *args, **settings):
        self = super().__new__(cls, file, *args, **settings)
        if file >= 0 and cls.is_on:
            watch(np.frombuffer(self, np.uint8).ctypes.data)
        return self

    def madvise(self, option, *where):
        if option == mmap.MADV_REMOVE and _shared[0]:
            _shared[1] += np.uint64(1)
            if _shared[1] == _shared[2]:
                os._exit(_DIED)
            _protect(int(_shared[0]), memory_file.FILE_BYTES, _READ | _WRITE)
        super().madvise(option, *where)
        if _shared[0]:
            _protect(int(_shared[0]), memory_file.FILE_BYTES, _READ)


def die_before(num, work):
    """Do work in a fork that dies before a store; return how many stores had begun."""
    _handler()
    _shared[:3] = 0, 0, num
    pid = os.fork()
    if pid == 0:
        status = _ERROR
        try:
            mmap.mmap = _WatchedMap
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # for the test to print
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    num_begun = int(_shared[1])
    assert os.waitstatus_to_exitcode(status) == (_DIED if num_begun == num else 0)
    return num_begun


def ones(num, dim):
    return np.ones((num, dim), dtype=np.float32)


def look_up(store, table, *ids):
    out = ones(len(ids), store.tables[table].dim)
    return store.lookup(table, ids_of(*ids), out, training=True)


def fill(store, streams):
    """Fill the store, with candidates, and logs that are about to be cleaned."""
    for number in range(3):
        look_up(store, 2, 1, 2, 9)
        with store.rows.transaction() as request:
            streams.mark(request, (1, number), 1)
            streams.settle(request, (2, number), (number, 0, 0, 0))
    for _ in range(2):
        look_up(store, 0, 1, 2)
    look_up(store, 0, 3, 4, 5)
    for id_ in (1, 2, 9, 1, 2, 9, *[1] * 5):  # which have two blocks now
        look_up(store, 2, id_)
    for _ in range(34):  # the next one ends a period
        store.update(2, ids_of(1), ones(1, 4))
    for _ in range(8):
        look_up(store, 2, 9)  # so that id 1 will lose its second block
    look_up(store, 1, 1, 2, 3)
    for id_ in range(10, 10 + store.rows.capacity_rows - store.num_rows):
        look_up(store, 1, id_)  # where not all were admitted
    logs = store.rows.logs.directory
    while not (logs[:, TRIGGER] <= logs[:, TAIL]).any():
        look_up(store, 1, 3, 2)


def fill_index(store, streams):
    """Add rows until the index grows, and some entries have moved."""
    number = 0
    while not store.rows.index.cursor[BOUNDARY]:
        look_up(store, 1, *range(number, number + 10))
        number += 10


def fill_blocks(store, streams):
    """Have ids with two blocks, and a period before its last update.

    Of most ids the first block has left; the second follows when the period ends.
    """
    for _ in range(6):
        look_up(store, 2, *range(1, 8))
    for _ in range(4):
        store.update(2, ids_of(1), ones(1, 4))
    store.remove(2, ids_of(2, 3, 5, 6, 7))


class Case(NamedTuple):
    """Something that a store does, and dies meanwhile."""

    action: Callable[..., None]
    eviction: str = "lru"
    engine: str = "compiled"
    capacity_rows: int = 14
    prepare: Callable[..., None] = fill

    def __str__(self):
        return f"{self.action.__name__}-{self.eviction}-{self.engine}"

    def open(self, path):
        """Open the store as a server does."""
        store = EmbeddingStore(
            self.capacity_rows,
            memory_file=path,
            eviction=self.eviction,
            optimizer_engine=self.engine,
            clock=lambda: 7.0,
        )
        streams = Streams(store)
        if not store.tables:
            is_fbgemm = self.engine == "fbgemm"
            store.add_tables(kills.FBGEMM_TABLES if is_fbgemm else kills.TABLES)
        return store, streams


def update_tables(store, streams):
    """Do a joint step of two trainers."""
    with store.rows.transaction() as request:
        for table, ids in enumerate([(1, 2, 3, 1), (2, 1), (9, 1, 1)]):
            grads = ones(len(ids), store.tables[table].dim)
            grads[1] = np.nan if table == 0 else 1
            store.add_update(table, ids_of(*ids), grads)
        for stream in (1, 2):
            streams.settle_update(request, (stream, 2 + stream), 9)
    streams.groups = b"[1]"


def end_period(store, streams):
    with store.rows.transaction() as request:
        store.add_update(2, ids_of(1, 4), ones(2, 4))
        streams.settle_update(request, (1, 3), 2)


def look_up_tables(store, streams):
    with store.rows.transaction() as request:
        look_up(store, 1, 3, 20, 1, 21, 20)
        look_up(store, 0, 3, 5, 6, 2)  # the first two are candidates
        look_up(store, 2, 9, 7, 8)
        streams.mark(request, (1, 3), 2)


def look_up_many(store, streams):
    """Look up more ids than a log has room for."""
    look_up(store, 1, *[1, 3] * 2500, 22)


def write_rows(store, streams):
    with store.rows.transaction():
        store.write(1, ids_of(30, 1), 3 * ones(2, 8))
        store.write(2, ids_of(31, 1), 3 * ones(2, 4))
        store.set_step(1, 50)


def use_states(store, streams):
    """Look rows up with their state, and write others back; some are new, or repeat."""
    tables = (1, 2) if store.tables == kills.FBGEMM_TABLES else (1,)
    looked_up, written = ids_of(3, 20, 1, 21, 20), ids_of(30, 1, 31, 1, 3)
    starts = np.arange(len(tables) + 1) * 5
    width = int(store.group(tables).widths.sum())
    seen = np.zeros(starts[-1], np.uint32)
    with store.rows.transaction() as request:
        out = np.empty(5 * width, np.float32)
        store.lookup_states(tables, np.tile(looked_up, len(tables)), starts, out, seen)
        store.write_tables(
            tables,
            np.tile(written, len(tables)),
            starts,
            np.full(5 * width, 7, np.float32),
            counts_N=seen + np.uint32(1),
            frequencies_N=seen + np.uint32(5),
            steps_T=np.full(len(tables), 50),
        )
        streams.mark_lookup(request, (1, 3), 1)
        streams.settle(request, (2, 3))


def sweep_and_remove(store, streams):
    with store.rows.transaction():
        store.sweep(100)
        store.remove(1, ids_of(2))


def clear(store, streams):
    with store.rows.transaction() as request:
        store.add_update(1, ids_of(1, 99), ones(2, 8))
        store.clear()
        streams.settle(request, (1, 3))


def grow(store, streams):
    look_up(store, 1, *range(900, 940))


def saved_rows(store):
    """Return rows to load, of another store."""
    eviction = "lfu" if store.rows.is_lfu else "lru"
    other = EmbeddingStore(8, eviction=eviction, optimizer_engine="compiled")
    other.add_tables(store.tables)
    slots = look_up(other, 1, *range(40, 46), 1)
    uses = np.arange(1, 8, dtype=np.uint64) << np.uint64(row_copy.POSITION_BITS)
    return row_copy.gather_rows(other, 1, slots, uses)


def load_rows(store, streams):
    rows = saved_rows(store)
    tables = np.ones(len(rows), np.uint16)
    store.rows.is_loading = True
    store.clear()
    load = row_copy.RowImport(store, rows.uses, tables, np.ones(7, np.uint32))
    load.add(1, rows, np.ones(len(rows), np.bool_))
    load.finish(9)
    store.remove(1, ids_of(41))
    store.rows.is_loading = False


def put_changes(store, streams):
    for _ in row_copy.put_changes(store, [(1, saved_rows(store))]):
        pass


def add_tables(store, streams):
    first, admission = store.tables[0], AdmitBloom(2, 50)
    new = TableSpec(name="new", dim=6, optimizer=SGD(1.0), admission=admission)
    changed = replace(first, optimizer=Adam(0.5), admission=admission)
    store.add_tables([new, changed])


def drop_tables(store, streams):
    """Drop tables with shared rows and with blocks; free their rows in slices."""
    store.drop_tables([0, 2])
    free_dropped(store, 3)


def free_dropped(store, max_rows):
    while store.leaving:
        store.sweep(max_rows)


CASES = [
    Case(update_tables),
    Case(update_tables, engine="fbgemm"),
    Case(look_up_tables),
    Case(look_up_tables, "lfu"),
    Case(look_up_tables, engine="fbgemm"),
    Case(look_up_many),
    Case(write_rows),
    Case(use_states),
    Case(use_states, "lfu"),
    Case(use_states, "lfu", engine="fbgemm"),
    Case(sweep_and_remove, "lfu"),
    Case(clear),
    Case(grow, capacity_rows=2000, prepare=fill_index),
    Case(load_rows),
    Case(put_changes, "lfu"),
    Case(add_tables),
    Case(drop_tables),
    Case(drop_tables, "lfu"),
    Case(end_period, capacity_rows=20, prepare=fill_blocks),
]


class State(NamedTuple):
    """What a store holds, and what its journal has noted."""

    rows: list[object]
    was_cleared: bool
    noted: set[tuple[object, ...]]

    def has_noted(self, other):
        """Return whether what has changed for another state is noted here."""
        if self.was_cleared != other.was_cleared:
            return self.was_cleared
        return self.noted >= other.noted


def state_of(store, streams):
    free_dropped(store, 100)  # as a server does
    batches = [(stream, number) for stream in (1, 2) for number in range(5)]
    outcomes = [streams.outcome(batch) for batch in batches]
    assert streams.groups in (b"", b"[1]")
    rows = [kills.state_of(store), store.tables, outcomes, streams.open_batches()]
    dropped = {s.number: s.spec.name for s in store.states if s.is_dropped}
    _, changes = store.rows.journal.previous(dropped)
    noted = {("dropped", name) for name in changes.dropped}
    noted |= {(note.table, slot) for note in changes.slots for slot in note.slots}
    for left in changes.left:
        noted |= {("left", *row) for row in left.tolist()}
    return State(rows, changes.was_cleared, noted)


BEFORE, DROPPED, AFTER = range(3)
"""What the next process may find."""


class Deaths:
    """A case in a file: ``num`` is how many stores it has."""

    def __init__(self, path, case):
        self._path, self._case = path, case
        os.truncate(path, 0)
        store, streams = case.open(path)
        store.rows.journal.begin(77)
        case.prepare(store, streams)
        store.rows.memory.close(is_clean=False)
        self._open = store, streams = case.open(path)
        store.rows.journal.begin(78, store.rows.journal.previous()[1])
        fcntl.flock(store.rows.memory._file, fcntl.LOCK_UN)  # only forks use it
        self._extents = extents(path)
        before = self._find_state()
        self.num = self.die(_NEVER)
        self._states = {BEFORE: before, AFTER: self._find_state()}
        assert before.rows != self._states[AFTER].rows

    def die(self, num):
        """Begin as before the case, and die before one of its stores."""
        restore(self._path, *self._extents)
        return die_before(num, self._act)

    def die_within_recovery(self, num):
        """Die before one of the stores by which the next process makes it whole."""
        return die_before(num, self._recover)

    def find_stage(self):
        """Return what the next process finds; it must be whole."""
        found = self._find_state()
        for stage, state in self._states.items():
            if found.rows == state.rows:
                assert found.has_noted(state)
                return stage
        assert self._case.action is load_rows
        assert self._was_loading
        assert found.was_cleared
        assert not self._num_rows
        return DROPPED

    def _find_state(self):
        store, streams = self._case.open(self._path)
        check_store(store)
        state = state_of(store, streams)
        self._was_loading, self._num_rows = store.rows.was_loading, store.num_rows
        store.rows.memory.close(is_clean=False)
        del store, streams
        gc.collect()  # each maps 8 TiB of 128
        return state

    def _act(self):
        store, streams = self._open
        watch(store.rows.tally.ctypes.data - memory.TALLY.offset)
        self._case.action(store, streams)

    def _recover(self):
        _WatchedMap.is_on = True
        self._case.open(self._path)


def die_now_and_then(path):
    """Do a little of all below."""
    cases = [case for case in CASES if case.engine == "compiled"]
    some = [cases[-1], *cases[::3]]
    die_before_any_store(path, some, 2)
    die_within_recovery(path, some[:2], 1, 3)
    die_while_it_is_made(path, 2)
    separate_stores_by_a_fence(path)


def die_before_any_store(path, cases, most):
    """Die before each store of some cases, or ``most`` of them; say how often."""
    gc.freeze()
    for case in cases:
        start_s = time.monotonic()
        deaths, stages = Deaths(path, case), []
        for num in spread(deaths.num, most):
            deaths.die(num)  # a copy to unaligned memory may have had one more
            stages.append(deaths.find_stage())
        assert stages == sorted(stages), case
        report(case, len(stages), start_s)


def die_within_recovery(path, cases, num_deaths, most):
    """Die before each store of recoveries, or ``most``, and twice more after that."""
    gc.freeze()
    rng = np.random.default_rng(0)
    for case in cases:
        start_s, num_recoveries = time.monotonic(), 0
        deaths = Deaths(path, case)
        for num in spread(deaths.num, num_deaths):
            deaths.die(num)
            dead = extents(path)
            num_stores = deaths.die_within_recovery(_NEVER)
            stage = deaths.find_stage()
            for first in spread(num_stores, most):
                restore(path, *dead)
                for each in (first, *rng.integers(1, num_stores + 1, 2)):
                    deaths.die_within_recovery(each)
                assert deaths.find_stage() == stage, (case, num, first)
                num_recoveries += 1
        report(case, num_recoveries, start_s)


def die_while_it_is_made(path, most):
    """Die before each store of the making of a memory file, or ``most`` of them."""
    gc.freeze()
    case, start_s = CASES[0], time.monotonic()

    def make():
        _WatchedMap.is_on = True
        case.open(path)

    os.truncate(path, 0)
    numbers = spread(die_before(_NEVER, make), most)
    for num in numbers:
        os.truncate(path, 0)
        die_before(num, make)
        store, streams = case.open(path)
        assert store.tables == with_parts(kills.TABLES)
        case.prepare(store, streams)
        check_store(store)
        store.close()
        del store, streams
        gc.collect()
    report("made", len(numbers), start_s)


def separate_stores_by_a_fence(path):
    """Count two stores to a word, with a fence between them, and without one."""
    os.truncate(path, 0)
    store = EmbeddingStore(1, memory_file=path)
    begin = store.rows.tally.ctypes.data - memory.TALLY.offset
    at = np.uint64(store.rows.tally[-1:].ctypes.data)
    found = []
    for fence in (intrinsics.fence, numba.njit(lambda: None)):
        loop = _build_two_stores(fence)
        loop(at)
        found.append(die_before(_NEVER, lambda loop=loop: (watch(begin), loop(at))))
    assert found == [2, 1]  # the compiler drops the first one


def _build_two_stores(fence):
    @numba.njit
    def write_twice(at):
        intrinsics.store_u64(at, np.uint64(1))
        fence()
        intrinsics.store_u64(at, np.uint64(2))

    return write_twice


def report(case, num, start_s):
    print(f"| {case} | {num} | {time.monotonic() - start_s:.0f} |", flush=True)


def spread(num, most):
    """Return at most so many numbers up to one, and that."""
    return sorted({*range(1, num + 1, -(-num // most)), num})


def extents(path):
    """Return what is allocated of a file: its size; where, and the bytes."""
    found, at = [], 0
    with open(path, "rb") as file:  # noqa: PTH123  # a descriptor
        size = os.fstat(file.fileno()).st_size
        while True:
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return size, found
            at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            found.append((begin, os.pread(file.fileno(), at - begin, begin)))


def restore(path, size, found):
    """Make a file as it was when :func:`extents` read it."""
    os.truncate(path, 0)
    os.truncate(path, size)
    with open(path, "r+b") as file:  # noqa: PTH123
        for begin, data in found:
            os.pwrite(file.fileno(), data, begin)
