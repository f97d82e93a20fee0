"""TCP ports of this host, its addresses, and how many sockets a process may have.

A host is an IPv4 address, an IPv6 address, or a name. A name that has both means the
IPv4 one. In an address, an IPv6 one stands in brackets: ``tcp://[fd00::2]:7000``.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.env import MAX_PORT, is_loopback
from persia_torchrec.errors import ConfigError, DiscoveryError

LOOPBACK = "127.0.0.1"

NO_DESCRIPTORS = errno.EMFILE, errno.ENFILE

_BACKLOG = 1024  # the kernel lowers it to net.core.somaxconn
_MAX_DESCRIPTORS = 2**20  # programs that close all they could have would take minutes
_SIOCGIFADDR = 0x8915


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port that is free just now: where possible, listen on 0 instead."""
    with open_listening(address) as probe:
        return int(probe.getsockname()[1])


def free_port_from(first: int, step: int = 1) -> int:
    """Return the first of ``first``, ``first + step``, ... that is free just now."""
    with reserved_port_from(first, step) as port:
        return port


@contextlib.contextmanager
def reserved_port_from(first: int, step: int = 1) -> Iterator[int]:
    """Reserve the first free port from ``first`` on for a process yet to start.

    Within the block :func:`free_port_from` skips it, in all processes, while ZeroMQ and
    c10d can listen on it: they share a port with sockets that do not listen.
    """
    if not 1 <= first <= MAX_PORT or step < 1:
        raise ConfigError(
            f"A port must be in [1, {MAX_PORT}] and a step >= 1. "
            f"Received: {first} and {step}."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        for port in range(first, MAX_PORT + 1, step):
            with contextlib.suppress(OSError):  # in use, or below 1024
                holder.bind(("", port))
                break
        else:
            raise ConfigError(
                f"A port from {first} in steps of {step} must be free. None is."
            )
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port


def open_listening(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket that listens, for one process after another to accept from.

    While none does, connections to it wait, and none is rejected. ``host`` may be in
    brackets; "*" or nothing is all addresses of this machine, IPv4 and IPv6.
    """
    host = host.strip("[]")
    if host not in ("", "*"):
        family = family_of(host)
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=_BACKLOG)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
    )


def family_of(host: str) -> socket.AddressFamily:
    """Return how a host is reached: by IPv4 unless it has an IPv6 address alone.

    An unknown name is a ``socket.gaierror``.
    """
    with contextlib.suppress(ValueError):
        is_4 = ipaddress.ip_address(host).version == 4
        return socket.AF_INET if is_4 else socket.AF_INET6
    found = {one[0] for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6


def join_address(host: str, port: int | str) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host.strip("[]") else f"{host}:{port}"


def tcp_address(address: str) -> str:
    """Return an address as ZeroMQ expects it; PERSIA writes ``host:port``.

    Blanks, as in the ``"localhost: 8888"`` of PERSIA's documentation, are removed.

    Example:
        >>> tcp_address("10.0.0.1:7000"), tcp_address("tcp://10.0.0.1:7000")
        ('tcp://10.0.0.1:7000', 'tcp://10.0.0.1:7000')
    """
    address = "".join(address.split())
    return address if "://" in address else f"tcp://{address}"


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address, or None."""
    if ":" in address:
        number = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(number):
                return line.split()[-1]
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def bind_gloo(host: str) -> None:
    """Have gloo connect by the interface of an address, unless the user names one.

    By itself it takes the one that has the address of the host's name, which may be the
    loopback interface.
    """
    name = interface_of(host)
    if name is not None and env.text("GLOO_SOCKET_IFNAME") is None:
        env.set_variable("GLOO_SOCKET_IFNAME", name)


def local_address(towards: str) -> str:
    """Return the address of the interface that routes to a host; nothing is sent."""
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        family, _, _, _, peer = min(found, key=lambda one: one[0] != socket.AF_INET)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            address = str(probe.getsockname()[0])
    except OSError as exc:
        raise DiscoveryError(
            f"A route to the host {towards!r} must exist. Received: {exc}."
        ) from exc
    return LOOPBACK if ipaddress.ip_address(address).is_loopback else address


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    most = min(most, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def has_descriptors() -> bool:
    """Return whether this process can open one more file or socket."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        return exc.errno not in NO_DESCRIPTORS
    return True


def no_descriptors() -> str:
    """Return what is to be said when this process can open no file or socket."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process has no file descriptor left, of {limit} (ulimit -n). Raise the "
        "limit, or close what is not needed."
    )


def require_token(host: str, token: str | None, name: str = "PERSIA_JOB_TOKEN") -> None:
    """Raise ConfigError for an address to listen on where clients prove nothing."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{name}_FILE, or {name}, must be set to listen on another address than "
            f"{LOOPBACK}. Received: {host or 'all addresses'}, and no token. Make one "
            "by `(umask 077; openssl rand -hex 32 > FILE)`, for all who connect."
        )
