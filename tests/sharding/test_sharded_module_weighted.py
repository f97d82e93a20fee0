"""Weighted bags on the servers: the weights' gradients, and what goes wrong."""

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType

from persia_torchrec import SGD
from persia_torchrec.errors import BatchError
from persia_torchrec.sharding.planned import dense_parameters
from tests.sharding.shared_table import DIM, tables
from tests.support.remote_job import CPU, META, remote_modules


class Weighted(nn.Module):
    """Weights of ids that come out of a parameter, one a key."""

    def __init__(self, device=META, **settings):
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=tables(**settings), is_weighted=True, device=device
        )
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, kjt):
        num_ids = torch.tensor(kjt.length_per_key())
        weights = kjt.weights() * self.scale.repeat_interleave(num_ids)
        kjt = KeyedJaggedTensor(
            kjt.keys(), kjt.values(), weights, lengths=kjt.lengths()
        )
        return self.bags(kjt)


def batch(weights=(1.0, 2.0, -1.0, 0.5, 3.0)):
    lengths = torch.tensor([2, 0, 1, 0, 1, 1], dtype=torch.int32)
    weights = None if weights is None else torch.tensor(weights)
    ids = torch.tensor([1, 1, 2, 2, 3])
    return KeyedJaggedTensor(["query", "ad"], ids, weights, lengths=lengths)


def test_weights_get_the_gradients_that_an_unsharded_collection_gives_them(job):
    model = job.put_on_servers(Weighted(), SGD(0.5))
    plain = Weighted(CPU)
    model(batch()).values()  # makes the rows
    remote_modules(model)[0].pipeline.flush()
    weight = plain.bags.embedding_bags["term"].weight
    weight.data[1:4] = torch.from_numpy(job.read("term", [1, 2, 3]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(3):
        outputs = [model(batch()).values(), plain(batch()).values()]
        torch.testing.assert_close(*outputs)
        scales = torch.linspace(1, 2, outputs[0].numel()).view_as(outputs[0])
        for output in outputs:
            output.backward(scales)
        optimizer.step()
        optimizer.zero_grad()
        (of_remote,) = (p.grad for p in dense_parameters(model))
        torch.testing.assert_close(of_remote, plain.scale.grad)
    assert of_remote.abs().min() > 0.01
    rows = job.read("term", [1, 2, 3])
    np.testing.assert_allclose(rows, weight[1:4].detach().numpy(), rtol=1e-5)


def test_a_weighted_mean_divides_by_the_number_of_ids(job):
    model = job.put_on_servers(Weighted(pooling=PoolingType.MEAN))
    output = model(batch()).to_dict()
    one, two, three = torch.from_numpy(job.read("term", [1, 2, 3]))
    # The scales are 0.5 for the first key, "query", and 2 for "ad".
    expected = torch.stack([(0.5 * one + one) / 2, 0 * one, -0.5 * two])
    torch.testing.assert_close(output["query"], expected)
    torch.testing.assert_close(output["ad"], torch.stack([0 * one, two, 6 * three]))


def test_an_unweighted_collection_takes_no_notice_of_weights(job):
    class Plain(Weighted):
        def __init__(self):
            super().__init__()
            self.bags = EmbeddingBagCollection(tables=tables(), device=META)

    output = job.put_on_servers(Plain())(batch())["ad"]
    zeros = np.zeros((1, DIM), dtype=np.float32)
    expected = np.concatenate([zeros, job.read("term", [2, 3])])
    torch.testing.assert_close(output.detach(), torch.from_numpy(expected))


def test_a_batch_without_weights_reports_what_to_do(job):
    model = Weighted()
    sharded = job.put_on_servers(model.bags)
    with pytest.raises(BatchError, match=r"with weights.*Pass weights=\.\.\."):
        sharded(batch(weights=None)).values()
    # It has made room for the next.
    assert sharded(batch()).values().shape == (3, 2 * DIM)


def test_a_batch_that_gets_no_backward_pass_makes_room_for_the_next(job):
    model = job.put_on_servers(Weighted())
    for _ in range(2):  # without staleness, each waits for the one before
        model(batch()).values()
    output = model(batch())["ad"]
    before = job.read("term", [2])
    output.sum().backward()
    assert (job.read("term", [2]) != before).all()
    assert job.total("open_batches") == 0


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_batch_without_ids_pools_to_zeros_and_moves_nothing(job, num_samples):
    model = job.put_on_servers(Weighted())
    lengths = torch.zeros(2 * num_samples, dtype=torch.int32)
    ids, weights = torch.empty(0, dtype=torch.int64), torch.empty(0)
    kjt = KeyedJaggedTensor(["ad", "query"], ids, weights, lengths=lengths)
    output = model(kjt).values()
    assert torch.equal(output.detach(), torch.zeros(num_samples, 2 * DIM))
    output.sum().backward()
    assert job.total("open_batches") == 0


def test_weights_for_a_collection_without_them_are_one_warning(job, caplog):
    collection = EmbeddingBagCollection(tables=tables(), device=META)
    model = job.put_on_servers(nn.Sequential(collection), SGD(0.5))
    with_weights = model(batch()).values()
    assert torch.equal(with_weights, model(batch(None)).values())
    model(batch())
    [line] = [one for one in caplog.messages if "ignores the weights" in one]
    assert "is_weighted=True" in line
    assert all(repr(table.name) in line for table in tables())
