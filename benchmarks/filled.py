"""What is measured: a filled store and a filled server, with all rows checked.

Timed is only the request itself. Every value is checked after a few requests that
follow one another: a check would push the store's memory out of the caches.

Dimension key:
    N: ids of one request
    D: embedding dim
    W: floats per row, weights and optimizer state
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import reference
from benchmarks.harness import Timings, pinned, timed
from benchmarks.reference import Numbers, chunks, ids_of, require
from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.errors import ConfigError
from persia_torchrec.rpc.listener import keep_freed_memory
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec

if TYPE_CHECKING:
    from persia_torchrec.routing.route import ShardedIds

Timer = Callable[[Callable[[], Any]], tuple[Any, Any]]

IN_FLIGHT = 4  # batches looked up, and their update not yet acknowledged


class Filled(ABC):
    """Rows of one table somewhere, and what they must be.

    Those of the numbers below ``num_rows`` are there at first, used in their order;
    ``num_new`` further ones may be looked up as well.
    """

    def __init__(self, spec: TableSpec, num_rows: int, num_new: int = 0) -> None:
        keep_freed_memory()  # as servers and workers do
        self.spec, self.num_rows, self.num_missed = spec, num_rows, 0
        self.rng = np.random.default_rng(20_231)
        self.expected = reference.ExpectedRows(spec, num_rows, num_rows + num_new)
        for numbers_N in chunks(num_rows):
            rows_NW = reference.first_rows(spec, numbers_N, num_rows)
            self._write(self._key(numbers_N), rows_NW)

    _key = staticmethod(ids_of)

    @abstractmethod
    def _write(self, ids_N: Ids, rows_NW: Floats) -> None: ...

    @abstractmethod
    def _look_up(self, ids_N: Ids) -> Floats:
        """Return rows, at least their weights, for training."""

    @abstractmethod
    def _update(self, ids_N: Ids, grads_ND: Floats) -> None:
        """Update the rows that were looked up last; add to ``num_missed``."""

    @abstractmethod
    def _read(self, ids_N: Ids) -> Floats: ...

    def draw(self, num: int) -> Numbers:
        """Draw numbers of rows that were there at first, without repeats."""
        return self.rng.choice(self.num_rows, num, replace=False)

    def grads(self, num: int) -> Floats:
        """Draw the gradients of ``num`` rows."""
        return self.rng.standard_normal((num, self.spec.dim), dtype=np.float32)

    def run(self, *requests: Numbers, timer: Timer = timed) -> list[tuple[Any, Any]]:
        """Look rows up and update them, request after request; then check all.

        Returns what ``timer`` measures of each lookup and update. A row, or its state,
        that is not as expected is a StoreError.
        """
        keys = [self._key(numbers_N) for numbers_N in requests]
        grads = [self.grads(len(numbers_N)) for numbers_N in requests]
        found, times = [np.zeros_like(grads_ND) for grads_ND in grads], []
        for ids_N, grads_ND, kept_ND in zip(keys, grads, found, strict=True):
            lookup, rows = timer(partial(self._look_up, ids_N))
            if len(requests) == 1:  # as a trainer computes in between
                self.expected.check("lookup", *requests, rows[:, : self.spec.dim])
            update, _ = timer(partial(self._update, ids_N, grads_ND))
            times.append((lookup, update))
            kept_ND[:] = rows[:, : self.spec.dim]
        for numbers_N, grads_ND, kept_ND in zip(requests, grads, found, strict=True):
            self.expected.check("lookup", numbers_N, kept_ND)
            self.expected.update(numbers_N, grads_ND)
        self.check_update(requests[-1])
        return times

    def check_update(self, numbers_N: Numbers) -> None:
        """Check that every gradient reached its row, and the last rows."""
        require("gradients without a row", received=self.num_missed, expected=0)
        self.expected.check("update", numbers_N, self._read(self._key(numbers_N)))

    def steady(self, kind: str, requests: Sequence[Numbers], timings: Timings) -> None:
        """Time requests; the first only brings the memory back into the caches."""
        times = self.run(*requests)
        for numbers_N, seconds in list(zip(requests, times, strict=True))[1:]:
            timings.add_both(kind, len(numbers_N), seconds)


class FilledStore(Filled):
    """A store in this process, its capacity ``num_rows``; the table is its table 0.

    A ``memory_file`` is empty at first.
    """

    def __init__(
        self,
        spec: TableSpec,
        num_rows: int,
        num_new: int = 0,
        memory_file: str | None = None,
    ) -> None:
        self.store = EmbeddingStore(num_rows, memory_file=memory_file)
        if self.store.states:
            raise ConfigError(
                "A memory file must be empty for a benchmark. Received: the tables of "
                f"a store in {memory_file}. Name another file."
            )
        self.gives_hints = True
        self.store.add_table(spec)
        self._out_ND = np.zeros((min(2**17, num_rows), spec.dim), dtype=np.float32)
        super().__init__(spec, num_rows, num_new)

    def _write(self, ids_N: Ids, rows_NW: Floats) -> None:
        self.store.write(0, ids_N, rows_NW)

    def _look_up(self, ids_N: Ids) -> Floats:
        out_ND = self._out_ND[: len(ids_N)]
        self.slots_N = self.store.lookup(0, ids_N, out_ND, training=True)
        return out_ND

    def _update(self, ids_N: Ids, grads_ND: Floats) -> None:
        hints_N = self.slots_N if self.gives_hints else None
        result = self.store.update(0, ids_N, grads_ND, hints_N)
        self.num_missed += result.num_missed + result.num_refused

    def _read(self, ids_N: Ids) -> Floats:
        return self.store.read(0, ids_N)


class _Batch(NamedTuple):
    numbers: Numbers
    ids: Ids
    grads: Floats
    name: BatchNumber


class FilledServer(Filled):
    """A table on one server, and a client of it; an update is timed until applied."""

    def __init__(
        self, spec: TableSpec, num_rows: int, client: EmbeddingClient, pid: int
    ) -> None:
        self.client, self.pid = client, pid
        self._stream, self._num_batches = BatchNumber.new_stream(), 0
        self._split: dict[BatchNumber, ShardedIds] = {}  # of batches without their push
        self._threads = ThreadPoolExecutor(IN_FLIGHT)
        client.add_tables([spec])
        super().__init__(spec, num_rows)

    def _write(self, ids_N: Ids, rows_NW: Floats) -> None:
        self.client.write(self.spec.name, ids_N, rows_NW[:, : self.spec.dim])

    def _look_up(self, ids_N: Ids) -> Floats:
        self._last = self._next_name()
        return self._pull(ids_N, self._last)

    def _update(self, ids_N: Ids, grads_ND: Floats) -> None:
        self.num_missed += self.client.outcome(
            self._push(grads_ND, self._last)
        ).num_missed

    def _read(self, ids_N: Ids) -> Floats:
        return self.client.read(self.spec.name, ids_N)

    def _next_name(self) -> BatchNumber:
        self._num_batches += 1
        return BatchNumber(self._stream, self._num_batches)

    def _batch(self, numbers_N: Numbers) -> _Batch:
        grads_ND = self.grads(len(numbers_N))
        return _Batch(numbers_N, ids_of(numbers_N), grads_ND, self._next_name())

    def run_in(self, precision: Precision, numbers_N: Numbers) -> tuple[float, float]:
        """Look rows up and update them in a precision of the wire; return seconds.

        Rows are checked to 1/128 of the largest weight, steps by their direction.
        """
        batch = self._batch(numbers_N)
        dim = self.spec.dim
        before_ND = self._read(batch.ids)[:, :dim]
        tables = [(self.spec.name, self.client.split(batch.ids))]
        pull_s, (rows_ND,) = timed(
            lambda: self.client.pull(tables, batch=batch.name, precision=precision)
        )
        largest_N = np.abs(before_ND).max(axis=1)
        is_near_N = np.abs(rows_ND - before_ND).max(axis=1) <= largest_N / 128
        require("near rows", received=int(is_near_N.sum()), expected=len(numbers_N))

        def push() -> int:
            grads = [batch.grads]
            replies = self.client.push(tables, grads, batch.name, precision=precision)
            return self.client.outcome(replies).num_missed

        push_s, num_missed = timed(push)
        require("gradients without a row", received=num_missed, expected=0)
        steps_ND = (self._read(batch.ids)[:, :dim] - before_ND) * batch.grads
        wrong = int((steps_ND > 0).sum())
        require("steps along the gradient", received=wrong, expected=0)
        return pull_s, push_s

    def _pull(self, ids_N: Ids, name: BatchNumber) -> Floats:
        self._split[name] = self.client.split(ids_N)  # once a batch, as trainers do
        return self.client.pull([(self.spec.name, self._split[name])], batch=name)[0]

    def _push(self, grads_ND: Floats, name: BatchNumber) -> list[Reply]:
        tables = [(self.spec.name, self._split.pop(name))]
        return self.client.push(tables, [grads_ND], name)

    def pull_at_once(self, requests: Sequence[Numbers]) -> float:
        """Pull, ``IN_FLIGHT`` at once, and push nothing; return the seconds."""
        ids, names = map(ids_of, requests), [self._next_name() for _ in requests]
        pulls = partial(self._threads.map, self._pull, ids, names)
        seconds, pulled = timed(lambda: list(pulls()))
        for numbers_N, rows_ND, name in zip(requests, pulled, names, strict=True):
            self.expected.check("lookup", numbers_N, rows_ND)
            del self._split[name]
            self.client.outcome(self.client.push([], [], name))
        return seconds

    def stream(self, requests: Sequence[Numbers]) -> float:
        """Pull and push requests in their order, as a trainer with staleness does.

        A batch's pull begins as soon as fewer than ``IN_FLIGHT`` batches before it wait
        for their acknowledgement. Each row must be one that this staleness allows.
        Returns the seconds from the first pull to the last acknowledgement.
        """
        batches = [self._batch(numbers_N) for numbers_N in requests]
        pulls: list[Future[Floats]] = []
        num_before: list[int] = []  # updates that were acknowledged before the pull
        replies: deque[list[Reply]] = deque()
        num_acknowledged = 0
        start = time.perf_counter()
        for k, batch in enumerate(batches):
            while replies and (
                k - num_acknowledged >= IN_FLIGHT
                or all(reply.done() for reply in replies[0])
            ):
                self.num_missed += self.client.outcome(replies.popleft()).num_missed
                num_acknowledged += 1
            for ahead in batches[len(pulls) : num_acknowledged + IN_FLIGHT]:
                num_before.append(num_acknowledged)
                pulls.append(self._threads.submit(self._pull, ahead.ids, ahead.name))
            pulls[k].result()
            replies.append(self._push(batch.grads, batch.name))
        self.num_missed += sum(
            self.client.outcome(reply).num_missed for reply in replies
        )
        seconds = time.perf_counter() - start
        self._check_stream(batches, [pull.result() for pull in pulls], num_before)
        for numbers_N in requests:
            self.check_update(numbers_N)
        return seconds

    def _check_stream(
        self, batches: list[_Batch], rows: list[Floats], num_before: list[int]
    ) -> None:
        """Check rows after ``num_before`` updates, or more before the batch's own."""
        is_right = [np.zeros(len(batch.numbers), dtype=np.bool_) for batch in batches]
        for num_updates, batch in enumerate(batches):
            for k in range(num_updates, min(num_updates + IN_FLIGHT, len(batches))):
                open_ = np.flatnonzero(~is_right[k])
                if num_before[k] <= num_updates and len(open_):
                    expected = self.expected.floats(batches[k].numbers[open_])
                    expected = expected[:, : self.spec.dim]
                    is_same = reference.is_equal(rows[k][open_], expected)
                    is_right[k][open_] = is_same.all(axis=1)
            wrong = np.flatnonzero(~is_right[num_updates])
            found = rows[num_updates][wrong]
            self.expected.check("lookup in flight", batch.numbers[wrong], found)
            self.expected.update(batch.numbers, batch.grads)


@contextmanager
def filled_server(
    spec: TableSpec,
    num_rows: int,
    logs: str | None = None,
    interval_s: float = 2.0,
    *,
    restarts: bool = False,
) -> Iterator[FilledServer]:
    """Fill a server on the first core; it writes increments to the folder ``logs``.

    With ``restarts`` its rows are in memory that outlives it.
    """
    with pinned(0):
        cluster = EmbeddingCluster.local(
            1,
            num_rows,
            increments_dir=logs,
            increments_interval_s=interval_s,
            restarts=restarts,
        )
    with cluster, pinned(-1), closing(EmbeddingClient.connect(cluster.addresses)) as c:
        yield FilledServer(spec, num_rows, c, cluster.processes[0].pid)
