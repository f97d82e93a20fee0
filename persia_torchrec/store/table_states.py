"""Make, open, change and drop the states of a store's tables.

A table is dropped when that is published. Its state stays in its place, so that no
other table gets its number, and its rows, which nothing reads any more, are freed some
slots at a time: each slice is a change of its own. A process that opens the memory file
of a killed one frees the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.embedding.usage import Doubles
from persia_torchrec.errors import StoreError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.store import loops, memory
from persia_torchrec.store.memory import Words
from persia_torchrec.store.stored_table import PublishedTable, TableState
from persia_torchrec.store.table_blocks import TableOfBlocks
from persia_torchrec.store.table_shared import TableOfSharedRows
from persia_torchrec.store.transaction import KEPT_BYTES
from persia_torchrec.table import TableSpec, names_of_shared

if TYPE_CHECKING:
    from persia_torchrec.store.embedding_store import EmbeddingStore

_NO_WORDS: Words = np.empty(0, dtype=np.uint64)
_MAX_SLOTS = 2**15  # that are looked at for rows of a dropped table at a time


def make(store: "EmbeddingStore", spec: TableSpec, number: int) -> TableState:
    """Return the state of a new table; add an arena if none has its width."""
    if number >= memory.MAX_TABLES:
        raise StoreError(f"A server holds at most {memory.MAX_TABLES} tables.")
    has_metadata = spec.has_metadata or store.is_lfu
    layout = memory.build_layout(spec, number, has_metadata=has_metadata)
    num_bytes = int(layout[memory.STATE]) + 4 * spec.num_row_floats
    width = (num_bytes + 7) // 8
    widths = [words.shape[1] for words in store.arenas.words]
    if width not in widths:
        store.arenas.add(width)
        widths.append(width)
    layout[memory.ARENA] = widths.index(width)
    thresholds = _NO_WORDS.view(np.float64)
    if spec.dynamic.is_on:
        thresholds = _allocate(store, spec.dynamic.blocks).view(np.float64)
        thresholds[:] = spec.dynamic.first_thresholds()
    remembered = _allocate(store, spec.admission.num_memory_words())
    return _build(store, spec, layout, remembered, thresholds)


def open_published(store: "EmbeddingStore", table: PublishedTable) -> TableState:
    """Return the state of a table that :meth:`EmbeddingStore.publish` described."""
    known, number = TableSpec.from_json(table.spec), len(store.states)
    has_metadata = known.has_metadata or store.is_lfu
    layout = memory.build_layout(known, number, has_metadata=has_metadata)
    table.require_fits(layout, [words.shape[1] for words in store.arenas.words])
    layout[memory.ARENA] = table.arena
    remembered = _find(store, table.remembered, known.admission.num_memory_words())
    num_thresholds = known.dynamic.blocks if known.dynamic.is_on else 0
    thresholds = _find(store, table.thresholds, num_thresholds).view(np.float64)
    memory.require_sound(number < memory.MAX_TABLES, "tables")
    state = _build(store, known, layout, remembered, thresholds)
    if table.is_dropped:
        state.is_dropped = True
        _forget(store, state)
    return state


def change(store: "EmbeddingStore", state: TableState, spec: TableSpec) -> TableState:
    """Return the state of a known table under new settings."""
    _require_kernel(store, spec)
    state.require_same_rows(spec, is_lfu=store.is_lfu)
    counts_on, remembered = state.counts_as(spec), state.remembered
    if remembered.size != spec.admission.num_memory_words() or not counts_on:
        remembered = _allocate(store, spec.admission.num_memory_words())
        if counts_on:
            spec.admission.remember(remembered, state.sightings())
    return _kind_of(spec)(
        spec,
        (state.layout.copy(), state.at[1]),
        store.engine,
        step=state.step,
        remembered=remembered,
        thresholds=state.thresholds,
    )


def drop(store: "EmbeddingStore", numbers: Sequence[int]) -> None:
    """Drop tables, and their parts: at once, all or nothing.

    Their numbers are never used again, their names may be. ``EmbeddingStore.sweep``
    frees their rows.
    """
    states = [store.states[number] for number in numbers]
    parts = {part.name for state in states for part in state.spec.parts()}
    states += [s for s in store.present if s.spec.name in parts and s not in states]
    for state in states:
        store.journal.dropping(state.number)
        state.is_dropped = True
    try:
        store.publish(store.states)
    except BaseException:
        for state in states:
            state.is_dropped = False
        raise
    store.journal.dropped([state.spec.name for state in states])
    for state in states:
        _forget(store, state)
    store.forget_groups()
    link(store)


def free_rows(store: "EmbeddingStore", max_rows: int) -> bool:
    """Free some rows of dropped tables; return False if none are left."""
    number, start = next(iter(store.leaving.items()))
    state, tally = store.states[number], store.tally
    arena = int(state.layout[memory.ARENA])
    num_used = int(store.arenas.directory[arena, memory.USED])
    slots_N = np.empty(max_rows, dtype=np.uint32)
    stop = min(start + _MAX_SLOTS, num_used)
    num, next_slot = loops.find_rows(state.layout, start, stop, slots_N)
    with store.changing():
        ids_N = store.arena(state)[slots_N[:num], 0]
        if store.undo_log is not None:
            row_bytes = store.arena(state).strides[0] + KEPT_BYTES
            store.undo_log.make_room(num * row_bytes)
        room = tally[memory.LEFT_ROOM]
        tally[memory.LEFT_ROOM] = 0  # it is not told that each of them has left
        loops.remove_ids(state.at, read_only(ids_N))
        tally[memory.LEFT_ROOM] = room
    store.leaving[number] = next_slot
    if next_slot >= num_used:
        del store.leaving[number]
    return bool(store.leaving)


def copy_tables(store: "EmbeddingStore", of: "EmbeddingStore") -> None:
    """Give an empty store the tables of another one, with their numbers."""
    for number, other in enumerate(of.states):
        store.states.append(make(store, other.spec, number))
        store.states[-1].is_dropped = other.is_dropped
    store.publish(store.states)
    link(store)


def link(store: "EmbeddingStore") -> None:
    """Let each table find its parts, and dropped ones none."""
    states = store.present
    known = {state.spec.name: state for state in states}

    def part(spec: TableSpec) -> TableState:
        state = known.get(spec.name)
        fits = state and state.spec.describe_rows() == spec.describe_rows()
        memory.require_sound(fits, "tables")
        return known[spec.name]

    for state in states:
        state.link([part(spec) for spec in state.spec.parts()])
    dropped = [state for state in store.states if state.is_dropped]
    shared_rows = names_of_shared(state.spec for state in dropped)
    for state in dropped:
        state.layout[memory.PINNED] = state.spec.name in shared_rows


def _forget(store: "EmbeddingStore", state: TableState) -> None:
    """Forget what a dropped table's admission remembers, and have its rows freed."""
    store.leaving[state.number] = 0
    state.admission = None
    if state.remembered.size:
        [state.remembered] = store.memory.emptied(state.remembered)


