"""Copy all rows out of a store that goes on being used, a few slots at a time.

A row never moves while it lives, so that a walk over the slots meets it once:

    slots of an arena    [ copied ......... | next slice | ........... ] made since
                                            ^ now                      ^ at the start

What is promised: every row that lives from the first slice to the last is copied once,
whole, as it was at one moment in between. A row that is made meanwhile, or evicted and
made again, may be there once, twice (the later use is the valid one), or not at all.

The store's thread only copies memory, in large pieces; :func:`split_by_table` makes
columns of it, in whichever thread wants to write them.

Dimension key:
    N: slots of a chunk
    T: tables
    K: rows of one table in a chunk
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled
from persia_torchrec.store.memory import copy_bytes, load_word, unowned
from persia_torchrec.store.row_columns import (
    PLACE_BITS,
    RowColumns,
    RowShape,
)
from persia_torchrec.store.rows import (
    DIM,
    DTYPE,
    FP32,
    FREQUENCY,
    HAS_METADATA,
    NUM_STATE,
    OWNER_SHIFT,
    STATE,
    TICK_MASK,
    USED,
    WEIGHTS,
    WORD,
    Layout,
    Words,
)
from persia_torchrec.store.shard_memory import ShardMemory
from persia_torchrec.store.use_order import Numbers, UseOrder

_CHUNK_BYTES = 2**20
_SLICE_BYTES = 2**18
_SLICE_RECORDS = 4096
_LARGEST_PLACE = np.uint32(2**PLACE_BITS - 1)
_PLACE_BITS = np.uint64(PLACE_BITS)


@dataclass(frozen=True, slots=True)
class ExportedTable:
    """A table as it was when the export began.

    Attributes:
        name: of the table.
        layout: where the parts of its rows stand in a slot.
        shape: of its columns.
    """

    name: str
    layout: Layout
    shape: RowShape


@dataclass(frozen=True, slots=True)
class RawRows:
    """Slots of an arena as they stood, used and free ones.

    Attributes:
        words: uint64 ``(N, words a row)``.
        places: uint32 ``(N,)``, the place of each in the request that used it last.
    """

    words: Words
    places: Numbers


class RowExport:
    """A walk over all rows. The store's thread owns it; the store must not be cleared.

    Args:
        memory: of the store.

    Attributes:
        tables: those that are exported, in the order of their numbers.
    """

    def __init__(self, memory: ShardMemory) -> None:
        self.tables = [
            ExportedTable(
                state.spec.name,
                state.layout,
                RowShape.of(state.spec, has_metadata=bool(state.layout[HAS_METADATA])),
            )
            for state in memory.tables.states
        ]
        self._arenas = list(memory.tables.arenas)
        self._num_used = memory.tables.directory[:, USED].astype(np.int64).tolist()
        self._order = UseOrder(memory.logs, memory.tables.directory.copy())
        self._orders = True
        self._arena = self._slot = self._num_copied = 0
        self._chunk: RawRows | None = None
        self._skip_empty_arenas()

    @property
    def is_done(self) -> bool:
        """Whether all slots have been copied."""
        return self._arena == len(self._arenas)

    @property
    def progress(self) -> float:
        """Return which part of the slots has been copied, in [0, 1]."""
        return self._num_copied / max(sum(self._num_used), 1)

    def advance(self) -> RawRows | None:
        """Do a slice of the work, some tens of microseconds.

        Returns:
            About 1 MiB of slots when they are copied; None before that.
        """
        if self._orders:
            self._orders = self._order.advance(_SLICE_RECORDS)
            return None
        if self.is_done:
            return None
        words = self._arenas[self._arena].words
        num_used = self._num_used[self._arena]
        row_bytes = words.shape[1] * 8
        if self._chunk is None:
            num_rows = min(max(_CHUNK_BYTES // row_bytes, 1), num_used - self._slot)
            self._first = self._slot
            self._chunk = RawRows(
                np.empty((num_rows, words.shape[1]), dtype=np.uint64),
                np.empty(num_rows, dtype=np.uint32),
            )
        chunk, begin = self._chunk, self._slot - self._first
        num = min(max(_SLICE_BYTES // row_bytes, 1), len(chunk.words) - begin)
        stop = self._slot + num
        chunk.words[begin : begin + num] = words[self._slot : stop]
        places = self._order.places(self._arena, self._slot, stop)
        chunk.places[begin : begin + num] = places
        self._slot = stop
        self._num_copied += num
        if begin + num < len(chunk.words):
            return None
        self._chunk = None
        if self._slot == num_used:
            self._arena, self._slot = self._arena + 1, 0
            self._skip_empty_arenas()
        return chunk

    def _skip_empty_arenas(self) -> None:
        while not self.is_done and self._num_used[self._arena] == 0:
            self._arena += 1


def split_by_table(
    chunk: RawRows, tables: list[ExportedTable]
) -> list[tuple[int, RowColumns]]:
    """Return the rows of a chunk as columns, with the numbers of their tables.

    Any thread may call it; it holds the interpreter for moments only.

    Args:
        chunk: what :meth:`RowExport.advance` returned; not changed.
        tables: of the export. Rows of tables that came later are left out.
    """
    offsets, order = _group(chunk.words, len(tables))
    split = []
    for number in np.flatnonzero(np.diff(offsets)).tolist():
        slots_K = order[offsets[number] : offsets[number + 1]]
        rows = tables[number].shape.empty(len(slots_K))
        copy_columns(
            *(chunk.words, chunk.places[slots_K], slots_K, tables[number].layout),
            *(rows.ids, rows.uses, rows.metadata, rows.state),
            rows.weights.view(np.uint8),
        )
        split.append((number, rows))
    return split


@compiled
def _group(
    words_NW: Words, num_tables: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort slots by table, free ones left out: where each table begins, the slots."""
    offsets = np.zeros(num_tables + 1, dtype=np.int64)
    for n in range(len(words_NW)):
        owner = np.int64(words_NW[n, 1] >> OWNER_SHIFT)
        if 1 <= owner <= num_tables:
            offsets[owner] += 1
    for t in range(num_tables):
        offsets[t + 1] += offsets[t]
    order = np.empty(offsets[num_tables], dtype=np.int64)
    cursor = offsets[:num_tables].copy()
    for n in range(len(words_NW)):
        owner = np.int64(words_NW[n, 1] >> OWNER_SHIFT)
        if 1 <= owner <= num_tables:
            order[cursor[owner - 1]] = n
            cursor[owner - 1] += 1
    return offsets, order


