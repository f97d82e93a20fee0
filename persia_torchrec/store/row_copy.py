"""Copy rows out of a store while it stays in use, and put rows into one.

OUT. A row never moves while it lives, so that a walk over the slots meets it once:

    slots of an arena    [ copied ......... | next slice | ........... ] made since
                                            ^ now                      ^ at the start

Every row that lives from the first slice to the last is copied once, whole. A row that
is made meanwhile, or evicted and made again, may be there once, twice (the later use is
the valid one), or not at all.

A row's position in the request that used it last is in the log of uses, which is copied
when an export begins. Rows that are used meanwhile get no position: they are newer than
all others, and nearly in order by their ticks.

    log   [tick 3] a b c   [tick 4] b d       positions   a: 0   c: 2   b: 0   d: 1

IN. A checkpoint's rows leave in the order in which they would have left, after those
that were in the store before:

    uses  --RowImport()--> which fit, the last to leave; their order, a tick for each
    rows  --add()--------> slots; of a row that comes twice the later use counts
            finish() ----> records in the logs

Changed rows come in the order in which they would leave, and each is touched as it is
written: a follower that is full before it receives the leader's evictions evicts the
same rows. A row that has changed without having been used keeps its position.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Bools, Floats, Ids, Indices, Slots, Words
from persia_torchrec.embedding.admission import AdmitAll
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, inlined, read_only
from persia_torchrec.jit.float16 import FP32
from persia_torchrec.store import loops, memory, recency
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import POSITION_BITS, Layout, RowsAt, StoreAt, TableAt
from persia_torchrec.store.recency import RecencyLogs
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.store.table_shared import require_room
from persia_torchrec.table import TableSpec

Numbers = npt.NDArray[np.uint32]

NEVER = np.uint64(0)
"""The tick of a row that is left out."""

_CHUNK_BYTES = 2**20
_SLICE_BYTES = 2**18
_SLICE_ROWS, _SLICE_RECORDS = 2048, 4096
_LARGEST_POSITION = np.uint64(2**POSITION_BITS - 1)
_LARGEST_TICK = np.uint64(memory.LARGEST_TICK)
_POSITION_BITS = np.uint64(POSITION_BITS)
_TOUCHES = 2**16
_NO_TABLE = 2**64 - 1
_NONE_KEEP = np.empty(0, dtype=np.bool_)

_AT, _TICK, _ARENA, _POSITION = range(4)  # columns of the cursor
_LOOK_AHEAD = 16
_S3, _S32 = np.uint64(3), np.uint64(32)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_2, _4, _8, _16 = (np.uint64(num) for num in (2, 4, 8, 16))


@dataclass(frozen=True, slots=True)
class RawRows:
    """Slots of an arena, used and free, and the position of each in its last use.

    ``steps`` and ``seconds`` of tables are those when the first slot was copied.
    """

    words: Words
    positions: Numbers
    steps: list[int]
    seconds: list[float]


class RowExport:
    """A walk over all rows. The store's thread owns it; the store must not be cleared.

    ``tables`` are those that are exported, in the order of their numbers, without
    dropped ones.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self.tables = store.present
        self.is_done = False
        self._store, self._seconds = store, store.rows.seconds
        self._num_copied = 0
        self._directory = store.rows.arenas.directory
        num_used = self._directory[:, memory.USED].tolist()
        self._arenas = list(zip(store.rows.arenas.words, num_used, strict=True))
        self._positions = [memory.reserve(n // 2 + 1).view(np.uint32) for n in num_used]
        self._segments = _copy_segments(store.rows.logs)
        self._slices = self._walk()

    @property
    def progress(self) -> float:
        """The fraction of the slots that have been copied."""
        return self._num_copied / max(sum(num for _, num in self._arenas), 1)

    def advance(self) -> RawRows | None:
        """Do a slice of the work, some tens of microseconds.

        Returns about 1 MiB of slots when they are copied; None before that, and when
        all slots have been copied, which ``is_done`` says.
        """
        for chunk in self._slices:
            return chunk
        self.is_done = True
        return None

    def _walk(self) -> Iterator[RawRows | None]:
        while self._store.must_free_blocks:  # which a copy must not bring back
            self._store.sweep(_SLICE_ROWS)
            yield None
        for _ in self._number_uses():
            yield None
        for arena, (words, num_used) in enumerate(self._arenas):
            chunk_rows = max(_CHUNK_BYTES // words.strides[0], 1)
            slice_rows = max(_SLICE_BYTES // words.strides[0], 1)
            for first in range(0, num_used, chunk_rows):
                end = min(first + chunk_rows, num_used)
                expiries = [table.spec.expiry for table in self.tables]
                copied = np.empty((end - first, words.shape[1]), dtype=np.uint64)
                for start in range(first, end, slice_rows):
                    stop = min(start + slice_rows, end)
                    copied[start - first : stop - first] = words[start:stop]
                    self._num_copied += stop - start
                    if stop < end:
                        yield None
                yield RawRows(
                    copied,
                    self._positions[arena][first:end],
                    [table.num_updates for table in self.tables],
                    [self._seconds.now_s(expiry) for expiry in expiries],
                )

    def _number_uses(self) -> Iterator[None]:
        """Write the positions of all rows, a few log records at a time."""
        addresses = [positions.ctypes.data for positions in self._positions]
        addresses_A = np.array(addresses, dtype=np.uint64)
        cursor = np.zeros(4, dtype=np.uint64)
        while self._segments:
            records, tick, arena = self._segments.pop(0)
            if tick != cursor[_TICK]:
                cursor[_POSITION] = 0
            cursor[[_AT, _TICK, _ARENA]] = 0, tick, arena
            while cursor[_AT] < len(records):
                stop = min(int(cursor[_AT]) + _SLICE_RECORDS, len(records))
                _number_rows(records, stop, cursor, self._directory, addresses_A)
                yield


def split_by_table(
    chunk: RawRows, tables: Sequence[TableState]
) -> list[tuple[int, RowColumns]]:
    """Return the rows of a chunk as columns, with the index of their table.

    Any thread may call it. Rows of other tables are left out, and those that have
    expired.
    """
    owners_N = (chunk.words[:, 1] >> memory.OWNER_SHIFT).astype(np.uint16)
    order_N = np.argsort(owners_N, kind="stable")
    owners = np.array([table.number + 1 for table in tables], dtype=np.uint16)
    begins, ends = (
        np.searchsorted(owners_N[order_N], owners, side) for side in ("left", "right")
    )
    split = []
    for index in np.flatnonzero(ends > begins).tolist():
        slots_K = order_N[begins[index] : ends[index]]
        table = tables[index]
        rows = RowShape(table.spec, table.has_metadata).empty(len(slots_K))
        positions_K = chunk.positions[slots_K]
        copy_columns(chunk.words, slots_K, positions_K, table.layout, rows.addresses())
        if table.spec.expiry.is_on:
            is_kept = ~_find_expired(
                rows, table.spec, chunk.steps[index], chunk.seconds[index]
            )
            rows = RowColumns(*(column[is_kept] for column in rows.columns()))
        split.append((index, rows))
    return split


def _find_expired(rows: RowColumns, spec: TableSpec, step: int, now_s: float) -> Bools:
    """Return which rows have expired by a step and a time."""
    expiry, weights = spec.expiry, rows.weights
    _, last_steps, first_steps, seconds = rows.metadata.T
    now = np.uint32(step % 2**32)
    since_last, since_first = (  # modulo 2**32: see ``Expiry``
        (now - steps).view(np.int32).clip(0) for steps in (last_steps, first_steps)
    )
    if spec.weight_dtype == "bf16":
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    elif spec.weight_dtype == "fp16":
        weights = weights.view(np.float16)
    norms = np.sqrt(np.square(weights, dtype=np.float64).sum(axis=1))
    is_small = norms < expiry.min_l2_norm
    is_expired: Bools = is_small & (since_first >= expiry.spared_steps)
    if expiry.steps_to_live:
        is_expired |= since_last > expiry.steps_to_live
    if expiry.seconds_to_live:
        is_expired |= now_s - seconds.astype(np.int64) > expiry.seconds_to_live
    return is_expired


def gather_rows(
    store: EmbeddingStore, table: int, slots_N: Slots, uses_N: Words
) -> RowColumns:
    """Copy the rows of a table at slots as they are now, with the ``uses_N`` given.

    Slots that have no row of the table are left out. Nothing is counted.
    """
    state = store.states[table]
    rows = RowShape(state.spec, state.has_metadata).empty(len(slots_N))
    num = _gather(state.layout, slots_N, uses_N, rows.addresses())
    return RowColumns(*(column[:num] for column in rows.columns()))


def initial_rows(spec: TableSpec, ids_N: Ids, *, has_all: bool = False) -> Floats:
    """Return the rows ``(N, D + S)`` that ids start with, on any server.

    Of a table with shared rows they are those that the shared rows start with; of one
    with blocks they have the first block, or ``has_all``.
    """
    if shared := spec.table_of_shared_rows:
        spec, ids_N = shared, ids_N % np.uint64(spec.shared_rows)
    store = EmbeddingStore(
        max(spec.dynamic.blocks * len(ids_N), 1), optimizer_engine="compiled"
    )
    [table] = store.add_tables([replace(spec, admission=AdmitAll())])
    weights_ND = np.empty((len(ids_N), spec.dim), dtype=np.float32)
    store.lookup(table, ids_N, weights_ND, training=True)
    for block in store.states[1:] if has_all else ():
        weights_NW = np.empty((len(ids_N), spec.row_dim), dtype=np.float32)
        block.look_up_rows(ids_N, weights_NW)
    return store.read(table, ids_N)


def _copy_segments(
    logs: RecencyLogs,
) -> list[tuple[Numbers, np.uint64, np.uint64]]:
    """Copy the records in use, with the tick and the arena of the first."""
    segments = []
    for line, words in zip(logs.directory, logs.words, strict=True):
        ends = [(recency.HEAD, recency.TAIL)]
        if line[recency.COMPACTING]:
            ends = [(recency.HEAD, recency.WRITE), (recency.READ, recency.TAIL)]
        for begin, end in ends:
            copied = words.view(np.uint32)[int(line[begin]) : int(line[end])].copy()
            segments.append((copied, line[begin + 1], line[begin + 2]))
    return segments


@compiled
def _number_rows(
    records: Numbers, stop: int, cursor: Words, arenas: Words, addresses_A: Words
) -> None:
    """Write the positions of the rows of the next records, and advance the cursor.

    A mark is read as a whole, even across ``stop``.
    """
    at, tick = np.int64(cursor[_AT]), cursor[_TICK]
    arena, position = cursor[_ARENA], cursor[_POSITION]
    while at < stop:
        slot = np.uint64(records[at])
        if slot == recency.MARK:
            new = np.uint64(records[at + 2]) | (np.uint64(records[at + 3]) << _S32)
            if new != tick:
                position = _ZERO
            tick, arena = new, np.uint64(records[at + 1])
            at += recency.MARK_WORDS
            continue
        if at + _LOOK_AHEAD < len(records):
            ahead = np.uint64(records[at + _LOOK_AHEAD])  # perhaps not a slot
            cpu.prefetch(memory.locate_row(arenas, arena, ahead))
        if memory.tick_at(memory.locate_row(arenas, arena, slot)) == tick:
            cpu.store_u32(addresses_A[arena] + _4 * slot, position)
        position += _ONE
        at += 1
    cursor[_AT], cursor[_TICK] = np.uint64(at), tick
    cursor[_ARENA], cursor[_POSITION] = arena, position


@compiled
def copy_columns(
    words_NW: Words,
    slots_K: Indices,
    positions_K: Numbers,
    layout: Layout,
    to: Words,
) -> None:
    """Copy slots of a table to columns at addresses ``to``: :class:`RowColumns`."""
    words_NW = cpu.unowned(words_NW)
    stride = np.uint64(8 * words_NW.shape[1])
    base = np.uint64(words_NW.ctypes.data)
    for k in range(len(slots_K)):
        address = base + np.uint64(slots_K[k]) * stride
        position = min(np.uint64(positions_K[k]), _LARGEST_POSITION)
        tick = min(memory.tick_at(address), _LARGEST_TICK)
        use = (tick << _POSITION_BITS) | position
        _copy_row(layout, address, use, to, np.uint64(k))


@compiled
def _gather(layout: Layout, slots_N: Slots, uses_N: Words, to: Words) -> int:
    """Copy slots of a table, as :func:`copy_columns`; return how many have a row."""
    layout, to = cpu.unowned(layout), cpu.unowned(to)
    rows = memory.rows_at(memory.store_at(layout), layout)
    num = 0
    for n in range(len(slots_N)):
        if n + _LOOK_AHEAD < len(slots_N):
            ahead = np.uint64(slots_N[n + _LOOK_AHEAD])
            loops.prefetch_row(rows.base + ahead * rows.stride, rows.stride)
        slot = np.uint64(slots_N[n])
        address = rows.base + slot * rows.stride
        if slot < rows.slots and memory.owner_at(address) == rows.owner:
            _copy_row(layout, address, uses_N[n], to, np.uint64(num))
            num += 1
    return num


@inlined
def _copy_row(
    layout: Layout, address: np.uint64, use: np.uint64, to: Words, row: np.uint64
) -> None:
    """Copy the row at an address to a row of columns at addresses ``to``."""
    cpu.store_u64(to[0] + _8 * row, cpu.load_u64(address))
    cpu.store_u64(to[1] + _8 * row, use)
    metadata_bytes = _16 * layout[memory.HAS_METADATA]
    to_metadata = to[2] + row * metadata_bytes
    cpu.copy_bytes(to_metadata, address + memory.FREQUENCY, metadata_bytes)
    state_bytes = _4 * layout[memory.NUM_STATE]
    from_state = address + layout[memory.STATE]
    cpu.copy_bytes(to[3] + row * state_bytes, from_state, state_bytes)
    weight_bytes = layout[memory.DIM] * (_4 if layout[memory.DTYPE] == FP32 else _2)
    from_weights = address + layout[memory.WEIGHTS]
    cpu.copy_bytes(to[4] + row * weight_bytes, from_weights, weight_bytes)


class RowImport:
    """Rows of a checkpoint on their way into a store. The store's thread owns it.

    ``uses_R`` are those of :class:`RowColumns`, ``tables_R`` numbers in this store;
    only an LFU store reads ``frequencies_R``.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        uses_R: Words,
        tables_R: npt.NDArray[np.uint16],
        frequencies_R: Numbers,
    ) -> None:
        self._store = store
        self._num_come = 0
        self._tables = tables_R
        store.rows.tally[memory.CHANGE] = memory.LOAD
        self._order = np.argsort(uses_R, kind="stable")
        room = store.rows.capacity_rows - int(store.rows.tally[memory.PINNED_ROWS])
        pinned = [n for n, state in enumerate(store.states) if state.is_pinned]
        is_pinned_R = np.isin(tables_R, pinned)
        if len(uses_R) > room:
            keys = [uses_R, is_pinned_R]  # the last one counts most
            if store.rows.is_lfu:
                keys.insert(1, recency.classify_all(frequencies_R))
            leaving = np.lexsort(keys)
            is_kept = np.ones(len(uses_R), dtype=np.bool_)
            is_kept[leaving[: len(uses_R) - room]] = False
            self._order = self._order[is_kept[self._order]]
        self.num_kept = len(self._order)
        last = np.array([store.rows.tick, 0, _NO_TABLE], dtype=np.uint64)
        self._ticks = np.zeros(len(uses_R), dtype=np.uint64)
        uses = read_only(uses_R)
        self._ticks[self._order] = 1  # of pinned rows, which are in no log
        order = self._order[~is_pinned_R[self._order]]
        _draw_ticks(order, uses, tables_R, last, self._ticks)
        self._slots = np.zeros(len(uses_R), dtype=np.uint32)

    def add(self, table: int, rows: RowColumns, is_own_N: Bools) -> None:
        """Put the next rows into the store, without those that are not ``is_own_N``.

        Metadata have the store's form.
        """
        ticks_N = np.zeros(len(rows), dtype=np.uint64)
        first, stop = self._num_come, self._num_come + int(is_own_N.sum())
        self._num_come = stop
        ticks_N[is_own_N] = self._ticks[first:stop]
        slots_N = _add(self._store, table, rows, ticks_N, _NONE_KEEP)
        self._slots[first:stop] = slots_N[is_own_N]
        self._ticks[first:stop] = ticks_N[is_own_N]

    def finish(self, tick: int) -> None:
        """Touch the rows in the order of their uses, when all have come.

        ``tick`` is the last request's before the checkpoint, as its server counted.
        """
        store = self._store
        for start in range(0, len(self._order), _TOUCHES):
            layouts_T = np.stack([state.layout for state in store.states])
            some = self._order[start : start + _TOUCHES]
            num_words = (1 + recency.MARK_WORDS) * len(some)
            store.rows.logs.make_room(store.rows.arenas.directory, num_words)
            _touch_rows(some, self._ticks, self._slots, self._tables, layouts_T)
        store.rows.tick = max(int(self._ticks.max(initial=0)), store.rows.tick, tick)
        store.rows.tally[memory.CHANGE] = memory.NO_CHANGE


def put_changes(
    store: EmbeddingStore, changes: Iterable[tuple[int, RowColumns]]
) -> Iterator[int]:
    """Write rows over those that are there, or make them; yield how many each time.

    The rows of a table come in the order in which they would leave, with metadata of
    the store's form. A use of 0 keeps the row's position.
    """
    last = np.array([store.rows.tick, 0, _NO_TABLE], dtype=np.uint64)
    for table, rows in changes:
        num = len(rows)
        ticks_N = np.empty(num, dtype=np.uint64)
        uses_N = read_only(rows.uses)
        if store.states[table].is_pinned:  # they are in no log
            ticks_N[:] = max(store.rows.tick, 1)
        else:
            tables_N = np.full(num, table, dtype=np.uint16)
            _draw_ticks(np.arange(num), uses_N, tables_N, last, ticks_N)
        with store.rows.changing():
            num_words = (1 + recency.MARK_WORDS) * num
            directory = store.rows.arenas.directory
            store.rows.logs.make_room(directory, num_words, store.rows.undo_log)
            _add(store, table, rows, ticks_N, uses_N == 0)
            store.rows.tick = int(last[0])
        yield num


def _add(
    store: EmbeddingStore, table: int, rows: RowColumns, ticks_N: Words, keeps_N: Bools
) -> Slots:
    """Write rows, and return their slots; see :func:`add_rows`."""
    columns = RowColumns(*map(np.ascontiguousarray, rows.columns()))
    slots_N = np.zeros(len(rows), dtype=np.uint32)
    state, ids_N = store.states[table], read_only(rows.ids)
    if state.is_pinned:
        require_room(state, ids_N[ticks_N != NEVER])
    store.rows.make_room(state.layout, len(rows))
    at = state.at
    if store.rows.tally[memory.CHANGE] == memory.LOAD:  # which is not undone
        at = state.layout, None
    add_rows(at, ids_N, columns.addresses(), ticks_N, keeps_N, slots_N)
    return slots_N


@compiled
def add_rows(
    table: TableAt,
    ids_N: Ids,
    columns: Words,
    ticks_N: Words,
    keeps_position_N: Bools,
    slots_N: Slots,
) -> None:
    """Write rows into slots; those whose tick is ``NEVER`` are skipped.

    A row that has come with the same or a later use gets the tick ``NEVER``, unless it
    is pinned.
    ``columns`` are addresses. Where ``keeps_position_N`` holds, a row that is there
    keeps its position in the order in which rows leave; the others are touched at once,
    for which the logs have room. If it is empty none is touched, and those that are
    written cannot leave until they are.
    """
    layout, log = table
    store = memory.changing_store_at(layout, memory.log_address(log))
    rows = memory.rows_at(store, layout)
    metadata, state, weights = columns[2], columns[3], columns[4]
    metadata_bytes = _16 if rows.has_metadata else np.uint64(0)
    all_ = np.arange(len(ids_N))
    for start in range(0, len(ids_N), loops.CHUNK):
        stop = min(start + loops.CHUNK, len(ids_N))
        index = loops.prepare_chunk(store, rows, ids_N, all_[start:stop])
        for n in range(start, stop):
            if ticks_N[n] == NEVER:
                continue
            slot, is_new = loops.find_or_make(
                store, index, rows, ids_N[n], recency.NO_TICK
            )
            slots_N[n] = np.uint32(slot)
            address, row = rows.base + slot * rows.stride, np.uint64(n)
            before = NEVER if is_new else memory.tick_at(address)
            if before >= ticks_N[n] and not rows.is_pinned:
                ticks_N[n] = NEVER
                continue
            if not is_new:
                memory.keep_row(store.log, address, rows.stride >> _S3)
            from_metadata = metadata + row * metadata_bytes
            cpu.copy_bytes(address + memory.FREQUENCY, from_metadata, metadata_bytes)
            from_state = state + row * rows.state_bytes
            cpu.copy_bytes(address + rows.state, from_state, rows.state_bytes)
            from_weights = weights + row * rows.weight_bytes
            cpu.copy_bytes(address + rows.weights, from_weights, rows.weight_bytes)
            keeps = len(keeps_position_N) > 0 and keeps_position_N[n] and not is_new
            tick = before if keeps else ticks_N[n]
            word = (rows.owner << memory.OWNER_SHIFT) | tick
            cpu.store_u64(address + memory.WORD, word)
            if len(keeps_position_N) and not keeps:
                _touch(store, rows, slot, tick)


@compiled
def _draw_ticks(
    order: Indices,
    uses_R: Words,
    tables_R: npt.NDArray[np.uint16],
    last: Words,
    ticks_R: Words,
) -> None:
    """Give rows of one request one tick, later requests later ones.

    A tick is that of the use, unless that is not later than all previous ones, or
    belongs to another table, as it may when rows come from several servers: in
    a log, a tick belongs to one arena. ``last`` is overwritten: the tick, the use and
    the table of the previous row.
    """
    tick, old, table = last[0], last[1], last[2]
    for r in order:
        of_row = uses_R[r] >> _POSITION_BITS
        if of_row != old or tables_R[r] != table:
            tick = max(tick + _ONE, of_row)
            old, table = of_row, np.uint64(tables_R[r])
        ticks_R[r] = tick
    last[0], last[1], last[2] = tick, old, table


@inlined
def _touch(store: StoreAt, rows: RowsAt, slot: np.uint64, tick: np.uint64) -> None:
    address, class_ = rows.base + slot * rows.stride, np.uint64(0)
    if len(store.logs) > 1:
        class_ = recency.classify(cpu.load_u32(address + memory.FREQUENCY))
    logs = np.uint64(store.logs.ctypes.data)
    recency.touch(logs, class_, rows, address, slot, tick)


@compiled
def _touch_rows(
    order: Indices,
    ticks_R: Words,
    slots_R: Numbers,
    tables_R: npt.NDArray[np.uint16],
    layouts_T: Layout,
) -> None:
    store = memory.store_at(layouts_T[0])
    for r in order:
        if ticks_R[r] != NEVER:
            rows = memory.rows_at(store, layouts_T[tables_R[r]])
            _touch(store, rows, np.uint64(slots_R[r]), ticks_R[r])
