"""The checkpoint that a server of inference serves, and the training that it follows.

    follower's thread                                   serving thread
      a checkpoint, read twice ------> a store --> queue --> takes its rows over
      logs --next increments, checked -----------> queue --> applies them, in slices

Lookups are answered once all increments that existed are applied. When an increment is
missing or damaged, or the training was rolled back to other rows, the follower reads a
checkpoint from which it can continue, into another store, and lookups are answered
meanwhile. A log that continues another one is followed without that. Clients cannot
change the rows, and no row expires, since training is what keeps a row alive. After a
restart the server has the same incarnation as long as its tables are the same, so its
clients need no restart; if it follows no training, as long as it serves the same
checkpoint, so that no lookup joins the rows of two.
"""

import contextlib
import hashlib
import json
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from persia_torchrec import timeouts
from persia_torchrec.checkpoint import catalog, increment_log
from persia_torchrec.checkpoint.background import Activity, BackgroundTask, CpuBudget
from persia_torchrec.checkpoint.catalog import LogPosition, Manifest
from persia_torchrec.checkpoint.fitting import Drops
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Line, Log
from persia_torchrec.checkpoint.load import (
    Increment,
    ShardLoad,
    Target,
    apply_increment,
)
from persia_torchrec.checkpoint.restore import written_at
from persia_torchrec.errors import CheckpointError, NotReadyError, PersiaError
from persia_torchrec.rpc.messages import TaskState
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

POLL_S = 0.05  # how often the folders are polled
_URL_POLL_S = 0.5  # those of an object store, where each look is a request
_CPU_FRACTION = 0.2  # of a CPU that increments may take while lookups arrive
_CPU_FRACTION_BEHIND = 0.4  # more of it, for each increment that waits to be applied
_LOADING_POLL_MS = 20  # how often the progress of the load is checked
_MAX_EVENTS = 2
_CHECK_S = 0.1

FollowerEvent = Increment | tuple[EmbeddingStore, Folder, float] | None
"""This server's part of an increment, or a store that replaces the current one, its
checkpoint, and the second since 1970 when it was written; None once all increments that
existed have been handed over."""


