"""Base of all contexts: the current context, and the shared settings."""

import threading

import pytest
import torch

from persia_torchrec.ctx import (
    BaseCtx,
    DataCtx,
    EmbeddingCtx,
    InferCtx,
    TrainCtx,
    cnt_ctx,
    eval_ctx,
)
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.errors import ConfigError
from tests.support.local_job import batch_of


def test_all_contexts_have_one_base():
    for context in (DataCtx, EmbeddingCtx, InferCtx, TrainCtx):
        assert issubclass(context, BaseCtx)


def test_the_current_context_is_the_one_that_was_entered_last(job):
    assert cnt_ctx() is None
    with job.train_ctx() as ctx:
        assert cnt_ctx() is ctx
        with eval_ctx() as inner:
            assert cnt_ctx() is inner
        with BaseCtx() as inner:
            assert cnt_ctx() is inner
        assert cnt_ctx() is ctx
    assert cnt_ctx() is None


def test_an_exception_takes_the_current_context_back_too(job):
    with job.train_ctx() as ctx:
        with pytest.raises(ZeroDivisionError), eval_ctx():
            raise ZeroDivisionError
        assert cnt_ctx() is ctx
    with pytest.raises(ConfigError), InferCtx([]):
        pass
    assert cnt_ctx() is None


def test_a_data_context_alongside_a_training_disturbs_neither(job):
    entered, leave = threading.Event(), threading.Event()

    def send():
        with data_ctx:
            entered.set()
            leave.wait(20)

    with job.train_ctx() as ctx:
        batches = iter(DataLoader(StreamingDataset()))
        data_ctx = job.data_ctx()
        data_ctx.send_data(batch_of([1]))
        sending = threading.Thread(target=send)
        sending.start()
        assert entered.wait(20)
        assert cnt_ctx() is data_ctx
        with eval_ctx() as inner:  # of the training
            leave.set()
            sending.join(20)
            assert cnt_ctx() is inner
        assert cnt_ctx() is ctx
        ctx.backward(ctx.forward(next(batches))[0].sum())
    assert cnt_ctx() is None


def test_a_loader_needs_a_context_that_looks_up():
    with BaseCtx(), pytest.raises(ConfigError, match="inside a context"):
        iter(DataLoader(StreamingDataset()))


def test_the_settings_are_kept_and_checked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert BaseCtx().threadpool_worker_size == 10
    assert BaseCtx(3).threadpool_worker_size == 3
    assert BaseCtx(3, None).device_id is None
    with pytest.raises(ConfigError, match=r"threadpool_worker_size must be >= 1.*: 0"):
        BaseCtx(0)
    must = r"device_id must be the index of a CUDA device.* Received: "
    with pytest.raises(ConfigError, match=must + "0"):
        BaseCtx(device_id=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=must + "1.*CUDA_VISIBLE_DEVICES"):
        BaseCtx(device_id=1)
    for other in ("mps", torch.device("mps")):
        with pytest.raises(ConfigError, match=r"no other device.* Received: .*'mps'"):
            BaseCtx(device_id=other)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"threadpool_worker_size must be >= 1"):
        DataCtx(0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=must + "0"):
        DataCtx(10, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_becomes_the_current_one():
    last = torch.cuda.device_count() - 1
    BaseCtx(device_id=last)
    assert torch.cuda.current_device() == last
    torch.cuda.set_device(0)
