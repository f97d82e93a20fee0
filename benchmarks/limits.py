"""How near is the store to what the machine's memory allows; how much does it take?

    limits    the store beside two plain loops, which copy and step rows of the same
              width, but know where each stands; and the memory's own latencies
    overhead  bytes per row beyond weights and state, of a process that fills one store
    startup   time and memory of a server's start, by its capacity

Dimension key:
    N: rows of one request
    R: all rows
    D: embedding dim
    W: floats per row
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import cache, partial
from multiprocessing import get_context
from statistics import mean, median

import numpy as np
import numpy.typing as npt

from benchmarks import harness, reference
from benchmarks.filled import Filled, FilledStore
from benchmarks.harness import Table, Timings, interleave, per_dim, timed
from benchmarks.reference import Numbers, chunks, first_rows, ids_of
from benchmarks.workload import MEMORY_COPY, TURN, MemoryCopy, Workload
from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.setting import Kernel
from persia_torchrec.jit.compiled import (
    compiled,
    inlined_kernel,
    read_only,
    specialized,
)
from persia_torchrec.jit.intrinsics import copy_bytes, floats_at, unowned
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.loops import prefetch_row
from persia_torchrec.store.memory import reserve
from persia_torchrec.store.warm_up import warm_up
from persia_torchrec.table import TableSpec

_HEADER_FLOATS, _AHEAD, _WORDS_PER_LINE = 4, 8, 8
_NUM_READS, _CHUNK = 100_000, 16_384
_STARTUP_DIM, _STARTUP_IDS, _MOST_STARTS = 16, 100, 5


@per_dim
def measure_limits(workload: Workload, dim: int) -> Table:
    """Measure the store beside plain loops, and the memory itself."""
    spec = workload.table(dim)
    store, plain = FilledStore(spec, workload.rows), PlainRows(spec, workload.rows)
    copy = MemoryCopy(workload, dim)

    def turn(timings: Timings) -> None:
        requests = [store.draw(workload.ids) for _ in range(TURN + 1)]
        store.steady("store", requests, timings)
        plain.steady("plain", requests, timings)
        copy.turn(timings)

    timings, rows = interleave(turn, workload.num_turns()), []
    for name in ("lookup", "update", "lookup + update"):
        ns = [timings.ns_per_row(f"{x} | {name}").median for x in ("store", "plain")]
        copy_ns = timings.ns_per_row(MEMORY_COPY).median
        rows.append([name, *ns, ns[1] / ns[0], copy_ns])
    question = "The store beside plain loops, uniform ids, ns per row, medians."
    header = "operation | store | plain loops | plain loops / store | copy"
    return Table("limits", question, header, rows)


class PlainRows(Filled):
    """Rows in memory, as wide as the store's, gathered and stepped by their offset."""

    def __init__(self, spec: TableSpec, num_rows: int) -> None:
        width = spec.dim + spec.num_state_floats
        words_per_row = (_HEADER_FLOATS + width + 1) // 2
        floats = reserve(num_rows * words_per_row).view(np.float32)
        self._floats = floats.reshape(num_rows, 2 * words_per_row)
        self._rows = self._floats[:, _HEADER_FLOATS : _HEADER_FLOATS + width]
        self._out_ND = np.zeros((num_rows, spec.dim), dtype=np.float32)
        self._num_updates = 0
        super().__init__(spec, num_rows)

    @staticmethod
    def _key(numbers_N: Numbers) -> Ids:
        return read_only(numbers_N.astype(np.uint64))

    def _write(self, ids_N: Ids, rows_NW: Floats) -> None:
        self._rows[ids_N] = rows_NW

    def _look_up(self, ids_N: Ids) -> Floats:
        out_ND = self._out_ND[: len(ids_N)]
        _gather(ids_N, self._floats, out_ND)
        return out_ND

    def _update(self, ids_N: Ids, grads_ND: Floats) -> None:
        self._num_updates += 1  # as Adam counts
        optimizer, dim = self.spec.optimizer, self.spec.dim
        numbers = optimizer.step_numbers(dim, self._num_updates)
        step = _build_step(optimizer.kernel)
        step(ids_N, self._floats, grads_ND, np.array(numbers, dtype=np.float32))

    def _read(self, ids_N: Ids) -> Floats:
        return self._rows[ids_N]


