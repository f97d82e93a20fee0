"""Shuffle, partition and read ahead the rows of files.

    groups -> windows -> runs: groups of one file -> blocks of rows -> order
                               (read ahead, by threads)

A group is what a file can be read from. A window is groups that are put in a random
order together, as many as have SHUFFLE_ROWS rows; of more rows each SHUFFLE_ROWS,
a stretch, are. Without a random order each file's groups are one window.

Readers divide the columns of a block, or, of text, the blocks. Each is one block ahead.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.datasets.arrow_types import family_of
from persia_torchrec.datasets.columns import (
    Columns,
    Int64s,
    Rows,
    join_rows,
    merge_rows,
    require,
    source_of,
)
from persia_torchrec.datasets.shuffling import Read, shuffled
from persia_torchrec.datasets.sources import Source
from persia_torchrec.datasets.tables import GroupedFile, TableFile
from persia_torchrec.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

SHUFFLE_ROWS = 32_768
"""Rows that are put in a random order together, unless ``shuffle`` says how many."""

_LEGACY_GROUP_ROWS = 8192  # lines of a text file's group, before orders had a version
_BY_BYTES = 2  # the version of orders since when such groups are ranges of bytes
_FORMER_ROWS = 262_144  # SHUFFLE_ROWS of these versions
_OPENING = 8  # threads that open files of URLs
_SHOWN = 10  # files without rows


class Group(NamedTuple):
    """Rows of a file that can be read apart; all of them, or some."""

    file: TableFile
    group: int
    kept: Int64s | None = None

    @property
    def num_rows(self) -> int:
        """How many rows are wanted; of a text file its lines are counted."""
        return self.file.rows_of(self.group) if self.kept is None else len(self.kept)

    @property
    def rows_hint(self) -> int | None:
        """About how many; None: any number."""
        return self.file.rows_hint(self.group) if self.kept is None else len(self.kept)


class Window(NamedTuple):
    """Groups whose rows come together, in their order or in a random one."""

    groups: Sequence[Group]
    seed: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all its groups."""
        return sum(group.num_rows for group in self.groups)


@dataclass(slots=True)
class GroupRun:
    """Groups of one file that are read one after the other.

    Attributes:
        skip: rows of it that are not wanted: of a window in order, its first ones; of
            one in a random order, the first ones of that order.
        seed: of the window's order.
        ends_window: whether no other run of the window follows.
        item: of a queue, that it is of; the run that ends it has no groups.
    """

    file: TableFile
    groups: Sequence[Group]
    skip: int = 0
    seed: tuple[int, ...] | None = None
    ends_window: bool = True
    item: Any = None

    def blocks(self, columns: Columns) -> Iterator[Rows]:
        """Yield the rows of some columns."""
        if all(group.kept is None for group in self.groups):
            yield from self.file.blocks([g.group for g in self.groups], columns)
            return
        for group in self.groups:
            yield from self._kept(group, columns)

    def tasks(self) -> Iterator[Callable[[], Rows]]:
        """Yield what reads a block each, for any thread."""
        tasks: Any = getattr(self.file, "tasks")  # noqa: B009 of text files only
        numbers = [group.group for group in self.groups]
        if all(group.kept is None for group in self.groups):
            yield from tasks(numbers)
            return
        for group in self.groups:
            yield partial(self._all_kept, group)

    def _all_kept(self, group: Group) -> Rows:
        return join_rows(list(self._kept(group, None)))

    def _kept(self, group: Group, columns: Columns | None) -> Iterator[Rows]:
        first = 0
        for rows in self.file.blocks([group.group], columns):
            if group.kept is None:
                yield rows
            else:
                ends = np.searchsorted(group.kept, [first, first + rows.num_rows])
                yield rows.take(group.kept[ends[0] : ends[1]] - first)
            first += rows.num_rows


