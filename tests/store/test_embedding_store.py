import itertools
import os
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from persia_torchrec import (
    AdmitFrequency,
    AdmitProbability,
    Constant,
    Expiry,
    InverseSqrtDim,
    Normal,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore, UpdateResult
from persia_torchrec.store.memory import MISSING
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.kernels import draw
from tests.support.reference import ReferenceStore, uniform_weights
from tests.support.servers import ids_of
from tests.support.strategies import id_arrays, ids_of_one_hash

pytestmark = pytest.mark.slow

# Rows of "momentum" and "adagrad" are of one width and share an arena; so do those of
# "rowwise" and "adam".
TABLES = [
    TableSpec(name="sgd", dim=1, optimizer=SGD(0.5), weight_bound=0.25),
    TableSpec(
        name="momentum",
        dim=3,
        optimizer=SGD(0.1, 0.9, 0.01),
        seed=2**64 - 1,
        admission=AdmitProbability(0.5, unadmitted_value=0.5),
    ),
    TableSpec(
        name="adagrad", dim=3, optimizer=Adagrad(0.1), initializer=Uniform(-1, 1)
    ),
    TableSpec(
        name="rowwise",
        dim=8,
        optimizer=Adagrad(0.1, vectorwise_shared=True),
        admission=AdmitFrequency(4),
        keeps_metadata=True,
    ),
    TableSpec(name="adam", dim=3, optimizer=Adam(0.1, weight_decay=0.01), seed=7),
    TableSpec(
        name="expiring",
        dim=4,
        optimizer=Adagrad(0.5),
        initializer=Uniform(-0.5, 0.5),
        expiry=Expiry(
            steps_to_live=3, seconds_to_live=7, min_l2_norm=0.6, spared_steps=2
        ),
    ),
    TableSpec(name="fading", dim=2, optimizer=SGD(0.2), expiry=Expiry(min_l2_norm=0.1)),
    TableSpec(
        name="adaptive",
        dim=3,
        optimizer=Adam(0.1),
        initializer=Uniform(-1, 1),
        admission=AdmitFrequency(3),
        expiry=Expiry(steps_to_live=9),
        weight_bound=1.5,
        shared_rows=2,
    ),
]
ADAPTIVE = len(TABLES) - 1
NEAR = [{"rtol": 1e-5, "atol": 1e-5}] * len(TABLES)
# In each table, some ids have the hash of others in their own table.
IDS = [
    [0, 1, 2**63, 2**64 - 1, *ids_of_one_hash(2**32 - 1, number + 1, 3)]
    for number in range(len(TABLES))
]

tables = st.integers(0, len(TABLES) - 1)
several = st.lists(tables, min_size=1, max_size=4, unique=True)
plain = st.lists(
    st.integers(0, ADAPTIVE - 1), min_size=1, max_size=4, unique=True
)  # of one row an id
picks = st.lists(st.integers(0, len(IDS[0]) - 1), max_size=6)
seeds = st.integers(0, 2**32 - 1)


def floats_of(seed, num, dim):
    """Return a few plain numbers, as gradients or weights."""
    quarters = np.random.default_rng(seed).integers(-8, 9, (num, dim))
    return (quarters / 4).astype(np.float32)


def look_up(store, table, ids, *, training=True):
    out = np.full((len(ids), store.tables[table].dim), np.nan, dtype=np.float32)
    store.lookup(table, ids, out, training=training)
    return out


def parts_of(seed, ids, least):
    """Return a few small numbers, one an id of each table; None without a seed."""
    if seed is None:
        return None
    rng = np.random.default_rng(seed)
    return [rng.integers(least, 9, len(some)).astype(np.uint32) for some in ids]


def asked_of(chosen, picks):
    """Return ids of tables, fewer and fewer; and the tables, all ids, their starts."""
    ids = [[IDS[table][pick] for pick in picks[k:]] for k, table in enumerate(chosen)]
    starts = np.cumsum([0, *map(len, ids)])
    return ids, (tuple(chosen), ids_of(*itertools.chain(*ids)), starts)


class StoreMachine(RuleBasedStateMachine):
    """Any order of requests agrees with a dictionary in the order of use.

    With a memory file, the store may be left between two requests, as by SIGKILL, and
    another one continues.
    """

    @initialize(
        capacity_rows=st.integers(1, 8),
        eviction=st.sampled_from(["lru", "lfu"]),
        has_file=st.sampled_from([False, False, True]),
    )
    def begin(self, capacity_rows, eviction, *, has_file):
        self.slow = ReferenceStore(capacity_rows, eviction)
        self.file = os.memfd_create("store") if has_file else None
        self.make_store = partial(
            EmbeddingStore,
            capacity_rows,
            eviction=eviction,
            clock=lambda: self.slow.now_s,
            memory_file=f"/proc/self/fd/{self.file}" if has_file else None,
        )
        self.fast = self.make_store()
        for number, table in enumerate(TABLES):
            assert self.fast.add_table(table) == number
        self.slow.tables = list(TABLES)
        self.hints = {}

    @rule(
        table=tables,
        picks=picks,
        times=st.sampled_from([1, 1, 1, 2, 200]),
        training=st.booleans(),
        seed=st.none() | seeds,
    )
    def look_up(self, table, picks, times, training, seed):
        if table == ADAPTIVE and self.fast.rows.capacity_rows < 3:
            return  # its shared rows do not fit
        ids = [IDS[table][pick] for pick in picks] * times
        counts = None
        if seed is not None:
            rng = np.random.default_rng(seed)
            counts = rng.integers(1, 9, len(ids)).astype(np.uint32)
        rows = np.full((len(ids), TABLES[table].dim), np.nan, dtype=np.float32)
        self.hints[table] = self.fast.lookup(
            table, ids_of(*ids), rows, training=training, counts_N=counts
        )
        counts = None if counts is None else counts.tolist()
        expected = self.slow.lookup(table, ids, training=training, counts=counts)
        np.testing.assert_allclose(rows, expected, **NEAR[table])

    @rule(table=tables, picks=picks, seed=seeds, is_finite=st.booleans())
    def update(self, table, picks, seed, is_finite):
        ids = [IDS[table][pick] for pick in picks]
        grads = floats_of(seed, len(ids), TABLES[table].dim)
        if not is_finite:
            grads[:1, -1] = np.nan
            grads[1:2, 0] = -np.inf
        hints = self.hints.get(table)  # wrong ones, mostly
        result = self.fast.update(table, ids_of(*ids), grads, hints)
        num_refused = self.slow.counts["gradients_refused"]
        assert result.num_missed == self.slow.update(table, ids, grads)
        num_refused = self.slow.counts["gradients_refused"] - num_refused
        assert result.num_refused == num_refused

    @rule(chosen=several, picks=picks, training=st.booleans())
    def look_up_several(self, chosen, picks, training):
        if ADAPTIVE in chosen and self.fast.rows.capacity_rows < 3:
            return
        ids, asked = asked_of(chosen, picks)
        dims = [TABLES[table].dim for table in chosen]
        shapes = [(len(some), dim) for some, dim in zip(ids, dims, strict=True)]
        ends = np.cumsum([num * dim for num, dim in shapes])
        out = np.full(ends[-1], np.nan, dtype=np.float32)
        if training:
            self.fast.lookup_tables(*asked, out)
        else:
            self.fast.read_tables(*asked, out)
        parts = np.split(out, ends[:-1])
        for table, some, rows, shape in zip(chosen, ids, parts, shapes, strict=True):
            expected = self.slow.lookup(table, some, training=training, counts=None)
            np.testing.assert_allclose(rows.reshape(shape), expected, **NEAR[table])

    @rule(chosen=several, picks=picks, seed=seeds, is_finite=st.booleans())
    def update_several(self, chosen, picks, seed, is_finite):
        ids, asked = asked_of(chosen, picks)
        dims = [TABLES[table].dim for table in chosen]
        pairs = zip(ids, dims, strict=True)
        grads = [floats_of(seed, len(some), dim) for some, dim in pairs]
        if not is_finite:
            grads[-1][:1, -1] = np.nan
        flat = np.concatenate([each.reshape(-1) for each in grads])
        rejected = self.slow.counts["gradients_refused"]
        with self.fast.rows.transaction() as transaction:
            self.fast.add_updates(*asked, flat)
        each = zip(chosen, ids, grads, strict=True)
        missed = sum(
            self.slow.update(table, some, given) for table, some, given in each
        )
        rejected = self.slow.counts["gradients_refused"] - rejected
        assert transaction.totals[:2] == (missed, rejected)

    @rule(table=tables, picks=picks, seed=seeds)
    def write(self, table, picks, seed):
        ids = [IDS[table][pick] for pick in picks][: self.fast.rows.capacity_rows]
        weights = floats_of(seed, len(ids), TABLES[table].dim)
        self.fast.write(table, ids_of(*ids), weights)
        self.slow.write(table, ids, weights)

    @rule(chosen=plain, picks=picks, seed=st.none() | seeds)
    def look_up_states(self, chosen, picks, seed):
        ids, asked = asked_of(chosen, picks)
        counts = parts_of(seed, ids, 1)
        given = None if counts is None else np.concatenate(counts)
        widths = [TABLES[table].num_floats for table in chosen]
        shapes = [(len(some), width) for some, width in zip(ids, widths, strict=True)]
        ends = np.cumsum([num * width for num, width in shapes])
        out = np.full(ends[-1], np.nan, dtype=np.float32)
        frequencies = np.zeros(asked[2][-1], dtype=np.uint32)
        slots = self.fast.lookup_states(*asked, out, frequencies, counts_N=given)
        parts = zip(
            chosen,
            ids,
            np.split(out, ends[:-1]),
            shapes,
            np.split(frequencies, asked[2][1:-1]),
            np.split(slots, asked[2][1:-1]),
            strict=True,
        )
        for t, (table, some, rows, shape, seen, found) in enumerate(parts):
            self.same_states(
                table, some, rows.reshape(shape), seen, found, counts and counts[t]
            )

    def same_states(self, table, ids, rows, seen, found, counts):
        """Compare one table's part with a lookup and reads of the reference."""
        spec, before = TABLES[table], self.slow.read(table, ids)
        state = spec.optimizer.initial_state(spec.dim)
        for id_, row in zip(ids, before, strict=True):
            if (table, id_) not in self.slow.rows:
                row[spec.dim :] = state
        rejected = self.slow.counts["rejected"]
        counts = None if counts is None else counts.tolist()
        weights = self.slow.lookup(table, ids, training=True, counts=counts)
        np.testing.assert_allclose(rows[:, : spec.dim], weights, **NEAR[table])
        if ids:
            np.testing.assert_allclose(
                rows[:, spec.dim :], before[:, spec.dim :], **NEAR[table]
            )
        rejected = self.slow.counts["rejected"] - rejected
        assert (found == MISSING).sum() == rejected
        for id_, frequency in zip(ids, seen.tolist(), strict=True):
            row = self.slow.rows.get((table, id_))
            if row is None or not self.fast.states[table].has_metadata:
                continue
            assert ids.count(id_) > 1 or frequency == row.frequency

    @rule(
        chosen=plain,
        picks=picks,
        seed=seeds,
        has=st.sets(st.sampled_from(["counts", "frequencies", "steps"])),
    )
    def write_several(self, chosen, picks, seed, has):
        ids, asked = asked_of(chosen, picks)
        pairs = list(zip(ids, [TABLES[table] for table in chosen], strict=True))
        rows = [floats_of(seed, len(some), spec.num_floats) for some, spec in pairs]
        for some, (_, spec) in zip(rows, pairs, strict=True):
            np.abs(some[:, spec.dim :], out=some[:, spec.dim :])  # sums of squares
        counts = parts_of(seed, ids, 0) if "counts" in has else None
        known = parts_of(seed + 1, ids, 0) if "frequencies" in has else None
        steps = [seed % 7] * len(chosen) if "steps" in has else None
        flat = np.concatenate([some.reshape(-1) for some in rows])
        given = {
            "counts_N": None if counts is None else np.concatenate(counts),
            "frequencies_N": None if known is None else np.concatenate(known),
            "steps_T": None if steps is None else np.array(steps),
        }
        if len(asked[1]) > self.fast.rows.capacity_rows:
            with pytest.raises(StoreError, match="rows fit"):
                self.fast.write_tables(*asked, flat, **given)
            return
        self.fast.write_tables(*asked, flat, **given)
        as_lists = [
            each and [part.tolist() for part in each] for each in (counts, known)
        ]
        self.slow.write_several(chosen, ids, rows, *as_lists, steps)

    @rule(seconds=st.integers(0, 9), max_rows=st.integers(1, 5))
    def sweep(self, seconds, max_rows):
        self.slow.now_s += seconds
        while self.fast.sweep(max_rows):
            pass
        self.slow.sweep()

    @rule()
    def clear(self):
        self.fast.clear()
        self.slow.clear()

    @precondition(lambda self: self.file is not None)
    @rule()
    def go_on_in_another_process(self):
        self.fast.rows.memory.close(is_clean=False)
        self.fast = self.make_store()
        tables = [state.spec for state in self.fast.states if not state.is_pinned]
        assert tables == TABLES

    def teardown(self):
        if getattr(self, "file", None) is not None:
            os.close(self.file)
            self.fast = None  # of whose address space there is room for some

    @invariant()
    def same_rows_in_the_same_order(self):
        check_store(self.fast)
        assert ids_oldest_first(self.fast) == self.slow.next_to_leave()
        counters = self.fast.counters()
        assert counters.pop("bytes") > 0
        assert counters == self.slow.counters()
        for table, ids in enumerate(IDS):
            rows = self.fast.read(table, ids_of(*ids))
            expected = self.slow.read(table, ids)
            np.testing.assert_allclose(rows, expected, **NEAR[table])
            if TABLES[table].has_metadata:
                self.same_metadata(table, ids)

    def same_metadata(self, table, ids):
        metadata = self.fast.metadata(table, ids_of(*ids))
        rows = [self.slow.rows.get((table, id_)) for id_ in ids]
        for name in ("frequency", "first_step", "last_step", "last_s"):
            expected = [0 if row is None else getattr(row, name) for row in rows]
            assert getattr(metadata, name).tolist() == expected


TestStore = StoreMachine.TestCase


def test_many_requests_agree_with_the_reference_too():
    fast, slow = EmbeddingStore(3000), ReferenceStore(3000)
    tables = [
        TableSpec(name="a", dim=2, optimizer=SGD(0.1)),
        TableSpec(name="b", dim=5, optimizer=Adagrad(), initializer=Constant(0.5)),
    ]
    for table in tables:
        fast.add_table(table)
    slow.tables = tables
    rng = np.random.default_rng(0)
    for request in range(60):
        table = request % 2
        ids = rng.zipf(1.2, 400).astype(np.uint64) % np.uint64(10_000)
        rows = look_up(fast, table, ids)
        expected = slow.lookup(table, ids.tolist(), training=True)
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
        grads = floats_of(request, len(ids), tables[table].dim)
        num_missed = fast.update(table, ids, grads).num_missed
        assert num_missed == slow.update(table, ids.tolist(), grads)
    check_store(fast)
    counters = fast.counters()
    del counters["bytes"]
    assert counters == slow.counters()
    assert counters["evictions"] > 1000
    assert ids_oldest_first(fast) == slow.next_to_leave()


def test_metadata_and_lfu_take_16_bytes_a_row_also_together():
    ids, num_bytes = np.arange(1000, dtype=np.uint64), {}
    for eviction, keeps_metadata in itertools.product(("lru", "lfu"), (False, True)):
        settings = {"optimizer": SGD(0.1), "keeps_metadata": keeps_metadata}
        store = EmbeddingStore(2000, eviction=eviction)
        store.add_table(TableSpec(name="item", dim=16, **settings))
        look_up(store, 0, ids)
        num_bytes[eviction, keeps_metadata] = store.counters()["bytes"]
    fewest = num_bytes.pop(("lru", False))
    assert {more - fewest for more in num_bytes.values()} == {16 * len(ids)}


@given(id_arrays(), st.integers(1, 100), st.randoms(use_true_random=False))
def test_initial_rows_depend_on_neither_order_nor_capacity(ids, capacity, random):
    table = TableSpec(name="item", dim=5, optimizer=SGD(0.1), seed=3)
    expected = {id_: uniform_weights(id_ ^ 3, 5, -0.01, 0.01) for id_ in ids.tolist()}
    store = EmbeddingStore(capacity)
    store.add_table(table)
    for _ in range(2):
        shuffled = ids.tolist()
        random.shuffle(shuffled)
        rows = look_up(store, 0, ids_of(*shuffled))
        for id_, row in zip(shuffled, rows, strict=True):
            assert row.tobytes() == expected[id_].tobytes()


def test_a_lookup_that_is_not_for_training_changes_nothing():
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=2, optimizer=SGD(0.1)))
    rows = look_up(store, 0, ids_of(1, 2))
    looked = look_up(store, 0, ids_of(1, 3), training=False)
    assert np.array_equal(looked[0], rows[0])
    assert not looked[1].any()
    assert ids_oldest_first(store) == [(0, 1), (0, 2)]
    look_up(store, 0, ids_of(3))
    assert ids_oldest_first(store) == [(0, 2), (0, 3)]


