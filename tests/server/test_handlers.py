"""Requests to a server besides lookups and updates of valid batches."""

import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec import Constant
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD, Adam
from persia_torchrec.errors import BatchError, ConfigError, RemoteError
from persia_torchrec.rpc.messages import (
    COUNTS,
    TRAINING,
    Header,
    Kind,
    bytes_of,
    encode_json,
)
from persia_torchrec.server import config
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.server.handlers import KINDS
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.server.shard import RequestKind
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.server.stranger import Stranger, one_segment
from tests.support.processes import wait_until
from tests.support.servers import RecordingStore, ids_of

ITEM = TableSpec(name="item", dim=2, optimizer=SGD(1.0), initializer=Constant(0))
WIDE = TableSpec(name="wide", dim=4096, optimizer=SGD(1.0))
COUNTING = TableSpec(name="counting", dim=1, optimizer=SGD(1.0))
ONES = np.ones((2, 2), dtype=np.float32)


@pytest.fixture
def recording(servers, monkeypatch):
    """A server whose store records its calls, and a client of it."""
    monkeypatch.setattr(config, "EmbeddingStore", RecordingStore)
    (running,) = servers.start()
    running.client = servers.client([running])
    running.store = running.server.shard.store
    return running


@pytest.fixture(scope="module")
def cluster():
    """A server in a process of its own."""
    settings = {"eviction": "lfu", "optimizer_engine": "compiled"}
    with EmbeddingCluster.local(servers=1, capacity=10, **settings) as cluster:
        yield cluster


class TestHints:
    """The slots of the rows of a batch are found once, by its lookup."""

    def test_an_update_gets_what_the_lookup_of_its_batch_found(self, recording):
        client, store = recording.client, recording.store
        client.add_tables([ITEM, COUNTING])
        for batch in range(3):
            first, second = client.split(ids_of(5, 6 + batch)), client.split(ids_of(7))
            tables = [("item", first), ("counting", second)]
            client.pull(tables, batch=BatchNumber(1, batch))
            grads = [ONES, ONES[:1, :1]]
            client.outcome(client.push(tables, grads, BatchNumber(1, batch)))
        assert len(store.hints) == len(store.found) == 3
        for hints_N, found_N in zip(store.hints, store.found, strict=True):
            assert hints_N is found_N
        counters = client.counters()[0]
        assert counters["updates_hinted"] == 6
        assert counters["hinted_slots"] == 0

    def test_an_update_of_some_tables_gets_those_of_its_tables(self, recording):
        client, store = recording.client, recording.store
        client.add_tables([ITEM, COUNTING])
        batch, split = BatchNumber(1, 1), client.split(ids_of(5, 6))
        client.pull([("item", split), ("counting", split)], batch=batch)
        client.outcome(client.push([("counting", split)], [ONES[:, :1]], batch))
        assert store.hints[0].tolist() == store.found[0][2:].tolist()
        assert client.counters()[0]["updates_hinted"] == 1

    def test_batches_of_several_trainers_are_distinguished(self, recording):
        client, store = recording.client, recording.store
        client.add_tables([ITEM])
        split = client.split(ids_of(5, 6))
        batches = [BatchNumber(stream, 1) for stream in (3, 1, 2)]
        for batch in batches:
            client.pull([("item", split)], batch=batch)
        for batch in reversed(batches):
            client.outcome(client.push([("item", split)], [ONES], batch))
        assert [id(found) for found in reversed(store.found)] == list(
            map(id, store.hints)
        )

    @pytest.mark.parametrize("end", ["give up", "clear", "another number of ids"])
    def test_an_update_without_a_lookup_gets_none(self, recording, end):
        client, store = recording.client, recording.store
        client.add_tables([ITEM])
        batch, split = BatchNumber(1, 1), client.split(ids_of(5, 6))
        client.pull([("item", split)], batch=batch)
        assert client.counters()[0]["hinted_slots"] > 0
        if end == "give up":
            client.outcome(client.push([], [], batch))
            batch = BatchNumber(1, 2)
        elif end == "clear":
            client.clear()
        else:
            split = client.split(ids_of(5))
        grads = ONES[: len(split.ids)]
        client.outcome(client.push([("item", split)], [grads], batch))
        assert store.hints == [None]
        assert client.counters()[0]["hinted_slots"] == 0

    def test_a_lookup_for_evaluation_leaves_none(self, recording):
        client = recording.client
        client.add_tables([ITEM])
        client.pull([("item", client.split(ids_of(5)))])
        assert client.counters()[0]["hinted_slots"] == 0


