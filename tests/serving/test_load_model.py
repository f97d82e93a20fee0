"""Where a dense model may lie."""

import torch
from torch import nn

from persia_torchrec.serving.predictor import load_model


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
    save(tmp_path, 9.0)
    assert loaded(tmp_path) == (9.0, str(tmp_path / "jit_dense.pt"))
