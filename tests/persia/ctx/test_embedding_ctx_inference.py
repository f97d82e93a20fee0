"""Inference by the addresses of embedding workers."""

import numpy as np
import pytest
import torch

from persia_torchrec.ctx import InferCtx, eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    Origin,
    PersiaBatch,
    decode_rest,
    encode_rest,
)
from tests.support.local_job import Batches, LocalJob, SumOfEmbeddings, batch_of
from tests.support.servers import DEADLINE_S, ids_of

pytestmark = pytest.mark.slow

TWO_SLOTS = """
feature_index_prefix_bit: 8
slots_config:
  item: {dim: 4, sqrt_scaling: true}
  last: {dim: 3, sample_fixed_size: 2, embedding_summation: false}
"""


def batch_of_two(item, last, **settings):
    features = [
        IDTypeFeature(name, [ids_of(*sample) for sample in samples])
        for name, samples in (("item", item), ("last", last))
    ]
    return PersiaBatch(features, requires_grad=False, **settings)


EVALUATION = batch_of_two([[1, 2], [99], []], [[5], [], [6, 5, 7]])


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Yield a job that has trained, its context, and the addresses of its workers."""
    with LocalJob(tmp_path, monkeypatch, TWO_SLOTS, num_workers=2) as job:
        model = SumOfRows()
        config = EmbeddingConfig((1, 2))
        with job.train_ctx(model, embedding_config=config) as ctx:
            batch = batch_of_two([[1, 2], [3]], [[5, 6], [7]])
            training = [
                PersiaBatch(batch.id_type_features, labels=batch_of([], []).labels)
            ]
            for looked_up in DataLoader(Batches(training)):
                ctx.backward(ctx.forward(looked_up)[0].sum())
            with eval_ctx():  # waits for the update
                pass
            monkeypatch.delenv("PERSIA_STORE_PORT")
            monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG")
            yield job, ctx, [worker.address for worker in job.workers]


class SumOfRows(SumOfEmbeddings):
    """Sums up embeddings of any number of dimensions."""

    def forward(self, non_id_tensors, embeddings):
        flat = [embedding.flatten(start_dim=1) for embedding in embeddings]
        return super().forward(non_id_tensors, flat)


def test_a_batch_whose_ids_wait_with_a_worker_is_rejected(trained):
    _, _, addresses = trained
    data = bytearray(encode_rest(EVALUATION))
    referenced = decode_rest(data, Origin(0, 1, 0))
    with (
        InferCtx(addresses) as infer,
        pytest.raises(BatchError, match="must have its ids"),
    ):
        infer.embeddings.look_up(referenced)


@pytest.mark.parametrize("spelling", ["tcp://127.0.0.1:", "127.0.0.1:"])
def test_inference_gives_what_an_evaluation_gives(trained, spelling):
    _, ctx, addresses = trained
    addresses = [a.replace("tcp://127.0.0.1:", spelling) for a in addresses]
    with eval_ctx() as evaluation, torch.no_grad():
        batch = evaluation.get_embedding_from_data(EVALUATION)
        _, expected, _ = evaluation.prepare_features(batch)
        expected_output, _ = evaluation.forward(batch)
    with InferCtx(addresses, ctx.model) as infer, torch.no_grad():
        infer.wait_for_serving(DEADLINE_S)
        batch = infer.get_embedding_from_bytes(EVALUATION.to_bytes())
        _, embeddings, labels = infer.prepare_features(batch)
        output, _ = infer.forward(batch)
    assert labels is None
    assert [e.shape for e in embeddings] == [(3, 4), (3, 2, 4)]
    for embedding, of_evaluation in zip(embeddings, expected, strict=True):
        assert torch.equal(embedding, of_evaluation)
        assert not embedding.requires_grad
    assert torch.equal(output, expected_output)
    assert expected_output.any()


def test_inference_changes_nothing(trained):
    job, _, addresses = trained
    rows = job.read("item", 1, 2, 3)
    num_rows, num_lookups = job.num_rows(), job.total("requests_lookup")
    with InferCtx(addresses) as infer:
        # Also with a batch that was made for training.
        feature = IDTypeFeature("item", [ids_of(1, 98), ids_of(97)])
        last = IDTypeFeature("last", [ids_of(96), ids_of()])
        labels = batch_of([], []).labels
        infer.get_embedding_from_data(PersiaBatch([feature, last], labels=labels))
        assert infer.get_embedding_size() == job.client.num_rows()
    assert job.num_rows() == num_rows
    assert job.total("requests_lookup") > num_lookups
    assert np.array_equal(job.read("item", 1, 2, 3), rows)


def test_a_loader_may_be_iterated_over(trained):
    _, ctx, addresses = trained
    with InferCtx(addresses, ctx.model) as infer, torch.no_grad():
        outputs = [
            infer.forward(batch)[0] for batch in DataLoader(Batches([EVALUATION] * 3))
        ]
    assert len(outputs) == 3
    assert torch.equal(outputs[0], outputs[2])


def test_labels_are_not_looked_at(trained):
    _, _, addresses = trained
    feature = batch_of_two([[1]], [[5]]).id_type_features
    with InferCtx(addresses) as infer:
        batch = PersiaBatch(feature, labels=batch_of([]).labels, requires_grad=False)
        _, _, labels = infer.prepare_features(infer.get_embedding_from_data(batch))
    assert labels is None


def test_a_batch_may_have_no_slots_but_those_of_the_workers(trained):
    _, _, addresses = trained
    batch = batch_of([1], name="itme", requires_grad=False)
    unknown = pytest.raises(BatchError, match=r"'item', 'last'.*unknown \['itme'\]")
    with InferCtx(addresses) as infer, unknown:
        infer.get_embedding_from_data(batch)


def test_a_context_without_a_model_only_looks_up(trained):
    _, _, addresses = trained
    with InferCtx(addresses) as infer:
        batch = infer.get_embedding_from_data(EVALUATION)
        with pytest.raises(ConfigError, match="must have a model"):
            infer.forward(batch)


def test_a_wait_ends_with_what_is_missing(tmp_path, monkeypatch):
    job = LocalJob(tmp_path, monkeypatch)
    with job, InferCtx([job.workers[0].address]) as infer:
        with pytest.raises(RequestTimeoutError, match=r"0\.2 s.*Table 'item'"):
            infer.wait_for_serving(0.2)
        with job.train_ctx():
            infer.wait_for_serving(DEADLINE_S)
    with (
        InferCtx(["tcp://127.0.0.1:1"]) as infer,
        pytest.raises(RequestTimeoutError, match=r"worker 0 at tcp://127.*in 0\.\d* s"),
    ):
        infer.wait_for_serving(0.2)


def test_a_server_is_no_embedding_worker(trained):
    job, _, _ = trained
    other_role = pytest.raises(ServerError, match="must be that of embedding worker")
    with InferCtx([job.servers[0].address]) as infer, other_role:
        infer.wait_for_serving(1.0)


def test_settings_that_cannot_work_are_rejected():
    with pytest.raises(ConfigError, match="At least one address"):
        InferCtx([])
    with pytest.raises(ConfigError, match=r"'tcp://host:port'.*tcp://nonsense"):
        InferCtx(["nonsense"])
    with pytest.raises(
        ConfigError, match="device_id must be the index of a CUDA device"
    ):
        InferCtx(["127.0.0.1:1"], device_id=99)
    with pytest.raises(ConfigError, match="timeout_s must be > 0"):
        InferCtx(["127.0.0.1:1"], timeout_s=0)
