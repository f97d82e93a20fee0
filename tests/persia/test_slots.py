import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import Uniform
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.lookup.bags import Bags, FeatureSpec
from persia_torchrec.persia.slots import SlotsLookup, build_raw_ids
from persia_torchrec.table import TableSpec
from tests.support import reference
from tests.support.servers import ids_of, missed

DIM = 3
TABLES = [
    TableSpec(name="shared", dim=DIM, optimizer=SGD(1.0), initializer=Uniform(-1, 1)),
    TableSpec(name="own", dim=2, optimizer=SGD(1.0), initializer=Uniform(-1, 1)),
]
PREFIX = {"prefix": 1 << 56, "prefix_bits": 8}
STACK = {"hash_stack_rounds": 3, "hash_stack_size": 4}
# "raw" and "pooled" share rows; three buckets stand for each id of "stacked".
FEATURES = [
    FeatureSpec(name="raw", key="raw", table="shared", num_places=2, **PREFIX),
    FeatureSpec(name="pooled", key="pooled", table="shared", **PREFIX),
    FeatureSpec(
        name="stacked",
        key="stacked",
        table="own",
        pooling="sqrt",
        num_places=3,
        **STACK,
    ),
    FeatureSpec(name="alone", key="alone", table="own", pooling="sqrt"),
]
RAW = [FEATURES[0], FEATURES[2]]

samples = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6)


def bags_of(samples):
    flat = [id_ for sample in samples for id_ in sample]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int32)
    return Bags(ids_of(*flat), lengths)


@pytest.fixture
def lookup(servers):
    client = servers.client(servers.start(2))
    lookup = SlotsLookup(client, FEATURES)
    lookup.add_tables(TABLES)
    return lookup


@given(samples, st.integers(1, 6))
def test_the_first_ids_of_a_sample_take_its_places(samples, num_places):
    raw = build_raw_ids(bags_of(samples), num_places)
    assert raw.places.shape == (len(samples), num_places)
    named = np.concatenate([ids_of(99), raw.ids])[raw.places]
    for sample, row in zip(samples, named.tolist(), strict=True):
        kept = sample[:num_places]
        assert row == kept + [99] * (num_places - len(kept))
    firsts = [id_ for sample in samples for id_ in sample[:num_places]]
    assert raw.ids.tolist() == list(dict.fromkeys(firsts))


def random_batch(rng, num_samples=15):
    lengths = rng.integers(0, 6, (len(FEATURES), num_samples))
    return {
        feature.key: [rng.integers(0, 12, n).tolist() for n in of_feature]
        for feature, of_feature in zip(FEATURES, lengths, strict=True)
    }


def weights_of(lookup, feature, ids):
    """Return one vector an id: the row, or the buckets' sum, as PERSIA scales it."""
    vectors = []
    for id_ in ids:
        buckets, scale = [id_], 1.0
        if feature.hash_stack_rounds:
            buckets = reference.hash_stack(id_, feature.hash_stack_rounds, 4)
            scale = 1 / np.sqrt(len(buckets)) if feature.pooling == "sqrt" else 1.0
        prefixed = [bucket % (2**56 - 1) + feature.prefix for bucket in buckets]
        dim = lookup.client.table(feature.table).dim
        rows = lookup.client.read(feature.table, ids_of(*prefixed))[:, :dim]
        vectors.append(rows.sum(axis=0) * scale)
    return np.array(vectors)


def pull(lookup, batch, number=None):
    return lookup.pull({key: bags_of(s) for key, s in batch.items()}, number)


def test_raw_slots_give_a_vector_an_id_and_pooled_ones_a_sum(lookup):
    batch = random_batch(np.random.default_rng(0))
    (pooled, *raw), handle = pull(lookup, batch, BatchNumber(1, 1))
    for feature, vectors, places in zip(RAW, raw, handle.places, strict=True):
        ids = build_raw_ids(
            bags_of(batch[feature.key]), feature.num_places
        ).ids.tolist()
        expected = weights_of(lookup, feature, ids)
        assert vectors.any()
        np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
        assert places.max() == len(ids)
    for b, sample in enumerate(batch["pooled"]):
        expected = weights_of(lookup, FEATURES[1], sample)
        expected = expected.sum(axis=0) if sample else np.zeros(DIM)
        np.testing.assert_allclose(pooled[b, :DIM], expected, rtol=1e-5, atol=1e-6)
    assert pooled.shape == (15, DIM + 2)


