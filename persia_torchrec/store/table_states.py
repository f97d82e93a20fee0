"""Make, open and change the states of a store's tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from persia_torchrec.embedding.usage import Doubles
from persia_torchrec.errors import StoreError
from persia_torchrec.store import memory
from persia_torchrec.store.memory import Words
from persia_torchrec.store.table import PublishedTable, TableState
from persia_torchrec.store.table_blocks import Blocks
from persia_torchrec.store.table_shared import SharedRows
from persia_torchrec.table import TableSpec

if TYPE_CHECKING:
    from persia_torchrec.store.embedding_store import EmbeddingStore

_NO_WORDS: Words = np.empty(0, dtype=np.uint64)


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
    return _build(store, known, layout, remembered, thresholds)


def change(store: "EmbeddingStore", state: TableState, spec: TableSpec) -> TableState:
    """Return the state of a known table under new settings."""
    engine = store.engine_choice.choose(spec)
    state.require_same_rows(spec, is_lfu=store.is_lfu)
    counts_on, remembered = state.counts_as(spec), state.remembered
    if remembered.size != spec.admission.num_memory_words() or not counts_on:
        remembered = _allocate(store, spec.admission.num_memory_words())
        if counts_on:
            spec.admission.remember(remembered, state.sightings())
    return state.changed(spec, engine, remembered)


def link(states: Sequence[TableState]) -> None:
    """Let each table find its parts."""
    known = {state.spec.name: state for state in states}

    def part(spec: TableSpec) -> TableState:
        state = known.get(spec.name)
        fits = state and state.spec.describe_rows() == spec.describe_rows()
        memory.require_sound(fits, "tables")
        return known[spec.name]

    for state in states:
        shared = state.spec.table_of_shared_rows
        state.shared = None if shared is None else SharedRows(state, part(shared))
        blocks = [part(spec) for spec in state.spec.tables_of_blocks()]
        state.blocks = Blocks(state, blocks) if blocks else None


def _build(
    store: "EmbeddingStore",
    spec: TableSpec,
    layout: memory.Layout,
    remembered: Words,
    thresholds: Doubles,
) -> TableState:
    number = int(layout[memory.OWNER]) - 1
    layout[memory.STORE] = store.addresses.ctypes.data
    at = layout, None if store.recovery is None else store.recovery.log
    return TableState(
        spec,
        at,
        store.engine_choice.choose(spec),
        step=store.steps[number : number + 1],
        remembered=remembered,
        thresholds=thresholds,
    )


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
