"""What trainers of an earlier revision saved is resumed as that revision would have."""

import json
import random
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec import load_checkpoint, recoverable
from persia_torchrec.training.checkpoint import ContextCheckpoints, read_state
from tests.support.stored_files import FUSED, expected, hex_of, unpacked
from tests.support.stored_training import (
    TABLES,
    Trainer,
    ids_in,
    rows_in_order,
    rows_of_a_queue,
)

SERVERS = {**FUSED, "capacity_rows": 100}
CHECKPOINT = "checkpoint-00000001"


@pytest.fixture
def client(servers, group):
    """A client of two servers, for a trainer that is alone."""
    return servers.client(servers.start(2, **SERVERS))


@pytest.fixture
def run(tmp_path):
    """The folder of the checkpoints, whose delta names that of its increments."""
    folder = unpacked("training", tmp_path)
    file = folder / "run" / CHECKPOINT / "delta-00000001" / "delta.json"
    delta = json.loads(file.read_text())
    delta["increments"] = str(folder / "increments")
    file.write_text(json.dumps(delta))
    return folder / "run"


def random_numbers():
    numpy = float(np.random.rand())  # noqa: NPY002  # whose state scripts have
    return [random.random(), numpy, float(torch.rand(1))]


@pytest.mark.parametrize(
    ("name", "num_steps", "num_rest"), [("delta", 3, 0), ("checkpoint", 2, 1)]
)
def test_a_training_is_resumed_where_it_was_saved(
    client, run, name, num_steps, num_rest
):
    found = expected("training.json")
    if name == "checkpoint":
        shutil.rmtree(run / CHECKPOINT / "delta-00000001")
    trainer = Trainer(client, seed=2)
    with (
        closing(trainer.sharders),
        recoverable(
            run, trainer.state, client, trainer.sharders, interval_s=0
        ) as resumed,
    ):
        assert resumed.num_steps == num_steps
        rest = resumed.skip(trainer.data)
        first = ids_in(next(rest))
        assert {**trainer.describe(), "random": random_numbers()} == found[name]
        batches = [first, *map(ids_in, rest)]
        assert batches[num_rest:] == found["rest"]


def test_both_halves_are_loaded_by_name(client, run):
    found = expected("training.json")["delta"]
    trainer = Trainer(client, seed=2)
    del trainer.state["scheduler"], trainer.state["losses"], trainer.state["data"]
    with closing(trainer.sharders):
        saved = load_checkpoint(run, trainer.state, client)
        assert saved.step == 3
        described = trainer.describe()
    for key in ("weights", "adam", "rows", "uses", "steps"):
        assert described[key] == found[key]


def test_a_checkpoint_of_a_context_is_loaded(client, tmp_path):
    found = expected("training.json")["delta"]
    folder = unpacked("context", tmp_path)
    model = nn.Linear(4, 1)
    adam = torch.optim.Adam(model.parameters())
    targets = {"dense.pt": model, "opt.pt": adam}
    with closing(ContextCheckpoints(client, lambda: None)) as checkpoints:
        at = checkpoints.load(str(folder), targets, blocking=True)
    state = read_state(at, "training.pt")
    assert state == {"learning_rates": {"first": 0.05}, "grad_scaler": None}
    weights = [p.detach().numpy().tobytes().hex() for p in model.parameters()]
    assert weights == found["weights"]
    moments = adam.state_dict()["state"]
    assert [
        {k: v.numpy().tobytes().hex() for k, v in moments[n].items()} for n in (0, 1)
    ] == found["adam"]
    client.learn_tables()
    ids = np.arange(20, dtype=np.uint64)
    assert {t: hex_of(client.read(t, ids)) for t in TABLES} == found["rows"]


@pytest.mark.parametrize(
    ("name", "make"), [("in order", rows_in_order), ("queue", rows_of_a_queue)]
)
def test_a_stored_position_in_the_data_is_continued(name, make):
    found = expected("positions.json")[name]
    data = make()
    batches = iter(data)
    assert [ids_in(next(batches)) for _ in found["first"]] == found["first"]
    state = json.loads(json.dumps(data.state_dict()))
    assert state.get("row") == found["state"].get("row")
    assert state.get("leases", [])[:2] == found["state"].get("leases", [])
    again = make()
    again.load_state_dict(found["state"])
    assert [ids_in(batch) for batch in again] == found["rest"]
