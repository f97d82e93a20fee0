import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.rpc.messages import Header, Kind
from persia_torchrec.server.open_batches import LookedUp
from persia_torchrec.server.update_queue import QueuedUpdate, build_gradients
from persia_torchrec.store.memory import MISSING
from tests.support.servers import segments_of

DIMS = {3: 2, 5: 4}


def update_of(stream, gradients):
    """Return an update; its gradients are given as {table: {id: value}}."""
    asked = segments_of([(table, [*rows]) for table, rows in gradients.items()])
    dims = np.array([DIMS[table] for table in gradients], dtype=np.int64)
    rows = zip(gradients.values(), dims, strict=True)
    each = [np.repeat([*values.values()], dim) for values, dim in rows]
    grads = np.concatenate([np.empty(0), *each]).astype(np.float32)
    return QueuedUpdate(b"", Header(Kind.UPDATE, stream=stream), asked, dims, grads)


def looked_up(*tables):
    """Return a lookup, given as tables with the slots of their ids."""
    asked = segments_of([(table, [*range(len(slots))]) for table, slots in tables])
    return LookedUp(asked, [slots for _, slots in tables], 0)


def test_a_single_update_is_not_copied():
    update = update_of(1, {3: {7: 1.0, 9: 2.0}})
    (part,) = build_gradients([update], [[]])
    assert part.table == 3
    assert np.shares_memory(part.ids, update.asked.ids)
    assert np.shares_memory(part.grads, update.grads)
    assert part.hints is None


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([3, 5]),
            st.dictionaries(st.integers(0, 9), st.integers(-99, 99), max_size=8),
        ),
        min_size=2,
        max_size=4,
    )
)
def test_gradients_of_trainers_add_up_by_table_and_id(trainers):
    expected = {}
    for gradients in trainers:
        for table, rows in gradients.items():
            total = expected.setdefault(table, {})
            for id_, value in rows.items():
                total[id_] = total.get(id_, 0) + value
    updates = [update_of(stream, rows) for stream, rows in enumerate(trainers)]
    parts = {
        part.table: part for part in build_gradients(updates, [[] for _ in updates])
    }
    assert parts.keys() == expected.keys()
    for table, part in parts.items():
        assert part.grads.shape == (len(part.ids), DIMS[table])
        assert len(set(part.ids.tolist())) == len(part.ids)
        for column in part.grads.T:
            assert (
                dict(zip(part.ids.tolist(), column.tolist(), strict=True))
                == (expected[table])
            )


def test_they_add_up_in_the_order_of_the_ranks():
    big, small = np.float32(2**24), np.float32(1)
    sums = []
    for values in ((big, small, -big), (big, -big, small)):
        updates = [update_of(s, {3: {7: value}}) for s, value in enumerate(values)]
        (part,) = build_gradients(updates, [[] for _ in updates])
        sums.append(float(part.grads[0, 0]))
    assert sums == [0.0, 1.0]


def test_each_lookup_of_a_batch_is_used_once():
    arrays = [np.arange(first, first + 3, dtype=np.uint32) for first in (0, 10, 20)]
    asked = segments_of([(3, [*range(num)]) for num in (3, 3, 3, 2)])
    dims, grads = np.full(4, 2), np.zeros(22, np.float32)
    update = QueuedUpdate(b"", Header(Kind.UPDATE), asked, dims, grads)
    kept = looked_up(*zip((3, 5, 3), arrays, strict=True))
    parts = list(build_gradients([update], [[kept]]))
    assert [part.hints is not None for part in parts] == [True, True, False, False]
    assert [part.hints.tolist() for part in parts[:2]] == [[0, 1, 2], [20, 21, 22]]


def test_hints_are_those_of_any_trainer_that_has_them():
    slots = [[], [looked_up((3, np.array([70, 90], dtype=np.uint32)))]]
    updates = [update_of(0, {3: {7: 1.0, 8: 1.0}}), update_of(1, {3: {7: 1.0, 9: 1.0}})]
    (part,) = build_gradients(updates, slots)
    assert dict(zip(part.ids.tolist(), part.hints.tolist(), strict=True)) == {
        7: 70,
        8: MISSING,
        9: 90,
    }


def test_a_nan_of_one_trainer_is_in_the_sum():
    updates = [update_of(s, {3: {7: v}}) for s, v in enumerate((np.nan, 1.0))]
    (part,) = build_gradients(updates, [[] for _ in updates])
    assert np.isnan(part.grads).all()
