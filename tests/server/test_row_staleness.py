import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import SGD
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.metrics import Metrics
from persia_torchrec.server.row_staleness import (
    MAX_STALENESS,
    RowStaleness,
    places_of_watched,
)
from persia_torchrec.server.staleness import OpenBatches
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import TableIds
from tests.servers import ids_of

PER_LOOKUP = 64
"""What the bound counts for a lookup beside its ids."""


def is_watched(table, id_):
    return len(places_of_watched([TableIds(table, ids_of(id_))])) == 1


WATCHED = [
    (table, id_) for table in range(2) for id_ in range(80) if is_watched(table, id_)
]
UNWATCHED = [(0, id_) for id_ in range(80) if not is_watched(0, id_)]


def request(rows):
    """Return the ids of each table, as a request names them."""
    return [
        TableIds(table, ids_of(*(id_ for of, id_ in rows if of == table)))
        for table in sorted({table for table, _ in rows})
    ]


class SlowStaleness:
    """Remembers every update of every row: what the histogram should be."""

    def __init__(self):
        self.updates, self.pulled_at, self.histogram = [], {}, {}

    def pulled(self, batch, rows):
        self.pulled_at[batch] = (len(self.updates), rows)

    def applied(self, batch):
        since, rows = self.pulled_at.pop(batch)
        for row in rows:
            staleness = min(self.updates[since:].count(row), MAX_STALENESS)
            self.histogram[staleness] = self.histogram.get(staleness, 0) + 1
        self.updates += rows


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pull", "apply", "drop"]),
        st.lists(st.sampled_from(WATCHED), unique=True),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_histogram_is_what_a_list_of_all_updates_says(steps):
    staleness, slow, under_way = RowStaleness(), SlowStaleness(), []
    for number, (step, rows, which) in enumerate(steps):
        if step == "pull":
            staleness.pulled(3, number, request([*rows, *UNWATCHED]))
            slow.pulled(number, rows)
            under_way.append(number)
        elif under_way:
            batch = under_way.pop(which % len(under_way))
            if step == "apply":
                staleness.applied([(3, batch)])
                slow.applied(batch)
            else:
                staleness.drop(3, batch)
    expected = [slow.histogram.get(k, 0) for k in range(MAX_STALENESS + 1)]
    assert staleness.histogram.tolist() == expected


def test_one_id_in_sixteen_is_watched_and_few_share_a_place():
    ids = np.arange(160_000, dtype=np.uint64) * np.uint64(1000)
    places = places_of_watched([TableIds(0, ids), TableIds(1, ids)])
    assert 19_000 < len(places) < 21_000
    assert len(np.unique(places)) > 0.98 * len(places)


def test_very_stale_rows_are_counted_together():
    staleness = RowStaleness()
    rows = request(WATCHED[:1])
    staleness.pulled(1, 0, rows)
    for batch in range(1, MAX_STALENESS + 10):
        staleness.pulled(1, batch, rows)
        staleness.applied([(1, batch)])
    staleness.applied([(1, 0)])
    assert staleness.counters()[f"staleness_{MAX_STALENESS}"] == 1
    assert staleness.counters()["staleness_0"] == MAX_STALENESS + 9


def test_batches_beyond_the_bound_are_forgotten_and_not_measured():
    staleness = RowStaleness(max_watched=2 * (PER_LOOKUP + 1))
    rows = request(WATCHED[:1])
    for batch in range(3):
        staleness.pulled(1, batch, rows)
    for batch in range(3):
        staleness.applied([(1, batch)])
    assert staleness.counters() == {"staleness_0": 1, "staleness_1": 1}


def test_a_lookup_in_parts_is_measured_whole():
    staleness = RowStaleness()
    for row in WATCHED[:2]:
        staleness.pulled(1, 5, request([row]))
    staleness.applied([(1, 5)])
    assert staleness.counters() == {"staleness_0": 2}


def test_a_joint_step_is_one_update():
    staleness = RowStaleness()
    first, second = request(WATCHED[:2]), request(WATCHED[1:3])
    for step in range(2):
        staleness.pulled(1, step, first)
        staleness.pulled(2, step, second)
    for step in range(2):
        staleness.applied([(1, step), (2, step)])
    assert staleness.counters() == {"staleness_0": 4, "staleness_1": 4}


def test_a_stream_that_never_ends_a_batch_is_forgotten():
    batches = OpenBatches(Metrics())
    for batch in range(5000):
        batches.begin(7, batch, tables=request(WATCHED[:1]))
    batches.end(7, 0)
    batches.rows.applied([(7, 0)])
    assert batches.rows.counters() == {"staleness_0": 0}


def test_a_client_adds_the_histograms_of_its_servers_up(servers):
    client = servers.client(servers.start(2, capacity_rows=10_000))
    client.add_tables([TableSpec(name="item", dim=1, optimizer=SGD(1.0))])
    assert client.staleness().tolist() == [0]
    split = client.split(np.arange(800, dtype=np.uint64))
    tables, grads = [("item", split)], [np.ones((800, 1), dtype=np.float32)]
    batches = [BatchNumber(1, number) for number in range(4)]
    for batch in batches:
        client.pull(tables, batch=batch)
    for batch in batches[:3]:
        client.outcome(client.push(tables, grads, batch))
    client.outcome(client.push([], [], batches[3]))  # given up
    counts = client.staleness().tolist()
    assert counts == [counts[0]] * 3
    assert 30 < counts[0] < 70
    assert [c["staleness_2"] > 0 for c in client.counters()] == [True, True]
