"""The checkpoint that a server serves for inference, instead of training.

    checking --> loading --> ready        a thread reads the files, twice
       HELLO is answered     lookups too

It stands where :class:`~persia_torchrec.server.checkpoints.Checkpoints` stands in a
server that trains: it sees every request before it is answered, has its turn between
two requests, and says how long the server may wait for one. Nothing changes the rows
but what :meth:`ServedCheckpoint.work` does: clients cannot, no row is evicted, and none
expires, since what keeps a row alive is its training.

A server that is started anew is the same to its clients, as long as its tables are: so
nobody else has to be started again. A training server's rows would be lost.
"""

import hashlib
import json
import logging

from persia_torchrec.checkpoint.load import Loaded, ShardLoad
from persia_torchrec.checkpoint.manifest import Manifest
from persia_torchrec.checkpoint.series import find_checkpoint
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.server.checkpoints import Checkpoints
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.wire.messages import TRAINING, Header, Kind

logger = logging.getLogger(__name__)

_ALWAYS = frozenset((Kind.HELLO, Kind.SHUTDOWN))
_WHEN_READY = frozenset(
    (Kind.LOOKUP, Kind.READ, Kind.METADATA, Kind.EXPORT, Kind.COUNTERS)
)

_LOADING_WAIT_MS = 20
"""How soon to look again how far the load has come."""


def checkpoints_of(
    config: ServerConfig, store: EmbeddingStore
) -> "Checkpoints | ServedCheckpoint":
    """Return what a server does with checkpoints: dump and load some, or serve one.

    Raises:
        CheckpointError: it serves one that is not there.
        ConfigError: its path is a URL that fsspec does not know.
    """
    kind = Checkpoints if config.checkpoint is None else ServedCheckpoint
    return kind(config, store)


class ServedCheckpoint:
    """Loads a server's share of a checkpoint, and guards it.

    The serving thread owns it. The load begins when the server serves.

    Args:
        config: of the server; its ``checkpoint`` is given.
        store: of the server, empty.

    Attributes:
        incarnation: what this start of the server is called; see above.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: the path is a URL that fsspec does not know.
    """

    def __init__(self, config: ServerConfig, store: EmbeddingStore) -> None:
        assert config.checkpoint is not None
        self._config = config
        self._store = store
        self._folder = find_checkpoint(config.checkpoint)
        self.incarnation = _incarnation(config, Manifest.read(self._folder))
        self._load: ShardLoad | None = None
        self._is_ready = False

    @property
    def is_loading(self) -> bool:
        """Whether the rows are not all there yet."""
        return not self._is_ready

    @property
    def may_sweep(self) -> bool:
        """Whether rows that have expired may leave now: never."""
        return False

    def admit(self, header: Header) -> None:
        """A request has come.

        Raises:
            ConfigError: it would change something, or belongs to a training.
            StoreError: the rows are not there yet.
        """
        kind = header.kind
        if kind in _ALWAYS:
            return
        is_training = bool(header.flags & TRAINING)
        if kind not in _WHEN_READY or is_training:
            what = f"{'training ' if is_training else ''}{kind.name}"
            raise ConfigError(
                f"This server serves inference, from {self._folder.url}: it answers "
                f"lookups, and nobody changes its rows. Received: {what}. Train with "
                "servers of a job_type: Train."
            )
        if not self._is_ready:
            progress = 0.0 if self._load is None else self._load.progress
            raise StoreError(
                f"The server loads {self._folder.url}, {progress:.0%} of it so far. "
                "Wait until it is ready."
            )

    def answer(self, kind: Kind, request: object) -> dict[str, object]:
        """Answer what :meth:`admit` has refused."""
        raise AssertionError(f"{kind.name}: {request}")

    def cancel(self, why: str) -> None:
        """End what requests have begun: nothing."""

    def close(self) -> None:
        """Give the load up, if it goes on. May be called twice."""
        if self._load is not None:
            self._load.cancel()

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        return idle_ms if self._is_ready else min(idle_ms, _LOADING_WAIT_MS)

    def work(self) -> None:
        """Do a slice of what is to be done between two requests.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
        """
        if not self._is_ready:
            self._load = self._load or self._begin_load()
            self._is_ready = self._advance(self._load)

    def _begin_load(self) -> ShardLoad:
        logger.info("loading %s", self._folder.url)
        shard, num_shards = self._config.shard, self._config.num_shards
        return ShardLoad(self._folder, shard, num_shards, self._store, replaces=True)

    def _advance(self, load: ShardLoad) -> bool:
        """Let the load go on; return whether it is at its end."""
        if load.error is not None:
            raise load.error
        if load.phase == "checked":
            load.load()
        if load.loaded is None or load.phase != "loaded":
            return False
        self._tell_loaded(load.loaded)
        return True

    def _tell_loaded(self, loaded: Loaded) -> None:
        logger.info("loaded %s num_rows=%d", self._folder.url, loaded.num_rows)
        if loaded.num_left_out:
            logger.warning(
                "%s: %d of the %d rows for this server were left out, those that would "
                "have left first in training; they read zeros. Raise the capacity, or "
                "start more than %d servers.",
                self._folder.url,
                loaded.num_left_out,
                loaded.num_left_out + loaded.num_rows,
                self._config.num_shards,
            )


def _incarnation(config: ServerConfig, manifest: Manifest) -> int:
    """Return a number for what clients remember of a server: shard, and tables."""
    tables = [[table.spec.name, table.spec.dim] for table in manifest.tables]
    known = json.dumps([config.shard, config.num_shards, tables]).encode()
    return int.from_bytes(hashlib.sha256(known).digest()[:8], "little") >> 1 | 1
