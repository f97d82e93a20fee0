"""How near is the store to what the machine's memory allows?

The store and two plain loops take turns: the loops copy the same number of rows of the
same width, and step them with the same arithmetic, but know beforehand where each row
stands. Below the rates stand the memory's own: how long a read takes that must wait for
the one before it, and how long one of many that are on their way at once.
"""

import time

import numpy as np
import numpy.typing as npt

from persia_torchrec.bench.filled_store import FilledStore
from persia_torchrec.bench.memory_copy import MemoryCopy
from persia_torchrec.bench.plain_rows import PlainRows
from persia_torchrec.bench.rates import TURN, num_turns
from persia_torchrec.bench.report import Cell, Table, Timings
from persia_torchrec.bench.settings import Settings
from persia_torchrec.compiled import compiled
from persia_torchrec.store.memory import reserve

_OPERATIONS = ("lookup", "update", "both")
_COLUMNS = {
    "dim": "D",
    "operation": "operation",
    "store_ns": "store, ns a row",
    "plain_ns": "plain loops, ns a row",
    "share": "plain loops / store",
    "copy_ns": "copy of the weights in one piece, ns a row",
}
_MEMORY_COLUMNS = {
    "megabytes": "MB",
    "waiting_ns": "a read that waits for the one before, ns",
    "together_ns": "one of many at once, ns",
}
_WORDS_A_LINE = 8
_NUM_READS = 100_000


def measure_limits(settings: Settings) -> list[Table]:
    """Measure the store beside plain loops, and the memory itself.

    Raises:
        StoreError: a row is not what it should be, or there is no memory.
    """
    rows: list[dict[str, Cell]] = []
    for dim in settings.dims:
        timings = _time(settings, dim)
        for operation in _OPERATIONS:
            store = timings.ns_a_row(f"store {operation}")
            plain = timings.ns_a_row(f"plain {operation}")
            rows.append(
                {
                    "dim": dim,
                    "operation": operation,
                    "store_ns": store,
                    "plain_ns": plain,
                    "share": plain / store,
                    "copy_ns": timings.ns_a_row("copy"),
                }
            )
    question = (
        "The store beside plain loops over rows of the same width, in process, on one "
        f"core: {settings.optimizer}, {settings.rows} rows, {settings.ids} uniform ids "
        f"a request, medians of {TURN * num_turns(settings)} requests of each kind."
    )
    notes = [
        "Plain loops: gather the weights, then step weights and state, the memory of "
        "eight rows asked for ahead; no index, no recency, no checks.",
        "The store's lookup has found the row, and touched it, before its update.",
    ]
    return [Table("limits", question, _COLUMNS, rows, notes), _measure_memory(settings)]


def _time(settings: Settings, dim: int) -> Timings:
    spec = settings.table(dim)
    filled, plain = FilledStore(spec, settings.rows), PlainRows(spec, settings.rows)
    copy = MemoryCopy(settings.rows, settings.ids, dim)
    timings = Timings()
    for turn in range(num_turns(settings) + 1):
        into = timings if turn else Timings()
        requests = [filled.draw(settings.ids) for _ in range(TURN + 1)]
        for name, seconds in (
            ("store", filled.steady(requests)),
            ("plain", plain.steady(requests, [filled.grads(len(r)) for r in requests])),
        ):
            for lookup_s, update_s in seconds:
                into.add(f"{name} lookup", settings.ids, lookup_s)
                into.add(f"{name} update", settings.ids, update_s)
                into.add(f"{name} both", settings.ids, lookup_s + update_s)
        into.add("copy", settings.ids, copy.seconds())
    return timings


def _measure_memory(settings: Settings) -> Table:
    """Time reads of random cache lines, of a stretch that no cache holds and others."""
    rows: list[dict[str, Cell]] = []
    rng = np.random.default_rng(20_233)
    largest = settings.rows * 512
    for num_bytes in sorted({largest // 512, largest // 64, largest}):
        words = reserve(num_bytes // 8)
        places = rng.permutation(num_bytes // 64) * _WORDS_A_LINE
        words[places] = np.roll(places, -1).astype(np.uint64)
        reads = rng.choice(places, _NUM_READS)
        best_waiting = best_together = float("inf")
        for _ in range(TURN):
            start = time.perf_counter()
            _follow(words, _NUM_READS)
            middle = time.perf_counter()
            _add(words, reads)
            end = time.perf_counter()
            best_waiting = min(best_waiting, middle - start)
            best_together = min(best_together, end - middle)
        rows.append(
            {
                "megabytes": num_bytes / 1e6,
                "waiting_ns": best_waiting / _NUM_READS * 1e9,
                "together_ns": best_together / _NUM_READS * 1e9,
            }
        )
    question = (
        "Reads of random cache lines in huge pages, on one core, the best of "
        f"{TURN} times {_NUM_READS} reads."
    )
    return Table("memory", question, _MEMORY_COLUMNS, rows)


@compiled
def _follow(words: npt.NDArray[np.uint64], num: int) -> np.uint64:
    """Read the word whose place the word before holds, again and again."""
    place = np.uint64(0)
    for _ in range(num):
        place = words[place]
    return place


@compiled
def _add(words: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> np.uint64:
    """Add the words at all places."""
    total = np.uint64(0)
    for i in range(len(places)):
        total += words[places[i]]
    return total
