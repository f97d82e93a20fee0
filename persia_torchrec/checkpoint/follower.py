"""Read what a training writes of its changes, as it comes, for a server of inference.

    this thread                                       server's thread
      log folders --next increments, checked--> queue --> puts them in, in slices
      another checkpoint --------rows in a store--> queue --> takes them for its own

The increments of each log come in order and without gaps. When one is missing or
damaged, or the training goes on from other rows, the follower looks for a checkpoint
from which it can go on, reads that into a store of its own, and hands the store over:
so lookups are answered all the time.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_file import (
    Increment,
    increment_name,
    read_increment,
)
from persia_torchrec.checkpoint.increment_import import OwnChanges
from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.checkpoint.log_folder import LogInfo, find_logs, increments_in
from persia_torchrec.checkpoint.manifest import Manifest
from persia_torchrec.checkpoint.series import complete_checkpoints
from persia_torchrec.checkpoint.sources import Source, Start, find_start, latest_logs
from persia_torchrec.errors import CheckpointError, PersiaError
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the folders are looked at."""

_MAX_NEWS = 2
_CHECK_S = 0.1
_RETRY_S = 30.0
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class OtherRows:
    """The rows of another checkpoint, to be taken for those of now.

    Attributes:
        store: with the rows.
        folder: of the checkpoint.
    """

    store: EmbeddingStore
    folder: Folder


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that there was has been handed over."""


News = OwnChanges | OtherRows | CaughtUp


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerConfig:
    """Who follows, and what."""

    logs: Folder
    """The folder of all logs."""

    run: Folder
    """The folder of the training's checkpoints, or a single checkpoint."""

    shard: int
    """Of the server that follows."""

    num_shards: int
    """Of how many that follow."""

    capacity_rows: int
    """Of the server."""

    is_lfu: bool
    """Whether the server's least frequently used row leaves first."""


