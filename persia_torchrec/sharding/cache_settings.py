"""How large a trainer's cache of rows is, and what it has done."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from persia_torchrec.errors import ConfigError
from persia_torchrec.table import TableSpec

_GIB = 2**30
_SLOT_BYTES = 35  # of the map, and of how often a row was seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """How many rows of tables on servers a trainer keeps in its own memory.

    Give one of ``gib`` and ``rows``: the memory of all tables together, weights and
    optimizer state, or how many rows that are. Tables of one dim and optimizer share
    their part. Parts are by the number of features at first, and by the rows that
    missed from the 100th batch on; a mapping by dim says what each dim has.

    ``flush_s`` is how old rows of the servers may be, in seconds: those that were
    trained here are written back at least as often. 0 writes those of each batch with
    its backward pass.

    Raises:
        ConfigError: neither or both are given, or one is not positive and finite.
    """

    gib: float | Mapping[int, float] | None = None
    rows: int | Mapping[int, int] | None = None
    flush_s: float = 60.0

    def __post_init__(self) -> None:
        given = [size for size in (self.gib, self.rows) if size is not None]
        sizes: list[float] = []
        for size in given:
            sizes += size.values() if isinstance(size, Mapping) else [size]
        if len(given) != 1 or not all(0 < size < math.inf for size in sizes):
            raise ConfigError(
                "Cache must be given one of gib and rows, finite and > 0. Received: "
                f"gib={self.gib}, rows={self.rows}."
            )
        if not self.flush_s >= 0:
            raise ConfigError(f"flush_s must be >= 0. Received: {self.flush_s}.")

    def num_slots(self, spec: TableSpec, share: float) -> int:
        """Return the slots of a pool with such rows, which has a share of the size."""
        size: Any = self.rows if self.gib is None else self.gib
        of_dim = size.get(spec.dim, 0) if isinstance(size, Mapping) else size
        row_bytes = 4 * spec.num_floats + _SLOT_BYTES
        num = share * (of_dim if self.gib is None else of_dim * _GIB / row_bytes)
        if num < 1:
            raise ConfigError(
                "The cache must have a row for tables of each dim and optimizer. "
                f"Received: {self}, which has {num:.2g} rows for dim {spec.dim}. Give "
                "more, or in a mapping each dim."
            )
        return int(num)

    def is_shared(self, dim: int, other: int) -> bool:
        """Return whether tables of two dims share a size."""
        return dim == other or not isinstance(self.gib or self.rows, Mapping)


@dataclass
class CacheCounts:
    """What a cache has done so far, in unique rows of batches, and bytes of rows.

    Attributes:
        hits, misses: rows that were in slots, and that were not.
        written: rows that were written back.
        waits: of batches for slots that earlier ones have.
        moved_bytes: of what misses and of what is written back.
        plain_bytes: what rows and gradients would have been without it.
        num_dirty: rows that were trained and are not written back, at the last batch.
        flushed_s: when the last flush began, by ``time.monotonic``.
        batches: of which the slots are pinned.
    """

    hits: int = 0
    misses: int = 0
    written: int = 0
    waits: int = 0
    moved_bytes: int = 0
    plain_bytes: int = 0
    num_dirty: int = 0
    flushed_s: float = field(default_factory=time.monotonic)
    batches: WeakSet[object] = field(default_factory=WeakSet)

    def read(self) -> dict[str, int]:
        """Return them by name, as metrics."""
        return {
            "cache_hits": self.hits,
            "cache_misses": self.misses,
            "cache_written": self.written,
            "cache_waits": self.waits,
            "cache_moved_bytes": self.moved_bytes,
            "cache_plain_bytes": self.plain_bytes,
        }

    def gauges(self) -> dict[str, float]:
        """Return what is so now, by name, as metrics."""
        age_s = time.monotonic() - self.flushed_s
        return {
            "cache_dirty_rows": self.num_dirty,
            "cache_dirty_seconds": round(age_s, 1) if self.num_dirty else 0.0,
            "cache_batches": len(self.batches),
        }

    def describe(self) -> str:
        """Return them as a line of a log."""
        found = self.hits + self.misses
        return (
            f"cache: hit_rate={self.hits / max(found, 1):.2f} of {found} unique rows, "
            f"written_back={self.written}, {self.moved_bytes / 1e6:.1f} MB of rows "
            f"moved where {self.plain_bytes / 1e6:.1f} would have been, "
            f"{self.waits} batches waited for slots"
        )
