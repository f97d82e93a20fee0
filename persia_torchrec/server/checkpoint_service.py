"""Dumps and loads of one server, in the background of its requests.

    dump    serving thread: RowExport --1 MiB of slots--> queue
            another thread: queue --> columns --> checksum --> file
    load    a thread reads and checks the files; when told to, it takes the store over
            and fills it, and requests for rows are rejected meanwhile
    delta   an increment of all that has changed is written; and its position is told
    drop    likewise; then a table is dropped, and its rows are freed in the background

A server that lost its memory restores what was written of it before it serves.

A request begins something, or asks how far it has come, and is answered at once by the
state of the task: ``phase`` is that of the task, or ``idle`` if the server knows none
such, as when it was started again; ``result``, at the end, a ``DumpResult``, a
``Loaded`` or an ``EndedIncrement``. What was begun is not begun again: a request may be
sent again.
"""

import contextlib
import logging
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.arrays import Words
from persia_torchrec.checkpoint import increment_log
from persia_torchrec.checkpoint.background import Activity, BackgroundTask, CpuBudget
from persia_torchrec.checkpoint.catalog import (
    DumpResult,
    EndedIncrement,
    LoadRules,
    LogPosition,
    SavedShard,
    SavedTable,
)
from persia_torchrec.checkpoint.fitting import find_not_finite
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.checkpoint.load import ShardLoad, Target
from persia_torchrec.checkpoint.restore import restore
from persia_torchrec.checkpoint.row_file import RowFileWriter, ShardHead, saved_tables
from persia_torchrec.embedding.setting import Admission, Sightings
from persia_torchrec.errors import BusyError, CheckpointError, StoreError
from persia_torchrec.rpc.messages import ErrorReply, TaskState
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_copy import RawRows, RowExport, split_by_table

logger = logging.getLogger(__name__)

_CPU_FRACTION = 0.05  # that a dump and its writing take while requests for rows arrive
_DELTA_MS = 2  # how soon the server looks again whether an increment is written
_AT_REST = "idle", "dumped", "loaded", "written", "dropped", "failed"
_DELTA_PHASES = "writing", "ending", "freeing"
_FIRST_STEPS = "checked", "unused"  # whose client has yet to ask for the next step
_MAX_ENDED = 16  # tasks whose end is kept, for clients that ask after the next began
_MAX_CHUNKS = 4
_BLOCK_IDS = 2**20
_CHECK_S = 0.1

Remembered: TypeAlias = tuple[int, Admission, Words]
"""A table, and a copy of what its admission remembers."""
Chunk: TypeAlias = RawRows | Remembered

_DoAtOnce = Literal["prune", "cancel", "progress"]


class CheckpointRequest(msgspec.Struct, kw_only=True):
    """What a CHECKPOINT or PROGRESS asks for; the client chooses the task's number.

    ``dump`` into a folder, which exists; ``check`` a checkpoint, and its increments if
    they are named, to their end or ``until`` a position in the log of each server;
    ``load`` it once it is checked, else check it first; end the increment of a
    ``delta``; look whether a ``table`` is ``unused``, then ``drop`` it, whose number on
    each server is told, -1 where it was dropped; ``cancel`` a dump, or a load that does
    not fill the store yet; ``prune`` increments, which is no task.
    """

    do: Literal["dump", "check", "load", "delta", "unused", "drop"] | _DoAtOnce = (
        "progress"
    )
    task: int
    table: str = ""
    numbers: tuple[int, ...] = ()
    folder: str = ""
    replace: bool = True
    increments: str | None = None
    until: tuple[LogPosition, ...] | None = None
    rules: LoadRules = LoadRules()

    def __post_init__(self) -> None:
        if self.do in ("dump", "check", "load") and not self.folder:
            raise ValueError("folder must be a path or URL")


class KnownUpdates(NamedTuple):
    """What a job knows of a server: the sum of its tables' steps, and the mean of rows.

    Each update of a table counts.
    """

    num_updates: int
    rows_per_update: float


