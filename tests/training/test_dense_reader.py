"""torch's files of the dense half are read without running what they name."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError
from persia_torchrec.training.dense_reader import (
    LoadPlanner,
    SavePlanner,
    reader_of,
    writer_of,
)


def save(path, state):
    dcp.save(
        state,
        storage_writer=writer_of(Folder(str(path))),
        planner=SavePlanner(),
        no_dist=True,
    )


def load(path, state, *, resets=False):
    planner = LoadPlanner()
    planner.resets = resets
    dcp.load(
        state,
        storage_reader=reader_of(Folder(str(path))),
        planner=planner,
        no_dist=True,
    )
    return state


def test_what_was_saved_is_loaded(tmp_path):
    save(tmp_path, {"weight": torch.arange(4.0), "step": 7})
    found = load(tmp_path, {"weight": torch.zeros(4), "step": 0})
    assert found["weight"].tolist() == [0, 1, 2, 3]
    assert found["step"] == 7


def test_what_has_changed_is_an_error_that_names_all_of_it_or_stays(tmp_path, caplog):
    save(tmp_path, {"weight": torch.arange(4.0), "bias": torch.ones(1)})
    model = {"weight": torch.zeros(5), "bias": torch.zeros(1), "more": torch.zeros(2)}
    changed = r"more is new; weight has shape \[5\], and had"
    with pytest.raises(dcp.CheckpointException, match=changed):
        load(tmp_path, model)
    found = load(tmp_path, model, resets=True)
    assert found["weight"].tolist() == [0.0] * 5
    assert found["bias"].tolist() == [1.0]
    assert "more is new" in caplog.text


class Runs:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "damage", [pickle.dumps(Runs()), b"", b"no pickle", pickle.dumps({"a": 1})]
)
def test_a_list_that_names_anything_else_is_rejected_unread(tmp_path, capsys, damage):
    save(tmp_path, {"weight": torch.arange(4.0)})
    (tmp_path / ".metadata").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"\.metadata must (be torch's )?list"):
        reader_of(Folder(str(tmp_path))).read_metadata()
    assert capsys.readouterr().out == ""
