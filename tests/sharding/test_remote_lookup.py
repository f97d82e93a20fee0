"""What a collection on the servers returns, against TorchRec's own collection."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec import EmbeddingBagConfig, PoolingType

from persia_torchrec import SGD
from persia_torchrec.errors import BatchError
from tests.sharding.remote_job import CPU, Bags, RemoteJob, kjt_of, remote_modules

NUM_IDS = 6
TABLES = [
    EmbeddingBagConfig(NUM_IDS, 8, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(NUM_IDS, 3, name="topic", feature_names=["query", "page"]),
    EmbeddingBagConfig(
        NUM_IDS, 16, name="user", feature_names=["user"], pooling=PoolingType.MEAN
    ),
]
KEYS = ["ad", "query", "page", "user"]

bag = st.lists(st.integers(0, NUM_IDS - 1), max_size=5)


@st.composite
def batches(draw):
    """All features, one more, in any order; also bags, features, batches of no id."""
    num_samples = draw(st.integers(0, 4))
    feature = st.lists(bag, min_size=num_samples, max_size=num_samples)
    empty = st.just([[] for _ in range(num_samples)])
    keys = draw(st.permutations([*KEYS, "nobody asks for me"]))
    return kjt_of({key: draw(feature | empty) for key in keys})


class Twins:
    """A collection on the servers, and TorchRec's own with the same rows."""

    def __init__(self, job):
        self.job = job
        self.remote = job.put_on_servers(Bags(TABLES), SGD(0.1))
        self.local = Bags(TABLES, device=CPU)
        every_id = [list(range(NUM_IDS))]
        self.remote(kjt_of(dict.fromkeys(KEYS, every_id)))  # makes the rows
        self.optimizer = torch.optim.SGD(self.local.parameters(), lr=0.1)

    def weights(self, table):
        return self.local.bags.embedding_bags[table.name].weight

    def rows(self, table):
        return torch.from_numpy(self.job.read(table.name, range(NUM_IDS)))

    def load_rows(self):
        with torch.no_grad():
            for table in TABLES:
                self.weights(table).copy_(self.rows(table))


@pytest.fixture(scope="module")
def twins():
    with RemoteJob() as job:
        yield Twins(job)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches())
def test_columns_and_gradients_are_those_of_torchrecs_collection(twins, batch):
    twins.load_rows()
    remote, local = twins.remote(batch), twins.local(batch)
    assert remote.keys() == local.keys()
    assert remote.length_per_key() == local.length_per_key()
    torch.testing.assert_close(remote.values(), local.values())
    for output in (remote, local):
        scales = torch.arange(1.0, 1 + output.values().shape[1])
        (output.values() * scales).sum().backward()
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    for table in TABLES:
        torch.testing.assert_close(twins.rows(table), twins.weights(table).detach())


def test_a_feature_of_two_tables_is_named_after_both(twins):
    output = twins.remote(kjt_of(dict.fromkeys(KEYS, [[1]])))
    assert output.keys() == ["ad", "query@term", "query@topic", "page", "user"]
    assert output["query@topic"].shape == (1, 3)


def test_a_column_can_be_used_alone(twins):
    twins.load_rows()
    output = twins.remote(kjt_of(dict.fromkeys(KEYS, [[1, 1], [2]])))
    output["page"].sum().backward()
    expected = twins.weights(TABLES[1]).detach().clone()
    expected[1] -= 2 * 0.1
    expected[2] -= 0.1
    torch.testing.assert_close(twins.rows(TABLES[1]), expected)
    torch.testing.assert_close(twins.rows(TABLES[0]), twins.weights(TABLES[0]).detach())


def batch_of(ids):
    return kjt_of({"ad": [ids]})


@pytest.fixture
def model(job):
    table = EmbeddingBagConfig(10, 4, name="term", feature_names=["ad"])
    return job.put_on_servers(Bags([table]), SGD(0.1))


def test_in_evaluation_the_servers_are_only_looked_at(job, model):
    known = model(batch_of([1])).values().detach()
    counters = job.client.counters()
    model.eval()
    assert torch.equal(model(batch_of([1])).values(), known)
    assert torch.equal(model(batch_of([2])).values(), torch.zeros(1, 4))
    assert job.client.num_rows() == [counter["rows"] for counter in counters]
    assert job.total("evictions") == 0
    assert not model(batch_of([1])).values().requires_grad


def test_without_gradients_training_mode_only_looks_too(job, model):
    with torch.no_grad():
        output = model(batch_of([1])).values()
    assert torch.equal(output, torch.zeros(1, 4))
    assert job.total("rows") == 0


def test_training_goes_on_after_an_evaluation(job, model):
    model.eval()
    model(batch_of([1]))
    model.train()
    model(batch_of([1])).values().sum().backward()
    assert job.total("rows") == 1


def test_an_id_is_64_bits_and_minus_one_is_the_last(job, model):
    for ids in ([-1], [2**63 - 1], [-(2**63)], [0]):
        before = model(batch_of(ids)).values()
        row = job.read("term", ids)
        assert torch.equal(before.detach(), torch.from_numpy(row))
        before.sum().backward()
        assert (job.read("term", ids) != row).all()
    assert job.total("rows") == 4


def test_a_batch_that_is_changed_after_the_forward_pass_does_no_harm(job, model):
    batch = kjt_of({"ad": [[1], [2, 2]]})
    output = model(batch).values()
    before = job.read("term", [1, 2])
    batch.lengths().fill_(1000)
    batch.values().fill_(5)
    output.sum().backward()
    after = job.read("term", [1, 2])
    np.testing.assert_allclose(before - after, [[0.1] * 4, [0.2] * 4], rtol=1e-5)
    assert job.total("rows") == 2


def test_a_batch_may_be_pulled_before_the_model_is_called(job, model):
    (module,) = remote_modules(model)
    started = module.start(batch_of([1]))
    output = module(started).values()
    assert torch.equal(output.detach(), torch.from_numpy(job.read("term", [1])))
    output.sum().backward()
    assert job.total("requests_update") == 2  # one a server


def test_a_batch_pulled_for_evaluation_has_no_gradients(job, model):
    (module,) = remote_modules(model)
    with torch.no_grad():
        started = module.start(batch_of([1]))
    assert not module(started).values().requires_grad
    with pytest.raises(BatchError, match="looked up for evaluation"):
        started.wait().push(torch.zeros(1, 4).numpy())
