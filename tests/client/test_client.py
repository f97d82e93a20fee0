import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec import Constant, env
from persia_torchrec.client.client import BatchNumber, EmbeddingClient, Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    TokenError,
    WireError,
)
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Header, Kind, Precision
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.ports import draw_port
from tests.support.reference import ReferenceStore, uniform_weights
from tests.support.servers import (
    DEADLINE_S,
    RunningServer,
    ids_of,
    once_the_port_is_free,
)

TABLES = [
    TableSpec(name="item", dim=5, optimizer=Adagrad(0.1)),
    TableSpec(name="user", dim=3, optimizer=Adam(0.1), seed=9),
    TableSpec(name="shop", dim=8, optimizer=Adagrad(0.1, vectorwise_shared=True)),
]


def connect(servers, num_shards=1, **settings):
    client = servers.client(servers.start(num_shards, **settings))
    client.add_tables(TABLES)
    return client


def batches(num=6):
    """Return for each batch ids and gradients by table, in plain order."""
    rng = np.random.default_rng(0)
    for number in range(num):
        ids = {
            table.name: rng.choice(60, 40, replace=False).astype(np.uint64) << 58
            for table in TABLES
        }
        grads = {
            table.name: rng.standard_normal((40, table.dim)).astype(np.float32)
            for table in TABLES
        }
        yield BatchNumber(1, number), ids, grads


def train(client, *, precision=Precision.FP32):
    """Pull and push all batches; return every row that came, in plain order."""
    pulled = []
    for number, ids, grads in batches():
        tables = [(name, client.split(ids_U)) for name, ids_U in ids.items()]
        rows = client.pull(tables, batch=number, precision=precision)
        grouped = []
        for (name, split), rows_UD in zip(tables, rows, strict=True):
            pulled.append(rows_UD[split.inverse])
            grouped.append(np.empty_like(rows_UD))
            grouped[-1][split.inverse] = grads[name]
        push = client.push(tables, grouped, number, precision=precision)
        assert client.outcome(push).num_missed == 0
    return pulled


