"""Models that run code when they are loaded, and who may have written them."""

import io
import os

import fsspec
import msgspec
import pytest
import torch
from torch import nn

from persia_torchrec.checkpoint.signature import ModelSignature
from persia_torchrec.errors import ConfigError
from persia_torchrec.serving.predictor import Trust, load_model
from persia_torchrec.sharding.dense_half import Arguments, ExportedModel

ANOTHER = 12345  # a user
FACTORY = f"{__name__}:make"
made = []


class Reads(nn.Module):
    """Reads a file of the server, as TorchScript may."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.from_file("/etc/passwd", False, 4, dtype=torch.uint8)


def make():
    made.append(1)
    return nn.Module()


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    torch.jit.script(Reads()).save(folder / "jit_dense.pt")
    (folder / "jit_dense.pt").chmod(0o644)
    return folder / "jit_dense.pt"


def load(path, **trusted):
    return load_model(path, "jit_dense.pt", trust=Trust(**trusted))


def test_torchscript_of_this_user_is_loaded(script):
    assert load(script.parent).module(torch.ones(1)).numel() == 4


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_torchscript_that_others_may_write_is_not_loaded(script, mode, is_folder):
    one = script.parent if is_folder else script
    one.chmod(one.stat().st_mode | mode)
    link = script.parent.parent / "link"
    link.symlink_to(script.parent)
    for path in (script.parent, link):
        with pytest.raises(ConfigError, match=r"has mode .*--allow-torchscript"):
            load(path)
    load(script.parent, torchscript=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("is_folder", [False, True])
def test_torchscript_of_another_user_is_not_loaded(script, is_folder):
    os.chown(script.parent if is_folder else script, ANOTHER, ANOTHER)
    with pytest.raises(ConfigError, match=f"belongs to user {ANOTHER}"):
        load(script.parent)


def test_torchscript_behind_a_url_is_not_loaded(script):
    with fsspec.open("memory://trust/jit_dense.pt", "wb") as file:
        file.write(script.read_bytes())
    with pytest.raises(ConfigError, match=r"behind a URL.*--allow-torchscript"):
        load("memory://trust")
    load("memory://trust", torchscript=True)


def test_a_factory_that_a_file_alone_names_is_not_called(tmp_path):
    about = ExportedModel(ModelSignature((), (), ()), (), Arguments((), 0), FACTORY)
    state = {"about": msgspec.json.encode(about).decode(), "weights": {}}
    file = io.BytesIO()
    torch.save(state, file)
    (tmp_path / "serving_model.pt").write_bytes(file.getvalue())
    for factories in ((), ("os:abort",)):
        with pytest.raises(ConfigError, match=f"--factory {FACTORY}"):
            load_model(tmp_path, "serving_model.pt", trust=Trust(factories))
    assert not made
    load_model(tmp_path, "serving_model.pt", trust=Trust((FACTORY,)))
    assert made
