"""Checkpoints of all servers: begun, watched and completed by one client of a job.

dump    every server writes its file; when all have, the manifest is written
load    every server reads and checks its shard, changing nothing; when all have,
every server fills its store
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint import catalog, increment_log, writer
from persia_torchrec.checkpoint.catalog import (
    DumpResult,
    EndedIncrement,
    Loaded,
    LoadRules,
    LogPosition,
    Manifest,
)
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.checkpoint.writer import FolderWriter, name_of_process
from persia_torchrec.client.codec import BatchCount, Caches, ServerHello
from persia_torchrec.client.shards import Servers
from persia_torchrec.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    StoreError,
    WireError,
)
from persia_torchrec.job.member import JobMember
from persia_torchrec.parsing.decoding import KeyPath, convert
from persia_torchrec.rpc.messages import Header, Kind, TaskState, encode_json
from persia_torchrec.rpc.reply import Reply

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Path = str | os.PathLike[str]

_MAX_JOBS = 16  # whose training was continued, that a manifest names
_WAITING = {"idle", "checked", "unused"}  # phases of servers that must be told
_FIRST_POLL_S = 0.005
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its URL and step, the rows and bytes of all servers.

    A load tells how many rows the servers had no room for, how many files of
    increments were put on it, whose tables' admissions count from 0 again, since they
    were saved by another kind of admission, or with a filter of another size, and how
    many rows have a NaN or an infinity, or had one and begin again. ``num_batches`` is
    what :class:`BatchCount` had ``trained``.
    """

    path: str
    step: int | None
    num_rows: int
    size_bytes: int
    num_left_out: int = 0
    num_increments: int = 0
    forgotten: tuple[str, ...] = ()
    num_batches: int = 0
    num_not_finite: int = 0

    @classmethod
    def of(cls, folder: Folder, manifest: Manifest) -> "SavedCheckpoint":
        """Describe the checkpoint in a folder."""
        num_batches = manifest.num_batches
        return cls(
            folder.url,
            manifest.step,
            manifest.num_rows,
            manifest.size_bytes,
            num_batches=num_batches,
        )


