"""Who gets memory of a listener, and what comes of what is written there."""

import contextlib
import os
import random
import secrets
import socket
import struct
import threading
from collections import deque

import msgspec
import pytest

from persia_torchrec.errors import FrameError, RemoteError, ServerError
from persia_torchrec.rpc import peers as peers_module
from persia_torchrec.rpc import slab as layout
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import NO_JOB
from persia_torchrec.rpc.listener import ListenerLimits
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind, decode_json, encode_json
from persia_torchrec.rpc.peers import Peers
from persia_torchrec.rpc.slab_client import obtain
from persia_torchrec.rpc.sockets import Wakeup
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S
from tests.support.threads import InThread, all_at_once

pytestmark = pytest.mark.slow

MIB = 2**20


def until(condition):
    wait_until(condition, "what another thread does")


class Echo(Service):
    """Answers with what it is sent, when it may."""

    limits = ListenerLimits(shm_bytes=64 * MIB)

    def __init__(self):
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.seen = []
        super().__init__("echo", self.answer, num_threads=1)

    def answer(self, header, frames):
        self.seen.append(header.batch)
        assert self.may_answer.wait(DEADLINE_S)
        return [bytes(frame) for frame in frames[1:]]

    @property
    def slabs(self):
        return self._listener.slabs


@pytest.fixture
def echo():
    with contextlib.closing(Echo()) as echo:
        yield echo
        echo.may_answer.set()


def connect(echo, transport="shm"):
    return Peers("echo", [echo.address], DEADLINE_S, NO_JOB, transport=transport)


@pytest.fixture
def peers(echo):
    with contextlib.closing(connect(echo)) as peers:
        peers.share_memory()
        assert memory_of(peers) is not None
        yield peers


def memory_of(peers):
    return peers.connections[0].memory


def send(peers, *frames, batch=0, reply_bytes=0, timeout_s=DEADLINE_S):
    header = Header(Kind.LOOKUP, batch=batch)
    return peers.send(0, header, frames, "echo", timeout_s, reply_bytes)


@pytest.fixture
def asker(echo):
    """Sends SLABs over TCP."""
    with contextlib.closing(connect(echo, "tcp")) as peers:

        def ask(value):
            reply = peers.send(0, Header(Kind.SLAB), [encode_json(value)], "memory")
            return decode_json(reply.frames())

        yield ask


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000, 3 * MIB])
def test_a_reply_has_the_bytes_of_its_request(peers, size):
    body = secrets.token_bytes(size)
    for _ in range(3):
        reply = send(peers, b"first", body, reply_bytes=size + 4096)
        assert [bytes(f) for f in reply.frames()[1:]] == [b"first", body]
    assert memory_of(peers).num_requests == 3


def test_a_reply_without_room_comes_over_tcp(peers):
    body = secrets.token_bytes(MIB)
    assert bytes(send(peers, body).frames()[1]) == body
    assert memory_of(peers).num_requests == 1
    until(lambda: not memory_of(peers)._open)


def test_what_does_not_fit_goes_over_tcp_and_is_not_overtaken(peers, echo):
    num_mib = memory_of(peers).slab.size_bytes // MIB
    echo.may_answer.clear()
    sizes = [10, num_mib * MIB, 10, 20, num_mib * MIB, 30]
    replies = [send(peers, bytes(n), batch=i) for i, n in enumerate(sizes)]
    echo.may_answer.set()
    assert [len(reply.frames()[1]) for reply in replies] == sizes
    assert echo.seen == list(range(6))
    assert memory_of(peers).num_requests == 4


@pytest.mark.parametrize("seed", range(4))
def test_requests_either_way_are_read_in_their_order(peers, echo, seed):
    rng, size = random.Random(seed), memory_of(peers).slab.size_bytes
    replies = deque()
    for batch in range(200):
        num_bytes = size if rng.random() < 0.1 else rng.randrange(5000)
        if rng.random() < 0.1:
            echo.may_answer.clear()
        replies.append(send(peers, memoryview(bytes(size))[:num_bytes], batch=batch))
        while len(replies) > rng.randrange(1, 40):
            echo.may_answer.set()
            replies.popleft().frames()
    echo.may_answer.set()
    for reply in replies:
        reply.frames()
    assert echo.seen == list(range(200))
    assert 150 < memory_of(peers).num_requests < 200


