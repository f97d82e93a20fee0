import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.job import trainer_group
from persia_torchrec.job.trainer_group import (
    device_in,
    exchange_group,
    gather,
    require_own_gpu,
    waiting,
)
from persia_torchrec.training.schedule import CheckpointClock
from tests.support.processes import wait_until

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
PAIR = SimpleNamespace(size=lambda: 2)  # of trainers


@pytest.fixture
def trainers(monkeypatch):
    """A group of one trainer, of which torch may say what it likes."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def is_of(monkeypatch, backends):
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: backends)


@pytest.mark.parametrize(
    ("backends", "on_cpu", "on_gpu"),
    [
        ("cpu:gloo,cuda:gloo", CPU, GPU),
        ("cpu:gloo,cuda:nccl", CPU, GPU),
        ("cuda:nccl", GPU, GPU),
        ("cpu:gloo", CPU, GPU),
    ],
)
def test_tensors_are_where_the_group_exchanges_them(
    trainers, monkeypatch, backends, on_cpu, on_gpu
):
    is_of(monkeypatch, backends)
    assert device_in(trainers, CPU) == on_cpu
    assert device_in(trainers, GPU) == on_gpu


def test_a_clock_without_dense_gradients_counts_trainers_on_their_gpus(
    trainers, monkeypatch
):
    clock = CheckpointClock(interval_s=60)
    assert clock.join_device == CPU
    is_of(monkeypatch, "cuda:nccl")
    assert clock.join_device == GPU


def test_one_trainer_needs_no_group(trainers):
    assert exchange_group(1.0) is None
    assert gather(b"text", None) == [b"text"]


def tell(monkeypatch, *gpus):
    """Let trainers have GPUs of these ids; this one is the first."""
    own = SimpleNamespace(uuid=gpus[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: own)
    told = [json.dumps({"uuid": gpu, "host": "node7"}).encode() for gpu in gpus]
    monkeypatch.setattr(trainer_group, "exchange_group", lambda *_: None)
    monkeypatch.setattr(trainer_group, "gather", lambda *_: told)


def test_two_trainers_of_one_gpu_are_rejected_under_nccl(monkeypatch):
    is_of(monkeypatch, "cpu:gloo,cuda:nccl")
    tell(monkeypatch, "a", "b", "a")
    must = (
        r"Each trainer must have a separate GPU.* Received: trainers 0, 2 on GPU a "
        r"of host node7\. .*CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(ConfigError, match=must):
        require_own_gpu(GPU, PAIR, 1.0)
    tell(monkeypatch, "a", "b", "c")
    require_own_gpu(GPU, PAIR, 1.0)


def test_two_trainers_of_one_gpu_may_talk_by_gloo(monkeypatch):
    is_of(monkeypatch, "cpu:gloo,cuda:gloo")
    tell(monkeypatch, "a", "a")
    require_own_gpu(GPU, PAIR, 1.0)
    require_own_gpu(CPU, PAIR, 1.0)


def test_an_exchange_outlasts_a_checkpoint_and_a_server_that_is_away():
    limit_s = timeouts.exchange_s(recovery_s=900.0)
    assert limit_s > timeouts.CHECKPOINT_S + 900.0


class Group:
    """What is asked of a process group, of trainers that share a store."""

    def __init__(self, rank, size, store):
        self._rank, self._size, self._store = rank, size, store

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def get_group_store(self):
        return self._store


def test_a_long_wait_names_the_trainers_that_are_missing(monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "SAY_S", 0.05)
    store = dist.HashStore()
    first, second, _ = (Group(rank, 3, store) for rank in range(3))
    said = "a checkpoint: 1 of 3 trainers: waiting for trainer 2"
    with waiting(first, "a checkpoint"), waiting(second, "a checkpoint"):
        wait_until(lambda: caplog.text.count(f"{said}, for ") > 2, "it is named")
    assert f"s: {said}" in caplog.text  # the end
    with waiting(Group(1, 2, None), "tables"):
        only = "1 of 2 trainers: waiting for trainer 0, for "
        wait_until(lambda: only in caplog.text, "the only other one is named")
