"""Memory that the system does not give: the log says why once, and TCP carries all."""

import contextlib
import ctypes
import logging
import os
import re
import resource
import struct
import threading
from pathlib import Path

import pytest

from persia_torchrec.rpc.greeting import NO_JOB
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind
from persia_torchrec.rpc.peers import Peers
from tests.support.servers import DEADLINE_S

MIB = 2**20
NOBODY = 65534
_MEMFD_CREATE, _SOCKET = 319, 41  # of x86-64
_UNIX = 1

pytestmark = pytest.mark.multiprocess
NEEDS_SECCOMP = pytest.mark.skipif(
    "Seccomp:" not in Path("/proc/self/status").read_text(),
    reason="the kernel has no seccomp",
)


def deny(call, first_argument=None):
    """Have a system call fail with EPERM, as the seccomp profile of a container may.

    With a ``first_argument``, only where it has that.
    """
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    number_at, argument_at = 0, 16  # of struct seccomp_data
    program = [(load, 0, 0, number_at), (jump_if_equal, 0, 1, call)]
    if first_argument is not None:
        program[1] = (jump_if_equal, 0, 3, call)
        program += [(load, 0, 0, argument_at), (jump_if_equal, 0, 1, first_argument)]
    program += [(give_back, 0, 0, 0x50000 | 1), (give_back, 0, 0, 0x7FFF0000)]
    packed = b"".join(struct.pack("<HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(packed)
    head = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.c_char_p(head), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp")


@contextlib.contextmanager
def limited(kind, value):
    """Limit a resource of this process for a while."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def another_user():
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def answer(_, frames):
    """Answer with what was asked, once that is so."""
    if frames[1] == b"no descriptors":
        free = os.dup(0)  # the lowest number that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, 4096))
    elif frames[1] == b"many descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    return [bytes(frame) for frame in frames[1:]]


def serve(what):
    """Answer clients, in a process that may not have what it needs for memory."""
    if what == "no memfd_create":
        deny(_MEMFD_CREATE)
    elif what == "no Unix sockets":
        deny(_SOCKET, _UNIX)
    with limited(resource.RLIMIT_FSIZE, MIB if what == "small files" else -1):
        service = Service("echo", answer)
        print("ready", service.address, flush=True)
        threading.Event().wait(DEADLINE_S)
        service.close()


def ask(address, what):
    """Share memory, in a process that may not map it, and ask for an echo."""
    logging.basicConfig()
    with contextlib.closing(
        Peers("echo", [address], DEADLINE_S, NO_JOB, transport="shm")
    ) as peers:
        peers.send(0, Header(Kind.LOOKUP), [b"x"], "echo").frames()
        used = int(Path("/proc/self/statm").read_text().split()[0])
        room = used * resource.getpagesize() + 32 * MIB
        without = {
            "no address space": lambda: limited(resource.RLIMIT_AS, room),
            "another user": another_user,
        }
        with without[what]():
            peers.share_memory()
        (reply,) = peers.send(0, Header(Kind.LOOKUP), [b"y"], "echo").frames()[1:]
        memory = peers.connections[0].memory
        print("received", bytes(reply), "by", memory, flush=True)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        pytest.param(
            *("no memfd_create", r"no memory for it: \[Errno 1\]"), marks=NEEDS_SECCOMP
        ),
        pytest.param(
            *("no Unix sockets", r"no Unix socket \(\[Errno 1\]"), marks=NEEDS_SECCOMP
        ),
        ("small files", r"no memory for it: \[Errno 27\] File too large"),
    ],
)
def test_a_server_without_memory_is_reached_over_tcp(processes, caplog, what, why):
    server = processes.start("server", serve, what)
    server.has_printed("ready ")
    address = server.output().partition("ready ")[2].split()[0]
    peers = Peers("echo", [address], DEADLINE_S, NO_JOB, transport="shm")
    with contextlib.closing(peers):
        peers.share_memory()
        (reply,) = peers.send(0, Header(Kind.LOOKUP), [b"x"], "echo").frames()[1:]
        assert bytes(reply) == b"x"
        assert peers.connections[0].memory is None
    said = [r.message for r in caplog.records if "is reached over TCP" in r.message]
    assert len(said) == 1
    assert re.search(why, said[0]), said


def test_a_server_without_descriptors_sends_those_away_that_wait(processes, caplog):
    server = processes.start("server", serve, "nothing")
    server.has_printed("ready ")
    address = server.output().partition("ready ")[2].split()[0]
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(
                contextlib.closing(
                    Peers("echo", [address], DEADLINE_S, NO_JOB, transport="shm")
                )
            )
            for _ in range(3)
        ]

        def send(number, body):
            reply = peers[number].send(0, Header(Kind.LOOKUP), [body], "echo")
            assert bytes(reply.frames()[1]) == body

        for number in range(3):  # all are connected
            send(number, b"x")
        peers[0].share_memory()
        send(0, b"no descriptors")
        for number in (1, 2):
            peers[number].share_memory()
            send(number, b"y")
        send(0, b"many descriptors")
        peers[1].share_memory()
        shared = [each.connections[0].memory is not None for each in peers]
        assert shared == [True, True, False]
    said = [r.message for r in caplog.records if "is reached over TCP" in r.message]
    assert len(said) == 2
    sent_away = r"Connection reset|hung up|Too many open files"
    assert all(re.search(sent_away, one) for one in said), said


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no address space", "Cannot allocate memory"),
        pytest.param(
            *("another user", "it belongs to another user"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two"),
        ),
    ],
)
def test_a_client_that_gets_no_memory_asks_over_tcp(processes, what, why):
    with contextlib.closing(Service("echo", answer)) as service:
        client = processes.start("client", ask, service.address, what)
        assert client.status() == 0, client.output()
    said = client.output()
    assert said.count("is reached over TCP") == 1
    assert why in said
    assert "received b'y' by None" in said
    assert "Traceback" not in said
