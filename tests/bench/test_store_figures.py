from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.bench import filling
from persia_torchrec.bench.eviction import KINDS, Evictions, LastUse
from persia_torchrec.bench.filled_store import FilledStore
from persia_torchrec.bench.overhead import measure_overhead
from persia_torchrec.bench.plain_rows import PlainRows
from persia_torchrec.bench.rates import TURN, StoreRates, num_turns, timings_of
from persia_torchrec.bench.report import Timings
from persia_torchrec.bench.settings import OPTIMIZERS
from persia_torchrec.bench.stages import StoreStages
from persia_torchrec.bench.workload import ids_of, weights_of
from persia_torchrec.errors import StoreError


def overwrite(filled, shift=0.001):
    """Change all weights behind the benchmark's back, and no state."""
    ids = ids_of(np.arange(filled.num_rows))
    filled.store.write(0, ids, weights_of(ids, filled.spec.dim) + np.float32(shift))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_passes_the_checks(small, optimizer):
    settings = replace(small, optimizer=optimizer)
    for bench in (StoreRates, Evictions, StoreStages):
        made = bench(settings, 4)
        timings = timings_of(made, num_turns(settings))
        for operation in timings.requests:
            rate = timings.rate(operation)
            assert 0 < rate.slowest <= rate.median <= rate.fastest
            assert rate.slowest <= rate.mean <= rate.fastest
        made.filled.store.check()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_loops_compute_what_the_store_does(small, optimizer):
    spec = replace(small, optimizer=optimizer).table(4)
    plain, filled = PlainRows(spec, small.rows), FilledStore(spec, small.rows)
    for _ in range(2):
        requests = [filled.draw(small.ids) for _ in range(3)]
        grads = [filled.grads(len(request)) for request in requests]
        seconds = plain.steady(requests, grads)
        assert len(seconds) == 2
        assert all(taken > 0 for both in seconds for taken in both)


def test_a_plain_loop_that_computes_something_else_is_noticed(small):
    spec = small.table(4)
    plain, filled = PlainRows(spec, small.rows), FilledStore(spec, small.rows)
    request = filled.draw(small.ids)
    plain.steady([request], [filled.grads(small.ids)])
    plain._floats[request[-1]] += 0.01
    with pytest.raises(StoreError, match="plain lookup"):
        plain.steady([request], [filled.grads(small.ids)])


def test_each_kind_of_request_is_timed_some_times_a_turn(small):
    timings = timings_of(StoreRates(small, 4), num_turns(small))
    assert set(timings.requests) == {
        *(f"{kind} {name}" for kind in ("zipf", "uniform") for name in STEPS),
        "memory_copy",
    }
    num_timed = TURN * num_turns(small)
    assert num_timed >= small.repeats
    assert {len(requests) for requests in timings.requests.values()} == {num_timed}
    assert {num for num, _ in timings.requests["uniform lookup"]} == {small.ids}


STEPS = ("lookup", "update", "both")