@compiled
def _gather(slots_N: Ids, floats_RW: Floats, out_ND: Floats) -> None:
    """Copy the weights of rows, each prefetched."""
    out_ND, floats_RW = unowned(out_ND), unowned(floats_RW)
    base, stride = np.uint64(floats_RW.ctypes.data), np.uint64(4 * floats_RW.shape[1])
    begin, num_bytes = np.uint64(4 * _HEADER_FLOATS), np.uint64(4 * out_ND.shape[1])
    target = np.uint64(out_ND.ctypes.data)
    for i in range(len(slots_N)):
        if i + _AHEAD < len(slots_N):
            prefetch_row(base + slots_N[i + _AHEAD] * stride, begin + num_bytes)
        copy_bytes(target, base + slots_N[i] * stride + begin, num_bytes)
        target += num_bytes


@cache
def _build_step(kernel: Kernel) -> Callable[..., None]:
    """Compile a loop that steps rows, each prefetched."""
    step_row = inlined_kernel(kernel)

    def step(
        slots_N: Ids, floats_RW: Floats, grads_ND: Floats, numbers: Floats
    ) -> None:
        floats_RW, p = unowned(floats_RW), floats_at(np.uint64(numbers.ctypes.data))
        base = np.uint64(floats_RW.ctypes.data)
        stride = np.uint64(4 * floats_RW.shape[1])
        begin, dim = np.uint64(4 * _HEADER_FLOATS), grads_ND.shape[1]
        num_bytes, grad = np.uint64(4 * dim), np.uint64(grads_ND.ctypes.data)
        for i in range(len(slots_N)):
            if i + _AHEAD < len(slots_N):
                prefetch_row(base + slots_N[i + _AHEAD] * stride, stride)
            weights = base + slots_N[i] * stride + begin
            w, s = floats_at(weights), floats_at(weights + num_bytes)
            step_row(p, w, s, floats_at(grad), dim)
            grad += num_bytes

    return specialized(step, kernel)


