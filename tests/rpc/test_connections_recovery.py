"""Requests that outlive the connection, and the process, that they were sent to."""

import contextlib
import math

import pytest

from persia_torchrec.errors import (
    ConfigError,
    NotReadyError,
    RemoteError,
    RequestTimeoutError,
    RestartedError,
    ServerError,
)
from persia_torchrec.rpc.addresses import open_listening
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from tests.support.faults import Relay
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

WRITE = Header(Kind.WRITE)


class Starts:
    """One start after another of a server, each with the same listening socket."""

    def __init__(self):
        self.incarnation = 7
        self.socket = open_listening()
        self.address = f"tcp://127.0.0.1:{self.socket.getsockname()[1]}"
        self.start()

    def start(self):
        self.listener = Listener("127.0.0.1", 0, fd=self.socket.fileno())
        assert self.listener.address == self.address

    def kill(self):
        self.listener._socket.close(linger=0)
        self.listener.wakeup.close()

    def receive(self):
        """Return the next message: peer, header, what follows."""
        taken = self.listener.receive(int(1000 * DEADLINE_S))
        assert taken is not None
        peer, header, frames = taken
        return peer, header, [bytes(frame) for frame in frames[1:]]

    def greet(self, peer, header):
        hello = encode_json({"incarnation": self.incarnation, "shard": 0})
        self.listener.send(peer, Header(Kind.REPLY, header.request), [hello])

    def take(self):
        """Answer each HELLO; return peer, request number and body of another one."""
        while True:
            peer, header, frames = self.receive()
            if header.kind is not Kind.HELLO:
                return peer, header.request, frames[0]
            self.greet(peer, header)

    def answer(self, num=1):
        """Answer requests; return what they carried."""
        bodies = []
        for _ in range(num):
            peer, request, body = self.take()
            self.listener.send(peer, Header(Kind.REPLY, request), [b"done"])
            bodies.append(body)
        return bodies

    def close(self):
        self.kill()
        self.socket.close()


@pytest.fixture
def starts():
    with contextlib.closing(Starts()) as starts:
        yield starts


@pytest.fixture
def connect():
    with contextlib.ExitStack() as stack:

        def connect(address, recovery_s=DEADLINE_S):
            connections = Connections("server", [address], recovery_s=recovery_s)
            stack.callback(connections.close)
            connections[0].incarnation = 7
            return connections

        yield connect


def submit(connections, body, timeout_s=DEADLINE_S):
    return connections[0].send(WRITE, [body], timeout_s=timeout_s, what="writing")


def reject(starts, peer, request):
    error = NotReadyError("compiling", server="it")
    starts.listener.send_error(peer, request, error)


def test_unanswered_requests_are_resent_in_order_after_a_restart(starts, connect):
    connections = connect(starts.address)
    first = submit(connections, b"0")
    assert starts.answer() == [b"0"]
    assert first.frames()[1] == b"done"
    # Small and large ones travel differently: copied, and as they are.
    replies = [submit(connections, b"%d" % n + bytes(70_000 * n)) for n in range(2)]
    for _ in replies:
        starts.take()
    starts.kill()
    replies += [submit(connections, b"%d" % n) for n in (2, 3)]
    starts.start()
    assert [body[:1] for body in starts.answer(4)] == [b"0", b"1", b"2", b"3"]
    assert [bytes(reply.frames()[1]) for reply in replies] == [b"done"] * 4
    later = submit(connections, b"4")
    assert starts.answer() == [b"4"]
    assert later.frames()


def test_requests_are_sent_again_to_a_server_that_has_moved(starts, connect):
    connections = connect(starts.address)
    reply = submit(connections, b"0")
    starts.take()
    starts.kill()
    wait_until(lambda: connections[0].is_away, "the loss is noticed")
    with contextlib.closing(Starts()) as elsewhere:
        connections[0].move(elsewhere.address)
        assert elsewhere.answer() == [b"0"]
        assert reply.frames()
        assert connections[0].address == elsewhere.address


def test_a_start_that_lost_its_rows_gets_nothing(starts, connect):
    connections = connect(starts.address)
    reply = submit(connections, b"0")
    starts.take()
    starts.kill()
    starts.incarnation = 8
    starts.start()
    peer, header, _ = starts.receive()
    starts.greet(peer, header)
    with pytest.raises(RestartedError, match=r"writing: .*its rows are gone"):
        reply.frames()
    with pytest.raises(RestartedError, match=r"writing: .*its rows are gone"):
        submit(connections, b"1").frames()
    assert starts.listener.receive(0) is None