class TestCounts:
    """How often an id occurs, for the tables that want to know."""

    def test_tables_that_want_counts_get_them_in_the_order_of_their_ids(
        self, recording
    ):
        client, store = recording.client, recording.store
        client.add_tables([ITEM, COUNTING])
        assert not client.tables["item"].wants_counts
        assert client.tables["counting"].wants_counts
        split = client.split(ids_of(5, 6))
        tables = [("item", split), ("counting", split), ("counting", split)]
        some = np.array([3, 9], dtype=np.uint32)
        client.pull(tables, batch=BatchNumber(1, 1), counts=[some, some[::-1], None])
        assert store.counts == [[3, 9, 9, 3, 1, 1]]

    @pytest.mark.parametrize(
        ("table", "batch", "counts"),
        [("item", BatchNumber(1, 1), 2), ("counting", None, 2)],
        ids=["a table that wants none", "evaluation"],
    )
    def test_counts_that_no_table_wants_are_not_sent(
        self, recording, table, batch, counts
    ):
        client, store = recording.client, recording.store
        client.add_tables([ITEM, COUNTING])
        split = client.split(ids_of(5, 6))
        some = np.full(2, counts, dtype=np.uint32)
        before = client.counters()[0]["bytes_received"]
        client.pull([(table, split)], batch=batch, counts=[some])
        received = client.counters()[0]["bytes_received"] - before
        assert received == 48 + 16 + 16 + 48 + len(b"null")
        assert store.counts == ([None] if batch else [])  # a read takes none

    @pytest.mark.parametrize(
        ("frame", "message"),
        [(b"", "one count an id, 2"), (bytes(7), "multiple of 4 bytes")],
    )
    def test_a_lookup_whose_counts_do_not_fit_is_rejected(
        self, recording, frame, message
    ):
        recording.client.add_tables([COUNTING])
        header = Header(Kind.LOOKUP, flags=TRAINING | COUNTS).encode()
        with Stranger(recording.address) as stranger:
            _, answer = stranger.ask(header, *one_segment(5, 6), frame)
            assert answer["kind"] == "FrameError"
            assert message in answer["message"]
            _, answer = stranger.ask(header, *one_segment(5, 6))
            assert "must have 4 frames" in answer["message"]
        assert recording.client.num_rows() == [0]

    @pytest.mark.parametrize(
        "counts", [np.ones(3, np.uint32), np.ones(2, np.int64), np.ones((2, 1), "u4")]
    )
    def test_counts_of_another_shape_are_rejected(self, recording, counts):
        client = recording.client
        client.add_tables([COUNTING])
        split = client.split(ids_of(5, 6))
        message = r"'counting': counts must be uint32 of the shape \(2,\)\. Received: "
        with pytest.raises(BatchError, match=message):
            client.pull([("counting", split)], batch=BatchNumber(1, 1), counts=[counts])


