"""PERSIA's settings that all tables have in common."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

from persia_torchrec.embedding import optim as optim
from persia_torchrec.embedding import setting
from persia_torchrec.embedding.admission import AdmitAll, AdmitProbability
from persia_torchrec.embedding.initializer import Uniform


@dataclass(frozen=True)
class EmbeddingConfig(setting.Setting):
    """What every table has in common: how rows start, and how far they may go.

    Args:
        emb_initialization: ``(lower, upper)``, both finite, ``lower <= upper``; the
            weights of a new row are drawn uniformly from ``[lower, upper)``.
        admit_probability: with which an id gets a row, in ``[0, 1]``, drawn at each
            training batch that has it, until it has one (see ``AdmitProbability``);
            without a row it reads zeros.
        weight_bound: after an update each weight is clamped to
            ``[-weight_bound, weight_bound]``; ``>= 0``, and 0 switches the bound off.
    """

    emb_initialization: Annotated[
        tuple[float, float],
        setting.Rule(
            "two finite numbers (lower, upper) with lower <= upper",
            lambda pair: len(pair) == 2 and -inf < pair[0] <= pair[1] < inf,
        ),
    ] = (-0.01, 0.01)
    admit_probability: setting.Fraction = 1.0
    weight_bound: setting.NonNegative = 10

    @property
    def initializer(self) -> setting.Initializer:
        """How the rows of every table start."""
        return Uniform(*self.emb_initialization)

    @property
    def admission(self) -> setting.Admission:
        """Which ids of every table get a row."""
        if self.admit_probability == 1:
            return AdmitAll()
        return AdmitProbability(self.admit_probability)


def get_default_embedding_config() -> EmbeddingConfig:
    """Return PERSIA's settings, which are the defaults."""
    return EmbeddingConfig()
