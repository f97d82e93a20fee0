"""Put rows into a store that have changed in another one, so that both stay alike.

Rows come in the order in which they would leave. Each is touched as it is written, so
that a store which is full for a while, as it has not heard yet of rows that have left
there, lets go of what leaves there too. A row that has changed without having been
used keeps its place in the order.

Dimension key:
    N: rows of one call
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.store.lookup import TICK
from persia_torchrec.store.recency import MARK_WORDS
from persia_torchrec.store.row_columns import PLACE_BITS, RowColumns
from persia_torchrec.store.row_import import add_rows
from persia_torchrec.store.shard_memory import ShardMemory

Ticks = npt.NDArray[np.uint64]

_PLACE_BITS = np.uint64(PLACE_BITS)


class RowChanges:
    """Changed rows on their way into a store. Whoever owns the store calls it.

    Args:
        memory: of the store.
        capacity_rows: of the store.
    """

    def __init__(self, memory: ShardMemory, capacity_rows: int) -> None:
        self._memory = memory
        self._capacity_rows = capacity_rows
        self._table = -1
        # The last tick that was given, and of which request of the other store.
        self._last = np.array([memory.tally[TICK], 0], dtype=np.uint64)

    def put(self, table: int, rows: RowColumns) -> None:
        """Write rows of one table over those that are there, or make them.

        Args:
            table: number of the table.
            rows: in the order in which they would leave; their metadata have the
                store's form. A use of 0 keeps the row's place.
        """
        memory = self._memory
        state = memory.tables.states[table]
        ticks_N = np.empty(len(rows), dtype=np.uint64)
        _draw_ticks(read_only(rows.uses), table != self._table, self._last, ticks_N)
        self._table = table
        _, lines, cursor, directory = memory.rows(state)
        memory.logs.make_room(directory, (1 + MARK_WORDS) * len(rows))
        keeps_place_N = rows.uses == 0
        slots_N = np.empty(len(rows), dtype=np.uint32)
        add_rows(
            *(read_only(rows.ids), ticks_N, keeps_place_N, read_only(rows.metadata)),
            *(read_only(rows.state), read_only(rows.weights).view(np.uint8), slots_N),
            *(lines, cursor, directory, memory.logs.directory),
            *(memory.tally, state.layout, self._capacity_rows),
        )
        memory.tally[TICK] = self._last[0]

    def finish(self, tick: int) -> None:
        """Go on counting requests from where the other store was.

        Args:
            tick: of its last request.
        """
        self._memory.tally[TICK] = max(int(self._memory.tally[TICK]), tick)


@compiled
def _draw_ticks(
    uses_N: Ticks, is_other_table: bool, last: Ticks, ticks_N: Ticks
) -> None:
    """Give rows of one request one tick, the next ones later ones.

    A tick is the other store's where that is later than all of this one. In a log, a
    tick belongs to one arena: rows of another table get another.
    """
    tick, old = last[0], last[1]
    begins = is_other_table
    for n in range(len(uses_N)):
        of_row = uses_N[n] >> _PLACE_BITS
        if begins or of_row != old:
            tick = max(tick + np.uint64(1), of_row)
            old, begins = of_row, False
        ticks_N[n] = tick
    last[0], last[1] = tick, old
