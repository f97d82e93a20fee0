"""The checkpoint that a server serves for inference, instead of training.

    checking --> loading --> catching up --> ready
       a thread reads           what the training has changed since, if the server
       the files, twice         follows it; lookups are answered once it is ready

It stands where :class:`~persia_torchrec.server.checkpoints.Checkpoints` stands in a
server that trains: it sees every request before it is answered, has its turn between
two requests, and says how long the server may wait for one. Nothing changes the rows
but what :meth:`ServedCheckpoint.work` does: clients cannot, and no row expires, since
what keeps a row alive is its training. Where there is an ``incremental_dir``, the
server follows the training (``checkpoint/follower.py``): it puts in one increment after
the other, in slices between requests, and when it has to go on from another checkpoint
it takes over a store in which that was read beside.

A server that is started anew is the same to its clients, as long as its tables are: so
nobody else has to be started again. A training server's rows would be lost.
"""

import hashlib
import json
import logging
import time

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.follower import (
    CaughtUp,
    Follower,
    FollowerConfig,
    News,
    OtherRows,
)
from persia_torchrec.checkpoint.increment_import import IncrementImport, OwnChanges
from persia_torchrec.checkpoint.load import Loaded, ShardLoad
from persia_torchrec.checkpoint.manifest import Manifest
from persia_torchrec.checkpoint.series import find_checkpoint
from persia_torchrec.errors import (
    CheckpointError,
    ConfigError,
    PersiaError,
    StoreError,
)
from persia_torchrec.metrics import Metrics
from persia_torchrec.server.checkpoints import Checkpoints
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.spare_time import SpareTime
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.wire.messages import TRAINING, Header, Kind

logger = logging.getLogger(__name__)

_ALWAYS = frozenset((Kind.HELLO, Kind.SHUTDOWN))
_WHEN_READY = frozenset(
    (Kind.LOOKUP, Kind.READ, Kind.METADATA, Kind.EXPORT, Kind.COUNTERS)
)

_SHARE_IN_USE = 0.2
"""Part of a processor that increments may take while rows are asked for."""

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
        manifest = Manifest.read(self._folder)
        self.incarnation = _incarnation(config, manifest)
        self._created = manifest.created
        self._load: ShardLoad | None = None
        self._follower: Follower | None = None
        self._putting_in: IncrementImport | None = None
        self._has_stopped = False
        self._begun_s = 0.0  # when the increment was begun that is put in
        self._spare_time = SpareTime(_SHARE_IN_USE)
        self._metrics = Metrics()
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
            if self._follower is not None:
                raise StoreError(
                    f"The server has loaded {self._folder.url}, and puts in what the "
                    "training has changed since. Wait until it is ready."
                )
            raise StoreError(
                f"The server loads {self._folder.url}, {progress:.0%} of it so far. "
                "Wait until it is ready."
            )
        self._spare_time.rows_are_asked_for()

    def answer(self, kind: Kind, request: object) -> dict[str, object]:
        """Answer what :meth:`admit` has refused."""
        raise AssertionError(f"{kind.name}: {request}")

    def counters(self) -> dict[str, int]:
        """Return what has been put in of the training's increments."""
        if self._follower is None:
            return {}
        return {
            "increments_put_in": 0,
            "increment_rows_put_in": 0,
            "increment_delay_ms": 0,
            **self._metrics.snapshot(),
            "following_errors": self._follower.num_errors,
            "following_reloads": self._follower.num_reloads,
            "following_lost": int(self._follower.is_lost),
        }

    def cancel(self, why: str) -> None:
        """End what requests have begun: nothing."""

    def close(self) -> None:
        """Give the load up, if it goes on. May be called twice."""
        if self._load is not None:
            self._load.cancel()
        if self._follower is not None:
            self._follower.close()

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        follower = self._follower
        has_news = follower is not None and follower.has_news and not self._has_stopped
        if self._putting_in is not None or has_news:
            return self._spare_time.wait_ms(idle_ms)
        return idle_ms if self._is_ready else min(idle_ms, _LOADING_WAIT_MS)

    def work(self) -> None:
        """Do a slice of what is to be done between two requests.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
        """
        if self._follower is not None:
            self._follow(self._follower)
        elif not self._is_ready:
            self._load = self._load or self._begin_load()
            if self._advance(self._load):
                self._begin_to_follow()

    def _begin_to_follow(self) -> None:
        config = self._config
        if config.incremental_dir is None or config.checkpoint is None:
            self._is_ready = True
            return
        following = FollowerConfig(
            logs=Folder(config.incremental_dir),
            run=Folder(config.checkpoint),
            shard=config.shard,
            num_shards=config.num_shards,
            capacity_rows=config.capacity_rows,
            is_lfu=config.eviction == "lfu",
        )
        self._follower = Follower(following, self._created, self._empty_store)

    def _empty_store(self) -> EmbeddingStore:
        """Return a store like the server's, with the same numbers of tables."""
        store = EmbeddingStore(
            self._config.capacity_rows,
            eviction=self._config.eviction,
            optimizer_engine=self._config.optimizer_engine,
        )
        store.add_tables(self._store.tables)
        return store

    def _follow(self, follower: Follower) -> None:
        """Put in a slice of an increment, or look what has come."""
        if self._has_stopped or not self._spare_time.may_work():
            return
        begin_s = time.thread_time()
        try:
            if self._putting_in is not None:
                self._put_in(self._putting_in)
            else:
                self._take(follower.next_news())
        except PersiaError as exc:
            self._stop_following(exc)
        self._spare_time.spend(time.thread_time() - begin_s)

    def _put_in(self, increment: IncrementImport) -> None:
        if increment.advance():
            return
        self._putting_in = None
        delay_s = time.time() - self._begun_s  # noqa: TID251  # the writer's clock
        self._metrics.set_gauge("increment_delay_ms", max(int(1000 * delay_s), 0))
        self._metrics.count("increments_put_in")
        self._metrics.count("increment_rows_put_in", increment.num_rows)

    def _take(self, news: News | None) -> None:
        match news:
            case OwnChanges():
                self._begun_s = news.head.created_s
                self._putting_in = IncrementImport(self._store, news, follows=True)
            case OtherRows():
                self._require_same_tables(news.store)
                logger.info("going on from %s", news.folder.url)
                self._store.take_rows_of(news.store)
                self._folder = news.folder
            case CaughtUp():
                self._is_ready = True

    def _require_same_tables(self, store: EmbeddingStore) -> None:
        """Check that the tables keep their numbers, by which clients ask for them."""
        names = [spec.name for spec in self._store.tables]
        received = [spec.name for spec in store.tables]
        if received[: len(names)] != names:
            raise CheckpointError(
                f"The training's tables must begin with {names}. Received: {received}."
            )

    def _stop_following(self, exc: PersiaError) -> None:
        logger.error("%s Lookups read the rows of before: start it anew.", exc)
        assert self._follower is not None
        self._follower.end()
        self._has_stopped = True
        self._putting_in = None
        self._metrics.count("following_stopped")
        self._is_ready = True

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
