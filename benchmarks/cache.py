"""How long does a cache of hot rows in the trainer hold Python's lock?

While the training thread launches kernels it needs Python's lock, which the threads
that route ids, ask for rows and take replies hold outside of compiled loops. Batches
of new ids, of which a slot map knows about half of the unique rows, are brought
to the rows that they need, and the rows are trained, in four ways:

    today         all unique rows are pulled, their gradients pushed: ``RowsOnDevice``
                  on the CPU, behind a ``BatchPipeline``
    requests      what misses is read with its state, what leaves is written back, by
                  requests as the client makes them: READ answers a frame a table
    one frame     as before, from and to arrays made once; one frame a server each way
    process       a process beside the trainer has the map and the connections: ids in,
                  slots out, rows both ways, by shared memory

The last three are prototypes: of the cache the package has the slot map. The tables
of the last two have rows of ``D + 1`` weights, updated by nobody but the trainer, so
that LOOKUP and WRITE carry weights and state in one frame, which requests of their own
would do.

Times are processor time, of all threads of this process but the training thread, each
by its own clock. A compiled call is timed by ``time.thread_time`` around it, in its
thread; what is outside of these calls is the difference. It is a bound from above:
system calls and NumPy's copies are in it, which do without the lock; of large copies it
is told. Reading the clock is in it, too. Converting the arguments of a compiled call
holds the lock and is not. Both are measured, see the notes. In ``process``, copies of
rows, of ids and of slots are four compiled calls, where a trainer on a GPU launches
copies of its own.

Every row must hold in the end, to the last bit, what its first value and the ids of all
batches make of it.

Dimension key: B samples, F features with a table each (T), L = B * F ids, P servers,
C slots, D embedding dim, W = D + 1 with the state, N rows that miss or leave.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from operator import sub
from pkgutil import resolve_name
from queue import SimpleQueue
from select import select
from statistics import median
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
)
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.cache_hits import measure_hits, measure_map
from benchmarks.cache_rows import RowSettings, measure_pair, measure_rows
from benchmarks.harness import Benchmark, Table, cpu_seconds
from benchmarks.reference import require, scattered
from benchmarks.slot_map import Moved, Planner, copy, gather, scatter, train
from benchmarks.training import TABLES
from benchmarks.workload import zipf_ranks
from persia_torchrec.arrays import Floats, Ids, Offsets, Positions
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.client.codec import RowRequest
from persia_torchrec.client.shards import Servers
from persia_torchrec.embedding.optim import SGD, Adagrad, Optimizer
from persia_torchrec.errors import StoreError
from persia_torchrec.lookup.bags import FeatureSpec, JaggedIds
from persia_torchrec.pipeline.pipeline import BatchPipeline, PrefetchedBatch
from persia_torchrec.routing.route import IdGroup
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.greeting import NO_JOB
from persia_torchrec.rpc.messages import DeferredFrame, Header, Kind, Precision
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.sharding.on_device import GradientCopy, RowsOnDevice
from persia_torchrec.table import TableSpec

P_ = ParamSpec("P_")
R = TypeVar("R")

_GATE_MS = 0.9
_TIMEOUT_S = 30.0
_MOST_WEIGHT = 1023
_CPU = torch.device("cpu")


WayName = Literal["today", "requests", "one frame", "process"]


@dataclass(frozen=True, kw_only=True)
class CacheSettings(RowSettings):
    """What to measure."""

    batch_size: Annotated[int, "samples per batch, one id a feature"] = 8192
    dim: Annotated[int, "embedding dim"] = 64
    table_rows: Annotated[int, "rows per table that ids are drawn from"] = 400_000
    slots: Annotated[int, "rows of the cache, of all tables"] = 450_000
    servers: Annotated[int, "server processes"] = 2
    ahead: Annotated[int, "batches brought ahead of the one that trains"] = 2
    ways: Annotated[tuple[WayName, ...], "which"] = get_args(WayName)
    warm_steps: Annotated[int, "steps before those that are timed"] = 16
    steps: Annotated[int, "steps that are timed; the median counts"] = 13


# What takes how long


class _Timed:
    """What one thread has spent in calls of one kind, and since when in the present."""

    def __init__(self, thread: int) -> None:
        self.thread, self.total_s = thread, 0.0
        self.began_s: float | None = None


class Clock:
    """Counts processor time of all threads but the training thread, which reads it."""

    def __init__(self) -> None:
        self._loops, self._copies = list[_Timed](), list[_Timed]()
        self._last = Lap(0.0, 0.0, 0.0)

    def loop(self, call: Callable[P_, R]) -> Callable[P_, R]:
        """Return a compiled call that is timed."""
        return _timed(call, self._loops)

    def copy(self, call: Callable[P_, R]) -> Callable[P_, R]:
        """Return a call that copies by NumPy, timed likewise."""
        return _timed(call, self._copies)

    def lap(self) -> "Lap":
        """Return what was done since the last lap, calls that are under way included.

        Python's lock is not released in between, so that no call begins or ends.
        """
        now_s = {
            thread.ident: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread is not threading.main_thread() and thread.ident is not None
        }
        loops_s, copies_s = (
            sum(
                one.total_s
                + (0.0 if one.began_s is None else now_s[one.thread] - one.began_s)
                for one in kind
            )
            for kind in (self._loops, self._copies)
        )
        last, self._last = self._last, Lap(sum(now_s.values()), loops_s, copies_s)
        return Lap(*map(sub, self._last, last))


class Lap(NamedTuple):
    """Processor seconds of the workers: all, of loops, of copies."""

    all: float
    loops: float
    copies: float


def _timed(call: Callable[P_, R], kept: list[_Timed]) -> Callable[P_, R]:
    local = threading.local()

    def timed(*args: P_.args, **kwargs: P_.kwargs) -> R:
        own: _Timed | None = getattr(local, "own", None)
        if own is None:
            own = local.own = _Timed(threading.get_ident())
            kept.append(own)
        own.began_s = start_s = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            own.total_s += time.thread_time() - start_s
            own.began_s = None

    return timed


class Drawn(NamedTuple):
    """Ids of each batch, uint64 ``(L,)``; of each table, ascending; times of each."""

    batches: list[Ids]
    ids: list[Ids]
    times: list[npt.NDArray[np.int64]]


def _draw(settings: CacheSettings) -> Drawn:
    """Draw batches, always the same, as those of the benchmark dlrm."""
    rng, batches = np.random.default_rng(20_235), []
    num, num_rows = settings.batch_size, settings.table_rows
    for _ in range(settings.warm_steps + settings.steps):
        ranks = zipf_ranks(rng, num_rows, len(TABLES) * num)
        batches.append(scattered(ranks, num_rows).view(np.uint64))
    of_tables = np.stack(batches).reshape(-1, len(TABLES), num)
    counted = [
        np.unique(of_tables[:, t], return_counts=True) for t in range(len(TABLES))
    ]
    return Drawn(batches, [ids for ids, _ in counted], [num for _, num in counted])


def _first_rows(ids_N: Ids, width: int) -> Floats:
    """Return rows as they begin, float32 ``(N, W)``: whole numbers."""
    columns: Ids = np.add.outer(ids_N, np.arange(width, dtype=np.uint64))
    rows_NW: Floats = np.bitwise_and(columns, np.uint64(_MOST_WEIGHT)).astype("f4")
    return rows_NW


class Place(NamedTuple):
    """Servers of one way, filled with the rows that will be needed."""

    settings: CacheSettings
    client: EmbeddingClient
    addresses: list[str]
    drawn: Drawn
    clock: Clock

    @property
    def numbers(self) -> Offsets:
        """The number of each table on each server, int64 ``(P, T)``."""
        known = [self.client.tables[name].numbers for name in TABLES]
        return np.ascontiguousarray(np.array(known, dtype=np.int64).T)

    def fill(self, dim: int, optimizer: Optimizer) -> None:
        """Make the tables, and write their rows, with state if they have some."""
        specs = [TableSpec(name=n, dim=dim, optimizer=optimizer) for n in TABLES]
        self.client.add_tables(specs)
        for spec, ids_N in zip(specs, self.drawn.ids, strict=True):
            rows_NW = _first_rows(ids_N, spec.num_floats)
            self.write(spec.name, ids_N, rows_NW)

    def write(self, table: str, ids_N: Ids, rows_NW: Floats) -> None:
        """Write weights, and state if the table has some."""
        dim = self.client.table(table).dim
        state = rows_NW[:, dim:] if rows_NW.shape[1] > dim else None
        self.client.write(table, ids_N, np.ascontiguousarray(rows_NW[:, :dim]), state)

    def check(self, *, has_state: bool) -> None:
        """Require that each row is what its ids make of it."""
        for name, ids_N, times_N in zip(
            TABLES, self.drawn.ids, self.drawn.times, strict=True
        ):
            rows_NW = self.client.read(name, ids_N)
            expected_NW = _first_rows(ids_N, rows_NW.shape[1])
            expected_NW -= times_N[:, None].astype(np.float32)
            if has_state:
                expected_NW[:, -1] += 2 * times_N
            wrong = int((rows_NW != expected_NW).any(axis=1).sum())
            require(f"wrong rows of {name}", received=wrong, expected=0)


class Way(Protocol):
    """One of the ways."""

    num_requests: float
    """A step, of this process."""
    beside: int | None
    """The process beside this one, if there is one."""

    def begin(self, ids_L: Ids) -> None:
        """Have the rows of a batch come; returns at once."""

    def train(self) -> None:
        """Wait for the batch that was begun first, and train it."""

    def counts(self) -> Sequence[int]:
        """Return how many unique rows the batch had, and how many missed and left."""

    def end(self) -> None:
        """Bring all rows to the servers; end the threads."""


class Today:
    """All unique rows are pulled, and all gradients pushed."""

    beside: int | None = None

    def __init__(self, place: Place) -> None:
        settings, self.num_requests = place.settings, 2.0 * place.settings.servers
        specs = [FeatureSpec(name, name, name) for name in TABLES]
        lookup = RowsOnDevice(
            place.client, specs, precision=Precision.FP32, device=_CPU
        )
        self._pipeline: BatchPipeline[Any, Any] = BatchPipeline(
            lookup, staleness=settings.ahead, timeout_s=_TIMEOUT_S
        )
        num = settings.batch_size
        self._lengths = np.ones(len(TABLES) * num, dtype=np.int32)
        self._starts = np.arange(len(TABLES) + 1) * num
        self._positions = {name: t for t, name in enumerate(TABLES)}
        self._grads = [torch.ones(num, len(TABLES) * settings.dim)]
        self._begun = deque[PrefetchedBatch[Any]]()
        self._num_unique = 0

    def begin(self, ids_L: Ids) -> None:
        """Begin the pull of a batch."""

        def jagged() -> JaggedIds:
            given = self._positions, ids_L, self._lengths, self._starts, self._starts
            return JaggedIds(TABLES, *given)

        self._begun.append(self._pipeline.start(jagged, training=True))

    def train(self) -> None:
        """Pool, and push the gradients of rows."""
        batch = self._begun.popleft().wait()
        rows = batch.outputs
        self._num_unique = len(rows.rows[0])
        grads = rows.gradients(rows.pool(None), self._grads)
        batch.send(GradientCopy(grads, None, check=False, of=rows).wait)()

    def counts(self) -> Sequence[int]:
        """Return the unique rows, which come and go."""
        return self._num_unique, self._num_unique, self._num_unique

    def end(self) -> None:
        """Wait for the updates."""
        self._pipeline.flush()
        self._pipeline.close()


@contextmanager
def _timed_package(clock: Clock) -> Iterator[None]:
    """Time the compiled calls and the copies of the package."""
    with ExitStack() as stack:
        for name, how in _CALLS.items():
            owner, _, function = name.rpartition(".")
            target = resolve_name(owner)
            kind = clock.loop if how == "loop" else clock.copy
            wrapped = kind(getattr(target, function))
            stack.enter_context(patch.object(target, function, wrapped))
        yield


_CALLS = {
    "persia_torchrec.routing.route._route": "loop",
    "persia_torchrec.cache.slot_map._assign": "loop",
    "persia_torchrec.cache.slot_map._end": "loop",
    "benchmarks.slot_map.spread": "loop",
    "persia_torchrec.lookup.transposed._build": "loop",
    "persia_torchrec.sharding.on_device.copy_into": "copy",
    "persia_torchrec.sharding.on_device._Slice.write": "copy",
    "numpy.copyto": "copy",
}
"""What of the package is compiled, and what copies rows without Python's lock."""


