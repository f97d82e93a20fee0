"""What a collection on the servers returns, against TorchRec's own collection."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec import EmbeddingBagConfig, PoolingType

from persia_torchrec import SGD
from tests.support.remote_job import CPU, Bags, RemoteJob, kjt_of

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
    """All features, one more, in any order; empty bags and features too."""
    num_samples = draw(st.integers(1, 4))
    feature = st.lists(bag, min_size=num_samples, max_size=num_samples)
    empty = st.just([[] for _ in range(num_samples)])
    keys = draw(st.permutations([*KEYS, "unused"]))
    return kjt_of({key: draw(feature | empty) for key in keys})


class Twins:
    """A collection on the servers, and TorchRec's own with the same rows."""

    def __init__(self, job):
        self.job = job
        self.remote = job.put_on_servers(Bags(TABLES), SGD(0.1))
        self.local = Bags(TABLES, device=CPU)
        every_id = [list(range(NUM_IDS))]
        self.remote(kjt_of(dict.fromkeys(KEYS, every_id))).values()  # makes the rows
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


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches())
def test_columns_and_gradients_equal_those_of_torchrecs_collection(twins, batch):
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
    output = twins.remote(kjt_of({key: [[1]] for key in KEYS}))
    assert output.keys() == ["ad", "query@term", "query@topic", "page", "user"]
    assert output["query@topic"].shape == (1, 3)


def test_a_column_can_be_used_alone(twins):
    twins.load_rows()
    output = twins.remote(kjt_of({key: [[1, 1], [2]] for key in KEYS}))
    output["page"].sum().backward()
    expected = twins.weights(TABLES[1]).detach().clone()
    expected[1] -= 2 * 0.1
    expected[2] -= 0.1
    torch.testing.assert_close(twins.rows(TABLES[1]), expected)
    torch.testing.assert_close(twins.rows(TABLES[0]), twins.weights(TABLES[0]).detach())
