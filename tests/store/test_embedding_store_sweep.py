import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from persia_torchrec import Constant, Expiry
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.copied_stores import exported
from tests.support.servers import ids_of


class Stores:
    """A store, and the seconds that it sees; ``jumped_s`` are those of a jump."""

    def __init__(
        self,
        *expiries,
        capacity_rows=1000,
        eviction="lru",
        now_s=100.0,
        memory_file=None,
        **settings,
    ):
        self.now_s, self.jumped_s = now_s, 0.0
        self.store = EmbeddingStore(
            capacity_rows,
            eviction=eviction,
            clock=lambda: self.now_s + self.jumped_s,
            monotonic=lambda: self.now_s,
            memory_file=memory_file,
        )
        settings = {"dim": 2, "optimizer": SGD(1.0), **settings}
        settings.setdefault("initializer", Constant(1.0))
        for number, expiry in enumerate(expiries):
            spec = TableSpec(name=f"{number}", expiry=expiry, **settings)
            self.store.add_table(spec)

    def use(self, table, *ids):
        out = np.empty((len(ids), self.store.tables[table].dim), dtype=np.float32)
        self.store.lookup(table, ids_of(*ids), out, training=True)

    def update(self, table, *ids, grad=0.0):
        shape = (len(ids), self.store.tables[table].dim)
        self.store.update(table, ids_of(*ids), np.full(shape, grad, dtype=np.float32))

    def rows(self, table):
        return sorted(i for t, i in ids_oldest_first(self.store) if t == table)

    def sweep(self, max_rows=7):
        """Sweep to the end of a pass; return the number of slices."""
        num_slices = 1
        while self.store.sweep(max_rows):
            num_slices += 1
        check_store(self.store)
        return num_slices

    def expired(self):
        counters = self.store.counters()
        return [counters[f"expired_{cause}"] for cause in ("steps", "seconds", "norm")]


