import dataclasses

import numpy as np
import pytest

from persia_torchrec import Uniform
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.lookup.bags import Bags, FeatureSpec
from persia_torchrec.lookup.sharded_lookup import ShardedLookup
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.server import config
from persia_torchrec.table import TableSpec
from tests.support import reference
from tests.support.reference import ReferenceStore
from tests.support.servers import RecordingStore, ids_of, missed

TABLES = [
    TableSpec(name="things", dim=4, optimizer=Adagrad(0.1), initializer=Uniform(-1, 1)),
    TableSpec(name="users", dim=3, optimizer=SGD(0.5), initializer=Uniform(-1, 1)),
]
# "bought" and "seen" share a table; "seen" and "again" share ids; "users" is prefixed;
# three buckets stand for each id of "stacked", which share the rows of "user".
FEATURES = [
    FeatureSpec(name="bought", key="bought", table="things"),
    FeatureSpec(
        name="user",
        key="user",
        table="users",
        pooling="sqrt",
        prefix=3 << 56,
        prefix_bits=8,
    ),
    FeatureSpec(name="seen", key="seen", table="things", pooling="mean"),
    FeatureSpec(name="again", key="seen", table="users"),
    FeatureSpec(
        name="stacked",
        key="user",
        table="users",
        pooling="sqrt",
        prefix=3 << 56,
        prefix_bits=8,
        hash_stack_rounds=3,
        hash_stack_size=5,
    ),
]
COLUMNS = [slice(0, 4), slice(4, 7), slice(7, 11), slice(11, 14), slice(14, 17)]
NUM_COLUMNS = 17


def bags_of(*samples):
    flat = [id_ for sample in samples for id_ in sample]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int32)
    return Bags(ids_of(*flat), lengths)


def random_batch(seed, num_samples=20):
    rng = np.random.default_rng(seed)

    def samples():
        lengths = rng.integers(0, 5, num_samples)
        return [rng.integers(0, 12, length).tolist() for length in lengths]

    # Ids at both ends of the id space, and few enough that they repeat.
    user = [[(2**64 - 1 - id_) % 2**64 for id_ in sample] for sample in samples()]
    return {
        "bought": bags_of(*samples()),
        "seen": bags_of(*samples()),
        "user": bags_of(*user),
    }


@pytest.fixture
def start(servers):
    def start(num_shards=2, features=FEATURES, **settings):
        client = servers.client(servers.start(num_shards))
        worker = ShardedLookup(client, features, **settings)
        worker.add_tables(TABLES)
        return worker

    return start


class ReferenceWorker:
    """The same on a dictionary: each id of each bag, one after the other."""

    def __init__(self):
        self.store = ReferenceStore(10**6)
        self.store.tables = TABLES

    def pull(self, bags):
        return np.concatenate([self._pool(f, bags[f.key]) for f in FEATURES], axis=1)

    def push(self, bags, grads_BT):
        names = [table.name for table in TABLES]
        sums = [{} for _ in TABLES]
        for feature, columns in zip(FEATURES, COLUMNS, strict=True):
            ids, lengths = self._ids(feature, bags), self._lengths(feature, bags)
            bag_of = np.repeat(np.arange(len(lengths)), lengths)
            for id_, b in zip(ids, bag_of, strict=True):
                grad = grads_BT[b, columns].astype(np.float64)
                share = grad * reference.scale(lengths[b], feature.pooling)
                of_table = sums[names.index(feature.table)]
                of_table[id_] = of_table.get(id_, 0) + share
        for table, of_table in enumerate(sums):
            self.store.update(table, list(of_table), list(of_table.values()))

    def _pool(self, feature, bag):
        table = [table.name for table in TABLES].index(feature.table)
        ids = self._ids(feature, {feature.key: bag})
        rows = self.store.lookup(table, ids, training=True)
        lengths = self._lengths(feature, {feature.key: bag})
        return reference.pool(rows, lengths, feature.pooling)

    def _lengths(self, feature, bags):
        return bags[feature.key].lengths * max(feature.hash_stack_rounds, 1)

    def _ids(self, feature, bags):
        ids = bags[feature.key].ids.tolist()
        if feature.hash_stack_rounds:
            rounds, size = feature.hash_stack_rounds, feature.hash_stack_size
            ids = [b for id_ in ids for b in reference.hash_stack(id_, rounds, size)]
        if not feature.prefix:
            return ids
        return [id_ % (2**56 - 1) + feature.prefix for id_ in ids]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_batches_are_pooled_and_trained_as_in_the_reference(start, num_shards):
    worker, slow = start(num_shards), ReferenceWorker()
    rng = np.random.default_rng(0)
    for step in range(6):
        bags = random_batch(step)
        (pooled,), batch = worker.pull(bags, BatchNumber(1, step))
        assert pooled.flags.c_contiguous
        np.testing.assert_allclose(pooled, slow.pull(bags), rtol=1e-4, atol=1e-5)
        grads = rng.standard_normal(pooled.shape).astype(np.float32)
        assert missed(worker.push(batch, (grads,))) == 0
        slow.push(bags, grads)


