"""Who may connect: mechanisms, rejections, and the errors of clients."""

import contextlib
import secrets
import socket
import time

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError, DiscoveryError, ServerError, TokenError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.persia.stream import Inbox
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.auth import ZapAuthenticator, client_options
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from persia_torchrec.rpc.sockets import open_socket
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.server import EmbeddingServer
from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S, wait_until
from tests.support.sockets import ending_of
from tests.support.strangers import AS_ANOTHER_USER, be_stranger

OURS, THEIRS = "our token, of the job", "their token, of another"


def set_token(monkeypatch, token, encrypt="0"):
    for name in ("PERSIA_JOB_TOKEN", "PERSIA_JOB_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERSIA_ENCRYPT", encrypt)
    if token is not None:
        monkeypatch.setenv("PERSIA_JOB_TOKEN", token.replace(" ", "-"))


def options_of(token, greeting=NO_JOB, *, encrypts=False):
    token = None if token is None else token.replace(" ", "-")
    return client_options(token, greeting, encrypts=encrypts)


@contextlib.contextmanager
def serving(answer="answer", name="service", **settings):
    service = Service(name, lambda *_: [encode_json(answer)], **settings)
    yield service.address
    service.close()


def ask(address):
    with contextlib.closing(Connections("service", [address])) as connections:
        return submit(connections)


def submit(connections, server=0):
    hello, body = Header(Kind.HELLO), [encode_json(None)]
    reply = connections[server].send(
        hello, body, timeout_s=DEADLINE_S, what="a request"
    )
    return bytes(reply.frames()[1])


@pytest.mark.parametrize("encrypt", ["0", "1"])
@pytest.mark.parametrize("token", [OURS, None])
def test_a_client_with_the_same_token_is_answered(monkeypatch, token, encrypt):
    set_token(monkeypatch, token, encrypt if token else "0")
    with serving() as address:
        assert ask(address) == b'"answer"'
        mine = options_of(token, encrypts=encrypt == "1")
        assert ending_of(address, mine, DEADLINE_S) == zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize("encrypt", ["0", "1"])
@pytest.mark.parametrize("encrypts", [False, True])
@pytest.mark.parametrize("token", [None, THEIRS])
def test_a_stranger_is_not_answered(monkeypatch, encrypt, token, encrypts):
    set_token(monkeypatch, OURS, encrypt)
    with serving() as address:
        theirs = options_of(token, encrypts=encrypts)
        ended = ending_of(address, theirs, DEADLINE_S)
        assert ended != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert ask(address) == b'"answer"'


@pytest.mark.parametrize(
    ("there", "here", "received"),
    [
        (OURS, None, "no token here|a token there"),
        (
            OURS,
            THEIRS,
            "another token there, or clocks that differ by "
            f"{timeouts.PROOF_VALID_S:g} s",
        ),
        (None, OURS, "a token, or PERSIA_ENCRYPT=1, at one end only|another token"),
    ],
)
def test_the_error_reports_what_to_set(monkeypatch, there, here, received):
    set_token(monkeypatch, there)
    must = r"PERSIA_JOB_TOKEN_FILE, or PERSIA_JOB_TOKEN, must be the same for all"
    with serving() as address:
        set_token(monkeypatch, here)
        message = (
            rf"service 0 at {address}: a request: {must}.*Received: .*({received})"
        )
        with pytest.raises(TokenError, match=message) as rejection:
            ask(address)
        assert isinstance(rejection.value, PermissionError)


def test_the_address_book_is_encrypted_and_reports_what_to_set(monkeypatch):
    set_token(monkeypatch, OURS)
    with contextlib.closing(AddressBook.host(0)) as book:
        address = f"tcp://127.0.0.1:{book.port}"
        plain, curve = (options_of(OURS, encrypts=on) for on in (False, True))
        for options in (plain, {}, options_of(THEIRS, encrypts=True)):
            ended = ending_of(address, options, DEADLINE_S)
            assert ended != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert ending_of(address, curve, DEADLINE_S) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        set_token(monkeypatch, THEIRS)
        with pytest.raises(DiscoveryError, match="PERSIA_JOB_TOKEN_FILE, or"):
            AddressBook.join("127.0.0.1", book.port, timeout_s=DEADLINE_S)


