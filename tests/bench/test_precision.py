"""The benchmark of precisions trains, tests and rounds as it says."""

import json

import numpy as np
import pytest

from persia_torchrec.bench.__main__ import main
from persia_torchrec.bench.precision_arms import (
    ARMS,
    brain_floats_at_random,
    eight_bits,
    plain_halves,
)
from persia_torchrec.bench.precision_training import (
    PrecisionSettings,
    auc_of,
    train_arm,
)
from persia_torchrec.errors import ConfigError


def test_every_arm_is_in_the_report(tmp_path, capsys):
    path = tmp_path / "precision.json"
    assert main(["precision", "--tiny", "--json", str(path)]) == 0
    tables = json.loads(path.read_text())["results"]["precision"]["tables"]
    rows = tables["quality"]["rows"]
    assert [row["name"] for row in rows] == [arm.name for arm in ARMS]
    saved = [row["bytes_saved"] for row in rows]
    assert saved[0] == 0
    assert min(saved[1:]) > 0.3
    assert all(row["there"] > 0 for row in tables["conversions"]["rows"])
    assert "| bf16 |" in capsys.readouterr().out


def test_the_planted_signal_is_learnt_the_same_each_time(servers):
    settings = PrecisionSettings(
        dim=8, num_ids=30, batch_size=512, steps=60, test_batches=8
    )
    client = servers.client(servers.start(1))
    first, again = (train_arm(client, ARMS[0], settings, seed=1) for _ in range(2))
    # Not bit for bit: torch's threads may add up in another order.
    assert again.auc == pytest.approx(first.auc, abs=1e-3)
    assert again.loss == pytest.approx(first.loss, rel=1e-3)
    assert first.auc > 0.7
    assert first.bytes_a_row == pytest.approx(16 + 2 * 4 * 8, rel=0.5)


@pytest.mark.parametrize("seed", range(3))
def test_the_auc_is_the_share_of_pairs_in_order(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, 40) / 8  # with ties
    labels = rng.integers(0, 2, 40).astype(float)
    pairs = [(p, n) for p in scores[labels == 1] for n in scores[labels == 0]]
    expected = np.mean([(p > n) + (p == n) / 2 for p, n in pairs])
    assert auc_of(scores, labels) == pytest.approx(expected)


def test_small_gradients_are_lost_in_plain_halves_and_not_otherwise():
    gradients = np.full((100, 4), 1e-9, dtype=np.float32)
    assert not plain_halves(gradients).any()
    assert brain_floats_at_random(gradients).mean() == pytest.approx(1e-9, rel=1e-3)
    assert eight_bits(gradients) == pytest.approx(gradients)


def test_brain_floats_at_random_are_the_two_neighbours():
    gradients = np.full((50, 40), 1 + 2**-9, dtype=np.float32)
    rounded = brain_floats_at_random(gradients)
    assert set(rounded.reshape(-1).tolist()) == {1.0, 1 + 2**-7}
    assert rounded.mean() == pytest.approx(1 + 2**-9, abs=3e-4)


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"steps": 0}, {"seeds": ()}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match="Received: "):
        PrecisionSettings(**wrong)