def test_memory_is_used_at_once_though_requests_over_tcp_are_unanswered(echo):
    with contextlib.closing(connect(echo)) as peers:
        echo.may_answer.clear()
        first = send(peers, b"x", batch=0)
        peers.share_memory()
        others = [send(peers, b"x", batch=batch) for batch in (1, 2)]
        assert memory_of(peers).num_requests == 2
        echo.may_answer.set()
        for reply in (first, *others):
            reply.frames()
        assert echo.seen == [0, 1, 2]


def test_many_frames_go_over_tcp(peers):
    frames = [b"%d" % i for i in range(layout.MAX_FRAMES)]
    assert [bytes(f) for f in send(peers, *frames).frames()[1:]] == frames
    assert memory_of(peers).num_requests == 0


def test_the_memory_of_a_reply_is_used_again_once_no_view_is_left(peers):
    size = memory_of(peers).slab.size_bytes // 4
    kept = send(peers, b"a" * size, reply_bytes=size).frames()
    for letter in (b"b", b"c", b"d"):
        (body,) = send(peers, letter * size, reply_bytes=size).frames()[1:]
        assert bytes(body[:1]) == letter
        assert bytes(kept[1]) == b"a" * size
    del kept
    before = memory_of(peers).num_requests
    send(peers, b"e" * size, reply_bytes=size).frames()
    assert memory_of(peers).num_requests == before + 1


def test_the_place_of_a_request_that_timed_out_stays_until_it_is_answered(peers, echo):
    echo.may_answer.clear()
    late = send(peers, b"late", timeout_s=0.05)
    with pytest.raises(TimeoutError):
        late.frames()
    (place,) = [opened[2] for opened in memory_of(peers)._open.values()]
    others = [send(peers, b"other") for _ in range(3)]
    open_ = list(memory_of(peers)._open.values())
    assert [one[2].begin == place.begin for one in open_] == [True, *[False] * 3]
    at, size = memory_of(peers).slab.frames(place.begin, place.size)[1]
    assert bytes(memory_of(peers).slab.bytes[at : at + size]) == b"late"
    echo.may_answer.set()
    assert [bytes(reply.frames()[1]) for reply in others] == [b"other"] * 3
    until(lambda: not memory_of(peers)._open)


def test_replies_with_callbacks_and_without_a_waiting_caller_arrive(peers):
    done = threading.Event()
    reply = send(peers, b"x")
    reply.add_done_callback(lambda _: done.set())
    assert done.wait(DEADLINE_S)
    silent = send(peers, b"y")
    until(silent.done)


def test_a_callback_that_is_added_when_the_reply_is_there_is_called(peers):
    done, reply = threading.Event(), send(peers, b"x")
    until(memory_of(peers).has_replies)  # and no thread was woken for it
    reply.add_done_callback(lambda _: done.set())
    assert done.wait(DEADLINE_S)


def test_the_thread_that_takes_a_reply_with_callbacks_does_not_wake_itself(
    peers, echo, monkeypatch
):
    wake, woke, ended, done = Wakeup.wake, [], [], threading.Event()

    def recorded(wakeup):
        woke.append(threading.get_ident())
        wake(wakeup)

    monkeypatch.setattr(Wakeup, "wake", recorded)
    echo.may_answer.clear()
    reply = send(peers, b"x")

    def end(_):
        ended.append(threading.get_ident())
        done.set()

    reply.add_done_callback(end)
    until(lambda: memory_of(peers)._listens)
    echo.may_answer.set()
    assert done.wait(DEADLINE_S)
    assert bytes(reply.frames()[1]) == b"x"
    assert ended
    assert not set(ended) & {threading.get_ident(), *woke}


def test_several_callers_get_their_own_replies(peers):
    def ask(letter):
        for i in range(50):
            body = letter * (1 + 997 * i)
            reply = send(peers, body, reply_bytes=len(body))
            assert bytes(reply.frames()[1]) == body

    all_at_once(ask, [b"0", b"1", b"2", b"3"])