class Cached(ABC):
    """Rows in slots, brought ahead by a thread; subclasses bring them.

    Attributes:
        rows: float32 ``(C, W)``, weights and state of each slot.
        missed, left: of the batch that was brought last.
    """

    num_requests = 0.0
    beside: int | None = None

    def __init__(self, place: Place) -> None:
        self.place, settings = place, place.settings
        self.rows = np.zeros((settings.slots, settings.dim + 1), dtype=np.float32)
        self.num_servers = settings.servers
        self.most = len(TABLES) * settings.batch_size
        self._slots = [
            np.zeros(self.most, dtype=np.int32) for _ in range(settings.ahead + 2)
        ]
        self._begun = self._trained = self._brought = 0
        self._counts: Sequence[int] = (0, 0, 0)
        self._jobs: SimpleQueue[tuple[int, Ids] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Positions, Sequence[int]] | Exception]
        self._done = SimpleQueue()
        self._gather = place.clock.loop(gather)
        self._scatter = place.clock.loop(scatter)
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)
        self.prepare()
        self._thread.start()

    def prepare(self) -> None:
        """Prepare what :meth:`bring` needs."""
        numbers = self.place.numbers
        self.known = Planner(self.place.settings.slots, TABLES, self.num_servers)
        self.missed, self.left = (_moved(self.most, numbers) for _ in range(2))

    def plan(self, ids_L: Ids, step: int, slots_L: Positions) -> None:
        """Have slots for the ids, and say what misses and leaves."""
        at = step, self._trained
        if not self.known.plan(ids_L, at, slots_L, self.missed, self.left):
            raise _no_room(len(self.rows))

    @abstractmethod
    def bring(self, ids_L: Ids, step: int, slots_L: Positions) -> Sequence[int]:
        """Bring the rows of a batch to their slots; return the counts."""

    def begin(self, ids_L: Ids) -> None:
        """Have a batch brought."""
        self._jobs.put((self._begun, ids_L))
        self._begun += 1

    def train(self) -> None:
        """Train the next batch."""
        found = self._done.get(timeout=_TIMEOUT_S)
        if isinstance(found, Exception):
            raise found
        slots_L, self._counts = found
        train(slots_L, self.rows)
        self._trained += 1

    def counts(self) -> Sequence[int]:
        """Return unique rows, and how many missed and left."""
        return self._counts

    def end(self) -> None:
        """Write all rows back."""
        self._jobs.put(None)
        self._thread.join(_TIMEOUT_S)
        for name, (ids_N, slots_N) in zip(TABLES, self.known.rows(), strict=True):
            self.place.write(name, ids_N, self.rows[slots_N])

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, ids_L = job
            slots_L = self._slots[step % len(self._slots)]
            try:
                self._done.put((slots_L, self.bring(ids_L, step, slots_L)))
            except Exception as exc:  # noqa: BLE001  # raised by the training thread
                self._done.put(exc)


