"""Ranking the frequencies of ids, a slice at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.embedding.usage import LEAST, DynamicDim
from persia_torchrec.store.block_statistics import Ranking, read_statistics
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import MISSING
from persia_torchrec.table import TableSpec

DIM, NUM_IDS = 4, 300


def spec_of(blocks):
    dynamic = DynamicDim(blocks, period=1)
    return TableSpec(name="item", dim=DIM, optimizer=Adagrad(), dynamic=dynamic)


def store_of(seed, blocks):
    """Return a store whose ids were counted in some of three periods."""
    rng = np.random.default_rng(seed)
    spec = spec_of(blocks)
    store = EmbeddingStore(DIM * NUM_IDS)
    store.add_tables([spec])
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    for _ in range(3):
        seen = rng.permutation(ids)[: rng.integers(1, NUM_IDS)]
        rows = np.empty((len(seen), DIM), dtype=np.float32)
        counts = rng.zipf(1.2, len(seen)).clip(max=10**6).astype(np.uint32)
        store.lookup(0, seen, rows, training=True, counts_N=counts)
        store.update(0, seen[:1], np.zeros((1, DIM), dtype=np.float32))
    return store, ids


@given(st.integers(0, 2**32), st.sampled_from([2, 4]), st.integers(1, 400))
def test_ranks_of_slices_are_those_of_all_frequencies(seed, blocks, slice_slots):
    store, ids = store_of(seed, blocks)
    state, t = store.states[0], 4
    slots = store.find(0, ids)
    acc, _, _ = read_statistics(state.layout, slots[slots != MISSING], t)
    in_order = np.sort(acc[acc >= LEAST])[::-1]
    ranking = Ranking(state.layout, NUM_IDS, t)
    while not ranking.is_read:
        assert 0 < ranking.read(slice_slots) <= slice_slots
    ranks = state.spec.dynamic.ranks(len(in_order))
    np.testing.assert_array_equal(ranking.find(lambda _: ranks), in_order[ranks])


def test_ids_that_were_never_counted_have_no_ranks():
    spec = spec_of(2)
    store = EmbeddingStore(10)
    store.add_tables([spec])
    ranking = Ranking(store.states[0].layout, 10, 1)
    ranking.read(10)
    assert ranking.is_read
    assert ranking.find(spec.dynamic.ranks) is None
