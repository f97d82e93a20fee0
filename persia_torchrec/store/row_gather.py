"""Copy the rows of some ids out of a store: what has changed since a while.

Dimension key:
    N: ids that are asked for
    K: those that have a row
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.store.lookup import MISSING, Ids, find_slots
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.store.row_export import copy_columns
from persia_torchrec.store.rows import ARENA, HAS_METADATA
from persia_torchrec.store.shard_memory import ShardMemory

Bools = npt.NDArray[np.bool_]


def gather_rows(
    memory: ShardMemory, table: int, ids_N: Ids
) -> tuple[RowColumns, Bools]:
    """Copy the rows of ids as they are now; whoever owns the store calls it.

    Args:
        memory: of the store; not changed, and nothing is counted.
        table: number of the table.
        ids_N: uint64 ``(N,)``, read-only.

    Returns:
        The rows of those ids that have one, in their order; their uses are not looked
        up, and hold no meaning. And for each id whether it has a row, ``(N,)``.
    """
    state = memory.tables.states[table]
    slots_N = find_slots(ids_N, *memory.rows(state)[1:], state.layout)
    found_N = slots_N != MISSING
    slots_K = slots_N[found_N].astype(np.int64)
    has_metadata = bool(state.layout[HAS_METADATA])
    rows = RowShape.of(state.spec, has_metadata=has_metadata).empty(len(slots_K))
    words = memory.tables.arenas[state.layout[ARENA]].words
    copy_columns(
        *(words, np.zeros(len(slots_K), np.uint32), slots_K, state.layout),
        *(rows.ids, rows.uses, rows.metadata, rows.state),
        rows.weights.view(np.uint8),
    )
    return rows, found_N
