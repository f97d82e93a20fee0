"""Collections whose embeddings are not pooled."""

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from persia_torchrec import SGD, RemoteEmbeddingCollectionSharder, TableSettings
from persia_torchrec.errors import BatchError, ConfigError
from tests.support.remote_job import CPU, META, kjt_of

DIM = 4
IDS = {"ad": [[1, 2], [], [-1]], "query": [[2], [2, 2], []], "extra": [[9], [], []]}


def tables():
    return [
        EmbeddingConfig(10, DIM, name="term", feature_names=["ad", "query"]),
        EmbeddingConfig(10, DIM, name="user", feature_names=["query"]),
    ]


class Sequences(nn.Module):
    """Nothing but a collection; its output is the collection's."""

    def __init__(self, **settings):
        super().__init__()
        self.sequences = EmbeddingCollection(
            tables=tables(), **{"device": META, **settings}
        )

    def forward(self, ids):
        return self.sequences(ids)


@pytest.fixture
def put(job):
    def put(optimizer=None, **settings):
        sharder = RemoteEmbeddingCollectionSharder(job.client, optimizer or SGD(1.0))
        return job.shard(Sequences(**settings), [sharder])

    return put


def test_each_feature_has_the_row_of_every_id_in_their_order(job, put):
    output = put()(kjt_of(IDS))
    assert list(output.keys()) == ["ad", "query@term", "query@user"]
    expected = {
        "ad": job.read("term", [1, 2, -1]),
        "query@term": job.read("term", [2, 2, 2]),
        "query@user": job.read("user", [2, 2, 2]),
    }
    for name, rows in expected.items():
        values = output[name].values()
        assert torch.equal(values.detach(), torch.from_numpy(rows))
        assert values.unique().numel() > 1
    assert output["ad"].lengths().tolist() == [2, 0, 1]
    assert output["query@user"].lengths().tolist() == [1, 2, 0]


def test_names_lengths_and_indices_equal_those_of_an_unsharded_collection(put):
    batch = kjt_of({**IDS, "ad": [[1, 2], [], [3]]})
    for need_indices in (False, True):
        output = put(need_indices=need_indices)(batch)
        expected = Sequences(need_indices=need_indices, device=CPU)(batch)
        assert list(output.keys()) == list(expected)
        for name, feature in expected.items():
            assert torch.equal(output[name].lengths(), feature.lengths())
            indices = output[name].weights_or_none()
            assert (indices is not None) == need_indices
            if need_indices:
                assert torch.equal(indices, feature.weights())


def test_indices_keep_their_64_bits(put):
    output = put(need_indices=True)(kjt_of({"ad": [[-1, 2**62]], "query": [[]]}))
    assert output["ad"].weights().tolist() == [-1, 2**62]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_have_the_dtype_of_the_batch(put, dtype):
    batch = kjt_of(IDS)
    batch = KeyedJaggedTensor(
        batch.keys(), batch.values().to(dtype), lengths=batch.lengths()
    )
    output = put(need_indices=True)(batch)
    assert output["ad"].weights().dtype == dtype
    assert output["ad"].weights().tolist() == [1, 2, -1]


def test_the_gradients_of_all_positions_of_an_id_add_up(job, put):
    model = put()
    output = model(kjt_of(IDS)).wait()
    before = job.read("term", [1, 2, -1])
    loss = (output["ad"].values() * torch.tensor([[1.0], [10.0], [100.0]])).sum()
    (loss + 1000 * output["query@term"].values().sum()).backward()
    moves = (before - job.read("term", [1, 2, -1])).mean(axis=1)
    np.testing.assert_allclose(moves, [1, 10 + 3 * 1000, 100], rtol=1e-4)


def test_a_batch_that_gets_no_backward_pass_makes_room_for_the_next(job, put):
    model = put()
    for _ in range(2):  # without staleness, each waits for the one before
        model(kjt_of(IDS)).wait()
    output = model(kjt_of(IDS)).wait()
    before = job.read("user", [2])
    output["query@user"].values().sum().backward()
    assert (job.read("user", [2]) != before).all()
    assert job.total("open_batches") == 0


def test_a_feature_without_a_gradient_moves_nothing(job, put):
    output = put()(kjt_of(IDS))
    loss = output["ad"].values().sum()
    before = job.read("user", [2])
    loss.backward()
    assert (job.read("user", [2]) == before).all()
    assert job.total("open_batches") == 0


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_batch_without_ids_has_empty_sequences(job, put, num_samples):
    lengths = torch.zeros(2 * num_samples, dtype=torch.int32)
    ids = torch.empty(0, dtype=torch.int64)
    output = put()(KeyedJaggedTensor(["ad", "query"], ids, lengths=lengths))
    assert {tuple(feature.values().shape) for feature in output.values()} == {(0, DIM)}
    assert output["ad"].lengths().tolist() == [0] * num_samples
    sum(feature.values().sum() for feature in output.values()).backward()
    assert job.total("open_batches") == 0


def test_a_lookup_without_gradients_makes_no_rows(job, put):
    model = put()
    with torch.no_grad():
        output = model(kjt_of(IDS))
    assert output["ad"].values().any(dim=1).all()  # what rows would begin with
    assert job.total("rows") == 0


def test_a_missing_feature_is_named(put):
    with pytest.raises(BatchError, match=r"the feature 'query'\. Received: \['ad'\]"):
        put()(kjt_of({"ad": [[1]]}))


def test_a_batch_that_began_without_its_ids_has_no_indices(put):
    model = put(need_indices=True)
    (module,) = (m for m in model.modules() if hasattr(m, "pipeline"))
    source = kjt_of(IDS)
    started = module.start(source, is_training=False)
    started.given = None
    with pytest.raises(BatchError, match="must be given a KeyedJaggedTensor"):
        model(started)["ad"]


def test_settings_of_a_table_that_no_collection_has_are_rejected(job):
    settings = {"other": TableSettings(optimizer=SGD(1.0))}
    sharder = RemoteEmbeddingCollectionSharder(job.client, tables=settings)
    with pytest.raises(ConfigError, match="other"):
        job.shard(Sequences(), [sharder])(kjt_of(IDS))["ad"]