def _build(
    store: "EmbeddingStore",
    spec: TableSpec,
    layout: memory.Layout,
    remembered: Words,
    thresholds: Doubles,
) -> TableState:
    _require_kernel(store, spec)
    number = int(layout[memory.OWNER]) - 1
    layout[memory.STORE] = store.addresses.ctypes.data
    at = layout, None if store.undo_log is None else store.undo_log.log
    return _kind_of(spec)(
        spec,
        at,
        store.engine,
        step=store.steps[number : number + 1],
        remembered=remembered,
        thresholds=thresholds,
    )


def _require_kernel(store: "EmbeddingStore", spec: TableSpec) -> None:
    """Raise ConfigError for a table that the chosen engine cannot update."""
    if store.engine is not None:
        store.engine.require_kernel(spec)


def _kind_of(spec: TableSpec) -> type[TableState]:
    """Return the kind of table that settings ask for."""
    if spec.shared_rows:
        return TableOfSharedRows
    return TableOfBlocks if spec.dynamic.is_on else TableState


def _find(store: "EmbeddingStore", distance: int, num_words: int) -> Words:
    """Return words that were reserved, by their distance from the steps."""
    words = _NO_WORDS
    if distance:
        words = store.memory.find(memory.address_at(store.steps, distance))
    memory.require_sound(words.size >= num_words, "tables")
    return words[:num_words]


def _allocate(store: "EmbeddingStore", num_words: int) -> Words:
    """Reserve zeroed words, all of them allocated."""
    [words] = store.memory.reserve(num_words)
    if words.size:
        store.memory.commit(words, words.size)
    return words
