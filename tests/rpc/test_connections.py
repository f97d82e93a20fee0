import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq

from persia_torchrec.errors import (
    ConfigError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    TokenError,
    WireError,
)
from persia_torchrec.rpc import connection as connection_module
from persia_torchrec.rpc import listener as listener_module
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Header, Kind, decode_json
from tests.support.faults import Relay
from tests.support.ports import draw_port
from tests.support.servers import DEADLINE_S, once_the_port_is_free
from tests.support.sockets import member_socket


class Peer:
    """A server that answers as a test says, in a thread."""

    def __init__(self, answer=None, greeting=NO_JOB, port=0):
        self.listener = Listener("127.0.0.1", port, greeting=greeting)
        self.address = self.listener.address
        self.seen = []
        self.arrived = threading.Semaphore(0)
        self._answer = answer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stopping.is_set():
            message = self.listener.receive(5)
            if message is None:
                continue
            peer, header, frames = message
            self.seen.append((header, [bytes(frame) for frame in frames[1:]]))
            if self._answer is not None:
                self._answer(self.listener, peer, header, frames[1:])
            self.arrived.release()
        self.listener.close()

    def close(self):
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def echo(listener, peer, header, frames):
    listener.send(peer, Header(Kind.REPLY, header.request), frames)


@pytest.fixture
def start():
    peers = []

    def start(*arguments, **settings):
        peers.append(Peer(*arguments, **settings))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def connect(monkeypatch):
    opened = []

    def connect(*addresses, max_pending=256, **settings):
        monkeypatch.setattr(connection_module, "_MAX_PENDING", max_pending)
        opened.append(Connections("echo server", addresses, **settings))
        return opened[-1]

    yield connect
    for connections in opened:
        connections.close()


def submit(
    connections, frames=(b"",), *, server=0, timeout_s=DEADLINE_S, what="asking"
):
    header = Header(Kind.HELLO)
    return connections[server].send(header, frames, timeout_s=timeout_s, what=what)


def test_a_request_gets_the_reply_of_its_own_server(start, connect):
    connections = connect(*(start(echo).address for _ in range(3)))
    replies = [
        submit(connections, [b"%d" % n, b"rest"], server=n % len(connections))
        for n in range(30)
    ]
    for n, reply in enumerate(replies):
        header, frames = reply.result(DEADLINE_S)
        assert header.kind is Kind.REPLY
        assert [bytes(frame) for frame in frames[1:]] == [b"%d" % n, b"rest"]


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 3_000_000])
def test_frames_of_any_size_arrive_whole(start, connect, size):
    body = bytes(range(256)) * (size // 256 + 1)
    reply = submit(connect(start(echo).address), [memoryview(body)[:size], b"end"])
    _, frames = reply.result(DEADLINE_S)
    assert bytes(frames[1]) == body[:size]
    assert bytes(frames[2]) == b"end"


def test_messages_to_one_server_arrive_in_the_order_of_submit(start, connect):
    peer = start(echo)
    connections = connect(peer.address, max_pending=1000)
    # Small and large ones travel differently: copied, and as they are.
    bodies = [b"%d" % n * (1 if n % 3 else 70_000) for n in range(60)]
    replies = [submit(connections, [body]) for body in bodies]
    for reply in replies:
        reply.result(DEADLINE_S)
    assert [frames for _, frames in peer.seen] == [[body] for body in bodies]


def test_several_threads_send_requests_concurrently(start, connect):
    connections = connect(start(echo).address, max_pending=8)

    def ask(n):
        _, frames = submit(connections, [b"%d" % n]).result(DEADLINE_S)
        return int(bytes(frames[1]))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(300))) == list(range(300))


def test_an_error_of_the_server_names_it_and_keeps_its_text(start, connect):
    def reject(listener, peer, header, frames):
        listener.send_error(peer, header.request, ConfigError("the table is round"))

    peer = start(reject)
    reply = submit(connect(peer.address))
    message = rf"echo server 0 at {peer.address}: ConfigError: the table is round"
    with pytest.raises(RemoteError, match=message) as caught:
        reply.result(DEADLINE_S)
    assert caught.value.kind == "ConfigError"
    assert caught.value.server == f"echo server 0 at {peer.address}"


