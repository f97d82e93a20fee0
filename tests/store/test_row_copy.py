"""Rows go out of a store and into another one: what is copied, and in which order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.store import row_copy
from persia_torchrec.store.memory import LARGEST_TICK, STATE, WEIGHTS
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.copied_stores import (
    TABLES,
    assert_same,
    copy_of,
    evictions,
    exported,
    import_into,
    requests,
    run,
    store_of,
    update,
    use,
)
from tests.support.servers import ids_of


@pytest.mark.slow
@given(before=requests, after=requests, eviction=evictions)
def test_a_copied_store_continues_exactly_as_the_original(before, after, eviction):
    store = store_of(25, eviction)
    run(store, before)
    copy = copy_of(store, eviction=eviction)
    assert_same(copy, store)
    for one in (store, copy):
        run(one, after)
        check_store(one)
    assert_same(copy, store)


@given(before=requests, during=requests)
def test_every_row_that_lives_during_an_export_is_copied_once_and_whole(before, during):
    store = store_of(25)
    run(store, before)
    alive = slots_of(store)
    values = {row: [value_of(store, row)] for row in alive}
    steps = iter(during)

    def between():
        run(store, [step] if (step := next(steps, None)) else [])
        still = slots_of(store)
        for row in list(alive):
            if still.get(row) == alive[row]:
                values[row].append(value_of(store, row))
            else:
                del alive[row]

    found = {}
    for table, rows in exported(store, between):
        for i, id_ in enumerate(rows.ids.tolist()):
            value = (rows.weights[i].tobytes(), rows.state[i].tobytes())
            found.setdefault((table, id_), []).append(value)
    for row in alive:
        (value,) = found[row]
        assert value in values[row]


def slots_of(store):
    """Return where each row is, by table and id."""
    return {
        (table, id_): int(store.find(table, ids_of(id_))[0])
        for table, id_ in ids_oldest_first(store)
    }


def value_of(store, row):
    """Return the bytes of a row's weights and state, as columns have them."""
    table, id_ = row
    state = store.states[table]
    row = store.rows.arena(state.layout)[store.find(table, ids_of(id_))[0]].tobytes()
    weights, begin = int(state.layout[WEIGHTS]), int(state.layout[STATE])
    size = 4 if state.spec.weight_dtype == "fp32" else 2
    end = begin + 4 * state.spec.num_state_floats
    return row[weights : weights + state.spec.dim * size], row[begin:end]


def test_rows_of_many_slices_and_chunks_are_all_copied(monkeypatch):
    monkeypatch.setattr(row_copy, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(row_copy, "_SLICE_BYTES", 512)
    monkeypatch.setattr(row_copy, "_SLICE_RECORDS", 100)
    store = store_of(5000)
    for table in range(len(TABLES)):
        use(store, table, range(700 + table))
        update(store, table, range(0, 700, 2))
        use(store, table, range(650, 600, -3))
    num_slices = 0

    def count():
        nonlocal num_slices
        num_slices += 1

    blocks = exported(store, count)
    assert num_slices > 100
    copy = store_of(5000)
    assert import_into(copy, blocks, store.rows.tick) == store.num_rows
    assert_same(copy, store)


def test_of_a_row_that_comes_twice_the_later_use_is_kept():
    store = store_of(specs=TABLES[:1])
    use(store, 0, [1, 2])
    early = exported(store)
    update(store, 0, [1])
    use(store, 0, [1])
    late = exported(store)
    for blocks in ([*early, *late], [*late, *early]):
        copy = store_of(specs=TABLES[:1])
        import_into(copy, blocks, 9)
        assert_same(copy, store)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_smaller_store_leaves_out_what_would_leave_first(eviction):
    store = store_of(40, eviction)
    for table in (1, 0, 3):
        use(store, table, range(10))
    use(store, 0, [4, 2])
    use(store, 1, [8])
    small = store_of(7, eviction)
    assert import_into(small, exported(store), 99) == 7
    assert ids_oldest_first(small) == ids_oldest_first(store)[-7:]
    assert small.counters()["evictions"] == 0
    assert small.rows.tick == 99


def test_rows_put_over_others_count_as_used_later_and_take_their_room():
    store, other = store_of(6, specs=TABLES[:1]), store_of(specs=TABLES[:1])
    use(store, 0, [1, 2, 3, 4])
    update(store, 0, [3])
    use(other, 0, [2, 5, 7, 1])
    assert import_into(store, exported(other), 5) == 4
    assert ids_oldest_first(store) == [(0, id_) for id_ in (3, 4, 2, 5, 7, 1)]
    use(store, 0, [9])
    assert [id_ for _, id_ in ids_oldest_first(store)] == [4, 2, 5, 7, 1, 9]
    store = store_of(6, specs=TABLES[:1])
    use(store, 0, [11, 12, 13, 14, 15, 16])
    import_into(store, exported(other), 5)
    check_store(store)
    assert [id_ for _, id_ in ids_oldest_first(store)] == [15, 16, 2, 5, 7, 1]


def test_a_request_after_the_import_is_newer_than_all_rows():
    store = store_of(specs=TABLES[:2])
    for _ in range(20):
        use(store, 0, [1, 2])
        use(store, 1, [3])
    copy = copy_of(store, specs=TABLES[:2])
    for one in (store, copy):
        use(one, 0, [2])
    assert_same(copy, store)
    assert copy.rows.tick == store.rows.tick


def test_an_empty_store_has_nothing_to_copy():
    assert exported(store_of(specs=[])) == []
    assert exported(store_of()) == []
    store = store_of(3)
    assert import_into(store, [], 4) == 0
    assert store.num_rows == 0


def test_a_store_that_loads_its_own_rows_again_and_again_counts_few_requests():
    store = store_of(specs=TABLES[:2])
    use(store, 0, [1, 2])
    use(store, 1, [3])
    for _ in range(9):
        import_into(store, exported(store), store.rows.tick)
    assert store.rows.tick <= 2 + 2 * 9  # one for each request that used rows
    assert ids_oldest_first(store) == [(0, 1), (0, 2), (1, 3)]


@settings(max_examples=20)
@given(requests, requests, evictions, st.integers(LARGEST_TICK - 20, LARGEST_TICK + 20))
def test_a_store_is_copied_where_its_requests_pass_what_a_use_can_count(
    before, after, eviction, tick
):
    store = store_of(eviction=eviction)
    store.rows.tick = tick
    run(store, before)
    copy = store_of(eviction=eviction)
    blocks = exported(store)
    import_into(copy, blocks, store.rows.tick_in_files)
    assert sorted(ids_oldest_first(copy)) == sorted(ids_oldest_first(store))
    if store.rows.tick <= LARGEST_TICK:
        assert ids_oldest_first(copy) == ids_oldest_first(store)
    for one in (store, copy):
        run(one, after)
        check_store(one)
    assert copy.rows.tick >= LARGEST_TICK - 20
