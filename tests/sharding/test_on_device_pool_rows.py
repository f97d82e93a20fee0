"""Rows of one dim are pooled, and their gradients added up, as the reference says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.client.codec import KnownTable, KnownTables
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.lookup.bags import POOLINGS, Bags, FeatureSpec, JaggedIds
from persia_torchrec.lookup.sharded_lookup import BatchFeatures, RoutedBatch
from persia_torchrec.lookup.transposed import (
    LONGEST,
    IndexParts,
    build_index,
    most_numbers,
)
from persia_torchrec.routing.route import route_features
from persia_torchrec.sharding.on_device import DeviceBatch, DeviceIndex
from persia_torchrec.table import TableSpec
from tests.support import reference
from tests.support.servers import ids_of


def batch_of(samples, tables, poolings, num_servers, *, each_id=False, weighted=False):
    """Route features, lists of lists of ids, and build the index of their one group."""
    known = KnownTables()
    for table in tables:
        spec = TableSpec(name=table, dim=2, optimizer=SGD(1.0))
        known[table] = KnownTable(spec, (0,) * num_servers, wants_counts=False)
    names = [f"f{f}" for f in range(len(samples))]
    specs = [
        FeatureSpec(name=name, key=name, table=table, pooling=pooling)
        for name, table, pooling in zip(names, tables, poolings, strict=True)
    ]
    bags = {
        name: Bags(
            ids_of(*[id_ for bag in of_feature for id_ in bag]),
            np.array([len(bag) for bag in of_feature], dtype=np.int32),
        )
        for name, of_feature in zip(names, samples, strict=True)
    }
    features, jagged = BatchFeatures(specs), JaggedIds.of(bags)
    plan = features.plan(known, jagged.positions)
    route = route_features(
        jagged.ids,
        jagged.id_starts,
        plan.columns,
        plan.table_groups,
        plan.table_shared_rows,
        num_servers,
    )
    routed = RoutedBatch(
        plan,
        *route.by_group(plan.groups),
        route.inverse,
        route.starts,
        jagged.lengths,
        jagged.bag_starts,
        jagged.id_starts,
        jagged.sources,
        features,
    )
    scales = set(poolings) != {"sum"} and not each_id
    wanted = IndexParts(each_id, scales, weighted)
    array = np.empty(most_numbers(routed, 0, wanted), dtype=np.int32)
    sizes = build_index(routed, 0, wanted, array)
    flat = torch.from_numpy(array[: sizes.total].copy())
    index = DeviceIndex(flat, sizes, ())
    return routed, index, bags


def rows_for(routed, dim):
    rng = np.random.default_rng(len(routed.inverse))
    (group,) = routed.groups
    rows = rng.standard_normal((len(group.ids), dim)).astype(np.float32)
    return torch.from_numpy(rows), rng


def pool(routed, index, rows, weights, each_id):
    """Return what is pooled, gradients of rows and weights, and that of the output."""
    plan = routed.plan._replace(dims=(rows.shape[1],))
    object.__setattr__(routed, "plan", plan)
    batch = DeviceBatch(routed, (rows,), (index,), each_id, None)
    pooled = batch.pool(weights)
    (output,) = pooled.outputs
    scales = torch.arange(1.0, output.numel() + 1).view_as(output) / 7
    (of_rows,) = batch.gradients(pooled, (scales,))
    of_weights = None
    if weights is not None:
        of_weights = batch.weights_gradient(pooled, (scales,), weights)
    return output, of_rows, of_weights, scales


def expected(routed, samples, rows, weights, poolings, grads):
    """Return the same by the definition, one id after the other."""
    rows, dim = rows.numpy().astype(np.float64), rows.shape[1]
    num_samples = len(samples[0])
    pooled = np.zeros((num_samples, len(samples), dim))
    of_rows = np.zeros(rows.shape)
    of_weights = np.zeros(len(routed.inverse))
    grads = grads.numpy().reshape(num_samples, len(samples), dim).astype(np.float64)
    j = 0
    for f, of_feature in enumerate(samples):
        for b, bag in enumerate(of_feature):
            scale = reference.scale(len(bag), poolings[f]) if bag else 0.0
            for _ in bag:
                u, w = routed.inverse[j], 1.0 if weights is None else weights[j].item()
                pooled[b, f] += scale * w * rows[u]
                of_rows[u] += scale * w * grads[b, f]
                of_weights[j] = scale * rows[u] @ grads[b, f]
                j += 1
    return pooled.reshape(num_samples, -1), of_rows, of_weights


@st.composite
def batches(draw):
    num, num_samples = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    bag = st.lists(st.integers(0, 6), max_size=4)
    samples = [
        [draw(bag) for _ in range(num_samples)]
        if draw(st.booleans())
        else [draw(bag) * draw(st.sampled_from([1, 200])) for _ in range(num_samples)]
        for _ in range(num)
    ]
    tables = draw(st.lists(st.sampled_from("ab"), min_size=num, max_size=num))
    poolings = draw(st.lists(st.sampled_from(POOLINGS), min_size=num, max_size=num))
    return samples, tables, poolings, draw(st.integers(1, 3))


@settings(deadline=None)
@given(given=batches(), dim=st.sampled_from([1, 4, 9]), weighted=st.booleans())
def test_bags_are_pooled_as_in_the_reference(given, dim, weighted):
    samples, tables, poolings, num_servers = given
    routed, index, _ = batch_of(
        samples, tables, poolings, num_servers, weighted=weighted
    )
    rows, rng = rows_for(routed, dim)
    weights = None
    if weighted:
        weights = rng.standard_normal(len(routed.inverse)).astype(np.float32)
        weights = torch.from_numpy(weights)
    output, of_rows, of_weights, grads = pool(routed, index, rows, weights, False)
    by_hand = expected(routed, samples, rows, weights, poolings, grads)
    for found, right in zip((output, of_rows, of_weights), by_hand, strict=True):
        if found is not None:
            size = max(np.abs(right).max(initial=0.0), 1.0)
            np.testing.assert_allclose(found.numpy(), right, rtol=0, atol=2e-5 * size)


@settings(deadline=None)
@given(given=batches(), dim=st.sampled_from([1, 4]))
def test_a_sequence_has_the_row_of_each_id(given, dim):
    samples, tables, poolings, num_servers = given
    routed, index, _ = batch_of(samples, tables, poolings, num_servers, each_id=True)
    rows, _ = rows_for(routed, dim)
    output, of_rows, _, grads = pool(routed, index, rows, None, True)
    np.testing.assert_array_equal(output.numpy(), rows.numpy()[routed.inverse])
    right = np.zeros(rows.shape)
    np.add.at(right, routed.inverse, grads.numpy().astype(np.float64))
    size = max(np.abs(right).max(initial=0.0), 1.0)
    np.testing.assert_allclose(of_rows.numpy(), right, rtol=0, atol=2e-5 * size)


@pytest.mark.parametrize("num_ids", [127, 128, 129, 255, 257, 20_000, 16_513])
def test_no_bag_of_the_backward_pass_is_long(num_ids):
    """One id in all samples, and one that is rare."""
    samples = [[[7]] * (num_ids - 1) + [[7, 8]]]
    routed, index, _ = batch_of(samples, ["a"], ["sum"], 2)
    starts = [index.starts, *index.levels[1::3]]
    assert max(int(of_level.diff().max()) for of_level in starts) <= LONGEST
    assert len(starts) == (1 if num_ids <= LONGEST else 2) + (num_ids > LONGEST**2)
    rows, _ = rows_for(routed, 3)
    _, of_rows, _, grads = pool(routed, index, rows, None, False)
    whole = grads.numpy().astype(np.float64)
    right = np.zeros((2, 3))
    right[routed.inverse[-2]], right[routed.inverse[-1]] = whole.sum(axis=0), whole[-1]
    np.testing.assert_allclose(of_rows.numpy(), right, rtol=1e-5)


@pytest.mark.parametrize("num_samples", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_without_ids_has_no_rows_to_pool(num_samples, weighted):
    samples = [[[]] * num_samples]
    routed, index, _ = batch_of(samples, ["a"], ["mean"], 2, weighted=weighted)
    weights = torch.empty(0) if weighted else None
    output, of_rows, of_weights, _ = pool(
        routed, index, torch.empty(0, 4), weights, False
    )
    assert torch.equal(output, torch.zeros(num_samples, 4))
    assert of_rows.shape == (0, 4)
    assert of_weights is None or of_weights.shape == (0,)


@pytest.mark.parametrize(
    ("pooling", "pooled"),
    [("sum", [[7], [0]]), ("mean", [[3.5], [0]]), ("sqrt", [[7 / 2**0.5], [0]])],
)
def test_a_mean_divides_by_the_number_of_ids_and_not_by_their_weights(pooling, pooled):
    routed, index, _ = batch_of([[[1, 2], []]], ["a"], [pooling], 1, weighted=True)
    rows, weights = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
    output, *_ = pool(routed, index, rows, weights, False)
    np.testing.assert_allclose(output.numpy(), pooled, rtol=1e-6)
