import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from persia_torchrec import prelude
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.persia import utils
from persia_torchrec.persia.utils import dump_yaml, load_yaml, setup_seed


@pytest.fixture
def _determinism_is_put_back(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def draw():
    global_numpy = np.random.rand()  # noqa: NPY002  # what setup_seed seeds
    return random.random(), global_numpy, torch.rand(1).item()


@pytest.mark.usefixtures("_determinism_is_put_back")
def test_the_same_seed_gives_the_same_numbers():
    setup_seed(3)
    first = draw()
    setup_seed(3)
    assert draw() == first
    setup_seed(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.usefixtures("_determinism_is_put_back")
def test_torch_allows_no_random_kernel_afterwards():
    setup_seed(3)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("_determinism_is_put_back")
def test_memory_is_not_filled_before_it_is_used():
    """As torch does in deterministic mode: all buffers would be written twice."""
    setup_seed(3)
    assert not torch.utils.deterministic.fill_uninitialized_memory
    many = [torch.empty(10) for _ in range(3)]
    assert not all(tensor.isnan().all() for tensor in many)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_its_range_is_rejected(seed):
    with pytest.raises(ConfigError, match=r"seed must be in \[0, 4294967295\]"):
        setup_seed(seed)


def test_yaml_comes_back_as_it_was_and_in_order(tmp_path):
    path = tmp_path / "a.yml"
    data = {"zeta": [1, 2.5, None, True], "alpha": {"name": "\u00e9t\u00e9"}}
    dump_yaml(data, path)
    assert load_yaml(path) == data
    assert list(load_yaml(str(path))) == ["zeta", "alpha"]
    dump_yaml([1], path)
    assert load_yaml(path) == [1]


def test_data_without_a_plain_form_leave_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.yml"
    dump_yaml({"a": 1}, path)
    with pytest.raises(ConfigError, match="content must be made of dicts, lists"):
        dump_yaml({"a": object()}, path)
    assert load_yaml(path) == {"a": 1}


def test_a_missing_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"b\.yml must be a text file"):
        load_yaml(tmp_path / "b.yml")


def test_a_command_runs_to_its_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(utils, "PERSIA_LAUNCHER_VERBOSE", True)
    code = "import os, pathlib; pathlib.Path(os.environ['TO']).write_text('done')"
    utils.run_command([sys.executable, "-c", code], {"TO": str(tmp_path / "file")})
    assert (tmp_path / "file").read_text() == "done"
    assert capfd.readouterr().err.startswith(f"execute command: {sys.executable} -c ")
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        utils.run_command([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_program_beside_this_python_has_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(utils.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "persia-launcher").touch()
    path = str(tmp_path / "persia-launcher")
    assert utils.resolve_binary_execute_path("persia-launcher") == path
    with pytest.raises(
        ConfigError, match="Received: 'persia-embedding-worker', and no"
    ):
        utils.resolve_binary_execute_path("persia-embedding-worker")


def test_the_arrays_that_a_batch_may_have_are_known_beforehand():
    for dtype in (np.bool_, np.int64, np.float32):
        prelude.check_pyarray_dtype_valid(np.zeros(1, dtype), np.dtype(dtype))
    with pytest.raises(BatchError, match="'income' must have one of the dtypes"):
        prelude.check_pyarray_dtype_valid(np.zeros(1, "c8"), np.dtype("c8"), "income")
    assert prelude.is_cuda_feature_available() is (torch.version.cuda is not None)
