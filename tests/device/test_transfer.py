"""Copies between host and device, on a machine that need not have a device."""

import logging
import os
import threading
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from persia_torchrec.device import transfer
from persia_torchrec.device.batches import HostKeyedJaggedTensor, TorchRecBatch
from persia_torchrec.device.transfer import (
    Staging,
    ToHost,
    copy_into,
    dense_tensor,
    empty_pinned,
    join_arrays,
    register,
    to_device,
)
from persia_torchrec.rpc import slab
from tests.support.places import CPU, CUDA, ON_GPU
from tests.support.remote_job import META
from tests.support.threads import InThread

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(3, 2),
    np.arange(4, dtype=np.int64)[::2],
    np.zeros((3, 0), dtype=np.float32),
    np.array([[True], [False]]),
    np.full((200, 1), 7.0, dtype=np.float32),
    np.array(5, dtype=np.int32),
]


@pytest.fixture
def pinned(monkeypatch):
    """Return the tensors that were pinned, on a machine that cannot pin any."""
    tensors, empty = [], torch.empty

    def empty_noted(*args, pin_memory=False, **kwargs):
        tensor = empty(*args, **kwargs)
        if pin_memory:
            tensors.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", empty_noted)
    return tensors


@pytest.fixture
def torchs_pins(monkeypatch):
    """Return the tensors that torch's own ``pin_memory`` was called of."""
    tensors = []

    def pin_memory(tensor, device=None):
        tensors.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return tensors


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=ON_GPU, id="a GPU")])
def test_arrays_come_as_they_are(device):
    arrays = [array.copy() for array in ARRAYS]
    arrays[0].flags.writeable = False
    staged = Staging(device).start(arrays)
    arrays[4][:] = 0  # too late
    for tensor, array in zip(staged.wait(), ARRAYS, strict=True):
        assert tensor.device.type == device.type
        assert tensor.shape == array.shape
        assert tensor.cpu().numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    assert Staging(device).start([]).wait() == ()


def test_arrays_of_one_dtype_share_a_copy_and_begin_where_kernels_want_them():
    first, _, empty, _, last, _ = Staging(CPU).start(ARRAYS).wait()
    storages = {t.untyped_storage().data_ptr() for t in (first, empty, last)}
    assert len(storages) == 1
    assert (last.storage_offset() - first.storage_offset()) * 4 % 512 == 0


def test_two_waits_return_two_tensors():
    """So that autograd's graph does not refer to the batch, which refers to it."""
    staged = Staging(CPU).start(ARRAYS)
    (first, *_), (again, *_) = staged.wait(), staged.wait()
    assert first is not again
    first.requires_grad_()
    assert not again.requires_grad


class Stream:
    def __init__(self, device=None):
        self.device = device
        self.calls = []

    def record_event(self):
        self.calls.append("record_event")
        return self

    def wait_event(self, event):
        self.calls.append(("wait_event", event))


def test_a_thread_copies_on_its_own_device_by_a_side_stream(monkeypatch, pinned):
    """Without any, it would make a context on the first device of the host."""
    entered, compute = [], Stream()

    def enter(device):
        entered.append((threading.get_ident(), device))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    to = torch.Tensor.to
    blocking = []

    def moved(tensor, device, non_blocking=False):
        blocking.append(not non_blocking)
        return to(tensor, CPU)

    monkeypatch.setattr(torch.Tensor, "to", moved)
    staging = Staging(torch.device("cuda", 1))
    thread = InThread(staging.start, ARRAYS)
    staged = thread.result()
    assert entered == [(thread.ident, torch.device("cuda", 1))]
    assert blocking == [False] * 4  # one copy per dtype
    assert len(pinned) == 4
    (side,) = {staging._stream}
    assert side.calls == ["record_event"]
    assert compute.calls == []
    staged.wait()
    assert compute.calls == [("wait_event", side)]


