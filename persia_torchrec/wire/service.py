"""A listener whose requests are answered by a few threads.

It is for requests that wait for other processes, as those to an embedding worker do:
one thread owns the socket, a fixed number of others call the handler, and their replies
return through a queue. An embedding server answers with the thread of its socket.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import zmq

from persia_torchrec.errors import PersiaError, WireError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import Frames, Header, Kind, error_frames
from persia_torchrec.wire.transport import Listener, Wakeup, require_sendable

logger = logging.getLogger(__name__)

Handler = Callable[[Header, Frames], Frames]
"""Takes a request, returns the frames of the reply, or raises."""

MAX_WAITING = 1024
"""Requests to one service that may wait; more are rejected (back-pressure)."""

_POLL_MS = 200


class Service:
    """Answer requests with a handler until it is closed.

    Args:
        name: of the threads.
        handler: called from several threads at once.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        num_threads: requests answered at once; ``MAX_WAITING`` further ones wait, and
            more are rejected with an error.
        greeting: of the job whose processes are served.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(
        self,
        name: str,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        num_threads: int = 4,
        greeting: Greeting = NO_JOB,
    ) -> None:
        self._wakeup = Wakeup()
        try:
            self._listener = Listener(host, port, self._wakeup, greeting)
        except WireError:
            self._wakeup.close()
            raise
        self.address = self._listener.address
        self._handler = handler
        self._num_threads = num_threads
        self._replies: queue.SimpleQueue[tuple[bytes, Header, Frames]] = (
            queue.SimpleQueue()
        )
        self._num_open = 0  # owned by the socket's thread
        self._max_open = num_threads + MAX_WAITING
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; requests under way are answered first. May be called twice."""
        self._closing.set()
        self._wakeup.wake()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() and self._num_open == 0):
                self._serve_once()
        except zmq.ZMQError:
            logger.exception("the socket of %s failed", self.address)
        finally:
            self._pool.shutdown(wait=False)
            self._listener.close()
            self._wakeup.close()

    def _serve_once(self) -> None:
        request = self._listener.receive(_POLL_MS)
        self._wakeup.drain()
        if request is not None:
            self._begin(*request)
        while True:
            try:
                peer, header, frames = self._replies.get_nowait()
            except queue.Empty:
                return
            self._num_open -= 1
            self._listener.send(peer, header, frames)

    def _begin(self, peer: bytes, frames: Frames) -> None:
        try:
            header = Header.decode(frames[0])
        except WireError as exc:
            logger.warning("rejected a message: %s", exc)
            self._listener.send_error(peer, 0, exc)
            return
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

    def _answer(self, peer: bytes, header: Header, frames: Frames) -> None:
        try:
            reply = self._handler(header, frames)
            require_sendable(reply, f"reply to {header.kind.name}")
            kind = Kind.REPLY
        except Exception as exc:  # sent to the client
            if not isinstance(exc, PersiaError):
                logger.exception("a request failed: %s", header)
            reply, kind = error_frames(exc), Kind.ERROR
        self._replies.put((peer, Header(kind, header.request), reply))
        self._wakeup.wake()