class TestTables:
    """Settings that change while the servers run."""

    def test_tables_are_added_together_or_not_at_all(self, servers):
        running = servers.start()
        client = servers.client(running)
        client.add_tables([ITEM])
        client.write("item", ids_of(1), ONES[:1])
        changed = TableSpec(name="item", dim=2, optimizer=SGD(9.0))
        misfit = TableSpec(name="item", dim=3, optimizer=SGD(1.0))
        other = TableSpec(name="other", dim=3, optimizer=SGD(1.0))
        for specs, message in [
            ([other, misfit], "'item' has dim 2"),
            ([changed, other, misfit], r"different names.*'item' 2 times"),
            ([other, other], r"different names\. Received: 'other' 2 times"),
        ]:
            with pytest.raises(RemoteError, match=message):
                client.add_tables(specs)
            with pytest.raises(ConfigError, match="'other' is unknown"):
                client.table("other")
            assert running[0].server.shard.store.tables == [ITEM]

    def test_a_table_that_does_not_fit_takes_the_change_of_others_back(self):
        store = EmbeddingStore(10)
        known = [ITEM, COUNTING]
        numbers = store.add_tables(known)
        changed = TableSpec(name="item", dim=2, optimizer=SGD(9.0))
        misfit = TableSpec(name="counting", dim=3, optimizer=SGD(1.0))
        with pytest.raises(ConfigError, match="'counting' has dim 1"):
            store.add_tables([WIDE, changed, misfit])
        assert store.tables == known
        assert store.add_tables([WIDE, changed]) == [2, numbers[0]]
        assert store.tables == [changed, COUNTING, WIDE]

    def test_updates_before_a_change_are_applied_with_the_previous_settings(
        self, servers
    ):
        client = servers.client(servers.start(2, capacity_rows=1000))
        client.add_tables([ITEM, COUNTING])
        split = client.split(np.arange(40, dtype=np.uint64))
        client.pull([("item", split)], batch=BatchNumber(1, 0))
        ones = [np.ones((40, 2), dtype=np.float32)]
        pushes = []
        for rate in (1.0, 10.0, 100.0):
            client.set_learning_rate(rate)
            for _ in range(5):
                batch = BatchNumber(1, len(pushes))
                pushes.append(client.push([("item", split)], ones, batch))
        assert sum(client.outcome(push).num_missed for push in pushes) == 0
        assert (client.read("item", split.ids) == -5 * 111).all()
        assert client.table("item").optimizer == SGD(100.0)
        assert client.table("counting").optimizer == SGD(100.0)

    def test_a_learning_rate_may_be_that_of_some_tables(self, servers):
        client = servers.client(servers.start())
        user = TableSpec(name="user", dim=2, optimizer=Adam(0.1, betas=(0.5, 0.25)))
        client.add_tables([ITEM, user])
        client.set_learning_rate(0.5, ["user"])
        assert client.table("item") == ITEM
        assert client.table("user").optimizer == Adam(0.5, betas=(0.5, 0.25))
        client.set_learning_rate(0.25, [])
        assert client.table("user").optimizer.lr == 0.5

    @pytest.mark.parametrize(
        ("lr", "tables", "message"),
        [
            (-1.0, None, "SGD: lr must be finite and >= 0"),
            (float("nan"), ["item"], "SGD: lr must be finite"),
            (0.1, ["item", "toy"], "'toy' is unknown to this client"),
        ],
    )
    def test_a_learning_rate_that_cannot_be_set_changes_nothing(
        self, servers, lr, tables, message
    ):
        client = servers.client(servers.start())
        client.add_tables([ITEM])
        with pytest.raises(ConfigError, match=message):
            client.set_learning_rate(lr, tables)
        assert client.table("item") == ITEM

    def test_a_client_without_tables_has_no_learning_rate_to_set(self, servers):
        client = servers.client(servers.start())
        before = client.counters()[0].get("requests_add_tables", 0)
        client.set_learning_rate(0.1)
        assert client.counters()[0].get("requests_add_tables", 0) == before == 0


class TestLimits:
    """What is too large is rejected before it takes memory, on both sides."""

    def test_more_ids_than_a_server_accepts_are_rejected_by_the_client(self, servers):
        client = servers.client(servers.start(2, max_request_ids=10))
        client.add_tables([ITEM])
        split = client.split(np.arange(100, dtype=np.uint64))
        calls = {
            "lookup": lambda: client.pull([("item", split)]),
            "update": lambda: client.push(
                [("item", split)], [np.ones((100, 2), np.float32)], BatchNumber(1, 1)
            ),
            "write": lambda: client.write(
                "item", split.ids, np.ones((100, 2), np.float32)
            ),
            "read": lambda: client.read("item", split.ids),
        }
        for verb, call in calls.items():
            message = (
                rf"{verb} of table 'item': one server's part must have at most 10 "
            )
            with pytest.raises(BatchError, match=rf"{message}.*Received: \d+ ids"):
                call()
        counters = client.counters()
        assert not any(f"requests_{verb}" in c for verb in calls for c in counters)
        few = client.split(np.arange(10, dtype=np.uint64))
        client.pull([("item", few)])

    @pytest.mark.parametrize("kind", [Kind.LOOKUP, Kind.UPDATE, Kind.WRITE, Kind.READ])
    def test_more_ids_than_a_server_accepts_are_rejected_by_the_server(
        self, servers, kind
    ):
        running = servers.start(max_request_ids=2)
        servers.client(running).add_tables([ITEM])
        body = [*one_segment(5, 6, 7)]
        if kind in (Kind.UPDATE, Kind.WRITE):
            body.append(bytes(24))
        with Stranger(running[0].address) as stranger:
            _, answer = stranger.ask(Header(kind, flags=TRAINING).encode(), *body)
        assert answer["kind"] == "BatchError"
        assert "may name 2 ids. Received: 3." in answer["message"]

    def test_a_reply_of_more_than_2_gib_is_rejected(self, servers):
        (running,) = servers.start()
        client = servers.client([running])
        client.add_tables([WIDE])
        num = 2**31 // (4 * 4096) + 1
        ids = np.arange(num, dtype=np.uint64)
        segments = struct.pack("<qq", 0, num)
        for kind in (Kind.LOOKUP, Kind.READ):
            with Stranger(running.address) as stranger:
                header = Header(kind).encode()
                _, answer = stranger.ask(header, segments, ids.tobytes())
            assert answer["kind"] == "BatchError"
            assert f"whose reply has {2**31 + 4 * 4096} bytes" in answer["message"]
        message = rf"2147483648 bytes of rows\. Received: {num} ids, {2**31 + 16384} "
        with pytest.raises(BatchError, match=message):
            client.pull([("wide", client.split(ids))])

    @pytest.mark.multiprocess
    def test_missing_memory_is_an_error_of_the_request(self, cluster):
        client = EmbeddingClient.connect(cluster.addresses)
        client.add_tables([WIDE])
        split = client.split(np.arange(65_536, dtype=np.uint64))  # a reply of 1 GiB
        pid = cluster.processes[0].pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**29
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        message = "StoreError: The server must have the memory that a request takes"
        with pytest.raises(RemoteError, match=message):
            client.pull([("wide", split)])
        few = client.split(ids_of(1, 2))
        assert client.pull([("wide", few)])[0].shape == (2, 4096)
        client.close()


