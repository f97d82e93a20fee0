"""What does the slot map take, and how many unique rows does it hit, next to LRU?

``map`` times its calls by the processor time of this thread: ids that all hit, and rows
that are all new, so that as many leave. ``hits`` compares it with exact LRU on streams
of ids: 26 tables with one id a sample by Zipf's law, and the samples of public data
sets, each column a table, if ``data_dir`` has their folders adult, census-income and
taobao. The second half of a stream is counted.
"""

import gzip
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Settings, Table
from benchmarks.reference import Numbers, require, scattered
from benchmarks.slot_map import Router, spread
from benchmarks.training import TABLES
from benchmarks.workload import zipf_ranks
from persia_torchrec.arrays import Counts, Ids, Offsets
from persia_torchrec.cache.slot_map import SlotMap
from persia_torchrec.routing.route import IdGroup

_PARTS = (0.05, 0.1, 0.2)
_FLAT_ZIPF = 1.05
_MOST_NEW = 2000  # ids of each table, in a batch of new rows
_TURNS, _WARM = 40, 4
_FILES = {
    "Taobao": "taobao/taobao_test_data.gz",
    "Census-Income": "census-income/census-income.test.gz",
    "Adult": "adult/adult.data.gz",
}
_FILE_BATCH = 512


@dataclass(frozen=True, kw_only=True)
class HitSettings(Settings):
    """What the figures of the map measure."""

    batch_size: Annotated[int, "samples of a batch"] = 8192
    servers: Annotated[int, "server processes"] = 2
    map_slots: Annotated[int, "slots of the map whose calls are timed"] = 1_000_000
    hit_batches: Annotated[int, "batches of a stream by Zipf's law"] = 120
    hit_batch_size: Annotated[int, "samples of each"] = 4096
    hit_table_rows: Annotated[int, "rows per table of these streams"] = 1_000_000
    data_dir: Annotated[str, "folder of data sets, for streams of their samples"] = ""


class _Calls(NamedTuple):
    """Seconds of each call of a turn."""

    route: float
    assign: float
    spread: float
    release: float


class _Timed:
    """A map of as many rows as fit, and its calls."""

    def __init__(self, settings: HitSettings) -> None:
        self.router = Router(TABLES, settings.servers)
        self.slots = SlotMap(settings.map_slots, TABLES, settings.servers)
        self.table_rows = settings.map_slots // len(TABLES)
        self.num_new = min(_MOST_NEW, self.table_rows)
        numbers = scattered(np.arange(self.table_rows), self.table_rows)
        for first in range(0, self.table_rows, self.num_new):
            piece = numbers[first : first + self.num_new].view(np.uint64)
            self.turn(np.tile(piece, len(TABLES)))

    def turn(self, ids_L: Ids) -> tuple[_Calls, int]:
        """Bring and train a batch; return what calls took, and its unique rows."""
        at, slots_L = [time.thread_time()], np.empty(len(ids_L), np.int32)
        route, group, counts_U = self.router.route(ids_L)
        at.append(time.thread_time())
        assigned = self.slots.assign(group, counts_U)
        assert assigned is not None, "no other batch is in flight"
        at.append(time.thread_time())
        spread(assigned.slots, route.inverse, slots_L)
        at.append(time.thread_time())
        self.slots.release(assigned.slots, trained=True)
        _ = self.slots.counters  # which has the release take effect
        at.append(time.thread_time())
        return _Calls(*np.diff(at).tolist()), len(group.ids)


def measure_map(settings: HitSettings) -> list[Table]:
    """Time the calls of the map."""
    rng, timed = np.random.default_rng(20_235), _Timed(settings)
    num = len(TABLES) * settings.batch_size
    hits, before = [], timed.slots.counters
    for _ in range(_TURNS):
        ranks = zipf_ranks(rng, timed.table_rows, num)
        ids_L = scattered(ranks, timed.table_rows).view(np.uint64)
        hits.append(timed.turn(ids_L)[0])
    missed = timed.slots.counters.misses - before.misses
    require("rows that missed", received=missed, expected=0)
    rows = [
        ["an id of a batch, all hit", name, *_ns([call[k] for call in hits], num)]
        for k, name in enumerate(_Calls._fields)
    ]
    rows.append(["an id of a batch, all hit", "all", *_ns([*map(sum, hits)], num)])
    news, before = [], timed.slots.counters
    for turn in range(1, _TURNS + 1):
        numbers = timed.table_rows + turn * timed.num_new + np.arange(timed.num_new)
        news.append(timed.turn(np.tile(numbers.astype(np.uint64), len(TABLES)))[0])
    num_new = len(TABLES) * timed.num_new
    expected = before.misses + _TURNS * num_new
    require("rows", received=timed.slots.counters.misses, expected=expected)
    both = [call.assign + call.release for call in news]
    rows.append(["a row that replaces one", "assign, release", *_ns(both, num_new)])
    question = (
        f"Processor time of the map's calls in one thread, ns; {settings.map_slots:,} "
        f"slots, {settings.servers} servers, {len(TABLES)} tables, "
        f"{settings.batch_size} ids of each."
    )
    size = timed.slots.size_bytes / settings.map_slots
    notes = [f"A slot takes {size:.1f} bytes of the host's memory."]
    return [Table("map", question, "of | calls | median | least", rows, notes)]


