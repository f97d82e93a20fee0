import os
import random

import numpy as np
import pytest
import torch

from persia_torchrec.errors import ConfigError
from persia_torchrec.utils import dump_yaml, load_yaml, setup_seed


@pytest.fixture
def _determinism_is_put_back(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


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


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_its_range_is_refused(seed):
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


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"b\.yml must be a text file"):
        load_yaml(tmp_path / "b.yml")
