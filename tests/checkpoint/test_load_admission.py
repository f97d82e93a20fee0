"""A training that is saved and loaded admits ids as one that was never stopped."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from persia_torchrec import (
    AdmitAll,
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
    Expiry,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.table import TableSpec
from tests.support.saved_training import Training

BLOOM = AdmitBloom(4, expected_ids=1000)
FILTERS = {
    "all": AdmitAll(),
    "probability": AdmitProbability(0.5),
    "counter": AdmitFrequency(4, max_waiting_rows=200),
    "cbf": BLOOM,
}
EXPIRIES = {
    "none": Expiry(),
    "steps": Expiry(steps_to_live=3),
    "norm": Expiry(min_l2_norm=0.3, spared_steps=2),
}
SPEC = TableSpec(name="item", dim=2, optimizer=SGD(0.1), keeps_metadata=True)

MOVES = {
    "dump and load": (2, 2, False),
    "1 to 3": (1, 3, False),
    "3 to 2": (3, 2, False),
    "full and delta": (2, 2, True),
}
SHARED = {"own rows": 0, "shared rows": 7}
PAIRS = [  # each pair of settings; without an admission nothing is shared
    (*pair, move, rows)
    for move in MOVES
    for rows in SHARED
    for pair in (
        itertools.product(FILTERS, EXPIRIES)
        if move == "1 to 3"
        else zip(FILTERS, [*EXPIRIES, "steps"], strict=True)
    )
    if rows == "own rows" or pair[0] != "all"
]


@pytest.mark.slow
@pytest.mark.parametrize(("filter_", "expiry", "move", "rows"), PAIRS)
def test_a_saved_training_continues_exactly(tmp_path, filter_, expiry, move, rows):
    num_before, num_after, has_delta = MOVES[move]
    spec = replace(
        SPEC,
        admission=FILTERS[filter_],
        expiry=EXPIRIES[expiry],
        shared_rows=SHARED[rows],
    )
    undisturbed = Training(num_after, tmp_path / "other", spec)
    before = Training(num_before, tmp_path, spec)
    for training in (undisturbed, before):
        training.train(range(12))
    undisturbed.sweep()  # what has expired is not saved
    delta = None
    if has_delta:
        before.sweep()
        undisturbed.train(range(12, 20))
        delta = lambda: before.train(range(12, 20))  # noqa: E731
    folder = before.save(delta)
    after = Training(num_after, tmp_path, spec)
    logs = Folder(tmp_path / "increments") if has_delta else None
    for server in after.servers:
        assert server.load(folder, logs).forgotten == []
    is_exact = filter_ != "cbf" or num_before == num_after
    for steps in (range(20, 20), range(20, 30)):
        for training in (undisturbed, after):
            training.train(steps)
        assert after.waiting() == undisturbed.waiting()
        if is_exact:
            assert after.rows() == undisturbed.rows()
        else:
            assert after.rows().keys() >= undisturbed.rows().keys()
    assert len(after.rows()) > 10
    num_shared = sum(isinstance(key, tuple) for key in after.rows())
    assert num_shared == SHARED[rows]
    assert bool(after.waiting()) == (filter_ == "counter")


def test_a_filter_admits_what_exact_counts_admit_through_a_change_of_servers(tmp_path):
    exact = Training(3, tmp_path / "exact", replace(SPEC, admission=FILTERS["counter"]))
    before = Training(2, tmp_path, replace(SPEC, admission=BLOOM))
    for training in (exact, before):
        training.train(range(12))
    folder = before.save()
    after = Training(3, tmp_path, replace(SPEC, admission=BLOOM))
    for server in after.servers:
        server.load(folder)
    for step in range(12, 24):
        for training in (exact, after):
            training.train([step])
        assert after.rows().keys() >= exact.rows().keys()


@pytest.mark.parametrize(
    ("saved", "known"),
    [(BLOOM, replace(BLOOM, expected_ids=500)), (BLOOM, FILTERS["counter"])],
)
def test_a_filter_of_another_size_begins_again_and_the_load_reports_it(
    tmp_path, saved, known
):
    before = Training(1, tmp_path, replace(SPEC, admission=saved))
    before.train(range(3))
    folder = before.save()
    after = Training(1, tmp_path, replace(SPEC, admission=known))
    [server] = after.servers
    assert server.load(folder).forgotten == ["item"]
    assert len(server.store.states[0].sightings().keys) == 0


def test_a_threshold_that_is_changed_keeps_the_counts(tmp_path):
    training = Training(1, tmp_path, replace(SPEC, admission=AdmitFrequency(9)))
    [server] = training.servers
    ids, once = np.array([5], dtype=np.uint64), np.array([1], dtype=np.uint32)
    grads = np.ones((1, 2), dtype=np.float32)
    for _ in range(3):
        server.train(ids, once, grads)
    for admission in (AdmitFrequency(5), AdmitFrequency(5, max_waiting_rows=7)):
        server.store.add_tables([replace(SPEC, admission=admission)])
        assert training.waiting() == [(3, 5, 3)]
    server.train(ids, once, grads)
    assert server.store.num_rows == 0
    server.train(ids, once, grads)
    assert server.store.metadata(0, ids).frequency.tolist() == [5]


@dataclass(frozen=True)
class AdmitOwn(AdmitFrequency):
    """A custom admission, which says nothing of what it remembers."""

    kind = "own"

    def counts_as(self, other):
        return False


@pytest.mark.parametrize("admission", [AdmitOwn(3), *FILTERS.values()])
def test_the_same_settings_once_more_keep_what_is_remembered(tmp_path, admission):
    spec = replace(SPEC, admission=admission)
    [server] = Training(1, tmp_path, spec).servers
    before = server.store.states[0].remembered
    server.store.add_tables([spec])  # as each client does
    assert server.store.states[0].remembered is before


def test_an_increment_has_the_ids_that_wait_and_that_wait_no_more(tmp_path):
    training = Training(1, tmp_path, replace(SPEC, admission=AdmitFrequency(2)))
    [server] = training.servers
    ids = np.array([5, 6], dtype=np.uint64)
    once, grads = np.ones(2, dtype=np.uint32), np.ones((2, 2), dtype=np.float32)
    server.train(ids, once, grads)
    folder = training.save(lambda: server.train(ids[:1], once[:1], grads[:1]))
    other = Training(1, tmp_path, replace(SPEC, admission=AdmitFrequency(2)))
    other.servers[0].load(folder, Folder(tmp_path / "increments"))
    assert [id_ for _, id_, _ in other.waiting()] == [6]
    assert other.rows() == training.rows()


def train_from(step, folder, expiry, has_delta):
    """Train, save, load on other servers, and train; return rows, by steps from it."""
    spec = replace(SPEC, expiry=EXPIRIES[expiry])
    before, after = Training(2, folder, spec), Training(3, folder, spec)
    for server in before.servers:
        server.store.states[0].num_updates = step
    before.train(range(12))
    before.sweep()
    change = lambda: before.train(range(12, 16))  # noqa: E731
    saved = before.save(change if has_delta else None)
    for server in after.servers:
        server.load(saved, Folder(folder / "increments") if has_delta else None)
    after.train(range(16, 30))
    after.sweep()
    return {
        id_: (weights, frequency, (last_step - step) % 2**32)
        for id_, (weights, frequency, last_step) in after.rows().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("expiry", "has_delta"), [("steps", True), ("norm", False)])
def test_a_training_is_saved_and_loaded_where_its_step_passes_2_to_the_32(
    tmp_path, expiry, has_delta
):
    expected = train_from(100, tmp_path / "small", expiry, has_delta)
    assert len(expected) > 10
    found = train_from(2**32 - 14, tmp_path / "large", expiry, has_delta)
    assert found == expected


@pytest.mark.slow
def test_rows_without_metadata_get_it_where_the_step_is_beyond_2_to_the_32(tmp_path):
    before = Training(1, tmp_path, replace(SPEC, keeps_metadata=False))
    before.servers[0].store.states[0].num_updates = 2**32 + 3
    before.train(range(2))
    after = Training(1, tmp_path, SPEC)
    after.servers[0].load(before.save())
    assert {last_step for _, _, last_step in after.rows().values()} == {5}