class Follower:
    """A thread that follows a training. The server's thread calls all methods.

    Args:
        config: see :class:`FollowerConfig`.
        created: of the checkpoint whose rows the server has, as its manifest says.
        make_store: returns an empty store like the server's.

    Attributes:
        num_errors: times that something could not be read.
        num_reloads: checkpoints that were read to go on from.
        is_lost: the training goes on, and cannot be followed before its next
            checkpoint.
    """

    def __init__(
        self,
        config: FollowerConfig,
        created: str,
        make_store: Callable[[], EmbeddingStore],
    ) -> None:
        self._config = config
        self._created = created
        self._make_store = make_store
        self._manifests: dict[str, Manifest] = {}
        self._failed: dict[str, float] = {}  # reloads, and when to try them again
        self._sources: list[Source] = []
        self._known: dict[str, LogInfo] = {}
        self._news: queue.Queue[News] = queue.Queue(_MAX_NEWS)
        self._ending = threading.Event()
        self.num_errors = self.num_reloads = 0
        self.is_lost = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def next_news(self) -> News | None:
        """Return what has come, if anything has."""
        try:
            return self._news.get_nowait()
        except queue.Empty:
            return None

    @property
    def has_news(self) -> bool:
        """Whether anything has come."""
        return not self._news.empty()

    def end(self) -> None:
        """Make the thread end soon."""
        self._ending.set()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self.end()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with contextlib.suppress(_EndedError):
            self._follow()

    def _follow(self) -> None:
        has_caught_up = False
        told = ""
        while not self._ending.is_set():
            has_come = False
            try:
                has_come = self._look()
                told = ""
            except _EndedError:
                raise
            except Exception as exc:  # the server lives on with the rows that it has
                self.num_errors += 1
                if str(exc) != told:  # once, however often it is looked for
                    logger.warning(
                        "following %s: %s",
                        *(self._config.logs.url, exc),
                        exc_info=not isinstance(exc, PersiaError),
                    )
                told = str(exc)
            if not has_come:
                if not has_caught_up:  # or as far as that goes
                    has_caught_up = self._tell(CaughtUp())
                self._ending.wait(POLL_S)

    def _look(self) -> bool:
        """Hand over the next increment of each log; return whether there was one.

        Raises:
            CheckpointError: an increment is missing or damaged, and there is no
                checkpoint yet from which to go on.
        """
        logs = self._latest_logs()
        names = [log.name for log in logs]
        is_lost = bool(logs) and names != [source.log for source in self._sources]
        if is_lost:
            is_lost = not self._go_on(logs, beyond=None)
        try:
            has_come = self._read_next()
        except _BrokenError as exc:
            self.is_lost = not self._go_on(logs, beyond=exc.source)
            if self.is_lost:
                raise CheckpointError(str(exc)) from exc
            logger.warning("following %s: %s", self._config.logs.url, exc)
            return True
        self.is_lost = is_lost
        if is_lost and not has_come:
            raise CheckpointError(
                f"The training goes on from rows of which there is no checkpoint in "
                f"{self._config.run.url}; until its next one, lookups read the rows of "
                "before."
            )
        return has_come

    def _read_next(self) -> bool:
        any_came = False
        for place, source in enumerate(self._sources):
            if not self._may_be_ours(place):
                continue
            try:
                increment = self._read(source)
            except CheckpointError as exc:
                raise _BrokenError(str(exc), source) from exc
            if increment is None:
                continue
            config = self._config
            self._tell(
                OwnChanges.of(
                    *(increment, config.shard, config.num_shards),
                    capacity_rows=config.capacity_rows,
                    is_lfu=config.is_lfu,
                )
            )
            self._sources[place] = Source(source.log, source.number + 1)
            any_came = True
        return any_came

    def _read(self, source: Source) -> Increment | None:
        """Return the increment at a place in a log; None if it is not there yet."""
        folder = self._config.logs.child(source.log)
        name = increment_name(source.number)
        if folder.size_of(name) is None:
            self._require_no_later(folder, source.number)
            return None
        increment = read_increment(folder, source.number)
        head = increment.head
        if (head.log, head.number) != (source.log, source.number):
            raise CheckpointError(
                f"{folder.path_of(name)} must be increment {source.number} of "
                f"{source.log}. Received: {head.number} of {head.log}."
            )
        return increment

    def _require_no_later(self, folder: Folder, number: int) -> None:
        later = [n for n in increments_in(folder) if n > number]
        if later and folder.size_of(increment_name(number)) is None:
            raise CheckpointError(
                f"{folder.path_of(increment_name(number))} is missing, and there is "
                f"{increment_name(later[0])}. A dump deletes what the dump before does "
                "not need."
            )

    def _may_be_ours(self, source: int) -> bool:
        """Whether rows of a server of the training may be of this server."""
        common = math.gcd(len(self._sources), self._config.num_shards)
        return source % common == self._config.shard % common

    def _latest_logs(self) -> list[LogInfo]:
        logs = find_logs(self._config.logs, self._known)
        self._known = {log.name: log for log in logs}
        return latest_logs(logs)

    def _go_on(self, logs: Sequence[LogInfo], beyond: Source | None) -> bool:
        """Go on in some logs; return whether there is a checkpoint for that.

        Args:
            logs: one of each server of the training.
            beyond: a place in a log that cannot be read; None if all can.
        """
        start = find_start(logs, self._checkpoints())
        if start is None:
            return False
        numbers = {source.log: source.number for source in start.sources}
        if beyond is not None and numbers.get(beyond.log, beyond.number + 1) <= (
            beyond.number
        ):
            return False
        if (self._sources or start.created != self._created) and not self._reload(
            start
        ):
            return False
        logger.info("following %s from %s", list(start.logs), start.folder.url)
        self._sources = list(start.sources)
        self._created = start.created
        return True

    def _checkpoints(self) -> Iterator[tuple[Folder, Manifest]]:
        """Yield the complete checkpoints, but for those that could not be read."""
        now_s = time.monotonic()
        for folder in complete_checkpoints(self._config.run):
            if self._failed.get(folder.url, 0.0) <= now_s:
                if folder.url not in self._manifests:  # which never change
                    self._manifests[folder.url] = Manifest.read(folder)
                yield folder, self._manifests[folder.url]

    def _reload(self, start: Start) -> bool:
        """Read a checkpoint into another store; return whether that went well."""
        store = self._make_store()
        config = self._config
        load = ShardLoad(
            start.folder, config.shard, config.num_shards, store, replaces=True
        )
        while load.phase in ("checking", "checked", "loading"):
            if load.phase == "checked":
                load.load()
            if self._ending.wait(_CHECK_S):
                load.cancel()
                raise _EndedError
        if load.error is not None:
            self.num_errors += 1
            self._failed[start.folder.url] = time.monotonic() + _RETRY_S
            logger.warning("going on from %s: %s", start.folder.url, load.error)
            return False
        self.num_reloads += 1
        self._tell(OtherRows(store, start.folder))
        return True

    def _tell(self, news: News) -> bool:
        while not self._ending.is_set():
            try:
                self._news.put(news, timeout=_CHECK_S)
            except queue.Full:
                continue
            return True
        raise _EndedError


class _EndedError(Exception):
    """The server ends."""


class _BrokenError(Exception):
    """An increment is missing or damaged.

    Attributes:
        source: its place.
    """

    def __init__(self, message: str, source: Source) -> None:
        super().__init__(message)
        self.source = source