def test_a_caller_that_leaves_has_another_one_take_replies(peers, echo):
    gates, memory = [threading.Event() for _ in "ab"], memory_of(peers)
    done = send(peers, b"done")
    done.frames()

    def answer(header, frames):
        assert gates[header.batch].wait(DEADLINE_S)
        return [bytes(frames[1])]

    echo._handler = answer
    replies = [send(peers, b"%d" % i, batch=i) for i in range(2)]

    leader = InThread(replies[0].frames)
    until(memory._leading.locked)
    follower = InThread(replies[1].frames)
    until(lambda: memory._followers)
    memory._followers.insert(0, done)  # as of a caller that has not left yet
    gates[0].set()
    assert bytes(leader.result()[1]) == b"0"
    until(lambda: memory._followers == [done])  # the other caller leads
    memory._followers.clear()
    gates[1].set()
    assert bytes(follower.result()[1]) == b"1"


def test_a_request_wakes_the_server_and_a_reply_its_caller(peers, echo):
    until(lambda: send(peers, b"x").frames() and echo.slabs.num_wakeups)
    assert memory_of(peers).num_bells >= 1
    before = echo.slabs.num_woken, memory_of(peers).num_sleeps
    echo.may_answer.clear()
    reply = send(peers, b"x")
    waiting = InThread(reply.frames)
    until(lambda: memory_of(peers).num_sleeps > before[1])
    echo.may_answer.set()
    waiting.result()
    until(lambda: echo.slabs.num_woken > before[0])


def test_an_error_reaches_the_caller(peers, echo):
    echo.answer = None
    echo._handler = lambda *_: 1 / 0
    with pytest.raises(RemoteError, match="division by zero"):
        send(peers, b"x").frames()


def test_a_client_that_is_gone_leaves_nothing(peers, echo):
    assert (echo.slabs.num_bytes, len(echo.slabs)) == (16 * MIB, 1)
    peers.close()
    until(lambda: echo.slabs.num_bytes == 0)
    assert len(echo.slabs) == 0


def test_memory_is_asked_for_once_by_threads_that_see_a_server_back(echo, monkeypatch):
    both = threading.Barrier(2)

    def obtain_together(ask):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return obtain(ask)

    monkeypatch.setattr(peers_module, "obtain", obtain_together)
    with contextlib.closing(connect(echo)) as given:
        all_at_once(given._share, [0, 0])
        assert both.broken
        assert len(echo.slabs) == 1
        assert bytes(send(given, b"x").frames()[1]) == b"x"
        assert memory_of(given).num_requests == 1


def test_a_server_that_is_gone_fails_the_requests(peers, echo):
    echo.may_answer.clear()
    reply = send(peers, b"x")
    memory_of(peers).socket.shutdown(socket.SHUT_RD)  # as when the other end is closed
    with pytest.raises(ServerError, match="connection was lost"):
        reply.frames()
    echo.may_answer.set()


def test_memory_is_polled_until_it_is_lost(peers, echo):
    memory, connection = memory_of(peers), peers.connections[0]
    assert send(peers, b"x").frames()
    until(lambda: connection._watched is memory)
    memory.socket.shutdown(socket.SHUT_RD)
    until(lambda: connection._watched is not memory)


