"""How fast is the store in process, on one core, and where does the time go?

rates     rows per second that are looked up and updated
limits    the same beside plain loops that know where each row stands (limits.py)
eviction  a new row in a full store, next to a hit
stages    index, gather, copy, recency, arithmetic
sizes     a hit in a small store and in a large one
files     a hit in private memory and in memory files (docs/formats/memory.md)
overhead  bytes per row beyond weights and state (limits.py)
startup   time and memory of a server's start, by its capacity (limits.py)
periods   lookups of a dynamic table while a period ends, and far from that
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np

from benchmarks import harness, limits
from benchmarks.filled import FilledStore
from benchmarks.harness import RATES, Benchmark, Table, Timings, interleave
from benchmarks.reference import Numbers, ids_of, require
from benchmarks.workload import MEMORY_COPY, TURN, MemoryCopy, Workload
from persia_torchrec.arrays import Floats
from persia_torchrec.embedding.usage import DynamicDim
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import MISSING
from persia_torchrec.store.warm_up import warm_up
from persia_torchrec.table import TableSpec

RATES_HEADER = f"{RATES} | of memory copy"
_PERIOD, _LOOKUPS_PER_SLICE, _COUNT, _IDLE_SLICES = 100, 16, 100, 16
_SIZES_DIM, _HEADER_BYTES, _CACHED_BYTES, _NO_SLOT = 16, 16, 2**19, 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class StoreSettings(Workload):
    """What to measure."""

    sizes: Annotated[tuple[int, ...], "rows of the stores compared"] = (10**6, 10**7)
    capacities: Annotated[tuple[int, ...], "of the servers started"] = (10**3, 10**9)
    memory_files: Annotated[tuple[str, ...], "empty files, or memfd"] = ("memfd",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("sizes", min(self.sizes) >= self.ids, f">= ids ({self.ids})")


@harness.per_dim
def _measure_rates(settings: StoreSettings, dim: int) -> Table:
    zipf = settings.draw_zipf((settings.num_turns() + 1) * (TURN + 1))
    filled = FilledStore(settings.table(dim), zipf.num_numbers)
    copy = MemoryCopy(settings, dim)

    def turn(timings: Timings) -> None:
        popular = [zipf.requests.pop() for _ in range(TURN + 1)]
        filled.steady("zipf", popular, timings)
        copy.turn(timings)
        uniform = [filled.draw(settings.ids) for _ in range(TURN + 1)]
        filled.steady("uniform", uniform, timings)

    rows = interleave(turn, settings.num_turns()).rows(lambda _: MEMORY_COPY)
    question = f"Million unique rows/s, all ids present, {TURN} requests in turn."
    return Table("rates", question, RATES_HEADER, rows)


class Evictions:
    """A full store, and requests of which some ids are new; each evicts the oldest."""

    def __init__(self, settings: StoreSettings, dim: int) -> None:
        self._num_ids, self._now = settings.ids, 0
        num_new = (settings.num_turns() + 1) * (TURN + 1) * 2 * settings.ids
        self.filled = FilledStore(settings.table(dim), settings.rows, num_new)
        self._present, self._next_new = np.arange(settings.rows), settings.rows
        self._last_use = np.zeros(settings.rows + num_new, dtype=np.int64)
        self._use(self._present)
        self._copy = MemoryCopy(settings, dim)

    def turn(self, timings: Timings) -> None:
        """Time requests of each kind, and check which rows were evicted."""
        num = self._num_ids
        for kind, num_new in (
            ("all present", 0),
            ("half new", num // 2),
            ("all new", num),
        ):
            drawn = [self._draw(num_new) for _ in range(TURN + 1)]
            self.filled.steady(kind, [numbers for numbers, _ in drawn], timings)
            oldest = ids_of(np.concatenate([left for _, left in drawn]))
            kept = int((self.filled.store.find(0, oldest) != MISSING).sum())
            require("least recently used rows still there", received=kept, expected=0)
            self._copy.turn(timings)

    def _draw(self, num_new: int) -> tuple[Numbers, Numbers]:
        """Return the next request, and the rows that it evicts."""
        new = np.arange(self._next_new, self._next_new + num_new)
        self._next_new += num_new
        slots = np.argpartition(self._last_use[self._present], num_new)[:num_new]
        left, stayed = self._present[slots], np.delete(self._present, slots)
        self._present[slots] = new
        rng = self.filled.rng
        old = rng.choice(stayed, self._num_ids - num_new, replace=False)
        numbers_N = rng.permutation(np.concatenate([new, old]))
        # Rows that are there count as used before those that are made.
        is_new = numbers_N >= self._next_new - num_new
        self._use(numbers_N[~is_new])
        self._use(numbers_N[is_new])
        return numbers_N, left

    def _use(self, numbers_N: Numbers) -> None:
        self._last_use[numbers_N] = np.arange(self._now, self._now + len(numbers_N))
        self._now += len(numbers_N)


@harness.per_dim
def _measure_eviction(settings: StoreSettings, dim: int) -> Table:
    timings = interleave(Evictions(settings, dim).turn, settings.num_turns())
    hit, new = (timings.ns_per_row(f"all {x} | lookup") for x in ("present", "new"))
    note = (
        f"D = {dim}: a hit takes {hit.median:.1f} ns, an insert {new.median:.1f} ns, "
        f"{new.median / hit.median:.2f} times; {new.mean / hit.mean:.2f} of means."
    )
    question = "New rows at a full store, million rows/s; each evicts the oldest row."
    rows = timings.rows(lambda _: MEMORY_COPY)
    return Table("eviction", question, RATES_HEADER, rows, [note])


_STAGES = {
    ("lookup", "index"): ["find"],
    ("lookup", "copy"): ["copy"],
    ("lookup", "gather"): ["read", "find", "copy"],
    ("lookup", "recency"): ["lookup", "read"],
    ("lookup", "all"): ["lookup"],
    ("update", "arithmetic"): ["cached"],
    ("update", "rows"): ["update", "cached"],
    ("update", "all"): ["update"],
    ("update", "index, without hints"): ["unhinted", "update"],
}
"""Requests and their stages: an operation, less the others where there are any."""


@harness.per_dim
def _measure_stages(settings: StoreSettings, dim: int) -> Table:
    spec, num = settings.table(dim), settings.ids
    filled, copy = FilledStore(spec, settings.rows), MemoryCopy(settings, dim)
    store, rows_ND = filled.store, filled.grads(num)
    row_bytes = _HEADER_BYTES + 4 * (dim + spec.num_state_floats)
    cached = FilledStore(spec, max(min(_CACHED_BYTES // row_bytes, num), 1))
    times = max(num // cached.num_rows, 1)

    def turn(timings: Timings) -> None:
        numbers, others = filled.draw(num), filled.draw(num)
        ids, other_ids = ids_of(numbers), ids_of(others)
        seconds, slots = harness.timed(lambda: store.find(0, ids))
        timings.add("find", num, seconds)
        require("slots", received=len(set(slots) - {_NO_SLOT}), expected=num)
        read = partial(store.lookup, 0, other_ids, rows_ND, training=False)
        seconds, _ = harness.timed(read)
        timings.add("read", num, seconds)
        filled.expected.check("read", others, rows_ND)
        timings.add("copy", num, copy.seconds())
        for name in ("update", "unhinted"):
            filled.gives_hints = name == "update"
            [(lookup_s, update_s)] = filled.run(filled.draw(num))
            timings.add("lookup", num, lookup_s)
            timings.add(name, num, update_s)
        _time_cached(cached, times, timings)

    timings = interleave(turn, settings.repeats)
    rows = []
    for (request, name), operations in _STAGES.items():
        ns, *others = (timings.ns_per_row(operation) for operation in operations)
        median = ns.median - sum(other.median for other in others)
        mean = ns.mean - sum(other.mean for other in others)
        fraction = median / timings.ns_per_row(request).median
        slowest = None if others else ns.slowest
        rows.append([request, name, median, fraction, mean, slowest])
    question = "Time of each stage, ns per row, uniform ids; differences of medians."
    header = "request | stage | median | fraction | mean | slowest request"
    return Table("stages", question, header, rows)


def _time_cached(cached: FilledStore, times: int, timings: Timings) -> None:
    """Update rows that are in the core's cache, again and again in one request."""
    numbers = np.arange(cached.num_rows)
    ids, out_ND = np.tile(ids_of(numbers), times), cached.grads(cached.num_rows)
    slots = cached.store.lookup(0, ids[: len(numbers)], out_ND, training=True)
    hints, grads = np.tile(slots, times), cached.grads(len(ids))
    seconds, _ = harness.timed(lambda: cached.store.update(0, ids, grads, hints))
    timings.add("cached", len(ids), seconds)
    cached.expected.update(numbers, grads, times)
    cached.check_update(numbers)