def test_an_id_of_two_features_is_pulled_once_and_updated_once(start):
    worker = start(1)
    bags = {"bought": bags_of([7, 7]), "seen": bags_of([7]), "user": bags_of([])}
    (pooled,), batch = worker.pull(bags, BatchNumber(1, 1))
    assert batch.groups[0].ids.tolist() == [7]
    before = pooled[0, 7:11]
    grads = np.zeros((1, NUM_COLUMNS), dtype=np.float32)
    grads[0, :4], grads[0, 7:11] = 1, 2
    missed(worker.push(batch, (grads,)))
    (after,), _ = worker.pull(bags, None)
    # One step of Adagrad with the gradient 1 + 1 + 2, not three steps.
    step = 0.1 * 4 / np.sqrt(0.01 + 4 * 4)
    np.testing.assert_allclose(after[0, 7:11], before - step, rtol=1e-5)


def test_a_lookup_that_is_not_for_training_leaves_no_trace(start):
    worker = start()
    (pooled,), batch = worker.pull(random_batch(0), None)
    assert batch.number is None
    assert not pooled.any()
    (trained,), _ = worker.pull(random_batch(0), BatchNumber(1, 1))
    assert trained.any()


def test_a_batch_that_is_given_up_changes_nothing(start):
    worker = start()
    bags = random_batch(0)
    (before,), batch = worker.pull(bags, BatchNumber(1, 1))
    assert missed(worker.abandon(batch)) == 0
    (after,), _ = worker.pull(bags, None)
    assert np.array_equal(after, before)


@pytest.mark.parametrize("num_samples", [0, 1])
def test_batches_without_samples_or_ids_are_batches_too(start, num_samples):
    worker = start()
    nothing = bags_of(*[[]] * num_samples)
    bags = {"bought": nothing, "seen": nothing, "user": nothing}
    (pooled,), batch = worker.pull(bags, BatchNumber(1, 1))
    assert pooled.shape == (num_samples, NUM_COLUMNS)
    assert not pooled.any()
    assert missed(worker.push(batch, (np.ones_like(pooled),))) == 0


def test_half_precision_rounds_rows_and_gradients_on_the_way(start):
    exact, half = start(), start(precision=Precision.BF16)
    bags = random_batch(1)
    results = []
    for worker in (exact, half):
        (pooled,), batch = worker.pull(bags, BatchNumber(1, 1))
        missed(worker.push(batch, (np.full_like(pooled, 1 + 2**-10),)))
        results += [pooled, worker.pull(bags, None)[0][0]]
    for of_exact, of_half in zip(results[:2], results[2:], strict=True):
        assert not np.array_equal(of_half, of_exact)
        np.testing.assert_allclose(of_half, of_exact, rtol=0.02, atol=0.1)


