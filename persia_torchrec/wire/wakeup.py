"""Wake a thread that waits for sockets, from any other thread."""

import contextlib
import os
import threading


class Wakeup:
    """A pipe that becomes readable when :meth:`wake` is called.

    One thread waits for it, drains and closes; any thread may wake it.

    Attributes:
        fd: file descriptor to be polled together with sockets.
    """

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        self._lock = threading.Lock()
        self._is_awake = False  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    def wake(self) -> None:
        """Wake the thread; does nothing if it has been woken already, or is gone."""
        with self._lock:
            if not self._is_awake and not self._is_closed:
                os.write(self._writer, b"\0")
                self._is_awake = True  # last: a signal may interrupt its thread here

    def drain(self) -> None:
        """Get ready to be woken again; call it before looking for what to do."""
        with self._lock:
            if self._is_awake and not self._is_closed:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.fd, 64)
                self._is_awake = False

    def close(self) -> None:
        """Close both ends. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._writer)
                os.close(self.fd)
