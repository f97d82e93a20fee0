"""Datasets of CSV, JSON, Parquet, Arrow and NumPy files, for any TorchRec model.

    files -> groups of rows -> partition -> windows -> steps -> batches
             (read ahead, by threads)       (rows in another order)

Without ``shuffle`` rows come in the order of the files. With it, the order of an epoch
follows from seed and epoch alone: groups are put in a random order, and the rows of as
many groups as have ``SHUFFLE_ROWS`` rows, a window, are put in a random order together.
Files of fewer rows are one window: each order of their rows is as likely as any other.
Of a window of more rows each so many are.

A block of rows is read ahead of the one that batches are taken from, or of text
``num_parallel_reads``; with ``shuffle`` a piece of a stretch, too.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch.utils.data

from persia_torchrec import env
from persia_torchrec.datasets.columns import (
    AnyColumn,
    Columns,
    Int64s,
    Rows,
    note_others,
    require,
)
from persia_torchrec.datasets.files import CsvFormat
from persia_torchrec.datasets.reading import (
    Group,
    GroupRun,
    has_order_of,
    open_all,
    partition,
    runs_from,
    say_empty,
    select,
    stretches,
    windows_of,
)
from persia_torchrec.datasets.sources import (
    Files,
    Source,
    differences,
    find_sources,
    legacy_identity,
)
from persia_torchrec.datasets.steps import (
    Settings,
    batch_of,
    in_steps,
    tell_epoch,
    worker_of_loader,
)
from persia_torchrec.datasets.tables import TableFile
from persia_torchrec.datasets.work_queue import Item, WorkQueue
from persia_torchrec.device.batches import TorchRecBatch
from persia_torchrec.device.transfer import uses_gpu
from persia_torchrec.errors import ConfigError, DataError
from persia_torchrec.job.signals import outlive_end_signals

logger = logging.getLogger(__name__)

_MAX_AHEAD = 256  # steps that may be yielded and not trained
_ORDER = 3  # version of what an order follows from


@dataclass(slots=True)
class _Taken:
    """An item of a queue, and which rows of the iteration are its own.

    ``start`` is None until the items before were read, ``stop`` until this one was.
    """

    item: Item
    start: int | None = None
    stop: int | None = None


class RowDataset(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """What datasets of files share: batches of their rows, epoch by epoch.

    A batch is a ``TorchRecBatch`` on the CPU: ``id_features`` with int64 ids and int32
    lengths, keys are the names of the ``IdColumn``; ``labels`` float32 ``(B,)`` each;
    ``dense_features`` float32 ``(B, 1)`` or ``(B, size)`` each. Where a column is
    weighted, all ids have weights, those of other columns 1.

    With ``micro_batches`` n the rows of each step, in the same order, are yielded as n
    such batches whose sizes differ by at most one. ``fraction`` is that of the step's
    rows that each has: ``accumulate(sharders, n)`` around the loop, ``loss *
    batch.fraction`` and one step of the dense optimizer for n of them are the update of
    the whole batch.

    Each ``iter`` yields one epoch: 0, 1, ... With a ``WorkQueue`` it yields what this
    trainer takes of all its epochs. One thread iterates, any may ask for the state.

    ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=N)`` iterates in
    N processes, which share the groups of rows of this partition. Where they are new
    ones in each epoch, ``set_epoch`` says which one it is.

    Args:
        files: a path, folder, glob or URL, several, or a ``WorkQueue``, which divides
            them among trainers. Files without rows are passed over.
        batch_size: rows of a step.
        columns: what is read. A plain name is a column that is not.
        partition_count: parts of the files; each group of rows is in one.
        partition_index: which of them this dataset reads.
        drop_remainder: whether an epoch ends with its last step of ``batch_size``.
        num_parallel_reads: threads that read groups ahead.
        shuffle: whether each epoch has an order of its own, of seed and epoch; or how
            many rows are put in order together, 32,768 unless it says so.
        seed: of the orders, at least 0.
        min_batch_size: rows of each batch that is yielded, at least: a last step with
            fewer for one of its batches joins the step before. 2 for batch norm, which
            needs two. Of a ``WorkQueue`` each trainer takes no row, or enough.
        micro_batches: batches that each step is yielded as, also the last one.
        rows: int64, numbers of the rows that are read, over all files; None: all.
        pin_memory: whether batches are in pinned memory, from where they go to a GPU
            while the trainer continues. None: if this process uses one by then.
        convert: makes what is yielded of each batch, as ``torchrec_batch`` or
            ``plain_tensors`` does. None: it is yielded itself.

    Raises:
        ConfigError: an argument is out of range, pyarrow or xxhash is missing, or
            partitions or ``drop_remainder`` are wanted of a ``WorkQueue``. When it is
            iterated over: a state leaves fewer rows than a step must have.
        DataError: a file is missing, empty, malformed, or of other columns.
    """

    _opener: ClassVar[type[TableFile]]
    _format: CsvFormat | None = None

    def __init__(
        self,
        files: Files | WorkQueue,
        batch_size: int,
        columns: Sequence[AnyColumn],
        *,
        partition_count: int = 1,
        partition_index: int = 0,
        drop_remainder: bool = False,
        num_parallel_reads: int = 1,
        shuffle: bool | int = False,
        seed: int = 0,
        min_batch_size: int = 1,
        micro_batches: int = 1,
        rows: Int64s | None = None,
        pin_memory: bool | None = None,
        convert: Callable[[TorchRecBatch], Any] | None = None,
    ) -> None:
        if rows is not None:
            rows = np.asarray(rows, np.int64)
        self._settings = settings = Settings(
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
        _ = require("pyarrow"), require("xxhash")
        self._columns = Columns(columns)
        self._convert = convert
        self._queue = files if isinstance(files, WorkQueue) else None
        sources = files.files if isinstance(files, WorkQueue) else find_sources(files)
        self._all_files = open_all(self._open, sources, self._columns)
        self._files = [file for file in self._all_files if not file.is_empty]
        if empty := [file for file in self._all_files if file.is_empty]:
            logger.warning("%s", say_empty(empty, len(sources)))
        if not self._files:
            raise self._all_files[0].no_rows()
        self._by_path = {file.path: file for file in self._all_files}
        self._kept = self._choose()  # None: groups are known when a file is taken
        self._taken = deque[_Taken]()  # of the queue; guarded by _lock
        self._lock = threading.Lock()
        self._epoch = self._start = 0  # of the iteration; guarded by _lock
        self._is_next = True  # they are of the next one; guarded by _lock
        self._iteration = 0  # guarded by _lock
        self._num_steps = 0  # whose parts were all yielded; guarded by _lock
        self._ends = deque([0], _MAX_AHEAD + 1)  # rows up to each; guarded by _lock
        self._missing = Counter[str]()  # of the iteration; guarded by _lock

    def _open(self, source: Source) -> TableFile:
        opener: Any = self._opener
        file: TableFile = opener(source, self._columns, self._format)
        return file

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
        if groups is None or least == 1:
            num_rows = sum(file.num_rows_up_to(least) for file in self._files)
        else:
            num_rows = 0
            for group in groups:  # of text files only as many lines as are needed
                num_rows += group.num_rows if num_rows < least else 0
        if num_rows < least:
            what = "A partition" if self._queue is None else "A WorkQueue"
            more = f" and {n} more files" if (n := len(self._files) - 1) else ""
            raise DataError(
                f"{what} must have at least {least} rows. Received: {num_rows}, of "
                f"{self._files[0].source.url}{more}."
            )
        return groups

    @property
    def makes_new_memory(self) -> bool:
        """Whether no batch shares memory with another, or with the caller."""
        return self._convert is None

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

    @property
    def missing(self) -> dict[str, int]:
        """Missing values of columns that have some, of the current epoch, by name."""
        return dict(self._missing)

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter`` yield an epoch, from its start.

        Raises:
            ConfigError: it is negative, or the dataset has a ``WorkQueue``.
        """
        if epoch < 0 or self._queue is not None:
            raise ConfigError(
                "epoch must be at least 0, and must not be set with a WorkQueue, "
                f"which counts epochs. Received: {epoch}."
            )
        with self._lock:
            self._epoch, self._start, self._is_next = epoch, 0, True
            self._begin()

    @cached_property
    def num_rows(self) -> int:
        """Rows of an epoch, or a ``WorkQueue``; it counts the lines of text files."""
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

    def __iter__(self) -> Iterator[Any]:
        """Yield the next epoch; after a load the rest of the one that was saved."""
        worker = worker_of_loader()
        if worker is not None and env.text("PERSIA_MEMBER"):
            outlive_end_signals()
        with self._lock:
            if not self._is_next:
                self._epoch, self._start = self._epoch + 1, 0
            left = self._left(self._ends[-1])
            self._begin()
            self._is_next = False
            is_whole = not self._start
            if self._queue is not None:
                if worker is not None:
                    raise ConfigError(
                        "A WorkQueue must be used in the process that made it. "
                        "Received: a worker of a DataLoader. Set num_workers=0; "
                        "num_parallel_reads=N reads by N threads."
                    )
                self._taken += (_Taken(item) for item in left)
                if self._taken:
                    self._taken[0].start = 0
                runs = self._runs_taken(self._iteration)
            else:
                groups = self._kept or []
                if worker is not None:
                    groups = groups[worker[0] :: worker[1]]
                runs = self._runs(groups, self._start, self._epoch)
            return self._iterate(runs, self._iteration, is_whole=is_whole)

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

    def next_state(self) -> dict[str, Any]:
        """Return the state at the beginning of the pass that ``iter`` begins next.

        Of an iteration that has yielded nothing yet, that at its own beginning.
        """
        with self._lock:
            is_ahead = self._is_next or not self._num_steps
            epoch = self._epoch if is_ahead else self._epoch + 1
            row = self._start if is_ahead else 0
            return {"epoch": epoch, "row": row, "of": self._identity}

    @property
    def is_queued(self) -> bool:
        """Whether a ``WorkQueue`` says what is read."""
        return self._queue is not None

    @property
    def is_shared(self) -> bool:
        """Whether several trainers take from the ``WorkQueue`` of this dataset."""
        return self._queue is not None and self._queue.is_shared

    def divided_files(self) -> list[str]:
        """Return the files, if trainers divide their groups of rows by partitions."""
        is_divided = self._settings.partition_count > 1
        return self._order_of_files["files"] if is_divided else []

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
        return [(item.number, item.row) for item in left if item.number < num_taken]

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
        here, saved, settings = self._identity, state["of"], self._settings
        order, most = saved.get("order"), settings.shuffle_rows
        count = settings.partition_count
        if order != _ORDER and has_order_of(order, self._files, most, count):
            here["order"] = order
            if order is None:
                here["files"] = [legacy_identity(file) for file in here["files"]]
        if faults := differences(saved, here):
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
        self._missing.clear()
        self._ends.clear()
        self._ends.append(self._start)

    @property
    def _identity(self) -> dict[str, Any]:
        """Return what the order of the rows depends on."""
        settings, worker = self._settings, worker_of_loader()
        workers = {} if worker is None else {"worker": list(worker)}
        return {
            **self._order_of_files,
            "order": _ORDER,
            "seed": settings.seed if settings.shuffle else None,
            "shuffle": settings.shuffle if settings.shuffle > 1 else None,
            **workers,
        }

    @cached_property
    def _order_of_files(self) -> dict[str, Any]:
        settings = self._settings
        rows = None if settings.rows is None else settings.rows.tobytes()
        own = {"rows": rows and require("xxhash").xxh3_64_hexdigest(rows)}
        if self._queue is not None:
            return {**self._queue.identity(), **own}
        return {
            **own,
            "files": [file.source.identity() for file in self._all_files],
            "partition_count": settings.partition_count,
            "partition_index": settings.partition_index,
        }

    def _runs(self, groups: list[Group], row: int, *of: int) -> Iterator[GroupRun]:
        """Return what is to be read of groups from a row on; ``of`` is of the seed."""
        settings = self._settings
        seed = (settings.seed, *of) if settings.shuffle else None
        return runs_from(windows_of(groups, seed, settings.shuffle_rows), row)

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

    def _left(self, end: int) -> list[Item]:
        """Return what was taken from a row of the iteration on."""
        return [
            taken.item._replace(row=taken.item.row + max(end - taken.start, 0))
            if taken.start is not None
            else taken.item
            for taken in self._taken
            if taken.stop is None or end < taken.stop
        ]

    def _runs_taken(self, iteration: int) -> Iterator[GroupRun]:
        """Yield what is to be read: of items that were left, and of those taken."""
        queue = self._queue
        assert queue is not None
        least = self._settings.min_rows
        with self._lock:
            waiting = deque(self._taken)
        while True:
            with self._lock:  # what is taken and not yet noted would be in no state
                if iteration != self._iteration:
                    return
                if not waiting:
                    for item in queue.take_rows(least, self._num_rows_up_to_least):
                        before = self._taken[-1] if self._taken else None
                        taken = _Taken(item, before.stop if before else 0)
                        self._taken.append(taken)
                        waiting.append(taken)
            if not waiting:
                return
            taken = waiting.popleft()
            item = taken.item
            groups = self._groups_of(item)
            for run in self._runs(groups, item.row, item.epoch, item.place):
                run.item = taken
                yield run
            yield GroupRun(self._by_path[item.file], [], item=taken)

    def _finish(self, taken: _Taken, num_rows: int) -> None:
        """Note how many rows an item has; forget items that no state would have."""
        assert taken.start is not None
        taken.stop = taken.start + num_rows
        if (at := self._taken.index(taken) + 1) < len(self._taken):
            self._taken[at].start = taken.stop
        while len(self._taken) > 1:
            stop = self._taken[0].stop
            if stop is None or stop > self._ends[0]:
                break
            self._taken.popleft()

    def _num_rows_up_to_least(self, item: Item) -> int:
        """Return how many rows an item has left; of a whole file up to those needed."""
        if self._kept is None and item.groups is None and not item.row:
            least = self._settings.min_rows
            return self._by_path[item.file].num_rows_up_to(least)
        return sum(group.num_rows for group in self._groups_of(item)) - item.row

    def _groups_of(self, item: Item) -> list[Group]:
        groups = self._kept
        if groups is None:
            groups = select([self._by_path[item.file]], None)
        first, stop = item.groups or (0, max((g.group for g in groups), default=0) + 1)
        return [
            group
            for group in groups
            if group.file.path == item.file
            and first <= group.group < stop
            and group.rows_hint != 0
        ]

    def _iterate(
        self, runs: Iterator[GroupRun], iteration: int, *, is_whole: bool
    ) -> Iterator[Any]:
        columns = self._columns
        convert = self._convert or (lambda batch: batch)
        others = {c.name: Counter[str]() for c in columns.labels if c.positive}
        rows = self._noted(runs, iteration, others if is_whole else {})
        for parts in in_steps(rows, self._settings):
            num_rows = sum(span.num_rows for part in parts for span in part)
            pins = self._settings.pin_memory
            is_pinned = uses_gpu() if pins is None else pins
            batches: list[Any] = [
                convert(batch_of(part, num_rows, columns, is_pinned=is_pinned))
                for part in parts
            ]
            yield from batches[:-1]
            with self._lock:
                if iteration == self._iteration:
                    self._num_steps += 1
                    self._ends.append(self._ends[-1] + num_rows)
            yield batches[-1]
        tell_epoch(self.missing, others if is_whole else {}, columns)

    def _noted(
        self, runs: Iterator[GroupRun], iteration: int, others: dict[str, Counter[str]]
    ) -> Iterator[Rows]:
        """Yield rows; note what they lack, and where the items of a queue end."""
        num_rows = 0
        settings = self._settings
        reads = stretches(
            runs, self._columns, settings.num_parallel_reads, settings.shuffle_rows
        )
        with closing(reads):
            for run, rows in reads:
                with self._lock:
                    if rows is None:
                        if run.item is not None and not run.groups:
                            if iteration == self._iteration:
                                self._finish(run.item, num_rows)
                            num_rows = 0
                        continue
                    if iteration == self._iteration:
                        self._missing.update(rows.missing)
                num_rows += rows.num_rows
                note_others(others, rows)
                yield rows

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process, as of a loader's worker, needs."""
        if self._queue is not None:
            raise ConfigError(
                "A dataset of a WorkQueue must stay in its process. Received: a call "
                "of pickle. Set num_workers=0; num_parallel_reads=N reads by N threads."
            )
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what another process had."""
        vars(self).update(state)
        self._lock = threading.Lock()