class Task(Generic[T]):
    """A dump or a load in the background. Any thread may call any method.

    It begins ``after`` others that each ``has_begun`` on the servers, or has failed.
    """

    def __init__(
        self,
        name: str,
        work: "Callable[[Task[T]], T]",
        after: Iterable[threading.Event],
    ) -> None:
        self._name, self._progress = name, 0.0
        self._cancelled = threading.Event()
        self._outcome: Future[T] = Future()
        self.after, self.has_begun = tuple(after), threading.Event()
        run = partial(self._run, work)
        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def progress(self) -> float:
        """Which fraction of the work is done, in [0, 1]; that of the slowest server."""
        return 1.0 if self.is_done else self._progress

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._outcome.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the end; return the result, or raise why it failed.

        After ``timeout_s`` seconds, by default never, it raises TimeoutError and the
        work continues.
        """
        with (
            timeouts.saying(logger, lambda: f"{self._name}: {self._progress:.0%} done"),
            JobMember.pausing(),
        ):
            return self._outcome.result(timeout_s)

    def cancel(self) -> None:
        """Make it end early: :meth:`wait` raises then. It may end well before that."""
        self._cancelled.set()

    def pause(self, seconds: float, progress: float) -> None:
        """Report progress and wait, until it is cancelled at most."""
        self._progress = progress
        if self._cancelled.is_set():
            raise CheckpointError("It was cancelled.")
        self._cancelled.wait(seconds)

    def _run(self, work: "Callable[[Task[T]], T]") -> None:
        try:
            self._outcome.set_result(work(self))
        except BaseException as exc:  # noqa: BLE001  # raised by wait()
            self._outcome.set_exception(exc)
        self.has_begun.set()


class CheckpointClient:
    """Dumps and loads what the servers hold. Any thread may call any method.

    Tasks begin on the servers in the order of the calls, one after another's end.
    Paths are of a file system that this process and all servers share, or URLs that
    fsspec knows; a CheckpointError if they cannot be used. The whole task may take
    ``timeout_s`` seconds.
    """

    caches: Caches  # those of the client

    def __init__(self, servers: Servers, batches: BatchCount) -> None:
        self._servers = servers
        self._batches = batches
        self._continues: tuple[str, ...] = ()  # jobs
        self._fuller = ""  # URL of a checkpoint that has rows for which was no room
        self._order = threading.Lock()
        self._not_begun: list[threading.Event] = []  # set once the task has begun
        self._num_loads = 0  # under way. guarded by _order

    @property
    def job(self) -> str:
        """Id of the job whose servers these are, or of this process."""
        return self._servers.job_id or name_of_process(os.getpid())

    def own(self, path: Path) -> FolderWriter:
        """Be the only job that writes in a folder, until it is released.

        Raises:
            ConfigError: another job writes there, or this process cannot.
        """
        pid, is_forced = env.agent() or env.supervisor(), env.takes_over()
        return FolderWriter(Folder(path), self.job, pid=pid, takes_over=is_forced)

    def require_free(self, path: Path) -> None:
        """Raise ConfigError if another job, which lives, writes in a folder."""
        writer.require_free(Folder(path), self.job)

    def dump(
        self,
        path: Path,
        *,
        step: int | None = None,
        timeout_s: float = timeouts.CHECKPOINT_S,
    ) -> SavedCheckpoint:
        """Write a checkpoint of all servers, and wait for it: :meth:`start_dump`."""
        return self.start_dump(path, step=step, timeout_s=timeout_s).wait()

    def load(
        self,
        path: Path,
        *,
        replace: bool = True,
        increments: Path | None = None,
        until: Sequence[LogPosition] | None = None,
        rules: LoadRules | None = None,
        timeout_s: float = timeouts.CHECKPOINT_S,
    ) -> SavedCheckpoint:
        """Load a checkpoint, and wait for it: :meth:`start_load`."""
        return self.start_load(
            path,
            replace=replace,
            increments=increments,
            until=until,
            rules=rules,
            timeout_s=timeout_s,
        ).wait()

    def start_delta(
        self, checkpoint: Folder, *, timeout_s: float
    ) -> Task[list[EndedIncrement]]:
        """Begin to end the increments of all servers, for a delta of a checkpoint.

        What was acknowledged before the call is in increments before the positions
        that the task returns; nothing later is, if nothing changes meanwhile. A
        CheckpointError says that the logs do not lead there from the checkpoint.
        """
        self.caches.flush()
        what = f"delta of {checkpoint.url}"

        def work(task: Task[Any]) -> list[EndedIncrement]:
            written = self._end_increments(task, what, timeout_s)
            ended = [of_server for of_server in written if of_server is not None]
            if len(ended) < len(written):
                raise CheckpointError(
                    "The servers must write increments. Received: no increments_dir. "
                    "Give them one, or save whole checkpoints."
                )
            url = require_received(ended[0].folder, [checkpoint.url])
            positions = tuple(end.position for end in ended)
            lines = increment_log.find_lines(Folder(url), {})
            found = checkpoint, Manifest.read(checkpoint)
            start = increment_log.find_start_of(lines, positions, found)
            if start is None or not start.has_increments(Folder(url)):
                raise CheckpointError(
                    f"The increments in {url} must follow {checkpoint.url}. Received: "
                    f"logs with a gap between it and the current state."
                    " Save a whole checkpoint."
                )
            return ended

        return self._start("delta", work)

    def start_dump(
        self,
        path: Path,
        *,
        step: int | None = None,
        timeout_s: float = timeouts.CHECKPOINT_S,
        files: Mapping[str, bytes] | None = None,
    ) -> Task[SavedCheckpoint]:
        """Begin to write a checkpoint of all servers, while they continue serving.

        It takes a new folder in ``path`` and is complete when its manifest, which keeps
        ``step``, is there. Weights, optimizer state, the optimizers' steps, metadata,
        the order in which rows would leave and what admissions have counted are in it.

        Every row that lives from the beginning to the end is in it once, as it was at
        one moment in between, with all updates acknowledged before the call.
        ``files`` belong to it too: they are written before the servers begin, and once
        more into ``path`` itself when the checkpoint is complete, one by one.
        """
        self.require_free(path)
        run, folder = Folder(path), catalog.begin_checkpoint(path)
        with catalog.discarding(folder):
            self.caches.save(folder)
            _write(files, folder)
        num_batches = self._batches.trained

        def work(task: Task[SavedCheckpoint]) -> SavedCheckpoint:
            with catalog.discarding(folder):
                manifest = self._write_files(task, folder, step, timeout_s)
                others = catalog.sum_files(folder)
                manifest = dataclasses.replace(
                    manifest, num_batches=num_batches, files=others
                )
                manifest.write(folder)
            tell_job(folder)
            _write(files, run)
            return SavedCheckpoint.of(folder, manifest)

        return self._start("dump", work)

    def start_files(
        self, folder: Folder, *, step: int | None, timeout_s: float
    ) -> Task[Manifest]:
        """Begin to write the servers' files only, whose manifest the task returns.

        The manifest lacks the dense half, and how many batches are trained.
        """
        self.caches.save(folder)
        return self._start(
            "dump", lambda task: self._write_files(task, folder, step, timeout_s)
        )

    def start_load(
        self,
        path: Path,
        *,
        replace: bool = True,
        increments: Path | None = None,
        until: Sequence[LogPosition] | None = None,
        rules: LoadRules | None = None,
        timeout_s: float = timeouts.CHECKPOINT_S,
    ) -> Task[SavedCheckpoint]:
        """Begin to load a checkpoint, of any number of servers.

        First all servers read their shard of it, and check that it is whole and that
        its tables have the dims, weight types and optimizers that they know; a fault
        on one of them changes nothing on any. Then they fill their stores, and reject
        requests for rows meanwhile. Tables that the servers know keep their settings,
        others get those of the checkpoint. If there are more rows than room, those are
        left out that would leave first. A batch of tables that this process caches is
        an error until the task has ended.

        Args:
            path: of a checkpoint, or of a folder with several, for its latest complete.
            replace: drop what the servers hold, whose tables must be in the checkpoint.
                Otherwise its rows are put over those that are there, as used later.
            increments: the ``increments_dir`` of the servers that dumped it: put on it
                what has changed after, up to where the training that came last from it
                ended. A load without it begins such a training.
            until: positions in these logs, as of a delta, one for each server that
                wrote them: only what is before them is put on it.
            rules: what becomes of tables that the servers lack, by default they are
                added, and of those that have changed, by default an error. A table
                that is not in the checkpoint begins again, with a line.
            timeout_s: seconds that it may take.
        """
        folder = catalog.find_checkpoint(path, job=rules.job if rules else "")
        manifest = Manifest.read(folder)
        logs = None if increments is None else Folder(increments).url
        request: dict[str, object] = {"folder": folder.url, "replace": replace}
        request["rules"] = msgspec.to_builtins(rules or LoadRules())
        request |= {"increments": logs, "until": msgspec.to_builtins(until)}
        steps = {"checked": {**request, "do": "check"}}
        steps["loaded"] = {**request, "do": "load"}
        what = f"load of {folder.url}"

        def work(task: Task[SavedCheckpoint]) -> SavedCheckpoint:
            try:
                results = self._run_steps(task, steps, what, timeout_s, Loaded)
            finally:
                self._count_load(-1)
            self._batches.continue_after(manifest.num_batches)
            if replace:
                self.note_continued(manifest)
            for note in sorted({note for loaded in results for note in loaded.notes}):
                logger.warning("%s: %s", folder.url, note)
            num_left_out = self._note_left_out(
                folder, manifest, results, replace=replace
            )
            of_tables = [loaded.not_finite for loaded in results]
            return dataclasses.replace(
                SavedCheckpoint.of(folder, manifest),
                num_not_finite=_tell_not_finite(folder, of_tables),
                num_left_out=num_left_out,
                num_increments=sum(loaded.num_increments for loaded in results),
                forgotten=tuple(
                    sorted({t for found in results for t in found.forgotten})
                ),
            )

        self._count_load(1)  # before caches are empty
        try:
            self.caches.empty()
            self.caches.restore(folder)
            return self._start("load", work)
        except BaseException:
            self._count_load(-1)
            raise

    def require_no_load(self) -> None:
        """Raise StoreError if a load of this client is under way."""
        if self._num_loads:
            raise StoreError(
                "A batch of cached tables must begin when no load of a checkpoint is "
                "under way. Received: a batch before the end of a load. Call wait() of "
                "what start_load has returned."
            )

    def _count_load(self, num: int) -> None:
        with self._order:
            self._num_loads += num

    def _note_left_out(
        self,
        folder: Folder,
        manifest: Manifest,
        results: Sequence[Loaded],
        *,
        replace: bool,
    ) -> int:
        """Log how many rows a load left out, and return it; the fuller one is kept."""
        num_left_out = sum(loaded.num_left_out for loaded in results)
        if num_left_out:
            self._fuller = folder.url
            logger.warning(
                "%s: %d rows were left out, those that would be evicted first. It "
                "has %d rows, and the servers have room for %d. Raise --capacity, "
                "or add servers, and load it again.",
                folder.url,
                num_left_out,
                manifest.num_rows,
                sum(loaded.capacity_rows for loaded in results),
            )
        elif replace:
            run, _, _ = folder.url.rpartition("/")
            name = manifest.lacks_rows_of
            self._fuller = f"{run}/{name}" if name else ""
        return num_left_out

    def drop(self, table: str, timeout_s: float) -> None:
        """Drop a table on all servers: ``EmbeddingClient.drop_table``."""
        hellos = self._servers.ask(
            Kind.HELLO, None, "asking for tables", answer=ServerHello
        )
        of_servers = [{t.spec.get("name"): t.number for t in h.tables} for h in hellos]
        if not any(table in numbers for numbers in of_servers):
            known = sorted({str(name) for numbers in of_servers for name in numbers})
            raise ConfigError(
                f"The table to drop must be one of the servers', {known}. Received: "
                f"{table!r}."
            )
        numbers = [of_server.get(table, -1) for of_server in of_servers]
        request: dict[str, object] = {"table": table, "numbers": numbers}
        steps = {"unused": {**request, "do": "unused"}}
        steps["dropped"] = {**request, "do": "drop"}

        def work(task: Task[Any]) -> None:
            what = f"dropping table {table!r}"
            self._run_steps(task, steps, what, timeout_s, type(None))

        self._start("drop", work).wait()

    def clear(self, timeout_s: float) -> None:
        """Drop all rows: ``EmbeddingClient.clear``. Dumps that have begun fail."""

        def work(task: Task[Any]) -> None:
            self._wait_for_earlier(task, "clear", time.monotonic() + timeout_s)
            self._servers.ask(Kind.CLEAR, None, "clear")

        self._start("clear", work).wait()

    def end_increments(self, *, timeout_s: float) -> None:
        """End the increments of servers that write any, and wait.

        Later ones hold nothing of what changed before, unless a warning says so.
        """

        def work(task: Task[Any]) -> list[EndedIncrement | None]:
            return self._end_increments(task, "ending increments", timeout_s)

        try:
            self._start("increments", work).wait()
        except PersiaError as exc:
            logger.warning("the next delta will include unchanged rows: %s", exc)

    def _end_increments(
        self, task: Task[Any], what: str, timeout_s: float
    ) -> list[EndedIncrement | None]:
        """Return where all servers ended an increment; None where none are written."""
        kind: Any = EndedIncrement | None
        steps = {"written": {"do": "delta"}}
        return self._run_steps(task, steps, what, timeout_s, kind)

    def prune(self) -> None:
        """Let servers delete increments that no complete checkpoint needs; no wait."""
        request = {"do": "prune", "task": secrets.randbits(53)}
        self._servers.ask(Kind.CHECKPOINT, request, "deleting increments")

    def _start(self, name: str, work: Callable[[Task[T]], T]) -> Task[T]:
        """Start a task that begins after those that were started before."""
        with self._order:
            earlier = [begun for begun in self._not_begun if not begun.is_set()]
            task = Task(name, work, earlier)
            self._not_begun = [*earlier, task.has_begun]
        return task

    def _write_files(
        self, task: Task[T], folder: Folder, step: int | None, timeout_s: float
    ) -> Manifest:
        created, what = datetime.now(UTC).isoformat(), f"dump to {folder.url}"
        steps = {"dumped": {"do": "dump", "folder": folder.url}}
        results = self._run_steps(task, steps, what, timeout_s, DumpResult)
        tables = catalog.merge_tables([result.tables for result in results])
        shards = tuple(result.shard for result in results)
        _tell_not_finite(folder, [result.not_finite for result in results])
        run, _, name = self._fuller.rpartition("/")
        fuller = name if run == folder.url.rpartition("/")[0] else None
        return Manifest(
            tables,
            shards,
            created,
            step,
            lacks_rows_of=fuller,
            job=self._servers.job_id,
            continues=self._continues,
        )

    def note_continued(self, manifest: Manifest) -> None:
        """Note that the training continues from a checkpoint, maybe of another job."""
        jobs = dict.fromkeys([manifest.job, *manifest.continues])
        others = [job for job in jobs if job not in ("", self._servers.job_id)]
        self._continues = tuple(others[:_MAX_JOBS])

    def _run_steps(
        self,
        task: Task[T],
        steps: Mapping[str, Mapping[str, object]],
        what: str,
        timeout_s: float,
        kind: type[R],
    ) -> list[R]:
        """Make all servers do one step after the other, each when all have done it.

        ``steps`` are by the phase of a server that has done it. Returns the result of
        each server after the last one. If one fails, or is not done in time, the others
        give up; one that was started again does all steps so far.
        """
        deadline = time.monotonic() + timeout_s
        first, *_ = steps
        number, states = self._begin(task, steps[first], what, deadline)
        task.has_begun.set()
        try:
            for phase, step in steps.items():
                begin = {**step, "task": number}
                if phase != first:
                    states = self._tell(begin, what, states)
                poll_s = _FIRST_POLL_S
                while slow := [
                    name
                    for name, state in zip(self._servers.names, states, strict=True)
                    if state.phase != phase
                ]:
                    if time.monotonic() >= deadline:
                        raise RequestTimeoutError(
                            f"{what}: not done in time. Give it a longer timeout_s.",
                            server=slow[0],
                        )
                    task.pause(poll_s, min(state.progress for state in states))
                    poll_s = min(2 * poll_s, _POLL_S)
                    # A server that was started again must be told once more.
                    if {s.phase for s in states} & (_WAITING - {phase}):
                        states = self._tell(begin, what, states)
                    else:
                        states = self._ask(Kind.PROGRESS, {"task": number}, what)
        except BaseException:
            self._cancel(number, what)
            raise
        place = KeyPath(f"The result of a {what}")
        return [convert(state.result, kind, place, WireError) for state in states]

    def _begin(
        self, task: Task[T], step: Mapping[str, object], what: str, deadline: float
    ) -> tuple[int, list[TaskState]]:
        """Make all servers begin, once none does something else; return the number."""
        has_waited = False
        self._wait_for_earlier(task, what, deadline)
        while True:
            number = secrets.randbits(53)
            try:
                states = self._ask(Kind.CHECKPOINT, {**step, "task": number}, what)
            except BaseException as exc:
                self._cancel(number, what)
                is_busy = getattr(exc, "kind", "") == BusyError.__name__
                if not is_busy or time.monotonic() >= deadline:
                    raise
                if not has_waited:
                    logger.warning("%s; waiting for its end", exc)
                has_waited = True
            else:
                return number, states
            # Another client that waits does not come back at the same moment.
            task.pause(_POLL_S * (1 + secrets.randbelow(100) / 100), 0.0)

    def _wait_for_earlier(self, task: Task[T], what: str, deadline: float) -> None:
        for has_begun in task.after:
            while not has_begun.wait(_POLL_S):
                task.pause(0.0, 0.0)
                if time.monotonic() >= deadline:
                    raise RequestTimeoutError(
                        f"{what}: an earlier dump or load of this process has not "
                        "begun. Wait for its end, or cancel it.",
                        server="",
                    )

    def _tell(
        self, step: Mapping[str, object], what: str, states: list[TaskState]
    ) -> list[TaskState]:
        """Have all servers do a step; while one is busy, return the ``states`` so far.

        A server that was started again may have begun what another client asked for,
        which gives up when it finds the other servers busy.
        """
        try:
            return self._ask(Kind.CHECKPOINT, step, what)
        except RemoteError as exc:
            if exc.kind != BusyError.__name__:
                raise
            return states

    def _cancel(self, number: int, what: str) -> None:
        """Have the servers that are there give up; wait until they write no more."""
        servers, what = self._servers, f"cancelling {what}"
        deadline_s = time.monotonic() + timeouts.BACKGROUND_CLOSE_S
        cancel = encode_json({"do": "cancel", "task": number})
        look = encode_json({"task": number})
        replies = list[Reply]()
        with contextlib.suppress(PersiaError):  # the first error is the one to tell
            replies = servers.send_all(Header(Kind.CHECKPOINT), [cancel], what)
        for server, reply in enumerate(replies):
            with contextlib.suppress(PersiaError):  # as above
                state: TaskState = servers.read(server, reply, TaskState)
                while state.phase == "dumping" and time.monotonic() < deadline_s:
                    time.sleep(_FIRST_POLL_S)
                    reply = servers.send(server, Header(Kind.PROGRESS), [look], what)
                    state = servers.read(server, reply, TaskState)

    def _ask(self, kind: Kind, request: object, what: str) -> list[TaskState]:
        states = self._servers.ask(kind, request, what, answer=TaskState)
        for name, state in zip(self._servers.names, states, strict=True):
            if (error := state.error) is not None:
                message = f"{what}: {error.message}"
                raise RemoteError(message, server=name, kind=error.kind)
        return states


def tell_job(folder: Folder) -> None:
    """Make a complete checkpoint known as the last one in the job of this process."""
    if JobMember.current is not None:
        JobMember.current.tell_checkpoint(folder.url)


def _write(files: Mapping[str, bytes] | None, folder: Folder) -> None:
    for name, data in (files or {}).items():
        folder.write(name, data)


def _tell_not_finite(folder: Folder, of_servers: Iterable[Mapping[str, int]]) -> int:
    """Warn of rows with a NaN or an infinity; return how many there are."""
    found = sum(map(Counter, of_servers), Counter[str]())
    if found:
        logger.warning(
            "%s: %d rows have a NaN or an infinity in their weights or optimizer "
            "state, and do not learn: %s. Write other weights and state to them by "
            "client.write.",
            folder.url,
            found.total(),
            ", ".join(
                f"{num} of table {name!r}" for name, num in sorted(found.items())
            ),
        )
    return found.total()
