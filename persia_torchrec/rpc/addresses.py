"""TCP ports of this host, and the addresses under which others reach it."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator

from persia_torchrec import env
from persia_torchrec.env import MAX_PORT, is_loopback
from persia_torchrec.errors import ConfigError, DiscoveryError

LOOPBACK = "127.0.0.1"

_BACKLOG = 1024  # the kernel lowers it to net.core.somaxconn
_SIOCGIFADDR = 0x8915


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port that is free just now: where possible, listen on 0 instead."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
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

    While none does, connections to it wait, and none is refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


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
    """Return the name of the interface that has an IPv4 address, or None."""
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


def require_token(host: str, token: str | None, name: str = "PERSIA_JOB_TOKEN") -> None:
    """Raise ConfigError for an address to listen on where clients prove nothing."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{name}_FILE, or {name}, must be set to listen on another address than "
            f"{LOOPBACK}. Received: {host or 'all addresses'}, and no token. Make one "
            "by `(umask 077; openssl rand -hex 32 > FILE)`, for all who connect."
        )
