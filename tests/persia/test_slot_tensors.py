import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch
from persia_torchrec.persia.slot_tensors import pad_raw
from tests.support.local_job import Batches, LocalJob
from tests.support.servers import ids_of

RAW_AND_POOLED = """
feature_index_prefix_bit: 8
slots_config:
  clicks: {dim: 2, embedding_summation: false, sample_fixed_size: 3}
  item: {dim: 2}
  query:
    dim: 4
    hash_stack_config: {hash_stack_rounds: 2, embedding_size: 50}
feature_groups:
  things: [clicks, item]
"""
SAMPLES = {
    "clicks": [[7, 8, 7, 9], [], [8]],
    "item": [[7], [7, 7], []],
    "query": [[1], [2, 1], [3]],
}


class ByPlace(nn.Module):
    """Weights the vectors of a raw slot by their places, and sums up all slots."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.tensor([1.0, 10.0, 100.0]))
        self.seen = None

    def forward(self, non_id_tensors, embeddings):
        self.seen = embeddings
        clicks, item, query = embeddings
        vectors, mask = clicks[..., :-1], clicks[..., -1:]
        weighted = (vectors * mask * self.places[:, None]).sum(dim=(1, 2))
        return weighted + item.sum(dim=1) + query.sum(dim=1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, RAW_AND_POOLED) as job:
        yield job


def batch_of(samples):
    features = [
        IDTypeFeature(name, [ids_of(*sample) for sample in of_slot])
        for name, of_slot in samples.items()
    ]
    labels = np.zeros((3, 1), dtype=np.float32)
    return PersiaBatch(features, labels=[Label(labels)], requires_grad=True)


def test_a_raw_slot_has_a_vector_per_position_and_a_mask():
    rows_ND = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    places_BF = torch.tensor([[2, 1, 0], [0, 0, 0]], dtype=torch.int32)
    assert pad_raw(rows_ND, places_BF).tolist() == [
        [[3, 4, 1], [1, 2, 1], [0, 0, 0]],
        [[0, 0, 0]] * 3,
    ]


def test_raw_slots_are_padded_and_trained_by_position(job):
    model = ByPlace()
    config = EmbeddingConfig(weight_bound=0)
    with job.train_ctx(model, embedding_config=config) as ctx:
        for batch in DataLoader(Batches([batch_of(SAMPLES)]), embedding_staleness=1):
            output, _ = ctx.forward(batch)
            clicks, item, query = (tensor.detach().clone() for tensor in model.seen)
            ctx.backward(output.sum())
    assert clicks.shape == (3, 3, 3)
    assert clicks[..., -1].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    seven, eight = clicks[0, 0, :2], clicks[0, 1, :2]
    assert torch.equal(clicks[0, 2, :2], seven)
    assert torch.equal(clicks[2, 0, :2], eight)
    assert not clicks[1].any()
    torch.testing.assert_close(item[0], seven)
    torch.testing.assert_close(item[1], 2 * seven)
    # 7 stands at places 0 and 2 of a sample and three times in "item"; 8 at places 1
    # and 0; 9 has no place left.
    moved = np.array([1 + 100 + 3, 10 + 1])[:, None]
    before = torch.stack([seven, eight]).numpy()
    np.testing.assert_allclose(job.read("item", 7, 8), before - moved, rtol=1e-5)
    assert not job.read("clicks", 9).any()
    assert query.shape == (3, 4)


def test_an_evaluation_sees_raw_slots_too(job):
    with job.train_ctx(ByPlace()) as ctx:
        for batch in DataLoader(Batches([batch_of(SAMPLES)]), embedding_staleness=1):
            output, _ = ctx.forward(batch)
            ctx.backward(output.sum())
        with eval_ctx() as evaluation:
            batch = evaluation.get_embedding_from_data(batch_of(SAMPLES))
            _, (clicks, _, _), _ = evaluation.prepare_features(batch)
    expected = job.read("clicks", 7, 8)
    np.testing.assert_array_equal(clicks[0, :2, :2].numpy(), expected)
    assert not clicks.requires_grad