class Follower(BackgroundTask):
    """Reads a checkpoint, and follows its training if that writes logs.

    The serving thread owns ``store``, calls all methods, and does what ``events`` say.
    There is an ``error`` if the checkpoint could not be read; ``load`` is that of the
    latest one. ``is_lost``: the training cannot be followed before its next checkpoint.
    """

    def __init__(
        self, config: ServerConfig, folder: Folder, store: EmbeddingStore
    ) -> None:
        super().__init__(f"Following {folder.url}")
        self._config = config
        self._folder = folder
        self._store = store
        self._target = Target(
            config.shard,
            config.num_shards,
            store.rows.capacity_rows,
            store.rows.is_lfu,
            has_state=False,
        )
        self._manifests: dict[str, Manifest] = {}
        self._retry_s: dict[str, float] = {}  # by URL of a checkpoint that failed
        self._positions: list[LogPosition] = []
        self._allowed: set[str] = set()  # logs that follow the checkpoint that was read
        self._known_logs: dict[str, Log] = {}
        self.events: queue.Queue[FollowerEvent] = queue.Queue(_MAX_EVENTS)
        self.load: ShardLoad | None = None
        self.num_errors = self.num_reloads = 0
        self.is_lost = False
        self.start("following", self._run, "followed")

    def _run(self) -> None:
        self._created = self._read_first()
        if self._config.increments_dir is None:
            self._send(None)
        else:
            self._follow(Folder(self._config.increments_dir))

    def _read_first(self) -> str:
        """Read the checkpoint; the next one if it is deleted meanwhile."""
        assert self._config.checkpoint is not None
        while True:
            try:
                return self._read_checkpoint(self._folder)
            except CheckpointError as exc:
                latest = catalog.find_checkpoint(self._config.checkpoint)
                if self.cancelled.is_set() or latest.url == self._folder.url:
                    raise
                logger.warning("%s Reading %s.", exc, latest.url)
                self._folder = latest

    def _read_checkpoint(self, folder: Folder) -> str:
        """Read a checkpoint into a store, which is handed over; return its date."""
        store = self._config.make_store()
        while self.events.unfinished_tasks:  # which may add tables
            self.require_not_cancelled()
            self.cancelled.wait(POLL_S)
        store.copy_tables(self._store)  # with the same numbers
        self.load = load = ShardLoad(folder, self._target, store)
        load.cancelled = self.cancelled
        load.check()
        load.load()
        assert load.result is not None
        num_rows, num_left_out = load.result.num_rows, load.result.num_left_out
        logger.info("loaded %s num_rows=%d", folder.url, num_rows)
        if num_left_out:
            logger.warning(
                "%s: %d of the %d rows for this server were left out, those that would "
                "be evicted first in training; they read zeros. Raise the capacity, or "
                "start more than %d servers.",
                folder.url,
                num_left_out,
                num_left_out + num_rows,
                self._config.num_shards,
            )
        self._send((store, folder, written_at(folder, load.manifest)))
        return load.manifest.created

    def _follow(self, logs: Folder) -> None:
        poll_s = _URL_POLL_S if "://" in logs.url else POLL_S
        has_caught_up = False
        logged = ""
        while not self.cancelled.is_set():
            has_read = False
            try:
                has_read = self._poll(logs)
                logged = ""
            except Exception as exc:  # the server continues with the rows that it has
                if self.cancelled.is_set():
                    return
                self.num_errors += 1
                if str(exc) != logged:  # once, however often it is tried
                    has_bug = not isinstance(exc, PersiaError)
                    logger.warning("following %s: %s", logs.url, exc, exc_info=has_bug)
                logged = str(exc)
            if not has_read:
                if not has_caught_up:  # or as far as possible
                    self._send(None)
                    has_caught_up = True
                self.cancelled.wait(poll_s)

    def _poll(self, folder: Folder) -> bool:
        """Hand over the next increment of each log; return whether there was one."""
        lines = increment_log.latest_lines(
            increment_log.find_lines(folder, self._known_logs)
        )
        is_lost = not self._continue(lines) and not self._switch(lines)
        has_read = False
        for number in self._target.select(range(len(self._positions))):
            position = self._positions[number]
            try:
                increment = _read_increment(folder, position)
            except CheckpointError as exc:
                self.is_lost = not self._switch(lines, beyond=position)
                if self.is_lost:
                    raise
                logger.warning("following %s: %s", folder.url, exc)
                return True
            if increment is not None:
                self._send(increment.select(self._target))
                self._positions[number] = replace(position, number=position.number + 1)
                has_read = True
        self.is_lost = is_lost
        if is_lost and not has_read:
            raise CheckpointError(
                "The training continues from rows of which there is no checkpoint in "
                f"{self._config.checkpoint}. Until the next one, lookups read the "
                "previous rows."
            )
        return has_read

    def _continue(self, lines: Sequence[Line]) -> bool:
        """Follow the logs that continue those that were read; return whether all do."""
        if not lines:  # no other training has begun
            return True
        if len(lines) != len(self._positions):
            return False
        read = self._target.select(range(len(lines)))
        positions = [
            line.next_position(position, self._allowed)
            for line, position in zip(lines, self._positions, strict=True)
        ]
        for number in read:
            if (position := positions[number]) is None:
                return False
            self._positions[number] = position
        return True

    def _switch(self, lines: Sequence[Line], beyond: LogPosition | None = None) -> bool:
        """Continue in some lines; return whether a checkpoint leads past ``beyond``."""
        for checkpoint in self._list_checkpoints():
            start = increment_log.find_start(lines, [checkpoint])
            if start and not (beyond and start.leads_over(beyond)):
                break
        else:
            return False
        url = start.folder.url
        if self._positions or start.created != self._created:
            try:
                self._read_checkpoint(start.folder)
            except Exception as exc:
                if self.cancelled.is_set():
                    raise
                self.num_errors += 1
                self._retry_s[url] = time.monotonic() + timeouts.FOLLOWER_RETRY_S
                logger.warning("continuing from %s: %s", url, exc)
                return False
            self.num_reloads += 1
        logs = [position.log for position in start.positions]
        logger.info("following %s from %s", logs, url)
        self._positions = list(start.positions)
        self._allowed = {log.name for line in lines for log in line.logs}
        self._created = start.created
        return True

    def _list_checkpoints(self) -> Iterator[tuple[Folder, Manifest]]:
        """Yield the complete checkpoints, but for those that failed just now.

        The base of the increments comes last: it is there where these have been deleted
        that follow the others.
        """
        assert self._config.checkpoint is not None
        now_s = time.monotonic()
        for folder in catalog.complete_checkpoints(Folder(self._config.checkpoint)):
            if self._retry_s.get(folder.url, 0.0) <= now_s:
                if folder.url not in self._manifests:  # manifests never change
                    self._manifests[folder.url] = Manifest.read(folder)
                yield folder, self._manifests[folder.url]
        logs = self._config.increments_dir
        found = None if logs is None else increment_log.read_base(Folder(logs))
        if found is not None and self._retry_s.get(found[0].url, 0.0) <= now_s:
            yield found

    def _send(self, event: FollowerEvent) -> None:
        while not self.cancelled.is_set():
            with contextlib.suppress(queue.Full):
                self.events.put(event, timeout=_CHECK_S)
                return


