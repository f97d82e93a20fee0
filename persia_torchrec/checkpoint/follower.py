"""Read what a training writes of its changes, as it comes, for a server of inference.

    this thread                                       server's thread
      log folders --next increments, checked--> queue --> puts them in, in slices
      another checkpoint --------rows in a store--> queue --> takes them for its own

The increments of each log come in order and without gaps. When one is missing or
damaged, or the training goes on from other rows, the follower looks for a checkpoint
from which it can go on, reads that into a store of its own, and hands the store over:
so lookups are answered all the time.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_file import (
    Increment,
    increment_name,
    read_increment,
)
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


News = Increment | OtherRows | CaughtUp


class Follower:
    """A thread that follows a training. The server's thread calls all methods.

    Args:
        logs: the folder of all logs.
        run: the folder of the training's checkpoints, or a single checkpoint.
        loaded: the checkpoint whose rows the server has.
        shard: of the server.
        num_shards: of how many that follow.
        make_store: returns an empty store like the server's.

    Attributes:
        num_errors: times that something could not be read.
        num_reloads: checkpoints that were read to go on from.
        is_lost: the training goes on, and cannot be followed before its next
            checkpoint.
    """

    def __init__(
        self,
        logs: Folder,
        run: Folder,
        loaded: Folder,
        shard: int,
        num_shards: int,
        make_store: Callable[[], EmbeddingStore],
    ) -> None:
        self._logs = logs
        self._run_folder = run
        self._created = Manifest.read(loaded).created
        self._shard, self._num_shards = shard, num_shards
        self._make_store = make_store
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

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._ending.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        has_caught_up = False
        told = ""
        while not self._ending.is_set():
            try:
                has_come = self._look()
                told = ""
            except PersiaError as exc:
                has_come = False
                self.num_errors += 1
                if str(exc) != told:  # once, however often it is looked for
                    logger.warning("following %s: %s", self._logs.url, exc)
                told = str(exc)
            except _EndedError:
                return
            except Exception:  # the server lives on with the rows that it has
                has_come = False
                self.num_errors += 1
                logger.exception("following %s failed", self._logs.url)
            if not has_caught_up and not has_come:
                has_caught_up = True
                self._tell(CaughtUp())
            if not has_come:
                self._ending.wait(POLL_S)

    def _look(self) -> bool:
        """Hand over the next increment of each log; return whether there was one.

        Raises:
            CheckpointError: an increment is missing or damaged, and there is no
                checkpoint yet from which to go on.
        """
        logs = self._latest_logs()
        names = [log.name for log in logs]
        self.is_lost = False
        if logs and names != [source.log for source in self._sources]:
            start = self._find_start(logs, beyond=())
            self.is_lost = start is None
            if start is not None:
                self._go_on_from(start)
        try:
            has_come = self._read_next()
        except CheckpointError as exc:
            start = self._find_start(logs, beyond=self._sources)
            self.is_lost = start is None
            if start is None:
                raise
            logger.warning("following %s: %s", self._logs.url, exc)
            self._go_on_from(start)
            return True
        if self.is_lost and not has_come:
            raise CheckpointError(
                f"The training goes on from rows of which there is no checkpoint in "
                f"{self._run_folder.url}; until its next one, lookups read the rows of "
                "before."
            )
        return has_come

    def _read_next(self) -> bool:
        any_came = False
        for place, source in enumerate(self._sources):
            if not self._may_be_ours(place):
                continue
            folder = self._logs.child(source.log)
            if folder.size_of(increment_name(source.number)) is None:
                self._require_no_later(folder, source.number)
                continue
            increment = read_increment(folder, source.number)
            head = increment.head
            if (head.log, head.number) != (source.log, source.number):
                path = folder.path_of(increment_name(source.number))
                raise CheckpointError(
                    f"{path} must be increment {source.number} of {source.log}. "
                    f"Received: {head.number} of {head.log}."
                )
            self._tell(increment)
            self._sources[place] = Source(source.log, source.number + 1)
            any_came = True
        return any_came

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
        common = math.gcd(len(self._sources), self._num_shards)
        return source % common == self._shard % common

    def _latest_logs(self) -> list[LogInfo]:
        logs = find_logs(self._logs, self._known)
        self._known = {log.name: log for log in logs}
        return latest_logs(logs)

    def _find_start(
        self, logs: Sequence[LogInfo], beyond: Sequence[Source]
    ) -> Start | None:
        """Return from where to go on, with later increments than those at hand."""
        checkpoints = (
            (folder, Manifest.read(folder))
            for folder in complete_checkpoints(self._run_folder)
        )
        start = find_start(logs, checkpoints)
        if start is None:
            return None
        at = {source.log: source.number for source in beyond}
        is_beyond = all(s.number > at.get(s.log, 0) for s in start.sources)
        return start if is_beyond else None

    def _go_on_from(self, start: Start) -> None:
        """Take the rows of a checkpoint, unless they are those of now."""
        if self._sources or start.created != self._created:
            self._reload(start)
        logger.info("following %s from %s", list(start.logs), start.folder.url)
        self._sources = list(start.sources)
        self._created = start.created

    def _reload(self, start: Start) -> None:
        store = self._make_store()
        shard, num_shards = self._shard, self._num_shards
        load = ShardLoad(start.folder, shard, num_shards, store, replaces=True)
        while load.phase in ("checking", "checked", "loading"):
            if load.phase == "checked":
                load.load()
            if self._ending.wait(_CHECK_S):
                load.cancel()
                raise _EndedError
        if load.error is not None:
            raise load.error
        self.num_reloads += 1
        self._tell(OtherRows(store, start.folder))

    def _tell(self, news: News) -> None:
        while not self._ending.is_set():
            try:
                self._news.put(news, timeout=_CHECK_S)
            except queue.Full:
                continue
            return
        raise _EndedError


class _EndedError(Exception):
    """The server ends."""
