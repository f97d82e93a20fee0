"""Convert the tables and rows of a file to those of a store.

Dimension key:
    N: rows of a block
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Bools, Floats
from persia_torchrec.checkpoint.catalog import LoadRules, SavedTable
from persia_torchrec.checkpoint.row_file import IncrementHead
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.jit.float16 import to_bfloat16
from persia_torchrec.store import finite, memory
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_columns import METADATA_WORDS, RowColumns
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.table import TableSpec

_WHERE = (
    "These are arguments of load_checkpoint, recoverable and TrainCtx, and of "
    "LoadRules, for client.checkpoints.load(rules=...)."
)


def tables_without_state(tables: Iterable[SavedTable]) -> tuple[SavedTable, ...]:
    """Return tables as a server of inference has them: without optimizer state."""
    specs = [replace(table.spec, optimizer=SGD(0.0)).to_json() for table in tables]
    return tuple(
        msgspec.structs.replace(table, description=spec)
        for table, spec in zip(tables, specs, strict=True)
    )


def rows_without_state(rows: RowColumns, saved: SavedTable) -> RowColumns:
    """Return rows of a table of a file without what its optimizer keeps of them."""
    num = len(saved.spec.optimizer.initial_state(saved.spec.row_dim))
    return replace(rows, state=np.ascontiguousarray(rows.state[:, num:]))


class TablePlan(NamedTuple):
    """What a load takes of a saved table: its rows, and their optimizer state."""

    spec: TableSpec
    """As it was saved, under the model's name."""
    has_rows: bool = True
    has_state: bool = True


def has_changed(plan: TablePlan, known: TableSpec) -> bool:
    """Return whether rows of a saved table are loaded otherwise than they are."""
    is_same = plan.spec.describe_rows() == known.describe_rows()
    return not (plan.has_rows and plan.has_state and is_same)


def left_out(
    tables: Iterable[SavedTable], names: Container[str]
) -> dict[str, TablePlan]:
    """Plan to load nothing of tables that were dropped later, by name."""
    return {
        table.name: TablePlan(table.spec, has_rows=False)
        for table in tables
        if table.name in names
    }


class Drops:
    """Which tables the logs of several servers have dropped, as one follows them.

    All servers drop a table, each at its own place in its log: the first one drops it
    here, and until the others do, what they write of that name counts for nothing.
    """

    def __init__(self) -> None:
        self._of_logs = Counter[tuple[int, str]]()  # by server and name
        self._done = Counter[str]()

    def take(self, head: IncrementHead) -> tuple[list[str], set[str]]:
        """Return what an increment drops, and which of its tables are dropped."""
        names = []
        for name in head.dropped:
            self._of_logs[head.shard, name] += 1
            if self._of_logs[head.shard, name] > self._done[name]:
                self._done[name] += 1
                names.append(name)
        tables = {table.name for table in head.tables}
        stale = {n for n in tables if self._of_logs[head.shard, n] < self._done[n]}
        return names, stale


def add_tables(
    store: EmbeddingStore,
    tables: Sequence[SavedTable],
    plans: Mapping[str, TablePlan],
    *,
    follows: bool,
) -> list[int]:
    """Add unknown tables; return the number of each, -1 for those that are left out.

    Known settings stay. With ``follows``, known tables take over the admission.
    """
    known = {spec.name: spec for spec in store.tables}
    specs, taken = [], []
    for table in tables:
        plan = plans.get(table.name)
        taken.append(plan is None or plan.has_rows)
        if taken[-1]:
            spec = table.spec
            known_spec = known.get(spec.name, spec)
            admission = spec.admission if follows else known_spec.admission
            specs.append(replace(known_spec, admission=admission))
    numbers = iter(store.add_tables(specs))
    return [next(numbers) if is_taken else -1 for is_taken in taken]


def continues(plans: Mapping[str, TablePlan], saved: SavedTable) -> bool:
    """Return whether a table continues with the step of a saved one."""
    plan = plans.get(saved.name)
    return plan is None or (plan.has_rows and plan.has_state)


def set_thresholds(state: TableState, saved: SavedTable) -> None:
    """Let a table count blocks as one did that ranked the ids of its server."""
    if len(saved.thresholds) == state.thresholds.size:
        state.thresholds[:] = saved.thresholds


def require_same_rows(
    where: str,
    tables: Sequence[SavedTable],
    known_specs: Iterable[TableSpec],
    *,
    all_known: bool = False,
) -> None:
    """Reject tables whose rows differ; with ``all_known``, unknown tables, too."""
    known = {spec.name: spec.describe_rows() for spec in known_specs}
    for spec in (table.spec for table in tables):
        received = spec.describe_rows()
        expected = known.get(spec.name, "no rows there" if all_known else received)
        if received != expected:
            raise CheckpointError(
                f"{where}: table {spec.name!r} must have {expected}. "
                f"Received: {received}."
            )


