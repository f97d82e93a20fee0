"""The benchmark of training: its figures, and that it notices what is wrong."""

import json
import math

import numpy as np
import pytest
import torch.distributed as dist

from persia_torchrec.bench.__main__ import main
from persia_torchrec.bench.training_batches import draw_batches, ids_by_table
from persia_torchrec.bench.training_models import plain_trainer, remote_trainer
from persia_torchrec.bench.training_servers import TrainingServer, fill
from persia_torchrec.bench.training_settings import NUM_TABLES, TrainingSettings
from persia_torchrec.bench.training_turns import (
    require_all_applied,
    require_same_losses,
)
from persia_torchrec.errors import ConfigError, StoreError

SETTINGS = TrainingSettings(
    dims=(4,), rows=(600,), table_rows=50, batch_size=8, batches=2
)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.multiprocess
@pytest.mark.timeout(180)  # the first compiles the store's loops, once for a machine
def test_the_models_take_turns(tmp_path, capsys):
    path = tmp_path / "training.json"
    argv = ["training", "--tiny", "--json", str(path)]
    assert main(argv) == 0
    report = json.loads(path.read_text())
    printed = capsys.readouterr().out
    command = f"python -m persia_torchrec.bench {' '.join(argv)}"
    assert report["command"] == command
    assert command in printed
    assert report["versions"]["torchrec"]
    rows = report["results"]["training"]["tables"]["training"]["rows"]
    assert [(row["model"], row["rows"]) for row in rows] == [
        ("plain TorchRec", None),
        ("on the server, staleness 0", 2048),
        ("on the server, staleness 8", 2048),
        ("on the server, staleness 8", 4096),
    ]
    assert rows[0]["relative"] == 1
    for row in rows:
        assert 0 < row["slowest"] <= row["median"] <= row["fastest"]
        assert math.isfinite(row["step_ms"])


def test_the_server_is_filled_with_the_rows_of_plain_torchrec(process_group, servers):
    [running] = servers.start(capacity_rows=600)
    client = servers.client([running])
    plain = plain_trainer(4, SETTINGS.table_rows)
    batches = draw_batches(SETTINGS)
    ids = ids_by_table(batches)
    trainer, sharder = remote_trainer(client, 4, SETTINGS.table_rows, staleness=0)
    fill(TrainingServer(client, 0, 600), plain, ids, SETTINGS.table_rows)
    assert client.num_rows() == [600]
    [before] = client.counters()
    losses = trainer.train(batches)
    assert client.counters()[0]["misses"] == before["misses"]
    require_same_losses(losses, plain.train(batches))
    sharder.close()


def test_every_id_of_the_batches_is_named_once_for_its_table():
    batches = draw_batches(SETTINGS)
    ids = ids_by_table(batches)
    assert len(ids) == NUM_TABLES
    for f, of_table in enumerate(ids):
        key = batches[0].sparse_features.keys()[f]
        drawn = [b.sparse_features[key].values().tolist() for b in batches]
        assert of_table.tolist() == sorted({id_ for batch in drawn for id_ in batch})


def test_batches_are_the_same_each_time_and_popular_ids_come_often():
    first, second = draw_batches(SETTINGS), draw_batches(SETTINGS)
    for a, b in zip(first, second, strict=True):
        assert a.sparse_features.values().equal(b.sparse_features.values())
        assert a.dense_features.equal(b.dense_features)
        assert a.labels.equal(b.labels)
    _, counts = np.unique(first[0].sparse_features.values(), return_counts=True)
    assert counts.max() > 5 * counts.mean()


def test_other_losses_are_noticed():
    require_same_losses([0.5, 0.25], [0.5, 0.25 * (1 + 5e-6)])
    with pytest.raises(StoreError, match=r"plain TorchRec's, \[0.5\]. Received: \[0.6"):
        require_same_losses([0.6], [0.5])


@pytest.mark.parametrize("lost", ["gradients_missed", "gradients_refused", "evictions"])
def test_a_gradient_that_reached_no_row_is_noticed(lost):
    require_all_applied({"hits": 5, lost: 0})
    with pytest.raises(StoreError, match=f"Received: .*'{lost}': 3"):
        require_all_applied({"hits": 5, lost: 3})


@pytest.mark.parametrize(
    "wrong",
    [
        {"dims": ()},
        {"dims": (6,)},
        {"rows": (0,)},
        {"staleness": (-1,)},
        {"table_rows": 1},
        {"batch_size": 0},
        {"repeats": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    [(name, _)] = wrong.items()
    with pytest.raises(ConfigError, match=rf"{name} must be .*Received: "):
        TrainingSettings(**wrong)


def test_a_setting_out_of_its_range_ends_with_an_error(tmp_path, caplog):
    path = tmp_path / "never.json"
    assert main(["training", "--dims", "5", "--json", str(path)]) == 1
    assert "dims must be multiples of 4. Received: (5,)." in caplog.text
    assert not path.exists()
