import threading
import time

import pytest

from persia_torchrec.errors import BatchError, RemoteError, ServerError, WireError
from persia_torchrec.rpc import listener_thread as rpc_server
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind, decode_json
from persia_torchrec.rpc.sockets import MAX_FRAMES
from tests.support.servers import DEADLINE_S
from tests.support.sockets import member_socket
from tests.support.threads import InThread


@pytest.fixture
def start():
    opened = []

    def start(handler, **settings):
        """Start a service; return a function that sends it a request."""
        answering = Service("service", handler, **settings)
        connections = Connections("service", [answering.address])
        opened.extend([connections, answering])

        def ask(*frames, kind=Kind.FORWARD, timeout_s=DEADLINE_S):
            return connections[0].send(
                Header(kind), frames or [b""], timeout_s=timeout_s, what="asking"
            )

        ask.service = answering
        return ask

    yield start
    for closable in opened:
        closable.close()


def result(reply):
    return [bytes(frame) for frame in reply.result(DEADLINE_S)[1][1:]]


def test_each_request_gets_its_own_reply(start):
    ask = start(lambda header, frames: [header.kind.name.encode(), *frames[1:]])
    replies = [ask(b"%d" % n, kind=Kind.BACKWARD) for n in range(50)]
    assert [result(reply) for reply in replies] == [
        [b"BACKWARD", b"%d" % n] for n in range(50)
    ]


def test_an_exception_of_the_handler_goes_to_its_client_only(start):
    def handle(header, frames):
        if bytes(frames[1]) == b"bad":
            raise BatchError("the batch is round")
        if bytes(frames[1]) == b"bug":
            raise KeyError("item")
        return [b"good"]

    ask = start(handle)
    bad, bug, good = ask(b"bad"), ask(b"bug"), ask(b"good")
    with pytest.raises(RemoteError, match="BatchError: the batch is round"):
        result(bad)
    with pytest.raises(RemoteError, match="KeyError: 'item'"):
        result(bug)
    assert result(good) == [b"good"]


def test_a_request_that_waits_does_not_delay_another(start):
    released = threading.Event()

    def handle(header, frames):
        if bytes(frames[1]) == b"wait":
            assert released.wait(DEADLINE_S)
        return list(frames[1:])

    ask = start(handle, num_threads=2)
    waiting = ask(b"wait")
    assert result(ask(b"quick")) == [b"quick"]
    assert not waiting.done()
    released.set()
    assert result(waiting) == [b"wait"]


def test_requests_beyond_the_bound_of_the_queue_are_rejected(start, monkeypatch):
    monkeypatch.setattr(rpc_server, "MAX_WAITING", 2)
    released = threading.Event()

    def handle(header, frames):
        assert released.wait(DEADLINE_S)
        return list(frames[1:])

    ask = start(handle, num_threads=1)
    accepted = [ask(b"%d" % n) for n in range(3)]
    with pytest.raises(RemoteError, match="3 requests are waiting already"):
        result(ask(b"one more"))
    released.set()
    assert [result(reply) for reply in accepted] == [[b"0"], [b"1"], [b"2"]]
    assert result(ask(b"now")) == [b"now"]


@pytest.mark.parametrize("frames", [[b""], [b"nonsense"], [b"x" * 48], [b"", b"", b""]])
def test_a_malformed_message_is_answered_with_an_error_and_the_service_continues(
    start, frames
):
    ask = start(lambda header, frames: [b"fine"])
    stranger = member_socket()
    stranger.connect(ask.service.address)
    stranger.send_multipart(frames)
    assert stranger.poll(DEADLINE_S * 1000)
    header, *body = stranger.recv_multipart()
    assert Header.decode(header) == Header(Kind.ERROR)
    assert decode_json([header, *body])["kind"] == "FrameError"
    stranger.close(linger=0)
    assert result(ask()) == [b"fine"]


def test_closing_answers_requests_under_way_and_no_others(start):
    begun, released = threading.Event(), threading.Event()

    def handle(header, frames):
        begun.set()
        assert released.wait(DEADLINE_S)
        return [b"done"]

    ask = start(handle)
    reply = ask()
    assert begun.wait(DEADLINE_S)
    closing = InThread(ask.service.close)
    released.set()
    assert result(reply) == [b"done"]
    closing.result()
    ask.service.close()
    with pytest.raises(ServerError):
        result(ask(timeout_s=0.1))


def test_a_port_that_is_taken_is_rejected(start):
    ask = start(lambda header, frames: [b""])
    port = int(ask.service.address.rpartition(":")[2])
    with pytest.raises(WireError, match=f"Cannot listen on 127.0.0.1:{port}"):
        Service("service", lambda header, frames: [b""], port=port)


def test_an_idle_service_closes_at_once(start):
    ask = start(lambda header, frames: [b""])
    started = time.monotonic()
    ask.service.close()
    assert time.monotonic() - started < DEADLINE_S / 2


@pytest.mark.slow
def test_a_message_of_too_many_frames_is_rejected(start):
    ask = start(lambda header, frames: [b"%d" % len(frames)])
    assert result(ask(*[b""] * (MAX_FRAMES - 1))) == [b"%d" % MAX_FRAMES]
    with pytest.raises(RemoteError, match=f"must have at most {MAX_FRAMES} frames"):
        ask(*[b""] * 3 * MAX_FRAMES).frames()
    assert result(ask(b"")) == [b"2"]
