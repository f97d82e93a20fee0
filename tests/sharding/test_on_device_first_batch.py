"""The first training batch of a GPU is pooled both ways, and the ways are compared.

The way of a GPU runs on the CPU here.
"""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from persia_torchrec import SGD, RemoteEmbeddingCollectionSharder
from persia_torchrec.sharding import on_device
from persia_torchrec.sharding.on_device import DeviceIndex, RowsOnDevice, Ways
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder
from persia_torchrec.sharding.table_control import RemoteTables
from tests.support.remote_job import META, Bags, kjt_of

BAG_TABLES = [
    EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"]),
    EmbeddingBagConfig(10, 8, name="user", feature_names=["user"]),
]
SEQUENCE_TABLES = [EmbeddingConfig(10, 4, name="term", feature_names=["ad"])]
WARNING = "Pooling by one kernel gives other results than id by id"


@pytest.fixture(autouse=True)
def _device_pools(monkeypatch):
    monkeypatch.setattr(RemoteEmbeddingBagCollectionSharder, "POOLS_ON", {"cpu"})
    monkeypatch.setattr(RemoteEmbeddingCollectionSharder, "POOLS_ON", {"cpu"})
    monkeypatch.setattr(RowsOnDevice, "CHECKED_ON", {"cpu"})


@pytest.fixture
def plain_calls(monkeypatch):
    """Names of the plain ways, as they are used."""
    calls = []
    for name in ("pool_plainly", "add_up_plainly"):
        right = getattr(DeviceIndex, name)

        def noted(*given, name=name, right=right):
            calls.append(name)
            return right(*given)

        monkeypatch.setattr(DeviceIndex, name, noted)
    return calls


def batch():
    return kjt_of({"ad": [[1, 2], [3, 3]], "user": [[5], [6, 7]]})


def train(model, num_steps):
    """Train some steps; return the sum of the output of each."""
    losses = []
    for _ in range(num_steps):
        values = model(batch()).values()
        losses.append(values.sum().item())
        (values * values).sum().backward()
    return losses


def trained(job, num_steps=4):
    return train(job.put_on_servers(Bags(BAG_TABLES), SGD(0.1)), num_steps)


def test_from_the_second_batch_on_one_way_is_used(job, plain_calls, caplog):
    model = job.put_on_servers(Bags(BAG_TABLES), SGD(0.1))
    model.eval()
    model(batch())  # decides nothing
    assert not plain_calls
    model.train()
    train(model, 1)
    assert sorted(plain_calls) == ["add_up_plainly"] * 2 + ["pool_plainly"] * 2
    train(model, 2)
    assert len(plain_calls) == 4
    assert WARNING not in caplog.text


def test_a_sequence_is_compared_in_its_gradient(job, plain_calls, caplog):
    sequences = EmbeddingCollection(tables=SEQUENCE_TABLES, device=META)
    sharder = RemoteEmbeddingCollectionSharder(job.client, SGD(0.1))
    model = job.shard(nn.Sequential(sequences), [sharder])
    for _ in range(2):
        found = model(kjt_of({"ad": [[1, 2], [3, 3]]}))
        found["ad"].values().sum().backward()
    assert plain_calls == ["add_up_plainly"]
    assert WARNING not in caplog.text


@pytest.mark.parametrize("is_nan", [False, True])
def test_a_kernel_that_sums_wrongly_is_named_once_and_not_used(
    job, monkeypatch, caplog, is_nan
):
    right = on_device._sum_bags
    with monkeypatch.context() as patch:
        patch.setattr(RemoteEmbeddingBagCollectionSharder, "POOLS_ON", {"cuda"})
        expected = trained(job)
    job.client.clear()
    factor = torch.nan if is_nan else 1.01
    monkeypatch.setattr(on_device, "_sum_bags", lambda *given: right(*given) * factor)
    assert trained(job) == pytest.approx(expected, rel=1e-5)
    assert caplog.text.count(WARNING) == 1


def test_all_trainers_change_if_a_result_differs_on_one(caplog):
    ways = [Ways(is_decided=False, tolerance=1e-5) for _ in range(2)]
    told = []

    def agree(differs):
        told.append(differs)
        return True  # as another trainer says

    on_device.choose_way(ways, agree)
    assert told == [False]
    assert all(way.is_decided and way.is_plain for way in ways)
    assert caplog.text.count(WARNING) == 1


def test_trainers_agree_on_the_way_after_the_first_backward_pass(job, monkeypatch):
    asked = []

    def any_trainer(self, is_true):
        asked.append(is_true)
        return is_true

    monkeypatch.setattr(RemoteTables, "_any", any_trainer)
    trained(job, 3)
    assert asked == [False]


def test_half_wires_may_differ_by_what_they_round():
    one, plain = torch.tensor([1.001, 0.0]), torch.tensor([1.0, 0.0])
    for tolerance, is_plain in [(1e-5, True), (1e-2, False)]:
        ways = Ways(is_decided=False, tolerance=tolerance)
        ways.compare(one, plain)
        ways.compare(plain, plain)
        on_device.choose_way([ways], bool)
        assert ways.is_plain is is_plain
