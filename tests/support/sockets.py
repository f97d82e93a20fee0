"""Sockets of tests that speak to a listener without this package's clients."""

import contextlib
import ipaddress
import socket
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from persia_torchrec import env
from persia_torchrec.rpc import auth
from persia_torchrec.rpc.auth import client_options
from persia_torchrec.rpc.messages import Header, Kind
from persia_torchrec.rpc.sockets import open_socket


def member_socket():
    """Return a ZeroMQ socket that proves the job's token to a listener."""
    return open_socket(zmq.DEALER, client_options(env.job_token()))


def raw_member(address, timeout_s):
    """Return a TCP socket after ZeroMQ's handshake by hand, with a proof (PLAIN)."""
    peer = socket.create_connection(address, timeout=timeout_s)
    options = client_options(env.job_token())
    name, digest = options[zmq.PLAIN_USERNAME], options[zmq.PLAIN_PASSWORD]
    proof = bytes([len(name)]) + name + bytes([len(digest)]) + digest
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\3\0PLAIN" + bytes(15 + 32))
    _send_command(peer, b"\5HELLO" + proof)
    welcome = 64 + len(b"\4\x08\7WELCOME")  # after the greeting
    received = b""
    while len(received) < welcome and (more := peer.recv(welcome - len(received))):
        received += more
    assert received[-7:] == b"WELCOME"
    _send_command(peer, b"\x08INITIATE\x0bSocket-Type\0\0\0\6DEALER")
    return peer


def _send_command(peer, body):
    peer.sendall(b"\4" + bytes([len(body)]) + body)


def ending_of(address, options, timeout_s):
    """Return how a connection to a listener ends, on which a request waits."""
    socket = open_socket(zmq.DEALER, {**options, zmq.LINGER: 0})
    events = auth.REJECTIONS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    monitor = socket.get_monitor_socket(events)
    socket.connect(address)
    with contextlib.suppress(zmq.Again):  # ZeroMQ has given the socket up already
        socket.send_multipart([Header(Kind.HELLO, 1).encode(), b"null"], zmq.NOBLOCK)
    assert monitor.poll(1000 * timeout_s)
    event = recv_monitor_message(monitor)["event"]
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        assert socket.poll(1000 * timeout_s)
    else:
        assert not socket.poll(0)
    socket.disable_monitor()
    monitor.close()
    socket.close()
    return event


def listening(pids):
    """Return the addresses on which processes listen over TCP, by port."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                link = str(entry.readlink())
                inodes.add(link.removeprefix("socket:[").rstrip("]"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                words = [host[i : i + 8] for i in range(0, len(host), 8)]
                packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                found[int(port, 16)] = str(ipaddress.ip_address(packed))
    return found
