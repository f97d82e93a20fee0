"""One pass of a training over its data: which batches are trained, and where it is.

    batches  --take-->  handed out, as many ahead as a train pipeline takes  --count-->
    trained

What a loop reads from may be in ``state`` (``recovery.py``):

    handed out itself   a ``RowDataset`` tells the row up to which is trained. Another
                        loader tells what it has yielded, which is more than is trained:
                        its state is kept now and then, and saved with the number of
                        batches from there to the last trained one. A resume reads these
                        and leaves them out
    read by what is     its state at the beginning of the pass is saved: the count of
    handed out          the loop alone decides
    not                 a resume reads the pass from its beginning, of a ``RowDataset``
                        in the same epoch

A kept state counts when another batch has followed: none is of the end of a pass, where
loaders begin the next one.
"""

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec.datasets.dataset import RowDataset
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.torchrec_api import has_iterator
from persia_torchrec.training.checksum import checksum_of
from persia_torchrec.training.data_state import state_of_data
from persia_torchrec.training.reachable import reachable

logger = logging.getLogger(__name__)

_SHARE = 200  # times what a kept state took, until the next: half a percent of a pass
_END = object()
_MAX_SUMS = 1024  # batches handed out and not trained, of which there are checksums


class _Kept(NamedTuple):
    """The state of a loader, and how many batches of the pass it has yielded."""

    position: int
    state: Any


@runtime_checkable
class NumberedBatches(Protocol):
    """A loader of batches that data loader processes number, as PERSIA's.

    Attributes:
        handed: by data loader, the number of its last batch that was handed out.
    """

    @property
    def handed(self) -> Mapping[int, int]: ...  # noqa: D102

    def leave_out(self, trained: Mapping[int, int]) -> None:
        """Yield no batch up to the last one of each data loader that is trained."""


