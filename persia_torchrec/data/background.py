"""Make the next items of an iterator while the last one is being used."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_CHECK_S = 0.1


def in_background(
    items: Iterable[T],
    capacity: int,
    name: str,
    note_wait: Callable[[float], None] = lambda seconds: None,
) -> Iterator[T]:
    """Yield the items, made by a thread that is up to ``capacity`` ahead.

    An exception of the iterator is raised where its item would have come. When the
    caller stops early, so does the thread, at the next item.

    Args:
        items: iterated over by the thread.
        capacity: items that may wait, at least 1.
        name: of the thread.
        note_wait: is told how many seconds each item was waited for, before it is
            yielded.

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
        except BaseException as exc:  # noqa: BLE001  # raised by whoever iterates
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
    """Let go of what nobody will take; the thread may live on for a while."""
    with contextlib.suppress(queue.Empty):
        while True:
            made.get_nowait()