def _moved(most: int, numbers_PT: Offsets) -> Moved:
    """Return room for rows that move."""
    num_servers, num_tables = numbers_PT.shape
    segments = np.zeros((num_servers, num_tables, 2), dtype=np.int64)
    segments[..., 0] = numbers_PT
    return Moved(
        np.zeros(most, np.uint64),
        np.zeros(most, np.int32),
        segments,
        np.zeros(num_servers + 1, dtype=np.int64),
    )


def _no_room(num_slots: int) -> StoreError:
    return StoreError(
        "A cache must have a slot for each row of the batches in flight. Received: "
        f"{num_slots} slots."
    )


class Requests(Cached):
    """One request of all tables to each server, as the protocol has them."""

    def prepare(self) -> None:
        """Connect."""
        super().prepare()
        self._servers = Servers(self.place.addresses, _TIMEOUT_S, NO_JOB)
        self._numbers = self.place.numbers

    def bring(self, ids_L: Ids, step: int, slots_L: Positions) -> Sequence[int]:
        """Write what leaves; read what misses, a frame a table."""
        self.plan(ids_L, step, slots_L)
        width = self.rows.shape[1]
        group = _group_of(self.left)
        rows_NW = np.empty((len(group.ids), width), dtype=np.float32)
        self._gather(self.rows, self.left.slots[: len(rows_NW)], rows_NW)
        header = Header(Kind.WRITE, flags=messages.STATE)
        written = self._send(header, RowRequest([group], [width], rows=[rows_NW]))
        asked = _group_of(self.missed)
        replies = self._send(Header(Kind.READ), RowRequest([asked], [width]))
        at = 0
        for reply in replies:
            for frame in reply.frames()[1:]:
                rows = np.frombuffer(frame, np.float32).reshape(-1, width)
                slots_N = self.missed.slots[at : at + len(rows)]
                self._scatter(rows, slots_N, self.rows)
                at += len(rows)
        for reply in written:
            reply.frames()
        self.num_requests = len(replies) + len(written)
        return self.known.num_unique, at, len(rows_NW)

    def _send(self, header: Header, request: RowRequest) -> list[Reply]:
        return [
            self._servers.send(
                server,
                header,
                request.encode(server, self._numbers[server], Precision.FP32),
                header.kind.name,
                reply_bytes=request.reply_bytes(server, header) + 64 * len(TABLES),
            )
            for server in range(self.num_servers)
        ]

    def end(self) -> None:
        """Write all rows back, and disconnect."""
        super().end()
        self._servers.close()


