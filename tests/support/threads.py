"""Calls that run beside a test, each in a thread of its own."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from tests.support.servers import DEADLINE_S

T = TypeVar("T")


class InThread(threading.Thread, Generic[T]):
    """A call that has begun; the test gets its result, or its exception."""

    def __init__(self, call: Callable[..., T], *arguments: object) -> None:
        super().__init__(daemon=True)
        self._call, self._arguments = call, arguments
        self._ended: Future[T] = Future()
        self.start()

    def run(self) -> None:
        try:
            self._ended.set_result(self._call(*self._arguments))
        except BaseException as exc:  # noqa: BLE001  # raised by result()
            self._ended.set_exception(exc)

    def still_waits(self) -> bool:
        """Return whether it has not ended a moment later."""
        self.join(0.1)
        return self.is_alive()

    def result(self, timeout_s: float = DEADLINE_S) -> T:
        """Wait for its end."""
        return self._ended.result(timeout_s)


def all_at_once(call: Callable[..., T], arguments: Iterable[object]) -> list[T]:
    """Call a function with each argument, each in a thread; return the results."""
    threads = [InThread(call, argument) for argument in arguments]
    return [thread.result() for thread in threads]
