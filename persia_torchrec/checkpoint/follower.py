"""Follow a training: tail its logs of increments, for a server of inference.

    this thread                                        server's thread
      logs --next increments, checked--> queue --> applies them, in slices
      another checkpoint --------> a store --> queue --> replaces its own rows

When an increment is missing or damaged, or the training continues from other rows, the
follower reads a checkpoint from which it can continue into a store of its own, and
hands that over. So lookups are answered all the time.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from persia_torchrec.checkpoint.catalog import (
    LogPosition,
    Manifest,
    complete_checkpoints,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increments import (
    Increment,
    Log,
    Start,
    find_logs,
    find_start,
    increment_name,
    latest_logs,
    list_increments,
    read_increment,
)
from persia_torchrec.checkpoint.load import IncrementPart, ShardLoad, Target
from persia_torchrec.errors import CheckpointError, PersiaError
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the folders are polled."""

_MAX_EVENTS = 2
_CHECK_S = 0.1
_RETRY_S = 30.0
_CLOSE_S = 10.0


FollowerEvent = IncrementPart | tuple[EmbeddingStore, Folder] | None
"""An increment, or a store that replaces the current one, and its checkpoint; None once
all increments that existed have been handed over."""


class Follower:
    """A thread that follows a training. The server's thread calls all methods.

    Args:
        logs: the folder of all logs.
        run: the folder of the training's checkpoints, or a single checkpoint.
        target: the server that follows.
        created: of the manifest of the server's rows.
        make_store: returns an empty store like the server's.

    Attributes:
        events: what the server is to do next.
        ending: set to make the thread end soon.
        num_reloads: checkpoints that were read to continue from.
        is_lost: the training cannot be followed before its next checkpoint.
    """

    def __init__(
        self,
        logs: Folder,
        run: Folder,
        target: Target,
        created: str,
        make_store: Callable[[], EmbeddingStore],
    ) -> None:
        self._logs = logs
        self._run_folder = run
        self._target = target
        self._created = created
        self._make_store = make_store
        self._manifests: dict[str, Manifest] = {}
        self._retry_s: dict[str, float] = {}  # by URL of a checkpoint that failed
        self._positions: list[LogPosition] = []
        self._known_logs: dict[str, Log] = {}
        self.events: queue.Queue[FollowerEvent] = queue.Queue(_MAX_EVENTS)
        self.ending = threading.Event()
        self.num_errors = self.num_reloads = 0
        self.is_lost = False
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self.ending.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        has_caught_up = False
        logged = ""
        while not self.ending.is_set():
            has_read = False
            try:
                has_read = self._poll()
                logged = ""
            except Exception as exc:  # the server continues with the rows that it has
                if self.ending.is_set():
                    return
                self.num_errors += 1
                if str(exc) != logged:  # once, however often it is tried
                    has_bug = not isinstance(exc, PersiaError)
                    url = self._logs.url
                    logger.warning("following %s: %s", url, exc, exc_info=has_bug)
                logged = str(exc)
            if not has_read:
                if not has_caught_up:  # or as far as possible
                    self._send(None)
                    has_caught_up = True
                self.ending.wait(POLL_S)

    def _poll(self) -> bool:
        """Hand over the next increment of each log; return whether there was one."""
        all_logs = find_logs(self._logs, self._known_logs)
        self._known_logs = {log.name: log for log in all_logs}
        logs = latest_logs(all_logs)
        names, followed = [log.name for log in logs], [p.log for p in self._positions]
        is_lost = bool(logs) and names != followed and not self._switch(logs, None)
        try:
            has_read = self._read_next()
        except _BrokenLogError as exc:
            self.is_lost = not self._switch(logs, exc.position)
            if self.is_lost:
                raise CheckpointError(str(exc)) from exc
            logger.warning("following %s: %s", self._logs.url, exc)
            return True
        self.is_lost = is_lost
        if is_lost and not has_read:
            raise CheckpointError(
                "The training continues from rows of which there is no checkpoint in "
                f"{self._run_folder.url}. Until the next one, lookups read the "
                "previous rows."
            )
        return has_read

    def _read_next(self) -> bool:
        has_read = False
        for number in self._target.select(range(len(self._positions))):
            position = self._positions[number]
            try:
                increment = self._read(position)
            except CheckpointError as exc:
                raise _BrokenLogError(str(exc), position) from exc
            if increment is not None:
                self._send(IncrementPart.select(increment, self._target))
                self._positions[number] = replace(position, number=position.number + 1)
                has_read = True
        return has_read

    def _read(self, position: LogPosition) -> Increment | None:
        """Return the increment at a position; None if it does not exist yet."""
        folder = self._logs.child(position.log)
        name = increment_name(position.number)
        if folder.file_size(name) is None:
            later = [n for n in list_increments(folder) if n > position.number]
            if later and folder.file_size(name) is None:
                raise CheckpointError(
                    f"{folder.file_path(name)} is missing, and there is "
                    f"{increment_name(later[0])}. A dump deletes increments that the "
                    "previous dump does not need."
                )
            return None
        increment = read_increment(folder, position.number)
        head = increment.head
        if (head.log, head.number) != (position.log, position.number):
            raise CheckpointError(
                f"{folder.file_path(name)} must be increment {position.number} of "
                f"{position.log}. Received: {head.number} of {head.log}."
            )
        return increment

    def _switch(self, logs: Sequence[Log], beyond: LogPosition | None) -> bool:
        """Continue in some logs; return whether a checkpoint leads past ``beyond``."""
        start = find_start(logs, self._list_checkpoints())
        if start is None:
            return False
        numbers = {position.log: position.number for position in start.positions}
        if beyond and numbers.get(beyond.log, beyond.number + 1) <= beyond.number:
            return False
        has_these_rows = not self._positions and start.created == self._created
        if not has_these_rows and not self._reload(start):
            return False
        names = [position.log for position in start.positions]
        logger.info("following %s from %s", names, start.folder.url)
        self._positions = list(start.positions)
        self._created = start.created
        return True

    def _list_checkpoints(self) -> Iterator[tuple[Folder, Manifest]]:
        """Yield the complete checkpoints, but for those that failed just now."""
        now_s = time.monotonic()
        for folder in complete_checkpoints(self._run_folder):
            if self._retry_s.get(folder.url, 0.0) <= now_s:
                if folder.url not in self._manifests:  # manifests never change
                    self._manifests[folder.url] = Manifest.read(folder)
                yield folder, self._manifests[folder.url]

    def _reload(self, start: Start) -> bool:
        """Read a checkpoint into another store; return whether that succeeded."""
        store = self._make_store()
        load = ShardLoad(start.folder, self._target[:2], store)
        while load.phase in ("checking", "checked", "loading"):
            if load.phase == "checked":
                load.load()
            if self.ending.wait(_CHECK_S):
                load.cancel()
                raise CheckpointError("The server ends.")
        if load.error is not None:
            self.num_errors += 1
            self._retry_s[start.folder.url] = time.monotonic() + _RETRY_S
            logger.warning("continuing from %s: %s", start.folder.url, load.error)
            return False
        self.num_reloads += 1
        self._send((store, start.folder))
        return True

    def _send(self, event: FollowerEvent) -> None:
        while not self.ending.is_set():
            with contextlib.suppress(queue.Full):
                self.events.put(event, timeout=_CHECK_S)
                return


class _BrokenLogError(Exception):
    """An increment is missing or damaged, at a position."""

    def __init__(self, message: str, position: LogPosition) -> None:
        super().__init__(message)
        self.position = position