def _ns(seconds: list[float], num: int) -> list[float]:
    return [1e9 * of(seconds[_WARM:]) / num for of in (median, min)]


def measure_hits(settings: HitSettings) -> list[Table]:
    """Count the unique rows that hit, in the map and in exact LRU."""
    rows = []
    for name, batches in _streams(settings):
        keys = [_keys(group) for group, _ in batches]
        touched, most = len(np.unique(np.concatenate(keys))), max(map(len, keys))
        for part in _PARTS:
            num_slots = int(part * touched)
            if num_slots < most:
                continue
            shares = _lru(keys, num_slots), _share(batches, num_slots)
            unique = float(np.mean([len(of_batch) for of_batch in keys]))
            rows.append([name, unique, part, num_slots, *shares, shares[1] - shares[0]])
    question = "Which part of the unique rows of a batch hit?"
    header = "stream | unique rows a batch | slots of rows | slots | LRU | map | more"
    return [Table("hits", question, header, rows)]


def _streams(
    settings: HitSettings,
) -> Iterator[tuple[str, list[tuple[IdGroup, Counts]]]]:
    rng, num_rows = np.random.default_rng(20_235), settings.hit_table_rows
    num = len(TABLES) * settings.hit_batch_size
    router = Router(TABLES, 1)
    for name in ("Zipf 1.2", f"Zipf {_FLAT_ZIPF}"):
        draw = zipf_ranks if name == "Zipf 1.2" else _flat_ranks
        drawn = (draw(rng, num_rows, num) for _ in range(settings.hit_batches))
        ids = (scattered(ranks, num_rows).view(np.uint64) for ranks in drawn)
        yield name, [router.route(ids_L)[1:] for ids_L in ids]
    for name, path in _FILES.items() if settings.data_dir else ():
        yield name, _read(Path(settings.data_dir, path))


def _flat_ranks(rng: np.random.Generator, num_ranks: int, num_draws: int) -> Numbers:
    weights = np.cumsum(np.arange(1, num_ranks + 1, dtype=np.float64) ** -_FLAT_ZIPF)
    ranks: Numbers = np.searchsorted(weights, rng.random(num_draws) * weights[-1])
    return ranks


def _read(path: Path) -> list[tuple[IdGroup, Counts]]:
    """Return batches of the samples of a file: each value of a cell is an id."""
    with gzip.open(path, "rt") as file:
        samples = [line.rstrip("\n.").split(",") for line in file if line.strip()]
    samples = [sample for sample in samples if len(sample) == len(samples[-2])]
    ids_of: dict[str, int] = {}
    router, batches = Router(tuple(map(str, range(len(samples[-2])))), 1), []
    for first in range(0, len(samples) - _FILE_BATCH + 1, _FILE_BATCH):
        columns = zip(*samples[first : first + _FILE_BATCH], strict=True)
        ids = [
            [
                ids_of.setdefault(v, len(ids_of))
                for c in cells
                for v in c.split("|")
                if v
            ]
            for cells in columns
        ]
        starts: Offsets = np.cumsum([0, *map(len, ids)])
        flat = np.array([id_ for of_table in ids for id_ in of_table], dtype=np.uint64)
        batches.append(router.route(flat, starts)[1:])
    return batches


def _keys(group: IdGroup) -> npt.NDArray[np.uint64]:
    """Return numbers that tell the rows of all tables apart."""
    tables = np.arange(len(group.tables), dtype=np.uint64) << np.uint64(48)
    return group.ids | np.repeat(tables, group.num_ids[0])


def _lru(keys: list[npt.NDArray[np.uint64]], num_slots: int) -> float:
    rows, hits, half = OrderedDict[int, None](), 0, len(keys) // 2
    for n, of_batch in enumerate(keys):
        for key in of_batch.tolist():
            if key in rows:
                rows.move_to_end(key)
                hits += n >= half
            else:
                if len(rows) == num_slots:
                    rows.popitem(last=False)
                rows[key] = None
    return hits / sum(map(len, keys[half:]))


def _share(batches: list[tuple[IdGroup, Counts]], num_slots: int) -> float:
    slots, before = SlotMap(num_slots, batches[0][0].tables, 1), 0
    for n, (group, counts_U) in enumerate(batches):
        if n == len(batches) // 2:
            before = slots.counters.hits
        assigned = slots.assign(group, counts_U)
        assert assigned is not None, "no other batch is in flight"
        slots.release(assigned.slots, trained=True)
    num = sum(len(group.ids) for group, _ in batches[len(batches) // 2 :])
    return (slots.counters.hits - before) / num
