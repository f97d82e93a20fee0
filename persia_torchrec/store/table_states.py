"""Make, open and change the states of a store's tables, and free those of dropped ones.

A table is dropped when that is published. Its state stays in its place, so that no
other table gets its number, and its rows, which nothing reads any more, are freed some
slots at a time: each slice is a change of its own. A process that opens the memory file
of a killed one frees the rest.
"""

from collections.abc import Sequence

import numpy as np

from persia_torchrec.arrays import Doubles, Words
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory_file import PublishedTable
from persia_torchrec.store.store_rows import StoreRows
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.store.table_blocks import TableOfBlocks
from persia_torchrec.store.table_shared import TableOfSharedRows
from persia_torchrec.table import TableSpec, names_of_shared

_NO_WORDS: Words = np.empty(0, dtype=np.uint64)
_MAX_SLOTS = 2**15  # that are looked at for rows of a dropped table at a time


def make(rows: StoreRows, spec: TableSpec, number: int) -> TableState:
    """Return the state of a new table; add an arena if none has its width."""
    if number >= memory.MAX_TABLES:
        raise StoreError(f"A server holds at most {memory.MAX_TABLES} tables.")
    has_metadata = spec.has_metadata or rows.is_lfu
    layout = memory.build_layout(spec, number, has_metadata=has_metadata)
    num_bytes = int(layout[memory.STATE]) + 4 * spec.num_row_floats
    width = (num_bytes + 7) // 8
    widths = [words.shape[1] for words in rows.arenas.words]
    if width not in widths:
        rows.arenas.add(width)
        widths.append(width)
    layout[memory.ARENA] = widths.index(width)
    thresholds = _NO_WORDS.view(np.float64)
    if spec.dynamic.is_on:
        thresholds = _allocate(rows, spec.dynamic.blocks).view(np.float64)
        thresholds[:] = spec.dynamic.first_thresholds()
    remembered = _allocate(rows, spec.admission.num_memory_words())
    return _build(rows, spec, layout, remembered, thresholds)


def open_published(rows: StoreRows, table: PublishedTable, number: int) -> TableState:
    """Return the state of a table that :meth:`TableState.describe` described."""
    known = TableSpec.from_json(table.spec)
    has_metadata = known.has_metadata or rows.is_lfu
    layout = memory.build_layout(known, number, has_metadata=has_metadata)
    table.require_fits(layout, [words.shape[1] for words in rows.arenas.words])
    layout[memory.ARENA] = table.arena
    remembered = _find(rows, table.remembered, known.admission.num_memory_words())
    num_thresholds = known.dynamic.blocks if known.dynamic.is_on else 0
    thresholds = _find(rows, table.thresholds, num_thresholds).view(np.float64)
    memory.require_sound(number < memory.MAX_TABLES, "tables")
    state = _build(rows, known, layout, remembered, thresholds)
    if table.is_dropped:
        forget(state)
    return state


def change(state: TableState, spec: TableSpec) -> TableState:
    """Return the state of a known table under new settings."""
    rows, known, remembered = state.rows, state.spec, state.remembered
    present, received = state.describe_both(spec)
    if present != received:
        raise ConfigError(
            f"Table {spec.name!r} has {present} on this server. Received: {received}. "
            "Give it the optimizer and the types that it was trained with, use another "
            f"table name, or drop it first: client.drop_table({spec.name!r})."
        )
    is_same = (spec.admission, spec.seed) == (known.admission, known.seed)
    counts_on = is_same or spec.admission.counts_as(known.admission)
    if remembered.size != spec.admission.num_memory_words() or not counts_on:
        remembered = _allocate(rows, spec.admission.num_memory_words())
        if counts_on:
            spec.admission.remember(remembered, state.sightings())
    return _build(rows, spec, state.layout.copy(), remembered, state.thresholds)


def free_rows(state: TableState, start: int, max_rows: int) -> int | None:
    """Free some rows of a dropped table from a slot on; return where others may be."""
    rows, tally, layout = state.rows, state.rows.tally, state.layout
    num_used = rows.num_used(layout)
    slots_N = np.empty(max_rows, dtype=np.uint32)
    stop = min(start + _MAX_SLOTS, num_used)
    num, next_slot = loops.find_rows(layout, start, stop, slots_N)
    with rows.changing():
        ids_N = rows.arena(layout)[slots_N[:num], 0]
        rows.make_room_to_keep(num)
        room = tally[memory.LEFT_ROOM]
        tally[memory.LEFT_ROOM] = 0  # it is not told that each of them has left
        loops.remove_ids(state.at, read_only(ids_N))
        tally[memory.LEFT_ROOM] = room
    return next_slot if next_slot < num_used else None


def link(all_states: Sequence[TableState]) -> None:
    """Let each table find its parts, and dropped ones none."""
    states = [state for state in all_states if not state.is_dropped]
    known = {state.spec.name: state for state in states}

    def part(spec: TableSpec) -> TableState:
        state = known.get(spec.name)
        fits = state and state.spec.describe_rows() == spec.describe_rows()
        memory.require_sound(fits, "tables")
        return known[spec.name]

    for state in states:
        if parts := state.spec.parts():
            state.link([part(spec) for spec in parts])
    dropped = [state for state in all_states if state.is_dropped]
    shared_rows = names_of_shared(state.spec for state in dropped)
    for state in dropped:
        state.layout[memory.PINNED] = state.spec.name in shared_rows


def forget(state: TableState) -> None:
    """Forget what the admission of a table that was dropped remembers."""
    state.is_dropped, state.admission = True, None
    if state.remembered.size:
        [state.remembered] = state.rows.memory.emptied(state.remembered)


def _build(
    rows: StoreRows,
    spec: TableSpec,
    layout: memory.Layout,
    remembered: Words,
    thresholds: Doubles,
) -> TableState:
    if rows.engine is not None:
        rows.engine.require_kernel(spec)
    number = int(layout[memory.OWNER]) - 1
    layout[memory.STORE] = rows.addresses.ctypes.data
    step = rows.steps[number : number + 1]
    return _kind_of(spec)(
        spec, rows, layout, step=step, remembered=remembered, thresholds=thresholds
    )


def _kind_of(spec: TableSpec) -> type[TableState]:
    """Return the kind of table that settings ask for."""
    if spec.shared_rows:
        return TableOfSharedRows
    return TableOfBlocks if spec.dynamic.is_on else TableState


def _find(rows: StoreRows, distance: int, num_words: int) -> Words:
    """Return words that were reserved, by their distance from the steps."""
    words = _NO_WORDS
    if distance:
        words = rows.memory.find(memory.address_at(rows.steps, distance))
    memory.require_sound(words.size >= num_words, "tables")
    return words[:num_words]


def _allocate(rows: StoreRows, num_words: int) -> Words:
    """Reserve zeroed words, all of them allocated."""
    [words] = rows.memory.reserve(num_words)
    if words.size:
        rows.memory.commit(words, words.size)
    return words
