"""Worker processes of a data loader, in a job that is told to end by a signal to all.

Slurm, a cgroup and torchrun signal each process of a trainer. A worker of torch's
``DataLoader`` would end by that before the trainer has saved:

    a loader that is known   its workers outlive the signals (``job/signals.py``), and
                             end with their work, or with the trainer
    any other                its workers end. torch raises that in the main thread, at
                             any line: here between two steps only, where a checkpoint
                             can be saved
"""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from torch.utils.data import DataLoader

from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.job.signals import OutlivesSignals
from persia_torchrec.sharding.torchrec_api import end_iterator

T = TypeVar("T")

_OF_WORKER = re.compile(
    r"killed by signal: (?!Killed)|exited unexpectedly|terminated abruptly"
)


def let_workers_outlive_signals(loader: object) -> None:
    """Have the workers that a loader starts from now on outlive the job's signals."""
    if isinstance(loader, DataLoader):
        init = loader.worker_init_fn
        if not isinstance(init, OutlivesSignals):
            loader.worker_init_fn = OutlivesSignals(init)


def restart_stateful_workers(loader: object) -> None:
    """End the workers that a loader in ``state`` keeps, before another pass.

    Where their dataset has a state, one that was loaded is in them, and each later pass
    would begin there; and torchdata 0.11 saves of a worker that has given nothing in a
    pass where it was at the end of the pass before. Datasets of this package begin
    each pass by themselves.
    """
    if (
        isinstance(loader, DataLoader)
        and hasattr(loader, "load_state_dict")
        and hasattr(loader.dataset, "load_state_dict")
        and not isinstance(loader.dataset, RowDataset)
        and loader.persistent_workers
    ):
        end_iterator(loader)


def is_of_worker(exc: Exception) -> bool:
    """Return whether an error tells of a worker that a signal may have ended."""
    return _OF_WORKER.search(str(exc)) is not None


class WorkerDeaths:
    """Has torch raise the death of a worker between two steps; for the main thread."""

    def __init__(self) -> None:
        self._is_between = True
        self._has_died = False
        self._raise: Callable[[int, FrameType | None], object] | None = None

    def watch(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches; with each a step begins."""
        while True:
            self.end_step()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._is_between = False
            yield batch

    def end_step(self) -> None:
        """Raise at once from now on, and what has waited for the end of a step."""
        self._is_between = True
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGCHLD)
        is_of_torch = getattr(handler, "__module__", "").startswith("torch.utils.data")
        if callable(handler) and is_of_torch:
            self._raise = handler
            signal.signal(signal.SIGCHLD, self._hear)
        if self._has_died and self._raise is not None:
            self._has_died = False
            self._raise(signal.SIGCHLD, None)

    def close(self) -> None:
        """Have torch raise at any line again."""
        self._is_between = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_between and self._raise is not None:
            self._raise(number, frame)
        else:
            self._has_died = True