def test_an_address_without_a_listener_is_reported_within_the_deadline(connect):
    address = f"tcp://127.0.0.1:{draw_port()}"
    started = time.monotonic()
    reply = submit(connect(address), timeout_s=0.3, what="counting rows")
    message = rf"server 0 at {address}: counting rows: no reply within 0\.3 s"
    with pytest.raises(RequestTimeoutError, match=message) as caught:
        reply.result(DEADLINE_S)
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - started >= 0.3


def test_a_silent_server_does_not_affect_requests_to_another(start, connect):
    silent, talking = start(), start(echo)
    connections = connect(silent.address, talking.address)
    late = submit(connections, server=0, timeout_s=0.2)
    assert submit(connections, server=1).result(DEADLINE_S)
    with pytest.raises(RequestTimeoutError, match=f"0 at {silent.address}"):
        late.result(DEADLINE_S)


def test_each_request_has_a_deadline_of_its_own(start, connect):
    connections = connect(start().address)
    patient = submit(connections)
    for timeout_s in (0.2, 0.1):
        with pytest.raises(RequestTimeoutError, match=rf"within {timeout_s} s"):
            submit(connections, timeout_s=timeout_s).result(DEADLINE_S)
    assert not patient.done()


def test_a_reply_after_the_deadline_is_dropped(start, connect):
    held = threading.Event()

    def answer_late(listener, peer, header, frames):
        held.wait(DEADLINE_S)
        echo(listener, peer, header, frames)

    peer = start(answer_late)
    connections = connect(peer.address)
    with pytest.raises(RequestTimeoutError):
        submit(connections, [b"1"], timeout_s=0.1).result(DEADLINE_S)
    held.set()
    _, frames = submit(connections, [b"2"]).result(DEADLINE_S)
    assert bytes(frames[1]) == b"2"


def test_a_server_that_ends_fails_its_pending_requests_at_once(start, connect):
    ending, living = start(), start()
    connections = connect(ending.address, living.address)
    lost = [submit(connections, server=0, what="lookup") for _ in range(3)]
    other = submit(connections, server=1)
    for _ in lost:
        assert ending.arrived.acquire(timeout=DEADLINE_S)
    started = time.monotonic()
    ending.close()
    for reply in lost:
        message = rf"0 at {ending.address}: lookup: the connection was lost"
        with pytest.raises(ServerError, match=message):
            reply.result(DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S / 2
    assert not other.done()


def test_a_restarted_server_is_reached_again(start, connect):
    first = start(port=draw_port())
    connections = connect(first.address)
    lost = submit(connections)
    assert first.arrived.acquire(timeout=DEADLINE_S)
    first.close()
    with pytest.raises(ServerError, match="connection was lost"):
        lost.result(DEADLINE_S)
    port = int(first.address.rpartition(":")[2])
    again = once_the_port_is_free(lambda: Listener("127.0.0.1", port))
    deadline = time.monotonic() + DEADLINE_S
    answer = None
    with contextlib.closing(again):
        # Requests of the moment in which the former server went are lost with it.
        while answer is None and time.monotonic() < deadline:
            reply = submit(connections, [b"again"])
            while (request := again.receive(300)) is not None:
                peer, header, frames = request
                echo(again, peer, header, frames[1:])
            with contextlib.suppress(ServerError, TimeoutError):
                _, answer = reply.result(1)
    assert answer is not None
    assert bytes(answer[1]) == b"again"


def test_more_requests_than_may_be_pending_wait_and_then_fail(start, connect):
    peer = start()
    connections = connect(peer.address, max_pending=2)
    for _ in range(2):
        submit(connections)
    started = time.monotonic()
    message = r"counting: too many requests were pending for 0\.2 s"
    with pytest.raises(RequestTimeoutError, match=message):
        submit(connections, timeout_s=0.2, what="counting")
    assert time.monotonic() - started >= 0.2
    assert len(peer.seen) <= 2


def test_a_request_that_has_ended_frees_its_slot(start, connect):
    connections = connect(start().address, max_pending=1)
    for _ in range(3):
        with pytest.raises(RequestTimeoutError, match="no reply"):
            submit(connections, timeout_s=0.02).result(DEADLINE_S)


def test_closing_fails_pending_and_later_requests(start, connect):
    connections = connect(start().address)
    pending = submit(connections, what="lookup")
    connections.close()
    with pytest.raises(ServerError, match="lookup: the connections were closed"):
        pending.result(0)
    with pytest.raises(ServerError, match="update: the connections are closed"):
        submit(connections, what="update")
    connections.close()


def test_a_failure_of_the_io_thread_reaches_the_caller(start, connect):
    connections = connect(start(echo).address)
    with pytest.raises(ServerError, match=r"lookup: the I/O thread died \(TypeError"):
        submit(connections, ["no bytes"], what="lookup").result(DEADLINE_S)
    with pytest.raises(ServerError, match="update: the connections are closed"):
        submit(connections, what="update")


def nonsense(*frames):
    """Answer a request for nonsense with frames, any other as an echo does."""

    def answer(listener, peer, header, body):
        if bytes(body[0]) != b"nonsense":
            echo(listener, peer, header, body)
            return
        named = [
            frame(header.request) if callable(frame) else frame for frame in frames
        ]
        listener._socket.send_multipart([peer, *named])

    return answer


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"nonsense"], "header must be 48 bytes"),
        ([bytes(48)], "must begin with b'PTRC'"),
        ([lambda n: Header(Kind.ERROR, n).encode()], "must have 2 frames"),
        ([lambda n: Header(Kind.ERROR, n).encode(), b"{"], "must be JSON"),
        (
            [lambda n: Header(Kind.ERROR, n).encode(), b'{"kind": 1}'],
            r"Frame 1: kind must be a string\. Received: 1\.",
        ),
    ],
)
def test_a_server_that_sends_malformed_replies_fails_its_own_requests_only(
    start, connect, frames, message
):
    silent, odd, good = start(), start(nonsense(*frames)), start(echo)
    connections = connect(silent.address, odd.address, good.address)
    waiting = submit(connections, server=0)
    name = f"echo server 1 at {odd.address}: lookup: the reply must be a message of"
    asked = submit(connections, [b"nonsense"], server=1, what="lookup")
    with pytest.raises(WireError, match=f"{name} this protocol.*{message}"):
        asked.result(DEADLINE_S)
    for server in (1, 2):
        _, answer = submit(connections, [b"x"], server=server).result(DEADLINE_S)
        assert bytes(answer[1]) == b"x"
    assert not waiting.done()


