"""Rows with optimizer state: looked up in training, and written back by the client."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec import AdmitFrequency, DynamicDim
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.routing.route import IdGroup
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.table import TableSpec
from tests.support.faults import Killed, Point, kill
from tests.support.processes import Processes, wait_until
from tests.support.servers import ids_of
from tests.support.threads import InThread

ROWWISE = Adagrad(0.1, vectorwise_shared=True)
TABLES = [
    TableSpec(name="item", dim=4, optimizer=ROWWISE, keeps_metadata=True),
    TableSpec(name="rare", dim=4, optimizer=ROWWISE, admission=AdmitFrequency(2)),
    TableSpec(name="user", dim=3, optimizer=Adam(0.1)),
    TableSpec(name="plain", dim=2, optimizer=SGD(1.0)),
]
ITEM, RARE, USER, PLAIN = TABLES
IDS = ids_of(*range(0, 2000, 7), 2**64 - 1)


def connect(servers, num_shards=1, tables=TABLES, **settings):
    client = servers.client(servers.start(num_shards, **settings))
    client.add_tables(tables)
    return client


def groups_of(client, *names, ids=IDS):
    return [(name, client.split(ids)) for name in names]


def finish(replies):
    for reply in replies:
        reply.frames()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_with_state_are_those_of_a_lookup_and_a_read(servers, num_shards):
    client = connect(servers, num_shards)
    names = ["item", "user", "plain"]
    tables, split = groups_of(client, *names), client.split(IDS)
    for number in range(2):
        batch = BatchNumber(1, number)
        weights = client.pull(tables, batch=batch)
        grads = [np.ones_like(rows) for rows in weights]
        client.outcome(client.push(tables, grads, batch))
    rows = client.pull(tables, batch=BatchNumber(2, 0), with_state=True)
    for name, rows_UW in zip(names, rows, strict=True):
        assert np.array_equal(rows_UW[split.inverse], client.read(name, IDS))
        assert not rows_UW.flags.writeable
    assert (client.metadata("item", IDS).frequency == 3).all()
    assert all(counters["open_batches"] == 0 for counters in client.counters())


def test_new_rows_with_state_are_what_rows_begin_with(servers):
    client, split = connect(servers, 2), None
    [rows] = client.pull(
        groups_of(client, "user"), batch=BatchNumber(1, 0), with_state=True
    )
    split = client.split(IDS)
    assert np.array_equal(rows[split.inverse], client.read("user", IDS))
    assert sum(client.num_rows()) == len(IDS)


def test_without_a_batch_rows_with_state_are_read_and_nothing_changes(servers):
    client = connect(servers, 2, capacity_rows=500)
    client.pull(groups_of(client, "item", ids=ids_of(3)), batch=BatchNumber(1, 0))
    before = client.counters()
    pending = client.begin_pull(
        groups_of(client, "item", "rare", ids=ids_of(3, 4)),
        *(None, Precision.FP32, None),
        with_state=True,
    )
    ids_U = client.split(ids_of(3, 4)).ids
    (has_row,) = np.nonzero(ids_U == 3)
    items, _ = pending.rows()
    assert np.array_equal(items[has_row], client.read("item", ids_of(3)))
    without_row, all_of_rare = pending.use.unadmitted
    assert ids_U[without_row].tolist() == [4]
    assert all_of_rare.tolist() == [0, 1]
    assert pending.use.frequencies[0].tolist() == (ids_U == 3).tolist()
    changed = "rows", "misses", "evictions", "requests_repeated"
    for old, new in zip(before, client.counters(), strict=True):
        assert [old[name] for name in changed] == [new[name] for name in changed]
    assert client.metadata("item", ids_of(3)).frequency.tolist() == [1]


@pytest.mark.slow
def test_ids_that_are_not_admitted_are_named_and_read_a_new_state(servers):
    client = connect(servers, 2)
    tables = groups_of(client, "user", "rare")
    known = IDS[::3]
    client.pull(groups_of(client, "rare", ids=known), batch=BatchNumber(1, 0))
    for _ in range(2):  # once more, as after a restart
        pending = client.begin_pull(
            tables, BatchNumber(1, 1), Precision.FP32, None, with_state=True
        )
        rows = pending.rows()[1]
        none, unadmitted = pending.use.unadmitted
        assert not len(none)
        assert (np.diff(unadmitted) > 0).all()
        ids_U = tables[1][1].ids
        assert set(ids_U[unadmitted].tolist()) == set(IDS.tolist()) - set(
            known.tolist()
        )
        assert (rows[unadmitted] == [[0.0] * 4 + [rows[0, 4]]]).all()
        has_row = np.setdiff1d(np.arange(len(ids_U)), unadmitted)
        expected = client.read("rare", ids_U[has_row])
        assert np.array_equal(rows[has_row], expected)
    assert sum(counters["requests_repeated"] for counters in client.counters()) == 2


def test_tables_of_one_width_are_one_group(servers):
    client = connect(servers, 2, [ITEM, RARE])
    rng, group = np.random.default_rng(0), None
    ids = [client.split(IDS[:50]), client.split(IDS[20:])]
    pieces = [
        IdGroup.of(name, s) for name, s in zip(("item", "rare"), ids, strict=True)
    ]
    group = joined(pieces, client.num_servers)
    rows = rng.random((len(group.ids), 5)).astype(np.float32)
    finish(client.write_rows([group], [rows], steps={"item": 7}))
    [again] = client.pull([group], batch=BatchNumber(1, 0), with_state=True)
    assert np.array_equal(again, rows)
    assert [client.step(name) for name in ("item", "rare")] == [7, 0]


def joined(pieces, num_servers):
    """Return the ids of several tables as one group, by server and then by table."""
    parts, nums = [], np.zeros((num_servers, len(pieces)), np.int64)
    for server in range(num_servers):
        for t, piece in enumerate(pieces):
            begin, stop = piece.offsets[server : server + 2].tolist()
            parts.append(piece.ids[begin:stop])
            nums[server, t] = stop - begin
    offsets = np.cumsum([0, *nums.sum(axis=1)])
    names = tuple(name for piece in pieces for name in piece.tables)
    return IdGroup(names, np.concatenate(parts), offsets, nums)


def test_written_rows_have_counts_frequencies_and_steps(servers):
    client = connect(servers, 2)
    tables, number = groups_of(client, "item", "user"), BatchNumber(1, 0)
    pending = client.begin_pull(tables, number, Precision.FP32, None, with_state=True)
    rows = [2 * rows_UW for rows_UW in pending.rows()]
    seen = pending.use.frequencies
    assert (seen[0] == 1).all()
    counts = [np.full(len(IDS), 5, np.uint32)] * 2
    given = {"counts": counts, "frequencies": seen, "steps": {"item": 9}}
    finish(client.write_rows(tables, rows, **given))
    split = tables[0][1]
    assert np.array_equal(client.read("item", IDS), rows[0][split.inverse])
    found = client.metadata("item", IDS)
    assert (found.frequency == 6).all()
    assert (found.last_step == 9).all()
    assert (found.first_step == 0).all()
    assert (found.last_s > 0).all()
    assert client.step("item") == 9
    assert client.step("user") == 0
    finish(client.write_rows(tables[:1], rows[:1], steps={"item": 4}))
    assert client.step("item") == 9  # at least
    assert (client.metadata("item", IDS).frequency == 7).all()


def test_rows_come_back_to_a_full_server_as_often_used_as_they_were(servers):
    """Those that leave a cache do not leave for each other, as new ones would."""
    capacity = 60
    client = connect(servers, 1, [PLAIN], capacity_rows=capacity, eviction="lfu")
    hot, others = ids_of(*range(40)), ids_of(*range(100, 160))
    for number in range(5):
        client.pull(groups_of(client, "plain", ids=hot), batch=BatchNumber(1, number))
    tables = groups_of(client, "plain", ids=hot)
    pending = client.begin_pull(
        tables, BatchNumber(2, 0), Precision.FP32, None, with_state=True
    )
    [rows], [seen] = pending.rows(), pending.use.frequencies
    assert (seen == 6).all()
    for number in range(20):
        pulled = groups_of(client, "plain", ids=others)
        client.pull(pulled, batch=BatchNumber(3, number))
    finish(client.write_rows(tables, [rows + 1], frequencies=[seen]))
    assert np.array_equal(client.read("plain", tables[0][1].ids), rows + 1)
    for number in range(3):
        some = ids_of(*range(1000 + 100 * number, 1050 + 100 * number))
        client.pull(groups_of(client, "plain", ids=some), batch=BatchNumber(4, number))
    assert np.array_equal(client.read("plain", tables[0][1].ids), rows + 1)


def test_rows_that_find_no_room_are_counted(servers):
    shared = replace(PLAIN, name="shared", admission=AdmitFrequency(3), shared_rows=10)
    client = connect(servers, 1, [PLAIN, shared], capacity_rows=30)
    client.pull(
        [("shared", client.split(ids_of(*range(20)), "shared"))],
        batch=BatchNumber(1, 0),
    )  # whose rows never leave
    tables = groups_of(client, "plain", ids=ids_of(*range(30)))
    finish(client.write_rows(tables, [np.ones((30, 2), np.float32)]))
    [counters] = client.counters()
    assert counters["writes_without_room"] == 10
    assert client.num_rows() == [30]
    assert (client.read("plain", tables[0][1].ids) == 1).all(axis=1).sum() == 20


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_rows_with_state_may_travel_in_16_bits(servers, precision):
    client = connect(servers, 2, [ITEM])
    tables = groups_of(client, "item")
    rows = np.random.default_rng(0).random((len(IDS), 5)).astype(np.float32)
    finish(client.write_rows(tables, [rows], precision=precision))
    [again] = client.pull(
        tables, batch=BatchNumber(1, 0), with_state=True, precision=precision
    )
    np.testing.assert_allclose(again, rows, rtol=2**-7)


SHARED = replace(RARE, name="shared", shared_rows=2)
BLOCKS = TableSpec(name="blocks", dim=4, optimizer=ROWWISE, dynamic=DynamicDim(2))


def test_requests_that_make_no_sense_are_rejected(servers):
    client = connect(servers, 1, [*TABLES, SHARED, BLOCKS])
    batch, split = BatchNumber(1, 0), client.split(ids_of(1))
    rows = [np.ones((1, 5), np.float32)]
    for name in ("shared", "blocks"):
        tables = [(name, client.split(ids_of(1), name))]
        with pytest.raises(ConfigError, match=r"one row an id.*dynamic or shared_rows"):
            client.pull(tables, batch=batch, with_state=True)
        with pytest.raises(ConfigError, match=r"one row an id.*dynamic or shared_rows"):
            client.write_rows(tables, rows)
    both = IdGroup(
        ("item", "user"), ids_of(1, 1), np.array([0, 2]), np.ones((1, 2), int)
    )
    with pytest.raises(ConfigError, match=r"'item', 'user'.*groups of their own"):
        client.pull([both], batch=batch, with_state=True)
    with pytest.raises(BatchError, match=r"rows must have the shape \(1, 5\)"):
        client.write_rows([("item", split)], [rows[0][:, :4]])
    with pytest.raises(BatchError, match="counts must be uint32"):
        client.write_rows([("item", split)], rows, counts=[np.ones(2, np.uint32)])
    assert client.num_rows() == [0]


def use_states(client, number):
    """Look rows up, and write them back; return what was read."""
    tables = groups_of(client, "item", "user")
    pending = client.begin_pull(
        tables, BatchNumber(1, number), Precision.FP32, None, with_state=True
    )
    rows, seen = pending.rows(), pending.use.frequencies
    written = [rows_UW + np.float32(number + 1) for rows_UW in rows]
    counts = [np.full(len(IDS), number + 2, np.uint32)] * 2
    steps = {"item": number + 1, "user": number + 1}
    finish(
        client.write_rows(tables, written, counts=counts, frequencies=seen, steps=steps)
    )
    return [each.tobytes() for each in (*rows, *seen)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("transport", "point"),
    [
        ("tcp", Point.REQUEST_IS_NOTED),
        ("shm", Point.REQUEST_IS_NOTED),
        ("shm", Point.SLAB_REQUEST_IS_READ),
        ("shm", Point.SLAB_ROWS_ARE_GATHERED),
        ("shm", Point.SLAB_REPLY_IS_WRITTEN),
    ],
)
def test_each_write_is_applied_once_wherever_the_server_dies(
    servers, tmp_path, monkeypatch, transport, point
):
    monkeypatch.setenv("PERSIA_TRANSPORT", transport)
    plain = connect(servers, 1)
    with Processes(tmp_path) as processes, closing(Killed(processes)) as killed:
        killed.start()
        with killed.connect() as client:
            client.add_tables(TABLES)
            assert use_states(client, 0) == use_states(plain, 0)
            kill(killed.process.pid)
            killed.dies()
            killed.start(dies_in=point)
            if transport == "shm":
                connection = client._servers.connections[0]
                wait_until(lambda: connection.memory is not None, "shared memory")
            used = InThread(lambda: use_states(client, 1))
            killed.dies()
            killed.start()
            assert used.result() == use_states(plain, 1)
            for name in ("item", "user"):
                rows = client.read(name, IDS)
                assert rows.tobytes() == plain.read(name, IDS).tobytes()
                assert client.step(name) == 2
            seen = client.metadata("item", IDS)
            assert (seen.frequency == 1 + 2 + 1 + 3).all()
            assert client.counters()[0]["open_batches"] == 0