def continue_seconds(
    store: EmbeddingStore,
    tables: Sequence[SavedTable],
    written_s: float,
    *,
    goes_back: bool = False,
) -> dict[str, int]:
    """Let the running time continue where a file was written.

    So rows are as old as they were then. Returns the seconds by which the times of rows
    of a table must be moved, where any must. With ``goes_back`` the store has no rows
    of another time. ``written_s`` is for files that tell no seconds.
    """
    seconds_of = {table.name: table.now_s or written_s for table in tables}
    specs = {table.name: table.spec for table in tables}
    running = [
        seconds_of[name]
        for name, spec in specs.items()
        if spec.expiry.is_by_running_time and seconds_of[name]
    ]
    if running and (goes_back or max(running) > store.rows.seconds.running_s):
        store.rows.seconds.running_s = max(running)
    moved = {}
    for spec in store.tables:
        saved_s = seconds_of.get(spec.name)
        if saved_s and spec.expiry.is_by_running_time:
            moved[spec.name] = int(store.rows.seconds.running_s) - int(saved_s)
    return moved


def written_s(created: str) -> float:
    """Return the second since 1970 of a date; 0 for what is none."""
    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def plan_tables(
    where: str,
    tables: Sequence[SavedTable],
    known: Mapping[str, TableSpec],
    rules: LoadRules,
    *,
    may_share: bool = True,
    replaces: bool = True,
) -> tuple[dict[str, TablePlan], list[str]]:
    """Return by name what is loaded of saved tables, and lines on what is not.

    ``known`` are the tables of the servers; without any, all are added. With
    ``may_share`` a table may get shared rows, with ``replaces`` those of the servers
    that were not saved lose their rows.

    Raises:
        CheckpointError: the tables differ, and no rule says what becomes of them.
    """
    specs = {table.name: table.spec for table in tables}
    parts = {p.name: spec.name for spec in specs.values() for p in spec.parts()}
    own = {p.name for spec in known.values() for p in spec.parts()}
    more = sorted(known.keys() - own - specs.keys())
    of_model = known.keys() & set(rules.tables) if rules.tables else known.keys()
    fewer = sorted(specs.keys() - parts.keys() - of_model) if known else []
    if fewer and rules.missing != "skip":
        _require_named(where, rules, more if replaces else [], fewer)
    notes = []
    if replaces:
        notes = [f"table {name!r} begins again: it is in no file" for name in more]
    plans: dict[str, TablePlan] = {}
    for name, spec in specs.items():
        if name not in known or name in fewer:
            is_skipped = name in fewer and rules.missing == "skip"
            if is_skipped:
                notes.append(f"table {name!r} is left out: the model does not have it")
            plans[name] = TablePlan(spec, has_rows=not is_skipped)
            continue
        expected = known[name]
        if may_share and not spec.shared_rows:
            expected = replace(expected, shared_rows=0)
        plans[name], note = _plan(where, spec, expected, rules)
        notes += [note] if note else []
    for name, whole in parts.items():
        if name in plans and not plans[whole].has_rows:
            plans[name] = plans[name]._replace(has_rows=False)
    return plans, notes


def _require_named(
    where: str, rules: LoadRules, more: Sequence[str], fewer: Sequence[str]
) -> None:
    """Reject tables that the model lacks, if others may be meant by them."""
    skip = f'missing="skip" leaves {list(fewer)} out'
    if more:
        old, new, *others = next(
            (
                [name, *of_paths]
                for name in fewer
                if (of_paths := [n for n in more if n.rpartition(".")[2] == name])
            ),
            [fewer[0], more[0]],
        )
        if others:  # of several collections of the model
            skip = (
                f"give shared={{{old!r}}} to the sharders for rows that all of "
                f"{[new, *others]} had; {skip}"
            )
        raise CheckpointError(
            f"{where} must have the tables of the model. Received: {list(more)} of the "
            f"model that it lacks, and {list(fewer)} that the model lacks. If a table "
            f"was renamed, give rename={{{old!r}: {new!r}}}; else {skip}, and "
            f"{list(more)} begin again. {_WHERE}"
        )
    if rules.missing == "error":
        raise CheckpointError(
            f"{where} must have tables of the model only. Received: {list(fewer)} "
            f"besides. Add them to the model, or {skip}. {_WHERE}"
        )


def _plan(
    where: str, saved: TableSpec, expected: TableSpec, rules: LoadRules
) -> tuple[TablePlan, str]:
    """Return what is loaded of a table that the model has, and a line if not all."""
    plan, on_change = TablePlan(saved), rules.on_change
    told = f"it has {expected.describe_rows()}, and had {saved.describe_rows()}"
    if saved.describe_rows() == expected.describe_rows():
        return plan, ""
    alike = replace(saved, weight_dtype=expected.weight_dtype)
    if alike.describe_rows() == expected.describe_rows():
        dtypes = f"from {saved.weight_dtype} to {expected.weight_dtype}"
        return plan, f"table {saved.name!r}: weights are converted {dtypes}"
    alike = replace(alike, optimizer=expected.optimizer)
    fits = alike.describe_rows() == expected.describe_rows()
    if fits and on_change == "reset state":
        note = f"the optimizer state of table {saved.name!r} begins again: {told}"
        return plan._replace(has_state=False), note
    if on_change == "reset table":
        return plan._replace(has_rows=False), (
            f"table {saved.name!r} begins again: {told}"
        )
    named = saved.optimizer.describe()
    keeps = (
        f" With the optimizer {named} of the sharders, or of its TableSettings, it "
        'continues; on_change="reset state" keeps its weights,'
        if fits
        else ""
    )
    raise CheckpointError(
        f"{where}: table {saved.name!r} must have {expected.describe_rows()}. "
        f"Received: {saved.describe_rows()}.{keeps} "
        f'on_change="reset table" begins it again. {_WHERE}'
    )