def test_a_server_cannot_answer_a_request_to_another(start, connect):
    def answer_all(listener, peer, header, body):
        for number in range(1, 10):
            listener.send(peer, Header(Kind.REPLY, number), body)

    silent, talking = start(), start(answer_all)
    connections = connect(silent.address, talking.address)
    waiting = submit(connections, server=0)
    submit(connections, server=1).result(DEADLINE_S)
    submit(connections, server=1).result(DEADLINE_S)
    assert not waiting.done()


def test_a_request_cannot_be_cancelled(start, connect):
    reply = submit(connect(start(echo).address))
    assert not reply.cancel()
    assert reply.result(DEADLINE_S)


def test_a_frame_that_no_server_accepts_is_not_sent(start, connect):
    connections = connect(start(echo).address, max_pending=1)
    large = np.broadcast_to(np.uint8(0), 2**31 + 1).data
    message = "lookup: a frame must have at most 2147483648 bytes. Received: 2147483649"
    for _ in range(2):
        with pytest.raises(WireError, match=message):
            submit(connections, [b"", large], what="lookup")
    assert submit(connections).result(DEADLINE_S)


def test_requests_after_a_loss_fail_at_once_until_the_server_is_back(start, connect):
    first = start(echo, port=draw_port())
    connections = connect(first.address, max_pending=2)
    submit(connections).result(DEADLINE_S)
    first.close()
    started = time.monotonic()
    message = rf"0 at {first.address}: lookup: the connection was lost"
    for _ in range(20):
        with pytest.raises(ServerError, match=message):
            submit(connections, what="lookup").result(DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S / 2
    port = int(first.address.rpartition(":")[2])
    again = once_the_port_is_free(lambda: Listener("127.0.0.1", port))
    deadline = time.monotonic() + DEADLINE_S
    with contextlib.closing(again):
        while (reply := submit(connections, [b"again"])).done():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        while not reply.done():
            assert time.monotonic() < deadline
            if again.wait(20):
                peer, header, frames = again.take()
                assert bytes(frames[1]) == b"again"
                echo(again, peer, header, frames[1:])
        assert bytes(reply.result(0)[1][1]) == b"again"


def test_a_listener_counts_the_bytes_of_frames(start, connect):
    peer = start(echo)
    connections = connect(peer.address)
    for _ in range(2):
        submit(connections, [b"abc", bytes(100_000)]).result(DEADLINE_S)
    connections.close()
    assert peer.listener.bytes_received == 2 * (48 + 3 + 100_000)
    assert peer.listener.bytes_sent == 2 * (48 + 3 + 100_000)


def test_no_address_is_rejected():
    with pytest.raises(ConfigError, match="At least one address of an echo server"):
        Connections("echo server", [])


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "tcp://", "tcp://host", "", "x"])
def test_an_address_that_cannot_be_parsed_is_rejected(address):
    good = f"tcp://127.0.0.1:{draw_port()}"
    with pytest.raises(ConfigError, match=rf"'tcp://host:port'. Received: '{address}'"):
        Connections("echo server", [good, address])