def _measure_sizes(settings: StoreSettings) -> list[Table]:
    spec, sizes = settings.table(_SIZES_DIM), sorted(settings.sizes)
    stores = {size: FilledStore(spec, size) for size in sizes}

    def turn(timings: Timings) -> None:
        for size, filled in stores.items():
            requests = [filled.draw(settings.ids) for _ in range(TURN + 1)]
            filled.steady(str(size), requests, timings)

    timings = interleave(turn, settings.num_turns())
    rows = []
    for operation in ("lookup", "update"):
        base = timings.ns_per_row(f"{sizes[0]} | {operation}").median
        for size in sizes:
            ns = timings.ns_per_row(f"{size} | {operation}")
            gigabytes = stores[size].store.counters()["bytes"] / 1e9
            rows.append([size, operation, *ns[:3], ns.median / base, gigabytes])
    question = f"A hit by the number of rows, ns per row: D = {_SIZES_DIM}, uniform."
    header = "rows | operation | median | mean | slowest | of the smallest | store, GB"
    return [Table("sizes", question, header, rows)]


@harness.per_dim
def _measure_files(settings: StoreSettings, dim: int) -> Table:
    memfd = os.memfd_create("store")
    paths = {name: name for name in settings.memory_files}
    paths.update({"private": "", "memfd": f"/proc/self/fd/{memfd}"})
    stores: dict[str, FilledStore] = {}
    try:
        for name in ("private", *settings.memory_files):
            spec, path = settings.table(dim), paths[name] or None
            stores[name] = FilledStore(spec, settings.rows, memory_file=path)

        def turn(timings: Timings) -> None:
            for name, filled in stores.items():
                requests = [filled.draw(settings.ids) for _ in range(TURN + 1)]
                filled.steady(name, requests, timings)

        timings = interleave(turn, settings.num_turns())
    finally:
        for name, filled in stores.items():
            filled.store.close()
            if paths[name]:
                os.truncate(paths[name], 0)
        os.close(memfd)
    rows = []
    for operation in ("lookup", "update"):
        base = timings.ns_per_row(f"private | {operation}").median
        for name in stores:
            ns = timings.ns_per_row(f"{name} | {operation}")
            rows.append([name, operation, *ns[:3], ns.median / base])
    question = "A hit by where the memory is, ns per row, in turn; uniform ids."
    header = "memory | operation | median | mean | slowest | of private"
    return Table("files", question, header, rows)


