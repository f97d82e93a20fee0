"""Requests that are sent again, to the same server or to its next start."""

import gc
import os
import struct

import pytest

from persia_torchrec import AdmitFrequency, Constant
from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.rpc.messages import (
    PART_SHIFT,
    SHARE,
    TRAINING,
    Header,
    Kind,
    Share,
    encode_json,
)
from persia_torchrec.table import TableSpec
from tests.server.stranger import Stranger, one_segment
from tests.support.processes import wait_until
from tests.support.servers import ids_of

COUNT = TableSpec(
    name="count",
    dim=1,
    optimizer=SGD(1.0),
    initializer=Constant(0.0),
    keeps_metadata=True,
)
RARE = TableSpec(name="rare", dim=1, optimizer=SGD(1.0), admission=AdmitFrequency(2))
STREAM = 5
NULL = encode_json(None)


class Restarted:
    """A server with a memory file, which ends and is started again."""

    def __init__(self, servers, **settings):
        self.file = os.memfd_create("store")
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        self._servers, self._settings = servers, {"memory_file": path, **settings}
        self.running = None
        self.restart()
        self.client.add_tables([COUNT, RARE])

    def restart(self):
        if self.running is not None:
            self.running.server.shard.joint_steps.reject_all = lambda _: None
            self.running.stop()
        [self.running] = self._servers.start(**self._settings)
        self.client = self._servers.client([self.running])
        self.client.learn_tables()

    def ask(self, *frames):
        with Stranger(self.running.address) as stranger:
            return stranger.ask(*frames)

    def weights(self, *ids):
        return self.client.read("count", ids_of(*ids))[:, 0].tolist()

    def counter(self, name):
        return self.client.counters()[0].get(name, 0)


@pytest.fixture
def server(servers):
    gc.collect()  # each start maps 8 TiB of 128
    server = Restarted(servers)
    yield server
    os.close(server.file)


def lookup(number, *ids, table=0, part=0, stream=STREAM):
    flags = TRAINING | part << PART_SHIFT
    header = Header(Kind.LOOKUP, 1, stream=stream, batch=number, flags=flags)
    return header.encode(), *one_segment(*ids, table=table)


def update(number, *ids, stream=STREAM, share=None):
    flags = 0 if share is None else SHARE
    header = Header(Kind.UPDATE, 2, stream=stream, batch=number, flags=flags)
    grads = struct.pack(f"<{len(ids)}f", *[-1.0] * len(ids))
    rest = [] if share is None else [share.encode()]
    return header.encode(), *one_segment(*ids), grads, *rest


def numbered(kind, number, *frames):
    return Header(kind, 3, stream=STREAM, batch=number).encode(), *frames


def again(server, request, restarts):
    """Send a request again, to the next start of the server if so; return its reply."""
    if restarts:
        server.restart()
    return server.ask(*request)


both = pytest.mark.parametrize("restarts", [False, True])


@both
def test_an_update_is_applied_once_and_answered_as_before(server, restarts):
    server.ask(*lookup(1, 7, 8))
    request = update(1, 7, 8, 9)  # 9 has no row
    header, [first] = server.ask(*request)
    assert header.kind is Kind.REPLY
    assert b'"missed": 1' in first
    _, [second] = again(server, request, restarts)
    assert second == first
    assert server.weights(7, 8) == [1.0, 1.0]
    assert server.client.step("count") == 1
    assert server.counter("requests_repeated") == 1
    server.ask(*update(2, 7))
    assert server.weights(7, 8) == [2.0, 1.0]


@both
def test_a_batch_that_was_given_up_stays_so(server, restarts):
    server.ask(*lookup(1, 7))
    nothing = numbered(Kind.UPDATE, 1, b"", b"", b"")
    server.ask(*nothing)
    assert again(server, update(1, 7), restarts)[0].kind is Kind.REPLY
    assert server.weights(7) == [0.0]


@both
def test_a_lookup_counts_once(server, restarts):
    request = lookup(1, 7, 7, 8)
    _, first = server.ask(*request)
    hits = server.counter("hits"), server.counter("misses")
    _, second = again(server, request, restarts)
    assert second == first
    assert server.client.metadata("count", ids_of(7, 8)).frequency.tolist() == [2, 1]
    assert (server.counter("hits"), server.counter("misses")) == hits
    assert server.counter("open_batches") == 1
    server.ask(*lookup(1, 7, part=1))  # another lookup of the batch
    assert server.client.metadata("count", ids_of(7)).frequency.tolist() == [3]
    server.ask(*update(1, 7, 7, 8))
    assert server.counter("open_batches") == 0
    assert server.weights(7, 8) == [2.0, 1.0]


@both
def test_a_lookup_admits_once(server, restarts):
    request = lookup(1, 7, table=1)
    server.ask(*request)
    again(server, request, restarts)
    assert server.client.num_rows() == [0]
    server.ask(*lookup(2, 7, table=1))
    assert server.client.num_rows() == [1]


@both
def test_tables_that_are_added_again_stay_as_they_are(server, restarts):
    server.ask(*lookup(1, 7))
    server.ask(*lookup(2, 7, table=1))
    tables = encode_json([COUNT.to_json(), RARE.to_json()])
    again(server, numbered(Kind.ADD_TABLES, 9, tables), restarts)
    server.ask(*lookup(3, 7, table=1))  # its second sighting
    assert server.client.num_rows() == [2]