def test_an_address_that_is_taken_cannot_be_listened_on():
    listener = Listener("127.0.0.1", 0)
    port = int(listener.address.rpartition(":")[2])
    with pytest.raises(WireError, match=rf"Cannot listen on 127\.0\.0\.1:{port}: "):
        Listener("127.0.0.1", port)
    listener.close()


def test_a_listener_waits_for_its_timeout_at_most():
    listener = Listener("127.0.0.1", 0)
    started = time.monotonic()
    assert listener.receive(50) is None
    assert time.monotonic() - started > 0.04
    listener.close()


def test_a_listener_sees_whether_a_peer_is_connected():
    listener = Listener("127.0.0.1", 0)
    staying, going = (member_socket() for _ in range(2))
    peers = []
    for client in (staying, going):
        client.connect(listener.address)
        client.send(Header(Kind.HELLO).encode())
        peers.append(listener.receive(int(DEADLINE_S * 1000))[0])
    assert [listener.is_connected(peer) for peer in peers] == [True, True]
    going.send_multipart([Header(Kind.HELLO).encode(), b"the last word"])
    going.close()
    deadline = time.monotonic() + DEADLINE_S
    while listener.is_connected(peers[1]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert listener.is_connected(peers[0])
    assert not listener.is_connected(b"a stranger")
    peer, _, (_, word) = listener.receive(0)  # it waited to be read
    assert (peer, bytes(word)) == (peers[1], b"the last word")
    listener.send(b"a stranger", Header(Kind.REPLY))  # is dropped, as always
    staying.close(linger=0)
    listener.close()


def test_a_peer_that_reads_nothing_is_connected():
    listener = Listener("127.0.0.1", 0)
    slow = member_socket()
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.connect(listener.address)
    slow.send(Header(Kind.HELLO).encode())
    peer = listener.receive(int(DEADLINE_S * 1000))[0]
    for _ in range(2 * listener._socket.getsockopt(zmq.SNDHWM)):
        listener.send(peer, Header(Kind.REPLY), [bytes(2**20)])  # dropped when full
    assert listener.is_connected(peer)
    slow.close(linger=0)
    listener.close()


def test_a_client_ignores_a_liveness_probe(start, connect):
    def look_first(listener, peer, header, frames):
        assert all(listener.is_connected(peer) for _ in range(3))
        echo(listener, peer, header, frames)

    connections = connect(start(look_first).address)
    for body in (b"one", b"two"):
        assert bytes(submit(connections, [body]).result(DEADLINE_S)[1][1]) == body


def test_both_ends_of_a_connection_detect_a_lost_network(start, connect):
    peer = start(echo)
    submit(connect(peer.address)).result(DEADLINE_S)
    port = int(peer.address.rpartition(":")[2])
    ends = [limits_of(fd) for fd in open_sockets() if port in ports_of(fd)]
    # Seconds until an idle connection is probed, from probe to probe, how many probes;
    # milliseconds that sent bytes may wait for an acknowledgement.
    assert ends == [(1, 3, 1, 3, 6000)] * 2


def open_sockets():
    """Return the descriptors of this process that are connected TCP sockets."""
    found = []
    for fd in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError, IndexError):  # others have no port
            ports_of(fd)
            found.append(fd)
    return found


def ports_of(fd):
    with socket.socket(fileno=os.dup(fd)) as end:
        return {end.getsockname()[1], end.getpeername()[1]}


def limits_of(fd):
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    with socket.socket(fileno=os.dup(fd)) as end:
        return (
            end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            *(end.getsockopt(socket.IPPROTO_TCP, option) for option in options),
            end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        )


