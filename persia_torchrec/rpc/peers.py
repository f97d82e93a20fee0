"""Processes of one role that answer requests: one message to each, and its reply."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from persia_torchrec import env
from persia_torchrec.env import Transport
from persia_torchrec.errors import FrameError, PersiaError, WireError
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.messages import (
    Frame,
    Frames,
    Header,
    Kind,
    SentFrame,
    encode_json,
)
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.rpc.slab_client import obtain

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Peers:
    """Connections to processes of one role. Any thread may call any method.

    ``what`` is always the request in words, for errors. A process that is lost may be
    away for ``recovery_s`` seconds, which no timeout counts, and gets the requests
    again; one that hangs may be silent for as long.
    """

    hint = "Is this the address of another role?"

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        timeout_s: float,
        greeting: Greeting,
        recovery_s: float = 0.0,
        transport: Transport | None = None,
        first: int = 0,
    ) -> None:
        self.transport = env.transport(transport)
        self.timeout_s, self.recovery_s = timeout_s, recovery_s
        when_restarted = weakref.WeakMethod(self.when_restarted)
        self.connections = Connections(
            role,
            addresses,
            greeting=greeting,
            recovery_s=recovery_s,
            when_restarted=lambda peer: _call(when_restarted, peer),
            first=first,
        )
        # Where this is dropped without close(); at exit the thread just ends.
        weakref.finalize(self, self.connections.abandon).atexit = False
        self.names = self.connections.names

    def __len__(self) -> int:
        return len(self.names)

    @property
    def incarnations(self) -> list[int]:
        """Which start of each is meant; 0 is any."""
        return [connection.incarnation for connection in self.connections]

    def send(
        self,
        peer: int,
        header: Header,
        frames: Sequence[SentFrame],
        what: str,
        timeout_s: float | None = None,
        reply_bytes: int = 0,
    ) -> Reply:
        """Send one process a message: the frames after the header."""
        connection = self.connections[peer]
        header = self.numbered(header)
        if not header.incarnation and connection.incarnation:
            header = header._replace(incarnation=connection.incarnation)
        return connection.send(
            header,
            frames,
            timeout_s=timeout_s or self.timeout_s + self.recovery_s,
            what=what,
            reply_bytes=reply_bytes,
        )

    def share_memory(self, *, waits: bool = True) -> None:
        """Share memory with those on this host, now and when they are back.

        Without ``waits`` requests go over TCP until it is there.
        """
        if self.transport == "tcp":
            return
        share = weakref.WeakMethod(self._share)

        def share_again(peer: int) -> None:  # in a thread of its own: it waits
            threading.Thread(
                target=_call, args=(share, peer), name="shared memory", daemon=True
            ).start()

        for peer, connection in enumerate(self.connections):
            connection.when_back = partial(share_again, peer)
            if waits:
                self._share(peer)
            else:
                share_again(peer)

    def _share(self, peer: int) -> None:
        """Share memory with one of them, or log why that cannot be done."""

        def ask(value: dict[str, object], answer: Any) -> Any:
            frames, what = [encode_json(value)], "shared memory"
            reply = self.send(peer, Header(Kind.SLAB), frames, what, self.timeout_s)
            return self.read(peer, reply, answer)

        connection = self.connections[peer]
        # One asks at a time: the memory that a server shares last is all it shares.
        with connection.sharing:
            if connection.memory is not None:
                return
            try:
                memory = obtain(ask)
            except (PersiaError, OSError) as exc:
                if self.connections.is_closed:
                    return
                level = logging.WARNING if self.transport == "shm" else logging.INFO
                logger.log(level, "%s is reached over TCP: %s", self.names[peer], exc)
                return
            if not connection.use(memory):
                memory.close()
                return
        size_mib = memory.slab.size_bytes // 2**20
        logger.info("%s shares %d MiB of memory", self.names[peer], size_mib)

    def numbered(self, header: Header) -> Header:
        """Return the header of a message as it is."""
        return header

    def send_all(
        self,
        header: Header,
        frames: Sequence[SentFrame],
        what: str,
        timeout_s: float | None = None,
    ) -> list[Reply]:
        """Send all of them the same message."""
        peers = range(len(self.names))
        return [self.send(peer, header, frames, what, timeout_s) for peer in peers]

    def ask(
        self,
        kind: Kind,
        value: object,
        what: str,
        *,
        answer: Any = Any,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Send all of them the same JSON value; return the ``answer`` of each."""
        frames = [encode_json(value)]

        def ask() -> list[Any]:
            replies = self.send_all(Header(kind), frames, what, timeout_s)
            return [
                self.read(peer, reply, answer) for peer, reply in enumerate(replies)
            ]

        return self.repeat(ask)

    def repeat(self, request: Callable[[], T]) -> T:
        """Make a request that may be repeated."""
        return request()

    def read(self, peer: int, reply: Reply, answer: Any) -> Any:
        """Wait for the JSON value that a process answers."""
        body, source = body_of(reply.frames()), f"The answer of {self.names[peer]}"
        return parse_json(
            body, answer, source, lambda why: WireError(f"{why} {self.hint}")
        )

    def when_restarted(self, peer: int) -> None:
        """Do nothing: what a process had is not known here."""

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self.connections.close()


def _call(method: Callable[[], Callable[[int], None] | None], peer: int) -> None:
    """Call a method of an object, unless that has been dropped."""
    if (live := method()) is not None:
        live(peer)


def body_of(frames: Frames) -> Frame:
    """Return the one frame after a reply's header."""
    if len(frames) != 2:
        raise FrameError(f"The reply must have 2 frames. Received: {len(frames)}.")
    return frames[1]