class TestBadGradients:
    """Gradients that are not finite move nothing and are counted."""

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_gradient_that_is_not_finite_is_rejected_and_counted(self, servers, bad):
        client = servers.client(servers.start(2))
        client.add_tables([ITEM])
        split = client.split(np.arange(20, dtype=np.uint64))
        batch = BatchNumber(1, 1)
        client.pull([("item", split)], batch=batch)
        grads = np.ones((20, 2), dtype=np.float32)
        grads[[3, 17], [0, 1]] = bad
        replies = client.push([("item", split)], [grads], batch)
        outcome = client.outcome(replies)
        assert (outcome.num_missed, outcome.num_refused) == (0, 2)
        assert client.outcome(replies).num_missed == 0
        weights = client.read("item", split.ids)
        assert weights[[3, 17]].tolist() == [[0, 0], [0, 0]]
        assert (np.delete(weights, [3, 17], axis=0) == -1).all()
        assert sum(c["gradients_refused"] for c in client.counters()) == 2


def test_a_kind_from_its_own_file_is_asked_and_answered(servers, monkeypatch):
    norms = Kind.define("NORMS", 60)

    def answer(shard, request):
        tables = shard.read_ids(request.frames, 3).pieces()
        rows = [shard.store.read(t.table, t.ids) for t in tables]
        return [bytes_of(np.linalg.norm(rows_ND, axis=1)) for rows_ND in rows]

    monkeypatch.setitem(KINDS, norms, RequestKind(norms, answer, in_inference=True))
    client = servers.client(servers.start(2))
    client.add_tables([ITEM])
    client.write("item", ids_of(5, 6), np.array([[3, 4], [0, 1]], np.float32))
    found = client.read_numbers(norms, "item", ids_of(6, 7, 5), 1)
    assert found.tolist() == [[1], [0], [5]]
    assert all(count["requests_norms"] == 1 for count in client.counters())
    with pytest.raises(ValueError, match=r"OTHER: number 60 is NORMS's"):
        Kind.define("OTHER", 60)


class FailingStore(RecordingStore):
    """A store without memory for updates of three rows."""

    def add_updates(self, tables, ids_N, starts_T, grads, hints_N=None):
        if len(ids_N) == 3:
            raise MemoryError("no room")
        if len(ids_N) == 4:
            raise KeyError("a bug")
        super().add_updates(tables, ids_N, starts_T, grads, hints_N)


