"""Batches that data loaders have sent and the trainer has not taken yet.

Each loader has a queue of its own, bounded: a loader that is ahead waits, and never
takes the place of one that is behind. A loader numbers its batches

    loader, loader + num_loaders, loader + 2 * num_loaders, ...

so the next batch in the order of the numbers is always at the head of a known queue,
and a trainer that wants that order (``in_order``) needs no sorting.
"""

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from persia_torchrec.errors import DataflowError

B = TypeVar("B")


class Inbox(Generic[B]):
    """Queues of batches, one a loader. Any thread may call any method.

    Args:
        capacity: batches of one loader that may wait.
        rank: of this trainer, which gets the batches ``rank + n * world_size``.
        world_size: number of trainers.
    """

    def __init__(self, capacity: int, rank: int, world_size: int) -> None:
        self._capacity = capacity
        self._world_size = world_size
        self._changed = threading.Condition()
        self._queues: dict[int, deque[B]] = {}  # guarded by _changed
        self._ended: set[int] = set()  # guarded by _changed
        self._num_loaders: int | None = None  # guarded by _changed
        self._next_batch = rank  # guarded by _changed

    def put(self, loader: int, num_loaders: int, batch: B, timeout_s: float) -> bool:
        """Add a batch; wait for room up to ``timeout_s``, and return whether it came.

        Raises:
            DataflowError: the loaders do not agree on how many they are.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._learn(num_loaders)
            waiting = self._queues.setdefault(loader, deque())
            while len(waiting) >= self._capacity:
                if not self._changed.wait(deadline - time.monotonic()):
                    return False
            waiting.append(batch)
            self._changed.notify_all()
        return True

    def end(self, loader: int, num_loaders: int) -> None:
        """Note that a loader has no more batches."""
        with self._changed:
            self._learn(num_loaders)
            self._ended.add(loader)
            self._changed.notify_all()

    def take(self, timeout_s: float, *, in_order: bool) -> B | None:
        """Return the next batch, or None when all loaders have ended.

        Args:
            timeout_s: seconds to wait.
            in_order: in the order of the batches' numbers; otherwise as they came.

        Raises:
            DataflowError: nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                loader = self._next_in_order() if in_order else self._any_loader()
                if loader is not None:
                    break
                if self._is_over():
                    return None
                if not self._changed.wait(deadline - time.monotonic()):
                    raise DataflowError(
                        f"A data loader must send a batch within {timeout_s:g} s. "
                        f"Received: nothing. Ended: {len(self._ended)} of "
                        f"{self._num_loaders or 'an unknown number of'} loaders."
                    )
            batch = self._queues[loader].popleft()
            self._next_batch += self._world_size
            self._changed.notify_all()
            return batch

    def _learn(self, num_loaders: int) -> None:
        if self._num_loaders not in (None, num_loaders):
            raise DataflowError(
                f"Data loaders must agree on their number. Received: {num_loaders}, "
                f"and {self._num_loaders} before."
            )
        self._num_loaders = num_loaders

    def _next_in_order(self) -> int | None:
        # Once around, at most: when loaders and trainers have a common divisor, the
        # numbers of this trainer never come to some of the loaders.
        num_loaders = self._num_loaders or 0
        for _ in range(num_loaders):
            loader = self._next_batch % num_loaders
            if self._queues.get(loader):
                return loader
            if loader not in self._ended:
                return None
            # This loader had fewer batches: the number does not exist.
            self._next_batch += self._world_size
        return None

    def _any_loader(self) -> int | None:
        # The one that waits with most batches, so that none is kept waiting for long.
        fullest = max(self._queues, key=lambda n: len(self._queues[n]), default=None)
        return fullest if fullest is not None and self._queues[fullest] else None

    def _is_over(self) -> bool:
        return len(self._ended) == self._num_loaders and not any(self._queues.values())
