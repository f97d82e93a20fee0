"""Dumps and loads of one server, in the background of its requests.

    dump    the serving thread copies slots, a slice at a time; a thread writes the file
    load    a thread reads and checks the files; when told to, it takes the store over
            and fills it, and requests for rows are refused meanwhile

A CHECKPOINT request begins something, and PROGRESS asks how far it has come. Both are
answered at once, by the state of the task: ``phase`` is ``idle`` or that of a
``ShardDump`` or ``ShardLoad``; ``result``, at the end, a ``DumpResult`` or a
``Loaded``.
"""

import logging
import secrets

import msgspec

from persia_torchrec.checkpoint.dump import ShardDump
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.errors import CheckpointError, StoreError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.cpu_budget import Activity, CpuBudget
from persia_torchrec.server.increments import Increments
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

_CPU_FRACTION = 0.05
"""Of a CPU that a dump takes while requests for rows arrive, its writing included."""


class BeginDump(msgspec.Struct, tag_field="do", tag="dump"):
    """Dump into a folder, which exists."""

    task: int
    folder: str


class BeginCheck(msgspec.Struct, tag_field="do", tag="check"):
    """Read and check a checkpoint, and its increments if they are named."""

    task: int
    folder: str
    replace: bool = True
    increments: str | None = None


class BeginLoad(msgspec.Struct, tag_field="do", tag="load"):
    """Load what was checked."""

    task: int


class Cancel(msgspec.Struct, tag_field="do", tag="cancel"):
    """End a dump, or a load that does not fill the store yet."""

    task: int


class Progress(msgspec.Struct):
    """How far a task has come."""

    task: int


CheckpointRequest = BeginDump | BeginCheck | BeginLoad | Cancel


class Checkpoints:
    """What a training server dumps or loads, one task at a time, and its increments.

    The serving thread owns it.

    Attributes:
        incarnation: identifies this start of the server, whose rows are new.
        is_loading: whether rows cannot be asked for yet.
        is_active: whether :meth:`work` may have something to do.
    """

    def __init__(
        self, config: ServerConfig, store: EmbeddingStore, activity: Activity
    ) -> None:
        self.incarnation = secrets.randbits(63) | 1
        self.is_loading = False
        self.is_active = config.incremental_dir is not None
        self._config = config
        self._store = store
        self._dump: ShardDump | None = None
        self._load: ShardLoad | None = None
        self._task = -1
        self._budget = CpuBudget(_CPU_FRACTION, activity)
        self._increments = Increments(config, store, activity)

    def begin(self, request: CheckpointRequest) -> dict[str, object]:
        """Do what a client asks; return the state of the task."""
        self.is_active = True
        match request:
            case BeginDump(task, url):
                self._require_idle()
                server = msgspec.to_builtins(self._config)
                self._dump = ShardDump(Folder(url), self._store, server)
                self._dump.log = self._increments.begin_dump(url)
                self._load, self._task = None, task
            case BeginCheck(task, url, replaces, logs):
                self._require_idle()
                self._load = ShardLoad(
                    Folder(url),
                    (self._config.shard, self._config.num_shards),
                    self._store,
                    replaces=replaces,
                    logs=None if logs is None else Folder(logs),
                )
                self._dump, self._task = None, task
            case BeginLoad(task):
                load = self._load
                if task != self._task or load is None or load.phase != "checked":
                    raise CheckpointError("A checkpoint must be checked before a load.")
                self._increments.suspend()
                self.is_loading = True
                load.load()
            case Cancel(task):
                if task == self._task:
                    self.cancel("it was cancelled")
        return self._state()

    def progress(self, request: Progress) -> dict[str, object]:
        """Return the state of a task."""
        if request.task != self._task:
            raise CheckpointError("The server is not at this dump or load (any more).")
        return self._state()

    def not_loaded(self) -> StoreError:
        """Return the error of requests for rows while ``is_loading``."""
        return StoreError(
            "The server loads a checkpoint, and has no rows until it is loaded. "
            "Wait for the end of the load."
        )

    def cancel(self, why: str) -> None:
        """End a dump; end a load, unless it has begun to fill the store."""
        if self._dump is not None:
            self._dump.end_early(why)
        if self._load is not None and not self.is_loading:
            self._load.cancel()
            self._load = None

    def close(self) -> None:
        """End all tasks; write the last increment. May be called twice."""
        self.cancel("the server ends")
        if self._load is not None:
            self._load.cancel()
        self._increments.close()

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        idle_ms = self._increments.wait_ms(idle_ms)
        if self._dump is None or not self._dump.is_copying:
            return idle_ms
        if not self._dump.has_room:
            return self._budget.poll_ms(idle_ms)
        return self._budget.wait_ms(idle_ms)

    def work(self) -> None:
        """Do a slice of a dump, and of increments."""
        load, dump = self._load, self._dump
        if self.is_loading and load is not None and load.phase != "loading":
            self.is_loading = False
            self._increments.resume(load.base)
        self._increments.work()
        if dump is None or not dump.is_copying:
            self.is_active = self.is_loading or self._config.incremental_dir is not None
            return
        if self._budget.has_credit() and dump.has_room:
            with self._budget.spend():
                writing_s = dump.advance()
            self._budget.charge(writing_s)

    def counters(self) -> dict[str, int]:
        """Return what has been counted of increments."""
        return self._increments.counters()

    def _require_idle(self) -> None:
        task = self._dump or self._load
        phases = ("dumping", "checking", "loading")
        if self.is_loading or (task is not None and task.phase in phases):
            raise CheckpointError(
                "A server dumps or loads one checkpoint at a time, and one is running. "
                "Wait for its end, or cancel it."
            )

    def _state(self) -> dict[str, object]:
        task = self._dump or self._load
        if task is None:
            return {"phase": "idle", "progress": 0.0, "error": None, "result": None}
        error = task.error
        kind = {"kind": type(error).__name__, "message": str(error)}
        return {
            "phase": task.phase,
            "progress": task.progress,
            "error": None if error is None else kind,
            "result": msgspec.to_builtins(task.result),
        }
