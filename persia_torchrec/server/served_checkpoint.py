"""The checkpoint that a server of inference serves, and follows.

    checking --> loading --> catching up --> ready
       a thread reads           what the training has changed since, if the server
       the files, twice         follows it; lookups are answered once it is ready

Only :meth:`ServedCheckpoint.work` changes the rows: clients cannot, and no row expires,
since training is what keeps a row alive. It applies one increment after the other, in
slices between requests, and replaces the store when it continues from another
checkpoint. After a restart the server has the same incarnation as long as its tables
are the same, so its clients need no restart.
"""

import hashlib
import json
import logging
import time
from collections import Counter

from persia_torchrec.checkpoint.catalog import Manifest, find_checkpoint
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.follower import Follower, FollowerEvent
from persia_torchrec.checkpoint.load import (
    IncrementImport,
    IncrementPart,
    ShardLoad,
    Target,
)
from persia_torchrec.errors import CheckpointError, PersiaError, StoreError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.cpu_budget import Activity, CpuBudget
from persia_torchrec.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

_CPU_FRACTION = 0.2
"""Of a CPU that increments may take while lookups arrive."""

_LOADING_POLL_MS = 20
"""How often the progress of the load is checked."""


class ServedCheckpoint:
    """Loads a server's part of a checkpoint, and follows its training.

    The serving thread owns it. The load begins with the first :meth:`work`.
    """

    def __init__(
        self, config: ServerConfig, store: EmbeddingStore, activity: Activity
    ) -> None:
        assert config.checkpoint is not None
        self._config = config
        self._store = store
        self._run = config.checkpoint
        self._folder = find_checkpoint(config.checkpoint)
        manifest = Manifest.read(self._folder)
        self.incarnation = _identify(config, manifest)
        self.is_loading = self.is_active = True
        self._created = manifest.created
        self._load: ShardLoad | None = None
        self._follower: Follower | None = None
        self._increment: IncrementImport | None = None
        self._has_stopped = False
        self._created_s = 0.0  # of the increment that is being applied
        self._budget = CpuBudget(_CPU_FRACTION, activity)
        self._counts = Counter[str]()

    def not_loaded(self) -> StoreError:
        """Return the error of lookups while ``is_loading``."""
        progress = 0.0 if self._load is None else self._load.progress
        does = f"loads {self._folder.url}, {progress:.0%} of it so far"
        if self._follower is not None:
            does = (
                f"has loaded {self._folder.url}, and applies what the training has "
                "changed since"
            )
        return StoreError(f"The server {does}. Wait until it is ready.")

    def counters(self) -> dict[str, int]:
        """Return what has been applied of the training's increments."""
        if self._follower is None:
            return {}
        return {
            "increments_put_in": 0,
            "increment_rows_put_in": 0,
            "increment_delay_ms": 0,
            **self._counts,
            "following_errors": self._follower.num_errors,
            "following_reloads": self._follower.num_reloads,
            "following_lost": int(self._follower.is_lost),
        }

    def cancel(self, why: str) -> None:
        """End what requests have begun: nothing."""

    def close(self) -> None:
        """End the load and the follower. May be called twice."""
        if self._load is not None:
            self._load.cancel()
        if self._follower is not None:
            self._follower.close()

    def wait_ms(self, idle_ms: int) -> int:
        """Return how long the server may wait for a message, ``idle_ms`` at most."""
        follower = self._follower
        has_events = follower is not None and not follower.events.empty()
        if self._increment is not None or (has_events and not self._has_stopped):
            return self._budget.wait_ms(idle_ms)
        return min(idle_ms, _LOADING_POLL_MS) if self.is_loading else idle_ms

    def work(self) -> None:
        """Do a slice of what is due between two requests."""
        follower = self._follower
        if follower is None:
            if self.is_loading and self._has_loaded():
                self._begin_to_follow()
        elif not self._has_stopped and self._budget.has_credit():
            with self._budget.spend():
                try:
                    if self._increment is not None:
                        self._apply_slice(self._increment)
                    elif not follower.events.empty():
                        self._take(follower.events.get_nowait())
                except PersiaError as exc:
                    self._stop_following(follower, exc)

    def _has_loaded(self) -> bool:
        """Let the load continue; return whether it is complete."""
        shard = self._config.shard, self._config.num_shards
        if self._load is None:
            logger.info("loading %s", self._folder.url)
            self._load = ShardLoad(self._folder, shard, self._store)
        load = self._load
        if load.error is not None:
            raise load.error
        if load.phase == "checked":
            load.load()
        if load.result is None or load.phase != "loaded":
            return False
        num_rows, num_left_out = load.result.num_rows, load.result.num_left_out
        logger.info("loaded %s num_rows=%d", self._folder.url, num_rows)
        if num_left_out:
            logger.warning(
                "%s: %d of the %d rows for this server were left out, those that would "
                "be evicted first in training; they read zeros. Raise the capacity, or "
                "start more than %d servers.",
                self._folder.url,
                num_left_out,
                num_left_out + num_rows,
                self._config.num_shards,
            )
        return True

    def _begin_to_follow(self) -> None:
        config, store = self._config, self._store
        if config.incremental_dir is None:
            self.is_loading = self.is_active = False
            return
        self._follower = Follower(
            Folder(config.incremental_dir),
            Folder(self._run),
            Target(config.shard, config.num_shards, store.capacity_rows, store.is_lfu),
            self._created,
            self._make_store,
        )

    def _make_store(self) -> EmbeddingStore:
        """Return an empty store like the server's, with the same table numbers."""
        store = self._config.make_store()
        store.add_tables(self._store.tables)
        return store

    def _apply_slice(self, increment: IncrementImport) -> None:
        if increment.advance():
            return
        self._increment = None
        delay_s = time.time() - self._created_s  # noqa: TID251  # the writer's clock
        counts, delay_ms = self._counts, max(int(1000 * delay_s), 0)
        counts["increment_delay_ms"] = delay_ms
        most_ms = max(counts["increment_delay_ms_max"], delay_ms)
        counts["increment_delay_ms_max"] = most_ms
        counts["increments_put_in"] += 1
        counts["increment_rows_put_in"] += increment.num_rows

    def _take(self, event: FollowerEvent) -> None:
        match event:
            case IncrementPart():
                self._created_s = event.head.created_s
                self._increment = IncrementImport(self._store, event, follows=True)
            case (store, folder):
                names = [spec.name for spec in self._store.tables]
                received = [spec.name for spec in store.tables]
                if received[: len(names)] != names:  # clients ask by number
                    raise CheckpointError(
                        f"The training's tables must begin with {names}. "
                        f"Received: {received}."
                    )
                logger.info("continuing from %s", folder.url)
                self._store.take_rows_of(store)
                self._folder = folder
            case None:
                self.is_loading = False

    def _stop_following(self, follower: Follower, exc: PersiaError) -> None:
        logger.error("%s Lookups read the previous rows: restart the server.", exc)
        follower.ending.set()
        self._has_stopped = True
        self._increment = None
        self._counts["following_stopped"] += 1
        self.is_loading = False


def _identify(config: ServerConfig, manifest: Manifest) -> int:
    """Return a number for what clients remember of a server: shard, and tables."""
    specs = [table.spec for table in manifest.tables]
    tables = [[spec.name, spec.dim] for spec in specs]
    known = json.dumps([config.shard, config.num_shards, tables]).encode()
    return int.from_bytes(hashlib.sha256(known).digest()[:8], "little") >> 1 | 1