def test_an_update_that_fails_is_an_error_of_its_sender_only(servers, monkeypatch):
    monkeypatch.setattr(config, "EmbeddingStore", FailingStore)
    running = servers.start()
    client = servers.client(running)
    client.add_tables([ITEM])
    splits = [client.split(np.arange(num, dtype=np.uint64)) for num in (2, 3, 4, 2)]
    pushes = []
    for batch, split in enumerate(splits):
        number = BatchNumber(1, batch)
        client.pull([("item", split)], batch=number)
        grads = np.ones((len(split.ids), 2), dtype=np.float32)
        pushes.append(client.push([("item", split)], [grads], number))
    client.clear()  # applies them
    assert (
        client.outcome(pushes[0]).num_missed
        == client.outcome(pushes[3]).num_missed
        == 0
    )
    with pytest.raises(RemoteError, match=r"StoreError: .* memory .*no room"):
        client.outcome(pushes[1])
    with pytest.raises(RemoteError, match="KeyError: 'a bug'"):
        client.outcome(pushes[2])
    counters = client.counters()[0]
    assert counters["open_batches"] == 0
    assert counters["requests_refused"] == 2


class TestCounters:
    """What a server counts is what happened."""

    def test_the_time_of_each_stage_is_counted(self, servers):
        client = servers.client(servers.start())
        client.add_tables([ITEM])
        split = client.split(np.arange(500, dtype=np.uint64))
        grads = [np.ones((500, 2), dtype=np.float32)]
        begin = client.counters()[0]
        for batch in range(20):
            number = BatchNumber(1, batch)
            client.pull([("item", split)], batch=number)
            client.outcome(client.push([("item", split)], grads, number))
        end = client.counters()[0]
        assert {name for name in end if name.endswith("_us")} == {
            *("decode_us", "dump_us", "encode_us", "idle_us", "inference_us"),
            *("lookup_us", "other_us", "receive_us", "send_us", "sweep_us"),
            *("update_us", "write_us"),
        }
        for name in ("decode_us", "lookup_us", "update_us", "send_us"):
            assert end[name] > begin[name]

    def test_bytes_and_waiting_updates_are_counted(self, servers):
        client = servers.client(servers.start())
        client.add_tables([ITEM])
        split = client.split(np.arange(100, dtype=np.uint64))
        begin = client.counters()[0]
        client.pull([("item", split)], batch=BatchNumber(1, 1))
        grads = [np.ones((100, 2), dtype=np.float32)]
        client.outcome(client.push([("item", split)], grads, BatchNumber(1, 1)))
        end = client.counters()[0]
        ask, answer = 48 + len(b"null"), 48 + len(encode_json(begin))
        received = end["bytes_received"] - begin["bytes_received"]
        assert received == (48 + 16 + 800) + (48 + 16 + 800 + 800) + ask
        sent = end["bytes_sent"] - begin["bytes_sent"]
        outcome = {"missed": 0, "refused": 0, "unadmitted": 0, "gradients": 100}
        assert sent == (48 + 800) + (48 + len(encode_json(outcome))) + answer
        assert end["updates_queued"] == 0
        assert end["updates_queued_max"] >= 1


class TestSweeps:
    """Expired rows are taken out when the server is idle, and every few requests."""

    def test_an_idle_server_sweeps_until_nothing_is_left(self, recording):
        store = recording.store
        store.num_to_sweep = 1000
        wait_until(lambda: store.num_to_sweep <= 0, "the store is swept")
        assert recording.client.counters()[0]["sweep_us"] > 0

    def test_a_busy_server_sweeps_every_few_requests(self, recording):
        client, store = recording.client, recording.store
        client.add_tables([ITEM])
        store.num_to_sweep = 10**9
        store.num_sweeps = 0
        for _ in range(64):
            client.num_rows()
        assert store.num_sweeps >= 64 // 16

    def test_a_request_does_not_wait_until_all_is_swept(self, recording):
        recording.store.num_to_sweep = 10**12
        recording.client.num_rows()
        assert recording.store.num_to_sweep > 0
        recording.store.num_to_sweep = 0

    def test_idle_work_is_done_once_between_requests(self, recording):
        server, done = recording.server, []
        server.when_idle = lambda: done.append(server.when_idle)
        recording.store.num_to_sweep = 1000  # so that it is idle often
        wait_until(lambda: server.when_idle is None, "there was time")
        recording.client.num_rows()
        assert len(done) == 1


@pytest.mark.parametrize("setting", ["eviction", "optimizer_engine"])
def test_settings_of_the_store_reach_it(setting):
    with pytest.raises(ConfigError, match=rf"{setting} must be .*Received: 'random'"):
        EmbeddingServer(ServerConfig(**{setting: "random"}))


@pytest.mark.multiprocess
def test_a_cluster_hands_the_settings_of_the_store_on(cluster):
    command = cluster.processes[0].args
    assert command[command.index("--eviction") + 1] == "lfu"
    assert "--optimizer-engine" not in command  # that of the server by itself