def test_each_client_gets_a_quarter_of_what_is_left(echo):
    with contextlib.ExitStack() as stack:
        sizes = []
        for _ in range(3):
            given = connect(echo)
            stack.enter_context(contextlib.closing(given)).share_memory()
            sizes.append(memory_of(given).slab.size_bytes // MIB)
    assert sizes == [16, 12, 9]


def test_a_listener_without_memory_reports_it(echo, asker, caplog):
    echo.slabs._max_bytes = 0
    assert asker({"proof": "0" * 64}) == {"rejected": "the server has --shm-mib 0"}
    given = connect(echo)
    with contextlib.closing(given), caplog.at_level("INFO"):
        given.share_memory()
        assert memory_of(given) is None
        assert bytes(send(given, b"x").frames()[1]) == b"x"
    (said,) = [r for r in caplog.records if "is reached over TCP" in r.message]
    assert said.levelname == "WARNING"
    assert "--shm-mib 0" in said.message


def test_a_stranger_at_the_unix_socket_gets_no_memory(asker):
    name = asker({"proof": secrets.token_hex(32)})["socket"]
    for proof in (bytes(32), b"short", b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect("\0" + name)
            stranger.sendall(proof)
            stranger.shutdown(socket.SHUT_WR)
            told, fds, _, _ = socket.recv_fds(stranger, 512, 1)
            assert (told, fds) == (b"0it was not invited", [])


def test_another_user_gets_no_memory(asker, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(FrameError, match="it belongs to another user"):
        obtain(lambda value, type_: msgspec.convert(asker(value), type_))


def test_a_proof_is_good_once_and_only_what_the_memory_holds_is_accepted(asker):
    proof = secrets.token_bytes(32)
    name = asker({"proof": proof.hex()})["socket"]
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        for each in (one, two):
            each.settimeout(DEADLINE_S)
            each.connect("\0" + name)
        one.sendall(proof)
        _, (fd,), _, _ = socket.recv_fds(one, 512, 1)
        two.sendall(proof)
        assert two.recv(512) == b"0it was not invited"
        guessed = asker({"drawn": secrets.token_hex(32)})
        assert guessed == {"rejected": "it has read another proof in the memory"}
        drawn = os.pread(fd, 32, 0).hex()
        assert asker({"drawn": drawn}) == {"bytes": os.fstat(fd).st_size}
        os.close(fd)


@pytest.mark.parametrize("value", [{"proof": "xy"}, {"proof": "00"}, {"proof": 3}, []])
def test_a_malformed_request_for_memory_is_an_error(asker, value):
    with pytest.raises(RemoteError) as caught:
        asker(value)
    assert caught.value.kind == "FrameError"


def break_posted(slab):
    slab.words[layout.REQUESTS] += 1000


def break_place(slab):
    struct.pack_into("<4Q", slab.memory, 4096, 2**63, 64, 0, 0)
    slab.words[layout.REQUESTS] = 1


def break_order(slab):
    place = layout.FIRST, 4096, layout.FIRST, 4096, 2**21
    struct.pack_into("<5Q", slab.memory, 4096, *place)
    slab.words[layout.REQUESTS] = 1


def break_frames(slab):
    struct.pack_into("<4Q", slab.memory, 4096, layout.FIRST, 4096, layout.FIRST, 4096)
    struct.pack_into("<8Q", slab.memory, layout.FIRST, 7, *[2**64 - 1] * 7)
    slab.words[layout.REQUESTS] = 1


def break_header(slab):
    struct.pack_into("<4Q", slab.memory, 4096, layout.FIRST, 4096, layout.FIRST, 4096)
    struct.pack_into("<8Q", slab.memory, layout.FIRST, 1, 48, *[0] * 6)
    slab.words[layout.REQUESTS] = 1


@pytest.mark.parametrize(
    "harm", [break_posted, break_place, break_order, break_frames, break_header]
)
def test_a_client_that_breaks_its_slab_gets_another_and_no_other_does(
    peers, echo, harm
):
    other = connect(echo)
    with contextlib.closing(other):
        other.share_memory()
        memory = memory_of(other)
        harm(memory.slab)
        memory.socket.send(b"\0")
        until(lambda: memory.is_closed)
        until(lambda: memory_of(other) not in (None, memory))
        for one in (peers, other):
            assert bytes(send(one, b"x").frames()[1]) == b"x"
            assert memory_of(one).num_requests == 1
        assert len(echo.slabs) == 2


def test_connections_that_never_asked_share_nothing(echo):
    given = Connections("echo", [echo.address])
    with contextlib.closing(given):
        header = Header(Kind.LOOKUP)
        reply = given[0].send(header, [b"x"], timeout_s=DEADLINE_S, what="echo")
        assert bytes(reply.frames()[1]) == b"x"
    assert len(echo.slabs) == 0