class Fitting(NamedTuple):
    """Fits rows of files to a store; counts those that are not finite by table.

    ``moved_s`` is what :func:`continue_seconds` returned.
    """

    store: EmbeddingStore
    moved_s: Mapping[str, int]
    not_finite: Counter[str]
    plans: Mapping[str, TablePlan] = {}

    def rows(self, number: int, rows: RowColumns) -> RowColumns:
        """Return rows as a table of the store takes them."""
        spec = self.store.states[number].spec
        if (plan := self.plans.get(spec.name)) is not None:
            rows = _converted(rows, plan, spec)
        is_bad_N = find_not_finite(rows, spec)
        if is_bad_N.any():
            self.not_finite[spec.name] += int(np.count_nonzero(is_bad_N))
        if not _are_moderate(rows, spec):
            self.store.rows.tally[memory.HAS_LARGE] = 1
        return _with_metadata(rows, self.store, number, self.moved_s)


def _converted(rows: RowColumns, plan: TablePlan, spec: TableSpec) -> RowColumns:
    """Return rows in a table's weight dtype, with initial state if planned so."""
    if plan.spec.weight_dtype != spec.weight_dtype:
        weights, _ = _floats_of(rows, plan.spec)
        rows = replace(rows, weights=_narrowed(weights, spec.weight_dtype))
    if not plan.has_state:
        state = np.empty((len(rows), spec.num_row_floats), dtype=np.float32)
        initial = spec.optimizer.initial_state(spec.row_dim)
        state[:, : len(initial)] = initial
        num_counted = spec.num_row_floats - len(initial)
        if num_counted:
            state[:, -num_counted:] = rows.state[:, -num_counted:]
        rows = replace(rows, state=state)
    return rows


def _narrowed(weights: Floats, dtype: str) -> npt.NDArray[Any]:
    """Return weights in a dtype, as files have them, rounded to the nearest."""
    if dtype == "fp32":
        return weights
    if dtype == "fp16":
        largest = np.finfo(np.float16).max
        return weights.clip(-largest, largest).astype(np.float16).view(np.uint16)
    bits = read_only(np.ascontiguousarray(weights).view(np.uint32).ravel())
    halves: npt.NDArray[Any] = to_bfloat16(bits)
    return halves.reshape(weights.shape)


def find_not_finite(rows: RowColumns, spec: TableSpec) -> Bools:
    """Return which rows have a NaN or an infinity; bool ``(N,)``."""
    weights, state = _floats_of(rows, spec)
    has_bad_N = np.zeros(len(rows), dtype=np.bool_)
    for floats in (weights, state):
        has_bad_N |= np.any(~np.isfinite(floats), axis=1)
    return has_bad_N


def _floats_of(rows: RowColumns, spec: TableSpec) -> tuple[Floats, Floats]:
    """Return weights as floats, and the optimizer's part of the state."""
    weights = rows.weights
    if spec.weight_dtype == "bf16":
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    elif spec.weight_dtype == "fp16":
        weights = weights.view(np.float16).astype(np.float32)
    num_state = len(spec.optimizer.initial_state(spec.row_dim))
    return weights, rows.state[:, :num_state]


def _are_moderate(rows: RowColumns, spec: TableSpec) -> bool:
    largest = finite.MODERATE_WEIGHT, finite.MODERATE_STATE
    pairs = zip(_floats_of(rows, spec), largest, strict=True)
    return all(np.abs(x).max(initial=0) <= limit for x, limit in pairs)


def _with_metadata(
    rows: RowColumns, store: EmbeddingStore, number: int, moved_s: Mapping[str, int]
) -> RowColumns:
    """Return rows with metadata if the table keeps them; missing ones are current."""
    state = store.states[number]
    if not state.has_metadata:
        return replace(rows, metadata=rows.metadata[:, :0])
    if rows.metadata.shape[1]:
        if by_s := moved_s.get(state.spec.name, 0):
            metadata = rows.metadata.copy()
            last_s = metadata[:, 3].astype(np.int64) + by_s
            metadata[:, 3] = last_s.clip(0, 2**32 - 1)
            return replace(rows, metadata=metadata)
        return rows
    step, now_s = state.num_updates % 2**32, state.now_s()
    metadata = np.empty((len(rows), METADATA_WORDS), dtype=np.uint32)
    metadata[:] = np.array([1, step, step, now_s], dtype=np.uint32)
    return replace(rows, metadata=metadata)
