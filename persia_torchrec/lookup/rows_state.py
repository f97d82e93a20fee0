"""What servers tell those that only look ids up: their rows, and how new they are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Following:
    """How far servers lag behind the training that they follow.

    Attributes:
        increments: put in so far, by all servers.
        delay_s: age of the rows of the server that lags most; it grows while no
            increment comes, as when the training has ended.
        lost: a server follows no more before the next checkpoint, or its restart.
    """

    increments: int
    delay_s: float
    lost: bool


@dataclass(frozen=True, slots=True)
class RowsState:
    """The rows of each server, while all of them answer.

    With ``following`` where the servers follow a training. ``misses`` are the ids that
    were looked up and had no row, since the servers started.
    """

    num_rows: tuple[int, ...]
    following: Following | None = None
    misses: int = 0

    @classmethod
    def of(cls, counters: Sequence[Mapping[str, int]]) -> Self:
        """Return the state by the counters of each server."""
        following = None
        if any("increments_put_in" in of_server for of_server in counters):
            total: Counter[str] = sum(map(Counter, counters), Counter())
            delay_ms = max(one.get("increment_age_ms", 0) for one in counters)
            is_lost = total["following_lost"] + total["following_stopped"] > 0
            put_in = total["increments_put_in"]
            following = Following(put_in, delay_ms / 1000, is_lost)
        misses = sum(one.get("misses", 0) for one in counters)
        return cls(tuple(one["rows"] for one in counters), following, misses)
