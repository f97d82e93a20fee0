"""What an embedding worker keeps between two messages about the same batch.

    data loader --ids--> IdBuffer --reference--> ...trainer asks for it... --> pulled
    pulled --> AwaitingGradient --...trainer sends the gradient...--> pushed

Both are bounded. The buffer refuses a batch when it is full, so that the loader waits;
a batch that nobody asked for within its time is dropped only then, and is logged.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.config import EmbeddingWorkerSettings
from persia_torchrec.errors import DataflowError
from persia_torchrec.worker.bags import Bags
from persia_torchrec.worker.embedding_worker import RoutedBatch

logger = logging.getLogger(__name__)

_MAX_OPEN = 65536


class IdBuffer:
    """Ids of batches that wait for their trainer. Any thread may call any method.

    Args:
        capacity: batches kept of each data loader.
        expires_s: seconds after which a batch may be dropped if the buffer is full.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        capacity: int,
        expires_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._expires_s = expires_s
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # By loader, oldest first. guarded by _lock
        self._batches: dict[int, OrderedDict[int, tuple[float, dict[str, Bags]]]] = {}

    def put(self, loader: int, bags: dict[str, Bags]) -> int | None:
        """Keep a batch; return its reference, or None when the buffer is full."""
        with self._lock:
            batches = self._batches.setdefault(loader, OrderedDict())
            if len(batches) >= self._capacity:
                self._drop_expired(loader, batches)
            if len(batches) >= self._capacity:
                return None
            reference = next(self._numbers)
            batches[reference] = (self._clock(), bags)
            return reference

    def peek(self, loader: int, reference: int) -> dict[str, Bags]:
        """Return a batch and keep it, so that a failed pull can be tried again.

        Raises:
            DataflowError: there is no such batch (any more).
        """
        with self._lock:
            batches = self._batches.get(loader)
            entry = batches.get(reference) if batches else None
        if entry is None:
            raise DataflowError(
                f"Batch {reference} of data loader {loader} must be in this embedding "
                "worker's buffer. It was never sent here, was taken before, or waited "
                f"for more than buffered_data_expired_sec ({self._expires_s:g} s)."
            )
        return entry[1]

    def remove(self, loader: int, reference: int) -> None:
        """Forget a batch."""
        with self._lock:
            if loader in self._batches:
                self._batches[loader].pop(reference, None)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(batches) for batches in self._batches.values())

    def _drop_expired(
        self, loader: int, batches: "OrderedDict[int, tuple[float, dict[str, Bags]]]"
    ) -> None:
        latest = self._clock() - self._expires_s
        expired = [number for number, (since, _) in batches.items() if since < latest]
        for number in expired:
            del batches[number]
        if expired:
            logger.warning(
                "dropped %d batches of data loader %d that no trainer asked for in "
                "%g s",
                *(len(expired), loader, self._expires_s),
            )


class AwaitingGradient:
    """Pulled training batches that wait for their gradient. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[BatchNumber, RoutedBatch] = {}  # guarded by _lock
        self._num_taken = 0  # guarded by _lock

    def put(self, number: BatchNumber, batch: RoutedBatch) -> None:
        """Keep a batch.

        Raises:
            DataflowError: too many are open.
        """
        with self._lock:
            if len(self._batches) >= _MAX_OPEN:
                raise DataflowError(
                    f"At most {_MAX_OPEN} batches may wait for their gradient. Does "
                    "every training batch get its backward pass?"
                )
            self._batches[number] = batch

    @contextmanager
    def taken(self, number: BatchNumber) -> Iterator[RoutedBatch]:
        """Forget a batch, whose update is applied when the block ends.

        Raises:
            DataflowError: there is no such batch (any more).
        """
        batch = self._take(number)
        try:
            yield batch
        finally:
            with self._lock:
                self._num_taken -= 1

    def __len__(self) -> int:
        """How many batches are pulled, and not yet updated."""
        with self._lock:
            return len(self._batches) + self._num_taken

    def _take(self, number: BatchNumber) -> RoutedBatch:
        with self._lock:
            batch = self._batches.pop(number, None)
            self._num_taken += batch is not None
        if batch is None:
            raise DataflowError(
                f"Batch {number.batch} must have been pulled here for training, and "
                "not been updated since."
            )
        return batch


def buffer_of(settings: EmbeddingWorkerSettings) -> IdBuffer:
    """Return an empty buffer with the settings of a file."""
    return IdBuffer(settings.forward_buffer_size, settings.buffered_data_expired_sec)
