"""What the training benchmark measures, in numbers: one class, checked once."""

from dataclasses import dataclass

from persia_torchrec.errors import ConfigError

NUM_TABLES = 26
NUM_DENSE = 13
DENSE_LAYERS = (512, 256)
"""Of the bottom MLP, before its last layer, which is as wide as an embedding."""

OVER_LAYERS = (512, 512, 256, 1)
"""Of the top MLP."""

ZIPF_EXPONENT = 1.2

LEARNING_RATE = 0.05
"""Of the dense model's SGD and of the tables' rowwise Adagrad."""

EPS = 1e-8
"""Of Adagrad, as fbgemm's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """What to measure.

    Raises:
        ConfigError: a setting is out of its range.
    """

    dims: tuple[int, ...] = (16, 64)
    """Embedding dims, each measured by itself."""

    rows: tuple[int, ...] = (1_000_000, 10_000_000, 50_000_000)
    """Rows that the servers hold, one server process each; all of them at the first of
    the dims, the first of them at the others."""

    staleness: tuple[int, ...] = (0, 8)
    """Bounds of the sharder; the last one with every number of rows."""

    table_rows: int = 1_000_000
    """Rows a table of plain TorchRec, and how many different ids a feature has."""

    batch_size: int = 4096
    """Samples a batch."""

    batches: int = 32
    """Different batches; they come again and again."""

    steps: int = 16
    """Steps that are timed together."""

    repeats: int = 7
    """How often these steps are timed, the models in turn; the median counts."""

    checked_steps: int = 5
    """First steps, whose losses must be those of plain TorchRec at staleness 0."""

    def __post_init__(self) -> None:
        for name in ("dims", "rows", "staleness"):
            self._require(name, bool(getattr(self, name)), "at least one number")
        self._require(
            "dims", all(d >= 4 and d % 4 == 0 for d in self.dims), "multiples of 4"
        )
        self._require("rows", all(rows >= 1 for rows in self.rows), "numbers >= 1")
        self._require("staleness", all(s >= 0 for s in self.staleness), "numbers >= 0")
        self._require("table_rows", self.table_rows >= 2, ">= 2")
        for name in ("batch_size", "batches", "steps", "repeats", "checked_steps"):
            self._require(name, getattr(self, name) >= 1, ">= 1")

    def _require(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise ConfigError(f"{name} must be {must}. Received: {value!r}.")