@pytest.mark.parametrize("has_hints", [True, False])
def test_the_gradient_of_an_id_that_was_not_admitted_learns_from_an_evicted_one(
    has_hints,
):
    store = EmbeddingStore(3)
    admission = AdmitFrequency(2)
    spec = TableSpec(name="item", dim=2, optimizer=SGD(1.0), admission=admission)
    store.add_table(spec)
    look_up(store, 0, ids_of(1))
    out = np.empty((3, 2), dtype=np.float32)
    slots = store.lookup(0, ids_of(1, 2, 3), out, training=True)  # 1 is admitted now
    for _ in range(2):
        look_up(store, 0, ids_of(4, 5, 6))  # 1 is evicted
    grads = np.ones((3, 2), dtype=np.float32)
    result = store.update(0, ids_of(1, 2, 3), grads, slots if has_hints else None)
    assert result == UpdateResult(3, 0, 2 if has_hints else 3)


def test_the_gradient_of_an_evicted_id_is_counted_and_moves_nothing():
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=2, optimizer=SGD(1.0)))
    look_up(store, 0, ids_of(1, 2, 3))  # 1 is evicted
    before = store.read(0, ids_of(1, 2, 3))
    grads = np.array([[5, 5], [0, 0], [1, 2]], dtype=np.float32)
    assert store.update(0, ids_of(1, 2, 3), grads) == UpdateResult(1, 0)
    moved = store.read(0, ids_of(1, 2, 3)) - before
    np.testing.assert_allclose(moved, [[0, 0], [0, 0], [-1, -2]], rtol=1e-6)
    assert store.counters()["gradients_missed"] == 1
    assert ids_oldest_first(store) == [(0, 2), (0, 3)]


