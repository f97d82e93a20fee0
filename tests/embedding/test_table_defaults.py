import math
from dataclasses import FrozenInstanceError

import pytest

from persia_torchrec import AdmitAll, AdmitProbability, Uniform
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError


def test_the_defaults_are_persias():
    config = EmbeddingConfig()
    assert config.emb_initialization == (-0.01, 0.01)
    assert config.admit_probability == 1.0
    assert config.weight_bound == 10


def test_a_config_does_not_change_and_takes_a_list_of_bounds():
    config = EmbeddingConfig([0, 0], weight_bound=0)
    assert config == EmbeddingConfig((0, 0), 1.0, 0)
    with pytest.raises(FrozenInstanceError):
        config.weight_bound = 1


@pytest.mark.parametrize(
    "bounds",
    [(0.1, -0.1), (0,), (0, 1, 2), (-math.inf, 0), (0, math.inf), (math.nan, 0)],
)
def test_bounds_that_are_not_finite_or_not_in_order_are_rejected(bounds):
    with pytest.raises(ConfigError, match=r"emb_initialization must be two finite"):
        EmbeddingConfig(emb_initialization=bounds)


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_an_invalid_admit_probability_is_rejected(probability):
    with pytest.raises(ConfigError, match=r"admit_probability must be in \[0, 1\]"):
        EmbeddingConfig(admit_probability=probability)


@pytest.mark.parametrize(
    ("config", "initializer", "admission"),
    [
        (EmbeddingConfig(), Uniform(-0.01, 0.01), AdmitAll()),
        (EmbeddingConfig((1, 2), 0), Uniform(1, 2), AdmitProbability(0)),
        (EmbeddingConfig((1, 2), 0.5), Uniform(1, 2), AdmitProbability(0.5)),
    ],
)
def test_a_config_reports_how_the_rows_of_every_table_start_and_which_ids_get_one(
    config, initializer, admission
):
    assert config.initializer == initializer
    assert config.admission == admission


@pytest.mark.parametrize("bound", [-1, math.inf, math.nan])
def test_a_weight_bound_that_is_negative_or_not_finite_is_rejected(bound):
    with pytest.raises(ConfigError, match="weight_bound must be finite and >= 0"):
        EmbeddingConfig(weight_bound=bound)