@pytest.mark.parametrize("max_rows", [1, 3, 7, 100, 101, 10_000])
def test_slices_look_at_every_slot_once_a_pass(max_rows):
    stores = Stores(Expiry(seconds_to_live=10))
    stores.use(0, *range(100))
    stores.now_s += 11
    num_left = 100
    for _ in range(100 // max_rows):
        is_unfinished = stores.store.sweep(max_rows)
        num_left -= max_rows
        assert stores.store.num_rows == num_left
        assert is_unfinished == (num_left > 0)
    if 100 % max_rows:
        assert not stores.store.sweep(max_rows)
    assert stores.store.num_rows == 0
    assert stores.expired() == [0, 100, 0]
    stores.use(0, *range(100))
    stores.now_s += 11
    assert stores.sweep(max_rows) == -(-100 // max_rows)
    assert stores.store.num_rows == 0


def test_slices_go_through_all_arenas():
    stores = Stores(Expiry(seconds_to_live=10))
    for dim in (2, 9, 30):  # the first shares the arena of table 0
        expiry = Expiry(seconds_to_live=10)
        spec = TableSpec(name=f"d{dim}", dim=dim, optimizer=SGD(1.0), expiry=expiry)
        table = stores.store.add_table(spec)
        stores.use(table, *range(10))
    stores.use(0, *range(10))
    stores.now_s += 11
    for num_left in (28, 16, 4):
        assert stores.store.sweep(12)
        assert stores.store.num_rows == num_left
    assert not stores.store.sweep(12)
    assert stores.store.num_rows == 0


def test_a_row_made_during_a_pass_stays_and_the_pass_ends():
    stores = Stores(Expiry(seconds_to_live=10))
    stores.use(0, *range(20))
    stores.now_s += 11
    assert stores.store.sweep(15)
    stores.use(0, *range(100, 110))  # ten of the fifteen slots that are free again
    assert stores.store.sweep(3)
    stores.use(0, *range(200, 210))  # the rest, three more, and two that are new
    assert stores.sweep(3) == 2
    assert stores.rows(0) == [*range(100, 110), *range(200, 210)]
    assert stores.expired() == [0, 20, 0]


def test_a_slice_is_no_longer_than_asked_after_the_store_was_cleared():
    stores = Stores(*[Expiry(seconds_to_live=10)] * 2)
    spec = TableSpec(name="wide", dim=9, optimizer=SGD(1.0), expiry=Expiry(1))
    stores.store.add_table(spec)
    stores.use(0, *range(90))
    stores.store.sweep(80)
    stores.store.clear()
    stores.use(2, *range(30))
    stores.update(2, 1000)
    stores.update(2, 1000)
    stores.store.sweep(5)
    assert stores.store.num_rows >= 25
    stores.sweep()
    assert stores.store.num_rows == 0


def test_tables_of_one_arena_expire_each_by_its_own_rule():
    steps, seconds, norm, spared, never = range(5)
    stores = Stores(
        Expiry(steps_to_live=2),
        Expiry(seconds_to_live=5),
        Expiry(min_l2_norm=1.0),
        Expiry(min_l2_norm=1.0, spared_steps=3),
        Expiry(),
        keeps_metadata=True,
    )
    for table in (steps, seconds, norm, spared, never):
        stores.use(table, 1, 2, 3)
        stores.update(table, 1, 2, grad=0.5)  # to sqrt(0.5)
        stores.update(table, 3, grad=-0.5)
    stores.sweep()
    assert [stores.rows(table) for table in range(5)] == [
        *([1, 2, 3], [1, 2, 3], [3], [1, 2, 3], [1, 2, 3])
    ]
    stores.now_s += 3
    for table in (steps, seconds, norm, spared, never):
        stores.update(table, 2)
        stores.update(table, 2)
    stores.now_s += 3
    stores.sweep()
    assert [stores.rows(table) for table in range(5)] == [
        *([2, 3], [2], [3], [3], [1, 2, 3])
    ]
    assert stores.expired() == [1, 2, 4]
    assert stores.store.counters()["rows"] == 8
    assert stores.store.counters()["evictions"] == 0


def test_the_bounds_of_an_age_and_of_a_norm_belong_to_what_stays():
    stores = Stores(
        Expiry(steps_to_live=2),
        Expiry(seconds_to_live=5),
        Expiry(min_l2_norm=5.0),
        dim=2,
    )
    for table in range(3):
        stores.use(table, 1)
    stores.store.write(2, ids_of(1), np.array([[3, 4]], dtype=np.float32))
    for _ in range(2):
        stores.update(0, 9)
    stores.now_s += 5
    stores.sweep()
    assert [stores.rows(table) for table in range(3)] == [[1], [1], [1]]
    stores.store.write(2, ids_of(1), np.array([[3, 3.999]], dtype=np.float32))
    stores.update(0, 9)
    stores.now_s += 0.5
    stores.sweep()
    assert [stores.rows(table) for table in range(3)] == [[], [], []]
    assert stores.expired() == [1, 1, 1]


def test_a_lookup_keeps_no_row_alive_and_an_update_does():
    stores = Stores(Expiry(seconds_to_live=5))
    stores.use(0, 1, 2)
    stores.now_s += 4
    stores.use(0, 1)
    stores.update(0, 2)
    stores.now_s += 4
    stores.sweep()
    assert stores.rows(0) == [2]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_the_norm_is_that_of_the_weights_whatever_their_dtype(dtype, dim):
    optimizer = SGD(1.0, momentum=0.5)  # whose state does not count
    settings = {"dim": dim, "optimizer": optimizer, "weight_dtype": dtype}
    stores = Stores(Expiry(min_l2_norm=1.0), **settings)
    stores.use(0, 1, 2)
    weights = np.zeros((2, dim), dtype=np.float32)
    weights[:, -1] = [-1, 0.99]
    stores.store.write(0, ids_of(1, 2), weights)
    stores.sweep()
    assert stores.rows(0) == [1]


def test_where_no_row_can_expire_nothing_is_swept():
    stores = Stores(Expiry(), Expiry(), keeps_metadata=True)
    stores.use(0, *range(10))
    stores.now_s += 1e6
    assert not stores.store.sweep(1)
    assert stores.store.num_rows == 10
    assert not EmbeddingStore(1).sweep(1)


def test_rows_of_a_full_lfu_store_expire_and_leave_room_for_others():
    stores = Stores(
        Expiry(seconds_to_live=5), Expiry(), capacity_rows=4, eviction="lfu"
    )
    for _ in range(5):
        stores.use(0, 1)  # the most frequent one expires
    stores.use(0, 2)
    stores.use(1, 3, 4)
    stores.now_s += 6
    stores.sweep()
    assert ids_oldest_first(stores.store) == [(1, 3), (1, 4)]
    stores.use(0, 1, 5)
    assert stores.store.counters()["evictions"] == 0
    stores.use(0, 1)
    stores.use(1, 6)
    assert ids_oldest_first(stores.store) == [(1, 4), (0, 5), (1, 6), (0, 1)]
    assert stores.store.counters()["evictions"] == 1
    assert stores.expired() == [0, 2, 0]
    check_store(stores.store)


def test_many_rows_that_expire_and_come_back_leave_the_store_as_it_should_be():
    stores = Stores(
        Expiry(steps_to_live=3), Expiry(seconds_to_live=3), capacity_rows=500
    )
    rng = np.random.default_rng(0)
    for request in range(120):
        ids = rng.choice(2000, 60, replace=False).tolist()
        stores.use(request % 2, *ids)
        stores.update(request % 2, *ids[:30])
        stores.now_s += 0.5
        stores.store.sweep(64)
        if request % 20 == 0:
            check_store(stores.store)
    stores.sweep()
    num_steps, num_seconds, _ = stores.expired()
    counters = stores.store.counters()
    assert num_steps > 100
    assert num_seconds > 100
    gone = num_steps + num_seconds + counters["evictions"]
    assert counters["inserted"] - gone == counters["rows"]


def test_a_jump_of_the_clock_is_named_and_not_believed(caplog):
    stores = Stores(Expiry(seconds_to_live=10))
    stores.use(0, 1, 2, 3)
    stores.now_s += 1
    stores.jumped_s = 172_800.0
    stores.sweep()
    assert len(stores.rows(0)) == 3
    assert "the clock of this machine jumped by +172800 s" in caplog.text
    caplog.clear()
    stores.sweep()
    assert not caplog.text
    stores.now_s += 10
    stores.sweep()
    assert stores.rows(0) == []


def test_time_between_two_processes_on_a_memory_file_does_not_count(tmp_path):
    settings = {"memory_file": str(tmp_path / "store")}
    stores = Stores(Expiry(seconds_to_live=10), **settings)
    stores.use(0, 1, 2, 3)
    stores.now_s += 6
    stores.sweep()
    stores.store.close()
    later = Stores(now_s=10_000.0, **settings)
    later.now_s += 3
    later.sweep()
    assert len(later.rows(0)) == 3
    later.now_s += 2
    later.sweep()
    assert later.rows(0) == []
    later.store.close()


def test_many_rows_that_expire_at_once_are_named_once(caplog):
    stores = Stores(Expiry(), Expiry(seconds_to_live=5), Expiry(steps_to_live=1))
    stores.use(1, *range(150))
    stores.sweep()
    assert not caplog.text
    stores.now_s += 6
    stores.sweep()
    assert (
        "150 of 150 rows expired at once: 0 by steps_to_live, 150 by seconds_to_live, "
        "0 by min_l2_norm; tables with an expiry: 1, 2."
    ) in caplog.text
    stores.use(1, *range(150))
    caplog.clear()
    stores.now_s += 6
    stores.sweep()
    assert not caplog.text  # once a minute


def test_rows_that_are_trained_stay_while_the_step_passes_2_to_the_32():
    stores = Stores(Expiry(steps_to_live=100_000))
    stores.use(0, *range(100))
    stores.store.set_step(0, 2**32 - 5)
    for _ in range(10):
        stores.update(0, *range(100))
        stores.sweep()
    assert stores.store.states[0].num_updates == 2**32 + 5
    assert stores.rows(0) == list(range(100))
    assert stores.expired() == [0, 0, 0]


def kept_by_an_export(store):
    """Return table and id of the rows that a checkpoint has."""
    blocks = exported(store)
    return sorted((table, int(id_)) for table, rows in blocks for id_ in rows.ids)


@settings(max_examples=30)
@given(
    st.sampled_from([2**31, 2**32, 2**33, 2**40]).flatmap(
        lambda end: st.integers(end - 5, end + 5)
    ),
    st.integers(-3, 6) | st.integers(0, 2**31 - 1),
    st.integers(1, 4),
)
@example(2**32 - 1, 1, 1)
@example(2**32 - 1, 2**31 - 1, 1)
def test_ages_in_steps_are_right_where_a_step_passes_2_to_the_32(made, age, limit):
    stores = Stores(
        Expiry(steps_to_live=limit),
        Expiry(min_l2_norm=9.0, spared_steps=limit + 1),
        Expiry(steps_to_live=2**31 - 1),
        Expiry(min_l2_norm=9.0),
    )
    for table, state in enumerate(stores.store.states):
        state.num_updates = made
        stores.use(table, 1)
        state.num_updates = made + age
    expected = [(0, 1), (1, 1), (2, 1)] if age <= limit else [(2, 1)]
    assert kept_by_an_export(stores.store) == expected
    stores.sweep()
    assert [
        (table, id_) for table in range(4) for id_ in stores.rows(table)
    ] == expected
