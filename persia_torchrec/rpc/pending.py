"""What connections remember: of a request, and of a server that does not answer it."""

import math
import time
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from persia_torchrec.rpc.messages import Frame, Frames, Header

_GRACE_S = 5.0  # a reply that is later than its deadline: the I/O thread is dead


class Reply(Future[tuple[Header, Frames]]):
    """A reply to come within ``timeout_s``; it cannot be cancelled.

    The time in which its server is away, ``recovery_s`` at most, does not count.
    """

    def __init__(
        self,
        timeout_s: float,
        server: int = 0,
        what: str = "",
        *,
        recovery_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self.recovery_s = recovery_s
        self.server = server
        self.what = what
        self.begun_s, self.incarnation = time.monotonic(), 0
        # Of the connections, guarded by their lock: what is sent again; what is left
        # of the timeout while the server is away; the deadline while it is not.
        self.message: list[Frame] = []
        self.left_s = timeout_s
        self.deadline_s = math.inf
        self.set_running_or_notify_cancel()  # from here on, cancel() does nothing

    def frames(self, within_s: float | None = None) -> Frames:
        """Wait for the reply, ``within_s`` at most if given; return its frames."""
        most_s = self.timeout_s + self.recovery_s + _GRACE_S
        return self.result(most_s if within_s is None else within_s)[1]


@dataclass(slots=True)
class Away:
    """Since when a server is away, the HELLO it was sent, and when it gets the next.

    ``address`` is where it is now, if it has moved.
    """

    since_s: float
    hello: int = -1
    hello_s: float = math.inf
    address: str = ""


@dataclass(slots=True)
class Silence:
    """When a server has sent something, and how long a silence was said last."""

    heard_s: float = 0.0
    said_s: float = 0.0


class Told(msgspec.Struct):
    """What is read of a reply to HELLO."""

    incarnation: int = 0
