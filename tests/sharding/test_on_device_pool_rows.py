import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.lookup.bags import POOLINGS
from persia_torchrec.lookup.sharded_lookup import BatchFeatures, RoutedBatch
from persia_torchrec.sharding.on_device import DeviceBatch, pool_by_torch, pool_rows
from tests.support import reference


def batch_of(inverse, lengths):
    """Return the batch of one feature."""
    routed = RoutedBatch(
        None,
        BatchFeatures([]),
        [],
        [],
        [inverse],
        [lengths],
        [len(lengths)],
        [],
        (),
        (),
    )
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    indices = (torch.from_numpy(inverse),), (torch.from_numpy(offsets),)
    return DeviceBatch(routed, (), *indices, None)


@st.composite
def bags(draw):
    """Rows, weights, and a batch of bags."""
    num_rows, dim = draw(st.integers(1, 5)), draw(st.sampled_from([1, 4, 9]))
    lengths = np.array(draw(st.lists(st.integers(0, 4), max_size=6)), dtype=np.int32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = torch.from_numpy(rng.standard_normal((num_rows, dim)).astype(np.float32))
    weights = torch.from_numpy(rng.standard_normal(lengths.sum()).astype(np.float32))
    inverse = rng.integers(0, num_rows, lengths.sum(), dtype=np.int32)
    return rows, weights, batch_of(inverse, lengths)


def with_gradients(pool, rows, weights, *bags):
    """Return what is pooled, and the gradients of rows and weights."""
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    pooled = pool(rows, weights, *bags)
    scales = torch.arange(1.0, pooled.numel() + 1).view_as(pooled) / pooled.numel()
    pooled.backward(scales)
    return pooled.detach(), rows.grad, weights.grad


@settings(deadline=None)
@given(bags(), st.sampled_from(POOLINGS))
def test_loops_and_torch_pool_weighted_bags_alike(bags, pooling):
    rows, weights, batch = bags
    ours = with_gradients(pool_rows, rows, weights, batch, 0, pooling)
    torchs = with_gradients(pool_by_torch, rows, weights, batch, 0, pooling)
    for of_ours, of_torch in zip(ours, torchs, strict=True):
        torch.testing.assert_close(of_ours, of_torch, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(bags(), st.sampled_from(POOLINGS))
def test_torch_pools_bags_without_weights_as_the_reference_says(bags, pooling):
    rows, _, batch = bags
    pooled = pool_by_torch(rows, None, batch, 0, pooling)
    (inverse,), (lengths,) = batch.batch.inverses, batch.batch.lengths
    expected = reference.pool(rows.numpy()[inverse], lengths, pooling)
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(bags(), st.sampled_from(POOLINGS))
def test_weighted_bags_are_pooled_as_the_reference_says(bags, pooling):
    rows, weights, batch = bags
    pooled = pool_rows(rows, weights, batch, 0, pooling)
    (inverse,), (lengths,) = batch.batch.inverses, batch.batch.lengths
    weighted = rows.numpy()[inverse].astype(np.float64) * weights.numpy()[:, None]
    expected = reference.pool(weighted, lengths, pooling)
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [("sum", [[7], [0]]), ("mean", [[3.5], [0]]), ("sqrt", [[7 / 2**0.5], [0]])],
)
def test_a_mean_divides_by_the_number_of_ids_and_not_by_their_weights(pooling, pooled):
    rows, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
    batch = batch_of(np.array([0, 1], np.int32), np.array([2, 0], np.int32))
    out = pool_rows(rows, weights, batch, 0, pooling)
    np.testing.assert_allclose(out.numpy(), pooled, rtol=1e-6)


@pytest.mark.parametrize("pool", [pool_rows, pool_by_torch])
@pytest.mark.parametrize("num_samples", [0, 3])
def test_a_batch_without_ids_has_no_rows_to_pool(pool, num_samples):
    lengths = np.zeros(num_samples, dtype=np.int32)
    batch = batch_of(np.zeros(0, dtype=np.int32), lengths)
    rows, weights = torch.empty(0, 4), torch.empty(0)
    pooled, of_rows, of_weights = with_gradients(pool, rows, weights, batch, 0, "mean")
    assert torch.equal(pooled, torch.zeros(num_samples, 4))
    assert (of_rows.shape, of_weights.shape) == ((0, 4), (0,))
