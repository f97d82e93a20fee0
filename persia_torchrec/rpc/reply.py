"""A reply to come: callers wait for it, whatever carries it."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from persia_torchrec import timeouts
from persia_torchrec.errors import RemoteError
from persia_torchrec.rpc.messages import (
    ErrorReply,
    Frames,
    Header,
    Kind,
    SentFrame,
    decode_json,
)


def read_reply(frames: Frames, name: str) -> tuple[Header, RemoteError | None]:
    """Return the header of a reply of the server ``name``, and its error if it is one.

    Raises:
        FrameError: it is no reply of this protocol.
    """
    header = Header.decode(frames[0])
    if header.kind is not Kind.ERROR:
        return header, None
    text = decode_json(frames, ErrorReply)
    return header, RemoteError(text.message, server=name, kind=text.kind)


class ReplySource(Protocol):
    """Where a caller that waits finds its reply: ``SharedMemoryTransport``."""

    def wait(self, reply: "Reply", stop_s: float) -> None:
        """Wait for a reply in the caller's thread, until a time."""

    def look(self) -> None:
        """Hand over the replies that are there."""

    def listen(self, listens: bool) -> None:
        """Say whether the I/O thread wants to know of each reply."""


class Reply(Future[tuple[Header, Frames]]):
    """A reply to come within ``timeout_s``; it cannot be cancelled.

    The time in which its server is away, ``recovery_s`` at most, does not count.
    """

    def __init__(
        self, timeout_s: float, what: str = "", *, recovery_s: float = 0.0
    ) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.recovery_s = recovery_s
        self.what = what
        self.begun_s, self.incarnation = time.monotonic(), 0
        # Of the connection, guarded by its lock: what is sent again; what is left
        # of the timeout while the server is away; the deadline while it is not.
        self.message: list[SentFrame] = []
        self.left_s = timeout_s
        self.deadline_s = math.inf
        # None: the I/O thread hands it over, as it does where there are callbacks.
        self.source: ReplySource | None = None
        self.has_callbacks = self.was_nudged = False
        self.set_running_or_notify_cancel()  # from here on, cancel() does nothing

    def frames(self, within_s: float | None = None) -> Frames:
        """Wait for the reply, ``within_s`` at most if given; return its frames."""
        most_s = self.timeout_s + self.recovery_s + timeouts.REPLY_GRACE_S
        most_s = most_s if within_s is None else within_s
        source = self.source
        if source is not None and not self.has_callbacks and not super().done():
            stop_s = time.monotonic() + most_s
            source.wait(self, stop_s)
            most_s = max(stop_s - time.monotonic(), 0.0)
        return self.result(most_s)[1]

    def done(self) -> bool:
        """Return whether the reply, or an error, is there."""
        if self.source is not None and not self.has_callbacks and not super().done():
            self.source.look()
        return super().done()

    def has_ended(self) -> bool:
        """Return whether it is done; it is not looked for."""
        return super().done()

    def park(self, most_s: float) -> None:
        """Wait until it is done, or nudged since the last wait."""
        with self._condition:
            if not self.was_nudged and not super().done():
                self._condition.wait(max(most_s, 0.0))
            self.was_nudged = False

    def nudge(self) -> None:
        """End a wait in :meth:`park`."""
        with self._condition:
            self.was_nudged = True
            self._condition.notify_all()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have a function called, as a rule in the I/O thread, once it is done."""
        self.has_callbacks = True
        if self.source is not None:
            self.source.listen(True)
        super().add_done_callback(fn)