def measure_memory(workload: Workload) -> Table:
    """Time reads of random cache lines, of memory that no cache holds and of less."""
    rows, rng, largest = [], np.random.default_rng(20_233), workload.rows * 512
    for num_bytes in sorted({largest // 512, largest // 64, largest}):
        words = reserve(num_bytes // 8)
        offsets = rng.permutation(num_bytes // 64) * _WORDS_PER_LINE
        words[offsets] = np.roll(offsets, -1).astype(np.uint64)
        reads = rng.choice(offsets, _NUM_READS)
        loops = (partial(_follow, words, _NUM_READS), partial(_add, words, reads))
        best = [min(timed(loop)[0] for _ in range(TURN)) for loop in loops]
        rows.append([num_bytes / 1e6, *(s / _NUM_READS * 1e9 for s in best)])
    question = f"Random cache lines in huge pages, ns per read, best of {TURN} times."
    return Table("memory", question, "MB | dependent | independent", rows)


@compiled
def _follow(words: Ids, num: int) -> np.uint64:
    """Follow a chain: each word holds the offset of the next."""
    offset = np.uint64(0)
    for _ in range(num):
        offset = words[offset]
    return offset


@compiled
def _add(words: Ids, offsets: npt.NDArray[np.int64]) -> np.uint64:
    """Add the words at all offsets."""
    total = np.uint64(0)
    for i in range(len(offsets)):
        total += words[offsets[i]]
    return total


@per_dim
def measure_overhead(workload: Workload, dim: int) -> Table:
    """Measure the memory of a full store, in a process of its own."""
    needed, rows = 4 * (dim + workload.table(dim).num_state_floats), []
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        moments = child.submit(fill, workload.rows, dim, workload.optimizer)
    for name, *sizes in moments.result():
        beyond = [size / workload.rows - needed for size in sizes]
        rows.append([name, needed, *beyond])
    question = "Memory of a full store beyond weights and state, bytes per row."
    header = "moment | weights and state | resident | peak | counted"
    return Table("overhead", question, header, rows)


def fill(num_rows: int, dim: int, optimizer: str) -> list[tuple[str, int, int, int]]:
    """Write every row, look each up twice, replace half of them.

    Returns the bytes after each: of the process, its peak, and as the store counts.
    """
    warm_up()
    spec, moments = reference.table_of(dim, optimizer), []
    out_ND = np.ones((_CHUNK, spec.dim), dtype=np.float32)
    harness.return_freed_memory()
    harness.reset_peak()
    # A check takes memory that is not the store's.
    _check(spec, np.arange(_CHUNK), 0, out_ND * reference.INITIAL_WEIGHT)
    harness.return_freed_memory()
    resident, first_peak = harness.resident_bytes(), harness.peak_bytes()
    store = EmbeddingStore(num_rows)
    store.add_table(spec)
    spans = {"filled": 0, "touched once": 0, "touched": 0, "replaced": num_rows}
    for name, start in spans.items():
        stop = num_rows if start == 0 else num_rows + num_rows // 2
        for numbers in chunks(stop, start, _CHUNK):
            if name == "filled":
                ids = ids_of(numbers)
                store.write(0, ids, reference.weights_of(ids, spec.dim))
                continue
            asked = reference.scattered(numbers, num_rows) if start == 0 else numbers
            rows_ND = out_ND[: len(asked)]
            store.lookup(0, ids_of(asked), rows_ND, training=True)
            _check(spec, asked, num_rows, rows_ND)
        counters = store.counters()
        reference.require("rows", received=counters["rows"], expected=num_rows)
        harness.return_freed_memory()
        used = harness.resident_bytes() - resident
        peak = max(harness.peak_bytes() - first_peak, used)
        moments.append((name, used, peak, counters["bytes"]))
    return moments


def _check(spec: TableSpec, numbers: Numbers, num_filled: int, rows_ND: Floats) -> None:
    expected_ND = first_rows(spec, numbers, num_filled)[:, : spec.dim]
    reference.require_equal("lookup", ids_of(numbers), rows_ND, expected_ND)


def measure_startup(workload: Workload, capacities: Sequence[int]) -> list[Table]:
    """Start servers of all capacities in turn; ask each for a few rows."""
    spec = workload.table(_STARTUP_DIM)
    starts: dict[int, list[list[float]]] = {capacity: [] for capacity in capacities}
    _start(spec, _STARTUP_IDS)  # may compile, and reads files that are cached later
    for _ in range(min(_MOST_STARTS, workload.repeats)):
        for capacity in capacities:
            starts[capacity].append(_start(spec, capacity))
    rows = []
    for capacity, samples in starts.items():
        ready, ready_mib, answer, answer_mib = zip(*samples, strict=True)
        row = [median(ready), mean(ready), max(ready), median(ready_mib)]
        rows.append([capacity, *row, median(answer), max(answer), median(answer_mib)])
    question = f"Seconds until a server is ready, and answers {_STARTUP_IDS} new ids."
    header = "capacity, rows | ready, median | mean | longest | MiB then, median"
    header += " | first lookup, median | its longest | MiB after it, median"
    return [Table("startup", question, header, rows)]


def _start(spec: TableSpec, capacity: int) -> list[float]:
    """Return a server's seconds and MiB until it is ready, and until it answers."""
    start = time.perf_counter()
    with EmbeddingCluster.local(servers=1, capacity=capacity) as cluster:
        ready, pid = time.perf_counter() - start, cluster.processes[0].pid
        ready_mib = harness.resident_bytes(pid) / 2**20
        with closing(EmbeddingClient.connect(cluster.addresses)) as client:
            numbers = np.arange(_STARTUP_IDS)
            start = time.perf_counter()
            client.add_tables([spec])
            tables = [(spec.name, client.split(ids_of(numbers)))]
            batch = BatchNumber(BatchNumber.new_stream(), 1)
            [rows] = client.pull(tables, batch=batch)
            answer = time.perf_counter() - start
        expected = reference.ExpectedRows(spec, 0, _STARTUP_IDS)
        expected.check("first lookup", numbers, rows)
        return [ready, ready_mib, answer, harness.resident_bytes(pid) / 2**20]
