"""Batches of a trainer with a GPU come by pinned memory, from the loader's threads.

``Staging.DEVICES`` lets these tests take that way on the CPU.
"""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.device.transfer import Staging
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.slot_tensors import StagedSlots
from tests.support.local_job import Batches, LocalJob
from tests.support.processes import wait_until
from tests.support.servers import ids_of

SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  a: {dim: 4}
  raw: {dim: 3, embedding_summation: false, sample_fixed_size: 2}
  b: {dim: 8, sqrt_scaling: true}
"""
WIDTH = 4 + 2 * 4 + 8 + 2


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, non_id_tensors, embeddings):
        parts = [tensor.flatten(1) for tensor in (*embeddings, *non_id_tensors)]
        return self.over(torch.cat(parts, dim=1))


def batches(num, **more):
    generator = np.random.default_rng(0)

    def ids(name):
        samples = generator.integers(0, 20, (4, 3))
        return IDTypeFeature(name, [ids_of(*sample) for sample in samples])

    for _ in range(num):
        dense = generator.normal(size=(2, 4, 1)).astype(np.float32)
        features = [NonIDTypeFeature(column) for column in dense]
        label = Label(generator.integers(0, 2, (4, 1)).astype(np.float32))
        slots = [ids(name) for name in ("b", "raw", "a")]
        yield PersiaBatch(slots, non_id_type_features=features, labels=[label], **more)


def train(folder, monkeypatch):
    """Return the losses of a training, those of an evaluation, and the weights."""
    folder.mkdir()
    losses = []
    with (
        LocalJob(folder, monkeypatch, SLOTS) as job,
        job.train_ctx(Dense()) as ctx,
    ):
        loader = DataLoader(
            Batches(list(batches(8))), reproducible=True, embedding_staleness=1
        )
        for data in loader:
            output, (label,) = ctx.forward(data)
            loss = nn.functional.mse_loss(output, label)
            losses.append(loss.item())
            ctx.backward(loss)
        with eval_ctx() as evaluation:
            for data in DataLoader(Batches(list(batches(3, requires_grad=False)))):
                output, (label,) = evaluation.forward(data)
                losses.append(nn.functional.mse_loss(output, label).item())
        weights = nn.utils.parameters_to_vector(ctx.model.parameters())
        return losses, weights.detach().numpy().copy()


def test_a_training_that_is_staged_is_the_same(tmp_path, monkeypatch):
    plain = train(tmp_path / "plain", monkeypatch)
    threads = set()
    start = Staging.start

    def started(staging, arrays):
        threads.add(threading.current_thread().name.rstrip(" 0123456789"))
        return start(staging, arrays)

    monkeypatch.setattr(Staging, "DEVICES", {"cpu"})
    monkeypatch.setattr(Staging, "start", started)
    staged = train(tmp_path / "staged", monkeypatch)
    assert staged[0] == plain[0]
    assert np.array_equal(staged[1], plain[1])
    assert "MainThread" not in threads
    assert {"lookups ahead", "training pulls", "evaluation pulls"} <= threads


def test_all_of_a_batch_is_on_its_way_when_a_loader_hands_it_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Staging, "DEVICES", {"cpu"})
    with (
        LocalJob(tmp_path, monkeypatch, SLOTS) as job,
        job.train_ctx(Dense()) as ctx,
    ):
        (given,) = batches(1)
        for data in DataLoader(Batches([given])):
            assert data.pull.wait().outputs.staged is not None
            *dense, label = data.staged.wait()
            for tensor, array in zip(dense, given.non_id_type_features, strict=True):
                assert np.array_equal(tensor.numpy(), array.data)
            assert np.array_equal(label.numpy(), given.labels[0].data)
            (places,) = data.pull.outputs.places()
            assert places.dtype == torch.int32
            assert places.shape == (4, 2)
            ctx.backward(ctx.forward(data)[0].sum())


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_batch_without_labels_has_none(tmp_path, monkeypatch, has_labels):
    monkeypatch.setattr(Staging, "DEVICES", {"cpu"})
    labels = [Label(np.ones((1, 1), dtype=np.float32))] if has_labels else []
    batch = PersiaBatch(
        [IDTypeFeature("a", [ids_of(1)])], labels=labels, requires_grad=False
    )
    with (
        LocalJob(tmp_path, monkeypatch, SLOTS) as job,
        job.train_ctx(Dense()) as ctx,
    ):
        data = ctx.get_embedding_from_data(batch)
        non_id, embeddings, found = ctx.prepare_features(data)
        assert non_id == []
        assert embeddings[0].requires_grad
        assert (found is not None) is has_labels


def test_a_batch_that_does_not_fit_the_gpu_is_given_up(tmp_path, monkeypatch):
    """The error is torch's, and no worker awaits gradients of the batch."""
    monkeypatch.setattr(Staging, "DEVICES", {"cpu"})

    def reject(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def pull_one():
        with job.train_ctx(Dense()) as ctx:
            monkeypatch.setattr(StagedSlots, "__init__", reject)
            (data,) = DataLoader(Batches(list(batches(1))))
            ctx.forward(data)

    with LocalJob(tmp_path, monkeypatch, SLOTS) as job:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            pull_one()
        wait_until(lambda: job.total("open_batches") == 0, "the end of the batch")