def _group_of(moved: Moved) -> IdGroup:
    num = int(moved.offsets[-1])
    nums_PT = moved.segments[..., 1]
    return IdGroup(TABLES, moved.ids[:num].copy(), moved.offsets.copy(), nums_PT.copy())


class Exchange:
    """Rows that leave and rows that miss, by one WRITE and one LOOKUP a server."""

    def __init__(self, addresses: Sequence[str], missed: Moved, left: Moved) -> None:
        self._servers = Servers(addresses, _TIMEOUT_S, NO_JOB)
        self._offsets = missed.offsets, left.offsets
        self._ids = tuple(moved.ids.data.cast("B") for moved in (missed, left))
        self._segments = [
            [of_server.data.cast("B") for of_server in moved.segments]
            for moved in (missed, left)
        ]

    def swap(
        self,
        width: int,
        leaving: Callable[[slice], messages.SentFrame],
        coming: Callable[[slice, Floats], object],
    ) -> Sequence[int]:
        """Send the rows of each server that leave, take those that miss; count both.

        ``leaving`` returns the bytes of some, ``coming`` is given others.
        """
        missed, left = (offsets.tolist() for offsets in self._offsets)
        asked, written, send = [], list[Reply](), self._servers.send
        ids, segments = self._ids, self._segments
        for server, own in enumerate(segments[0]):
            begin, stop = left[server : server + 2]
            if begin < stop:
                rows = leaving(slice(begin, stop))
                given = segments[1][server], ids[1][8 * begin : 8 * stop], rows
                written.append(send(server, _WRITE, given, "write"))
            begin, stop = missed[server : server + 2]
            if begin < stop:
                num_bytes = 64 + 4 * width * (stop - begin)
                frames = [own, ids[0][8 * begin : 8 * stop]]
                reply = send(server, _LOOKUP, frames, "lookup", reply_bytes=num_bytes)
                asked.append((slice(begin, stop), reply))
        for piece, reply in asked:
            flat = np.frombuffer(reply.frames()[1], np.float32)
            flat = flat if flat.flags.aligned else flat.copy()  # of TCP
            coming(piece, flat.reshape(-1, width))
        for reply in written:
            reply.frames()
        return missed[-1], left[-1], len(asked) + len(written)

    def close(self) -> None:
        """Disconnect."""
        self._servers.close()