def row_gradients(batch, grads):
    """Return the sum of gradients of each (table, id), one place after the other."""
    expected = {}

    def add(feature, id_, grad):
        key = (feature.table, id_ + feature.prefix)
        expected[key] = expected.get(key, 0) + grad.astype(np.float64)

    raw, stacked = (build_raw_ids(bags_of(batch[f.key]), f.num_places) for f in RAW)
    for id_, grad in zip(raw.ids.tolist(), grads[1], strict=True):
        add(FEATURES[0], id_, grad)
    for id_, grad in zip(stacked.ids.tolist(), grads[2], strict=True):
        for bucket in reference.hash_stack(id_, 3, 4):
            add(FEATURES[2], bucket, grad / np.sqrt(3))
    for b, sample in enumerate(batch["pooled"]):
        for id_ in sample:
            add(FEATURES[1], id_, grads[0][b, :DIM])
    for b, sample in enumerate(batch["alone"]):
        for id_ in sample:
            add(FEATURES[3], id_, grads[0][b, DIM:] / np.sqrt(len(sample)))
    return expected


def test_gradients_reach_every_row_behind_a_vector(lookup):
    rng = np.random.default_rng(1)
    batch = random_batch(rng)
    outputs, handle = pull(lookup, batch, BatchNumber(1, 1))
    grads = tuple(
        rng.standard_normal(output.shape).astype(np.float32) for output in outputs
    )
    expected = row_gradients(batch, grads)
    before = {key: lookup.client.read(key[0], ids_of(key[1]))[0] for key in expected}
    assert missed(lookup.push(handle, grads)) == 0
    for (table, id_), grad in expected.items():
        moved = before[table, id_] - lookup.client.read(table, ids_of(id_))[0]
        np.testing.assert_allclose(moved, grad, rtol=1e-4, atol=1e-5)


KEYS = [f.key for f in FEATURES]
CHOICES = [KEYS, [*reversed(KEYS)], *([key] for key in KEYS)]


@pytest.mark.parametrize("keys", [*CHOICES, ["alone", "stacked", "pooled"]])
def test_the_slots_of_a_batch_alone_are_asked_for_in_its_order(lookup, keys):
    whole = random_batch(np.random.default_rng(0))
    (pooled, *raw), _ = pull(lookup, whole, BatchNumber(1, 1))
    columns = {"pooled": pooled[:, :DIM], "alone": pooled[:, DIM:]}
    vectors = {f.key: rows for f, rows in zip(RAW, raw, strict=True)}
    batch = {key: whole[key] for key in keys}
    outputs, handle = pull(lookup, batch, BatchNumber(1, 2))
    assert handle.slots == tuple(keys)
    expected = [columns[key] for key in keys if key in columns]
    expected = [np.concatenate([pooled[:, :0], *expected], axis=1)]
    expected += [vectors[key] for key in keys if key in vectors]
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output, other)
    tables = {f.table for f in FEATURES if f.key in keys}
    assert {name for group in handle.groups for name in group.tables} == tables
    assert missed(lookup.push(handle, outputs)) == 0


def test_ids_beyond_the_places_are_not_looked_up(lookup):
    batch = {f.key: [[1, 2, 3, 4, 5]] for f in FEATURES} | {"pooled": [[]]}
    _, handle = pull(lookup, batch | {"alone": [[]]}, BatchNumber(1, 1))
    shared, _ = handle.groups  # of one dim each
    assert sorted(shared.ids.tolist()) == [id_ + PREFIX["prefix"] for id_ in (1, 2)]


@pytest.mark.parametrize("num_samples", [0, 2])
def test_batches_without_samples_or_ids_are_batches_too(lookup, num_samples):
    batch = {feature.key: [[]] * num_samples for feature in FEATURES}
    outputs, handle = pull(lookup, batch, BatchNumber(1, 1))
    shapes = [output.shape for output in outputs]
    assert shapes == [(num_samples, DIM + 2), (0, DIM), (0, 2)]
    assert [places.shape for places in handle.places] == [
        (num_samples, 2),
        (num_samples, 3),
    ]
    assert not any(places.any() for places in handle.places)
    assert missed(lookup.push(handle, outputs)) == 0
