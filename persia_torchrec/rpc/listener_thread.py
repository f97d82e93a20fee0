"""Listeners with a thread of their own that answers requests."""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from persia_torchrec import env
from persia_torchrec.errors import PersiaError
from persia_torchrec.rpc.addresses import LOOPBACK
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.listener import Listener, ListenerLimits
from persia_torchrec.rpc.messages import Frames, Header, Kind, error_frames
from persia_torchrec.rpc.slab_server import DEFAULT_MIB
from persia_torchrec.rpc.sockets import require_sendable

logger = logging.getLogger(__name__)

Handler = Callable[[Header, Frames], Frames]  # a request to the frames of its reply
MAX_WAITING = 1024  # requests to one service; more are rejected (back-pressure)

_POLL_MS = 200


class ListenerThread(ABC):
    """A listener and the thread that owns it, until it is closed.

    ``name`` is whom its clients mean, as ``"embedding worker 0"``, or ``"worker"`` of
    any number. A subclass sets its attributes first: the thread starts here. Where this
    process has a supervisor, its socket is taken.
    """

    limits = ListenerLimits()
    encrypts = False  # whether its connections are encrypted, if there is a token

    def __init__(self, name: str, host: str, port: int, greeting: Greeting) -> None:
        self._listener = Listener(
            host,
            port,
            greeting.of(name),
            fd=env.listen_fd(),
            encrypts=self.encrypts,
            limits=self.limits,
        )
        self.address = self._listener.address
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def shared_memory(self) -> dict[str, int]:
        """Return the counters of the memory that it shares. Any thread may ask."""
        return self._listener.slabs.counters()

    def close(self) -> None:
        """Stop; requests under way are answered first. May be called twice."""
        self._closing.set()
        self._listener.wakeup.wake()
        self._thread.join(timeout=10)

    @abstractmethod
    def _begin(self, peer: bytes, header: Header, frames: Frames) -> None:
        """Answer a request, or have it answered."""

    @abstractmethod
    def _work(self) -> bool:
        """Do what is due after each wait; return whether requests are under way."""

    def _run(self) -> None:
        is_busy = False
        try:
            while is_busy or not self._closing.is_set():
                message = self._listener.receive(_POLL_MS)
                if message is not None:
                    self._begin(*message)
                is_busy = self._work()
        finally:
            self._listener.close()


def make_reply(
    handler: Handler, header: Header, frames: Frames
) -> tuple[Header, Frames]:
    """Return the reply of a handler, or its exception as an error for the client."""
    try:
        reply, kind = handler(header, frames), Kind.REPLY
        require_sendable(reply, f"reply to {header.kind.name}")
    except Exception as exc:  # sent to the client
        if not isinstance(exc, PersiaError):
            logger.exception("a request failed: %s", header)
        reply, kind = error_frames(exc), Kind.ERROR
    return Header(kind, header.request), reply


class Service(ListenerThread):
    """Answer requests that wait for other processes, as those to a worker do.

    The socket's thread takes them, ``num_threads`` others call the handler, and their
    replies return through a queue. ``MAX_WAITING`` requests wait, more are rejected.
    """

    limits = ListenerLimits(shm_bytes=DEFAULT_MIB * 2**20)

    def __init__(
        self,
        name: str,
        handler: Handler,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        num_threads: int = 4,
        greeting: Greeting = NO_JOB,
    ) -> None:
        self._handler = handler
        self._replies: queue.SimpleQueue[tuple[bytes, Header, Frames]] = (
            queue.SimpleQueue()
        )
        self._num_open = 0  # owned by the socket's thread
        self._max_open = num_threads + MAX_WAITING
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        super().__init__(name, host, port, greeting)

    def _run(self) -> None:
        super()._run()
        self._pool.shutdown(wait=False)

    def _begin(self, peer: bytes, header: Header, frames: Frames) -> None:
        if self._num_open >= self._max_open:
            busy = PersiaError(f"{self._max_open} requests are waiting already.")
            self._listener.send_error(peer, header.request, busy)
            return
        try:
            self._pool.submit(self._answer, peer, header, frames)
        except RuntimeError:  # the interpreter is shutting down
            self._closing.set()
            return
        self._num_open += 1

    def _work(self) -> bool:
        while not self._replies.empty():
            self._num_open -= 1
            self._listener.send(*self._replies.get())
        return self._num_open > 0

    def _answer(self, peer: bytes, header: Header, frames: Frames) -> None:
        self._replies.put((peer, *make_reply(self._handler, header, frames)))
        self._listener.wakeup.wake()
