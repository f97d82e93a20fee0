"""Where a dense model may lie."""

import torch
from torch import nn

from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.serving.embeddings import SlotsReader
from persia_torchrec.serving.predictor import Predictor, following_model, load_model
from tests.support.one_feature import FEATURE
from tests.support.processes import wait_until


def save(folder, weight):
    """Save a model that multiplies by a weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.script(model).save(folder / "jit_dense.pt")


def loaded(path):
    model, file = load_model(path, "jit_dense.pt")
    return model(torch.ones(1)).item(), file


def test_the_model_of_the_latest_complete_checkpoint_or_of_the_run_is_loaded(tmp_path):
    for number, weight in ((1, 1.0), (2, 2.0), (3, 3.0)):
        save(tmp_path / f"checkpoint-{number:08d}", weight)
        if number < 3:  # the last one is not complete
            (tmp_path / f"checkpoint-{number:08d}" / "manifest.json").touch()
    second = tmp_path / "checkpoint-00000002"
    assert loaded(tmp_path) == (2.0, str(second / "jit_dense.pt"))
    assert loaded(tmp_path / "checkpoint-00000001")[0] == 1.0
    save(tmp_path, 9.0)  # as a dump leaves a copy of an earlier one
    assert loaded(tmp_path)[0] == 2.0
    (second / "jit_dense.pt").unlink()
    assert loaded(tmp_path) == (9.0, str(tmp_path / "jit_dense.pt"))


def test_the_previous_model_stays_where_a_later_one_cannot_be_loaded(
    tmp_path, servers, caplog
):
    first, later = [tmp_path / f"checkpoint-{number:08d}" for number in (1, 2)]
    save(first, 1.0)
    (first / "manifest.json").touch()
    reader = SlotsReader(SlotsLookup(servers.client(servers.start(1)), [FEATURE]))
    predictor = Predictor(reader, *load_model(tmp_path, "jit_dense.pt"))
    later.mkdir()
    (later / "jit_dense.pt").write_bytes(b"no model")
    (later / "manifest.json").touch()
    with following_model(predictor, tmp_path, "jit_dense.pt", poll_s=0.001):
        wait_until(lambda: "the previous model stays" in caplog.text, "it is logged")
    assert "checkpoint-00000002/jit_dense.pt must be a TorchScript model" in caplog.text
    assert predictor.name == str(first / "jit_dense.pt")