def test_a_server_whose_clock_jumps_over_a_restart_is_waited_for(monkeypatch):
    set_token(monkeypatch, OURS)
    port, answer = draw_port(), {"incarnation": 7}
    with serving(answer, port=port) as address:
        kept = Connections("service", [address], recovery_s=DEADLINE_S)
        assert submit(kept) == encode_json(answer)
    with monkeypatch.context() as apart, contextlib.closing(kept):
        apart.setattr(timeouts, "PROOF_VALID_S", -1.0)  # no clock is near
        with serving(answer, port=port):
            wait_until(
                lambda: (away := kept[0]._away) and away.rejects,
                "the token is rejected",
            )
            apart.undo()
            assert submit(kept) == encode_json(answer)


def test_a_proof_is_accepted_once(monkeypatch):
    set_token(monkeypatch, OURS)
    with serving() as address:
        proof = options_of(OURS)
        assert ending_of(address, proof, DEADLINE_S) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert ending_of(address, proof, DEADLINE_S) == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_a_proof_is_accepted_while_it_is_new():
    now = [time.time()]
    context = zmq.Context()
    token = OURS.replace(" ", "-")
    keeper = ZapAuthenticator(context, token, clock=lambda: now[0])
    proofs = [tuple(options_of(OURS).values()) for _ in range(3)]
    assert keeper.rejection(*proofs[0]) == ""
    assert keeper.rejection(*proofs[0]) == "its proof was used before"
    now[0] += timeouts.PROOF_VALID_S - 2
    assert keeper.rejection(*proofs[1]) == ""
    now[0] += 4
    assert "s old, or the clocks differ" in keeper.rejection(*proofs[2])
    name, digest = options_of(OURS).values()
    assert keeper.rejection(b"0" + name, digest) == "it has another token"
    context.term()


def test_a_client_whose_proof_is_too_old_proves_itself_again(monkeypatch):
    set_token(monkeypatch, OURS)
    port, now_s = draw_port(), time.time()
    with monkeypatch.context() as before:
        before.setattr(auth.time, "time", lambda: now_s - 2 * timeouts.PROOF_VALID_S)
        connections = Connections("service", [f"tcp://127.0.0.1:{port}"])
    with contextlib.closing(connections), serving(port=port):
        assert submit(connections) == b'"answer"'


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_a_client_proves_itself_to_a_restarted_server(monkeypatch, encrypt):
    set_token(monkeypatch, OURS, encrypt)
    port = draw_port()
    address = f"tcp://127.0.0.1:{port}"
    with contextlib.closing(Connections("service", [address])) as connections:
        for _ in range(3):
            with serving(port=port):
                deadline = time.monotonic() + DEADLINE_S
                while True:
                    try:
                        assert submit(connections) == b'"answer"'
                        break
                    except TokenError:
                        raise
                    except ServerError:  # of the connection before
                        assert time.monotonic() < deadline
                        time.sleep(0.01)


def test_without_a_token_only_the_loopback_is_served(monkeypatch):
    set_token(monkeypatch, None)
    message = r"PERSIA_JOB_TOKEN_FILE, or PERSIA_JOB_TOKEN, must be set to listen on "
    for host in ("0.0.0.0", "*"):
        with pytest.raises(
            ConfigError, match=rf"{message}.*Received: (0\.0\.0\.0|::), and"
        ):
            Service("service", lambda *_: [], host=host)
    with pytest.raises(ConfigError, match=message):
        AddressBook.host(0, everywhere=True)
    set_token(monkeypatch, OURS)
    with serving(host="0.0.0.0") as address:
        assert ask(address.replace("0.0.0.0", "127.0.0.1")) == b'"answer"'


def test_encryption_needs_a_token(monkeypatch):
    set_token(monkeypatch, None, encrypt="1")
    with pytest.raises(ConfigError, match="PERSIA_ENCRYPT=1 needs the job's token"):
        Connections("service", ["tcp://127.0.0.1:1"])


def test_a_token_that_can_be_guessed_is_named_and_a_random_one_is_not():
    for weak in ("a" * 255, "0123456789abcdef", "correct-horse-battery"):
        assert "openssl rand -hex 32" in auth.weakness(weak)
    for num_bytes in (16, 32):
        assert all(not auth.weakness(secrets.token_hex(num_bytes)) for _ in range(99))
    assert not auth.weakness(None)


