"""How fast is a server over the network: one server, one client, a core each?

A server process is filled, and a client in this process asks it over the loopback
interface. Again and again and in turn are timed: a pull of ids drawn uniformly from
the rows; a memory copy of as many weights; the push of their gradients, until it is
applied; pulls and pushes of several batches at once, as a trainer with staleness does
them; and the pull of a batch with Zipf-distributed ids, which first have to be made
unique and split by server.

All values are checked outside the timed stretches.

Dimension key:
    N: ids of one request
    U: unique ids of a Zipf-distributed batch
    D: embedding dim
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from persia_torchrec.bench.expected import ExpectedRows, require_equal
from persia_torchrec.bench.machine import cores, pinned
from persia_torchrec.bench.memory_copy import DESCRIPTION, MemoryCopy
from persia_torchrec.bench.report import (
    MEMORY_COPY,
    Figure,
    Results,
    Sample,
    summarize,
)
from persia_torchrec.bench.workload import (
    Numbers,
    Settings,
    ids_of,
    weights_of,
    zipf_numbers,
)
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.errors import StoreError
from persia_torchrec.routing.dedup import unique_ids
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.wire.precision import Floats

IN_FLIGHT = 4
"""Batches at once."""

ZIPF_EXPONENT = 1.2

PERSIA_IDS = 20_000
"""Ids a request when PERSIA was measured; smaller requests are not compared."""

PERSIA_ROWS_PER_S = {
    8: {"lookup": 1.27e6, "update": 1.32e6},
    64: {"lookup": 1.04e6, "update": 0.61e6},
}
"""The original PERSIA's server, by dim: training lookup and Adagrad update, one server
and one connection on two shared cores."""

_SEED = 20_232
_FILL = 65_536
_MEANINGS = {
    "lookup": "pull",
    "update": "push until applied",
    "lookup_and_update": "pull and push, one after the other",
    "lookup_in_flight": f"pull, {IN_FLIGHT} batches at once",
    "update_in_flight": f"push until applied, {IN_FLIGHT} batches at once",
    "lookup_and_update_in_flight": f"both, {IN_FLIGHT} batches at once",
    "zipf_unique_rows": "unique_ids, split and pull of a Zipf batch: its unique rows",
    "zipf_ids": "the same: its ids, repeats included",
    MEMORY_COPY: "memory copy of as many weights",
}


def run_wire(settings: Settings) -> Results:
    """Measure one server and one client for each dim.

    Raises:
        StoreError: a row is not what it should be.
        ServerError: the server does not start, fails, or does not answer.
    """
    allowed = cores()
    one_each = len(allowed) > 1
    server_core, client_core = allowed[:2] if one_each else (None, None)
    pinning = f"server on core {server_core}, client on core {client_core}"
    figures = {
        dim: summarize(_measure(settings, dim, server_core, client_core))
        for dim in settings.dims
    }
    return Results(
        question=(
            f"One server and one client over loopback: {settings.rows} rows, "
            f"{settings.ids} unique ids a request, drawn uniformly, optimizer "
            f"{settings.optimizer}; Zipf batches of {settings.zipf_ids} ids of "
            f"{settings.zipf_range}, exponent {ZIPF_EXPONENT}."
        ),
        pinned=pinning if one_each else "not pinned",
        meanings=_MEANINGS,
        figures=figures,
        remarks=[DESCRIPTION, *_compare_with_persia(settings, figures)],
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """One request: which rows, their ids and gradients, all grouped by server.

    Attributes:
        numbers: int64 ``(N,)``.
        ids: N of them.
        grads: float32 ``(N, D)``.
        name: which batch it is.
    """

    numbers: Numbers
    ids: ShardedIds
    grads: Floats
    name: BatchNumber


class WireBench:
    """A filled server, a client of it, and what its rows should be.

    Args:
        settings: see there.
        dim: the table's.
        client: connected to a server which has room for the rows, and for those of a
            Zipf batch a repeat and one more.
        threads: as many as there are batches at once.
    """

    def __init__(
        self,
        settings: Settings,
        dim: int,
        client: EmbeddingClient,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._settings = settings
        self._rng = np.random.default_rng(_SEED)
        self._client = client
        self._threads = threads
        self._table = settings.table(dim)
        self._expected = ExpectedRows(self._table, settings.rows, settings.rows)
        self._memory_copy = MemoryCopy(settings.rows, settings.ids, dim)
        self._stream = BatchNumber.new_stream()
        self._num_batches = 0
        client.add_tables([self._table])
        for start in range(0, settings.rows, _FILL):
            stop = min(start + _FILL, settings.rows)
            self._write(ids_of(np.arange(start, stop)))
        self._zipf_batches = [self._new_zipf() for _ in range(settings.repeats + 1)]

    def repeat(self) -> Sample:
        """Time each operation once, and check what it did.

        May be called once more than the settings have repeats.

        Returns:
            Rows a second, by figure.

        Raises:
            StoreError: a row is not what it should be.
            ServerError: the server fails or does not answer.
        """
        batch = self._new_batch()
        pull_s = self._pull([batch])
        copy_s = self._memory_copy.seconds()
        push_s = self._push([batch])
        batches = [self._new_batch() for _ in range(IN_FLIGHT)]
        pulls_s = self._pull(batches) / IN_FLIGHT
        pushes_s = self._push(batches) / IN_FLIGHT
        seconds = {
            "lookup": pull_s,
            "update": push_s,
            "lookup_and_update": pull_s + push_s,
            "lookup_in_flight": pulls_s,
            "update_in_flight": pushes_s,
            "lookup_and_update_in_flight": pulls_s + pushes_s,
            MEMORY_COPY: copy_s,
        }
        sample = {name: self._settings.ids / s for name, s in seconds.items()}
        return {**sample, **self._pull_zipf(self._zipf_batches.pop())}

    def _pull(self, batches: Sequence[_Batch]) -> float:
        """Pull batches at once; return the seconds for all."""
        start = time.perf_counter()
        if len(batches) == 1:
            pulled = [self._pull_one(batches[0])]
        else:
            pulled = list(self._threads.map(self._pull_one, batches))
        seconds = time.perf_counter() - start
        for b, rows_ND in zip(batches, pulled, strict=True):
            expected = self._expected.weights(b.numbers)
            require_equal(self._what("pull"), b.ids.ids, rows_ND, expected)
        return seconds

    def _pull_one(self, batch: _Batch) -> Floats:
        tables = [(self._table.name, batch.ids)]
        return self._client.pull(tables, batch=batch.name)[0]

    def _push(self, batches: Sequence[_Batch]) -> float:
        """Push batches at once; return the seconds until all are applied."""
        start = time.perf_counter()
        replies = [
            self._client.push([(self._table.name, b.ids)], [b.grads], b.name)
            for b in batches
        ]
        num_missed = sum(self._client.missed(reply) for reply in replies)
        seconds = time.perf_counter() - start
        if num_missed:
            raise StoreError(
                f"{self._what('push')}: every id must have a row. Received: "
                f"{num_missed} have none."
            )
        for b in batches:
            self._expected.update(b.numbers, b.grads)
        for b in batches:
            rows = self._client.read(self._table.name, b.ids.ids)
            expected = self._expected.floats(b.numbers)
            require_equal(self._what("push"), b.ids.ids, rows, expected)
        return seconds

    def _pull_zipf(self, ids_L: Ids) -> Sample:
        """Pull a batch with repeats; return its rows and ids a second."""
        name = self._next_name()
        start = time.perf_counter()
        unique = unique_ids(ids_L)
        split = self._client.split(unique.ids)
        [rows_UD] = self._client.pull([(self._table.name, split)], batch=name)
        seconds = time.perf_counter() - start
        self._client.missed(self._client.push([], [], name))
        where_L = split.place[unique.inverse]
        expected = weights_of(ids_L, self._table.dim)
        require_equal(self._what("Zipf pull"), ids_L, rows_UD[where_L], expected)
        return {
            "zipf_unique_rows": len(rows_UD) / seconds,
            "zipf_ids": len(ids_L) / seconds,
        }

    def _new_batch(self) -> _Batch:
        num, dim = self._settings.ids, self._table.dim
        numbers_N = self._rng.choice(self._settings.rows, num, replace=False)
        split = self._client.split(ids_of(numbers_N))
        grouped_N = np.empty_like(numbers_N)
        grouped_N[split.place] = numbers_N
        grads_ND = self._rng.standard_normal((num, dim), dtype=np.float32)
        return _Batch(grouped_N, split, grads_ND, self._next_name())

    def _new_zipf(self) -> Ids:
        """Draw the ids of a Zipf batch, and make their rows, which nothing updates."""
        ranks_L = zipf_numbers(
            self._rng,
            ZIPF_EXPONENT,
            self._settings.zipf_range,
            self._settings.zipf_ids,
        )
        ids_L = ids_of(self._settings.rows + ranks_L)
        self._write(unique_ids(ids_L).ids)
        return ids_L

    def _write(self, ids_U: Ids) -> None:
        self._client.write(self._table.name, ids_U, weights_of(ids_U, self._table.dim))

    def _next_name(self) -> BatchNumber:
        self._num_batches += 1
        return BatchNumber(self._stream, self._num_batches)

    def _what(self, verb: str) -> str:
        return f"{verb}, dim {self._table.dim}"


def _measure(
    settings: Settings, dim: int, server_core: int | None, client_core: int | None
) -> list[Sample]:
    capacity = settings.rows + (settings.repeats + 1) * settings.zipf_ids
    with pinned(server_core):
        cluster = EmbeddingCluster.local(num_servers=1, capacity=capacity)
    with cluster, pinned(client_core), ThreadPoolExecutor(IN_FLIGHT) as threads:
        client = EmbeddingClient.connect(cluster.addresses)
        try:
            bench = WireBench(settings, dim, client, threads)
            bench.repeat()  # the first touches new memory
            return [bench.repeat() for _ in range(settings.repeats)]
        finally:
            client.close()


def _compare_with_persia(
    settings: Settings, figures: Mapping[int, Mapping[str, Figure]]
) -> list[str]:
    """Say how the figures stand to PERSIA's, where both exist."""
    lines = [
        "The original PERSIA, measured on a 2-core machine of this kind: one server, "
        "one connection, 20,000 ids a request, million rows/s, D = 8 / 64: training "
        "lookup 1.27 / 1.04, Adagrad update 1.32 / 0.61."
    ]
    if settings.optimizer != "adagrad" or settings.ids < PERSIA_IDS:
        return lines
    for dim in sorted(figures.keys() & PERSIA_ROWS_PER_S.keys()):
        lookup, update = (
            figures[dim][name].median / rate
            for name, rate in PERSIA_ROWS_PER_S[dim].items()
        )
        lines.append(
            f"Against that, D = {dim}: lookup {lookup:.1f} times, update {update:.1f} "
            "times as fast."
        )
    return lines
