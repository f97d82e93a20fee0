import numpy as np
import pytest
import torch

from persia_torchrec import Uniform
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import BatchError
from persia_torchrec.lookup.bags import FeatureSpec
from persia_torchrec.lookup.sharded_lookup import SequenceLookup
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.sharding.on_device import RowsOnDevice
from persia_torchrec.table import TableSpec
from tests.support.one_feature import bags_of
from tests.support.servers import ids_of, missed

TABLES = [
    TableSpec(name="things", dim=4, optimizer=SGD(1.0), initializer=Uniform(-1, 1)),
    TableSpec(name="users", dim=3, optimizer=SGD(1.0), initializer=Uniform(-1, 1)),
]
FEATURES = [
    FeatureSpec(name="seen", key="seen", table="things"),
    FeatureSpec(name="user", key="user", table="users"),
    FeatureSpec(name="bought", key="bought", table="things"),
]
BAGS = {
    **bags_of([5, 7, 5], [], name="seen"),
    **bags_of([1], [2, 1], name="user"),
    **bags_of([], [7, 9], name="bought"),
}


@pytest.fixture
def start(servers):
    def start(lookup):
        worker = lookup(servers.client(servers.start(2)), FEATURES)
        worker.add_tables(TABLES)
        return worker

    return start


def rows_of(worker, table, *ids):
    return worker.client.read(table, ids_of(*ids))


def test_a_sequence_has_the_row_of_each_id_in_their_order(start):
    worker = start(SequenceLookup)
    (seen, user, bought), batch = worker.pull(BAGS, BatchNumber(1, 1))
    np.testing.assert_array_equal(seen, rows_of(worker, "things", 5, 7, 5))
    np.testing.assert_array_equal(user, rows_of(worker, "users", 1, 2, 1))
    np.testing.assert_array_equal(bought, rows_of(worker, "things", 7, 9))
    assert seen.any(axis=1).all()
    assert worker.shapes(batch) == [seen.shape, user.shape, bought.shape]


def test_the_gradients_of_every_place_of_an_id_add_up(start):
    worker = start(SequenceLookup)
    outputs, batch = worker.pull(BAGS, BatchNumber(1, 1))
    before = rows_of(worker, "things", 5, 7, 9), rows_of(worker, "users", 1, 2)
    grads = tuple(
        np.repeat(10.0**f * np.arange(1, len(rows) + 1), rows.shape[1])
        .reshape(rows.shape)
        .astype(np.float32)
        for f, rows in enumerate(outputs)
    )
    assert missed(worker.push(batch, grads)) == 0
    things = before[0] - rows_of(worker, "things", 5, 7, 9)
    users = before[1] - rows_of(worker, "users", 1, 2)
    # 5 is the first and third of "seen"; 7 its second, and the first of "bought".
    expected = [1 + 3, 2 + 100, 200]
    np.testing.assert_allclose(things, np.outer(expected, np.ones(4)), rtol=1e-5)
    np.testing.assert_allclose(users, np.outer([40, 20], np.ones(3)), rtol=1e-5)


def on_device(client, features):
    settings = {"precision": Precision.FP32, "device": torch.device("cpu")}
    return RowsOnDevice(client, features, **settings)


def test_unique_rows_come_with_the_place_of_each_id(start):
    worker = start(on_device)
    found, batch = worker.pull(BAGS, BatchNumber(1, 1))
    rows = [tensor.numpy() for tensor in found.rows]
    assert batch.row_shapes == [(3, 4), (2, 3)] == [array.shape for array in rows]
    assert batch.plan.group_of == (0, 1, 0)
    expected = rows_of(worker, "things", 5, 7, 5)
    np.testing.assert_array_equal(rows[0][batch.inverse_of(0)], expected)
    before = rows_of(worker, "users", 1, 2)
    grads = (
        np.zeros_like(rows[0]),
        batch.groups[1].ids[:, None] * np.ones((2, 3), np.float32),
    )
    grads = (grads[0], grads[1].astype(np.float32))
    with pytest.raises(BatchError, match=r"must have the shape .* Received: \("):
        worker.push(batch, (grads[0], grads[1][:, :-1]))
    assert missed(worker.push(batch, grads)) == 0
    moves = before - rows_of(worker, "users", 1, 2)
    np.testing.assert_allclose(moves, np.outer([1, 2], np.ones(3)), rtol=1e-5)


@pytest.mark.parametrize("lookup", [SequenceLookup, on_device])
def test_a_batch_without_ids_has_outputs_without_rows(start, lookup):
    worker = start(lookup)
    nothing = {feature.key: bags_of([], [])["item"] for feature in FEATURES}
    outputs, batch = worker.pull(nothing, BatchNumber(1, 1))
    rows = outputs
    if lookup is on_device:
        rows = tuple(tensor.numpy() for tensor in outputs.rows)
    assert {len(output) for output in rows} == {0}
    assert missed(worker.push(batch, rows)) == 0


def test_a_gradient_of_another_shape_is_rejected(start):
    worker = start(SequenceLookup)
    outputs, batch = worker.pull(BAGS, BatchNumber(1, 1))
    with pytest.raises(BatchError, match=r"must have the shapes .* Received: \["):
        worker.push(batch, outputs[:-1])
    with pytest.raises(BatchError, match=r"must have the shapes .* Received: \["):
        worker.push(batch, (*outputs[:-1], outputs[-1][:, :-1]))
