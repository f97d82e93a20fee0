"""Increments: a copy that gets them becomes equal to the store that made them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import AdmitBloom, AdmitFrequency, Expiry
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import increment_name
from persia_torchrec.checkpoint.load import Increment, SeenIds, Target, apply_increment
from persia_torchrec.checkpoint.row_file import (
    IncrementHead,
    RowFileWriter,
    saved_tables,
)
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.embedding.setting import Sightings
from persia_torchrec.errors import CheckpointError
from persia_torchrec.routing.route import is_of_shard
from persia_torchrec.server.dirty_set import DirtySet
from persia_torchrec.store.memory import MISSING
from persia_torchrec.store.row_columns import RowColumns
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.copied_stores import (
    TABLES,
    assert_same,
    copy_of,
    evictions,
    ids,
    run,
    store_of,
    update,
    use,
)
from tests.support.servers import ids_of

pytestmark = pytest.mark.slow

EXPIRING = TableSpec(
    name="g", dim=2, optimizer=SGD(0.5), expiry=Expiry(steps_to_live=2)
)
COUNTED = TableSpec(name="h", dim=2, optimizer=SGD(0.5), admission=AdmitFrequency(3))
FILTERED = replace(COUNTED, name="i", admission=AdmitBloom(3, expected_ids=40))
SPECS = [*TABLES, EXPIRING, COUNTED, FILTERED]

number_of_table = st.integers(0, len(SPECS) - 1)
request = st.tuples(
    st.sampled_from(["use", "train", "write", "update", "sweep", "clear", "cut"]),
    number_of_table,
    ids,
)
requests = st.lists(request, max_size=30)


class Journaled:
    """A store that notes what changes, and makes increments of it."""

    def __init__(self, eviction="lru", capacity_rows=20):
        self.store = store_of(capacity_rows, eviction, SPECS)
        self.increments = []
        self.rows_a_slice = 3

    def begin(self):
        self.store.rows.journal.begin()

    def do(self, request, between=lambda: None):
        what, table, of_table = request
        store = self.store
        match what:
            case "use":
                use(store, table, of_table)
            case "train":
                use(store, table, of_table)
                update(store, table, of_table)
            case "update":
                update(store, table, of_table)
            case "write":
                width = store.tables[table].dim + store.tables[table].num_state_floats
                rows = np.full((len(of_table), width), len(of_table), np.float32)
                store.write(table, ids_of(*of_table), rows)
            case "sweep":
                store.sweep(40)
            case "clear":
                store.clear()
            case "cut":
                self.cut(between)

    def cut(self, between=lambda: None):
        """Make an increment; ``between`` runs while its rows are gathered."""
        dirty = DirtySet(self.store.rows.capacity_rows)
        store = self.store
        states = store.states
        head = {
            "log": "log",
            "number": len(self.increments) + 1,
            "shard": 0,
            "num_shards": 1,
            "created_s": 7.0,
            "tick": store.rows.tick,
            "tables": saved_tables(states, store.rows.seconds),
        }
        dirty.add(store.rows.journal.cut())
        increment = Increment(IncrementHead(was_cleared=dirty.was_cleared, **head))
        for table, copy in dirty.take(
            dict.fromkeys(range(len(states)), self.rows_a_slice)
        ):
            block = copy(store)
            match block:
                case RowColumns():
                    increment.rows.append((table, block))
                case Sightings():
                    increment.seen.append((table, block))
                case _:
                    increment.gone.append((table, block))
            between()
        self.increments.append(increment)
        return increment


def write_increment(folder, increment):
    """Write an increment into the folder of its log."""
    with folder.created(increment_name(increment.head.number)) as file:
        writer = RowFileWriter(file, increment.head)
        for table, rows in increment.rows:
            writer.write(table, rows)
        for table, block in increment.gone + increment.seen:
            writer.write(table, block)
        return writer.end()


def put_in(store, increment, shard=0, num_shards=1):
    target = Target(shard, num_shards, store.rows.capacity_rows, store.rows.is_lfu)
    seen = SeenIds(store, target)
    for _ in apply_increment(store, increment.select(target), seen):
        check_store(store)
    seen.put()
    check_store(store)


def waiting(store):
    """Return what admissions remember: ids in their order, counters by position."""
    found = []
    for state in store.states:
        of_table = list(zip(*map(np.ndarray.tolist, state.sightings()), strict=True))
        found.append(sorted(of_table, key=lambda one: (one[2], one[0])))
    return found


@given(before=requests, after=requests, eviction=evictions)
def test_a_copy_with_all_increments_equals_the_store(before, after, eviction):
    source = Journaled(eviction)
    source.begin()
    for request in before:
        source.do(request)
    copy = copy_of(source.store, eviction=eviction, specs=SPECS)
    for mine, other in zip(copy.states, source.store.states, strict=True):
        mine.spec.admission.remember(mine.remembered, other.sightings())
    source.store.rows.journal.cut()
    source.increments.clear()
    for request in after:
        source.do(request)
    source.cut()
    for increment in source.increments:
        put_in(copy, increment)
    assert_same(copy, source.store)
    assert waiting(copy) == waiting(source.store)
    steps = [state.num_updates for state in source.store.states]
    assert [state.num_updates for state in copy.states] == steps


@given(done=requests, eviction=evictions)
def test_increments_that_come_twice_change_nothing(done, eviction):
    source = Journaled(eviction)
    source.begin()
    copy = store_of(20, eviction, SPECS)
    for request in done:
        source.do(request)
    source.cut()
    for increment in source.increments:
        put_in(copy, increment)
    for increment in source.increments:  # all of them once more, from the first on
        put_in(copy, increment)
    assert sorted(ids_oldest_first(copy)) == sorted(ids_oldest_first(source.store))
    for number in range(len(SPECS)):
        of_table = [i for t, i in ids_oldest_first(copy) if t == number]
        mine, others = (s.read(number, ids_of(*of_table)) for s in (copy, source.store))
        assert mine.tobytes() == others.tobytes()
    assert waiting(copy) == waiting(source.store)


@given(done=requests, meanwhile=requests, eviction=evictions)
def test_changes_during_a_copy_are_in_the_next_slice(done, meanwhile, eviction):
    source = Journaled(eviction)
    source.begin()
    copy = store_of(20, eviction, SPECS)
    left = [request for request in meanwhile if request[0] != "cut"]

    def between():
        if left:
            source.do(left.pop())

    for request in done:
        source.do(request, between)
    source.cut(between)
    source.cut()
    for increment in source.increments:
        put_in(copy, increment)
    assert_same(copy, source.store)
    assert waiting(copy) == waiting(source.store)


@given(done=st.lists(request, max_size=12), num_shards=st.integers(2, 4))
def test_several_servers_take_their_parts_of_an_increment(done, num_shards):
    source = Journaled(capacity_rows=8)
    source.begin()
    for request in done:
        source.do(request)
        source.cut()
    copies = [store_of(20, specs=SPECS) for _ in range(num_shards)]
    for shard, copy in enumerate(copies):
        for increment in source.increments:
            put_in(copy, increment, shard, num_shards)
    rows = ids_oldest_first(source.store)
    assert sorted(r for c in copies for r in ids_oldest_first(c)) == sorted(rows)
    for shard, copy in enumerate(copies):
        for table, id_ in ids_oldest_first(copy):
            assert is_of_shard(ids_of(id_), shard, num_shards).all()
            mine, others = (s.read(table, ids_of(id_)) for s in (copy, source.store))
            assert mine.tobytes() == others.tobytes()


def test_a_smaller_server_keeps_what_was_used_last():
    source = Journaled(capacity_rows=20)
    source.begin()
    use(source.store, 0, list(range(12)))
    small = store_of(5, specs=SPECS)
    put_in(small, source.cut())
    assert ids_oldest_first(small) == [(0, id_) for id_ in range(7, 12)]
    update(source.store, 0, [1, 8])  # 1 has no row there, and gets one
    put_in(small, source.cut())
    assert small.num_rows == 5
    assert (
        small.read(0, ids_of(8)).tobytes() == source.store.read(0, ids_of(8)).tobytes()
    )


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_full_copy_drops_what_leaves_while_rows_are_gathered(eviction):
    source = Journaled(eviction, capacity_rows=2)
    source.begin()
    source.rows_a_slice = 1
    for _ in range(5):
        use(source.store, 0, [100])
    use(source.store, 0, [2])
    copy = store_of(2, eviction, SPECS)
    put_in(copy, source.cut())
    use(source.store, 0, [100])
    use(source.store, 0, [3])  # takes the place of 2
    returning = iter([[2]])  # which takes it back when 3 has been gathered
    put_in(copy, source.cut(lambda: [use(source.store, 0, i) for i in returning]))
    put_in(copy, source.cut())
    assert_same(copy, source.store)
    is_missing = copy.find(0, ids_of(100))[0] == MISSING
    assert is_missing == (eviction == "lru")


def test_an_id_that_a_request_names_twice_was_used_at_its_first_place():
    source = Journaled()
    source.begin()
    use(source.store, 0, [1, 2])
    copy = copy_of(source.store, specs=SPECS)
    source.store.rows.journal.cut()
    use(source.store, 0, [1, 2, 1])
    put_in(copy, source.cut())
    assert_same(copy, source.store)


def test_settings_of_known_tables_stay():
    source = Journaled()
    source.begin()
    use(source.store, 0, [1])
    copy = store_of(20, specs=[TableSpec(name="a", dim=4, optimizer=SGD(0.001))])
    put_in(copy, source.cut())
    assert copy.tables[0].optimizer == SGD(0.001)
    assert [spec.name for spec in copy.tables] == [spec.name for spec in SPECS]


def test_a_step_that_is_set_comes_with_the_next_increment():
    source = Journaled()
    source.begin()
    copy = store_of(20)
    put_in(copy, source.cut())
    assert source.store.rows.journal.is_empty
    source.store.set_step(0, 41)
    assert not source.store.rows.journal.is_empty
    put_in(copy, source.cut())
    assert copy.states[0].num_updates == 41


def test_tables_that_keep_metadata_and_tables_that_do_not_take_each_others_rows():
    source = Journaled()
    source.begin()
    with_metadata = SPECS.index(TABLES[1])
    use(source.store, with_metadata, [1])
    use(source.store, 0, [2])
    increment = source.cut()
    others = [
        replace(TABLES[0], keeps_metadata=True),
        replace(TABLES[1], keeps_metadata=False),
    ]
    copy = store_of(20, specs=others)
    put_in(copy, increment)
    assert copy.metadata(0, ids_of(2)).frequency.tolist() == [1]
    for table, id_ in ((0, 2), (1, 1)):
        rows = [store.read(table, ids_of(id_)) for store in (copy, source.store)]
        assert rows[0].tobytes() == rows[1].tobytes()


def test_a_file_that_is_given_up_is_not_there():
    folder = Folder("memory://increments-given-up")

    def give_up():
        with folder.created("one") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        give_up()
    assert folder.names() == []


def test_rows_that_have_expired_leave_the_copy_too():
    source = Journaled()
    source.begin()
    copy = store_of(20, specs=SPECS)
    table = SPECS.index(EXPIRING)
    use(source.store, table, [1, 2])
    put_in(copy, source.cut())
    for _ in range(4):
        update(source.store, table, [2])
    source.store.sweep(100)
    assert ids_oldest_first(source.store) == [(table, 2)]
    put_in(copy, source.cut())
    assert_same(copy, source.store)


def test_an_id_that_never_had_a_row_is_in_no_increment():
    source = Journaled()
    source.begin()
    counted = SPECS.index(COUNTED)
    use(source.store, counted, [1])
    update(source.store, counted, [1])
    increment = source.cut()
    assert sum(len(rows) for _, rows in increment.rows) == 0
    assert sum(len(ids) for _, ids in increment.gone) == 0


def test_a_file_gives_back_what_was_written(tmp_path):
    source = Journaled(capacity_rows=5)
    source.begin()
    for table in range(len(SPECS)):
        use(source.store, table, [1, 2, 3])
    increment = source.cut()
    folder = Folder(tmp_path)
    written = write_increment(folder, increment)
    found = Increment.read(folder, 1)
    assert found.head == increment.head
    assert written.size_bytes == folder.file_size(increment_name(1))
    source_rows = [(t, rows) for t, rows in increment.rows if len(rows)]
    assert [t for t, _ in found.rows] == [t for t, _ in source_rows]
    for (_, mine), (_, others) in zip(found.rows, source_rows, strict=True):
        for column, other in zip(mine.columns(), others.columns(), strict=True):
            assert column.tobytes() == other.tobytes()
    gone = {(t, i) for t, ids in increment.gone for i in ids.tolist()}
    assert {(t, i) for t, ids in found.gone for i in ids.tolist()} == gone
    assert len(gone) > 0
    seen = [(t, [c.tolist() for c in columns]) for t, columns in increment.seen]
    assert [(t, [c.tolist() for c in columns]) for t, columns in found.seen] == seen
    assert {t for t, _ in seen} == {SPECS.index(COUNTED), SPECS.index(FILTERED)}


@given(data=st.data())
def test_a_damaged_file_is_rejected(data, tmp_path_factory):
    folder = Folder(tmp_path_factory.mktemp("log"))
    source = Journaled()
    source.begin()
    use(source.store, 1, [1, 2, 3])
    write_increment(folder, source.cut())
    whole = folder.read(increment_name(1))
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    folder.write(increment_name(1), bytes(damaged))
    with pytest.raises(CheckpointError, match=increment_name(1)):
        Increment.read(folder, 1)


def test_an_increment_of_other_tables_is_rejected_before_anything_changes():
    source = Journaled()
    source.begin()
    use(source.store, 0, [1])
    increment = source.cut()
    other = store_of(20, specs=[TableSpec(name="a", dim=9, optimizer=Adagrad(0.1))])
    with pytest.raises(CheckpointError, match=r"'a' must have dim 9.*Received: dim 4"):
        put_in(other, increment)
    assert other.num_rows == 0
    assert len(other.tables) == 1


def test_nothing_is_noted_unless_it_is_asked_for():
    source = Journaled(capacity_rows=5)
    run(source.store, [(0, list(range(9)), True)])
    source.store.clear()
    assert source.store.rows.journal.is_empty
