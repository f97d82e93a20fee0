"""Where a dense model may lie."""

import pytest
import torch
from torch import nn

from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.serving.predictor import (
    Predictor,
    choose_device,
    following_model,
    load_model,
)
from tests.support.one_feature import FEATURE
from tests.support.processes import wait_until


def save(folder, weight):
    """Save a model that multiplies by a weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.script(model).save(folder / "jit_dense.pt")


def loaded(path):
    model = load_model(path, "jit_dense.pt")
    return model.module(torch.ones(1)).item(), model.path


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
    predictor = Predictor(reader, load_model(tmp_path, "jit_dense.pt"))
    later.mkdir()
    (later / "jit_dense.pt").write_bytes(b"no model")
    (later / "manifest.json").touch()
    with following_model(predictor, tmp_path, "jit_dense.pt", poll_s=0.001):
        wait_until(lambda: "keeping the previous model" in caplog.text, "it is logged")
    assert "checkpoint-00000002/jit_dense.pt must be a TorchScript model" in caplog.text
    assert predictor.model.path == str(first / "jit_dense.pt")


def sees(monkeypatch, num_devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)


def test_a_gpu_predicts_where_there_is_one(monkeypatch):
    sees(monkeypatch, 2)
    devices = [str(choose_device("auto", replica)) for replica in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(choose_device("cuda")) == "cuda:0"
    assert str(choose_device("cpu")) == "cpu"
    sees(monkeypatch, 0)
    assert str(choose_device("auto", 1)) == "cpu"
    must = r"cuda one that this process sees\. Received: cuda, and 0 CUDA devices"
    with pytest.raises(ConfigError, match=must):
        choose_device("cuda")
    with pytest.raises(ConfigError, match=r"must be cpu, cuda or auto.* Received: mps"):
        choose_device("mps")


def test_a_model_is_loaded_to_the_device_of_the_reader(tmp_path, servers, monkeypatch):
    wanted = []
    load = torch.jit.load

    def note(data, map_location, extra_files):
        wanted.append(str(map_location))
        return load(data, map_location="cpu")

    monkeypatch.setattr(torch.jit, "load", note)
    save(tmp_path / "checkpoint-00000001", 1.0)
    (tmp_path / "checkpoint-00000001" / "manifest.json").touch()
    gpu = torch.device("cuda", 1)
    model = load_model(tmp_path, "jit_dense.pt", gpu)
    lookup = SlotsLookup(servers.client(servers.start(1)), [FEATURE])
    predictor = Predictor(SlotsReader(lookup, gpu), model)
    with following_model(predictor, tmp_path, "jit_dense.pt", poll_s=0.01):
        save(tmp_path / "checkpoint-00000002", 2.0)
        (tmp_path / "checkpoint-00000002" / "manifest.json").touch()
        wait_until(lambda: predictor.model != model, "the later model")
    assert wanted == ["cuda:1", "cuda:1"]
