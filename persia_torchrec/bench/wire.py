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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from persia_torchrec.bench.expected import ExpectedRows, require_equal
from persia_torchrec.bench.machine import cores, pinned
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
from persia_torchrec.errors import ServerError, StoreError
from persia_torchrec.routing.dedup import unique_ids
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.wire.precision import Floats

IN_FLIGHT = 4
"""Batches at once."""

ZIPF_EXPONENT = 1.2

PERSIA_ROWS_PER_S = {
    8: {"lookup": 1.27e6, "update": 1.32e6},
    64: {"lookup": 1.04e6, "update": 0.61e6},
}
"""The original PERSIA's server, by dim: training lookup and Adagrad update, 20,000 ids
a request, one server and one connection on two shared cores."""

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
    server_core = allowed[0] if len(allowed) > 1 else None
    client_core = allowed[1] if len(allowed) > 1 else None
    figures = {}
    for dim in settings.dims:
        capacity = settings.rows + (settings.repeats + 1) * settings.zipf_ids
        with pinned(server_core):
            cluster = EmbeddingCluster.local(num_servers=1, capacity=capacity)
        with cluster, pinned(client_core):
            client = EmbeddingClient.connect(cluster.addresses)
            try:
                bench = WireBench(settings, dim, client)
                bench.repeat()  # the first touches new memory
                samples = [bench.repeat() for _ in range(settings.repeats)]
            finally:
                client.close()
        figures[dim] = summarize(samples)
    return Results(
        question=(
            f"One server and one client over loopback: {settings.rows} rows, "
            f"{settings.ids} unique ids a request, drawn uniformly, optimizer "
            f"{settings.optimizer}; Zipf batches of {settings.zipf_ids} ids of "
            f"{settings.zipf_range}, exponent {ZIPF_EXPONENT}."
        ),
        pinned=(
            "not pinned"
            if server_core is None
            else f"server on core {server_core}, client on core {client_core}"
        ),
        meanings=_MEANINGS,
        figures=figures,
        remarks=[
            "Memory copy: np.copyto of the weights of one request in the client's "
            "process, contiguous, from an array as large as all weights.",
            *_comparison(settings, figures),
        ],
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Ids of one request, grouped by server."""

    numbers_N: Numbers
    ids: ShardedIds
    grads_ND: Floats
    number: BatchNumber


class WireBench:
    """A filled server, a client of it, and what its rows should be.

    Args:
        settings: see there.
        dim: the table's.
        client: connected to the server, which has room for the rows, and for those of
            a Zipf batch a repeat and one more.
    """

    def __init__(self, settings: Settings, dim: int, client: EmbeddingClient) -> None:
        self._settings = settings
        self._rng = np.random.default_rng(_SEED)
        self._client = client
        self._table = settings.table(dim)
        self._expected = ExpectedRows(self._table, settings.rows, settings.rows)
        self._stream = BatchNumber.new_stream()
        self._num_batches = 0
        self._out_ND = np.zeros((settings.ids, dim), dtype=np.float32)
        self._copied = np.ones((settings.rows, dim), dtype=np.float32)
        self._copy_at = 0
        client.add_tables([self._table])
        for start in range(0, settings.rows, _FILL):
            self._fill(np.arange(start, min(start + _FILL, settings.rows)))
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
        copy_s = self._copy()
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

        def pull(batch: _Batch) -> Floats:
            tables = [(self._table.name, batch.ids)]
            return self._client.pull(tables, batch=batch.number)[0]

        with ThreadPoolExecutor(len(batches)) as pool:
            list(pool.map(abs, range(len(batches))))  # the threads run
            start = time.perf_counter()
            if len(batches) == 1:
                pulled = [pull(batches[0])]
            else:
                pulled = list(pool.map(pull, batches))
            seconds = time.perf_counter() - start
        for batch, rows_ND in zip(batches, pulled, strict=True):
            expected = self._expected.weights(batch.numbers_N)
            require_equal(self._what("pull"), batch.numbers_N, rows_ND, expected)
        return seconds

    def _push(self, batches: Sequence[_Batch]) -> float:
        """Push batches at once; return the seconds until all are applied."""
        start = time.perf_counter()
        replies = [
            self._client.push([(self._table.name, b.ids)], [b.grads_ND], b.number)
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
            self._expected.update(b.numbers_N, b.grads_ND)
        for b in batches:
            rows = self._client.read(self._table.name, b.ids.ids)
            expected = self._expected.floats(b.numbers_N)
            require_equal(self._what("push"), b.numbers_N, rows, expected)
        return seconds

    def _copy(self) -> float:
        if self._copy_at + len(self._out_ND) > len(self._copied):
            self._copy_at = 0
        source = self._copied[self._copy_at : self._copy_at + len(self._out_ND)]
        self._copy_at += len(self._out_ND)
        start = time.perf_counter()
        np.copyto(self._out_ND, source)
        return time.perf_counter() - start

    def _pull_zipf(self, ids_L: Ids) -> Sample:
        start = time.perf_counter()
        unique = unique_ids(ids_L)
        split = self._client.split(unique.ids)
        tables = [(self._table.name, split)]
        [rows_UD] = self._client.pull(tables, batch=self._next_number())
        seconds = time.perf_counter() - start
        self._push_nothing()
        ...