def test_an_id_that_comes_twice_is_updated_twice():
    store = EmbeddingStore(2)
    optimizer = Adagrad(1.0, initial_accumulator_value=0, eps=0)
    store.add_table(
        TableSpec(name="item", dim=1, optimizer=optimizer, initializer=Constant(0))
    )
    look_up(store, 0, ids_of(7))
    store.update(0, ids_of(7, 7), np.array([[3], [4]], dtype=np.float32))
    weight, accumulator = store.read(0, ids_of(7))[0]
    assert accumulator == 3 * 3 + 4 * 4
    assert weight == pytest.approx(-3 / 3 - 4 / 5)


def test_a_row_that_comes_back_starts_again():
    store = EmbeddingStore(1)
    store.add_table(TableSpec(name="item", dim=2, optimizer=Adagrad()))
    first = look_up(store, 0, ids_of(1))
    store.update(0, ids_of(1), np.ones((1, 2), dtype=np.float32))
    look_up(store, 0, ids_of(2))
    assert np.array_equal(look_up(store, 0, ids_of(1)), first)
    assert store.read(0, ids_of(1))[0, 2:].tolist() == pytest.approx([0.01, 0.01])


def test_written_weights_keep_the_state_of_their_row():
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=1, optimizer=Adagrad()))
    look_up(store, 0, ids_of(1))
    store.update(0, ids_of(1), np.full((1, 1), 2, dtype=np.float32))
    store.write(0, ids_of(1, 2), np.array([[0.5], [0.25]], dtype=np.float32))
    rows = store.read(0, ids_of(1, 2))
    np.testing.assert_allclose(rows, [[0.5, 4.01], [0.25, 0.01]], rtol=1e-6)


