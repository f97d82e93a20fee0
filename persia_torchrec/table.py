"""What a server must know of a table: the part both sides of the wire agree on.

A table is a name, a dim and what happens to its rows: how a new row starts, which
optimizer moves it, how large a weight may grow. It has no length: rows appear when
their ids are first looked up in training, and leave when the server is full.
"""

import math
from dataclasses import dataclass

from persia_torchrec.embedding.optim import (
    Optimizer,
    optimizer_from_json,
    optimizer_to_json,
)
from persia_torchrec.errors import ConfigError

MAX_DIM = 4096
"""Largest embedding dim that a server accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One table, as the servers know it.

    Raises:
        ConfigError: a field is out of its range.
    """

    name: str
    """Unique on a server; not empty."""

    dim: int
    """Weights a row, in ``[1, 4096]``."""

    optimizer: Optimizer
    """What a gradient does to a row."""

    lower: float = -0.01
    """New weights are drawn uniformly from ``[lower, upper)``."""

    upper: float = 0.01
    """See ``lower``; equal bounds make every new weight that constant."""

    seed: int = 0
    """Mixed into each id by exclusive or before it seeds the row's random numbers;
    uint64. 0 gives PERSIA's numbers."""

    weight_bound: float = 0.0
    """After an update each weight is clamped to ``[-weight_bound, weight_bound]``;
    0 switches the bound off."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("A table's name must not be empty.")
        dim_fits = isinstance(self.dim, int) and 1 <= self.dim <= MAX_DIM
        self._require("dim", dim_fits, f"an integer in [1, {MAX_DIM}]")
        seed_fits = isinstance(self.seed, int) and 0 <= self.seed < 2**64
        self._require("seed", seed_fits, "an integer in [0, 2**64)")
        bounds_are_finite = math.isfinite(self.lower) and math.isfinite(self.upper)
        self._require("lower", bounds_are_finite, "finite, as upper must be")
        self._require("lower", self.lower <= self.upper, f"<= upper ({self.upper})")
        bound_fits = math.isfinite(self.weight_bound) and self.weight_bound >= 0
        self._require("weight_bound", bound_fits, "finite and >= 0")

    def _require(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            raise ConfigError(
                f"Table {self.name!r}: {name} must be {must}. "
                f"Received: {getattr(self, name)!r}."
            )

    @property
    def num_state_floats(self) -> int:
        """How many float32 of optimizer state stand beside the weights of a row."""
        return self.optimizer.num_state_floats(self.dim)

    def to_json(self) -> dict[str, object]:
        """Describe the table in plain JSON values."""
        return {
            "name": self.name,
            "dim": self.dim,
            "optimizer": optimizer_to_json(self.optimizer),
            "lower": self.lower,
            "upper": self.upper,
            "seed": self.seed,
            "weight_bound": self.weight_bound,
        }

    @classmethod
    def from_json(cls, description: dict[str, object]) -> "TableSpec":
        """Build the table that :meth:`to_json` described.

        Raises:
            ConfigError: a field is missing, unknown or out of its range.
        """
        arguments = dict(description)
        optimizer = arguments.pop("optimizer", None)
        if not isinstance(optimizer, dict):
            raise ConfigError(f"A table needs an optimizer. Received: {description!r}.")
        try:
            return cls(optimizer=optimizer_from_json(optimizer), **arguments)  # type: ignore[arg-type]  # checked in __post_init__
        except TypeError as exc:
            raise ConfigError(f"Not a table: {description!r} ({exc}).") from exc
