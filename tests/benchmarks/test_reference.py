"""What a benchmark draws, expects and reports."""

import math
import os

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.filled import FilledServer, FilledStore
from benchmarks.harness import Table, Timings, interleave
from benchmarks.reference import (
    OPTIMIZERS,
    ids_of,
    is_equal,
    require_equal,
    stepped,
    table_of,
    weights_of,
)
from benchmarks.store import Evictions, StoreSettings
from benchmarks.workload import Workload, zipf_ranks
from persia_torchrec.errors import StoreError
from tests.support.reference import Row, step

SMALL = StoreSettings(
    dims=(4,), rows=2048, ids=32, repeats=3, zipf_draws=64, zipf_range=4000, sizes=(64,)
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_expected_update_is_the_formula_of_the_optimizer(name):
    optimizer, dim, num = OPTIMIZERS[name], 5, 4
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((num, dim)).astype(np.float32)
    state = np.tile(optimizer.initial_state(dim), (num, 1))
    floats = np.concatenate([weights, state], axis=1)
    rows = [Row(f[:dim].astype(float), f[dim:].astype(float)) for f in floats]
    for t in range(1, 5):
        grads = rng.standard_normal((num, dim)).astype(np.float32)
        grads[1] = 0
        floats = stepped(optimizer, floats, grads, t)
        for row, grad in zip(rows, grads, strict=True):
            step(optimizer, row, grad.astype(float), t)
    expected = np.float32([row.floats() for row in rows])
    np.testing.assert_allclose(floats, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("factor", [1 + 1e-3, -1, math.nan, math.inf])
def test_one_wrong_number_is_detected(factor):
    ids = ids_of(np.arange(10))
    expected = weights_of(ids, 3)
    rows = expected.copy()
    require_equal("a lookup", ids, rows, expected)
    rows[7, 2] *= factor
    assert np.argwhere(~is_equal(rows, expected)).tolist() == [[7, 2]]
    with pytest.raises(StoreError, match=r"1 of 10 are not, the first at 7, column 2"):
        require_equal("a lookup", ids, rows, expected)
    with pytest.raises(StoreError, match=r"shape must be \(10, 3\). Received: \(9, 3"):
        require_equal("a lookup", ids, expected[:9], expected)


def test_zipf_ranks_are_as_frequent_as_they_should_be():
    ranks = zipf_ranks(np.random.default_rng(0), 10**9, 200_000)
    shares = np.arange(1, 5) ** -1.2 / 5.5915824  # the sum of all k**-1.2
    found = np.bincount(ranks[ranks < 4]) / len(ranks)
    np.testing.assert_allclose(found, shares, atol=0.005)
    assert set(zipf_ranks(np.random.default_rng(0), 50, 10_000)) == set(range(50))


def test_zipf_requests_have_each_number_once_and_popular_ones_in_common():
    requests, num_numbers = SMALL.draw_zipf(20)
    every = np.concatenate(requests)
    assert SMALL.rows < every.max() + 1 <= num_numbers  # ranks reach beyond the rows
    for numbers in requests:
        assert len(np.unique(numbers)) == len(numbers) <= SMALL.zipf_draws
    most_popular = np.bincount(every).argmax()
    assert all(most_popular in numbers for numbers in requests)
    [numbers] = Workload().draw_zipf(1).requests
    assert 20_000 < len(numbers) < 21_500


def test_eviction_of_rows_that_are_not_the_oldest_is_detected():
    evictions = Evictions(SMALL, 4)
    store = evictions.filled.store
    oldest = ids_of(np.arange(SMALL.ids))
    store.lookup(0, oldest, np.empty((SMALL.ids, 4), np.float32), training=True)
    # The rows that leave now are asked for, or others are there in their place.
    with pytest.raises(StoreError, match=r"rows must be what|still there must be 0"):
        interleave(evictions.turn, 3)


def test_an_update_of_a_missing_row_is_detected():
    filled = FilledStore(table_of(4), 64)
    lookup = filled._look_up

    def forget(ids):
        rows = lookup(ids)
        filled.store.remove(0, ids[:3])
        return rows

    filled._look_up = forget
    with pytest.raises(StoreError, match=r"without a row must be 0. Received: 3"):
        filled.run(filled.draw(8))


@pytest.fixture
def server(servers):
    client = servers.client(servers.start(1, capacity_rows=256))
    return FilledServer(table_of(4), 256, client, os.getpid())


def test_a_stream_sees_rows_that_its_staleness_allows(server):
    rng = np.random.default_rng(0)
    overlapping = [rng.choice(64, 32, replace=False) for _ in range(12)]
    for _ in range(3):
        assert server.stream(overlapping) > 0
    assert server.pull_at_once(overlapping) > 0


def test_a_row_that_exceeds_the_staleness_is_detected(server):
    numbers = server.draw(32)
    grads = np.ones((32, 4), np.float32)
    server.expected.update(numbers, grads)  # and never sent
    with pytest.raises(StoreError, match=r"lookup in flight.* 32 of 32"):
        server.stream([numbers] * 6)


def test_rates_count_rows_and_the_mean_counts_all_seconds():
    timings = Timings()
    for rows, seconds in ((3_000_000, 1.0), (1_000_000, 1.0), (2_000_000, 2.0)):
        timings.add("zipf | lookup", rows, seconds)
        timings.add("- | memory copy", rows, seconds / 2)
    assert timings.rate("zipf | lookup") == (1, 1.5, 1, 3, 2000)
    assert timings.ns_per_row("zipf | lookup")[:3] == (1000, 1000 / 1.5, 1000)
    [row, copy] = timings.rows(lambda _: "- | memory copy")
    assert row == ["zipf", "lookup", 1, 1.5, 1, 3, 2000, 0.5]
    assert copy[-1] == 1
    assert timings.paired_ratio("zipf | lookup", "- | memory copy") == 0.5


def test_a_table_is_written_with_three_significant_digits():
    numbers = [1234.5, 12.345, 0.012345, 0.0099999, 1e-6, -0.5, 60_000_000, None]
    rows = [("large", number) for number in numbers]
    text = Table("t", "Why?", "what | v, ms", rows, ["A note."]).to_markdown()
    assert text.startswith("## t\n\nWhy?\n\n| what")
    assert text.endswith("\n- A note.\n")
    written = [line.split("|")[2].strip() for line in text.splitlines()[6:-2]]
    expected = ["1234", "12.3", "0.0123", "0.0100", "0.00000", "-0.500", "60000000"]
    assert written == [*expected, "-"]


def test_the_peak_includes_memory_that_was_freed():
    harness.reset_peak()
    before = harness.resident_bytes()
    block = bytearray(os.urandom(1024) * 2**16)
    del block
    assert harness.peak_bytes() - before > 0.9 * 2**26
