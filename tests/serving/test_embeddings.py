"""Rows of the collections of a TorchRec model, for inference."""

import numpy as np
import pytest

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.lookup.bags import JaggedIds
from persia_torchrec.serving.embeddings import CollectionsReader
from persia_torchrec.sharding.dense_half import CollectionDescription
from persia_torchrec.table import TableSpec
from tests.support.one_feature import FEATURE, bags_of
from tests.support.servers import ids_of


def collection(kind):
    return CollectionDescription("bags", kind, (FEATURE,), (2,), False)


@pytest.fixture
def client(servers):
    client = servers.client(servers.start(2))
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    client.write("item", ids_of(7, 8), np.array([[1, 2], [3, 4]], np.float32))
    return client


def test_bags_are_pooled_and_an_id_without_a_row_is_zeros(client):
    reader = CollectionsReader(client, [collection("bags")])
    pulled = reader.to_tensors(
        reader.look_up_ids(JaggedIds.of(bags_of([7, 8], [], [9])))
    )
    assert pulled["0"].tolist() == [7, 8, 9]
    assert pulled["1"].tolist() == [[2, 0, 1]]
    assert pulled["2"].tolist() == [[4, 6], [0, 0], [0, 0]]
    assert sum(reader.hello().num_rows) == 2


def test_the_time_of_a_lookup_is_that_of_its_client(client):
    reader = CollectionsReader(client, [collection("bags")])
    reader.set_lookup_timeout(7.5)
    assert reader.lookup_timeout_s == client.timeout_s == 7.5