_WRITE, _LOOKUP = Header(Kind.WRITE), Header(Kind.LOOKUP)


class OneFrame(Cached):
    """One frame a server each way."""

    def prepare(self) -> None:
        """Connect."""
        super().prepare()
        self._exchange = Exchange(self.place.addresses, self.missed, self.left)

    def bring(self, ids_L: Ids, step: int, slots_L: Positions) -> Sequence[int]:
        """Plan, and swap rows with the servers."""
        self.plan(ids_L, step, slots_L)
        *counts, num = self._exchange.swap(
            self.rows.shape[1], self._leaving, self._coming
        )
        self.num_requests = num
        return self.known.num_unique, *counts

    def end(self) -> None:
        """Write all rows back, and disconnect."""
        super().end()
        self._exchange.close()

    def _leaving(self, piece: slice) -> DeferredFrame:
        return _Leaving(self._gather, self.rows, self.left.slots[piece])

    def _coming(self, piece: slice, rows_NW: Floats) -> None:
        self._scatter(rows_NW, self.missed.slots[piece], self.rows)


class _Leaving(DeferredFrame):
    """Rows of slots, gathered where the message is."""

    def __init__(
        self, gather: Callable[..., None], rows_CW: Floats, slots_N: Positions
    ) -> None:
        self._gather, self._rows, self._slots = gather, rows_CW, slots_N
        self._width = rows_CW.shape[1]

    def __len__(self) -> int:
        return 4 * int(len(self._slots) * self._width)

    def write(self, out: npt.NDArray[np.uint8]) -> None:
        """Gather the rows."""
        self._gather(
            self._rows, self._slots, out.view(np.float32).reshape(-1, self._width)
        )

    def whole(self) -> memoryview:
        """Return the rows in memory of their own."""
        out = np.empty(len(self), dtype=np.uint8)
        self.write(out)
        return out.data