def _read_increment(logs: Folder, position: LogPosition) -> Increment | None:
    """Return the increment at a position; None if it does not exist yet."""
    folder = logs.child(position.log)
    name = increment_log.increment_name(position.number)
    if folder.file_size(name) is None:
        numbers = increment_log.list_increments(folder)
        later = [number for number in numbers if number > position.number]
        if later and folder.file_size(name) is None:
            raise CheckpointError(
                f"{folder.file_path(name)} is missing, and there is "
                f"{increment_log.increment_name(later[0])}. A dump deletes increments "
                "that the previous dump does not need."
            )
        return None
    increment = Increment.read(folder, position.number)
    head = increment.head
    if (head.log, head.number) != (position.log, position.number):
        raise CheckpointError(
            f"{folder.file_path(name)} must be increment {position.number} of "
            f"{position.log}. Received: {head.number} of {head.log}."
        )
    return increment


class ServedCheckpoint:
    """What a server of inference serves and follows. Owned by the serving thread.

    No client begins a task here, and no earlier start of the server has left one.

    Attributes:
        serves: the checkpoint whose rows stay as they are; "" if it follows a training.
        run: the folder of the checkpoints that a training writes: "", there is none.
    """

    run = ""

    def __init__(
        self, config: ServerConfig, store: EmbeddingStore, activity: Activity
    ) -> None:
        assert config.checkpoint is not None
        self._config = config
        self._store = store
        self._folder = catalog.find_checkpoint(config.checkpoint)
        manifest = Manifest.read(self._folder)
        self.serves = ""
        if config.increments_dir is None:
            self.serves = f"the checkpoint of {manifest.created}"
        # A number for what clients remember of a server: shard, tables, and rows that
        # stay as they are.
        tables = [[spec.name, spec.dim] for spec in (t.spec for t in manifest.tables)]
        told = config.shard, config.num_shards, tables, self.serves
        known = json.dumps(told).encode()
        digest = hashlib.sha256(known).digest()
        self.incarnation = int.from_bytes(digest[:8], "little") >> 1 | 1
        self.is_loading = self.is_active = True
        self._follower: Follower | None = None
        self._increment: Iterator[int] | None = None
        self._drops = Drops()
        self._created_s = 0.0  # of the increment that is being applied
        self._current_s = 0.0  # when rows were as here, by the monotonic clock
        self._budget = CpuBudget(_CPU_FRACTION, activity)
        names = "increments_put_in", "increment_rows_put_in", "increment_delay_ms"
        self._counts = Counter(dict.fromkeys(names, 0))

    def not_loaded(self) -> NotReadyError:
        """Return the error of lookups while ``is_loading``."""
        load = None if self._follower is None else self._follower.load
        progress = 0.0 if load is None else load.progress
        does = f"loads {self._folder.url}, {progress:.0%} of it so far"
        if self._store.states:
            does = (
                f"has loaded {self._folder.url}, and applies what the training has "
                "changed since"
            )
        return NotReadyError(f"It {does}. Wait until it is ready.", server="")

    def restore(self, *_: object, begins: bool) -> None:
        """Restore nothing: :meth:`work` reads what it serves."""

    def handle(self, *_: object) -> TaskState:
        """Return the state of a task that there is not."""
        return TaskState("idle", 0.0)

    def cancel(self, why: str) -> None:
        """End no task of a client."""

    def drop(self, is_over: Callable[[int], bool]) -> None:
        """End no task of a client's stream."""

    def counters(self) -> dict[str, int]:
        """Return what has been applied of the training's increments."""
        if self._follower is None or self._config.increments_dir is None:
            return {}
        age_s = time.monotonic() - self._current_s if self._current_s else 0.0
        return {
            **self._counts,
            "increment_age_ms": int(1000 * age_s),
            "following_errors": self._follower.num_errors,
            "following_reloads": self._follower.num_reloads,
            "following_lost": int(self._follower.is_lost),
        }

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._follower is not None:
            self._follower.close()

    def work(self, idle_ms: int) -> int:
        """Do a slice of what is due; return how long to wait for a message."""
        follower = self._follower
        if follower is None:
            logger.info("loading %s", self._folder.url)
            follower = Follower(self._config, self._folder, self._store)
            self._follower = follower
        elif follower.error is not None:
            raise follower.error
        elif self._has_credit(follower):
            with self._budget.spend():
                try:
                    self._advance(follower)
                except PersiaError as exc:
                    logger.error(
                        "%s Lookups read the previous rows: restart the server.", exc
                    )
                    follower.cancelled.set()
                    self._counts["following_stopped"] += 1
                    self.is_loading = self.is_active = False
        if self._increment is not None or not follower.events.empty():
            return self._budget.wait_ms(idle_ms, is_ready=True)
        return min(idle_ms, _LOADING_POLL_MS) if self.is_loading else idle_ms

    def _has_credit(self, follower: Follower) -> bool:
        """Return whether there is credit; a server that falls behind has more."""
        num_waiting = follower.events.qsize()
        self._budget.fraction = _CPU_FRACTION + num_waiting * _CPU_FRACTION_BEHIND
        return self._budget.has_credit()

    def _advance(self, follower: Follower) -> None:
        """Take the next event, or apply a slice of the one that was taken."""
        if self._increment is not None:
            self._apply_slice(self._increment)
        elif follower.events.empty():
            return
        else:
            self._take(follower.events.get_nowait())
        if self._increment is None:
            follower.events.task_done()

    def _apply_slice(self, increment: Iterator[int]) -> None:
        num_rows = next(increment, None)
        counts = self._counts
        if num_rows is not None:
            counts["increment_rows_put_in"] += num_rows
            return
        self._increment = None
        delay_ms = counts["increment_delay_ms"] = int(
            1000 * self._are_of(self._created_s)
        )
        most_ms = max(counts["increment_delay_ms_max"], delay_ms)
        counts["increment_delay_ms_max"] = most_ms
        counts["increments_put_in"] += 1

    def _are_of(self, created_s: float) -> float:
        """Note that rows are those of a second since 1970; return their age."""
        age_s = max(time.time() - created_s, 0.0)  # noqa: TID251  # the writer's clock
        self._current_s = time.monotonic() - age_s
        return age_s

    def _take(self, event: FollowerEvent) -> None:
        match event:
            case Increment():
                self._created_s = event.head.created_s
                self._increment = apply_increment(
                    self._store, event, None, drops=self._drops
                )
            case (store, folder, created_s):
                logger.info("serving %s", folder.url)
                self._store.take_rows_of(store)
                self._folder, self._drops = folder, Drops()
                self._are_of(created_s)
            case None:
                self.is_loading = False
                self.is_active = self._config.increments_dir is not None
