"""A training lookup that is sent again gives what it gave, and changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import AdmitBloom, AdmitFrequency, AdmitProbability, Uniform
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.table import TableSpec
from tests.support.reference import ReferenceStore, initial_weights, is_drawn
from tests.support.servers import Servers, ids_of

ADMISSIONS = {
    "all": {},
    "probability": {"admission": AdmitProbability(0.5, unadmitted_value=0.5)},
    "frequency": {"admission": AdmitFrequency(3, unadmitted_value=0.25)},
}
TABLES = [
    TableSpec(name=name, dim=2, optimizer=SGD(1.0), initializer=Uniform(-1, 1), **how)
    for name, how in ADMISSIONS.items()
]
BLOOM = TableSpec(name="bloom", dim=1, optimizer=SGD(1.0), admission=AdmitBloom(2, 99))

batches = st.lists(
    st.tuples(
        st.sampled_from(range(len(TABLES))),
        st.sets(st.integers(0, 11), min_size=1, max_size=8),
        st.integers(1, 2),  # how often each id is in the batch
        st.booleans(),  # whether it gets an update
        st.integers(0, 3),  # the lookup of so many batches before comes again
    ),
    min_size=1,
    max_size=12,
)


def looked_up(client, number, table, ids, count):
    """Look ids up in a batch; return them in the servers' order, and their rows."""
    split = client.split(ids_of(*sorted(ids)))
    counts = np.full(len(split.ids), count, np.uint32)
    tables, batch = [(table.name, split)], BatchNumber(3, number)
    [rows] = client.pull(tables, batch=batch, counts=[counts])
    return split.ids.tolist(), rows.copy()


def expected_again(slow, number, id_, batch):
    """Return what an id reads: its row, or what it began with if it had one."""
    table, row = slow.tables[number], slow.rows.get((number, id_))
    if row is not None:
        return row.weights
    drawn = table.name != "probability" or is_drawn(id_, table.seed, 0.5, batch)
    if drawn and not slow.seen[number, id_]:
        return initial_weights(table.initializer, id_ ^ table.seed, table.dim)
    return np.full(table.dim, table.admission.unadmitted_value)


@pytest.mark.slow
@given(batches=batches, eviction=st.sampled_from(["lru", "lfu"]))
def test_a_lookup_that_is_sent_again_is_that_of_the_reference(batches, eviction):
    with Servers() as servers:
        client = servers.client(servers.start(capacity_rows=5, eviction=eviction))
        client.add_tables(TABLES)
        slow, done = ReferenceStore(5, eviction), []
        slow.tables = TABLES
        for number, (which, ids, count, is_updated, back) in enumerate(batches):
            table = TABLES[which]
            had_row = {id_ for id_ in ids if (which, id_) in slow.rows}
            order, rows = looked_up(client, number, table, ids, count)
            given = {"training": True, "counts": [count] * len(order), "batch": number}
            np.testing.assert_allclose(rows, slow.lookup(which, order, **given))
            _, again = looked_up(client, number, table, ids, count)
            is_new = [id_ not in had_row for id_ in order]
            assert again[is_new].tobytes() == rows[is_new].tobytes()
            done.append((number, which, ids, count))
            earlier, which_, ids_, count_ = done[max(number - back, 0)]
            order_, again = looked_up(client, earlier, TABLES[which_], ids_, count_)
            expected = [expected_again(slow, which_, id_, earlier) for id_ in order_]
            np.testing.assert_allclose(again, expected, rtol=1e-6)
            if is_updated:
                split = client.split(ids_of(*sorted(ids)))
                grads = np.full((len(order), 2), 0.5, np.float32)
                tables, batch = [(table.name, split)], BatchNumber(3, number)
                client.outcome(client.push(tables, [grads], batch))
                slow.update(which, order, grads)
        counted, counters = slow.counters(), client.counters()[0]
        assert {name: counters[name] for name in counted} == counted
        assert counters["requests_repeated"] == 2 * len(batches)


def test_ids_that_a_bloom_filter_admitted_are_known(servers):
    client = servers.client(servers.start(capacity_rows=2, eviction="lfu"))
    client.add_tables([BLOOM])
    for number in range(3):
        _, rows = looked_up(client, number, BLOOM, range(8), 1)
    assert client.num_rows() == [2]
    assert (rows != 0).all()
    assert looked_up(client, 2, BLOOM, range(8), 1)[1].tobytes() == rows.tobytes()
