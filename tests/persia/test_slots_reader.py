"""Lookups of slots for inference, by a lookup of one's own."""

import numpy as np
import pytest

from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.persia.batch import IDTypeFeature, PersiaBatch
from persia_torchrec.persia.slots_reader import open_slots
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of

CONFIG = "{slots_config: {item: {dim: 2}, user: {dim: 2}}}"
SCHEMA = load_embedding_config("config", CONFIG)


@pytest.fixture
def client(servers):
    client = servers.client(servers.start(2))
    for name in ("item", "user"):
        client.add_tables([TableSpec(name=name, dim=2, optimizer=SGD(1.0))])
    ids = ids_of(7, 8) + np.uint64(SCHEMA.slots["item"].index_prefix)
    client.write("item", ids, np.array([[1, 2], [3, 4]], np.float32))
    return client


def batch(*lists, names=("item", "user")):
    ids = [np.array(one, np.uint64) for one in lists]
    return PersiaBatch(
        [IDTypeFeature(name, ids) for name in names], requires_grad=False
    )


def test_a_batch_has_a_tensor_a_slot_of_the_sums_of_its_rows(client):
    reader = open_slots(client, SCHEMA)
    assert sum(reader.hello().num_rows) == 2
    found = reader.to_tensors(reader.look_up(batch([7, 8], [], [9])))
    assert found["item"].tolist() == [[4, 6], [0, 0], [0, 0]]
    assert found["user"].tolist() == [[0, 0]] * 3
    reader.close()


def test_a_batch_with_another_slot_is_an_error(client):
    reader = open_slots(client, SCHEMA)
    with pytest.raises(BatchError, match="other"):
        reader.look_up(batch([7], names=("item", "user", "other")))
    reader.close()


def test_a_dim_that_is_not_the_tables_is_an_error(client):
    wider = load_embedding_config("config", CONFIG.replace("dim: 2", "dim: 3"))
    with pytest.raises(ConfigError, match="item"):
        open_slots(client, wider)


def test_the_time_of_a_lookup_is_that_of_its_client(client):
    reader = open_slots(client, SCHEMA)
    reader.set_lookup_timeout(7.5)
    assert reader.lookup_timeout_s == client.timeout_s == 7.5
    reader.close()