@pytest.mark.parametrize(
    ("incarnation", "fails_with", "restarts"), [(7, RestartedError, 1), (6, None, 0)]
)
def test_a_rejection_for_lost_rows_concerns_the_start_that_the_request_was_for(
    starts, connect, incarnation, fails_with, restarts
):
    connections, seen = connect(starts.address), []
    connections[0].when_restarted = lambda: seen.append(incarnation)
    header = Header(Kind.WRITE, incarnation=incarnation)
    reply = connections[0].send(header, [b"0"], timeout_s=DEADLINE_S, what="writing")
    peer, request, _ = starts.take()
    starts.listener.send_error(peer, request, RestartedError("gone", server="it"))
    with pytest.raises(RestartedError, match=r"writing: .*its rows are gone"):
        reply.frames()
    assert connections[0].fails_with is fails_with
    assert seen == [incarnation] * restarts


def test_a_server_that_is_not_ready_is_asked_again(starts, connect):
    connections = connect(starts.address)
    replies = [submit(connections, b"%d" % n) for n in range(2)]
    for _ in range(2):
        peer, request, _ = starts.take()
        reject(starts, peer, request)
    peer, header, _ = starts.receive()
    assert header.kind is Kind.HELLO
    reject(starts, peer, header.request)
    assert starts.answer(2) == [b"0", b"1"]
    assert all(reply.frames() for reply in replies)


def test_a_server_that_is_not_ready_is_an_error_without_recovery(starts, connect):
    reply = submit(connect(starts.address, recovery_s=0.0), b"0")
    peer, request, _ = starts.take()
    reject(starts, peer, request)
    with pytest.raises(RemoteError, match="NotReadyError: it: compiling"):
        reply.frames()


def test_a_server_that_stays_away_is_an_error(starts, connect):
    connections = connect(starts.address, recovery_s=0.2)
    reply = submit(connections, b"0")
    starts.take()
    starts.kill()
    message = r"server 0 at .*: writing: the server was away for 0\.2 s"
    with pytest.raises(ServerError, match=message):
        reply.frames()
    with pytest.raises(ServerError, match=message):
        submit(connections, b"1").frames()


def test_no_timeout_runs_while_the_server_is_away(starts, connect):
    connections = connect(starts.address)
    first = submit(connections, b"0")
    starts.take()
    assert first.deadline_s < math.inf
    starts.kill()
    wait_until(lambda: connections[0].is_away, "the loss is noticed")
    second = submit(connections, b"1", timeout_s=50.0)
    assert (first.deadline_s, second.deadline_s) == (math.inf, math.inf)
    assert (first.left_s < DEADLINE_S, second.left_s) == (True, 50.0)
    with pytest.raises(TimeoutError):
        second.frames(within_s=0.01)
    starts.start()
    assert starts.answer(2) == [b"0", b"1"]
    assert second.frames()


def test_a_request_that_was_sent_again_must_be_answered_within_what_was_left(
    starts, connect
):
    connections = connect(starts.address)
    request = submit(connections, b"0", timeout_s=2.0)
    starts.take()
    starts.kill()
    wait_until(lambda: connections[0].is_away, "the loss is noticed")
    starts.start()
    assert starts.take()[2] == b"0"
    with pytest.raises(RequestTimeoutError, match="writing"):
        request.frames(within_s=DEADLINE_S)


def test_requests_are_sent_again_when_only_the_network_failed(starts, connect):
    with contextlib.closing(Relay(starts.address)) as relay:
        connections = connect(relay.address)
        for n in range(3):
            reply = submit(connections, b"%d" % n)
            assert starts.take()[2] == b"%d" % n
            relay.break_the_near_end()
            assert starts.answer() == [b"%d" % n]
            assert reply.frames()


def test_connections_close_while_a_server_is_away(starts, connect):
    connections = connect(starts.address)
    reply = submit(connections, b"0")
    starts.take()
    starts.kill()
    connections.close()
    with pytest.raises(ServerError, match="writing: the connections were closed"):
        reply.frames()


def test_an_invalid_descriptor_is_rejected():
    with pytest.raises(ConfigError, match="PERSIA_LISTEN_FD must be the descriptor"):
        Listener("127.0.0.1", 0, fd=2**20)
