"""The tables of a store: settings, compiled loops, and data beside the rows."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.embedding.setting import Admission, Kernel, Sightings
from persia_torchrec.embedding.usage import Doubles
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.jit.compiled import (
    compile_all,
    compile_for,
    inlined_kernel,
    read_only,
    specialized,
)
from persia_torchrec.jit.float16 import largest_within
from persia_torchrec.jit.kernel import NO_LOG
from persia_torchrec.store import finite, loops, memory
from persia_torchrec.store.fbgemm_engine import FbgemmEngine
from persia_torchrec.store.memory import (
    LARGEST_TICK,
    POSITION_BITS,
    Counts,
    Floats,
    Ids,
    Slots,
    StoreMemory,
    TableAt,
    TablesAt,
    Words,
)
from persia_torchrec.table import TableSpec

if TYPE_CHECKING:
    from persia_torchrec.store.embedding_store import EmbeddingStore
    from persia_torchrec.store.transaction import Change

Bools = npt.NDArray[np.bool_]

ROW_COLUMNS = [memory.WEIGHTS, memory.STATE, memory.NUM_STATE]
"""Columns of a layout that say what the rows look like."""

Admit: TypeAlias = Callable[[Ids, npt.NDArray[np.int64], int, int], Bools]
"""Counts ids that have no row, and returns which of them get one. The second array is
how often the batch holds each, ``>= 1``; how often each has been seen overwrites it.
Repeats are decided one after the other. Then the request's tick, and its batch."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class PublishedTable(msgspec.Struct):
    """A table as a memory file describes it; see ``docs/formats/memory.md``."""

    spec: dict[str, Any]
    arena: Count
    row: list[Count]
    remembered: Count
    thresholds: Count = 0
    is_dropped: bool = False

    def require_fits(self, layout: memory.Layout, widths: list[int]) -> None:
        """Reject a table whose rows are none of an arena of so many words a row."""
        num_bytes = int(layout[memory.STATE]) + 4 * int(layout[memory.NUM_STATE])
        fits = self.arena < len(widths) and 8 * widths[self.arena] - num_bytes in range(
            8
        )
        memory.require_sound(fits, "tables")
        if layout[ROW_COLUMNS].tolist() != self.row:
            raise StoreError(
                f"The rows of table {self.spec['name']!r} must have weights, state and "
                f"width at {layout[ROW_COLUMNS].tolist()}. Received: {self.row} in the "
                "memory file. Start the version that made it, or delete the file."
            )


class Published(msgspec.Struct):
    """The JSON of a memory file; ``notes`` and ``journal`` are 0 without any."""

    num_arenas: Count = 0
    tables: list[PublishedTable] = []
    notes: tuple[Count, Count] = (0, 0)
    journal: Count = 0


_NO_IDS = read_only(np.empty(0, dtype=np.uint64))
_NO_COUNTS = read_only(np.empty(0, dtype=np.uint32))
_NO_INDICES = np.empty(0, dtype=np.int64)


def build_admission(
    admission: Admission,
    seed: int,
    remembered: Words,
    log: np.uint64 = NO_LOG,
    *,
    recalls: bool = False,
) -> Admit | None:
    """Build what decides for a table, with its memory; None where all get a row.

    ``log`` is the address of the log that keeps what it changes, or 0. With ``recalls``
    it tells what it decided last.
    """
    kernel = admission.recall if recalls else admission.kernel
    if kernel is None:
        return None
    loop = _build_admit(kernel)
    p = np.array([*admission.kernel_numbers(seed), int(log), 0, 0], dtype=np.uint64)
    numbers, none = read_only(p), np.empty(0, dtype=np.bool_)
    compile_for(loop, remembered, numbers, _NO_IDS, _NO_INDICES, none)

    def admit(
        ids_N: Ids, counts_N: npt.NDArray[np.int64], tick: int, batch: int
    ) -> Bools:
        is_admitted_N = np.empty(len(ids_N), dtype=np.bool_)
        p[-2:] = min(tick, LARGEST_TICK) << POSITION_BITS, batch
        loop(remembered, numbers, read_only(ids_N), counts_N, is_admitted_N)
        return is_admitted_N

    return admit


@cache
def _build_admit(kernel: Kernel) -> Callable[..., None]:
    """Compile the kernel of an admission as a loop."""
    decide = inlined_kernel(kernel)

    def admit(
        remembered: Words,
        p: Words,
        ids_N: Ids,
        counts_N: npt.NDArray[np.int64],
        is_admitted_N: Bools,
    ) -> None:
        decide(remembered, p, ids_N, counts_N, is_admitted_N)

    return specialized(admit, kernel)


