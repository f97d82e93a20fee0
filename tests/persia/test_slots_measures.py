"""What an embedding worker tells a metrics gateway."""

import math
import threading
import time

import numpy as np
import pytest

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import BatchError
from persia_torchrec.lookup.bags import encode_bags
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import Means
from persia_torchrec.persia.slots import LookupMeasures, SlotsLookup
from persia_torchrec.persia.worker.process import (
    IdBuffer,
    WorkerProcess,
    make_lookup,
    pushing_metrics,
)
from persia_torchrec.rpc.messages import TRAINING, Header, Kind, encode_json
from persia_torchrec.table import TableSpec
from tests.support.one_feature import bags_of
from tests.support.servers import DEADLINE_S
from tests.support.threads import InThread

# Two slots share a table; the third is raw.
CONFIG = """
feature_index_prefix_bit: 8
slots_config:
  item: {dim: 2}
  basket: {dim: 2}
  word: {dim: 3, embedding_summation: false, sample_fixed_size: 4}
feature_groups:
  things: [item, basket]
"""
SCHEMA = load_embedding_config("config", CONFIG)
TABLES = [
    TableSpec(name="things", dim=2, optimizer=SGD(1.0)),
    TableSpec(name="word", dim=3, optimizer=SGD(1.0)),
]
HOURLY = MetricsSettings(push_interval_seconds=3600)


@pytest.fixture
def lookup(servers, gateway):
    lookup = make_lookup(servers.client(servers.start(2)), SCHEMA, HOURLY)
    lookup.add_tables(TABLES)
    return lookup


def batch_of(item, basket, word):
    return {
        **bags_of(*item, name="item"),
        **bags_of(*basket, name="basket"),
        **bags_of(*word, name="word"),
    }


BATCH = batch_of([[1, 2], [1]], [[1, 1, 1], [1]], [[5], []])


def readings_of(lookup, means=None):
    """Return values by name and feature."""
    found = lookup.measures.read(means or Means())
    return {(r.name, r.feature): r.value for r in found}


def train(lookup, bags, batch=1, grads=None):
    outputs, pulled = lookup.pull(bags, BatchNumber(1, batch))
    return lookup.update(pulled, grads or [np.ones_like(o) for o in outputs])


def test_a_lookup_is_measured_where_measures_are_read(servers, lookup, monkeypatch):
    assert lookup.measures is not None
    monkeypatch.delenv("PERSIA_METRICS_GATEWAY_ADDR")
    client = servers.client(servers.start())
    assert make_lookup(client, SCHEMA, HOURLY).measures is None


def test_the_rate_of_unique_ids_is_that_of_each_feature(lookup):
    lookup.pull(BATCH, None)
    means = Means()
    rates = readings_of(lookup, means)
    assert rates["batch_unique_indices_rate", "item"] == pytest.approx(2 / 3)
    assert rates["batch_unique_indices_rate", "basket"] == pytest.approx(1 / 4)
    assert rates["batch_unique_indices_rate", "word"] == 1
    lookup.pull(batch_of([[1, 1]], [[]], [[5, 5, 6, 5]]), None)
    rates = readings_of(lookup, means)
    assert rates["batch_unique_indices_rate", "item"] == pytest.approx(1 / 2)
    assert rates["batch_unique_indices_rate", "word"] == pytest.approx(1 / 2)
    assert rates["batch_unique_indices_rate", "basket"] == pytest.approx(1 / 4)


def test_different_ids_are_estimated_by_feature(lookup):
    for first in range(0, 3000, 1000):
        items = [list(range(first, first + 1000)), [0, 1, 2]]
        lookup.pull(batch_of(items, [[], []], [[7, 7], [0, 1, 2, 3, 4]]), None)
    readings = readings_of(lookup)
    assert readings["estimated_distinct_id", "item"] == pytest.approx(3000, rel=0.03)
    assert readings["estimated_distinct_id", "basket"] == 0
    # No more than sample_fixed_size ids of a sample are looked up.
    assert round(readings["estimated_distinct_id", "word"]) == 5


def test_ids_are_counted_where_buckets_stand_for_them(servers, gateway):
    schema = load_embedding_config(
        "config",
        "{feature_index_prefix_bit: 8, slots_config: {item: {dim: 2, "
        "hash_stack_config: {hash_stack_rounds: 2, embedding_size: 5}}}}",
    )
    lookup = make_lookup(servers.client(servers.start()), schema, HOURLY)
    lookup.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    lookup.pull(bags_of(list(range(100))), None)
    readings = readings_of(lookup)
    assert readings["estimated_distinct_id", "item"] == pytest.approx(100, rel=0.03)
    # 2 rounds of 5 buckets.
    assert readings["batch_unique_indices_rate", "item"] == pytest.approx(10 / 200)


def test_the_parts_of_a_lookup_make_up_its_time(lookup):
    train(lookup, BATCH)
    readings = readings_of(lookup)
    parts = [
        readings[f"lookup_{part}_time_cost_sec", None]
        for part in ("preprocess", "rpc", "postprocess")
    ]
    total = readings["lookup_total_time_cost_sec", None]
    assert min(parts) > 0
    assert sum(parts) <= total < DEADLINE_S
    assert 0 < readings["update_gradient_time_cost_sec", None] < DEADLINE_S


