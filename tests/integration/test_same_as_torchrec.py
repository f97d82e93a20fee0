"""The golden test: a model on the servers trains as it does on plain TorchRec.

Both start from the same rows and the same dense weights and see the same batches; the
embedding optimizer is the servers' in one and fbgemm's fused one in the other.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from persia_torchrec import RemoteEmbeddingBagCollectionSharder
from tests.integration.dlrm import (
    ADAGRAD_CASE,
    CASES,
    LR,
    NUM_IDS,
    ROWWISE_CASE,
    make_batches,
    make_model,
    plain_sharder,
    tables,
)
from tests.integration.twins import Twins
from tests.support.places import GPU_PLACES
from tests.support.remote_job import CPU, RemoteJob

pytestmark = pytest.mark.slow

NUM_STEPS = 200


def make_twins(job, case, *, device=CPU, **settings):
    sharder = RemoteEmbeddingBagCollectionSharder(
        job.client, case.optimizer, **settings
    )
    return Twins(
        *(job, make_model, [sharder], plain_sharder(case)),
        dims={table.name: table.embedding_dim for table in tables()},
        num_ids=NUM_IDS,
        device=device,
    )


def train(twins, batches):
    """Return the losses on the servers, and in plain TorchRec."""
    remote = twins.train(twins.remote, batches, lr=LR)
    return remote, twins.train(twins.plain, batches, lr=LR)


def test_the_batches_have_repeated_ids_and_empty_bags():
    for batch in make_batches(3):
        for feature in batch.ids.to_dict().values():
            bags = [bag.tolist() for bag in feature.to_dense()]
            assert [] in bags
            assert any(len(set(bag)) < len(bag) for bag in bags)


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_loss_of_plain_torchrec(job, case):
    twins = make_twins(job, case)
    losses, expected = train(twins, make_batches(NUM_STEPS))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    twins.require_equal_rows(rtol=0, moved=0.1)
    # Nothing of this would mean much if the model had learnt nothing.
    assert expected[-20:].mean() < 0.75 * expected[:5].mean()
    assert job.total("gradients_missed") == 0


def test_the_number_of_servers_does_not_change_the_training():
    batches = make_batches(20)
    losses = {}
    for num_servers in (1, 3):
        with RemoteJob(num_servers=num_servers) as job:
            twins = make_twins(job, ADAGRAD_CASE)
            losses[num_servers] = twins.train(twins.remote, batches, lr=LR)
    assert np.array_equal(losses[1], losses[3])


@pytest.mark.parametrize(
    ("wire_dtype", "rtol"),
    [
        (torch.float16, 2e-4),
        pytest.param(torch.bfloat16, 5e-3, marks=pytest.mark.long),
    ],
)
def test_16_bit_floats_on_the_wire_change_the_loss_little(job, wire_dtype, rtol):
    twins = make_twins(job, ROWWISE_CASE, wire_dtype=wire_dtype)
    losses, expected = train(twins, make_batches(50))
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    assert not np.array_equal(losses, expected)


@pytest.mark.parametrize(("device", "place"), GPU_PLACES)
@pytest.mark.parametrize("case", CASES)
def test_a_model_on_a_gpu_trains_as_plain_torchrec_does(job, case, device, place):
    twins = make_twins(job, case, device=device)
    batches = make_batches(NUM_STEPS)
    placed = [replace(batch.to(device), ids=batch.ids.to(place)) for batch in batches]
    losses = twins.train(twins.remote, placed, lr=LR)
    expected = twins.train(twins.plain, batches, lr=LR)
    # The dense half sums in another order there.
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    twins.require_equal_rows(rtol=0, atol=1e-3, moved=0.1)
