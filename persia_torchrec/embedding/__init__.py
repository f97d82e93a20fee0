"""PERSIA's user types, and what a table's settings can say.

Batches are in ``data``, optimizers in ``optim``; this module has what all tables have
in common, and re-exports the settings of a single one.
"""

import math
from dataclasses import dataclass

from persia_torchrec.embedding.admission import (
    AdmitAll,
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
)
from persia_torchrec.embedding.eviction import Expiry
from persia_torchrec.embedding.initializer import (
    Constant,
    InverseSqrtDim,
    Normal,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.embedding.setting import Admission, Initializer, Setting

__all__ = [
    "Admission",
    "AdmitAll",
    "AdmitBloom",
    "AdmitFrequency",
    "AdmitProbability",
    "Constant",
    "EmbeddingConfig",
    "Expiry",
    "Initializer",
    "InverseSqrtDim",
    "Normal",
    "TruncatedNormal",
    "Uniform",
]


@dataclass(frozen=True)
class EmbeddingConfig(Setting):
    """What every table has in common: how rows start, and how far they may go.

    Args:
        emb_initialization: ``(lower, upper)``, both finite, ``lower <= upper``; the
            weights of a new row are drawn uniformly from ``[lower, upper)``.
        admit_probability: fraction of the ids that get a row, in ``[0, 1]``, drawn by
            id (see ``AdmitProbability``: an id is in or out for good, where PERSIA
            draws again at each lookup); the others read zeros.
        weight_bound: after an update each weight is clamped to
            ``[-weight_bound, weight_bound]``; ``>= 0``, and 0 switches the bound off.

    Example:
        >>> EmbeddingConfig(emb_initialization=(-0.1, 0.1)).weight_bound
        10
    """

    emb_initialization: tuple[float, float] = (-0.01, 0.01)
    admit_probability: float = 1.0
    weight_bound: float = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "emb_initialization", tuple(self.emb_initialization))
        self._require(
            "emb_initialization",
            len(self.emb_initialization) == 2
            and all(math.isfinite(bound) for bound in self.emb_initialization)
            and self.emb_initialization[0] <= self.emb_initialization[1],
            "two finite numbers (lower, upper) with lower <= upper",
        )
        self._require(
            "admit_probability", 0 <= self.admit_probability <= 1, "in [0, 1]"
        )
        self._require_non_negative("weight_bound")

    @property
    def initializer(self) -> Initializer:
        """How the rows of every table start."""
        return Uniform(*self.emb_initialization)

    @property
    def admission(self) -> Admission:
        """Which ids of every table get a row."""
        if self.admit_probability == 1:
            return AdmitAll()
        return AdmitProbability(self.admit_probability)