def wait_until_the_loss_is_noticed(client):
    """Ask a restarted server until the new one answers."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with pytest.raises(ServerError) as caught:
            client.num_rows()
        if isinstance(caught.value, RemoteError):
            return


def test_rows_come_as_in_the_reference_step_by_step(servers):
    reference = ReferenceStore(1000)
    reference.tables = TABLES
    pulled = iter(train(connect(servers, 2)))
    for _, ids, grads in batches():
        for table, (name, ids_U) in enumerate(ids.items()):
            expected = reference.lookup(table, ids_U.tolist(), training=True)
            np.testing.assert_allclose(next(pulled), expected, rtol=1e-5, atol=1e-6)
            reference.update(table, ids_U.tolist(), grads[name])


@pytest.mark.parametrize("num_shards", [2, 3, 5])
def test_several_servers_give_the_rows_of_one_bit_for_bit(servers, num_shards):
    one, several = connect(servers), connect(servers, num_shards)
    for of_one, of_several in zip(train(one), train(several), strict=True):
        assert of_one.tobytes() == of_several.tobytes()
    for table in TABLES:
        ids = np.arange(60, dtype=np.uint64) << 58
        expected = one.read(table.name, ids)
        assert several.read(table.name, ids).tobytes() == expected.tobytes()
    assert sum(several.num_rows()) == sum(one.num_rows())
    assert min(several.num_rows()) > 0


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_half_precision_is_for_the_way_only(servers, precision):
    exact, rounded = connect(servers), connect(servers)
    pairs = zip(train(exact), train(rounded, precision=precision), strict=True)
    for of_exact, of_rounded in pairs:
        np.testing.assert_allclose(of_rounded, of_exact, rtol=0.05, atol=0.01)
    ids = ids_of(0)
    weights = np.full((1, 5), 1 + 2**-20, dtype=np.float32)
    rounded.write("item", ids, weights)
    assert np.array_equal(rounded.read("item", ids)[:, :5], weights)
    [rows] = rounded.pull([("item", rounded.split(ids))], precision=precision)
    assert np.array_equal(rows, np.ones((1, 5)))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.slow
def test_a_huge_gradient_leaves_other_ids_and_tables_as_they_are(servers, transport):
    with env.set_within({"PERSIA_TRANSPORT": transport}):
        client = servers.client(servers.start(2))
    names = ["a", "b", "c"]
    specs = [
        TableSpec(name=name, dim=dim, optimizer=SGD(1.0), initializer=Constant(1.0))
        for name, dim in zip(names, (4, 4, 3), strict=True)
    ]
    client.add_tables(specs)
    given = {"batch": BatchNumber(1, 1), "precision": Precision.FP16}
    tables = [(name, client.split(ids_of(0, 1, 2, 3))) for name in names]
    client.pull(tables, **given)
    grads = [np.ones((4, dim), np.float32) for dim in (4, 4, 3)]
    [(_, split), *_] = tables
    grads[0][split.inverse[0]] = 1e14
    grads[2][split.inverse[1]] = [1.0, 1e-20, 0.0]
    client.outcome(client.push(tables, grads, **given))
    for name, dim in zip(names, (4, 4, 3), strict=True):
        weights = client.read(name, ids_of(0, 1, 2, 3))
        expected = np.zeros((4, dim))
        if name == "a":
            assert weights[0].tolist() == pytest.approx([-1e14] * 4, rel=1e-3)
            expected[0] = weights[0]
        if name == "c":
            expected[1, 1:] = 1.0
        assert weights.tolist() == expected.tolist()
    assert sum(each["wire_underflows"] for each in client.counters()) == 1
    client.write("a", ids_of(1), np.full((1, 4), 0.5, np.float32))
    rows, *_ = client.pull(tables, precision=Precision.FP16)
    assert rows[split.inverse[1]].tolist() == [0.5] * 4


@pytest.mark.parametrize("num_shards", [1, 2])
def test_an_empty_batch_is_pulled_and_pushed(servers, num_shards):
    client = connect(servers, num_shards)
    nothing = client.split(ids_of())
    tables = [("item", nothing), ("user", nothing)]
    rows = client.pull(tables, batch=BatchNumber(1, 1))
    assert [rows_UD.shape for rows_UD in rows] == [(0, 5), (0, 3)]
    assert client.outcome(client.push(tables, rows, BatchNumber(1, 1))).num_missed == 0


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("num_tables", [1, 3])
def test_pulled_rows_cannot_be_written_to(servers, num_shards, precision, num_tables):
    client = connect(servers, num_shards)
    ids = np.arange(50, dtype=np.uint64)
    tables = [(table.name, client.split(ids)) for table in TABLES[:num_tables]]
    for table in TABLES:
        client.write(table.name, ids, np.repeat(ids[:, None], table.dim, axis=1))
    rows = client.pull(tables, precision=precision)
    for rows_UD, (_, split) in zip(rows, tables, strict=True):
        assert (rows_UD[split.inverse] == ids[:, None]).all()
        assert rows_UD.flags.aligned
        assert rows_UD.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            rows_UD[0, 0] = 1


@pytest.mark.parametrize("num", [1, 20_000])
def test_rows_of_one_server_are_not_copied(servers, num):
    client = connect(servers, capacity_rows=100_000)
    split = client.split(np.arange(num, dtype=np.uint64))
    rows = client.pull([("item", split), ("user", split)], batch=BatchNumber(1, 1))
    both = [rows_UD.base for rows_UD in rows]
    assert both[0] is both[1] is not None
    for rows_UD, table in zip(rows, TABLES, strict=False):
        expected = client.read(table.name, split.ids)[:, : table.dim]
        assert rows_UD.tobytes() == expected.tobytes()


def test_a_lookup_without_training_makes_no_rows(servers):
    client = connect(servers, 2)
    [rows] = client.pull([("item", client.split(ids_of(1, 2, 3)))])
    assert not rows.any()
    assert sum(client.num_rows()) == 0


def test_the_ends_of_the_id_space_are_ids_like_any_other(servers):
    client = connect(servers, 2)
    ids = ids_of(0, 2**63, 2**64 - 1)
    split = client.split(ids)
    [rows] = client.pull([("user", split)], batch=BatchNumber(1, 1))
    for id_, row in zip(ids.tolist(), rows[split.inverse], strict=True):
        assert row.tobytes() == uniform_weights(id_ ^ 9, 3, -0.01, 0.01).tobytes()


def test_written_rows_are_read_and_pulled_in_the_order_of_their_ids(servers):
    client = connect(servers, 3)
    ids = np.arange(40, dtype=np.uint64)
    weights = np.arange(200, dtype=np.float64).reshape(40, 5)
    client.write("item", ids, weights)
    assert np.array_equal(client.read("item", ids[::-1])[:, :5], weights[::-1])
    split = client.split(ids)
    [rows] = client.pull([("item", split)])
    assert np.array_equal(rows[split.inverse], weights)
    client.clear()
    assert client.num_rows() == [0, 0, 0]
    assert not client.read("item", ids).any()


def test_gradients_of_evicted_ids_are_counted_over_all_servers(servers):
    client = connect(servers, 2, capacity_rows=4)
    split = client.split(np.arange(40, dtype=np.uint64))
    [rows] = client.pull([("item", split)], batch=BatchNumber(1, 1))
    assert client.num_rows() == [4, 4]
    push = client.push([("item", split)], [rows], BatchNumber(1, 1))
    assert client.outcome(push).num_missed == 40 - 8
    assert sum(c["gradients_missed"] for c in client.counters()) == 40 - 8


def test_threads_may_use_one_client_at_once(servers):
    client = connect(servers, 2)
    ids = np.arange(500, dtype=np.uint64)
    weights = np.repeat(ids[:, None], 5, axis=1).astype(np.float32)
    client.write("item", ids, weights)

    def look_up(thread):
        rng = np.random.default_rng(thread)
        for _ in range(20):
            some = rng.choice(ids, 100, replace=False)
            split = client.split(some)
            [rows] = client.pull([("item", split)])
            assert np.array_equal(rows[split.inverse][:, 0], some)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(look_up, range(6)))


def test_tables_get_different_numbers_on_servers_that_knew_others(servers):
    running = servers.start(2)
    shy = EmbeddingClient.connect([server.address for server in running])
    shy.add_tables([TABLES[2]])
    shy.close()
    client = servers.client(running)
    client.add_tables(TABLES)
    client.write("user", ids_of(1), np.ones((1, 3)))
    assert client.read("user", ids_of(1))[0, :3].tolist() == [1, 1, 1]
    assert not client.read("item", ids_of(1)).any()
    assert client.table("user") == TABLES[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda client, split: client.pull([("toy", split)]),
        lambda client, split: client.push([("toy", split)], [np.ones((1, 5))], None),
        lambda client, split: client.write("toy", split.ids, np.ones((1, 5))),
        lambda client, split: client.read("toy", split.ids),
        lambda client, split: client.table("toy"),
    ],
)
def test_a_table_that_was_not_added_is_rejected(servers, call):
    client = connect(servers)
    message = r"'toy' is unknown to this client\. Known: \['item', 'shop', 'user'\]"
    with pytest.raises(ConfigError, match=message):
        call(client, client.split(ids_of(1)))


def test_a_known_table_with_another_dim_is_rejected_by_the_server(servers):
    client = connect(servers, 2)
    other = TableSpec(name="item", dim=4, optimizer=Adagrad(0.1))
    with pytest.raises(RemoteError, match=r"server 0 at .*'item' has dim 5.*dim 4"):
        client.add_tables([other])
    assert client.table("item").dim == 5


def test_shapes_that_do_not_fit_the_table_are_rejected(servers):
    client = connect(servers)
    split = client.split(ids_of(1, 2))
    number = BatchNumber(1, 1)
    with pytest.raises(BatchError, match=r"shape \(2, 5\)\. Received: \(2, 4\)"):
        client.push([("item", split)], [np.ones((2, 4), np.float32)], number)
    with pytest.raises(BatchError, match=r"shape \(2, 5\)\. Received: \(3, 5\)"):
        client.write("item", ids_of(1, 2), np.ones((3, 5)))
    assert client.num_rows() == [0]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1, 0], r"0 at .* must be that of embedding server 0\. Received: another"),
        ([0], r"0 at .* must be shard 0 of 1\. Received: it is shard 0 of 2\."),
        ([0, 1, 1], "0 at .* must be shard 0 of 3"),
        ([0, 0], r"1 at .* must be that of embedding server 1\. Received: another"),
    ],
)
def test_servers_in_another_order_or_number_are_rejected(servers, order, message):
    addresses = [server.address for server in servers.start(2)]
    with pytest.raises((ConfigError, TokenError), match=message):
        EmbeddingClient.connect([addresses[place] for place in order])


def test_one_address_alone_is_still_a_list():
    with pytest.raises(ConfigError, match=r"Received: the str 'tcp://127\.0\.0\.1:7'"):
        EmbeddingClient.connect("tcp://127.0.0.1:7")


def test_an_address_without_a_server_is_said_within_the_deadline(servers):
    server, _ = servers.start(2)
    address = f"tcp://127.0.0.1:{draw_port()}"
    message = f"embedding server 1 at {address}: connecting: no reply within 0.3 s"
    with pytest.raises(RequestTimeoutError, match=message):
        EmbeddingClient.connect([server.address, address], timeout_s=0.3)


def test_a_server_that_has_ended_is_named_within_the_deadline(servers):
    running = servers.start(2)
    client = servers.client(running)
    client.add_tables(TABLES)
    running[1].stop()
    started = time.monotonic()
    with pytest.raises(ServerError, match=f"server 1 at {running[1].address}: lookup"):
        client.pull([("item", client.split(ids_of(1)))])
    assert time.monotonic() - started < DEADLINE_S / 2


def test_a_server_that_hangs_is_named_at_the_deadline(servers):
    [first] = servers.start(port=draw_port())
    client = servers.client([first], timeout_s=0.3)
    client.add_tables(TABLES)
    first.stop()
    settings = ServerConfig(port=first.port)
    hanging = once_the_port_is_free(lambda: EmbeddingServer(settings))
    split = client.split(ids_of(1))
    with pytest.raises(ServerError, match="lookup of table 'item', 'user': "):
        client.pull([("item", split), ("user", split)])
    hanging.stop()
    hanging.serve()


def test_a_server_that_restarted_is_rejected(servers):
    [first] = servers.start(port=draw_port())
    client = servers.client([first])
    client.add_tables(TABLES)
    first.stop()
    second = once_the_port_is_free(lambda: RunningServer(ServerConfig(port=first.port)))
    message = "restarted since the client connected, and the previous rows are gone"
    wait_until_the_loss_is_noticed(client)
    with pytest.raises(RemoteError, match=message):
        client.pull([("item", client.split(ids_of(1)))], batch=BatchNumber(1, 1))
    with pytest.raises(RemoteError, match=message):
        client.clear()
    newcomer = EmbeddingClient.connect([second.address])
    assert newcomer.num_rows() == [0]
    newcomer.close()
    second.stop()


def test_requests_to_a_server_that_is_gone_fail_at_once(servers):
    running = servers.start(2)
    client = servers.client(running)
    client.add_tables(TABLES)
    running[1].stop()
    split = client.split(ids_of(1, 2, 3))
    started = time.monotonic()
    for batch in range(20):
        with pytest.raises(
            ServerError, match=f"1 at {running[1].address}: lookup.*los"
        ):
            client.pull([("item", split)], batch=BatchNumber(1, batch))
    assert time.monotonic() - started < DEADLINE_S / 2


class OddServer:
    """What answers a client's requests with a frame that a test gives."""

    def __init__(self, answers):
        self.listener = Listener("127.0.0.1", 0)
        self.address = self.listener.address
        self._answers = answers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        self.listener.close()

    def _run(self):
        while not self._stopping.is_set():
            if message := self.listener.receive(5):  # None: it has answered itself
                peer, header, _ = message
                reply = Header(Kind.REPLY, header.request)
                self.listener.send(peer, reply, self._answers[header.kind])


