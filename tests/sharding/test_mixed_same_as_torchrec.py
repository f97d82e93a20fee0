"""A model some of whose tables are on the servers trains as it does in plain TorchRec.

Both start from the same rows and the same dense weights and see the same batches.
"""

import numpy as np
import pytest
import torch

from persia_torchrec.client.client import BatchNumber
from tests.sharding.mixed_model import (
    BAGS,
    FUSED,
    LOCAL,
    NUM_IDS,
    REMOTE,
    SEQUENCES,
    batches,
    constraints,
    needs_mixed_sequences,
    put_some_on_servers,
    tables,
    train,
)
from tests.support.remote_job import ids_of, shard, tensors_of

pytestmark = pytest.mark.slow

NUM_STEPS = 80


class Twins:
    """One model twice: some of its tables on the servers, and in plain TorchRec."""

    def __init__(self, job, kind, local):
        self.job = job
        self.kind = kind
        torch.manual_seed(0)
        on_trainers = local | constraints("table_wise", REMOTE)
        self.plain = shard(kind.model(), kind.local(FUSED), constraints=on_trainers)
        self.mixed = put_some_on_servers(job, kind, constraints=local)
        for table in REMOTE:
            self.plain_rows(table).copy_(self.pulled(table))
        state = self.plain.state_dict()
        local = {key: state[key] for key in tensors_of(self.mixed)}
        self.mixed.load_state_dict({**self.mixed.state_dict(), **local})

    def plain_rows(self, table):
        return self.rows_of(self.plain, table)

    def mixed_rows(self, table):
        if table not in REMOTE:
            return self.rows_of(self.mixed, table)
        dim = self.plain_rows(table).shape[1]
        return torch.from_numpy(self.job.read(table, range(NUM_IDS))[:, :dim].copy())

    def pulled(self, table):
        """Make all rows of a table on the servers, and return them."""
        split = self.job.client.split(ids_of(range(NUM_IDS)))
        number = BatchNumber(BatchNumber.new_stream(), 1)
        (rows,) = self.job.client.pull([(table, split)], batch=number)
        return torch.from_numpy(rows[split.inverse])

    def rows_of(self, model, table):
        weight = model.state_dict()[f"{self.kind.prefix}.{table}.weight"]
        if not hasattr(weight, "local_shards"):
            return weight
        (piece,) = weight.local_shards()
        return piece.tensor


# Not by rows: TorchRec 1.8 then divides sums of tables of other sharding types as well.
MEAN_TABLE = constraints("table_wise", ["place"])


def require_same_training(job, kind, local, num_steps):
    """Train the twins; return the losses."""
    twins = Twins(job, kind, local)
    start = {table.name: twins.plain_rows(table.name).clone() for table in tables()}
    losses = train(twins.mixed, batches(num_steps))
    expected = train(twins.plain, batches(num_steps))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, rows in start.items():
        plain, mixed = twins.plain_rows(name), twins.mixed_rows(name)
        assert (mixed - plain).abs().max() < 1e-5, name
        # Nothing of this would mean much if the table had learnt nothing.
        assert (plain - rows).abs().max() > 1e-3, name
    assert set(start) == {*LOCAL, *REMOTE}
    return losses


def test_every_step_has_the_loss_of_plain_torchrec(job):
    one_of_each_type = (
        constraints("data_parallel", ["home"])
        | constraints("row_wise", ["term"])
        | MEAN_TABLE
    )
    losses = require_same_training(job, BAGS, one_of_each_type, NUM_STEPS)
    assert losses[-20:].mean() < 0.9 * losses[:5].mean()


@needs_mixed_sequences
def test_every_step_with_sequences_has_the_loss_of_plain_torchrec(job):
    one_of_each_type = constraints("column_wise", ["home", "place"]) | constraints(
        "row_wise", ["term"]
    )
    losses = require_same_training(job, SEQUENCES, one_of_each_type, NUM_STEPS)
    assert losses[-20:].mean() < 0.9 * losses[:5].mean()


@pytest.mark.parametrize(
    "local",
    [
        pytest.param(constraints("data_parallel"), id="data_parallel"),
        pytest.param(constraints("table_wise"), id="table_wise"),
        pytest.param(constraints("row_wise") | MEAN_TABLE, id="row_wise"),
        pytest.param(constraints("column_wise"), id="column_wise"),
    ],
)
def test_every_sharding_type_of_torchrec_can_be_mixed_with_the_servers(job, local):
    require_same_training(job, BAGS, local, 20)


# Not data_parallel: fbgemm's dense kernel pools sequences on CPUs.
@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
@needs_mixed_sequences
def test_sequences_train_as_in_torchrec(job, sharding_type):
    require_same_training(job, SEQUENCES, constraints(sharding_type), 20)