@pytest.mark.parametrize(
    "initializer",
    [Uniform(-1, 2), InverseSqrtDim(), Normal(), TruncatedNormal(), Constant(0.5)],
)
def test_rows_start_as_the_initializer_of_their_table_says(initializer):
    store = EmbeddingStore(2)
    optimizer = Adagrad(initial_accumulator_value=0.25)
    table = TableSpec(
        name="item", dim=5, optimizer=optimizer, initializer=initializer, seed=6
    )
    store.add_table(table)
    look_up(store, 0, ids_of(3))
    weights = draw(3 ^ 6, 5, initializer)
    expected = np.concatenate([weights, np.full(5, 0.25, dtype=np.float32)])
    assert store.read(0, ids_of(3)).tobytes() == expected.tobytes()


def test_a_kernel_that_cannot_be_compiled_leaves_the_store_as_it_was():
    @dataclass(frozen=True)
    class Broken(SGD):
        kernel = staticmethod(step_by_name)

    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="user", dim=3, optimizer=SGD(0.1)))
    broken = TableSpec(name="item", dim=3, optimizer=Broken(0.1))
    with pytest.raises(ConfigError, match=r"kernel must .*update_.*step_by_name"):
        store.add_table(broken)
    assert [table.name for table in store.tables] == ["user"]
    look_up(store, 0, ids_of(3))