HELLO = [b'{"shard":0,"num_shards":1,"incarnation":7,"max_request_ids":99}']
ADDED = [b'[{"number": 0, "wants_counts": false, "spec": {}}]']


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({Kind.HELLO: [b"5"]}, WireError, "0 at .* is not an embedding server of"),
        ({Kind.HELLO: [b'{"shard": 0}']}, WireError, "is not an embedding server"),
        ({Kind.ADD_TABLES: [b"[0]"]}, WireError, r"\[0\] must be a mapping"),
        ({Kind.ADD_TABLES: [b"[]"]}, WireError, "must describe 1 tables"),
        ({Kind.LOOKUP: [bytes(16)]}, FrameError, "5 numbers as FP32 take 20 bytes"),
        ({Kind.LOOKUP: [bytes(20)] * 2}, FrameError, "must have 2 frames. Received: 3"),
        ({Kind.UPDATE: [b"0"]}, WireError, "must be a mapping. Received: 0"),
        ({Kind.UPDATE: [b'{"missed": 0}']}, WireError, "key 'refused'"),
        ({Kind.UPDATE: [b"{"]}, FrameError, "must be JSON"),
        ({Kind.READ: [bytes(4)]}, FrameError, r"10 numbers as FP32 take 40 bytes"),
    ],
)
def test_an_answer_that_makes_no_sense_is_rejected(answers, error, message):
    usual = {Kind.HELLO: HELLO, Kind.ADD_TABLES: ADDED, Kind.LOOKUP: [bytes(20)]}
    with OddServer({**usual, **answers}) as odd, pytest.raises(error, match=message):
        use(odd, pushes=Kind.UPDATE in answers)