def open_all(
    open_one: Callable[[Source], TableFile],
    sources: Sequence[Source],
    columns: Columns,
    faults: list[DataError] | None = None,
) -> list[TableFile]:
    """Open all files, those of URLs by threads; their columns must be alike.

    Args:
        open_one: opens a file.
        sources: the files.
        columns: that are read.
        faults: takes what is wrong with files, which are left out then.

    Raises:
        DataError: without ``faults``, a file cannot be read, or a column has another
            type than in the first one; it names both.
    """
    opening = partial(_open_or_fault, open_one)
    if sources[0].filesystem is None:
        opened: Iterator[TableFile | DataError] = map(opening, sources)
    else:
        with ThreadPoolExecutor(_OPENING, "opening") as pool:
            opened = iter(list(pool.map(opening, sources)))
    files: list[TableFile] = []
    first: TableFile | None = None
    for file in opened:
        try:
            if isinstance(file, DataError) and first is not None:
                raise _compared(file, first) from file
            if isinstance(file, DataError):
                raise file
            if not file.is_empty:
                first = first or file
                _require_alike(first, file, columns)
        except DataError as exc:
            if faults is None:
                raise
            faults.append(exc)
        else:
            files.append(file)
    return files


def _open_or_fault(
    open_one: Callable[[Source], TableFile], source: Source
) -> TableFile | DataError:
    try:
        return open_one(source)
    except DataError as exc:
        return exc
    except (UnicodeError, require("pyarrow").ArrowException) as exc:
        fault = unreadable(source, exc)
        fault.__cause__ = exc
        return fault


def _compared(fault: DataError, first: TableFile) -> DataError:
    """Return a fault of a file with the columns of the first one."""
    kinds = first.kinds
    known = {name: str(kind) for name, kind in kinds.items() if kind is not None}
    return DataError(f"{fault} {first.source.url} has {known or list(kinds)}.")


def say_empty(files: Sequence[TableFile], num_files: int) -> str:
    """Say which of some files are passed over, as they have no rows."""
    names = ", ".join(f"{f.source.url} ({f.source.size} bytes)" for f in files[:_SHOWN])
    more = f", and {n} more" if (n := len(files) - _SHOWN) > 0 else ""
    return f"{len(files)} of {num_files} files have no rows: {names}{more}"


def unreadable(source: Source, exc: Exception) -> DataError:
    """Return what to raise for an error of a library."""
    return DataError(f"{source.url} must be readable. Received: {exc}.")


def _require_alike(first: TableFile, file: TableFile, columns: Columns) -> None:
    unsized = {source_of(column) for column in columns.dense if column.size is None}
    for name in columns.sources:
        one, other = first.kinds.get(name), file.kinds.get(name)
        if one is None or other is None:
            continue
        families = family_of(one), family_of(other)
        is_alike = families[0] == families[1] or None in families
        if name in unsized:
            sizes = [getattr(kind, "list_size", None) for kind in (one, other)]
            is_alike &= sizes[0] == sizes[1]
        if not is_alike:
            raise DataError(
                f"{name} must have the same type in all files. Received: {one} in "
                f"{first.source.url}, {other} in {file.source.url}."
            )


def has_order_of(
    saved: int | None, files: Sequence[TableFile], most: int, count: int
) -> bool:
    """Return whether rows come as in an earlier version, of which a state was saved.

    Args:
        saved: the version of its order; None: there was none yet.
        files: that have rows.
        most: rows that are put in a random order together; 0: none are.
        count: partitions.
    """
    hints = [file.rows_hint(g) for file in files for g in range(file.num_groups)]
    window = min(most, _FORMER_ROWS)
    is_small = None not in hints and sum(h or 0 for h in hints) <= window
    if most and not is_small:
        return False
    is_plain = not most and count == 1
    if saved == _BY_BYTES or is_plain or isinstance(files[0], GroupedFile):
        return True
    most = _LEGACY_GROUP_ROWS + 1
    return all(
        file.num_groups == 1 and file.num_rows_up_to(most) < most for file in files
    )


def select(files: Sequence[TableFile], rows: Int64s | None) -> list[Group]:
    """Return the groups of files with the rows that are wanted; empty ones, too."""
    groups = [Group(f, g) for f in files for g in range(f.num_groups)]
    if rows is None:
        return groups
    wanted, total = np.unique(rows), sum(group.num_rows for group in groups)
    if (
        len(wanted) != len(rows)
        or not len(rows)
        or wanted[0] < 0
        or wanted[-1] >= total
    ):
        raise ConfigError(
            f"rows must be different row numbers in [0, {total}), at least one. "
            f"Received: {len(rows)}, {len(wanted)} of them different."
        )
    starts = [0, *accumulate(group.num_rows for group in groups)]
    cuts = np.searchsorted(wanted, starts)
    return [
        group._replace(kept=wanted[begin:stop] - start)
        for group, start, begin, stop in zip(
            groups, starts, cuts, cuts[1:], strict=False
        )
    ]


