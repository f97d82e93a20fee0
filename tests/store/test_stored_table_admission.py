import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import AdmitAll, AdmitBloom, AdmitFrequency, AdmitProbability
from persia_torchrec.client.codec import BatchCount
from persia_torchrec.embedding.setting import Admission
from persia_torchrec.store.memory import reserve
from persia_torchrec.store.stored_table import build_admission
from tests.support import reference
from tests.support.strategies import id_arrays, ids

BATCHES = st.sampled_from([0, 1, 2**47, 2**63 - 2])
SEEDS = st.sampled_from([0, 1, 2**63, 2**64 - 1])


def admitting(admission, seed):
    return build_admission(admission, seed, reserve(admission.num_memory_words()))


def admit(state, ids_, counts=None, batch=0):
    counts = [1] * len(ids_) if counts is None else counts
    ids_N = np.array(ids_, dtype=np.uint64)
    admitted = state(ids_N, np.array(counts, dtype=np.int64), 1, batch)
    assert admitted.dtype == np.bool_
    return admitted.tolist()


def test_where_every_id_gets_a_row_nothing_decides():
    assert AdmitAll().kernel is None


@given(id_arrays(), SEEDS)
def test_a_probability_of_zero_admits_none_and_of_one_all(ids_N, seed):
    for probability in (0.0, 1.0):
        state = admitting(AdmitProbability(probability), seed)
        assert admit(state, ids_N) == [bool(probability)] * len(ids_N)


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_a_probability_of_zero_does_not_admit_the_id_of_the_lowest_draw(seed):
    of_table = reference.mixed((seed + 0x9E3779B97F4A7C15) % 2**64)
    lowest = reference.mixed((of_table + 0x9E3779B97F4A7C15) % 2**64)  # in batch 0
    never, seldom = (AdmitProbability(p) for p in (0.0, 2.0**-60))
    assert admit(admitting(never, seed), [lowest]) == [False]
    assert admit(admitting(seldom, seed), [lowest]) == [True]


@given(id_arrays(), SEEDS, st.sampled_from([0.1, 0.5, 0.9]), BATCHES)
def test_a_draw_follows_from_id_seed_and_batch_alone(ids_N, seed, probability, batch):
    admission = AdmitProbability(probability)
    state = admitting(admission, seed)
    drawn = admit(state, ids_N, batch=batch)
    admit(state, ids_N, batch=batch + 1)
    assert admit(state, ids_N, batch=batch) == drawn
    other = admitting(admission, seed)
    assert admit(other, ids_N[::-1], batch=batch) == drawn[::-1]
    draw = reference.is_drawn
    assert drawn == [draw(int(id_), seed, probability, batch) for id_ in ids_N]


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.8])
def test_an_id_gets_a_row_after_as_many_batches_as_the_probability_says(probability):
    num_ids, num_batches = 20_000, 4
    ids_N = np.arange(num_ids, dtype=np.uint64)
    state = admitting(AdmitProbability(probability), 3)
    for rank in (0, 5):
        has_row = np.zeros(num_ids, dtype=bool)
        for begun in range(1, num_batches + 1):
            drawn = admit(state, ids_N, batch=BatchCount.number(rank, begun))
            has_row |= drawn
            expected = 1 - (1 - probability) ** begun
            deviation = (expected * (1 - expected) / num_ids) ** 0.5
            assert has_row.mean() == pytest.approx(expected, abs=4 * deviation)


def test_trainers_draw_other_ids_in_the_same_batch():
    ids_N = np.arange(10_000, dtype=np.uint64)
    state = admitting(AdmitProbability(0.5), 1)
    one, other = (
        np.array(admit(state, ids_N, batch=BatchCount.number(rank, 7)))
        for rank in (0, 1)
    )
    assert np.mean(one & other) == pytest.approx(0.25, abs=0.02)