def step_by_name(p, w, s, g, dim):
    w[0] = getattr(g, "name" + str(dim))


def test_more_rows_than_fit_cannot_be_written():
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=1, optimizer=SGD(0.1)))
    with pytest.raises(StoreError, match=r"At most 2 rows fit\. Received: 3 ids\."):
        store.write(0, ids_of(1, 2, 3), np.zeros((3, 1), dtype=np.float32))
    assert store.num_rows == 0


def test_one_lookup_may_repeat_ids_more_often_than_the_log_of_uses_is_long():
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=1, optimizer=SGD(0.1)))
    [one, two] = look_up(store, 0, ids_of(1, 2)).tolist()
    weights = look_up(store, 0, np.tile(ids_of(2, 1), 5000))
    assert weights.tolist() == [two, one] * 5000
    check_store(store)
    look_up(store, 0, ids_of(3))
    assert store.find(0, ids_of(1, 2, 3)).tolist().index(MISSING) == 1


def test_more_tables_than_a_server_holds_are_rejected(monkeypatch):
    monkeypatch.setattr(memory, "MAX_TABLES", 1)
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=1, optimizer=SGD(0.1)))
    with pytest.raises(StoreError, match=r"A server holds at most 1 tables\."):
        store.add_table(TableSpec(name="user", dim=1, optimizer=SGD(0.1)))
    assert [table.name for table in store.tables] == ["item"]


