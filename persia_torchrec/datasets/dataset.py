"""Datasets of CSV and Parquet files, for any TorchRec model.

    files -> groups of rows -> partition -> windows -> batches -> parts
             (read ahead, by threads)       (rows in another order)

Without ``shuffle`` rows come in the order of the files. With it, the order of an epoch
follows from seed and epoch alone: groups are put in a random order, and the rows of as
many groups as have ``SHUFFLE_ROWS`` rows, a window, are put in a random order together.
Files of fewer rows are one window: each order of their rows is as likely as any other.

At most one window is read ahead of the one that batches are taken from, or
``num_parallel_reads`` groups if that is more.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from persia_torchrec.datasets.batches import TorchRecBatch
from persia_torchrec.datasets.columns import (
    AnyColumn,
    Columns,
    Floats,
    Int64s,
    Rows,
    require,
)
from persia_torchrec.datasets.files import CsvFile, ParquetFile, differences
from persia_torchrec.datasets.reading import (
    Group,
    Window,
    from_row,
    partition,
    read_ahead,
    select,
    windows_of,
)
from persia_torchrec.datasets.transfer import join_arrays, uses_gpu
from persia_torchrec.datasets.work_queue import Item, WorkQueue
from persia_torchrec.errors import ConfigError, DataError
from persia_torchrec.parsing.decoding import require_at_least_1

_MAX_AHEAD = 256  # steps that may be yielded and not trained

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | WorkQueue


class _Taken(NamedTuple):
    """An item of a queue, and which rows of the iteration are its own."""

    item: Item
    start: int
    stop: int


class _Settings(NamedTuple):
    """Which rows a dataset yields, in which order and batches."""

    batch_size: int
    partition_count: int
    partition_index: int
    drop_remainder: bool
    num_parallel_reads: int
    shuffle: bool
    seed: int
    min_batch_size: int
    micro_batches: int
    rows: Int64s | None
    pin_memory: bool | None

    @property
    def min_rows(self) -> int:
        """Rows that a step has at least."""
        return self.min_batch_size * self.micro_batches

    def check(self) -> None:
        names = ["batch_size", "partition_count", "num_parallel_reads"]
        names += ["min_batch_size", "micro_batches"]
        require_at_least_1(**{name: getattr(self, name) for name in names})
        if not 0 <= self.partition_index < self.partition_count:
            raise ConfigError(
                f"partition_index must be in [0, {self.partition_count}). Received: "
                f"{self.partition_index}."
            )
        if self.min_rows > self.batch_size:
            raise ConfigError(
                "min_batch_size must be at most batch_size / micro_batches. Received: "
                f"{self.min_batch_size}, {self.batch_size} / {self.micro_batches}."
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0. Received: {self.seed}.")


class RowDataset:
    """What datasets of files share: batches of their rows, epoch by epoch.

    A batch is a ``TorchRecBatch`` on the CPU: ``id_features`` with int64 ids and int32
    lengths, the names of the ``IdColumn`` as keys; ``labels`` float32 ``(B,)`` each;
    ``dense_features`` float32 ``(B, 1)`` each.

    With ``micro_batches`` n the rows of each step, in the same order, are yielded as n
    such batches whose sizes differ by at most one. ``fraction`` is that of the step's
    rows that each has: ``accumulate(sharders, n)`` around the loop, ``loss *
    batch.fraction`` and one step of the dense optimizer for n of them are the update of
    the whole batch.

    Each ``iter`` yields one epoch: 0, 1, ... With a ``WorkQueue`` it yields what this
    trainer takes of all its epochs. One thread iterates, any may ask for the state.

    Args:
        files: a path, several, or a ``WorkQueue``, which divides them among trainers.
        batch_size: rows of a step.
        columns: what is read. A plain name is a column that is not.
        partition_count: parts of the files; each group of rows is in one.
        partition_index: which of them this dataset reads.
        drop_remainder: whether an epoch ends with its last step of ``batch_size``.
        num_parallel_reads: threads that read groups ahead.
        shuffle: whether each epoch has an order of its own, of seed and epoch.
        seed: of the orders, at least 0.
        min_batch_size: rows of each batch that is yielded, at least: a last step with
            fewer for one of its batches joins the step before. 2 for batch norm, which
            needs two. Of a ``WorkQueue`` each trainer takes no row, or enough.
        micro_batches: batches that each step is yielded as, also the last one.
        rows: int64, numbers of the rows that are read, over all files; None: all.
        pin_memory: whether batches are in pinned memory, from where they go to a GPU
            while the trainer continues. None: if this process uses one by then.

    Raises:
        ConfigError: an argument is out of range, pyarrow or xxhash is missing, or
            partitions or ``drop_remainder`` are wanted of a ``WorkQueue``. When it is
            iterated over: a state leaves fewer rows than a step must have.
        DataError: a file is missing, empty, malformed, or of other columns.
    """

    _opener: ClassVar[type[CsvFile] | type[ParquetFile]]

    def __init__(
        self,
        files: Files,
        batch_size: int,
        columns: Sequence[AnyColumn],
        *,
        partition_count: int = 1,
        partition_index: int = 0,
        drop_remainder: bool = False,
        num_parallel_reads: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        min_batch_size: int = 1,
        micro_batches: int = 1,
        rows: Int64s | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        if rows is not None:
            rows = np.asarray(rows, np.int64)
        self._settings = settings = _Settings(
            batch_size,
            partition_count,
            partition_index,
            drop_remainder,
            num_parallel_reads,
            shuffle,
            seed,
            min_batch_size,
            micro_batches,
            rows,
            pin_memory,
        )
        settings.check()
        for library in ("pyarrow", "xxhash"):
            require(library)
        self._columns = Columns(columns)
        self._queue = files if isinstance(files, WorkQueue) else None
        self._files = [self._opener(path, self._columns) for path in _paths(files)]
        self._by_path = {file.path: file for file in self._files}
        self._kept = self._choose()  # None: groups are known when a file is taken
        self._taken = deque[_Taken]()  # of the queue; guarded by _lock
        self._lock = threading.Lock()
        self._epoch = self._start = 0  # of the iteration; guarded by _lock
        self._is_next = True  # they are of the next one; guarded by _lock
        self._iteration = 0  # guarded by _lock
        self._num_steps = 0  # whose parts were all yielded; guarded by _lock
        self._ends = deque([0], _MAX_AHEAD + 1)  # rows up to each; guarded by _lock

    def _choose(self) -> list[Group] | None:
        """Return the groups to read, if they are known before a file is taken."""
        settings = self._settings
        count, least = settings.partition_count, settings.min_rows
        if self._queue is not None and (count > 1 or settings.drop_remainder):
            raise ConfigError(
                "A WorkQueue divides files among trainers, and trains every row. "
                f"Received: partition_count={count}, "
                f"drop_remainder={settings.drop_remainder}."
            )
        groups = None
        if self._queue is None or settings.rows is not None:
            groups = select(self._files, settings.rows)
        if self._queue is None:
            groups = partition(groups or [], count, settings.partition_index)
        if groups is None:
            num_rows = sum(file.num_rows_up_to(least) for file in self._files)
        else:
            num_rows = sum(group.num_rows for group in groups)
        if num_rows < least:
            what = "A partition" if self._queue is None else "A WorkQueue"
            raise DataError(
                f"{what} must have at least {least} rows. Received: {num_rows}."
            )
        return groups

    @property
    def feature_names(self) -> list[str]:
        """Names of the ID features, the keys of ``id_features``."""
        return [column.name for column in self._columns.ids]

    @property
    def label_names(self) -> list[str]:
        """Names of the labels, in their order."""
        return [column.name for column in self._columns.labels]

    @property
    def num_beyond_buckets(self) -> dict[str, int]:
        """How many integers ``num_buckets`` has cut so far, by column."""
        return dict(self._columns.num_beyond)

    @property
    def micro_batches(self) -> int:
        """Batches that each step is yielded as."""
        return self._settings.micro_batches

    @property
    def epoch(self) -> int:
        """The epoch that the next ``iter`` yields, from 0."""
        with self._lock:
            return self._epoch if self._is_next else self._epoch + 1

    @cached_property
    def num_rows(self) -> int:
        """Rows of an epoch: of this partition, or of a whole ``WorkQueue``."""
        groups = self._kept if self._kept is not None else select(self._files, None)
        return sum(group.num_rows for group in groups)

    def __len__(self) -> int:
        """Return how many batches ``iter`` yields: ``micro_batches`` for each step.

        Of an epoch; with a queue, of that of all trainers.
        """
        settings = self._settings
        full, rest = divmod(self.num_rows, settings.batch_size)
        joins = bool(full) and rest < settings.min_rows
        num_steps = full + (rest > 0 and not joins and not settings.drop_remainder)
        return num_steps * settings.micro_batches

    def __iter__(self) -> Iterator[TorchRecBatch]:
        """Yield the next epoch; after a load the rest of the one that was saved."""
        with self._lock:
            if not self._is_next:
                self._epoch, self._start = self._epoch + 1, 0
            left = self._left(self._ends[-1])
            self._begin()
            self._is_next = False
            if self._queue is not None:
                for item, num_rows in left:
                    self._add(item, num_rows)
                windows = self._windows_taken(self._iteration)
            else:
                seed = self._seed(self._epoch)
                windows = from_row(windows_of(self._kept or [], seed), self._start)
            return self._iterate(windows, self._iteration)

    def state_dict(self, num_trained: int | None = None) -> dict[str, Any]:
        """Return where the iteration is, and what a load checks, as JSON's values.

        Args:
            num_trained: of the batches of this iteration, whole steps of
                ``micro_batches`` each, so that others, which a pipeline took ahead,
                come again. None: all steps whose batches were all yielded.

        Raises:
            ConfigError: more were not yielded, or 256 steps since then were; steps are
                not whole; or other trainers take from the same ``WorkQueue``:
                ``recoverable`` saves that.
        """
        queue = self._queue
        if queue is None:
            with self._lock:
                row = self._end_of(num_trained)
                return {"epoch": self._epoch, "row": row, "of": self._identity}
        if queue.is_shared:
            raise ConfigError(
                "The state of a WorkQueue must be saved by all trainers together. "
                "Received: a call of state_dict by one of several. Put the dataset "
                'into the state of recoverable: {"data": dataset}.'
            )
        num_taken = queue.num_taken()
        return self.joint_state(num_taken, self.leases(num_taken, num_trained))

    @property
    def is_queued(self) -> bool:
        """Whether a ``WorkQueue`` says what is read."""
        return self._queue is not None

    @property
    def is_shared(self) -> bool:
        """Whether several trainers take from the ``WorkQueue`` of this dataset."""
        return self._queue is not None and self._queue.is_shared

    def num_taken(self) -> int:
        """Return how many items of the ``WorkQueue`` all trainers have taken."""
        return 0 if self._queue is None else self._queue.num_taken()

    def leases(self, num_taken: int, num_trained: int | None) -> list[tuple[int, int]]:
        """Return numbers and rows of items that this trainer has not trained whole.

        Args:
            num_taken: items with this number, or a greater one, do not count.
            num_trained: as of :meth:`state_dict`.
        """
        with self._lock:
            left = self._left(self._end_of(num_trained))
        return [(item.number, item.row) for item, _ in left if item.number < num_taken]

    def joint_state(
        self, num_taken: int, leases: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return the state of a ``WorkQueue`` with the leases of all its trainers."""
        assert self._queue is not None
        state = self._queue.state(num_taken, leases)
        return {**state, "of": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter`` continue at a saved state, at the row.

        Sizes of batches and parts may be others than when it was saved.

        Raises:
            ConfigError: the state is of other files or settings; it names them.
        """
        if faults := differences(state["of"], self._identity):
            raise ConfigError(
                "A dataset must have the files and settings of the saved state. "
                f"Received: {'; '.join(faults)}."
            )
        if self._queue is not None:
            self._queue.load(state)
            return
        with self._lock:
            self._epoch, self._start = int(state["epoch"]), int(state["row"])
            self._begin()
            self._is_next = True

    def _begin(self) -> None:
        """Count from the start of an iteration; an earlier one counts no more."""
        self._iteration += 1
        self._num_steps = 0
        self._taken.clear()
        self._ends.clear()
        self._ends.append(self._start)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Return what the order of the rows depends on."""
        settings = self._settings
        rows = None if settings.rows is None else settings.rows.tobytes()
        own = {
            "seed": settings.seed if settings.shuffle else None,
            "rows": rows and require("xxhash").xxh3_64_hexdigest(rows),
        }
        if self._queue is not None:
            return {**self._queue.identity(), **own}
        files = self._files
        return {
            **own,
            "files": [f"{f.path.name} ({f.path.stat().st_size} bytes)" for f in files],
            "partition_count": settings.partition_count,
            "partition_index": settings.partition_index,
        }

    def _seed(self, *of: int) -> tuple[int, ...] | None:
        """Return the seed of an order, or None if there is no random one."""
        return (self._settings.seed, *of) if self._settings.shuffle else None

    def _end_of(self, num_trained: int | None) -> int:
        """Return up to which row the first batches of the iteration are."""
        if num_trained is None:
            return self._ends[-1]
        parts = self._settings.micro_batches
        num_steps, rest = divmod(num_trained, parts)
        behind = self._num_steps - num_steps
        if rest or not 0 <= behind < len(self._ends):
            raise ConfigError(
                "num_trained must be one of the last batches, and the last part of a "
                f"step. Received: {num_trained}, of {self._num_steps} steps of {parts} "
                "that were yielded. Count every part: run.step(micro_batches)."
            )
        return self._ends[-1 - behind]

    def _left(self, end: int) -> list[tuple[Item, int]]:
        """Return what was taken from a row of the iteration on, and how many rows."""
        return [
            (item._replace(row=item.row + max(end - start, 0)), stop - max(end, start))
            for item, start, stop in self._taken
            if end < stop
        ]

    def _add(self, item: Item, num_rows: int) -> None:
        """Note the rows that come next; forget items that no state would have."""
        start = self._taken[-1].stop if self._taken else 0
        self._taken.append(_Taken(item, start, start + num_rows))
        while len(self._taken) > 1 and self._taken[0].stop <= self._ends[0]:
            self._taken.popleft()

    def _windows_taken(self, iteration: int) -> Iterator[tuple[Window, int]]:
        """Yield the windows of items: those that were left, and what is taken."""
        queue = self._queue
        assert queue is not None
        least = self._settings.min_rows
        waiting = deque[tuple[Item, list[Group]]]()
        with self._lock:
            waiting += ((taken.item, []) for taken in self._taken)
        while True:
            with self._lock:  # what is taken and not yet noted would be in no state
                if iteration != self._iteration:
                    return
                if not waiting:
                    for item in queue.take_rows(least, self._num_rows_up_to_least):
                        groups = self._groups_of(item)
                        self._add(item, sum(g.num_rows for g in groups) - item.row)
                        waiting.append((item, groups))
            if not waiting:
                return
            item, groups = waiting.popleft()
            seed = self._seed(item.epoch, item.place)
            windows = windows_of(groups or self._groups_of(item), seed)
            yield from from_row(windows, item.row)

    def _num_rows_up_to_least(self, item: Item) -> int:
        """Return how many rows an item has left; of a whole file up to those needed."""
        if self._kept is None and item.groups is None and not item.row:
            least = self._settings.min_rows
            return self._by_path[item.file].num_rows_up_to(least)
        return sum(group.num_rows for group in self._groups_of(item)) - item.row

    def _groups_of(self, item: Item) -> list[Group]:
        groups = self._kept
        if groups is None:  # opened for the item only: it may be unpacked to be read
            groups = select([self._opener(item.file, self._columns)], None)
        first, stop = item.groups or (0, len(groups))
        return [
            group
            for group in groups
            if group.file.path == item.file and first <= group.group < stop
        ]

    def _iterate(
        self, windows: Iterator[tuple[Window, int]], iteration: int
    ) -> Iterator[TorchRecBatch]:
        rows = read_ahead(windows, self._settings.num_parallel_reads)
        for parts in _in_steps(rows, self._settings):
            num_rows = sum(span.num_rows for part in parts for span in part)
            is_pinned = self._settings.pin_memory
            if is_pinned is None:
                is_pinned = uses_gpu()
            given = num_rows, self._columns
            batches = [_batch(part, *given, is_pinned=is_pinned) for part in parts]
            yield from batches[:-1]
            with self._lock:
                if iteration == self._iteration:
                    self._num_steps += 1
                    self._ends.append(self._ends[-1] + num_rows)
            yield batches[-1]


class CsvDataset(RowDataset):
    """Batches of CSV files, plain or ``.gz``; see :class:`RowDataset`.

    Fields are divided by commas, without quotes; spaces around one are no part of it.
    There is no header; ``columns`` are all of a line, in their order. Every line and
    its labels are checked when the dataset is made. Groups of rows are 8,192 lines. A
    ``.gz`` file is unpacked into a temporary one.
    """

    _opener = CsvFile


class ParquetDataset(RowDataset):
    """Batches of Parquet files; see :class:`RowDataset`.

    Columns are found by their names. Text is a string, bytes, or either as a
    dictionary; several tokens are a list, or text with the separator. Groups of rows
    are the row groups.
    """

    _opener = ParquetFile


def _paths(files: Files) -> list[Path]:
    if isinstance(files, WorkQueue):
        return files.files
    paths = [files] if isinstance(files, str | os.PathLike) else files
    if not paths:
        raise ConfigError("files must be at least one. Received: none.")
    return [Path(path) for path in paths]


class _Span(NamedTuple):
    """Consecutive rows of a window."""

    rows: Rows
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def _in_steps(
    blocks: Iterator[Rows], settings: _Settings
) -> Iterator[list[list[_Span]]]:
    """Yield each step's parts; the rows of one are of one block, or of several."""
    size, least = settings.batch_size, settings.min_rows
    enough = size + (least if least > 1 else 0)  # so that the last one can join
    waiting: deque[_Span] = deque()
    num_rows = 0

    def cut(wanted: int) -> list[_Span]:
        spans = []
        while wanted:
            span = waiting.popleft()
            stop = min(span.start + wanted, span.stop)
            spans.append(span._replace(stop=stop))
            wanted -= stop - span.start
            if stop < span.stop:
                waiting.appendleft(span._replace(start=stop))
        return spans

    def parts(num_taken: int) -> list[list[_Span]]:
        each, rest = divmod(num_taken, settings.micro_batches)
        return [cut(each + (part < rest)) for part in range(settings.micro_batches)]

    for rows in blocks:
        waiting.append(_Span(rows, 0, rows.num_rows))
        num_rows += rows.num_rows
        while num_rows >= enough:
            num_rows -= size
            yield parts(size)
    if 0 < num_rows < least and not settings.drop_remainder:
        raise ConfigError(
            f"A step must have at least {least} rows, micro_batches * min_batch_size. "
            f"Received: {num_rows} that a loaded state has left. Load it with the "
            "settings that it was saved with."
        )
    while num_rows >= (size if settings.drop_remainder else 1):
        joins = size < num_rows < size + least and not settings.drop_remainder
        taken = num_rows if joins else min(size, num_rows)
        num_rows -= taken
        yield parts(taken)


def _batch(
    spans: Sequence[_Span], num_rows: int, columns: Columns, *, is_pinned: bool
) -> TorchRecBatch:
    """Return the rows, of so many of a step, as tensors."""
    join = partial(join_arrays, is_pinned=is_pinned)
    values, lengths = [], []
    for f in range(len(columns.ids)):
        for rows, start, stop in spans:
            ids, sizes = rows.ids[f].part(start, stop)
            values.append(ids)
            lengths.append(sizes)

    def numbers(column: int, of_rows: Callable[[Rows], list[Floats]]) -> torch.Tensor:
        arrays = [of_rows(rows)[column][start:stop] for rows, start, stop in spans]
        return join(arrays)

    labels, dense = range(len(columns.labels)), range(len(columns.dense))
    return TorchRecBatch(
        id_features=KeyedJaggedTensor(
            keys=[column.name for column in columns.ids],
            values=join(values),
            lengths=join(lengths),
        ),
        labels=tuple(numbers(i, lambda rows: rows.labels) for i in labels),
        label_names=tuple(column.name for column in columns.labels),
        dense_features=tuple(
            numbers(i, lambda rows: rows.dense).unsqueeze(1) for i in dense
        ),
        dense_names=tuple(column.name for column in columns.dense),
        fraction=sum(span.num_rows for span in spans) / num_rows,
    )