class Shared(NamedTuple):
    """What two processes share; ``at`` is two numbers of a step, then its counts.

    See ``_plan`` for the others; rows that leave and that come are float32 ``(L, W)``.
    """

    at: Offsets
    ids: Ids
    slots: Positions
    missed: Moved
    left: Moved
    leaving: Floats
    coming: Floats

    @classmethod
    def of(cls, memory: SharedMemory, most: int, width: int, num: int) -> "Shared":
        """View the memory, for so many ids, and servers."""
        begin = 0

        def take(shape: Sequence[int], dtype: type) -> npt.NDArray[Any]:
            nonlocal begin
            view = np.ndarray(shape, dtype, memory.buf, begin)
            begin += -(-view.nbytes // 64) * 64
            return view

        def moved() -> Moved:
            return Moved(
                take([most], np.uint64),
                take([most], np.int32),
                take([num, len(TABLES), 2], np.int64),
                take([num + 1], np.int64),
            )

        return cls(
            take([8], np.int64),
            take([most], np.uint64),
            take([most], np.int32),
            moved(),
            moved(),
            take([most, width], np.float32),
            take([most, width], np.float32),
        )

    @staticmethod
    def size(most: int, width: int, num: int) -> int:
        """Return how many bytes that are, at most."""
        return most * (36 + 8 * width) + 32 * num * (len(TABLES) + 2) + 1024


class Process(Cached):
    """The map and the requests are a process's beside this one."""

    def prepare(self) -> None:
        """Start the process, which connects."""
        numbers, width = self.place.numbers, self.rows.shape[1]
        given = self.most, width, self.num_servers
        self._memory = SharedMemory(create=True, size=Shared.size(*given))
        self._shared = Shared.of(self._memory, *given)
        for moved in (self._shared.missed, self._shared.left):
            moved.segments[..., 0] = numbers
        self.missed, self.left = self._shared.missed, self._shared.left
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        words = self._memory.name, given, self.place.addresses, len(self.rows), theirs
        self._process = context.Process(target=_be_beside, args=words, daemon=True)
        self._process.start()
        self.beside = self._process.pid
        theirs.close()
        self._require(_READY)
        self._copy = self.place.clock.loop(copy)

    def bring(self, ids_L: Ids, step: int, slots_L: Positions) -> Sequence[int]:
        """Hand the ids over; give rows that leave, and take those that come."""
        shared = self._shared
        shared.at[0], shared.at[1] = step, self._trained
        self._copy(ids_L, shared.ids)
        self._ask(_PLAN)
        num_unique, num_missed, num_left = shared.at[2:5].tolist()
        self._gather(self.rows, self.left.slots[:num_left], shared.leaving)
        self._ask(_SWAP)
        self._scatter(shared.coming, self.missed.slots[:num_missed], self.rows)
        self._copy(shared.slots, slots_L)
        return num_unique, num_missed, num_left

    def end(self) -> None:
        """Write all rows back, and end the process."""
        self._jobs.put(None)
        self._thread.join(_TIMEOUT_S)
        self._ask(_END)
        if not self._pipe.poll(_TIMEOUT_S):
            raise StoreError(f"The process beside must answer within {_TIMEOUT_S:g} s.")
        found = self._pipe.recv()
        self._process.join(_TIMEOUT_S)
        for name, (ids_N, slots_N) in zip(TABLES, found, strict=True):
            self.place.write(name, ids_N, self.rows[slots_N])
        del self._shared, self.missed, self.left
        self._memory.close()
        self._memory.unlink()

    def _ask(self, what: bytes) -> None:
        os.write(self._pipe.fileno(), what)
        self._require(what)

    def _require(self, what: bytes) -> None:
        fd = self._pipe.fileno()
        is_there = select([fd], [], [], _TIMEOUT_S)[0]
        if not is_there or os.read(fd, 1) != what:
            raise StoreError("The process beside the trainer must answer in time.")


_READY, _PLAN, _SWAP, _END = b"r", b"p", b"s", b"e"


def _be_beside(
    name: str, given: tuple[int, int, int], addresses: list[str], num: int, pipe: Any
) -> None:
    """Be the process beside the trainer."""
    memory, fd = SharedMemory(name), pipe.fileno()
    shared, known = Shared.of(memory, *given), Planner(num, TABLES, given[2])
    with closing(Exchange(addresses, shared.missed, shared.left)) as exchange:

        def leaving(piece: slice) -> memoryview:
            return shared.leaving[piece].data.cast("B")

        def coming(piece: slice, rows_NW: Floats) -> None:
            shared.coming[piece] = rows_NW

        os.write(fd, _READY)
        while (asked := os.read(fd, 1)) in (_PLAN, _SWAP):
            if asked == _PLAN:
                step, oldest = shared.at[:2].tolist()
                slots, both = shared.slots, (shared.missed, shared.left)
                if not known.plan(shared.ids, (step, oldest), slots, *both):
                    raise _no_room(num)
                counts = known.num_unique, *(moved.offsets[-1] for moved in both)
                shared.at[2:5] = counts
            else:
                exchange.swap(given[1], leaving, coming)
            os.write(fd, asked)
        if asked:
            os.write(fd, asked)
            pipe.send(known.rows())


# The figure


_TABLES_OF: dict[str, Callable[[int], tuple[int, Optimizer]]] = {
    "today": lambda dim: (dim, SGD(lr=1.0)),
    "requests": lambda dim: (dim, Adagrad(lr=1.0, vectorwise_shared=True)),
    "one frame": lambda dim: (dim + 1, SGD(lr=1.0)),
    "process": lambda dim: (dim + 1, SGD(lr=1.0)),
}

_WAYS: dict[str, Callable[[Place], Way]] = {
    "today": Today,
    "requests": Requests,
    "one frame": OneFrame,
    "process": Process,
}


class Step(NamedTuple):
    """What a step took, processor seconds; ``counts`` as of :meth:`Way.counts`."""

    workers: Lap
    beside_s: float
    counts: Sequence[int]


def _measure_way(name: str, place: Place) -> list[object]:
    settings, drawn, clock = place.settings, place.drawn, place.clock
    place.fill(*_TABLES_OF[name](settings.dim))
    with _timed_package(clock):
        way = _WAYS[name](place)
        rest, steps = iter(drawn.batches), list[Step]()
        for ids_L in islice(rest, settings.ahead):
            way.begin(ids_L)
        for _ in drawn.batches:
            if (ids := next(rest, None)) is not None:
                way.begin(ids)
            way.train()
            beside_s = cpu_seconds(way.beside) if way.beside else 0.0
            steps.append(Step(clock.lap(), beside_s, way.counts()))
        way.end()
    place.check(has_state=name != "today")
    for table in TABLES:
        place.client.drop_table(table)
    before, *own = steps[settings.warm_steps - 1 : len(steps) - settings.ahead]
    unique, missed, left = map(median, zip(*[step.counts for step in own], strict=True))
    laps = [step.workers for step in own]
    row = [
        None if name == "today" else 1 - missed / unique,
        missed / 1e3,
        left / 1e3,
        way.num_requests,
        1e3 * median(lap.all for lap in laps),
        1e3 * median(lap.loops for lap in laps),
        1e3 * median(lap.all - lap.loops for lap in laps),
        1e3 * median(lap.copies for lap in laps),
        1e3 * (own[-1].beside_s - before.beside_s) / len(own) if way.beside else None,
    ]
    return [name, *row]


def measure_gate(settings: CacheSettings) -> list[Table]:
    """Measure each way."""
    drawn = _draw(settings)
    capacity = 2 * sum(map(len, drawn.ids)) // settings.servers + 1024
    with ExitStack() as stack:
        local = EmbeddingCluster.local(settings.servers, capacity)
        addresses = stack.enter_context(local).addresses
        client = EmbeddingClient.connect(addresses)
        stack.callback(client.close)
        place = Place(settings, client, list(addresses), drawn, Clock())
        rows = [_measure_way(name, place) for name in settings.ways]
    question = (
        f"Workers' processor time of a step, ms: {settings.batch_size} samples, "
        f"{len(TABLES)} tables, D = {settings.dim}, {settings.servers} servers."
    )
    header = "way | unique rows hit | thousand rows come | leave | requests | all"
    header += " | compiled | outside of compiled loops | of it copies by NumPy"
    header += " | of the process beside"
    notes = [f"The gate of a cache: {_GATE_MS} ms outside of compiled loops.", _costs()]
    return [Table("gate", question, header, rows, notes)]


def _costs() -> str:
    """Return what it costs to measure, and how fast Python is meanwhile."""
    rows, slots = np.zeros((1, 2), np.float32), np.zeros(0, np.int32)
    calls = scatter, Clock().loop(scatter)
    plain_us, timed_us = (
        _microseconds(partial(call, rows, slots, rows)) for call in calls
    )
    loop_us = _microseconds(lambda: sum(n for n in range(1000)), 100)
    return (
        f"A compiled call that does nothing: {plain_us:.1f} us, which hold the lock "
        f"and count as compiled; timed: {timed_us - plain_us:.1f} us more. Python "
        f"adds 1,000 numbers in {loop_us:.0f} us."
    )


def _microseconds(call: Callable[[], object], num: int = 2000) -> float:
    start_s = time.thread_time()
    for _ in range(num):
        call()
    return 1e6 * (time.thread_time() - start_s) / num


BENCHMARK = Benchmark(
    name="cache",
    normal=CacheSettings(),
    tiny=CacheSettings(
        batch_size=32,
        dim=4,
        table_rows=300,
        slots=1600,
        warm_steps=3,
        steps=5,
        map_slots=20_000,
        hit_batches=40,
        hit_batch_size=4,
        hit_table_rows=1000,
        row_batch_size=32,
        row_slots=1500,
        row_steps=12,
        row_dim=4,
        row_table_rows=300,
        pair_ids=520,
        pair_turns=6,
    ),
    figures={
        "gate": measure_gate,
        "map": measure_map,
        "hits": measure_hits,
        "rows": measure_rows,
        "pair": measure_pair,
    },
)