@given(ids, SEEDS, st.floats(0, 1), st.floats(0, 1))
def test_an_id_that_is_drawn_is_drawn_at_a_higher_probability_too(id_, seed, p, q):
    low, high = (AdmitProbability(probability) for probability in sorted((p, q)))
    if admit(admitting(low, seed), [id_]) == [True]:
        assert admit(admitting(high, seed), [id_]) == [True]


@pytest.mark.parametrize("first", [0, 2**40, 2**63])
@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
def test_the_share_of_ids_that_are_drawn_is_the_probability(first, probability):
    ids_N = np.arange(first, first + 100_000, dtype=np.uint64)
    shares = []
    for seed in (0, 1):
        drawn = admit(admitting(AdmitProbability(probability), seed), ids_N)
        shares.append(np.mean(drawn))
    deviation = (probability * (1 - probability) / 100_000) ** 0.5
    assert shares == pytest.approx([probability] * 2, abs=4 * deviation)


def test_tables_of_other_seeds_draw_other_ids():
    ids_N = np.arange(10_000, dtype=np.uint64)
    one, other = (
        np.array(admit(admitting(AdmitProbability(0.5), seed), ids_N))
        for seed in (1, 2)
    )
    assert np.mean(one & other) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    "admission", [AdmitFrequency(3), AdmitBloom(3, expected_ids=1000)]
)
def test_the_request_that_reaches_the_threshold_is_served(admission):
    state = admitting(admission, 0)
    assert admit(state, [7, 8]) == [False, False]
    assert admit(state, [8, 7], [2, 1]) == [True, False]
    assert admit(state, [9, 7]) == [False, True]
    assert admit(state, [2**64 - 1], [3]) == [True]


@pytest.mark.parametrize("cls", [AdmitFrequency, AdmitBloom])
def test_a_threshold_of_one_admits_at_first_sight(cls):
    state = admitting(cls(1, 1000), 0)
    assert admit(state, [7, 7, 8]) == [True] * 3


def test_an_id_that_lost_its_row_must_be_seen_as_often_again():
    state = admitting(AdmitFrequency(2), 0)
    assert [admit(state, [7]) for _ in range(4)] == [[False], [True], [False], [True]]


def test_an_id_that_lost_its_row_returns_at_once_where_counters_never_fall():
    state = admitting(AdmitBloom(2, expected_ids=10), 0)
    assert [admit(state, [7]) for _ in range(3)] == [[False], [True], [True]]


def test_ids_are_forgotten_when_too_many_wait():
    state = admitting(AdmitFrequency(2, max_waiting_rows=2), 0)
    assert admit(state, [7, 8, 9]) == [False] * 3
    assert admit(state, [7]) == [False]  # forgotten for 9, and 8 for it
    assert admit(state, [9, 7]) == [True, True]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=8)),
    st.integers(1, 6),
)
def test_a_bloom_filter_admits_no_later_than_exact_counts(requests, threshold):
    exact = admitting(AdmitFrequency(threshold, max_waiting_rows=100), 0)
    bloom = admitting(AdmitBloom(threshold, 3, 0.3), 0)
    has_row: set[int] = set()
    for request in requests:
        missing = dict(pair for pair in request if pair[0] not in has_row)
        admitted = admit(exact, list(missing), list(missing.values()))
        early = admit(bloom, list(missing), list(missing.values()))
        assert all(e or not a for a, e in zip(admitted, early, strict=True))
        has_row.update(id_ for id_, a in zip(missing, admitted, strict=True) if a)


def admit_same_parity(memory, p, ids_N, counts_N, is_admitted_N):
    for n in range(len(ids_N)):
        is_admitted_N[n] = (ids_N[n] ^ p[0]) & np.uint64(1) == np.uint64(0)


@pytest.mark.parametrize(("seed", "admitted"), [(6, [True, False]), (7, [False, True])])
def test_an_admission_from_elsewhere_is_given_the_seed(seed, admitted):
    class AdmitSameParity(Admission):
        kernel = staticmethod(admit_same_parity)

    assert admit(admitting(AdmitSameParity(), seed), [2, 3]) == admitted
