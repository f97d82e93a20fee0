"""Trainers that differ: what they train is what plain torch would."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from tests.support import differing_trainers
from tests.support.remote_job import Servers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ADAGRAD = partial(torch.optim.Adagrad, **differing_trainers.ADAGRAD)
SGD = partial(torch.optim.SGD, lr=0.01)


def train(folder, world_size, names):
    """Train on servers of each training; return rows by name and rank."""
    with contextlib.ExitStack() as stack:
        addresses = {n: stack.enter_context(Servers(2)).addresses for n in names}
        mp.start_processes(
            differing_trainers.run,
            (world_size, addresses, folder),
            nprocs=world_size,
            start_method="spawn",
        )
    return {
        name: [np.load(folder / f"{name} {r}.npz") for r in range(world_size)]
        for name in names
    }


def assert_rows(found, expected):
    for of_rank in found:
        np.testing.assert_allclose(of_rank["rows"], expected, rtol=1e-5, atol=1e-6)


def warnings(folder, rank):
    return (folder / f"warnings {rank}").read_text()


def test_two_trainers_that_differ_train_as_plain_torch_does(tmp_path):
    found = train(tmp_path, 2, differing_trainers.OF_TWO)
    assert_rows(found["hot"], differing_trainers.expected(ADAGRAD, [20, 20]))
    assert_rows(found["evaluates"], differing_trainers.expected(ADAGRAD, [12, 12]))
    linear = differing_trainers.expected(SGD, [20, 20], is_linear=True)
    for name in [name for name in found if name.startswith("slow")]:
        assert_rows(found[name], linear)
    for rank in range(2):
        assert "pending" not in warnings(tmp_path, rank)
        assert "no reply from" not in warnings(tmp_path, rank)


def test_trainers_of_which_two_end_early_train_as_plain_torch_does(tmp_path):
    found = train(tmp_path, 4, differing_trainers.OF_FOUR)
    nums = differing_trainers.NUM_BATCHES
    assert_rows(found["ends"], differing_trainers.expected(ADAGRAD, nums))
