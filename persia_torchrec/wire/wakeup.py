"""Wake a thread that waits for sockets, from any other thread."""

import itertools
import threading

import zmq

_numbers = itertools.count()


class Wakeup:
    """A socket that becomes readable when :meth:`wake` is called.

    One thread waits for ``socket``, drains and closes; any thread may wake it.

    Attributes:
        socket: to be polled together with others.
    """

    def __init__(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        name = f"inproc://wakeup-{next(_numbers)}"
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(name)
        self._lock = threading.Lock()
        self._sender = context.socket(zmq.PUSH)  # guarded by _lock
        self._sender.connect(name)
        self._is_awake = False  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    def wake(self) -> None:
        """Wake the thread; does nothing if it has been woken already, or is gone."""
        with self._lock:
            if not self._is_awake and not self._is_closed:
                self._is_awake = True
                self._sender.send(b"")

    def drain(self) -> None:
        """Get ready to be woken again; call it before looking for what to do."""
        while self.socket.poll(0):
            self.socket.recv()
        # Only now: a wake that came meanwhile sent nothing, and its work is seen next.
        with self._lock:
            self._is_awake = False

    def close(self) -> None:
        """Close both ends. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._sender.close(linger=0)
        self.socket.close(linger=0)