def use(server, *, pushes):
    batch = BatchNumber(1, 1)
    with closing(EmbeddingClient.connect([server.address])) as client:
        client.add_tables(TABLES[:1])
        split = client.split(ids_of(1))
        [rows] = client.pull([("item", split)], batch=batch)
        if pushes:
            client.outcome(client.push([("item", split)], [rows], batch))
        client.read("item", split.ids)


def test_shutting_down_ends_every_server(servers):
    running = servers.start(2)
    servers.client(running).shut_down_servers()
    for server in running:
        server.join()


def test_a_closed_client_reports_it(servers):
    client = connect(servers)
    client.close()
    client.close()
    with pytest.raises(ServerError, match="connections are closed"):
        client.num_rows()


@pytest.mark.slow
def test_an_optimizers_settings_may_change_while_rows_stay(servers):
    client = connect(servers, 2)
    slow = TableSpec(name="toy", dim=1, optimizer=SGD(1.0), initializer=Constant(0))
    fast = TableSpec(name="toy", dim=1, optimizer=SGD(8.0), initializer=Constant(0))
    split = client.split(ids_of(1))
    for batch, spec in enumerate((slow, fast)):
        client.add_tables([spec])
        client.pull([("toy", split)], batch=BatchNumber(1, batch))
        grads = [np.ones((1, 1), dtype=np.float32)]
        client.outcome(client.push([("toy", split)], grads, BatchNumber(1, batch)))
    assert client.read("toy", ids_of(1)).tolist() == [[-9]]