class DeltaEnd:
    """The end of an increment: ``writing``, then ``written`` or ``failed``.

    The serving thread calls all methods. Until the increment is written, nothing is
    added that came later; its rows are as they are when they are copied.
    """

    progress = 0.0

    def __init__(
        self, increments: Increments, store: EmbeddingStore, config: ServerConfig
    ) -> None:
        logs = config.increments_dir
        self.phase = "written" if logs is None else "writing"  # there is nothing to do
        self.error: Exception | None = None
        self.result: EndedIncrement | None = None
        self._folder = "" if logs is None else Folder(logs).url
        self._increments, self._store = increments, store
        self._tables: tuple[SavedTable, ...] = ()
        self._cut: int | None = None

    def advance(self) -> None:
        """Begin the increment when that is possible, and look if it is written."""
        if not self._increments.is_writing:
            self.fail("there is no log now; the next one begins in seconds")
        elif self._cut is None:
            self._cut = self._increments.end_increment()
            self._tables = saved_tables(self._store.present, self._store.rows.seconds)
        elif (position := self._increments.ended_before(self._cut)) is not None:
            self.result = EndedIncrement(self._folder, position, self._tables)
            self.phase = "written"

    def fail(self, why: str) -> None:
        """Give up, if it is not written."""
        if self.phase == "writing":
            self.error = CheckpointError(f"The increment was not written: {why}.")
            self.phase = "failed"


class TableDrop:
    """A table that is dropped: ``ending``, ``unused``, ``freeing``, then ``dropped``.

    The serving thread calls all methods. While it is ``ending``, an increment of all
    that has changed before is written: so none that a later dump needs has the table.
    """

    progress, result = 0.0, None
    error: Exception | None = None

    def __init__(
        self, increments: Increments, store: EmbeddingStore, number: int
    ) -> None:
        self.phase, self.must_drop = "ending", False
        self._increments, self._store, self._number = increments, store, number
        self._cut: int | None = None
        self.is_over = number < 0 or store.states[number].is_dropped

    def advance(self) -> None:
        """Drop the table when it must be and no increment has it; look at its rows."""
        if self.phase in ("ending", "unused"):
            may_drop = self.is_over or self._has_ended()
            self.phase = "unused" if may_drop else "ending"
            if may_drop and self.must_drop:
                if not self.is_over:
                    self._store.drop_tables([self._number])
                self.phase, self.is_over = "freeing", True
        if self.phase == "freeing" and not self._store.leaving:
            self.phase = "dropped"

    def _has_ended(self) -> bool:
        """Return whether no increment that is still to be written began before."""
        increments = self._increments
        if not increments.is_writing:
            return True
        if self._cut is None or increments.has_flushed_since(self._cut):
            self._cut = increments.end_increment(before_drop=True)
        return self._cut is not None and (
            increments.ended_before(self._cut) is not None
        )

    def fail(self, why: str) -> None:
        """Give up, if it is not dropped."""
        if not self.is_over:
            self.error = CheckpointError(f"The table was not dropped: {why}.")
            self.phase = "failed"


