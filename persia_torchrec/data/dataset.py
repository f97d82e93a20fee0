"""Where batches come from: data loader processes, or this one.

PERSIA's two kinds. A ``StreamingDataset`` receives what ``DataCtx`` sends from data
loader processes, whose ids wait with the embedding workers. An ``IterableDataset`` is
the user's own iterator of ``PersiaBatch``, in this process.
"""

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from persia_torchrec import env
from persia_torchrec.data.stream import BatchReceiver, Inbox
from persia_torchrec.embedding.data import PersiaBatch, ReferencedBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.ports import local_address

T = TypeVar("T")

_CHECK_S = 0.1


def require_at_least_1(**numbers: int | None) -> None:
    """Refuse a number below 1; the message names it."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be >= 1. Received: {number}.")


class IterableDatasetBase(ABC):
    """What a ``DataLoader`` reads.

    Args:
        buffer_size: batches that may wait to be looked up, at least 1; of a
            StreamingDataset, of each data loader.
    """

    def __init__(self, buffer_size: int = 10) -> None:
        require_at_least_1(buffer_size=buffer_size)
        self.buffer_size = buffer_size

    @abstractmethod
    def batches(
        self, timeout_s: float, *, in_order: bool
    ) -> Iterator[PersiaBatch | ReferencedBatch]:
        """Yield the batches of one pass, waiting ``timeout_s`` for each.

        ``in_order`` is the order in which the data loaders numbered them.
        """


class IterableDataset(IterableDatasetBase):
    """The user's batches, made in this process. Subclass it and write ``__iter__``.

    Each pass calls ``__iter__`` again, in a thread of its own.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one pass."""

    def batches(self, timeout_s: float, *, in_order: bool) -> Iterator[PersiaBatch]:
        """Yield the batches, made ahead by a thread; they are in order anyway."""
        return in_background(self, self.buffer_size, "dataset")


class StreamingDataset(IterableDatasetBase):
    """What data loader processes send to this trainer; one pass.

    The trainer begins to listen, and registers with the job, on the first pass. It
    ends when every data loader has ended.
    """

    def __init__(self, buffer_size: int = 10) -> None:
        super().__init__(buffer_size)
        self._receiver: BatchReceiver | None = None

    def batches(self, timeout_s: float, *, in_order: bool) -> Iterator[ReferencedBatch]:
        """Yield the batches as they come; raise DataflowError if none comes in time."""
        if self._receiver is not None:
            raise ConfigError(
                "A StreamingDataset can be iterated over once: what was received is "
                "gone. Let the data loaders send the data again to a new job."
            )
        store = env.require_job_store(
            "A StreamingDataset", ", or use an IterableDataset"
        )
        rank, world_size = env.get_rank(), env.get_world_size()
        inbox = Inbox(self.buffer_size, rank, world_size)
        book = AddressBook.join(*store)
        receiver = BatchReceiver(inbox, local_address(store.host), book.greeting)
        self._receiver = receiver
        book.register("trainer", rank, world_size, receiver.address)
        book.close()

        def take_all() -> Iterator[ReferencedBatch]:
            while (batch := inbox.take(timeout_s, in_order=in_order)) is not None:
                yield batch
            receiver.close()

        return take_all()


def in_background(
    items: Iterable[T],
    capacity: int,
    name: str,
    note_wait: Callable[[float], None] = lambda seconds: None,
) -> Iterator[T]:
    """Yield the items, made by a thread that is up to ``capacity`` ahead.

    An exception of the iterator is raised where its item would have come. When the
    caller stops early, so does the thread, at the next item. ``note_wait`` is told how
    many seconds each item was waited for, before it is yielded.

    Example:
        >>> list(in_background(range(3), 2, "numbers"))
        [0, 1, 2]
    """
    made: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(capacity)
    stopping = threading.Event()

    def put(entry: tuple[T] | BaseException | None) -> bool:
        while not stopping.is_set():
            with contextlib.suppress(queue.Full):
                made.put(entry, timeout=_CHECK_S)
                if not stopping.is_set():
                    return True
        _empty(made)
        return False

    def make() -> None:
        try:
            for item in items:
                if not put((item,)):
                    return
                del item  # not kept alive while the next one is waited for
            put(None)
        except BaseException as exc:  # noqa: BLE001  # raised by the caller's thread
            put(exc)

    threading.Thread(target=make, name=name, daemon=True).start()
    try:
        began_s = time.perf_counter()
        while (entry := made.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            note_wait(time.perf_counter() - began_s)
            yield entry[0]
            began_s = time.perf_counter()
    finally:
        stopping.set()
        _empty(made)


def _empty(made: "queue.Queue[tuple[T] | BaseException | None]") -> None:
    """Drain the queue, so that the producer thread can exit."""
    with contextlib.suppress(queue.Empty):
        while True:
            made.get_nowait()
