"""What happens to processes that can open no file or socket more."""

import contextlib
import errno
import os
import resource
import socket
from contextlib import closing

import pytest
import zmq

from persia_torchrec.errors import RequestTimeoutError, ServerError
from persia_torchrec.rpc import connection
from persia_torchrec.rpc.addresses import raise_descriptor_limit
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Header, Kind
from tests.support.processes import DEADLINE_S


@contextlib.contextmanager
def no_descriptors():
    """Let this process open nothing; what is open stays so."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_client_without_descriptors_reports_it_and_blames_no_address():
    with (
        no_descriptors(),
        pytest.raises(ServerError, match=r"no file descriptor left, of \d+ \(ulimit"),
    ):
        Connections("server", ["tcp://127.0.0.1:7000"])


def ask(connections):
    header = Header(Kind.HELLO)
    return connections[0].send(header, [b""], timeout_s=0.3, what="a question")


def test_a_request_that_fails_without_descriptors_reports_it():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        # Where nobody listens ZeroMQ closes a socket again and again.
        with (
            closing(Connections("server", [address])) as open_one,
            closing(silent.accept()[0]),
            no_descriptors(),
            pytest.raises(RequestTimeoutError) as caught,
        ):
            ask(open_one).frames()
        assert "no file descriptor left" in str(caught.value)
        assert "address" not in str(caught.value)


def test_a_server_that_accepts_no_connection_reports_it_and_is_not_blamed(caplog):
    with closing(Listener("127.0.0.1", 0)) as listener:
        with closing(Connections("server", [listener.address])) as connections:
            reply = ask(connections)  # connected, but never answered
            with no_descriptors():
                listener.wait(0)
                listener.wait(0)
            with pytest.raises(RequestTimeoutError, match="out of descriptors"):
                reply.frames()
        said = [line for line in caplog.messages if "cannot accept" in line]
        assert len(said) == 1
        assert "no file descriptor left" in said[0]


def test_a_role_may_open_as_many_files_as_it_is_allowed_to():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        pytest.skip("this machine allows too few files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1023, hard))
        raise_descriptor_limit()
        raised, same_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert same_hard == hard
        assert raised == hard or raised == 2**20 < hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_a_socket_cannot_be_opened_again_no_request_waits(monkeypatch):
    def fail(*_):
        raise zmq.ZMQError(errno.EMFILE)

    with (
        closing(Listener("127.0.0.1", 0)) as lost,
        closing(Listener("127.0.0.1", 0)) as other,
        closing(Connections("server", [lost.address, other.address])) as connections,
    ):
        replies = [
            one.send(Header(Kind.HELLO), [b""], timeout_s=DEADLINE_S, what="it")
            for one in connections
        ]
        for listener in (lost, other):
            assert listener.receive(1000 * int(DEADLINE_S)) is not None
        monkeypatch.setattr(connection, "TcpTransport", fail)
        lost.close()
        with pytest.raises(ServerError, match="the connection was lost"):
            replies[0].result(DEADLINE_S)
        with pytest.raises(ServerError, match="the I/O thread died"):
            replies[1].result(DEADLINE_S)
