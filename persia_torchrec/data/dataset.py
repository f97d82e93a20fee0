"""Where batches come from: data loader processes, or this one.

PERSIA's two kinds. A ``StreamingDataset`` receives what ``DataCtx`` sends from data
loader processes, whose ids wait with the embedding workers. An ``IterableDataset`` is
the user's own iterator of ``PersiaBatch``, in this process.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from persia_torchrec import env
from persia_torchrec.data.stream import Inbox
from persia_torchrec.embedding.data import PersiaBatch, ReferencedBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.ports import local_address

T = TypeVar("T")

_Entry = tuple[T] | BaseException | None
"""An item, or how the items end."""


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
        self._is_iterated = False

    def batches(self, timeout_s: float, *, in_order: bool) -> Iterator[ReferencedBatch]:
        """Yield the batches as they come; raise DataflowError if none comes in time."""
        if self._is_iterated:
            raise ConfigError(
                "A StreamingDataset can be iterated over once: what was received is "
                "gone. Let the data loaders send the data again to a new job."
            )
        store = env.require_job_store(
            "A StreamingDataset", ", or use an IterableDataset"
        )
        rank, world_size = env.get_rank(), env.get_world_size()
        inbox = Inbox(self.buffer_size, rank, world_size)
        with contextlib.closing(AddressBook.join(*store)) as book:
            service = inbox.listen(local_address(store.host), book.greeting)
            self._is_iterated = True
            book.register("trainer", rank, world_size, service.address)

        def take_all() -> Iterator[ReferencedBatch]:
            while (batch := inbox.take(timeout_s, in_order=in_order)) is not None:
                yield batch
            service.close()

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
    made: deque[_Entry[T]] = deque()  # guarded by changed
    changed = threading.Condition()
    is_over = False  # guarded by changed

    def put(entry: _Entry[T]) -> bool:
        with changed:
            changed.wait_for(lambda: is_over or len(made) < capacity)
            if not is_over:
                made.append(entry)
                changed.notify_all()
            return not is_over

    threading.Thread(target=_fill, args=(put, items), name=name, daemon=True).start()
    try:
        while True:
            began_s = time.perf_counter()
            with changed:
                changed.wait_for(lambda: made)
                entry = made.popleft()
                changed.notify_all()
            if not isinstance(entry, tuple):
                break
            note_wait(time.perf_counter() - began_s)
            yield entry[0]
        if entry is not None:
            raise entry
    finally:
        with changed:
            is_over = True
            made.clear()
            changed.notify_all()


def _fill(put: Callable[[_Entry[T]], bool], items: Iterable[T]) -> None:
    """Put items, and at last their error or None, until one is refused."""
    try:
        for item in items:
            if not put((item,)):
                return
            del item  # not kept alive while the next one is waited for
        put(None)
    except BaseException as exc:  # noqa: BLE001  # raised by the caller's thread
        put(exc)