class ShardDump(BackgroundTask):
    """A dump of one server: ``dumping``, then ``dumped`` or ``failed``.

    The serving thread calls all methods, and never waits for the one that writes:
    ``chunks`` that are full make it copy later. ``log`` is where in the log of
    increments the dump begins.
    """

    def __init__(
        self,
        folder: Folder,
        store: EmbeddingStore,
        config: ServerConfig,
        name: str = "",
    ) -> None:
        if not (name or folder.exists()):
            raise CheckpointError(
                f"The folder {folder.url} must exist. Received: it does not. Give a "
                "path that all servers and trainers share."
            )
        own = f"shard-{config.shard:05d}-of-{config.num_shards:05d}.rows"
        self._name = name or own
        super().__init__(folder.file_path(self._name))
        self._folder, self._store, self._config = folder, store, config
        self.log: LogPosition | None = None
        self._export = RowExport(store)
        self._tables = self._describe_tables()
        self._remembered = self._copy_remembered()
        self.chunks: queue.Queue[Chunk | None] = queue.Queue(_MAX_CHUNKS)
        self._has_copied_all, self._tick = False, 0
        self._writer_cpu_s = self._charged_cpu_s = 0.0
        self.result: DumpResult | None = None
        self.start("dumping", self._write, "dumped")

    @property
    def progress(self) -> float:
        """The fraction of the slots that are copied."""
        return self._export.progress

    @property
    def is_copying(self) -> bool:
        """Whether :meth:`advance` has something to do, now or later."""
        is_over = self._has_copied_all or self.error is not None
        return self.phase == "dumping" and not is_over

    def advance(self) -> float:
        """Copy a slice; return the seconds of a CPU that the writing took since."""
        rows = self._export.advance()
        if rows is not None:
            self.chunks.put_nowait(rows)
        elif not self._export.is_done:
            pass
        elif (remembered := next(self._remembered, None)) is not None:
            self.chunks.put_nowait(remembered)
        else:
            self._tables = self._describe_tables()  # with their steps
            self._tick = self._store.rows.tick_in_files
            self.chunks.put_nowait(None)
            self._has_copied_all = True
        cpu_s = self._writer_cpu_s
        self._charged_cpu_s, since_s = cpu_s, cpu_s - self._charged_cpu_s
        return since_s

    def _describe_tables(self) -> tuple[SavedTable, ...]:
        if self._export.is_done:
            self._store.free_blocks()  # of a period that has ended meanwhile
        states = (self._store.states[table.number] for table in self._export.tables)
        return saved_tables(states, self._store.rows.seconds)

    def _write(self) -> None:
        config = self._config
        head = ShardHead(
            shard=config.shard, num_shards=config.num_shards, tables=self._tables
        )
        not_finite = Counter[str]()
        with self._folder.created(self._name) as file:
            writer = RowFileWriter(file, head)
            while (chunk := self._next_chunk()) is not None:
                if isinstance(chunk, RawRows):
                    for table, rows in split_by_table(chunk, self._export.tables):
                        spec = self._export.tables[table].spec
                        num_bad = np.count_nonzero(find_not_finite(rows, spec))
                        not_finite[spec.name] += int(num_bad)
                        writer.write(table, rows)
                else:
                    self._write_sightings(writer, *chunk)
                del chunk
                self._writer_cpu_s = time.thread_time()
            written = writer.end()
        server = msgspec.to_builtins(config)
        saved = SavedShard(self._name, *written, self._tick, server, self.log)
        self.result = DumpResult(self._tables, saved, +not_finite)

    def _copy_remembered(self) -> Iterator[Remembered]:
        """Yield what the admission of each table remembers."""
        for index, table in enumerate(self._export.tables):
            state = self._store.states[table.number]
            words = state.used_words()
            if words.size:
                yield index, state.spec.admission, words.copy()

    def _write_sightings(
        self, writer: RowFileWriter, table: int, admission: Admission, words: Words
    ) -> None:
        sightings = admission.sightings(words)
        for start in range(0, len(sightings.keys), _BLOCK_IDS):
            part = slice(start, start + _BLOCK_IDS)
            writer.write(table, Sightings(*(column[part] for column in sightings)))

    def _next_chunk(self) -> Chunk | None:
        while True:
            self.require_not_cancelled()
            with contextlib.suppress(queue.Empty):
                return self.chunks.get(timeout=_CHECK_S)


class BaseDump(ShardDump):
    """A dump into the base of the increments, which no client has asked for."""

    def __init__(
        self, logs: Folder, store: EmbeddingStore, config: ServerConfig
    ) -> None:
        name = increment_log.draw_name(config.shard, config.num_shards)
        super().__init__(increment_log.base_of(logs), store, config, name)

    def _write(self) -> None:
        self._folder.make()
        super()._write()
        assert self.result is not None
        increment_log.add_to_base(
            self._folder, self.result, self._config.shard, self._config.num_shards
        )