def test_a_table_that_is_added_again_gets_its_new_settings_and_keeps_its_rows():
    store = EmbeddingStore(2)
    table = TableSpec(name="item", dim=1, optimizer=SGD(1.0), initializer=Constant(0))
    store.add_table(table)
    look_up(store, 0, ids_of(1))
    faster = TableSpec(name="item", dim=1, optimizer=SGD(2.0), initializer=Constant(3))
    assert store.add_table(faster) == 0
    store.update(0, ids_of(1), np.ones((1, 1), dtype=np.float32))
    assert look_up(store, 0, ids_of(1, 2)).tolist() == [[-2], [3]]


@pytest.mark.parametrize(
    ("dim", "optimizer", "received"),
    [
        (4, SGD(0.1), r"dim 4, weights fp32 and optimizer sgd \(0 state floats"),
        (3, Adagrad(), r"dim 3, weights fp32 and optimizer adagrad \(3 state"),
        (3, SGD(0.1, 0.9), r"dim 3, weights fp32 and optimizer sgd \(3 state"),
    ],
)
def test_a_known_table_with_another_layout_is_rejected(dim, optimizer, received):
    store = EmbeddingStore(2)
    store.add_table(TableSpec(name="item", dim=3, optimizer=SGD(0.1)))
    present = r"dim 3, weights fp32 and optimizer sgd \(0 state floats"
    message = rf"'item' has {present}.*Received: {received}"
    with pytest.raises(ConfigError, match=message):
        store.add_table(TableSpec(name="item", dim=dim, optimizer=optimizer))
    assert store.tables[0].optimizer == SGD(0.1)


