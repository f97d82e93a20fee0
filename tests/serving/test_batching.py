"""Batches of several requests are predicted together, each with its own answer."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import (
    BatchError,
    PersiaError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.persia.predict_requests import features_of
from persia_torchrec.serving import batching as module
from persia_torchrec.serving.batching import Batcher, Batching, Inputs, join
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S, ids_of

MODEL = "model"


def batch(*lengths, first=0):
    """Return a batch whose samples have so many ids, from ``first`` on."""
    num, ids = len(lengths), ids_of(*range(first, first + sum(lengths)))
    batch = PersiaBatch(
        [
            IDTypeFeature.from_flat("a", ids, np.array(lengths, np.int32)),
            IDTypeFeatureWithSingleID("b", ids_of(*range(first, first + num))),
        ],
        [NonIDTypeFeature(np.arange(first, first + num, dtype=np.float32)[:, None])],
        requires_grad=False,
    )
    return Inputs.of(features_of(batch))


def sums(of):
    """Return per sample the sum of its ids, its single id and its dense number."""
    a, b = of.ids["a"], of.ids["b"]
    owner = np.repeat(np.arange(of.batch_size), a.lengths)
    total = np.bincount(owner, a.ids.astype(float), of.batch_size)
    dense = of.dense[0][:, 0]
    return (total + b.ids + dense).astype(np.float32)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1))
def test_a_joined_batch_has_the_samples_of_all(shapes):
    batches = [batch(*lengths, first=100 * i) for i, lengths in enumerate(shapes)]
    expected = np.concatenate([sums(one) for one in batches])
    np.testing.assert_array_equal(sums(join(batches)), expected)


class Runs:
    """Counts what is run, and holds it until the test lets it continue."""

    def __init__(self):
        self.sizes = []
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.may_end.set()

    def __call__(self, of):
        self.sizes.append(of.batch_size)
        self.begun.release()
        assert self.may_end.wait(DEADLINE_S)
        if (sums(of) >= 10**6).any():
            raise BatchError("an id is too large")
        return sums(of)


def waiting(batcher):
    """Return how many samples are in the group that is open."""
    group = batcher._open.get(id(MODEL))
    return 0 if group is None else group.num_samples


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_requests_during_a_prediction_are_the_next_batch(pool):
    batcher, runs = Batcher(Batching(0.0, 100)), Runs()
    runs.may_end.clear()
    first = pool.submit(batcher.predict, MODEL, runs, batch(1))
    assert runs.begun.acquire(timeout=DEADLINE_S)
    others = [batch(2, 1, first=i) for i in range(1, 9)]
    futures = [pool.submit(batcher.predict, MODEL, runs, one) for one in others]
    wait_until(lambda: waiting(batcher) == 16, "all wait")
    runs.may_end.set()
    assert first.result(DEADLINE_S) == sums(batch(1))
    for one, future in zip(others, futures, strict=True):
        np.testing.assert_array_equal(future.result(DEADLINE_S), sums(one))
    assert runs.sizes == [1, 16]


def test_a_full_group_does_not_wait_for_its_window(pool):
    batcher, runs = Batcher(Batching(3600.0, 4)), Runs()
    batches = [batch(1, 1, 1, first=i) for i in range(2)]
    first = pool.submit(batcher.predict, MODEL, runs, batches[0])
    wait_until(lambda: waiting(batcher) == 3, "the first waits")
    second = pool.submit(batcher.predict, MODEL, runs, batches[1])
    np.testing.assert_array_equal(first.result(DEADLINE_S), sums(batches[0]))
    batcher.flush()
    np.testing.assert_array_equal(second.result(DEADLINE_S), sums(batches[1]))
    assert runs.sizes == [3, 3]
    large = batch(*[1] * 5)
    np.testing.assert_array_equal(batcher.predict(MODEL, runs, large), sums(large))


def test_of_a_group_that_fails_each_batch_has_its_own_answer(pool):
    batcher, runs = Batcher(Batching(3600.0, 4)), Runs()
    good = pool.submit(batcher.predict, MODEL, runs, batch(1, 1))
    wait_until(lambda: waiting(batcher) == 2, "the first waits")
    bad = pool.submit(batcher.predict, MODEL, runs, batch(1, first=10**6))
    wait_until(lambda: waiting(batcher) == 3, "both wait")
    batcher.flush()
    np.testing.assert_array_equal(good.result(DEADLINE_S), sums(batch(1, 1)))
    with pytest.raises(BatchError, match="an id is too large"):
        bad.result(DEADLINE_S)
    assert runs.sizes == [3, 2, 1]


def test_models_are_not_mixed(pool):
    batcher, runs = Batcher(Batching(3600.0, 100)), Runs()
    futures = [pool.submit(batcher.predict, name, runs, batch(1)) for name in "ab"]
    wait_until(lambda: len(batcher._open) == 2, "both wait")
    batcher.flush()
    assert [future.result(DEADLINE_S) for future in futures] == [sums(batch(1))] * 2
    assert runs.sizes == [1, 1]


def test_a_request_waits_no_longer_than_a_limit(pool, monkeypatch):
    monkeypatch.setattr(module.timeouts, "REQUEST_S", 0.0)
    batcher, runs = Batcher(Batching(0.0, 100, timeout_s=0.5)), Runs()
    runs.may_end.clear()
    first = batcher.submit(MODEL, runs, batch(1))
    assert runs.begun.acquire(timeout=DEADLINE_S)
    second = batcher.submit(MODEL, runs, batch(1))
    with pytest.raises(RequestTimeoutError, match="a batch must be predicted within"):
        batcher.predict(MODEL, runs, batch(1))
    with pytest.raises(RequestTimeoutError, match="a batch must be predicted within"):
        asyncio.run(batcher.predict_async(MODEL, runs, batch(1)))
    runs.may_end.set()
    assert first.result(DEADLINE_S) == sums(batch(1))
    with pytest.raises(RequestTimeoutError):  # its turn came too late
        second.result(DEADLINE_S)
    assert runs.sizes == [1]


def test_embeddings_that_are_away_are_asked_once_for_a_group():
    asked = []

    def run(of):
        asked.append(of.batch_size)
        raise ServerError("it does not answer.", server="a server")

    batcher = Batcher(Batching(3600.0, 3))
    futures = [batcher.submit(MODEL, run, batch(1)) for _ in range(3)]
    for future in futures:
        with pytest.raises(ServerError, match="does not answer"):
            future.result(DEADLINE_S)
    assert asked == [3]


def test_what_waits_is_predicted_at_the_end():
    batcher, runs = Batcher(Batching(3600.0, 100)), Runs()
    future = batcher.submit(MODEL, runs, batch(1, 2))
    batcher.close()
    np.testing.assert_array_equal(future.result(DEADLINE_S), sums(batch(1, 2)))
    with pytest.raises(PersiaError, match="unloaded"):
        batcher.submit(MODEL, runs, batch(1))
