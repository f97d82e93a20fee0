"""What carries the requests of ``Connections`` besides TCP, one carrier a server.

A request goes through the server's slab if it fits, and says how many messages over TCP
come before it, which it must not overtake. A lost connection ends both: what is
unanswered is sent again over TCP, or fails, and another slab is obtained later.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from persia_torchrec.errors import WireError
from persia_torchrec.rpc.channel import Reply
from persia_torchrec.rpc.messages import Frame, Frames, Header, Kind, SentFrame
from persia_torchrec.rpc.slab_client import SlabChannel

_SMALL_BYTES = 2**18  # that are copied within some tens of microseconds
_REPLY, _SLAB = (k.to_bytes(2, "little") for k in (Kind.REPLY, Kind.SLAB))
"""Kinds, in a header."""


class Carriers:
    """The slabs of some connections, whose lock and pending requests it is given.

    ``wake`` wakes their I/O thread; ``finish`` takes a reply in any thread, or returns
    False: then it is for the I/O thread, see ``arrivals``. Methods take the lock, save
    where they say that it is held.
    """

    def __init__(
        self,
        num_servers: int,
        lock: threading.Lock,
        pending: Mapping[int, Reply],
        wake: Callable[[], None],
        finish: Callable[[int, int, Frames], bool],
    ) -> None:
        self._lock, self._pending = lock, pending
        self._wake, self._finish = wake, finish
        # Messages over TCP: all, and those before the server read the latest SLAB.
        self._num_over_tcp, self._num_before = [0] * num_servers, [0] * num_servers
        self._carriers: list[SlabChannel | None] = [None] * num_servers
        self._watched: dict[int, int] = {}  # descriptors by server; the I/O thread's
        self.arrived: deque[tuple[int, Frames]] = deque()
        self._io_thread: int | None = None  # which looks for them before it waits

    def __getitem__(self, server: int) -> SlabChannel | None:
        return self._carriers[server]

    def reserve(
        self, server: int, number: int, message: list[SentFrame], reply_bytes: int
    ) -> SlabChannel | None:
        """Return what has a place for a request; None: TCP. The lock is held."""
        carrier, num_before = self._carriers[server], self._num_over_tcp[server]
        if carrier is None or not carrier.reserve(
            number, message, reply_bytes, num_before
        ):
            self.sent_over_tcp(server, message)
            return None
        return carrier

    def announce(self, server: int, frames: Sequence[SentFrame]) -> None:
        """Wake a server, which takes some time, while a small request is prepared."""
        carrier = self._carriers[server]
        if carrier is not None and sum(map(len, frames)) < _SMALL_BYTES:
            carrier.announce()

    def post(self, carrier: SlabChannel, number: int, reply: Reply) -> None:
        """Write a request to its place, and post it unless it has ended meanwhile."""
        try:
            carrier.fill(number, reply.message)
        except BaseException:  # of a device that a late frame is on
            with self._lock:
                carrier.withdraw(number)
            raise
        with self._lock:
            if self._carriers[reply.server] is carrier and number in self._pending:
                reply.carrier = carrier
                carrier.post(number)
            else:  # it failed, or was sent again over TCP
                carrier.withdraw(number)

    def use(self, server: int, carrier: SlabChannel) -> None:
        """Send requests to a server through its memory. The lock is held."""
        carrier.deliver = partial(self.deliver, server, carrier)
        carrier.wake = self._wake
        carrier.first_over_tcp = self._num_before[server]
        self._carriers[server] = carrier

    def sent_over_tcp(self, server: int, message: Sequence[SentFrame]) -> None:
        """Note a message that a server is sent over TCP. The lock is held."""
        self._num_over_tcp[server] += 1
        header = message[0]
        if isinstance(header, bytes) and header[6:8] == _SLAB:
            # The server counts those that come behind it.
            self._num_before[server] = self._num_over_tcp[server]

    def answered_over_tcp(self, server: int, frames: Sequence[Frame]) -> None:
        """Note that a request has its reply, or an error."""
        with self._lock, contextlib.suppress(WireError):
            if (carrier := self._carriers[server]) is not None:
                carrier.settle(Header.decode(frames[0]).request)

    def deliver(self, server: int, carrier: SlabChannel) -> None:
        """Hand over the replies of a slab, in any thread.

        The I/O thread gets errors, and those whose end has callbacks.
        """
        taken = carrier.take()
        for number, frames in taken:
            reply = self._pending.get(number)
            if reply is None:
                continue  # its deadline has passed
            is_plain = frames[0][6:8] == _REPLY and not reply.has_callbacks
            if not (is_plain and self._finish(server, number, frames)):
                reply.carrier = None
                self.arrived.append((server, frames))
                if threading.get_ident() != self._io_thread:
                    self._wake()

    # In the I/O thread

    def to_watch(self) -> Iterator[tuple[int, int, SlabChannel]]:
        """Take replies that no caller waits for; return descriptors that have come."""
        self._io_thread = threading.get_ident()
        for server, carrier in enumerate(self._carriers):
            if carrier is None:
                continue
            if self._watched.get(server) != carrier.fd:
                self._watched[server] = carrier.fd
                yield server, carrier.fd, carrier
            carrier.look()

    def hear(self, carrier: SlabChannel) -> bool:
        """Take replies that have callbacks; return whether the server is there."""
        if carrier.is_lost():
            return False
        carrier.look()
        with self._lock:
            pending = self._pending.values()
            listens = any(r.has_callbacks and r.carrier is carrier for r in pending)
        carrier.listen(listens)
        return True

    def arrivals(self) -> Iterator[tuple[int, Frames]]:
        """Return the replies, with their server, that are for the I/O thread."""
        while self.arrived:
            yield self.arrived.popleft()

    def deliver_rest(self, server: int) -> None:
        """Take the replies of a server that is gone."""
        if (carrier := self._carriers[server]) is not None:
            carrier.deliver()

    def drop(self, server: int) -> int | None:
        """Use no memory of a server any more; return what is no longer watched."""
        with self._lock:
            carrier, self._carriers[server] = self._carriers[server], None
        if carrier is not None:
            carrier.close()
        return self._watched.pop(server, None)