def partition(groups: list[Group], count: int, index: int) -> list[Group]:
    """Return one of some parts of the groups, without those that have no rows."""
    if count > len(groups):
        raise ConfigError(
            "partition_count must be at most the number of groups of rows, "
            f"{len(groups)}. Received: {count}. Write more files, or smaller row "
            "groups; a packed text file is one group."
        )
    return [group for group in groups[index::count] if group.rows_hint != 0]


def windows_of(
    groups: list[Group], seed: tuple[int, ...] | None, most: int
) -> Iterator[Window]:
    """Return all groups as windows; with a seed, in an order that follows from it.

    ``most`` rows, or a few more, are in a window of several groups.
    """
    if seed is None:
        for _, of_file in groupby(groups, key=lambda group: id(group.file)):
            yield Window(list(of_file))
        return
    number, members, num_rows = 0, list[int](), 0
    for index in np.random.default_rng(seed).permutation(len(groups)).tolist():
        members.append(index)
        hint = groups[index].rows_hint
        num_rows += most if hint is None else hint
        if num_rows >= most:
            number += 1
            yield Window([groups[i] for i in sorted(members)], (*seed, number))
            members, num_rows = [], 0
    if members:
        yield Window([groups[i] for i in sorted(members)], (*seed, number + 1))


def runs_from(windows: Iterator[Window], row: int) -> Iterator[GroupRun]:
    """Yield what is to be read of windows from a row on."""
    for window in windows:
        if row and row >= (num_rows := window.num_rows):
            row -= num_rows
            continue
        groups, skip, row = list(window.groups), row, 0
        while window.seed is None and skip and skip >= groups[0].num_rows:
            skip -= groups.pop(0).num_rows
        by_file = [
            list(g) for _, g in groupby(groups, key=lambda group: id(group.file))
        ]
        for number, of_file in enumerate(by_file, 1):
            is_last = number == len(by_file)
            yield GroupRun(of_file[0].file, of_file, skip, window.seed, is_last)


def stretches(
    runs: Iterator[GroupRun], columns: Columns, num_readers: int, most: int
) -> "Reads":
    """Return rows in their order, read ahead by threads; None after each run's.

    ``most`` rows are put in a random order together, if they come in one.
    """
    first = next(runs, None)
    if first is None:
        return Reads(iter(()), ExitStack())
    stack, shared = ExitStack(), _Shared(first, runs)
    reads = _read_ahead(stack, shared, columns, num_readers)
    if first.seed is None:
        items = _all_in_order(reads)
    else:
        lane = _Lane(stack, shuffled(reads, most))  # a piece ahead
        items = iter(lane.take, None)
    stack.callback(shared.stopped.set)  # first of all: what waits for blocks ends
    return Reads(items, stack)


def _all_in_order(reads: Iterator[Read]) -> Iterator[Read]:
    for run, rows in reads:
        if rows is None:
            yield run, None
            continue
        passed = min(run.skip, rows.num_rows)
        run.skip -= passed
        if passed < rows.num_rows:
            yield run, rows.part(passed, rows.num_rows) if passed else rows


def _read_ahead(
    stack: ExitStack, shared: "_Shared", columns: Columns, num_readers: int
) -> Iterator[Read]:
    """Return the blocks of runs, each followed by one that says that it was read."""
    if num_readers > 1 and not shared.splits_columns:
        return _by_tasks(stack, shared, num_readers)
    count = min(num_readers, len(columns.sources))
    parts = [columns.some(n, count) for n in range(count)]
    lanes = [_Lane(stack, shared.blocks(part)) for part in parts]
    return _merged(lanes, parts, columns)


