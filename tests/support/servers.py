"""Embedding servers for tests: each in a thread of this process."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import ClassVar, TypeVar

import numpy as np

from persia_torchrec.client.client import EmbeddingClient, Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.errors import JobError, WireError
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.messages import TableSegments
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.store.embedding_store import EmbeddingStore

T = TypeVar("T")

DEADLINE_S = 120.0
"""When a test gives up waiting; so long that a busy machine does not fail it."""


def segments_of(tables):
    """Return what a request names: tables with their ids."""
    starts = np.cumsum([0, *(len(ids) for _, ids in tables)])
    ids = [id_ for _, ids in tables for id_ in ids]
    numbers = tuple(table for table, _ in tables)
    return TableSegments(numbers, starts, np.array(ids, dtype=np.uint64))


class RecordingStore(EmbeddingStore):
    """A store that remembers what it was asked with.

    Attributes:
        counting: names of tables that want counts.
        counts: of each lookup, as lists.
        found: slots of each training lookup, of all its tables.
        hints: of each update.
        num_to_sweep: slices of background work that are left.
        num_sweeps: slices that were asked for.
    """

    counting: ClassVar[set[str]] = {"counting"}

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        self.counts: list[list[int] | None] = []
        self.found: list[np.ndarray] = []
        self.hints: list[np.ndarray | None] = []
        self.num_to_sweep = 0
        self.num_sweeps = 0

    def wants_counts(self, table: int) -> bool:
        return self.tables[table].name in self.counting

    def lookup(self, *args, training, counts_N=None, **more):
        self.counts.append(None if counts_N is None else counts_N.tolist())
        return super().lookup(*args, training=training, counts_N=counts_N, **more)

    def lookup_tables(self, *asked, counts_N=None, **more):
        self.counts.append(None if counts_N is None else counts_N.tolist())
        [slots_N] = super().lookup_tables(*asked, counts_N=counts_N, **more)
        self.found.append(slots_N)
        return [slots_N]

    def add_update(self, table, ids_N, grads_ND, hints_N=None):
        self.hints.append(hints_N)
        super().add_update(table, ids_N, grads_ND, hints_N)

    def add_updates(self, tables, ids_N, starts_T, grads, hints_N=None):
        self.hints.append(hints_N)
        super().add_updates(tables, ids_N, starts_T, grads, hints_N)

    def sweep(self, max_rows: int) -> bool:
        self.num_sweeps += 1
        self.num_to_sweep -= 1
        return self.num_to_sweep > 0


class RunningServer:
    """One server, in a thread; something may be done with it before it serves."""

    def __init__(
        self,
        config: ServerConfig,
        greeting: Greeting = NO_JOB,
        before: Callable[[EmbeddingServer], None] = lambda _: None,
    ) -> None:
        self.server = EmbeddingServer(config, greeting)
        before(self.server)
        self.address = self.server.address
        self._thread = threading.Thread(target=self.server.serve, name="server")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"{self.address} still runs"

    def stop(self) -> None:
        self.server.stop()
        self.join()


class Servers:
    """Starts servers and clients of them, and leaves none behind."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, num_shards: int = 1, *, greeting: Greeting = NO_JOB, **settings: int
    ) -> list[RunningServer]:
        """Start the servers of one job."""
        settings.setdefault("capacity_rows", 1000)
        running = [
            RunningServer(
                ServerConfig(shard=shard, num_shards=num_shards, **settings), greeting
            )
            for shard in range(num_shards)
        ]
        self._stack.callback(_stop_all, running)
        return running

    def client(
        self, running: list[RunningServer], *, timeout_s: float = DEADLINE_S
    ) -> EmbeddingClient:
        """Connect a client that is closed at the end of the test."""
        client = EmbeddingClient.connect(
            [server.address for server in running], timeout_s=timeout_s
        )
        self._stack.callback(client.close)
        return client


def _stop_all(running: list[RunningServer]) -> None:
    for server in running:
        server.server.stop()
    for server in running:
        server.join()


def once_the_port_is_free(listen: Callable[[], T]) -> T:
    """Call what listens on a port that was listened on a moment ago.

    ZeroMQ closes a socket in the background.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return listen()
        except (WireError, JobError):  # the second of an address book
            assert time.monotonic() < deadline
            time.sleep(0.005)


def outcome_of(replies: Iterable[Reply]) -> PushOutcome:
    """Wait for the replies to a push; return the outcome on all servers."""
    return PushOutcome.read(replies)


def missed(replies: Iterable[Reply]) -> int:
    """Wait for the replies to a push; return how many ids had no row any more."""
    return outcome_of(replies).num_missed


def ids_of(*numbers: int) -> np.ndarray:
    """Return ids, as uint64."""
    return np.array(numbers, dtype=np.uint64)