SERVER_1 = Greeting("ours", "embedding server 1")


@pytest.mark.parametrize(
    ("meant", "is_good"),
    [
        (SERVER_1, True),
        (SERVER_1.of("embedding server 0"), False),
        (SERVER_1.of("embedding server 11"), False),
        (SERVER_1.of("embedding worker 1"), False),
        (SERVER_1.of("trainer 1"), False),
        (
            SERVER_1.of("embedding server"),
            True,
        ),  # whose number the client does not know
        (SERVER_1.of(""), True),
        (Greeting("theirs", "embedding server 1"), False),
        (Greeting("", "embedding server 1"), True),  # of a notebook, which has no job
        (Greeting("", "embedding server 0"), False),
    ],
)
def test_a_proof_is_good_at_the_listener_that_it_means(monkeypatch, meant, is_good):
    set_token(monkeypatch, OURS)
    listener = Listener("127.0.0.1", 0, SERVER_1)
    with contextlib.closing(listener), monitored(listener.address, meant) as ending:
        assert (ending() == zmq.EVENT_HANDSHAKE_SUCCEEDED) == is_good


@contextlib.contextmanager
def monitored(address, meant):
    """A socket that proves the token to a listener; how its handshake ends."""
    client = open_socket(zmq.DEALER, {**options_of(OURS, meant), zmq.LINGER: 0})
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED | auth.REJECTIONS
    monitor = client.get_monitor_socket(events)
    client.connect(address)

    def ending():
        assert monitor.poll(1000 * DEADLINE_S)
        return recv_monitor_message(monitor)["event"]

    yield ending
    client.disable_monitor()
    monitor.close()
    client.close()


@pytest.mark.parametrize("role", ["embedding server", "embedding worker", "trainer"])
def test_each_listener_of_a_job_knows_its_number(monkeypatch, role):
    set_token(monkeypatch, OURS)
    job = Greeting("ours")
    with contextlib.ExitStack() as stack:
        if role == "embedding server":
            listener = EmbeddingServer(ServerConfig(shard=1, num_shards=2), job)
            stack.callback(listener.listener.close)
        elif role == "trainer":
            listener = Inbox(1, 1, 2).listen("127.0.0.1", job)
            stack.callback(listener.close)
        else:
            listener = Service(f"{role} 1", lambda *_: [], greeting=job)
            stack.callback(listener.close)
        for number in (0, 1):
            meant = job.of(f"{role} {number}")
            with monitored(listener.address, meant) as ending:
                is_good = ending() == zmq.EVENT_HANDSHAKE_SUCCEEDED
            assert is_good == (number == 1)


def pose_as_a_server(other):
    """Listen as a server that has died; show the proof that comes to another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready {listener.getsockname()[1]} ", flush=True)
        connection, _ = listener.accept()
        plain = b"PLAIN".ljust(20, b"\0")
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\3\1" + plain + b"\1" + bytes(31))
        got = b""
        while b"\5HELLO" not in got or len(got) < 64 + 110:
            got += connection.recv(4096)
        proof, parts = got[got.index(b"\5HELLO") + 6 :], []
        for _ in range(2):
            parts.append(proof[1 : 1 + proof[0]])
            proof = proof[1 + proof[0] :]
        stolen = dict(zip((zmq.PLAIN_USERNAME, zmq.PLAIN_PASSWORD), parts, strict=True))
        ended = ending_of(other, stolen, DEADLINE_S)
        print("accepted" if ended == zmq.EVENT_HANDSHAKE_SUCCEEDED else "rejected")


@AS_ANOTHER_USER
@pytest.mark.multiprocess
def test_a_proof_shown_to_a_stranger_is_rejected_by_all_others(monkeypatch, processes):
    set_token(monkeypatch, OURS)
    with serving(name="embedding server 1") as other:
        stranger = processes.start("stranger", be_stranger, pose_as_a_server, other)
        stranger.has_printed("ready ")
        port = stranger.output().split()[1]
        addresses = [f"tcp://127.0.0.1:{port}", other]
        with contextlib.closing(Connections("embedding server", addresses)) as client:
            assert submit(client, 1) == b'"answer"'
            assert stranger.status() == 0, stranger.output()
    assert stranger.output().endswith("rejected\n")
