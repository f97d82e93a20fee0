"""Dumps and loads of one server, beside its requests.

    dump    the serving thread copies slots a slice at a time, a thread writes the file
    load    a thread reads and checks the files; then, when it is told to, it takes the
            store over and fills it, and requests for rows are refused meanwhile

A dump uses every moment in which the server has nothing else to do. While rows are
asked for, it takes a twentieth of a processor in all, its writing included: so trainers
that share the machine are not held up either.

A CHECKPOINT request begins something, and is answered at once; PROGRESS asks how far it
has come. The answer to both is the state of what goes on: ``phase`` is ``idle``,
``dumping``, ``dumped``, ``checking``, ``checked``, ``loading``, ``loaded`` or
``failed``; ``result``, at the end, what a manifest says of a shard, or the numbers of
rows that were loaded and left out.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict

import msgspec

from persia_torchrec.checkpoint.dump import ShardDump
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import ShardLoad
from persia_torchrec.checkpoint.manifest import SavedTable, saved_table_to_json
from persia_torchrec.checkpoint.series import shard_name
from persia_torchrec.checkpoint.shard_file import FileTable
from persia_torchrec.errors import CheckpointError, FrameError, StoreError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.server.spare_time import WAIT_MS, SpareTime
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.lookup import TICK
from persia_torchrec.store.row_export import RowExport
from persia_torchrec.store.rows import HAS_METADATA
from persia_torchrec.wire.messages import Header, Kind

logger = logging.getLogger(__name__)

_SHARE_IN_USE = 0.05
"""Part of a processor that a dump takes while rows are asked for."""

_NEED_ROWS = frozenset(
    (
        *(Kind.LOOKUP, Kind.UPDATE, Kind.WRITE, Kind.READ, Kind.METADATA),
        *(Kind.ADD_TABLES, Kind.CLEAR, Kind.COUNTERS, Kind.EXPORT, Kind.STEP),
    )
)


class Checkpoints:
    """What a server dumps or loads, one thing at a time. The serving thread owns it.

    Args:
        config: of the server.
        store: of the server.

    Attributes:
        incarnation: what this start of the server is called: its rows are new.
    """

    def __init__(self, config: ServerConfig, store: EmbeddingStore) -> None:
        self.incarnation = secrets.randbits(63) | 1
        self._config = config
        self._store = store
        self._dump: _Dump | None = None
        self._load: ShardLoad | None = None
        self._task = -1
        self._is_filling = False
        self._spare_time = SpareTime(_SHARE_IN_USE)
        self._increments = Increments(config, store)

    def answer(self, kind: Kind, request: object) -> dict[str, object]:
        """Answer a CHECKPOINT request, or a PROGRESS request."""
        do = self.begin if kind is Kind.CHECKPOINT else self.progress
        return do(request)

    def begin(self, request: object) -> dict[str, object]:
        """Do what a CHECKPOINT request asks; return the state of what goes on.

        Raises:
            FrameError: the request cannot be understood.
            CheckpointError: another dump or load goes on, or the folder is not there.
        """
        match request:
            case {"do": "dump", "task": int(task), "folder": str(url)}:
                self._require_idle()
                self._dump, self._load = _Dump(self._config, self._store, url), None
                self._dump.log = self._increments.begin_dump(url)
                self._task = task
            case {"do": "check", "task": int(task), "folder": str(url), **how}:
                self._require_idle()
                self._dump, self._load = None, self._begin_load(url, how)
                self._task = task
            case {"do": "load", "task": task} if task == self._task:
                if self._load is None or self._load.phase != "checked":
                    raise CheckpointError("A checkpoint must be checked before a load.")
                self._increments.suspend()
                self._is_filling = True
                self._load.load()
            case {"do": "cancel", "task": task}:
                if task == self._task:
                    self.cancel("it was cancelled")
            case _:
                raise FrameError(f"Unknown CHECKPOINT request: {request!r:.200}.")
        return self._state()

    def progress(self, request: object) -> dict[str, object]:
        """Return how far a dump or a load has come: what a PROGRESS request asks.

        Raises:
            CheckpointError: the server has begun another one since.
        """
        match request:
            case {"task": task} if task == self._task:
                return self._state()
        raise CheckpointError("The server is not at this dump or load (any more).")

    def _begin_load(self, url: str, how: Mapping[object, object]) -> ShardLoad:
        shard, num_shards = self._config.shard, self._config.num_shards
        logs = how.get("increments")
        return ShardLoad(
            Folder(url),
            shard,
            num_shards,
            self._store,
            replaces=bool(how.get("replace", True)),
            logs=None if logs is None else Folder(str(logs)),
        )

    @property
    def is_loading(self) -> bool:
        """Whether the store belongs to a load: until its changes are noted again."""
        return self._is_filling

    @property
    def may_sweep(self) -> bool:
        """Whether rows that have expired may leave now."""
        return not self.is_loading

    def admit(self, header: Header) -> None:
        """A request has come.

        Raises:
            StoreError: it needs the store, which is being filled.
        """
        if header.kind not in _NEED_ROWS:
            return
        self._spare_time.rows_are_asked_for()
        self._increments.rows_are_asked_for()
        if self.is_loading:
            raise StoreError(
                "The server loads a checkpoint, and has no rows until it is loaded. "
                "Wait for the end of the load."
            )

    def cancel(self, why: str) -> None:
        """End a dump; end a load, unless it has begun to fill the store."""
        if self._dump is not None:
            self._dump.cancel(why)
        if self._load is not None and not self.is_loading:
            self._load.cancel()
            self._load = None

    def close(self) -> None:
        """End what goes on; write what is left of increments. May be called twice."""
        self.cancel("the server ends")
        if self._load is not None:
            self._load.cancel()
        self._increments.close()

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        idle_ms = self._increments.wait_ms(idle_ms)
        if self._dump is None or self._dump.is_over:
            return idle_ms
        if not self._dump.has_room:
            return idle_ms if self._spare_time.is_in_use() else WAIT_MS
        return self._spare_time.wait_ms(idle_ms)

    def work(self) -> None:
        """Do a slice of a dump, and of what increments want, if it is their turn."""
        load = self._load
        if self._is_filling and load is not None and load.phase != "loading":
            self._is_filling = False
            self._increments.resume(load.base)
        self._increments.work()
        if self._dump is None or self._dump.is_over or not self._may_dump():
            return
        begin_s = time.thread_time()
        writing_s = self._dump.advance()
        self._spare_time.spend(time.thread_time() - begin_s + writing_s)

    def counters(self) -> dict[str, int]:
        """Return what has been counted of increments."""
        return self._increments.counters()

    def _may_dump(self) -> bool:
        """Whether there is room, and time."""
        assert self._dump is not None
        has_time = self._spare_time.may_work()
        return self._dump.has_room and has_time

    def _require_idle(self) -> None:
        is_dumping = self._dump is not None and self._dump.phase == "dumping"
        phases = ("checking", "loading")
        is_loading = self._load is not None and self._load.phase in phases
        if is_dumping or is_loading or self._is_filling:
            raise CheckpointError(
                "A server dumps or loads one checkpoint at a time, and is at one. Wait "
                "for its end, or cancel it."
            )

    def _state(self) -> dict[str, object]:
        if self._dump is not None:
            return self._dump.state()
        if self._load is not None:
            loaded = self._load.loaded
            return {
                "phase": self._load.phase,
                "progress": self._load.progress,
                "error": _error(self._load.error),
                "result": None if loaded is None else asdict(loaded),
            }
        return {"phase": "idle", "progress": 0.0, "error": None, "result": None}


class _Dump:
    """A dump under way: the copying of slots, and the thread that writes them."""

    log: Mapping[str, object] | None = None
    """Where in the log of increments it began."""

    def __init__(self, config: ServerConfig, store: EmbeddingStore, url: str) -> None:
        folder = Folder(url)
        if not folder.exists():
            raise CheckpointError(
                f"The folder {url} must be there, and it is not. Give a path that all "
                "servers and trainers share."
            )
        self._config = config
        self._store = store
        self._export = RowExport(store.memory)
        self._file = shard_name(config.shard, config.num_shards)
        files = [
            FileTable(state.spec, bool(state.layout[HAS_METADATA]))
            for state in store.memory.tables.states
        ]
        self._num_tables = len(files)
        tables = list(zip(self._export.tables, files, strict=True))
        self._writing = ShardDump(
            folder, self._file, config.shard, config.num_shards, tables
        )
        self._has_ended = False
        self._counted: Mapping[str, object] = {}
        self._error: Exception | None = None
        self._cpu_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the serving thread has nothing more to do."""
        return self._has_ended or self._writing.is_over

    @property
    def phase(self) -> str:
        """``dumping``, ``dumped`` or ``failed``."""
        if self._writing.written is not None:
            return "dumped"
        return "failed" if self._error or self._writing.error else "dumping"

    @property
    def has_room(self) -> bool:
        """Whether :meth:`advance` may be called."""
        return self._writing.has_room

    def advance(self) -> float:
        """Do a slice; return the processor's seconds that the writing took since."""
        chunk = self._export.advance()
        if chunk is not None:
            self._writing.put(chunk)
        elif self._export.is_done:
            self._count()
            self._writing.put(None)
            self._has_ended = True
        cpu_s = self._writing.cpu_s
        self._cpu_s, since_s = cpu_s, cpu_s - self._cpu_s
        return since_s

    def cancel(self, why: str) -> None:
        """Give the dump up, unless its file is written."""
        if self._writing.written is None:
            self._error = self._error or CheckpointError(
                f"The dump ended early: {why}."
            )
            self._has_ended = True
            self._writing.cancel()

    def state(self) -> dict[str, object]:
        """Return how far the dump has come."""
        written = self._writing.written
        result = None
        if written is not None:
            result = {**self._counted, **asdict(written), "file": self._file}
        return {
            "phase": self.phase,
            "progress": self._export.progress,
            "error": _error(self._error or self._writing.error),
            "result": result,
        }

    def _count(self) -> None:
        """Note how far the tables have come, as of the last row."""
        states = self._store.memory.tables.states[: self._num_tables]
        tables = [SavedTable(state.spec, state.num_updates) for state in states]
        self._counted = {
            "tables": [saved_table_to_json(table) for table in tables],
            "tick": int(self._store.memory.tally[TICK]),
            "server": msgspec.to_builtins(self._config),
            "log": self.log,
        }


def _error(error: Exception | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"kind": type(error).__name__, "message": str(error)}