@compiled
def copy_columns(
    words_NW: Words,
    places_K: Numbers,
    slots_K: npt.NDArray[np.int64],
    layout: Layout,
    ids_K: Words,
    uses_K: Words,
    metadata: Numbers,
    state: npt.NDArray[np.float32],
    weights: npt.NDArray[np.uint8],
) -> None:
    """Copy rows of one table, each part into its column.

    Args:
        words_NW: uint64 ``(N, words a row)``, slots.
        places_K: uint32 ``(K,)``, the place of each row in its last request.
        slots_K: int64 ``(K,)``, which slots.
        layout: of the table's rows.
        ids_K: uint64 ``(K,)``, overwritten, as all that follow: see ``RowColumns``.
        uses_K: uint64 ``(K,)``.
        metadata: uint32 ``(K, 4)`` or ``(K, 0)``.
        state: float32 ``(K, S)``.
        weights: the bytes of the column of weights.
    """
    words_NW = unowned(words_NW)
    stride = np.uint64(8 * words_NW.shape[1])
    base = np.uint64(words_NW.ctypes.data)
    size = 4 if layout[DTYPE] == FP32 else 2
    weight_bytes = np.uint64(layout[DIM] * size)
    state_bytes = np.uint64(4 * layout[NUM_STATE])
    metadata_bytes = np.uint64(16 if layout[HAS_METADATA] else 0)
    from_weights, from_state = (
        np.uint64(4 * layout[WEIGHTS]),
        np.uint64(4 * layout[STATE]),
    )
    to_weights, to_state = np.uint64(weights.ctypes.data), np.uint64(state.ctypes.data)
    to_metadata = np.uint64(metadata.ctypes.data)
    for k in range(len(slots_K)):
        address = base + np.uint64(slots_K[k]) * stride
        ids_K[k] = load_word(address)
        place = np.uint64(min(places_K[k], _LARGEST_PLACE))
        tick = load_word(address + WORD) & TICK_MASK
        uses_K[k] = (tick << _PLACE_BITS) | place
        row = np.uint64(k)
        copy_bytes(
            to_metadata + row * metadata_bytes, address + FREQUENCY, metadata_bytes
        )
        copy_bytes(to_state + row * state_bytes, address + from_state, state_bytes)
        copy_bytes(
            to_weights + row * weight_bytes, address + from_weights, weight_bytes
        )