def test_a_reply_to_a_disconnected_peer_is_dropped():
    listener = Listener("127.0.0.1", 0)
    gone = member_socket()
    gone.connect(listener.address)
    gone.send(Header(Kind.HELLO).encode())
    peer, *_ = listener.receive(int(DEADLINE_S * 1000))
    gone.close(linger=0)
    for _ in range(3):
        listener.send(peer, Header(Kind.REPLY))
        listener.send(b"a stranger", Header(Kind.REPLY))
    listener.close()


def test_a_request_of_another_job_is_rejected_and_not_handled(start, connect):
    peer = start(echo, Greeting("ours"))
    theirs = connect(peer.address, greeting=Greeting("theirs"))
    message = (
        rf"{peer.address}: .* must be that of \w+ server 0 of job 'theirs'\. Received: "
        "another process with the same token"
    )
    for _ in range(2):
        with pytest.raises(TokenError, match=message):
            submit(theirs).result(DEADLINE_S)
    assert peer.seen == []
    assert submit(connect(peer.address, greeting=Greeting("ours"))).result(DEADLINE_S)
    assert submit(connect(peer.address)).result(DEADLINE_S)
    assert len(peer.seen) == 2


def test_a_client_of_a_job_is_served_by_a_listener_of_no_job(start, connect):
    connections = connect(start(echo).address, greeting=Greeting("theirs"))
    assert submit(connections).result(DEADLINE_S)


@pytest.mark.parametrize("name", [None, b"\x01", b"a name"])
def test_a_client_without_a_greeting_is_rejected_by_a_listener_of_a_job(start, name):
    peer = start(echo, Greeting("ours"))
    with member_socket() as stranger:
        stranger.linger = 0
        if name is not None:
            stranger.routing_id = name
        stranger.connect(peer.address)
        for frame in (Header(Kind.SHUTDOWN, 7).encode(), b"nonsense"):
            stranger.send(frame)
            assert stranger.poll(DEADLINE_S * 1000)
            frames = stranger.recv_multipart()
            request = 0 if frame == b"nonsense" else 7
            assert Header.decode(frames[0]) == Header(Kind.ERROR, request)
            assert decode_json(frames)["kind"] == "FrameError"
    assert peer.seen == []


def test_more_peers_connect_than_a_listener_remembers(start, connect, monkeypatch):
    monkeypatch.setattr(listener_module, "_MAX_KNOWN_PEERS", 2)
    peer = start(echo, Greeting("ours"))
    all_of_them = [connect(peer.address, greeting=Greeting("ours")) for _ in range(5)]
    for connections in all_of_them * 2:
        assert submit(connections).result(DEADLINE_S)


def test_a_client_that_reconnects_before_its_loss_is_detected_is_served(start, connect):
    peer = start(echo, Greeting("ours"))
    with contextlib.closing(Relay(peer.address)) as relay:
        connections = connect(relay.address, greeting=Greeting("ours"))
        for n in range(3):
            deadline = time.monotonic() + DEADLINE_S
            answer = None
            while answer is None:
                assert time.monotonic() < deadline
                with contextlib.suppress(ServerError):  # until the connection is back
                    _, answer = submit(connections, [b"%d" % n]).result(DEADLINE_S)
            assert bytes(answer[1]) == b"%d" % n
            relay.break_the_near_end()


def test_a_request_that_failed_with_its_connection_is_never_sent_later(
    start, connect, monkeypatch
):
    # With a token this listener would reject the old socket; one started again may not.
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE")
    peer = start(echo)
    with contextlib.closing(Relay(peer.address)) as relay:
        connections = connect(relay.address)
        assert submit(connections, [b"before"]).result(DEADLINE_S)
        relay.is_open.clear()
        # More than the buffers of TCP take: most of it waits in the socket.
        lost = [submit(connections, [bytes(2**22)]) for _ in range(8)]
        relay.break_the_near_end()
        for reply in lost:
            with pytest.raises(ServerError, match="connection was lost"):
                reply.result(DEADLINE_S)
        relay.is_open.set()
        deadline, answer = time.monotonic() + DEADLINE_S, None
        while answer is None:
            assert time.monotonic() < deadline
            with contextlib.suppress(ServerError):  # until the connection is back
                answer = submit(connections, [b"after"]).result(DEADLINE_S)
        assert [frames for _, frames in peer.seen] == [[b"before"], [b"after"]]