class DataPass:
    """What is known of one pass; the thread that trains calls all methods.

    But ``take``, where another thread takes batches ahead of training.

    Args:
        batches: what the loop reads.
        data: values in ``state`` that have a position, by name.
        hidden: objects that ``batches`` may hold and does not read.
        generators: of random numbers, that are in ``state``.

    Attributes:
        unsaved: loaders that draw an order from a generator that is in no state.
        num_trained: batches, those before a resume included.
        how: what a resume did to be there, for its line of log.
        is_over: whether the last batch was handed out.
        is_left: whether the loop has done what stands behind the pass.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        data: Mapping[str, Any],
        hidden: Iterable[object] = (),
        generators: Iterable[object] = (),
    ) -> None:
        self._batches = batches
        self.how = ""
        self.num_trained = self._num_taken = self._num_before = 0
        self.is_over = False
        self.is_left = False
        self._next: _Kept | None = None
        self._due_s = 0.0
        self._kept: dict[str, _Kept] = {}  # what is saved of the data of this pass
        handed = [name for name, value in data.items() if value is batches]
        self._own = handed[0] if handed else None
        self._data = {name: data[name] for name in handed[:1]}
        is_known = isinstance(batches, RowDataset | NumberedBatches)
        inside = [] if is_known else [*reachable(batches, hidden)]
        found = {id(one) for one in inside}
        self._data |= {n: v for n, v in data.items() if found & _ids_of(v)}
        self._streams: list[Any] = [one for one in inside if begins_where_loaded(one)]
        for name, value in self._data.items():
            if name != self._own and isinstance(value, RowDataset) and value.is_queued:
                raise ConfigError(
                    "run.skip must be given a dataset with a WorkQueue itself. "
                    f"Received: a {type(batches).__name__} that reads {name!r}, the "
                    "dataset in state. Make what the loop needs with convert=..."
                )
        in_state = {id(value) for value in self._data.values()}
        self._datasets = [
            one
            for one in ([batches] if is_known else inside)
            if isinstance(one, RowDataset) and not (in_state or one.is_queued)
        ]
        self._epochs: list[int] = []  # of these, that the pass reads
        loaders = [
            one
            for one in inside
            if isinstance(one, torch.utils.data.DataLoader) and id(one) not in in_state
        ]
        self._persistent = [one for one in loaders if one.persistent_workers]
        saved = {id(None), *(id(generator) for generator in generators)}
        self.unsaved = [
            type(one).__name__
            for one in loaders
            if id(getattr(one.sampler, "generator", None)) not in saved
        ]
        self._has_begun = False  # a loader with persistent workers, at the beginning
        self._compares = self._own is None  # which continues by itself
        self._sums = deque[int | None]()
        self._first: int | None = None
        self._last: int | None = None
        self._size = dist.get_world_size() if dist.is_initialized() else 1

    @property
    def names(self) -> list[str]:
        """Names of the data in ``state`` that this pass reads."""
        return [*self._data]

    @property
    def is_begun(self) -> bool:
        """Whether what is handed out has begun to read before this pass did."""
        return self._own is None and isinstance(self._batches, Iterator)

    def begin(
        self, note_random: Callable[[], None], *, is_resumed: bool = False
    ) -> Iterator[Any]:
        """Begin the pass; ``note_random`` is called before it draws numbers.

        ``is_resumed`` tells that it is the first one behind the pass of a checkpoint.
        """
        self._has_begun = any(has_iterator(loader) for loader in self._persistent)
        for stream in self._streams:
            stream.load_state_dict({})
        own: Any = self._data.get(self._own or "")
        if is_resumed and self._streams and getattr(own, "persistent_workers", False):
            own.load_state_dict({})  # workers that persist would keep where they began
        for name, value in self._data.items():
            if name != self._own:
                self._kept[name] = _Kept(0, self._state_at_next(value))
        note_random()
        self._note_epochs()
        rest = iter(self._batches)
        self._keep_beginning()
        return rest

    def _note_epochs(self) -> None:
        self._epochs = [dataset.epoch for dataset in self._datasets]

    def set_epochs(self, saved: Mapping[str, Any]) -> None:
        """Have datasets that are not in ``state`` begin the epoch of a checkpoint."""
        epochs = saved.get("pass", {}).get("epochs", ())
        if len(epochs) == len(self._datasets):
            for dataset, epoch in zip(self._datasets, epochs, strict=True):
                dataset.set_epoch(epoch)

    def _keep_beginning(self) -> None:
        own = self._data.get(self._own or "")
        if own is not None and not isinstance(own, RowDataset):
            self._kept[str(self._own)] = _Kept(0, self._state_at_next(own))

    def resume(
        self,
        saved: Mapping[str, Any],
        set_random: Callable[[], None],
        fail: Callable[[str, str], None],
    ) -> Iterator[Any]:
        """Continue the pass of a checkpoint; its data are loaded.

        Args:
            saved: of this trainer.
            set_random: goes back to the random numbers of the pass's beginning.
            fail: is called where the batches are others than before, with the type of
                the loader and what is different.
        """
        told, num = saved.get("pass", {}), saved["num_batches"]
        is_loaded = all(name in saved["own"] for name in self._data)
        position = told.get("position", num if self._own else 0) if is_loaded else 0
        if saved["last"]:  # data loaders leave out by themselves what is trained
            position = num
        if is_loaded:
            kept = {name: _Kept(position, saved["own"][name]) for name in self._data}
            self._kept.update(kept)
        self.num_trained = self._num_taken = num
        self._num_before = position
        self._first, self._last = told.get("first"), told.get("last")
        self._has_begun = told.get("has_begun", False)
        for loader in self._persistent if self._has_begun else ():
            if not has_iterator(loader):
                iter(loader)  # torch draws a number more where it starts workers
        set_random()
        self._note_epochs()
        rest = iter(self._batches)
        if not is_loaded:
            self._keep_beginning()
        num_again = num - position
        is_same_size = told.get("size", self._size) == self._size
        sums = {num_again - 1: self._last} | ({} if position else {0: self._first})
        if num_again == 1 and not position:
            sums = {0: self._first}
        compared = self._compares and is_same_size
        known = {at: one for at, one in sums.items() if compared and one is not None}
        if num_again and self._leave_out(rest, num_again, known, fail):
            why = "the loader continues by itself"
            if self._own is None:
                few = "they have no tensor on the host"
                why = few if is_same_size else "trainers are of another number"
            how = "and are the same" if known else f"and not compared: {why}"
            self.how = f", of which {num_again} were read again {how}"
        return rest

    def _leave_out(
        self,
        rest: Iterator[Any],
        num: int,
        sums: dict[int, int],
        fail: Callable[[str, str], None],
    ) -> bool:
        """Read batches that are trained; return whether they are those with a sum."""
        name = type(self._batches).__name__
        is_same = True
        for at in range(num):
            batch = next(rest, _END)
            if batch is _END:
                fail(name, f"{at} batches, of which {num} are trained")
                return False
            if is_same and at in sums and checksum_of(batch) != sums[at]:
                is_same = False
                fail(name, "another first batch" if not at else f"another batch {at}")
        return is_same

    def stand_at(self, num_trained: int) -> None:
        """Note where a pass stands of which no more batches are handed out."""
        self.num_trained = self._num_taken = self._num_before = num_trained

    def state_of(self, value: Any) -> Any:
        """Return what is saved of data in ``state`` that this pass reads."""
        name = next(name for name, one in self._data.items() if one is value)
        if name == self._own and isinstance(value, RowDataset) and not self.is_left:
            return state_of_data(value, self.num_trained - self._num_before)
        return self._kept[name].state

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint has of this pass, beside the states of data."""
        own = self._data.get(self._own or "")
        kept = self._kept.get(self._own or next(iter(self._kept), ""))
        if isinstance(own, RowDataset):
            position = self.num_trained
        else:
            position = kept.position if kept else 0
        return {
            "position": position,
            "names": [name for name in self._data if name != self._own],
            "first": self._first if self._compares else None,
            "last": self._last if self._compares else None,
            "has_begun": self._has_begun,
            "size": self._size,
            "is_left": self.is_left,
            "epochs": self._epochs,
        }

    def leave(self) -> None:
        """Let the next pass begin: what stands behind this one in the loop is over."""
        self.is_left = True
        self._note_epochs()
        for name, value in self._data.items():
            is_told = self.is_over or isinstance(value, RowDataset)
            state = self._state_at_next(value) if is_told else None
            self._kept[name] = _Kept(0, state)

    def _state_at_next(self, value: Any) -> Any:
        """Return the state with which the next pass over data begins."""
        if isinstance(value, RowDataset):
            return value.next_state()
        # That of such a stream is of the end of the pass before, until it is read.
        is_loader = isinstance(value, torch.utils.data.DataLoader)
        if begins_where_loaded(value) or (is_loader and self._streams):
            return {}
        return copy.deepcopy(value.state_dict())

    @property
    def num_ahead(self) -> int:
        """Batches that are handed out and not trained."""
        return self._num_taken - self.num_trained

    def reads(self, value: object) -> bool:
        """Return whether data in ``state`` is of this pass."""
        return any(value is one for one in self._data.values())

    def take(self, batch: Any) -> None:
        """Note a batch that is handed out, to be trained behind those before it."""
        self._num_taken += 1
        if self._compares:
            self._note_sum(batch)
        own = self._data.get(self._own or "")
        if own is None or self._next is not None or isinstance(own, RowDataset):
            return
        began_s = time.perf_counter()
        if began_s >= self._due_s:
            self._next = _Kept(self._num_taken, copy.deepcopy(own.state_dict()))
            ended_s = time.perf_counter()
            self._due_s = ended_s + _SHARE * (ended_s - began_s)

    def _note_sum(self, batch: Any) -> None:
        of_loader = getattr(batch, "loader", None) is not None
        self._sums.append(None if of_loader else checksum_of(batch))
        if self._num_taken == 1:
            self._first = self._sums[-1]
        self._compares = len(self._sums) <= _MAX_SUMS

    def count(self, num_batches: int) -> None:
        """Count batches of a step."""
        self.num_trained += num_batches
        for _ in range(min(num_batches, len(self._sums))):
            self._last = self._sums.popleft()
        kept = self._next
        if (
            kept
            and kept.position <= self.num_trained
            and (kept.position < self._num_taken)
        ):
            self._kept[str(self._own)] = kept
            self._next = None


def has_position(value: object) -> bool:
    """Return whether a value in ``state`` is data that tell how far they have come."""
    tells = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    reads = any(hasattr(value, n) for n in ("__iter__", "__next__", "__getitem__"))
    return tells and reads and not isinstance(value, nn.Module | torch.optim.Optimizer)


def _ids_of(value: object) -> set[int]:
    """Return the identities of data, and of iterators over them that they hold."""
    held = getattr(value, "__dict__", {}).values()
    return {id(value), *(id(one) for one in held if isinstance(one, Iterator))}


def begins_where_loaded(value: Any) -> bool:
    """Return whether data begin each pass where they were loaded, once they were.

    A streaming data set of Hugging Face does, until it loads an empty state.
    """
    is_theirs = type(value).__module__.partition(".")[0] == "datasets"
    return is_theirs and hasattr(value, "load_state_dict") and has_position(value)