def test_memory_that_cannot_be_pinned_is_pageable_with_one_line(monkeypatch, caplog):
    transfer._tell_once.cache_clear()
    empty = torch.empty

    def reject(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nof the host")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", reject)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tensor = empty_pinned((2, 3), torch.float32)
            joined = join_arrays([np.arange(2), np.arange(3)], is_pinned=True)
    assert tensor.shape == (2, 3)
    assert joined.tolist() == [0, 1, 0, 1, 2]
    (record,) = caplog.records
    assert (
        "copies to the device are synchronous: CUDA error: out of memory. "
        in record.message
    )
    transfer._tell_once.cache_clear()


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=ON_GPU, id="a GPU")])
def test_an_array_of_any_memory_is_copied_into_a_tensor(device):
    bits = bytes(range(256)) * 2**16  # 16 MiB, which is more than one copy takes
    whole = np.frombuffer(bits, np.int16)
    for array in (
        whole,
        whole[:0],
        whole[1:7],
        np.frombuffer(memoryview(bits)[1:19], np.int16),
    ):
        out = torch.empty(len(array), dtype=torch.int16, device=device)
        copy_into(out, [array[:3], array[3:]])
        np.testing.assert_array_equal(out.cpu().numpy(), array)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_out_of_memory_that_processes_share(monkeypatch):
    monkeypatch.setattr(slab, "_pin", None)
    slab.pin_with(partial(register, CUDA))
    for _ in range(3):  # the next has the addresses of the previous
        fd = slab.make_memory(3 * slab.PINNED)
        shared = slab.Slab(fd)
        os.close(fd)
        shared.touch(shared.size_bytes)
        whole = shared.bytes.view(np.float32)
        whole[:] = np.random.default_rng(1).random(len(whole), dtype=np.float32)
        for array in (whole[: slab.PINNED // 2], whole[5:-3]):
            assert torch.from_numpy(array[:9]).is_pinned()
            out = torch.empty(len(array), device=CUDA)
            copy_into(out, [array])
            np.testing.assert_array_equal(out.cpu().numpy(), array)
        del shared, whole, array


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=ON_GPU, id="a GPU")])
def test_a_small_tensor_comes_to_the_host_without_a_wait(device):
    copy = ToHost(torch.tensor([1.0, 2.0], device=device), until_then=0.0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert copy.is_here()
    assert copy.read().tolist() == [1.0, 2.0]


def batch(ids):
    return TorchRecBatch(
        id_features=ids,
        dense_features=(torch.rand(2, 3),),
        labels=(torch.rand(2), torch.rand(2)),
        fraction=0.5,
    )


def kjt():
    return KeyedJaggedTensor(
        ["ad"], torch.tensor([7, 8]), torch.ones(2), lengths=torch.tensor([1, 1])
    )


def test_a_batch_is_pinned_and_ids_that_stay_are_not(pinned, torchs_pins):
    given = batch(kjt())
    found = given.pin_memory()
    assert len(pinned) == 3
    assert len(torchs_pins) == 3  # values, weights and lengths
    assert found.fraction == 0.5
    assert found.id_features is not given.id_features
    assert found.id_features.values().tolist() == [7, 8]
    for name in ("dense_features", "labels"):
        pairs = zip(getattr(found, name), getattr(given, name), strict=True)
        for one, other in pairs:
            assert one is not other
            assert torch.equal(one, other)
    stays = batch(HostKeyedJaggedTensor.of(kjt()))
    assert stays.pin_memory().id_features is stays.id_features
    assert len(torchs_pins) == 3


def test_a_tensor_of_the_host_goes_to_a_device_by_pinned_memory(pinned):
    tensor = torch.tensor([1, 2])
    assert to_device(tensor, CPU) is tensor
    assert not pinned
    moved = to_device(tensor, META)
    assert moved.device == META
    assert to_device(moved, META) is moved
    assert dense_tensor(np.zeros((2, 1), dtype=np.float32), META).device == META
    assert [len(tensor) for tensor in pinned] == [2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torchs_loader_pins_a_batch():
    (found,) = DataLoader([batch(kjt())], batch_size=None, pin_memory=True)
    assert found.id_features.values().is_pinned()
    assert all(t.is_pinned() for t in (*found.dense_features, *found.labels))


def test_an_embedding_may_be_staged_and_trained(pinned):
    """A view of the buffer is an ordinary input."""
    (rows, *_) = Staging(CPU).start(ARRAYS).wait()
    layer = nn.Linear(2, 1)
    rows.requires_grad_()
    layer(rows).sum().backward()
    assert torch.equal(rows.grad, layer.weight.detach().expand(3, 2))