@pytest.mark.parametrize("capacity", [0, -1, 2**32 - 1])
def test_a_capacity_out_of_its_range_is_rejected(capacity):
    with pytest.raises(ConfigError, match=rf"4294967294\]\. Received: {capacity}\."):
        EmbeddingStore(capacity)


def test_clearing_forgets_how_often_a_table_was_updated():
    store = EmbeddingStore(2)
    store.add_table(
        TableSpec(name="item", dim=1, optimizer=Adam(), initializer=Constant(0))
    )
    steps = []
    for _ in range(2):
        look_up(store, 0, ids_of(1))
        store.update(0, ids_of(1), np.ones((1, 1), dtype=np.float32))
        steps.append(store.read(0, ids_of(1)).tolist())
        store.clear()
    assert steps[0] == steps[1]


@pytest.mark.parametrize("num", [1, 12, 13, 127, 128, 129, 256, 257, 385])
def test_a_lookup_of_any_length_finds_each_row_and_makes_the_others(num):
    # Ids are looked ahead in chunks of 128.
    store, rng = EmbeddingStore(1000), np.random.default_rng(num)
    spec = TableSpec(name="t", dim=2, optimizer=SGD(1.0), initializer=Constant(0.5))
    [table] = store.add_tables([spec])
    numbers = np.arange(num)
    ids = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    weights = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    store.write(table, ids[::2], weights[::2])
    asked = rng.permutation(np.concatenate([numbers, numbers[:3]]))  # some are repeated
    has_row, rows = asked % 2 == 0, np.empty((len(asked), 2), dtype=np.float32)

    def expected(without_row):
        return np.where(has_row[:, None], weights[asked], np.float32(without_row))

    np.testing.assert_array_equal(store.find(table, ids[asked]) != MISSING, has_row)
    store.lookup(table, ids[asked], rows, training=False)
    np.testing.assert_array_equal(rows, expected(spec.admission.unadmitted_value))
    slots = store.lookup(table, ids[asked], rows, training=True)
    np.testing.assert_array_equal(rows, expected(0.5))
    np.testing.assert_array_equal(slots, store.find(table, ids[asked]))
    assert len(set(slots.tolist())) == num
    check_store(store)
