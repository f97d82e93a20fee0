"""The tables of a request, which are looked up, and updated, at once.

One compiled loop looks all of them up, one for each optimizer updates them, where each
id has one row of each table; other tables are used one after the other.

    ids     table 0 ..... | table 1 .. | table 2 .........
    starts  0             | 5          | 8                 | 17
    loops   Adagrad ................... | Adam ............
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Ids, Slots, Starts
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.store import memory
from persia_torchrec.store.store_rows import NOTHING_MISSED, StoreRows, Transaction
from persia_torchrec.store.stored_table import PlainTables, TableState
from persia_torchrec.store.undo_log import ROW_BYTES

_NO_SLOTS = np.empty(0, dtype=np.uint32)
_NO_VALUES = np.empty(0, dtype=np.float32)


class GroupUpdate(NamedTuple):
    """A loop that updates tables of a group which stand side by side.

    ``is_alike``: whether all of them have the same settings.
    """

    loop: Callable[..., None]
    begin: int
    end: int
    is_alike: bool


class TableGroup:
    """The tables of a request, in its order, which a loop takes at once.

    Attributes:
        states: of the T tables.
        numbers: theirs in the store, int64 ``(T,)``.
        at: what loops take.
        dims: of their weights, int64 ``(T,)``; ``widths``: with optimizer state.
        is_looked_up_at_once: whether one call looks all of them up.
        has_one_row: whether each id has one row of each, in use or not.
        has_metadata: whether a table keeps metadata.
        is_read_at_once: whether one call reads all of them.
        unadmitted_values: what ids without a row read then, float32 ``(T,)``.
        updates: the loops that update them; None where it is one table after the other,
            or one takes no gradients.
    """

    def __init__(self, rows: StoreRows, states: Sequence[TableState]) -> None:
        self._rows, self.states = rows, states
        self.numbers = np.array([state.number for state in states], dtype=np.int64)
        self.tables = PlainTables.of(states, rows)
        self.at = self.tables.at
        self.dims = np.array([state.spec.dim for state in states], dtype=np.int64)
        widths = [state.spec.num_floats for state in states]
        self.widths = np.array(widths, dtype=np.int64)
        self.has_metadata = any(state.has_metadata for state in states)
        self.is_looked_up_at_once = all(
            type(state).look_up is TableState.look_up for state in states
        )
        self.has_one_row = all(
            type(state) is TableState and not state.is_part for state in states
        )
        self.is_read_at_once = all(
            type(state).read_only is TableState.read_only and not state.reads_begun_rows
            for state in states
        )
        values = [state.unadmitted_values for state in states]
        self.unadmitted_values = np.concatenate([_NO_VALUES, *values])
        self._is_by_running_time = any(state.is_by_running_time for state in states)
        are_plain = rows.engine is None and all(
            type(state) is TableState and not (state.spec.is_frozen or state.is_dropped)
            for state in states
        )
        is_each_once = len({*self.numbers.tolist()}) == len(states)
        self.updates = self._find_updates() if are_plain and is_each_once else None

    def _find_updates(self) -> list[GroupUpdate]:
        updates = []
        for _, found in itertools.groupby(
            enumerate(self.states), lambda pair: id(pair[1].update_loop)
        ):
            (begin, first), *others = found
            alike = all(state.steps_alike(first) for _, state in others)
            end = begin + 1 + len(others)
            updates.append(GroupUpdate(first.update_loop, begin, end, alike))
        return updates

    def add_update(
        self, ids_N: Ids, starts_T: Starts, grads: Floats, hints_N: Slots | None
    ) -> None:
        """Update rows at the end of the transaction that is open."""
        opened, journal, ids_N = self._rows.opened, self._rows.journal, read_only(ids_N)
        assert opened is not None
        if hints_N is None or len(hints_N) != len(ids_N):
            parts = zip(self.states, starts_T[:-1], starts_T[1:], strict=True)
            found = [state.find(ids_N[a:b]) for state, a, b in parts]
            hints_N = np.concatenate([_NO_SLOTS, *found])
        if journal.is_on and not journal.is_noted(hints_N, ids_N):
            for t, state in enumerate(self.states):
                state.note_update(ids_N[starts_T[t] : starts_T[t + 1]])
        counted, present = opened.steps, self._rows.steps[self.numbers].tolist()
        pairs = zip(self.numbers.tolist(), present, strict=True)
        steps = {number: counted.get(number, step) + 1 for number, step in pairs}
        counted.update(steps)
        num_bytes = ROW_BYTES * len(steps)
        if self._rows.undo_log is not None:
            num_bytes += int(np.diff(starts_T).dot(self.tables.kept_row_bytes))
        hints_N, grads = read_only(hints_N), read_only(grads)
        steps_T = [*steps.values()]
        opened.add(
            num_bytes, partial(self._update, steps_T, ids_N, starts_T, hints_N, grads)
        )

    def raise_steps(self, steps_T: Starts) -> None:
        """Have tables have had so many updates at least; rows note the present second.

        It is a part of the transaction that is open.
        """
        rows = self._rows
        rows.begin()
        if rows.undo_log is not None:
            rows.undo_log.make_room(ROW_BYTES * len(self.numbers))
            rows.undo_log.keep_some(rows.steps, self.numbers)
        seconds = np.broadcast_to(self._now_s(), len(steps_T)).tolist()
        for state, step, now_s in zip(
            self.states, steps_T.tolist(), seconds, strict=True
        ):
            state.num_updates = max(state.num_updates, step)
            state.layout[memory.NOW_S] = now_s
            if rows.journal.is_on:
                rows.journal.changed(state.changed_slots(_NO_SLOTS))

    def _update(
        self,
        steps_T: list[int],
        ids_N: Ids,
        starts_T: Starts,
        hints_N: Slots,
        grads: Floats,
        transaction: Transaction,
    ) -> None:
        """Apply the optimizers to rows, and count the steps."""
        rows, num_tables = self._rows, len(self.states)
        if rows.undo_log is not None:
            rows.undo_log.keep_some(rows.steps, self.numbers)
        now_T2 = np.empty((num_tables, 2), dtype=np.uint64)
        rows.steps[self.numbers] = now_T2[:, 0] = steps_T
        now_T2[:, 1] = self._now_s()
        results_T2 = np.zeros((num_tables, 2), dtype=np.int64)
        layouts_T, log = self.at
        begin_of_grads = 0
        for update in self.updates or ():
            which = slice(update.begin, update.end)
            starts = starts_T[update.begin : update.end + 1]
            update.loop(
                (layouts_T[which], log),
                ids_N,
                starts,
                hints_N,
                grads[begin_of_grads:],
                now_T2[which],
                self._step_numbers(update, steps_T[which]),
                results_T2[which],
            )
            begin_of_grads += int(np.diff(starts).dot(self.dims[which]))
        if not results_T2.any():
            transaction.results.append(NOTHING_MISSED)
            return
        for t, (missed, rejected) in enumerate(results_T2.tolist()):
            hints = hints_N[starts_T[t] : starts_T[t + 1]]
            transaction.results.append(self.states[t].result(hints, missed, rejected))

    def _now_s(self) -> int | npt.NDArray[np.int64]:
        """Return the second that rows note now: of each table, or of all."""
        if not self._is_by_running_time:
            return max(int(self._rows.seconds.clock()), 0)
        return np.array([state.now_s() for state in self.states])

    def _step_numbers(self, update: GroupUpdate, steps: Sequence[int]) -> Floats:
        """Return what a loop takes beside the rows of its tables, float32 ``(T, K)``.

        ``steps`` are those of its tables.
        """
        states = self.states[update.begin : update.end]
        if update.is_alike and len({*steps}) == 1:
            return np.tile(states[0].step_numbers(steps[0]), (len(states), 1))
        pairs = zip(states, steps, strict=True)
        return np.stack([state.step_numbers(step) for state, step in pairs])
