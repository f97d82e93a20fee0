"""The package's slot map as prototypes of the benchmark ``cache`` use it; their loops.

Dimension key: L ids of a batch, T tables, P servers, C slots, W floats a row, N rows
that miss or leave.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats, Ids, Offsets, Positions
from persia_torchrec.cache.slot_map import Moves, SlotMap
from persia_torchrec.jit.compiled import compiled
from persia_torchrec.routing.route import (
    FeatureColumns,
    IdGroup,
    Route,
    route_features,
)


class Moved(NamedTuple):
    """Rows that miss, or leave, by server and then table; room for L of them.

    Attributes:
        ids, slots: uint64, int32.
        segments: int64 ``(P, T, 2)``: the table's number there, how many rows.
        offsets: int64 ``(P + 1,)``: where those of a server begin.
    """

    ids: Ids
    slots: Positions
    segments: Offsets
    offsets: Offsets


class Router:
    """Routes batches of one id a sample for each table."""

    def __init__(self, tables: tuple[str, ...], num_servers: int) -> None:
        self.tables, self._num_servers = tables, num_servers
        numbers = np.arange(len(tables), dtype=np.uint64)
        zeros = np.zeros(len(tables), dtype=np.uint64)
        self._columns = FeatureColumns(numbers, numbers, zeros, zeros, zeros, zeros)
        self._groups, self._shared = zeros.astype(np.int64), zeros

    def route(
        self, ids_L: Ids, starts_T: Offsets | None = None
    ) -> tuple[Route, IdGroup, Counts]:
        """Return the unique ids, by server and table, and how often each comes."""
        if starts_T is None:
            num_samples = len(ids_L) // len(self.tables)
            starts_T = np.arange(len(self.tables) + 1) * num_samples
        given = self._columns, self._groups, self._shared, self._num_servers
        route = route_features(ids_L, starts_T, *given)
        [group], [counts_U] = route.by_group([self.tables])
        return route, group, counts_U


class Planner:
    """Gives ids of batches slots, and says which rows come and leave.

    Attributes:
        num_unique: unique ids of the latest batch.
    """

    def __init__(
        self, num_slots: int, tables: tuple[str, ...], num_servers: int
    ) -> None:
        self.slots = SlotMap(num_slots, tables, num_servers)
        self._router = Router(tables, num_servers)
        self._flights = deque[tuple[int, Positions]]()
        self.num_unique = 0

    def plan(
        self,
        ids_L: Ids,
        at: tuple[int, int],
        slots_L: Positions,
        missed: Moved,
        left: Moved,
    ) -> bool:
        """Give each id a slot; tell which rows miss and leave; False: there is no room.

        Each table has as many of the ids, one after the other. ``at`` is the number of
        the batch, and of the first one that has not been trained: slots that it or a
        later one needs are not given away.
        """
        step, oldest = at
        while self._flights and self._flights[0][0] < oldest:
            self.slots.release(self._flights.popleft()[1], trained=True)
        route, group, counts_U = self._router.route(ids_L)
        assigned = self.slots.assign(group, counts_U)
        if assigned is None:
            return False
        self._flights.append((step, assigned.slots))
        self.num_unique = len(group.ids)
        _write(assigned.missed, missed)
        _write(assigned.left, left)
        spread(assigned.slots, route.inverse, slots_L)
        return True

    def rows(self) -> list[tuple[Ids, Positions]]:
        """Return the ids of each table that are in slots, and which."""
        moves = self.slots.rows()
        found = []
        for t in range(len(self.slots.tables)):
            pieces = [slice(*piece) for piece in moves.group.ranges_of(t)]
            ids = [moves.group.ids[piece] for piece in pieces]
            slots = [moves.slots[piece] for piece in pieces]
            found.append((np.concatenate(ids), np.concatenate(slots)))
        return found


def _write(moves: Moves, out: Moved) -> None:
    num = len(moves.slots)
    out.ids[:num], out.slots[:num] = moves.group.ids, moves.slots
    out.segments[..., 1], out.offsets[:] = moves.group.num_ids, moves.group.offsets


@compiled
def spread(slots_U: Positions, inverse_L: Positions, out_L: Positions) -> None:
    """Give each id the slot of its row."""
    for i in range(len(inverse_L)):
        out_L[i] = slots_U[inverse_L[i]]


@compiled
def gather(rows_CW: Floats, slots_N: Positions, out_NW: Floats) -> None:
    """Copy rows of slots."""
    for n in range(len(slots_N)):
        slot = np.int64(slots_N[n])
        for w in range(rows_CW.shape[1]):
            out_NW[n, w] = rows_CW[slot, w]


@compiled
def scatter(rows_NW: Floats, slots_N: Positions, rows_CW: Floats) -> None:
    """Copy rows to slots."""
    for n in range(len(slots_N)):
        slot = np.int64(slots_N[n])
        for w in range(rows_CW.shape[1]):
            rows_CW[slot, w] = rows_NW[n, w]


@compiled
def copy(numbers: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Copy numbers, ids or slots, without Python's lock."""
    for n in range(len(out)):
        out[n] = numbers[n]


@compiled
def train(slots_L: Positions, rows_CW: Floats) -> None:
    """Subtract 1 from each weight of a row for each id, and add 1 to its state."""
    last = rows_CW.shape[1] - 1
    for n in range(len(slots_L)):
        slot = np.int64(slots_L[n])
        for d in range(last):
            rows_CW[slot, d] -= np.float32(1)
        rows_CW[slot, last] += np.float32(1)