class Reads:
    """Blocks that are read ahead; closing them waits for what threads read just now."""

    def __init__(self, reads: Iterator[Read], stack: ExitStack) -> None:
        self._reads, self.stack = reads, stack

    def __iter__(self) -> Iterator[Read]:
        return self

    def __next__(self) -> Read:
        return next(self._reads)

    def close(self) -> None:
        """Stop reading. May be called twice."""
        self.stack.close()


class _Shared:
    """Runs, taken by the reader that needs the next one first, for all of them.

    The others come to it at most a block later.
    """

    def __init__(self, first: GroupRun, runs: Iterator[GroupRun]) -> None:
        self.splits_columns = first.file.splits_columns
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._runs = runs
        self._taken: dict[int, GroupRun | None] = {0: first}  # guarded by _lock

    def get(self, number: int) -> GroupRun | None:
        """Return a run; None: there are fewer."""
        with self._lock:
            if number not in self._taken:
                self._taken[number] = next(self._runs, None)
                self._taken.pop(number - 4, None)  # no reader is so far behind
            return self._taken[number]

    def all(self) -> Iterator[GroupRun]:
        """Yield all of them, for one reader."""
        number = 0
        while (run := self.get(number)) is not None:
            yield run
            number += 1

    def blocks(self, columns: Columns) -> Iterator[Read]:
        """Yield the blocks of all runs, of some columns."""
        for run in self.all():
            try:
                for rows in run.blocks(columns):
                    if self.stopped.is_set():
                        return
                    yield run, rows
            except (UnicodeError, require("pyarrow").ArrowException) as exc:
                raise unreadable(run.file.source, exc) from exc
            yield run, None


class _Lane:
    """A thread that makes items of an iterator, up to the next one with rows ahead."""

    def __init__(self, stack: ExitStack, items: Iterator[Any]) -> None:
        self._pool = ThreadPoolExecutor(1, "rows")
        self._items = items
        stack.callback(self._close)
        self._made: deque[Any] = deque()
        self._thread = 0  # its ident, once it works
        self._next: Future[list[Any]] = self._pool.submit(self._more)

    def _close(self) -> None:
        """End, and wait for the work of the thread, but not for the thread.

        Garbage collection may call this while a thread starts or ends, with a lock in
        hand that joining another one takes.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        # The thread itself may collect the garbage: it would wait for its own work.
        if threading.get_ident() != self._thread:
            futures.wait([self._next], timeouts.READS_CLOSE_S)
        with contextlib.suppress(ValueError):  # it is being executed still
            getattr(self._items, "close", bool)()

    def _more(self) -> list[Any]:
        more, self._thread = [], threading.get_ident()
        for item in self._items:
            more.append(item)
            if item[1] is not None:
                break
        return more

    def take(self) -> Any:
        """Return the next item; None: there is none."""
        if not self._made:
            with timeouts.saying(logger, lambda: "waiting for the rows of a file"):
                self._made += self._next.result()
            if not self._made:
                return None
            self._next = self._pool.submit(self._more)
        return self._made.popleft()


def _merged(
    lanes: Sequence[_Lane], parts: Sequence[Columns], columns: Columns
) -> Iterator[Read]:
    while (reads := [lane.take() for lane in lanes])[0] is not None:
        run, rows = reads[0]
        if rows is not None and len(lanes) > 1:
            rows = merge_rows(
                columns,
                [(part, read[1]) for part, read in zip(parts, reads, strict=True)],
            )
        yield run, rows


def _by_tasks(stack: ExitStack, shared: _Shared, num_readers: int) -> Iterator[Read]:
    """Yield blocks that any of the threads reads; one thread says what is next."""
    pool = ThreadPoolExecutor(num_readers, "rows")

    def submitted() -> Iterator[tuple[GroupRun, Future[Rows] | None]]:
        for run in shared.all():
            for task in run.tasks():
                yield run, pool.submit(task)
            yield run, None

    lane = _Lane(stack, submitted())
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    ahead: deque[tuple[GroupRun, Future[Rows] | None]] = deque()
    is_over = False
    while ahead or not is_over:
        while not is_over and len(ahead) < num_readers:
            taken = lane.take()
            is_over = taken is None
            if taken is not None:
                ahead.append(taken)
        if ahead:
            run, future = ahead.popleft()
            yield run, None if future is None else future.result()