class TestMetadata:
    TABLE = TableSpec(name="seen", dim=2, optimizer=SGD(1.0), keeps_metadata=True)
    IDS = ids_of(3, 2**63, 5)

    def train(self, client, batch, counts):
        number = BatchNumber(1, batch)
        split = client.split(self.IDS)
        grouped = np.array(counts, dtype=np.uint32)
        grouped[split.inverse] = counts
        client.pull([("seen", split)], batch=number, counts=[grouped])
        grads = np.zeros((3, 2), dtype=np.float32)
        client.outcome(client.push([("seen", split)], [grads], number))

    @pytest.mark.parametrize("num_shards", [1, 3])
    def test_it_reports_how_often_and_when_ids_were_trained(self, servers, num_shards):
        client = servers.client(servers.start(num_shards))
        client.add_tables([self.TABLE])
        before_s = int(time.time())
        self.train(client, 1, [1, 2, 3])
        self.train(client, 2, [1, 1, 4])
        ids = ids_of(5, 99, 3, 2**63)
        metadata = client.metadata("seen", ids)
        assert metadata.frequency.tolist() == [7, 0, 2, 3]
        assert metadata.first_step.tolist() == [0, 0, 0, 0]
        assert metadata.last_step.tolist() == [2, 0, 2, 2]
        assert metadata.last_s[1] == 0
        assert (metadata.last_s[[0, 2, 3]] >= before_s).all()
        assert metadata.frequency.dtype == np.uint32

    def test_no_ids_have_no_metadata(self, servers):
        client = servers.client(servers.start(2))
        client.add_tables([self.TABLE])
        assert client.metadata("seen", ids_of()).frequency.shape == (0,)

    def test_asking_changes_and_counts_nothing(self, servers):
        client = servers.client(servers.start(1))
        client.add_tables([self.TABLE])
        self.train(client, 1, [1, 1, 1])
        names = ("rows", "hits", "misses", "inserted")
        before = [client.counters()[0][name] for name in names]
        client.metadata("seen", ids_of(3, 4))
        assert [client.counters()[0][name] for name in names] == before

    def test_a_table_without_it_is_rejected_unless_the_server_is_lfu(self, servers):
        plain = replace(self.TABLE, keeps_metadata=False)
        client = servers.client(servers.start(1))
        client.add_tables([plain])
        with pytest.raises(RemoteError, match="'seen' keeps no metadata"):
            client.metadata("seen", self.IDS)
        client = servers.client(servers.start(1, eviction="lfu"))
        client.add_tables([plain])
        self.train(client, 1, [1, 2, 3])
        assert client.metadata("seen", self.IDS).frequency.tolist() == [1, 2, 3]

    def test_an_answer_of_another_length_is_rejected(self, servers):
        client = servers.client(servers.start(1))
        client.add_tables([self.TABLE])
        reply = Reply(DEADLINE_S)
        reply.set_result((Header(Kind.REPLY), [b"", bytes(16)]))
        client._servers.connections[0].send = lambda *_, **__: reply
        with pytest.raises(FrameError, match=r"12 numbers as FP32.* 48 bytes.*: 16 b"):
            client.metadata("seen", self.IDS)