def test_a_gradient_may_have_any_layout_in_memory(start):
    grads = np.random.default_rng(0).standard_normal((20, NUM_COLUMNS))
    grads = grads.astype(np.float32)
    results = []
    for layout in (grads, np.asfortranarray(grads)):
        worker = start()
        _, batch = worker.pull(random_batch(0), BatchNumber(1, 1))
        missed(worker.push(batch, (layout,)))
        results.append(worker.pull(random_batch(0), None)[0][0])
    assert np.array_equal(*results)


@pytest.mark.parametrize("shape", [(20, 16), (19, 17), (17, 20), (340,)])
def test_a_gradient_of_another_shape_is_rejected(start, shape):
    worker = start()
    _, batch = worker.pull(random_batch(0), BatchNumber(1, 1))
    with pytest.raises(BatchError, match=r"the shapes \[\(20, 17\)\]\. Received: \[\("):
        worker.push(batch, (np.zeros(shape, dtype=np.float32),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shop": bags_of([1])}, r"missing \[\], unknown \['shop'\]"),
        ({"seen": None}, r"\['bought', 'seen', 'user'\]\. .*missing \['seen'\]"),
        ({"seen": bags_of([1], [2])}, r"same number of samples.*'seen': 2"),
        (
            {"seen": Bags(ids_of(1, 2), np.ones(1, dtype=np.int32))},
            "Feature 'seen': lengths must not be negative and must sum up",
        ),
        (
            {"seen": Bags(np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int32))},
            "Feature 'seen': ids must be a flat uint64",
        ),
    ],
)
def test_a_batch_that_does_not_fit_the_features_is_rejected(start, change, message):
    bags = dict.fromkeys(("bought", "seen", "user"), bags_of([1])) | change
    bags = {name: bag for name, bag in bags.items() if bag is not None}
    worker = start()
    with pytest.raises(BatchError, match=message):
        worker.pull(bags, BatchNumber(1, 1))


def test_the_columns_equal_those_of_the_features_in_their_order(start):
    assert start().dims() == [4, 3, 4, 3, 3]
    alone = start(features=FEATURES[1:2])
    assert alone.dims() == [3]
    (pooled,), _ = alone.pull({"user": bags_of([1], [2])}, BatchNumber(1, 1))
    assert pooled.shape == (2, 3)


@pytest.mark.parametrize(
    "features", [[], [FEATURES[0], FEATURES[1]._replace(name=FEATURES[0].name)]]
)
def test_features_must_be_there_and_have_names_of_their_own(start, features):
    with pytest.raises(
        ConfigError, match="features must be non-empty with unique names"
    ):
        start(features=features)


def test_a_table_that_is_missing_is_named(start):
    with pytest.raises(ConfigError, match=r"No table 'users', which a feature names\."):
        start().add_tables(TABLES[:1])


def test_tables_that_want_counts_learn_how_often_an_id_is_in_a_batch(
    servers, monkeypatch
):
    monkeypatch.setattr(config, "EmbeddingStore", RecordingStore)
    running = servers.start(2)
    counting = dataclasses.replace(TABLES[0], name="counting")
    features = [
        FeatureSpec(name="a", key="a", table="counting"),
        FeatureSpec(name="b", key="b", table="counting"),
    ]
    worker = ShardedLookup(servers.client(running), features)
    worker.add_tables([counting])
    bags = {"a": bags_of([5, 7, 5], [5]), "b": bags_of([7], [9, 9])}
    _, batch = worker.pull(bags, BatchNumber(1, 1))
    [split], [counts_U] = batch.groups, batch.counts
    counted = dict(zip(split.ids.tolist(), counts_U.tolist(), strict=True))
    assert counted == {5: 3, 7: 2, 9: 2}
    received = [server.server.shard.store.counts for server in running]
    assert received == [
        [counts_U[split.offsets[p] : split.offsets[p + 1]].tolist()] for p in (0, 1)
    ]
    _, batch = worker.pull(bags, None)
    assert batch.counts == [None]
    assert [len(counts) for counts in received] == [1, 1]  # a read takes none
