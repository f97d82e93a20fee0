"""Settings from outside of the package, on server processes."""

import numpy as np
import pytest

from persia_torchrec import Constant
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.setting import import_settings
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.table import TableSpec
from tests.support.toy_optimizer import SignWithMemory

DIM = 5
ITEM = TableSpec(
    name="item", dim=DIM, optimizer=SignWithMemory(0.25), initializer=Constant(1.0)
)


def train(client, all_grads):
    """Push gradients of ten ids, one batch each; return the rows."""
    client.add_tables([ITEM])
    split = client.split(np.arange(10, dtype=np.uint64))
    for batch, grads in enumerate(all_grads):
        number = BatchNumber(1, batch)
        client.pull([("item", split)], batch=number)
        assert (
            client.outcome(client.push([("item", split)], [grads], number)).num_missed
            == 0
        )
    return client.read("item", np.arange(10, dtype=np.uint64))


@pytest.mark.multiprocess
def test_a_server_process_trains_with_an_optimizer_from_outside_of_the_package():
    all_grads = np.random.default_rng(0).normal(size=(4, 10, DIM)).astype(np.float32)
    weights, means = np.ones((10, DIM)), np.zeros((10, DIM))
    for step, grads in enumerate(all_grads, 1):
        means = 0.5 * means + grads
        weights -= 0.25 * step * np.sign(means)
    cluster = EmbeddingCluster.local(servers=1, imports=["tests.support.toy_optimizer"])
    with cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        rows = train(client, all_grads)
        client.close()
    np.testing.assert_allclose(rows[:, :DIM], weights, rtol=1e-6)
    np.testing.assert_allclose(rows[:, DIM:], means, rtol=1e-5, atol=1e-6)


@pytest.mark.multiprocess
def test_a_server_without_the_module_names_the_option():
    with EmbeddingCluster.local(servers=1) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        with pytest.raises(PersiaError, match=r"one of \['adagrad', .*--import"):
            client.add_tables([ITEM])
        client.close()


def test_a_module_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"--import must .*Received: 'tests\.lion'"):
        import_settings(["tests.lion"])
