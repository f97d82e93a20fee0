"""The sockets of ``Connections``: one a server, its monitor, and what else is polled.

The I/O thread owns all of it. What is ready is handled in the order in which it was
given; something that has gone meanwhile is not.
"""

import itertools
from collections.abc import Callable
from typing import Any

import zmq
import zmq.utils.monitor

from persia_torchrec.rpc import auth
from persia_torchrec.rpc.channel import open_socket

_MADE = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_CHANGES = zmq.EVENT_DISCONNECTED | _MADE | auth.REJECTIONS
_OPTIONS: auth.Options = {
    zmq.SNDHWM: 0,  # the number of requests without a reply is bounded
    zmq.SNDTIMEO: 0,  # of one that ZeroMQ has given up
    zmq.RECONNECT_IVL_MAX: 1000,
}
_monitor_numbers = itertools.count()


class Sockets:
    """Sockets by server, and descriptors, each with what handles it."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}

    def __getitem__(self, server: int) -> "zmq.Socket[bytes]":
        return self._sockets[server]

    def handle(self, source: Any, handler: Callable[[], None]) -> None:
        """Have something polled, and handled."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def forget(self, source: Any) -> None:
        """Have something polled no more."""
        del self._handlers[source]
        self._poller.unregister(source)

    def poll(self, timeout_ms: int, always: int) -> None:
        """Handle what is ready, or ``always`` if nothing is."""
        for source, _ in self._poller.poll(timeout_ms) or [(always, 0)]:
            if handler := self._handlers.get(source):
                handler()

    def open(
        self,
        server: int,
        address: str,
        options: auth.Options,
        receive: Callable[[], None],
        notice_change: Callable[[], None],
    ) -> None:
        """Connect to a server; what comes over the socket is handled in its order."""
        options = {**_OPTIONS, **options}
        socket = self._sockets[server] = open_socket(zmq.DEALER, options)
        name = (
            f"inproc://changes/{next(_monitor_numbers)}"  # the socket's own is reused
        )
        monitor = self._monitors[server] = socket.get_monitor_socket(_CHANGES, name)
        self.handle(socket, receive)
        self.handle(monitor, notice_change)
        socket.connect(address)

    def change(self, server: int) -> tuple[int, int]:
        """Take an event of a server's monitor, and its value."""
        change = zmq.utils.monitor.recv_monitor_message(self._monitors[server])
        return change["event"], change["value"]

    def close(self, server: int) -> None:
        """Close the socket of a server."""
        socket, monitor = self._sockets.pop(server), self._monitors.pop(server)
        for source in (socket, monitor):
            self.forget(source)
        socket.disable_monitor()
        monitor.close()
        socket.close(linger=0)

    def servers(self) -> list[int]:
        """Return those that have a socket."""
        return list(self._sockets)
