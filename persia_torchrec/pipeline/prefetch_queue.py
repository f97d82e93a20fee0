"""Jobs that begin in their order, and run side by side."""

import threading
from collections import deque
from typing import Protocol

from persia_torchrec.errors import PersiaError, StalenessError
from persia_torchrec.pipeline.staleness import CLOSED

_MAX_WAITING = 4096
"""Jobs that may wait for their turn."""


class Job(Protocol):
    """What a queue runs. The queue's threads call the methods."""

    def begin(self) -> None:
        """Wait until it may run; no later job begins before."""

    def run(self) -> None:
        """Do it."""

    def fail(self, error: Exception) -> None:
        """Take the error of either, or of a queue that is closed."""


class PrefetchQueue:
    """Runs jobs in threads. Any thread may call any method.

    One thread at a time takes the oldest job and lets it begin. If each job waited for
    itself, a later batch could get the permit that an earlier one needs, and the
    trainer, which waits for the earlier one, would never give it back.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()  # of the thread that lets a job begin
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()  # guarded by _changed
        self._max_threads = 1  # guarded by _changed
        self._num_threads = 0  # guarded by _changed
        self._is_closing = False  # guarded by _changed

    def set_num_threads(self, num: int) -> None:
        """Change how many jobs may run at once; those that run are not ended."""
        with self._changed:
            self._max_threads = num
            self._changed.notify_all()
            if self._jobs:
                self._start_threads()

    def submit(self, job: Job) -> None:
        """Have a job run.

        Raises:
            StalenessError: too many jobs wait for their turn.
        """
        with self._changed:
            if len(self._jobs) >= _MAX_WAITING:
                raise StalenessError(
                    f"At most {_MAX_WAITING} batches can be started ahead of the one "
                    "that waits. Does every training batch get its backward pass?"
                )
            self._jobs.append(job)
            if self._num_threads < self._max_threads:
                self._start_threads()
            self._changed.notify()

    def close(self) -> None:
        """Refuse the jobs that have not begun, and end the threads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _start_threads(self) -> None:
        for index in range(self._num_threads, self._max_threads):
            name = f"{self._name} {index}"
            threading.Thread(
                target=self._run, args=(index,), name=name, daemon=True
            ).start()
        self._num_threads = max(self._num_threads, self._max_threads)

    def _run(self, index: int) -> None:
        while True:
            job: Job | None = None  # what is waited for next must not keep this one
            try:
                with self._turn:
                    job = self._next(index)
                    if job is None:
                        return
                    job.begin()
                job.run()
            except Exception as exc:  # noqa: BLE001  # raised by what waits for the job
                assert job is not None
                job.fail(exc)

    def _next(self, index: int) -> Job | None:
        """Wait for a job; return None if the thread is one too many, or to end."""
        with self._changed:
            while True:
                if index >= self._max_threads:
                    self._num_threads -= 1
                    return None
                if self._jobs:
                    job = self._jobs.popleft()
                    if not self._is_closing:
                        return job
                    job.fail(PersiaError(CLOSED))
                elif self._is_closing:
                    return None
                else:
                    self._changed.wait()
