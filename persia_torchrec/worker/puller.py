"""Pulls that begin in their order and are waited for side by side."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from persia_torchrec.errors import PersiaError, StalenessError

CLOSED = "The embedding pipeline is closed."

_MAX_STARTED = 4096
"""Pulls that may wait for their turn."""

Result = TypeVar("Result")


class Puller:
    """Runs pulls: one thread lets them begin in their order, others wait for them.

    Permits are taken by the first thread. If each pull took its own, a later batch
    could get the permit that an earlier one needs, and the trainer, which waits for
    the earlier one, would never give it back.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(_MAX_STARTED)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._num_threads = 1  # guarded by _lock
        # guarded by _lock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def set_num_threads(self, num: int) -> None:
        """Change how many pulls may be under way at once; waits for those that are."""
        with self._lock:
            if num == self._num_threads:
                return
            self._pool.shutdown(wait=True)
            self._pool = ThreadPoolExecutor(num, thread_name_prefix=self._name)
            self._num_threads = num

    def submit(
        self,
        begin: Callable[[], None],
        pull: "Callable[[], Result]",
        future: "Future[Result]",
    ) -> "Future[Result]":
        """Have both called: ``begin`` in order, then ``pull`` when it may.

        Args:
            begin: waits until the pull may begin.
            pull: does it.
            future: gets the result, or the error of either.

        Returns:
            The same future.

        Raises:
            StalenessError: too many pulls wait for their turn.
        """

        def job() -> None:
            try:
                if self._closing.is_set():
                    raise PersiaError(CLOSED)
                begin()
                with self._lock:
                    self._pool.submit(_fulfil, future, pull)
            except Exception as exc:  # noqa: BLE001  # handed to whoever waits
                future.set_exception(exc)

        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise StalenessError(
                f"At most {_MAX_STARTED} batches can be started ahead of the one that "
                "waits. Does every training batch get its backward pass?"
            ) from None
        return future

    def close(self) -> None:
        """Refuse the pulls that have not begun, and end the threads."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread wakes by itself
            self._jobs.put_nowait(lambda: None)

    def _run(self) -> None:
        while not (self._closing.is_set() and self._jobs.empty()):
            self._jobs.get()()
        self._pool.shutdown(wait=False)


def _fulfil(future: "Future[Result]", call: "Callable[[], Result]") -> None:
    try:
        future.set_result(call())
    except Exception as exc:  # noqa: BLE001  # handed to whoever waits
        future.set_exception(exc)