def test_a_batch_has_seven_lookups(server):
    _, error = server.ask(*lookup(1, 7, part=7))
    assert "A batch may have 7 lookups" in error["message"]


@both
def test_what_a_client_changes_is_changed_once(server, restarts):
    ids = one_segment(7)
    written = numbered(Kind.WRITE, 1, *ids, struct.pack("<f", 4.0))
    server.ask(*written)
    stepped = numbered(Kind.STEP, 2, encode_json({"table": 0, "step": 10}))
    assert server.ask(*stepped)[1] == [b"10"]
    slower = encode_json([{**COUNT.to_json(), "weight_bound": 5.5}])
    added = numbered(Kind.ADD_TABLES, 3, slower)
    first = server.ask(*added)[1]
    server.client.add_tables([COUNT])
    server.ask(*update(1, 7, stream=6))
    assert again(server, written, restarts)[1] == [NULL]
    assert server.weights(7) == [5.0]
    assert server.ask(*stepped)[1] == [b"10"]
    assert server.client.step("count") == 11
    assert server.ask(*added)[1] != first  # the settings are those that came later
    server.ask(*update(2, 7, stream=6))
    assert server.weights(7) == [6.0]
    cleared = numbered(Kind.CLEAR, 4, NULL)
    server.ask(*cleared)
    server.ask(*lookup(3, 8, stream=6))
    assert again(server, cleared, restarts)[1] == [NULL]
    assert server.client.num_rows() == [1]


def test_an_update_that_failed_is_not_tried_again(server, monkeypatch):
    def fail(*_):
        raise MemoryError("none left")

    store = server.running.server.shard.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "add_update", fail)
        _, error = server.ask(*update(1, 7))
    assert "none left" in error["message"]
    _, error = again(server, update(1, 7), restarts=True)
    assert "must not have been rejected before" in error["message"]


def test_the_server_rejects_older_generations(server):
    older, newer = (BatchNumber.new_stream(generation) for generation in (1, 2))
    server.ask(*lookup(1, 7, stream=older))
    assert server.counter("open_batches") == 1
    server.ask(*lookup(1, 7, stream=newer))
    assert server.counter("open_batches") == 1
    header, error = again(server, update(1, 7, stream=older), restarts=True)
    assert header.kind is Kind.ERROR
    assert error["kind"] == "FencedError"
    assert server.weights(7) == [0.0]
    older_dump = encode_json({"do": "dump", "task": 1, "folder": "none"})
    request = Header(Kind.CHECKPOINT, 3, stream=older).encode(), older_dump
    assert server.ask(*request)[1]["kind"] == "FencedError"
    server.client.clear()  # of no generation


def share(rank, step=1, num_ranks=2):
    return Share(9, step, rank, num_ranks, 600_000)


def test_shares_are_sent_again_until_the_step_is_complete(server):
    server.ask(*lookup(1, 7, stream=1))
    server.ask(*lookup(1, 7, stream=2))
    first = update(1, 7, stream=1, share=share(0))
    second = update(1, 7, stream=2, share=share(1))
    with Stranger(server.running.address) as lost:
        for num in (1, 2):  # again, as after a lost connection
            lost.socket.send_multipart(first)
            wait_until(lambda n=num: server.counter("requests_update") == n, "it came")
        assert server.counter("joint_steps") == 1
    server.restart()
    assert server.counter("joint_steps") == 0
    with Stranger(server.running.address) as back:
        back.socket.send_multipart(first)
        _, [outcome] = server.ask(*second)
        assert back.ask(*update(2))[1] != []
    assert server.weights(7) == [2.0]
    for request in (first, second):
        assert again(server, request, restarts=True)[1] == [outcome]
    assert server.weights(7) == [2.0]


def test_what_is_known_of_a_group_survives(server):
    names = [encode_json({"who": f"trainer {n}", "ended": ""}) for n in range(2)]
    gone = numbered(Kind.JOIN, 1, names[0], share(0, num_ranks=3).encode())
    server.ask(*gone)  # its connection is closed then
    server.ask(*numbered(Kind.LEAVE, 2, share(2, num_ranks=3).encode()))
    server.restart()
    joined = numbered(Kind.JOIN, 3, names[1], share(1, num_ranks=3).encode())
    assert b"rank 0 (trainer 0: " in server.ask(*joined)[1][0]
    late = update(1, 7, share=share(2, num_ranks=3))
    assert "before it leaves" in server.ask(*late)[1]["message"]
    # Rank 0 is lost, rank 2 has left.
    _, error = server.ask(*update(2, 7, share=share(1, num_ranks=3)))
    assert "none of rank 0 (trainer 0: its connection was lost)" in error["message"]
    _, later = again(server, update(3, 7, share=share(1, 2, 3)), restarts=True)
    assert later["message"] == error["message"]


def test_a_stream_forgets_no_number_of_its_last_4096(server):
    server.ask(*lookup(1, 7))
    server.ask(*update(1, 7))
    server.ask(*update(4096, 7))
    server.ask(*update(1, 7))
    assert server.weights(7) == [2.0]
    server.ask(*update(4097, 7))
    assert server.ask(*update(1, 7))[0].kind is Kind.REPLY  # too old: not again
    assert server.weights(7) == [3.0]