def test_the_reply_to_an_update_may_have_fields_of_another_version():
    counts = b'"missed":1,"refused":0,"unadmitted":0,"gradients":2'
    reply = b'{%s,"full":{"embedding server 0":"is full"}}' % counts
    assert parse_json(reply, PushOutcome, "a reply", ValueError) == PushOutcome(
        1, 0, 0, 2
    )


def test_settings_that_two_threads_change_are_alike_on_all_servers(
    servers, monkeypatch
):
    running = servers.start(2)
    client = servers.client(running)
    client.add_tables(TABLES)
    send, is_between, may_go_on = (
        client._servers.send,
        threading.Event(),
        threading.Event(),
    )

    def send_later(server, header, *given, **more):
        if server and header.kind is Kind.ADD_TABLES and not is_between.is_set():
            is_between.set()
            assert may_go_on.wait(DEADLINE_S)
        return send(server, header, *given, **more)

    monkeypatch.setattr(client._servers, "send", send_later)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.set_learning_rate, 0.5)
        assert is_between.wait(DEADLINE_S)
        second = pool.submit(client.set_learning_rate, 0.25)
        wait([second], 0.2)  # it has ended by then unless it waits for the first
        may_go_on.set()
        first.result(DEADLINE_S)
        second.result(DEADLINE_S)
    stores = [server.server.shard.store for server in running]
    rates = [[spec.optimizer.lr for spec in store.tables] for store in stores]
    assert rates == [[0.25] * 3] * 2
    assert client.table("item").optimizer.lr == 0.25