class CheckpointService:
    """What a training server dumps or loads, one task at a time, and its increments.

    The serving thread owns it. ``incarnation`` identifies this start of the server,
    whose rows are new; ``is_loading`` says whether rows cannot be asked for yet,
    ``is_active`` whether :meth:`work` may have something to do. Paths that clients name
    must be in ``roots``; None: they may be any.
    """

    def __init__(
        self,
        config: ServerConfig,
        store: EmbeddingStore,
        activity: Activity,
        *,
        roots: Sequence[str] | None = None,
        incarnation: int = 0,
    ) -> None:
        self.incarnation = incarnation
        self.is_loading = False
        self.is_active = config.increments_dir is not None
        self._roots = roots
        self._config = config
        self._store = store
        self._dump: ShardDump | None = None
        self._load: ShardLoad | None = None
        self._delta: DeltaEnd | TableDrop | None = None
        self._task = -1
        # What earlier tasks have ended with, for clients that have yet to ask.
        self._ended: deque[tuple[int, TaskState]] = deque(maxlen=_MAX_ENDED)
        self._stream = 0  # of the client that has begun it
        self._clock, self._asked_s = activity.clock, -math.inf  # about the task
        self._budget = CpuBudget(_CPU_FRACTION, activity)
        self._increments = Increments(config, store, activity)
        shard, num_shards = config.shard, config.num_shards
        self._target = Target(
            shard, num_shards, store.rows.capacity_rows, store.rows.is_lfu
        )
        self.serves = self._url = self._run = ""  # only one of inference serves one
        self._lost: dict[str, int] = {}  # counters of a server that lost its memory

    @property
    def run(self) -> str:
        """The folder of the last checkpoint that was dumped or loaded; empty: none."""
        task = self._dump or self._load
        is_own = isinstance(task, BaseDump)
        if task is not None and task.phase in ("dumped", "loaded") and not is_own:
            self._run = self._url.rpartition("/")[0]
        return self._run

    def restore(
        self, run: str | None, known: KnownUpdates | None, *, begins: bool
    ) -> None:
        """Restore rows from the newest checkpoint and increments; say what is lost.

        The store lost its memory, unless its job ``begins``, and continues an earlier
        one. ``run`` is the folder of the job's checkpoints; ``known`` is what the job
        knew of them last.
        """
        config, store = self._config, self._store
        folders = [
            None if path is None else self._folder(path)
            for path in (run, config.increments_dir)
        ]
        found = restore(store, self._target, *folders)
        self._increments.next_log = found.base, found.history
        lost = self._lost = {
            "restored_rows": store.num_rows,
            "restored_increments": found.num_increments,
        }
        if found.written_s is not None and not begins:
            age_s = time.time() - found.written_s  # noqa: TID251  # of another process
            lost["lost_ms"] = max(int(1000 * age_s), 0)
        if known is not None:
            num = max(known.num_updates - store.num_updates, 0)
            lost["lost_updates"] = num
            lost["lost_rows"] = round(num * known.rows_per_update)
        numbers = ", ".join(f"{name}={number}" for name, number in lost.items())
        text = (
            "embedding server %d lost its memory, and restored what was written of it: "
            "%s, checkpoint=%s. What was not written is lost, and so are updates that "
            "were not acknowledged. Training continues."
        )
        if begins:
            text = (
                "embedding server %d continues with what an earlier start of the job, "
                "or another job, has written: %s, checkpoint=%s"
            )
        logger.log(
            logging.INFO if begins else logging.WARNING,
            text,
            config.shard,
            numbers,
            found.checkpoint or "none",
        )

    def handle(self, request: CheckpointRequest, stream: int = 0) -> TaskState:
        """Do what a client asks, whose own stream is told; return the task's state."""
        self.is_active = True
        load, is_known = self._load, request.task == self._task
        ended = dict(self._ended).get(request.task)
        if ended is not None and request.do != "prune":
            return ended
        match request.do:
            case "dump" | "check" | "load" | "delta" | "unused" | "drop" if (
                not is_known
            ):
                self._require_idle()
                if (state := self._state()).phase not in ("idle", "checked"):
                    self._ended.append((self._task, state))
                self.cancel("another dump or load begins")
                self._begin(request)
                self._task, self._stream = request.task, stream
                self._url = request.folder or self._url
            case "load" if load is not None and load.phase == "checked":
                self._fill(load, request)
            case "drop" if isinstance(self._delta, TableDrop):
                self._delta.must_drop = True
                self._delta.advance()
            case "prune":
                self._increments.prune()
            case "cancel" if is_known:
                self.cancel("it was cancelled")
        if request.task != self._task:
            return TaskState("idle", 0.0)
        if request.do != "cancel":
            self._asked_s = self._clock()
        return self._state()

    def _begin(self, request: CheckpointRequest) -> None:
        """Begin a dump, a delta, or the check before a load."""
        if request.do == "delta":
            self._delta = DeltaEnd(self._increments, self._store, self._config)
            return
        if request.do in ("unused", "drop"):
            number = request.numbers[self._config.shard]
            self._delta = TableDrop(self._increments, self._store, number)
            self._delta.must_drop = request.do == "drop"
            self._delta.advance()
            return
        self._delta = None
        folder = self._folder(request.folder)
        if request.do == "dump":
            self._dump = ShardDump(folder, self._store, self._config)
            self._dump.log = self._increments.begin_dump(request.folder)
            return
        logs = request.increments
        self._load = ShardLoad(
            folder,
            self._target,
            self._store,
            replaces=request.replace,
            logs=None if logs is None else self._folder(logs),
            until=request.until,
        )
        self._load.rules = request.rules
        self._load.start("checking", self._load.check, "checked")
        self._dump = None

    def _fill(self, load: ShardLoad, request: CheckpointRequest) -> None:
        """Begin to fill the store; check again if its tables have changed since."""
        if not load.fits_store:
            load.cancel()
            self._begin(request)
            return
        self._increments.suspend()
        self.is_loading = True
        load.start("loading", load.load, "loaded")

    def _folder(self, path: str) -> Folder:
        """Return a folder that a client, or the job, names."""
        return Folder(require_received(path, self._config.own_urls), self._roots)

    def not_loaded(self) -> StoreError:
        """Return the error of requests for rows while ``is_loading``."""
        return StoreError(
            "The server loads a checkpoint, and has no rows until it is loaded. "
            "Wait for the end of the load."
        )

    def cancel(self, why: str) -> None:
        """End a dump or delta; end a load, unless it has begun to fill the store."""
        self._asked_s = -math.inf
        if self._delta is not None:
            self._delta.fail(why)
        if self._dump is not None:
            if self._dump.phase == "dumping" and self._dump.error is None:
                self._dump.error = CheckpointError(f"The dump ended early: {why}.")
            self._dump.cancel()  # it has failed when its thread has removed its file
        if self._load is not None and not self.is_loading:
            self._load.cancel()
            self._load = None
            self._task = -1

    def drop(self, is_over: Callable[[int], bool]) -> None:
        """End what a client of a stream that is over has begun."""
        if self._is_running and is_over(self._stream):
            if self.is_loading and self._load is not None:
                self._load.cancel()  # it ends soon, and `is_loading` with it
            self.cancel("the group of trainers was started again")

    def close(self) -> None:
        """End all tasks; write the last increment. May be called twice."""
        self.cancel("the server ends")
        for task in (self._dump, self._load):
            if task is not None:
                task.close()
        self._increments.close()

    def work(self, idle_ms: int) -> int:
        """Do a slice of what is due; return how long to wait for a message."""
        load, dump = self._load, self._dump
        if self.is_loading and load is not None:
            self._end_load(load)
        idle_ms = self._increments.work(idle_ms)
        if isinstance(dump, BaseDump) and dump.phase != "dumping":
            self._end_base(dump)
            return idle_ms
        if self._increments.wants_base and self._state().phase in _AT_REST:
            self._begin_base()
        if self._delta is not None and self._delta.phase in _DELTA_PHASES:
            self._delta.advance()
            idle_ms = min(idle_ms, _DELTA_MS)
        if dump is None or not dump.is_copying:
            has_logs = self._config.increments_dir is not None
            self.is_active = has_logs or self._is_running
            return idle_ms
        if self._budget.has_credit() and not dump.chunks.full():
            with self._budget.spend():
                writing_s = dump.advance()
            self._budget.charge(writing_s)
        return self._budget.wait_ms(idle_ms, is_ready=not dump.chunks.full())

    def counters(self) -> dict[str, int]:
        """Return what has been counted of increments, and of a lost memory."""
        return {**self._increments.counters(), **self._lost}

    def _begin_base(self) -> None:
        """Begin to write the rows beside the increments, which are many times these."""
        self._ended.append((self._task, self._state()))
        self._run = self.run  # of the task that is forgotten
        self._delta, self._load, self._task = None, None, -1
        assert self._config.increments_dir is not None
        folder = Folder(self._config.increments_dir)
        self._dump = BaseDump(folder, self._store, self._config)
        self._dump.log = self._increments.begin_base()

    def _end_base(self, dump: BaseDump) -> None:
        """Have the increments before the base deleted."""
        self._dump = None
        if dump.error is not None:
            logger.warning("writing a base of the increments failed: %s", dump.error)
            return
        assert dump.result is not None
        logger.info(
            "the increments have a new base, num_rows=%d, as they were many times the "
            "rows; older ones are deleted",
            dump.result.shard.num_rows,
        )
        self._increments.prune()

    def _end_load(self, load: ShardLoad) -> None:
        """Serve rows again, if the store is filled."""
        if load.phase != "loading":
            self.is_loading = False
            self._increments.begin_log(load.base, f"{self._task:x}")
            if load.result is not None and load.result.num_left_out:
                logger.warning(
                    "%s: %d rows were left out, those that would be evicted first; %d "
                    "are loaded, and there is room for %d",
                    self._url,
                    load.result.num_left_out,
                    self._store.num_rows,
                    self._store.rows.capacity_rows,
                )
            if load.cancelled.is_set():
                self._load, self._task = None, -1

    @property
    def _is_running(self) -> bool:
        task = self._delta or self._dump or self._load
        phases = (*_DELTA_PHASES, "dumping", "checking", "loading")
        return self.is_loading or (task is not None and task.phase in phases)

    def _require_idle(self) -> None:
        is_held = self._clock() - self._asked_s < timeouts.CHECKED_S
        if self._is_running or (is_held and self._state().phase in _FIRST_STEPS):
            raise BusyError(
                "A server dumps or loads one checkpoint at a time, and one is running. "
                "Wait for its end, or cancel it."
            )

    def _state(self) -> TaskState:
        task = self._delta or self._dump or self._load
        if task is None:
            return TaskState("idle", 0.0)
        exc = task.error
        error = None if exc is None else ErrorReply(type(exc).__name__, str(exc))
        return TaskState(task.phase, task.progress, error, task.result)
