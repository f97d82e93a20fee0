"""Which requests a benchmark makes: rows, dims, Zipf-distributed ids, a memory copy.

A batch of 4096 samples with 26 features has 106,496 ids, Zipf 1.2 over 10 million, of
which about 20,480 are unique; uniform requests have as many, which no cache helps.
"""

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np

from benchmarks.harness import Settings, Timings
from benchmarks.reference import Numbers, scattered, table_of
from persia_torchrec.routing.route import unique_ids
from persia_torchrec.table import TableSpec

TURN = 5
"""Requests of one kind to a store that follow one another, and are timed."""

ZIPF_EXPONENT = 1.2

MEMORY_COPY = "- | memory copy"

_COPY_SOURCE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class ZipfLoad(Settings):
    """Which rows there are, and how Zipf batches ask for them."""

    rows: Annotated[int, "rows before anything is timed"] = 1_000_000
    zipf_draws: Annotated[int, "ids of a Zipf batch, repeats included"] = 106_496
    zipf_range: Annotated[int, "ids that Zipf batches draw from"] = 10_000_000

    def draw_zipf(self, num_requests: int) -> "ZipfRequests":
        """Draw Zipf batches, always the same, and make their ids unique.

        The rows of popular ids lie scattered, as in a trained table; rare ones follow.
        """
        rng = np.random.default_rng(20_232)
        ranks = []
        for _ in range(num_requests):
            drawn = zipf_ranks(rng, self.zipf_range, self.zipf_draws)
            ranks.append(unique_ids(drawn.view(np.uint64)).ids.view(np.int64))
        every_rank = np.unique(np.concatenate(ranks))
        rare = every_rank[every_rank >= self.rows]
        requests = []
        for ranks_N in ranks:
            behind_N = self.rows + np.searchsorted(rare, ranks_N)
            is_rare_N, popular_N = ranks_N >= self.rows, scattered(ranks_N, self.rows)
            requests.append(np.where(is_rare_N, behind_N, popular_N))
        return ZipfRequests(requests, self.rows + len(rare))


@dataclass(frozen=True, kw_only=True)
class Workload(ZipfLoad):
    """A table, and uniform requests beside those of Zipf batches."""

    dims: Annotated[tuple[int, ...], "embedding dims"] = (16, 64)
    ids: Annotated[int, "unique ids of a uniform request"] = 20_480
    repeats: Annotated[int, "requests of each kind"] = 25
    optimizer: Annotated[
        Literal["adagrad", "rowwise_adagrad", "sgd", "adam"], "of the table"
    ] = "adagrad"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("ids", self.ids >= 2, ">= 2")
        self.require("rows", self.rows >= 2 * self.ids, f">= {2 * self.ids} (2 * ids)")

    @classmethod
    def tiny(cls, **more: Any) -> Self:
        """Return settings of a run that only shows that it works."""
        common: dict[str, Any] = {"rows": 4096, "ids": 512, "repeats": 2}
        return cls(dims=(16,), **common, zipf_draws=2048, zipf_range=10_000, **more)

    def num_turns(self) -> int:
        """Return how many turns have as many requests as ``repeats``, or more."""
        return -(-self.repeats // TURN)

    def table(self, dim: int) -> TableSpec:
        """Return the table that is measured."""
        return table_of(dim, self.optimizer)


class ZipfRequests(NamedTuple):
    """Numbers of the unique ids of batches, int64 ``(N,)``, and a bound above all."""

    requests: list[Numbers]
    num_numbers: int


def zipf_ranks(rng: np.random.Generator, num_ranks: int, num_draws: int) -> Numbers:
    """Draw ranks, the k-th about ``(k + 1)**-1.2`` as often; the tail wraps around."""
    return (rng.zipf(ZIPF_EXPONENT, num_draws).astype(np.int64) - 1) % num_ranks


class MemoryCopy:
    """Copies the bytes of uniform requests from a large array, stretch by stretch."""

    def __init__(self, workload: Workload, dim: int) -> None:
        enough = max(workload.ids, _COPY_SOURCE_BYTES // (4 * dim))
        self._source = np.ones((min(workload.rows, enough), dim), dtype=np.float32)
        self._target = np.zeros((workload.ids, dim), dtype=np.float32)
        self._next = 0

    def seconds(self) -> float:
        """Copy once, from memory that is in no cache; return the seconds."""
        if self._next + len(self._target) > len(self._source):
            self._next = 0
        stretch = self._source[self._next : self._next + len(self._target)]
        self._next += len(self._target)
        start = time.perf_counter()
        np.copyto(self._target, stretch)
        return time.perf_counter() - start

    def turn(self, timings: Timings) -> None:
        """Time some copies as ``MEMORY_COPY``."""
        for _ in range(TURN):
            timings.add(MEMORY_COPY, len(self._target), self.seconds())
