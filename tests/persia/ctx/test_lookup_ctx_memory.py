"""Batches are copied between the user's arrays and the model, as by PERSIA."""

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

from persia_torchrec import from_torchrec, to_torchrec
from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader, IterableDataset, IterableDatasetBase
from persia_torchrec.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.kjt import to_batch
from tests.support.local_job import LocalJob
from tests.support.servers import ids_of

NUM_BATCHES = 8


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("job")
        with LocalJob(folder, monkeypatch, num_servers=1) as job:
            yield job


@pytest.fixture
def ctx(job):
    with job.train_ctx(Doubling(), lr=0.0) as ctx:
        yield ctx


class Doubling(torch.nn.Module):
    """Doubles its dense features in place."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, non_id_tensors, embeddings):
        return non_id_tensors[0].mul_(2) * self.weight + 0 * embeddings[0].sum()


def batch_of(ids, x, y):
    return PersiaBatch(
        [IDTypeFeatureWithSingleID("item", ids)], [NonIDTypeFeature(x)], [Label(y)]
    )


class Refilled(IterableDataset):
    """Fills the same arrays for each batch; ``convert`` makes of it what is yielded."""

    def __init__(self, convert=lambda batch: batch):
        super().__init__()
        self._convert = convert

    def __iter__(self):
        ids, x, y = np.empty(1, np.uint64), *np.empty((2, 1, 1), np.float32)
        for number in range(NUM_BATCHES):
            ids[:], x[:], y[:] = number + 1, number, number
            yield self._convert(batch_of(ids, x, y))


class Sending(IterableDatasetBase):
    """The same by a ``consume_dataset`` of the user's own, which sends all ahead."""

    def consume_dataset(self):
        for batch in Refilled():
            self.sender.send(batch)
        yield from range(NUM_BATCHES)


MAKERS = {
    "PersiaBatch": Refilled(),
    "consume_dataset": Sending(),
    "Batch": Refilled(to_batch),
    "TorchRecBatch": Refilled(to_torchrec),
    "from_torchrec": Refilled(lambda batch: from_torchrec(to_torchrec(batch))),
}


@pytest.mark.parametrize("made", MAKERS)
def test_a_data_set_may_fill_the_same_arrays_for_each_batch(job, ctx, made):
    seen = []
    ctx.clear_embeddings()
    for batch in DataLoader(MAKERS[made]):
        output, (label,) = ctx.forward(batch)
        ctx.backward(output.sum())
        seen.append((output.item(), label.item()))
    assert seen == [(2 * number, number) for number in range(NUM_BATCHES)]
    ctx.embeddings.flush()
    assert job.num_rows() == NUM_BATCHES


@pytest.mark.parametrize("made", MAKERS)
def test_torchrecs_batches_keep_no_array_of_the_data_set(made):
    batches = list(DataLoader(MAKERS[made], as_torchrec=True))
    assert [b.sparse_features.values().item() for b in batches] == list(range(1, 9))
    assert [b.dense_features.item() for b in batches] == list(range(8))
    assert [b.labels.item() for b in batches] == list(range(8))


def by_loader(ctx, batch):
    (looked_up,) = DataLoader([batch])
    return looked_up


WAYS = {
    "DataLoader([batch])": by_loader,
    "forward(batch)": lambda ctx, batch: batch,
    "get_embedding_from_data": lambda ctx, batch: ctx.get_embedding_from_data(batch),
    "from a bytearray": lambda ctx, batch: ctx.get_embedding_from_bytes(batch),
    "from bytes": lambda ctx, batch: ctx.get_embedding_from_bytes(bytes(batch)),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_changes_its_inputs_changes_no_data_of_the_user(
    ctx, way, evaluates
):
    x, y = np.ones((2, 1, 1), np.float32)
    given = batch_of(ids_of(1), x, y)
    if "bytes" in way or "bytearray" in way:
        given = bytearray(given.to_bytes())
    before, outputs = bytes(given) if isinstance(given, bytearray) else None, []
    for _ in range(3):
        if evaluates:
            with eval_ctx(model=ctx.model) as inner:
                output, (label,) = inner.forward(WAYS[way](inner, given))
        else:
            output, (label,) = ctx.forward(WAYS[way](ctx, given))
        outputs.append((output.item(), label.item()))
        label.sub_(1)
    assert outputs == [(2.0, 1.0)] * 3
    assert (x.item(), y.item()) == (1, 1)
    assert before is None or given == before


def test_a_torchrec_batch_of_the_user_is_unchanged(ctx):
    batch = to_batch(batch_of(ids_of(1), *np.ones((2, 1, 1), np.float32)))
    for _ in range(2):
        assert ctx.forward(batch)[0].item() == 2
    assert batch.dense_features.item() == 1


class Marked(Batch):
    """A batch of TorchRec's with an attribute of the user's own."""


def test_a_copied_batch_of_torchrecs_keeps_its_class_and_attributes():
    made = to_batch(batch_of(ids_of(1), *np.ones((2, 1, 1), np.float32)))
    marked = Marked(made.dense_features, made.sparse_features, made.labels)
    marked.source = "file 7"
    (batch,) = DataLoader([marked], as_torchrec=True)
    assert (type(batch), batch.source) == (Marked, "file 7")
    assert batch.dense_features.data_ptr() != made.dense_features.data_ptr()


class Reader(list):
    """Says of its batches what those of files say."""

    makes_new_memory = True


def test_a_batch_in_new_memory_is_not_copied_again():
    made = to_batch(batch_of(ids_of(1), *np.ones((2, 1, 1), np.float32)))
    (batch,) = DataLoader(Reader([made]), as_torchrec=True)
    assert batch is made