@harness.per_dim
def _measure_periods(settings: StoreSettings, dim: int) -> Table:
    """Count ids so that most lose their second block; end the period between lookups.

    As a server does, slices are done while no request comes, here some after the
    period's end, and one after every 16th lookup. The first lookup ranks the rest.
    """
    num, size = settings.rows, min(settings.ids, 1024)
    rng, out_ND = np.random.default_rng(20_239), np.empty((size, dim), np.float32)
    store = _store_of_blocks(settings.table(dim), num, out_ND)

    def look_up(number: int) -> None:
        if number % _LOOKUPS_PER_SLICE == 0:
            kind = "slice" if store.must_free_blocks else "slice of nothing"
            add(kind, harness.timed(partial(store.sweep, 1))[0])
        store.lookup(0, ids_of(rng.integers(0, num, size)), out_ND, training=True)

    times: dict[str, list[float]] = {}

    def add(kind: str, seconds: float) -> None:
        times.setdefault(kind, []).append(1e3 * seconds)

    one, grad_1D = ids_of(np.arange(1)), np.zeros((1, dim), dtype=np.float32)
    update = partial(store.update, 0, one, grad_1D)
    for step in range(_PERIOD):
        seconds, _ = harness.timed(update)
        add("update, last of the period" if step == _PERIOD - 1 else "update", seconds)
        for number in range(_LOOKUPS_PER_SLICE if step < _PERIOD - 1 else 0):
            add("lookup before", harness.timed(partial(look_up, number))[0])
    for _ in range(_IDLE_SLICES):
        add("slice while all are ranked", harness.timed(partial(store.sweep, 1))[0])
    number = 0
    while store.must_free_blocks:
        add("lookup while blocks are freed", harness.timed(partial(look_up, number))[0])
        number += 1
    for number in range(_PERIOD * _LOOKUPS_PER_SLICE):
        add("lookup after", harness.timed(partial(look_up, number))[0])
    rows = [
        [kind, len(ms), *np.percentile(ms, [50, 99, 100]).tolist()]
        for kind, ms in times.items()
    ]
    question = f"The end of a period of a dynamic table, requests of {size} ids, ms."
    return Table("periods", question, "request | number | median | p99 | slowest", rows)


def _store_of_blocks(spec: TableSpec, num: int, out_ND: Floats) -> EmbeddingStore:
    """Return a store of ``num`` ids with two blocks each, looked up N at a time."""
    warm_up(in_file=False)
    store = EmbeddingStore(2 * num + 1)
    store.add_table(replace(spec, dynamic=DynamicDim(2, _PERIOD)))
    for numbers in np.array_split(np.arange(num), -(-num // len(out_ND))) * 2:
        counts = np.full(len(numbers), _COUNT, dtype=np.uint32)
        rows_ND = out_ND[: len(numbers)]
        store.lookup(0, ids_of(numbers), rows_ND, training=True, counts_N=counts)
    require("rows", received=store.num_rows, expected=2 * num)
    return store


BENCHMARK = Benchmark(
    name="store",
    normal=StoreSettings(dims=(16, 64, 128)),
    tiny=StoreSettings.tiny(sizes=(1024, 4096), capacities=(1000, 10**6)),
    figures={
        "rates": _measure_rates,
        "limits": lambda s: [*limits.measure_limits(s), limits.measure_memory(s)],
        "eviction": _measure_eviction,
        "stages": _measure_stages,
        "sizes": _measure_sizes,
        "files": _measure_files,
        "overhead": limits.measure_overhead,
        "startup": lambda s: limits.measure_startup(s, s.capacities),
        "periods": _measure_periods,
    },
    core=-1,
    only_for={"sizes": "sizes", "capacities": "startup", "memory_files": "files"},
)