class TableState:
    """One table of a store, a row for each id. Owned by the store's thread.

    ``TableOfBlocks`` and ``TableOfSharedRows`` are the other kinds.

    Its loops are compiled, or loaded; the layout's columns of settings are overwritten.
    ``at`` is the layout and the log; ``engine`` is None for the fused loop; ``step``
    is the word that keeps the table's step, ``remembered`` what the admission
    remembers. The attribute ``admission`` is None when all ids are admitted;
    ``is_part`` says that it is a part of another table; ``thresholds`` are those of its
    blocks. ``insert`` makes rows: see :func:`loops.build_insert`.
    """

    counts_ids = False
    """Whether it matters how often an id is in a batch, for all that is a row's."""

    has_shared = False
    """Whether ids without a row read, and train, a shared one."""

    def __init__(
        self,
        spec: TableSpec,
        at: TableAt,
        engine: FbgemmEngine | None,
        *,
        step: Words,
        remembered: Words,
        thresholds: Doubles,
    ) -> None:
        self.thresholds = thresholds
        self.spec, self.at, self.engine = spec, at, engine
        self.layout = layout = at[0]
        alone = np.array([layout.ctypes.data], dtype=np.uint64)
        self._alone: TablesAt = alone, at[1]
        self.has_metadata = bool(layout[memory.HAS_METADATA])
        self.remembered, self.step = remembered, step
        self.is_part = self.is_dropped = False
        self._steps: list[memory.Layout] = []
        self.step_with([])
        self._log = NO_LOG if at[1] is None else at[1]
        self.admission = build_admission(
            spec.admission, spec.seed, remembered, self._log
        )
        state_S = np.zeros(spec.num_row_floats, dtype=np.float32)
        optimizer_S = spec.optimizer.initial_state(spec.row_dim)
        state_S[: len(optimizer_S)] = optimizer_S
        fill = spec.initializer.fill_numbers(spec.row_dim)
        self._kept = {
            memory.SCRATCH: np.empty(
                2 * spec.row_dim + spec.num_row_floats + 2, dtype=np.float32
            ),
            memory.FILL: np.array(fill, dtype=np.float32),
            memory.INITIAL_STATE: state_S,
        }
        for column, array in self._kept.items():
            layout[column] = array.ctypes.data
        layout[memory.SEED] = spec.seed
        layout[memory.TO_NEAREST] = not spec.stochastic_rounding
        self._checks = _checks(spec, self._kept[memory.FILL], state_S)
        self.insert = loops.build_insert(spec.initializer.kernel)
        has_begun = spec.ids_without_row != "zeros"
        num_words = int(layout[memory.STATE]) // 8 + spec.num_row_floats + 1
        self._begun_row: Words = np.zeros(num_words * has_begun, dtype=np.uint64)
        self.update_loop = self._compile_uses(engine)

    def _compile_uses(self, engine: FbgemmEngine | None) -> Callable[..., Any]:
        """Compile training lookups, ``insert`` and updates; return the update.

        And reads of ids without a row, if they read what it begins with.
        """
        spec, slots = self.spec, _NO_COUNTS.copy()
        no_rows = np.empty((0, spec.row_dim), np.float32)
        used, pair = (self.at, _NO_IDS, _NO_COUNTS), (0, 0)
        starts, flat = np.zeros(2, dtype=np.int64), no_rows.reshape(-1)
        asked = starts, flat, slots, _NO_INDICES
        calls: list[tuple[Any, ...]] = [
            (loops.lookup_training, self._alone, pair, *used[1:], *asked),
            (self.insert, *used, (_NO_INDICES, _NO_COUNTS), no_rows, slots),
        ]
        if engine is not None:
            update: Callable[..., Any] = engine.build_update(
                spec.optimizer, spec.row_dim
            )
        else:
            update = loops.build_update(spec.optimizer.kernel)
            now_T2 = np.zeros((1, 2), dtype=np.uint64)
            given = _NO_IDS, starts, _NO_COUNTS, read_only(flat), now_T2
            results_T2 = np.zeros((1, 2), dtype=np.int64)
            numbers_TK = self.step_numbers(1)[None]
            calls.append((update, self._alone, *given, numbers_TK, results_T2))
        if len(self._begun_row):
            self._read_begun = loops.build_read_only(spec.initializer.kernel)
            begun = self.layout, _NO_IDS, no_rows, self._begun_row
            calls.append((self._read_begun, *begun))
        compile_all(*calls)
        return update

    @cached_property
    def is_by_running_time(self) -> bool:
        """Whether rows expire by the time in which servers run."""
        return self.spec.expiry.is_by_running_time

    @property
    def number(self) -> int:
        """Which of the store's tables it is."""
        return int(self.layout[memory.OWNER]) - 1

    @property
    def is_pinned(self) -> bool:
        """Whether its rows are the shared rows of another table."""
        return bool(self.layout[memory.PINNED])

    @property
    def num_updates(self) -> int:
        """Update requests so far: the table's step, Adam's ``t``."""
        return int(self.step[0])

    @num_updates.setter
    def num_updates(self, step: int) -> None:
        self.step[0] = step
        for layout in self._steps:
            layout[memory.STEP] = step

    def step_with(self, parts: Sequence["TableState"]) -> None:
        """Count steps together with the states of other rows of the table."""
        self._steps = [self.layout, *(part.layout for part in parts)]
        for part in parts:
            part.step, part.is_part = self.step, True
            part._steps = self._steps  # noqa: SLF001
        self.num_updates = self.num_updates

    def link(self, parts: Sequence["TableState"]) -> None:
        """Find the tables that are parts of this one: here, none are."""

    def look_up(
        self,
        store: "EmbeddingStore",
        ids_N: Ids,
        out_ND: Floats,
        counts_N: Counts | None,
        batch: int,
    ) -> Slots:
        """Do a training lookup; return the slots, hints for an update."""
        return self.look_up_rows(store, ids_N, out_ND, counts_N, batch)

    def look_up_rows(
        self,
        store: "EmbeddingStore",
        ids_N: Ids,
        out_ND: Floats,
        counts_N: Counts | None = None,
        batch: int = 0,
    ) -> Slots:
        """Do a training lookup of rows that have one block."""
        group, starts = store.group((self.number,)), np.array([0, len(ids_N)])
        out = out_ND.reshape(-1)
        return store.look_up_rows(group, ids_N, starts, out, counts_N, batch)

    def look_only(self, store: "EmbeddingStore", ids_N: Ids, out_ND: Floats) -> None:
        """Do a lookup that is not for training."""
        self.read_only(ids_N, out_ND)

    def read_missing(
        self, ids_N: Ids, missing: loops.Indices | None, out_ND: Floats
    ) -> None:
        """Write what ids without a row read, if that is another row."""

    def make_for(
        self,
        store: "EmbeddingStore",
        ids_N: Ids,
        missing: loops.Indices,
        admitted: loops.Indices,
    ) -> None:
        """Make what missing ids that are not admitted read."""

    def begin_rows(
        self,
        ids_N: Ids,
        missing: loops.Indices,
        admitted: loops.Indices,
        out_ND: Floats,
    ) -> None:
        """Let the rows of admitted ids, just made, begin with what these have read."""

    def split_update(
        self, ids_N: Ids, grads_ND: Floats, hints_N: Slots | None
    ) -> tuple[Sequence[tuple[int, Ids, Floats, Slots]], Floats, Slots | None]:
        """Return the updates of its parts, then gradients and hints of itself.

        Of each part: its number, ids, gradients and slots.
        """
        return (), grads_ND, hints_N

    def apply(
        self, store: "EmbeddingStore", change: "Change", now_s: int
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids.

        Returns how many ids have none, and how many gradients were rejected.
        """
        _, _, step, ids_N, hints_N, grads_ND = change
        return self.step_rows(ids_N, hints_N, grads_ND, step=step, now_s=now_s)

    def read(self, store: "EmbeddingStore", ids_N: Ids) -> Floats:
        """Return weights and state; zeros without a row."""
        return store.read_slots(self, store.find(self.number, ids_N))

    def write(self, store: "EmbeddingStore", ids_N: Ids, rows_NK: Floats) -> None:
        """Set weights, or weights and state; missing rows are made."""
        store.write_rows(self, ids_N, rows_NK)

    def ends_period(self, step: int) -> bool:
        """Return whether a step ends a period, after which blocks are counted."""
        return False

    def end_period(self, store: "EmbeddingStore") -> None:
        """Do what the end of a period asks for."""

    def must_free(self, store: "EmbeddingStore") -> bool:
        """Return whether blocks are to be freed: a period has ended."""
        return False

    def free(
        self, store: "EmbeddingStore", begin: tuple[int, int], max_rows: int
    ) -> tuple[int, int] | None:
        """Free lost blocks; return where to continue, None after the last one."""
        return None

    def admit(
        self,
        ids_N: Ids,
        counts_N: Counts,
        missing: loops.Indices,
        out_ND: Floats,
        now: tuple[int, int],
    ) -> tuple[loops.Indices, Counts]:
        """Return which of the missing ids get a row, and how often they had waited.

        Writes what the others read. ``counts_N`` is how often each id is in the batch,
        or empty; ``now`` the request's tick and batch. No ids have waited if the second
        array is empty.
        """
        if self.admission is None:
            return missing, _NO_COUNTS
        counts = (
            counts_N[missing] if len(counts_N) else np.ones(len(missing), np.uint32)
        )
        seen = counts.astype(np.int64)
        is_admitted = self.admission(ids_N[missing], seen, *now)
        out_ND[missing[~is_admitted]] = self.spec.admission.unadmitted_value
        waited = (seen - counts)[is_admitted].astype(np.uint32)
        return missing[is_admitted], read_only(waited)

    def read_only(self, ids_N: Ids, out_ND: Floats) -> None:
        """Copy the weights of ids, read-only, and what those without a row read."""
        if len(self._begun_row):
            self._read_begun(self.layout, ids_N, out_ND, self._begun_row)
        else:
            value = np.float32(self.spec.admission.unadmitted_value)
            loops.lookup_readonly(self.layout, ids_N, out_ND, value)
        self.read_missing(ids_N, None, out_ND)

    def was_admitted(self, ids_N: Ids, batch: int) -> Bools:
        """Return which ids were admitted when they were seen last, in a batch."""
        recall = build_admission(
            self.spec.admission, self.spec.seed, self.remembered, recalls=True
        )
        if recall is None:
            return np.ones(len(ids_N), dtype=np.bool_)
        return recall(ids_N, np.zeros(len(ids_N), dtype=np.int64), 0, batch)

    def step_rows(
        self, ids_N: Ids, hints_N: Slots, grads_ND: Floats, *, step: int, now_s: int
    ) -> tuple[int, int]:
        """Apply the optimizer to the rows of ids; that is the table's step ``step``.

        All arrays are read-only. Returns how many ids have no row, and how many
        gradients were rejected.
        """
        if self.is_part:
            self.layout[memory.STEP] = step  # the table counts it, after its parts
        else:
            self.num_updates = step
        self.layout[memory.NOW_S] = now_s
        numbers = self.step_numbers(step)
        if self.engine is not None:
            found: tuple[int, int] = self.update_loop(
                self.at, ids_N, hints_N, grads_ND, numbers
            )
            return found
        results_T2 = np.zeros((1, 2), dtype=np.int64)
        self.update_loop(
            self._alone,
            ids_N,
            np.array([0, len(ids_N)]),
            hints_N,
            grads_ND.reshape(-1),
            np.array([[step, now_s]], dtype=np.uint64),
            numbers[None],
            results_T2,
        )
        num_missed, num_refused = results_T2[0].tolist()
        return num_missed, num_refused

    def describe_both(self, spec: TableSpec, *, is_lfu: bool) -> tuple[str, str]:
        """Return what its rows look like, and would under other settings."""
        present, received = (
            one.describe_rows(with_metadata=one.has_metadata and not is_lfu)
            for one in (self.spec, spec)
        )
        return present, received

    def require_same_rows(self, spec: TableSpec, *, is_lfu: bool) -> None:
        """Raise ConfigError if rows would look otherwise under other settings."""
        present, received = self.describe_both(spec, is_lfu=is_lfu)
        if present != received:
            raise ConfigError(
                f"Table {spec.name!r} has {present} on this server. Received: "
                f"{received}. Give it the optimizer and the types that it was trained "
                "with, use another table name, or drop it first: "
                f"client.drop_table({spec.name!r})."
            )

    def counts_as(self, spec: TableSpec) -> bool:
        """Return whether other settings can continue with the sightings of these."""
        known, rule = ((one.admission, one.seed) for one in (self.spec, spec))
        return rule == known or spec.admission.counts_as(self.spec.admission)

    def used_words(self) -> Words:
        """Return what the admission remembers, up to the last word that is used."""
        num = self.spec.admission.num_used_words(self.remembered)
        return self.remembered[:num]

    def sightings(self) -> Sightings:
        """Return what the admission remembers."""
        return self.spec.admission.sightings(self.used_words())

    def describe(self, begin: Words) -> PublishedTable:
        """Describe the table, for a process that opens the memory later.

        The memory of its admission is said by its distance from an array.
        """
        remembered, thresholds = self.remembered, self.thresholds.view(np.uint64)
        return PublishedTable(
            self.spec.to_json(),
            int(self.layout[memory.ARENA]),
            self.layout[ROW_COLUMNS].tolist(),
            memory.distance(begin, remembered) if remembered.size else 0,
            memory.distance(begin, thresholds) if thresholds.size else 0,
            self.is_dropped,
        )

    def forget(self, source: StoreMemory) -> None:
        """Forget step and candidates: all rows are dropped."""
        self.num_updates = 0
        if self.thresholds.size:
            self.thresholds[:] = self.spec.dynamic.first_thresholds()
        if self.remembered.size:
            [self.remembered] = source.emptied(self.remembered)
            source.commit(self.remembered, self.remembered.size)
        self.admission = build_admission(
            self.spec.admission, self.spec.seed, self.remembered, self._log
        )

    def steps_alike(self, other: "TableState") -> bool:
        """Return whether :meth:`step_numbers` of both are equal, of equal steps."""
        of_both = [(s.spec.optimizer, s.spec.row_dim, s._checks) for s in (self, other)]  # noqa: SLF001
        return of_both[0] == of_both[1]

    def step_numbers(self, step: int) -> Floats:
        """Return the bound of the weights, that of gradients, and the optimizer's."""
        numbers = self.spec.optimizer.step_numbers(self.spec.row_dim, max(step, 1))
        return np.array((*self._checks, *numbers), dtype=np.float32)


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
        dims: of their weights, int64 ``(T,)``; ``row_dims`` of those in a row.
        is_looked_up_at_once: whether one call looks all of them up.
        updates: the loops that update them; None where it is one table after the other,
            or one takes no gradients.
    """

    def __init__(self, states: Sequence[TableState]) -> None:
        self.states = states
        self.numbers = np.array([state.number for state in states], dtype=np.int64)
        layouts_T = np.array([s.layout.ctypes.data for s in states], dtype=np.uint64)
        self.at: TablesAt = layouts_T, states[0].at[1] if states else None
        self.dims = np.array([state.spec.dim for state in states], dtype=np.int64)
        row_dims = [state.spec.row_dim for state in states]
        self.row_dims = np.array(row_dims, dtype=np.int64)
        self.is_looked_up_at_once = all(
            type(state).look_up is TableState.look_up for state in states
        )
        self.is_by_running_time = np.array([s.is_by_running_time for s in states])
        are_plain = all(
            type(state).apply is TableState.apply
            and type(state).split_update is TableState.split_update
            and type(state).ends_period is TableState.ends_period
            and state.engine is None
            and not (state.spec.is_frozen or state.is_dropped)
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

    def step_numbers(self, update: GroupUpdate, steps: Sequence[int]) -> Floats:
        """Return what a loop takes beside the rows of its tables, float32 ``(T, K)``.

        ``steps`` are those of its tables.
        """
        states = self.states[update.begin : update.end]
        if update.is_alike and len({*steps}) == 1:
            return np.tile(states[0].step_numbers(steps[0]), (len(states), 1))
        pairs = zip(states, steps, strict=True)
        return np.stack([state.step_numbers(step) for state, step in pairs])


def _checks(
    spec: TableSpec, fill: Floats, state_S: Floats
) -> tuple[np.float32, float, int]:
    """Return the bound of weights, what gradients are moderate, floats of the state.

    The second is a sum of squares; -1: rows are looked at after each step.
    """
    num_state = len(spec.optimizer.initial_state(spec.row_dim))
    is_sure = spec.optimizer.stays_finite
    is_sure &= bool(np.abs(fill).max(initial=0) <= finite.MODERATE_WEIGHT)
    is_sure &= bool(state_S[:num_state].max(initial=0) <= finite.MODERATE_STATE)
    moderate = float(finite.MODERATE_SQUARES) if is_sure else -1.0
    bound = np.float32(spec.weight_bound or np.inf)
    bound = largest_within(bound, memory.DTYPES.index(spec.weight_dtype))
    return bound, moderate, num_state