def test_the_embeddings_equal_those_of_a_lookup_that_is_not_measured(servers):
    client = servers.client(servers.start(2))
    features = make_lookup(client, SCHEMA, MetricsSettings(enable_metrics=False))
    measures = LookupMeasures(features.features)
    measured = SlotsLookup(client, features.features, measures)
    measured.add_tables(TABLES)
    train(measured, BATCH)
    ours, _ = measured.pull(BATCH, None)
    others, _ = features.pull(BATCH, None)
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_that_are_not_finite_are_counted_by_feature(lookup):
    readings = readings_of(lookup)
    for feature in SCHEMA.slots:
        assert readings["nan_count", feature] == 0
        assert readings["nan_grad_skipped", feature] == 0
    pooled = np.ones((2, 4), dtype=np.float32)
    pooled[0, 2:] = math.nan, math.inf  # basket, of the first sample
    word = np.full((1, 3), math.nan, dtype=np.float32)
    outcome = train(lookup, BATCH, grads=(pooled, word))
    assert outcome.num_refused == 2  # id 1 of the group, 5 of word
    readings = readings_of(lookup)
    counts = {
        feature: (
            readings["nan_count", feature],
            readings["nan_grad_skipped", feature],
        )
        for feature in SCHEMA.slots
    }
    assert counts == {"item": (0, 0), "basket": (2, 1), "word": (3, 1)}


def test_missing_slots_of_a_batch_are_not_measured(lookup):
    word = np.full((1, 3), math.nan, dtype=np.float32)
    bags = {**bags_of([5], name="word"), **bags_of([1, 1], name="basket")}
    outcome = train(lookup, bags, grads=(np.ones((1, 2), dtype=np.float32), word))
    assert outcome.num_refused == 1
    readings = readings_of(lookup)
    assert readings["nan_count", "word"] == 3
    assert readings["nan_count", "basket"] == readings["nan_count", "item"] == 0
    assert readings["batch_unique_indices_rate", "basket"] == 1 / 2
    assert ("batch_unique_indices_rate", "item") not in readings
    assert readings["estimated_distinct_id", "item"] == 0


def test_a_lookup_that_fails_is_not_measured(lookup):
    with pytest.raises(BatchError):
        lookup.pull(bags_of([1], name="itme"), None)
    assert ("lookup_total_time_cost_sec", None) not in readings_of(lookup)


def test_batches_that_wait_are_pushed(gateway, lookup):
    process = WorkerProcess(lookup, IdBuffer(10, expires_s=60))
    every_second = MetricsSettings(push_interval_seconds=1)

    def ask(kind, *frames, **header):
        header = Header(kind, **header)
        return process.answer(header, [header.encode(), *frames])

    with pushing_metrics(process, 2, every_second):
        for loader, number in ((0, 1), (0, 2), (1, 1)):
            ask(Kind.BUFFER_IDS, *encode_bags(BATCH), stream=loader, batch=number)
        for batch in (1, 2):
            origin = encode_json(None)
            ask(
                *(Kind.FORWARD, origin, *encode_bags(BATCH)),
                stream=9,
                batch=batch,
                flags=TRAINING,
            )
        labels = {"role": "embedding_worker", "instance": "rep_2"}
        waiting = gateway.next(**labels)
        assert waiting.values["num_pending_batches"] == 3  # not 2 loaders
        assert waiting.values["staleness"] == 2
        ask(Kind.ABANDON, encode_json(None), stream=9, batch=1)
    last = gateway.pushes(**labels)[-1]
    assert last.values["staleness"] == 1
    assert last.features["batch_unique_indices_rate"].keys() == SCHEMA.slots.keys()


def test_a_batch_is_stale_until_its_update_is_applied(lookup):
    process = WorkerProcess(lookup, IdBuffer(10, expires_s=60))
    applying, applied = threading.Event(), threading.Event()
    update = lookup.update

    def slow_update(batch, grads):
        applying.set()
        assert applied.wait(DEADLINE_S)
        return update(batch, grads)

    lookup.update = slow_update
    header = Header(Kind.FORWARD, stream=9, batch=1, flags=TRAINING)
    frames = [header.encode(), encode_json(None), *encode_bags(BATCH)]
    outputs = process.answer(header, frames)[1:3]
    back = Header(Kind.BACKWARD, stream=9, batch=1)
    frames = [back.encode(), encode_json(None), *outputs]
    pushing = InThread(process.answer, back, frames)
    assert applying.wait(DEADLINE_S)
    assert len(process.open) == 1
    applied.set()
    pushing.result()
    assert len(process.open) == 0


def test_without_a_gateway_a_worker_works_as_before(servers, monkeypatch):
    monkeypatch.delenv("PERSIA_METRICS_GATEWAY_ADDR", raising=False)
    lookup = make_lookup(servers.client(servers.start()), SCHEMA, HOURLY)
    lookup.add_tables(TABLES)
    began_s = time.monotonic()
    process = WorkerProcess(lookup, IdBuffer(10, expires_s=60))
    with pushing_metrics(process, 0, HOURLY):
        assert train(lookup, BATCH).num_missed == 0
    assert time.monotonic() - began_s < DEADLINE_S