def test_half_of_the_ids_or_all_are_new_and_each_evicts_a_row(small):
    bench = Evictions(small, 4)
    timings = timings_of(bench, num_turns(small))
    for kind in KINDS:
        assert len(timings.requests[f"{kind} lookup"]) == TURN * num_turns(small)
    counters = bench.filled.store.counters()
    num_requests = (num_turns(small) + 1) * (TURN + 1)
    num_new = num_requests * (small.ids + small.ids // 2)
    assert counters["evictions"] == num_new
    assert counters["rows"] == small.rows
    assert counters["gradients_missed"] == 0


@pytest.mark.parametrize("bench", [StoreRates, Evictions, StoreStages])
def test_wrong_weights_are_noticed(small, bench):
    made = bench(small, 4)
    overwrite(made.filled)
    with pytest.raises(StoreError, match=r"lookup, dim 4: rows must be what NumPy"):
        made.repeat(Timings())


@pytest.mark.parametrize("bench", [StoreRates, Evictions, StoreStages])
def test_a_wrong_update_is_noticed(small, bench):
    made = bench(small, 4)
    # One update more than the benchmark knows of: the state is wrong, and no weight.
    ids = ids_of(np.arange(made.filled.num_rows))
    made.filled.store.update(0, ids, np.full((len(ids), 4), 0.1, dtype=np.float32))
    overwrite(made.filled, shift=0)
    # Where requests follow one another, the next to look such a row up may notice.
    with pytest.raises(
        StoreError, match=r"date, dim 4: rows must|kup, dim 4: rows must"
    ):
        made.repeat(Timings())


def test_rows_that_leave_although_others_are_older_are_noticed(small):
    # So many rows that one turn uses few of them.
    bench = Evictions(replace(small, rows=64 * small.ids), 4)
    oldest = ids_of(np.arange(small.ids))
    rows = np.empty((small.ids, 4), dtype=np.float32)
    bench.filled.store.lookup(0, oldest, rows, training=True)
    # The rows that leave now are either asked for, or others are there in their place.
    with pytest.raises(StoreError, match=r"rows must be what|rows must have been evic"):
        timings_of(bench, num_turns(small))


def test_missing_rows_are_noticed(small):
    filled = FilledStore(small.table(4), 64)
    filled.store.clear()
    numbers = filled.draw(8)
    with pytest.raises(StoreError, match=r"8 ids must have as many slots. Received: 0"):
        filled.find(numbers)
    with pytest.raises(StoreError, match=r"every id must have a row. Received: 8 have"):
        filled.update(numbers, None)


def test_an_update_may_have_all_ids_several_times(small):
    filled = FilledStore(small.table(4), 64)
    numbers = filled.draw(16)
    _, hints = filled.lookup(numbers)
    filled.update(numbers, hints, num_times=3)
    filled.update(numbers, None, num_times=2)
    filled.lookup(numbers)


class SlowLastUse:
    """The reference: an ordered dictionary, oldest first."""

    def __init__(self, num_rows):
        self.rows = OrderedDict.fromkeys(range(num_rows))

    def touch(self, numbers):
        for number in numbers:
            self.rows.pop(number, None)
            self.rows[number] = None

    def replace_oldest(self, new):
        left = [self.rows.popitem(last=False)[0] for _ in new]
        stayed = list(self.rows)
        self.rows.update(dict.fromkeys(new))
        return left, stayed


@given(st.data())
def test_the_oldest_rows_are_those_of_an_ordered_dictionary(data):
    num_rows = data.draw(st.integers(1, 8))
    fast, slow = LastUse(num_rows, 100), SlowLastUse(num_rows)
    next_new = num_rows
    for _ in range(data.draw(st.integers(0, 6))):
        num_new = data.draw(st.integers(0, num_rows))
        new = np.arange(next_new, next_new + num_new)
        next_new += num_new
        left, stayed = fast.replace_oldest(new)
        slow_left, slow_stayed = slow.replace_oldest(new.tolist())
        assert set(left.tolist()) == set(slow_left)
        assert sorted(stayed.tolist()) == sorted(slow_stayed)
        old = (
            data.draw(st.lists(st.sampled_from(slow_stayed), unique=True))
            if (slow_stayed)
            else []
        )
        touched = data.draw(st.permutations([*new.tolist(), *old]))
        fast.touch(np.array(touched, dtype=np.int64))
        slow.touch(touched)


def test_the_memory_of_a_store_is_that_of_its_rows_and_a_little(capfd, small):
    rows = 100_000
    [table] = measure_overhead(replace(small, dims=(64,), rows=rows))
    assert [row["moment"] for row in table.rows] == ["filled", "touched", "replaced"]
    for row in table.rows:
        assert row["row_bytes"] == 512
        # Page sizes and the interpreter's own memory allow some bytes either way.
        assert -40 < row["resident_beyond"] < 300
        assert row["peak_beyond"] >= row["resident_beyond"]
        assert 8 < row["counted_beyond"] < 200


def test_a_filling_that_cannot_be_done_is_an_error(capfd, small):
    with pytest.raises(StoreError, match=r"ended with 1; its error stands above"):
        measure_overhead(replace(small, rows=2**40))
    assert "capacity_rows must be in" in capfd.readouterr().err


def test_the_filling_notices_a_wrong_row(monkeypatch, small):
    filler = filling.Filling(64, small.table(4))
    filler.fill()
    ids = ids_of(np.arange(64))
    filler.store.write(0, ids[:1], np.ones((1, 4), dtype=np.float32))
    with pytest.raises(StoreError, match=r"1 of 64"):
        filler.touch()
