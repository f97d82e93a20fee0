"""Datasets and DataLoader with prefetched embeddings.

    dataset -> begin the pull -> wait until the trainer asks -> batch
            `> tensors, as TorchRec's Batch, whose pull the model begins

A batch's pull begins when the dataset has it, up to ``forward_buffer_size`` batches
before the trainer asks for it: within the staleness bound, and not earlier than hides
it behind the training (``pipeline/staleness.py``). PERSIA's
``DataLoader`` is given no context: it belongs to the one that is entered. That is the
only thing in this package that is known without being passed on.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, DataflowError
from persia_torchrec.job.implicit_member import join_job
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.parsing.decoding import require_at_least_1
from persia_torchrec.persia import batch as persia_batch
from persia_torchrec.persia.batch import PersiaBatch, ReferencedBatch
from persia_torchrec.persia.stream import Inbox
from persia_torchrec.rpc.addresses import local_address

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_Entry = tuple[T] | BaseException | None
"""An item, or how the items end."""


class PersiaBatchDataSender:
    """Takes the batches that ``consume_dataset`` sends. Any thread may call any method.

    Args:
        capacity: batches that may wait for the ``DataLoader``.
    """

    def __init__(self, capacity: int) -> None:
        self._sent: queue.Queue[PersiaBatch] = queue.Queue(capacity)

    def send(self, batch_data: PersiaBatch) -> None:
        """Send a copy of a batch; wait while there is no room for it."""
        try:
            self._sent.put(_own(batch_data), timeout=timeouts.SEND_BATCH_S)
        except queue.Full as exc:
            raise DataflowError(
                "A DataLoader must take the batches of a dataset within "
                f"{timeouts.SEND_BATCH_S:g} s. Received: {self._sent.maxsize} batches "
                "that wait. Does consume_dataset yield once for each?"
            ) from exc

    def take(self, timeout_s: float) -> PersiaBatch:
        """Return the next batch; raise DataflowError if none is sent in time."""
        try:
            return self._sent.get(timeout=timeout_s)
        except queue.Empty as exc:
            raise DataflowError(
                "consume_dataset must send a batch by self.sender for each time that "
                f"it yields. Received: none within {timeout_s:g} s."
            ) from exc


class IterableDatasetBase:
    """What a ``DataLoader`` reads; a subclass has ``__iter__``, or consume_dataset.

    A thread per pass calls them.

    Args:
        buffer_size: batches that may wait to be looked up, at least 1; of a
            StreamingDataset, of each data loader.

    Attributes:
        sender: takes batches by ``send``, for a ``consume_dataset`` of the user's.
        trained: by data loader, the ``batch_id`` of its last batch that this trainer
            need not be sent, as it was trained before a restart.
    """

    trained: Mapping[int, int] = {}
    _makes_new = False  # memory for each batch, which nothing else has

    def __init__(self, buffer_size: int = 10) -> None:
        require_at_least_1(buffer_size=buffer_size)
        self.buffer_size = buffer_size
        self.sender = PersiaBatchDataSender(buffer_size)

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield the batches of one pass."""
        raise ConfigError(
            "A dataset must have __iter__, or a consume_dataset of its own. Received: "
            f"{type(self).__name__}. Only a DataLoader reads a StreamingDataset that "
            "has no as_torchrec=True."
        )

    def consume_dataset(self) -> Iterator[int]:
        """Send the batches of one pass; yield the number of each when it is sent."""
        for number, batch in enumerate(self):
            self.sender.send(batch)
            yield number

    def batches(
        self, timeout_s: float, *, in_order: bool
    ) -> Iterator[PersiaBatch | ReferencedBatch]:
        """Yield the batches of one pass; ``in_order``: as the loaders numbered them.

        They are made ahead by a thread, and in order anyway, but for those of a
        StreamingDataset. The thread copies each as it is made: the next one may have
        the same arrays.
        """
        has_own = type(self).consume_dataset is not IterableDatasetBase.consume_dataset

        def sent() -> Iterator[PersiaBatch]:
            for _ in self.consume_dataset():
                yield self.sender.take(timeout_s)

        def copied() -> Iterator[PersiaBatch]:
            for batch in self:
                yield batch if self._makes_new else _own(batch)

        made = sent() if has_own else copied()
        return in_background(made, self.buffer_size, "dataset")


class IterableDataset(IterableDatasetBase):
    """The user's batches: a base class of PERSIA's users."""


class _Iterated(IterableDatasetBase):
    """Any iterable of batches, such as the datasets of files."""

    def __init__(self, batches: Iterable[Any], *, makes_new: bool) -> None:
        super().__init__()
        self._batches = batches
        self._makes_new = makes_new

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class StreamingDataset(IterableDatasetBase):
    """What data loader processes send to this trainer, until all have ended.

    The trainer begins to listen, and registers with the job, on the first pass. A pass
    that was left continues with the next batch in another one, by a ``DataLoader`` of
    the same arguments: so an endless stream is cut into epochs. A pass behind the end
    has no batches. A process has one such dataset in a job.

    Args:
        buffer_size: batches of each data loader that may wait, at least 1.
        as_torchrec: whether the batches are TorchRec's: then it may be iterated over
            without a ``DataLoader``, too; see there.

    Attributes:
        handed: by data loader, the ``batch_id`` of its last batch that was handed out.
        reader: the context that looks batches up; None: there is none.
    """

    _inbox: Inbox | None = None
    _ahead: Iterator[Any] | None = None  # batches on their way to the loop
    _arguments: tuple[object, ...] = ()  # of the DataLoader that reads it
    reader: Any = None

    def __init__(self, buffer_size: int = 10, *, as_torchrec: bool = False) -> None:
        super().__init__(buffer_size)
        self.as_torchrec = self.takes_ids = as_torchrec
        self.handed: dict[int, int] = {}

    def __iter__(self) -> Iterator[Any]:
        """Yield TorchRec's batches of a pass."""
        return iter(DataLoader(self)) if self.as_torchrec else super().__iter__()

    def batches(self, timeout_s: float, *, in_order: bool) -> Iterator[ReferencedBatch]:
        """Yield the batches as they come; raise DataflowError if none comes in time."""
        if self._inbox is None:
            self._inbox = self._listen()
        take = partial(self._inbox.take, timeout_s, in_order=in_order)
        return iter(take, None)

    def read(
        self,
        reader: object,
        arguments: tuple[object, ...],
        begin: Callable[[], Iterator[Any]],
    ) -> Iterator[Any]:
        """Return the batches of one more pass, with those on their way first.

        ``begin`` makes the iterator of them all, as a ``DataLoader`` of these arguments
        does for a context, ``reader``.
        """
        if self._arguments not in ((), arguments):
            raise ConfigError(
                "A StreamingDataset must be read by DataLoaders of the same arguments: "
                f"their batches are on their way. Received: {arguments}, and before "
                f"{self._arguments}. Make one DataLoader, and iterate over it in each "
                "epoch."
            )
        self._arguments, self.reader = arguments, reader
        return self._pass(begin)

    def leave(self, reader: Any, outer: Any) -> None:
        """Give up the batches on their way to a context that is left.

        The one around it gets them if it has the same embeddings.
        """
        if self.reader is not reader:
            return
        self.reader = outer
        if outer is None or outer.embeddings is not reader.embeddings:
            if self._ahead is not None:
                with contextlib.suppress(ValueError):  # a thread waits for a batch
                    self._ahead.close()  # type: ignore[attr-defined]  # a generator
            self._ahead, self._arguments = None, ()

    def _pass(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._ahead = ahead = self._ahead or begin()
        try:
            for batch in ahead:
                if batch.loader is not None and batch.batch_id is not None:
                    self.handed[batch.loader] = batch.batch_id
                yield batch
        except GeneratorExit:  # the next pass continues
            raise
        except BaseException:
            self._ahead = None
            raise
        self._ahead = None

    def _listen(self) -> Inbox:
        store = env.require_job_store(
            "A StreamingDataset", ", or use an IterableDataset"
        )
        rank, world_size = env.get_rank(), env.get_world_size()
        join_job("trainer", rank, world_size, store)
        self.handed |= self.trained
        inbox = Inbox(
            self.buffer_size,
            rank,
            world_size,
            self.trained,
            takes_ids=self.takes_ids,
        )
        with contextlib.closing(AddressBook.join(*store)) as book:
            key = os.getpid(), book.greeting.job_id, rank
            if streams.get(key, self) is not self:
                raise ConfigError(
                    "A process must have one StreamingDataset in a job: the data "
                    "loaders send to it. Received: a second one. Make it once, and "
                    "iterate over it in each epoch: a pass continues with the next "
                    "batch."
                )
            service = inbox.listen(local_address(store.host), book.greeting)
            book.register("trainer", rank, world_size, service.address)
            streams[key] = self
            if not book.recovery_s:  # else data loaders ask what is trained
                inbox.when_over = service.close
        return inbox


streams: dict[tuple[int, str, int], StreamingDataset] = {}
"""Of this process, by process, job and rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PersiaTrainingBatch:
    """A batch as the trainer gets it; a context makes tensors of it.

    ``pull`` is its rows on their way, ``is_training`` whether a backward pass is
    expected, and ``loader`` the data loader that sent it; ``staged`` are features
    without ids, and labels behind them, on their way to a GPU, if there is one. The
    other attributes are those of the ``PersiaBatch``.
    """

    pull: Any
    non_id_type_features: tuple[persia_batch.NonIDTypeFeature, ...]
    labels: tuple[persia_batch.Label, ...]
    is_training: bool
    meta: bytes | None
    batch_id: int | None
    loader: int | None = None
    staged: Any = None

    def consume_all_meta_data(self) -> bytes | None:
        """Return ``meta``, as often as it is asked for."""
        return self.meta


class LookupSettings(NamedTuple):
    """How far lookups may be ahead of the training: arguments of a ``DataLoader``."""

    forward_buffer_size: int
    num_workers: int
    embedding_staleness: int | None
    pulls_late: bool = False


entered: list[Any] = []
"""Contexts, the current one last; loaders belong to the last ``LookupCtx``."""


def leave_context(context: object) -> None:
    """Take a context back, and if it looks up, those within that do so too.

    One that only sends may be of another thread.
    """
    if context in entered:
        index, looks_up = entered.index(context), _looks_up(context)
        within = entered[index + 1 :]
        entered[index:] = [c for c in within if not (looks_up and _looks_up(c))]
    for stream in [*streams.values()] if _looks_up(context) else ():
        stream.leave(context, entered_context())


def entered_context() -> Any:
    """Return the innermost context that looks up, or None."""
    return next(filter(_looks_up, reversed(entered)), None)


def _looks_up(context: object) -> bool:
    return hasattr(context, "start_lookup")


class DataLoader:
    """Iterate over a dataset's batches, with their rows on the way.

    With ``as_torchrec`` the batches are TorchRec's, for any TorchRec model and train
    pipeline, and no context is needed: the model's collections look them up. Data
    loader processes then send ids to this process itself, and the job needs no
    embedding worker. ``dense_features`` and ``labels`` are one tensor each: arrays
    ``(B,)`` or ``(B, C)`` of a ``PersiaBatch`` stand side by side, and one alone keeps
    its shape and dtype; none are float32 ``(B, 0)``.

    Args:
        dataset: where the batches come from: an ``IterableDataset``, a
            ``StreamingDataset``, or any iterable of batches, PERSIA's or TorchRec's, as
            the datasets of files are.
        forward_buffer_size: batches looked up ahead, at least 1; with ``as_torchrec``
            batches that wait as tensors.
        timeout_ms: how long to wait for a batch.
        num_workers: batches looked up at once, at least 1; the context's
            ``threadpool_worker_size`` may allow fewer. A reproducible loader looks up
            one at a time.
        reproducible: batches in the order in which the data loaders numbered them.
            Together with ``embedding_staleness=1`` two runs are equal to the last bit.
        embedding_staleness: training batches that may be between lookup and update, at
            least 1; 1 is the schedule without stale rows. None: as many as the buffers
            hold. Unless ``reproducible``, no more are than hide the lookups. With
            ``as_torchrec`` it is left out: the sharder has it.
        as_torchrec: yield each batch as a ``Batch`` of ``torchrec.datasets.utils``: a
            ``LoadedBatch``, which has ``requires_grad``, ``meta``, ``batch_id`` and
            ``loader`` besides.
        device: where its tensors are; None: on the host, in pinned memory where this
            process uses a GPU. Train pipelines move it by themselves.
        ids_on_host: have its ids as a ``HostKeyedJaggedTensor``, which stays on the
            host when the batch is moved: what tables on the servers want.

    Raises:
        ConfigError: an argument is out of its range, or has no effect without, or
            with, ``as_torchrec``.
    """

    def __init__(
        self,
        dataset: IterableDatasetBase | Iterable[Any],
        forward_buffer_size: int = 10,
        timeout_ms: int = 600_000,
        num_workers: int = 10,
        reproducible: bool = False,
        embedding_staleness: int | None = None,
        *,
        as_torchrec: bool = False,
        device: "torch.device | None" = None,
        ids_on_host: bool = False,
    ) -> None:
        require_at_least_1(
            forward_buffer_size=forward_buffer_size,
            timeout_ms=timeout_ms,
            num_workers=num_workers,
            embedding_staleness=embedding_staleness,
        )
        self._given = dataset
        if not isinstance(dataset, IterableDatasetBase):
            makes_new = getattr(dataset, "makes_new_memory", False)
            dataset = _Iterated(dataset, makes_new=makes_new)
        self.dataset = dataset
        self.as_torchrec = as_torchrec or getattr(dataset, "as_torchrec", False)
        self._where = device, ids_on_host
        self._require_effect(embedding_staleness)
        self._timeout_s = timeout_ms / 1000
        self._reproducible = reproducible
        num_workers = 1 if reproducible else num_workers
        self._settings = LookupSettings(
            forward_buffer_size,
            num_workers,
            embedding_staleness,
            pulls_late=not reproducible,
        )

    @property
    def handed(self) -> Mapping[int, int]:
        """By data loader, the ``batch_id`` of its last batch that was handed out."""
        return getattr(self.dataset, "handed", {})

    def leave_out(self, trained: Mapping[int, int]) -> None:
        """Yield no batch up to the last one of each data loader that is trained."""
        self.dataset.trained = dict(trained)

    def _require_effect(self, embedding_staleness: int | None) -> None:
        if self.as_torchrec and embedding_staleness is not None:
            raise ConfigError(
                "embedding_staleness must be left out with as_torchrec=True, where the "
                f"sharder has it. Received: {embedding_staleness}. Use remote_sharders("
                f"client, optimizer, staleness={embedding_staleness})."
            )
        if not self.as_torchrec and self._where != (None, False):
            raise ConfigError(
                "device and ids_on_host are for as_torchrec=True: a context has its "
                f"batches on its own device. Received: device={self._where[0]}, "
                f"ids_on_host={self._where[1]}."
            )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass; raise DataflowError if none comes in time.

        They are ``PersiaTrainingBatch``, or with ``as_torchrec`` ``LoadedBatch``.
        """
        # Not above: a data loader process, which needs this module, runs without torch.
        from persia_torchrec.persia import kjt

        context = entered_context()
        if context is None and not self.as_torchrec:
            raise ConfigError(
                "A DataLoader must be iterated over inside a context. "
                "Use `with TrainCtx(...):` or `with eval_ctx(...):` around the loop, "
                "or DataLoader(..., as_torchrec=True) for a TorchRec model."
            )
        takes_ids = self.as_torchrec or context.takes_ids
        settings, ahead = self._settings, self._settings.forward_buffer_size
        stream = self.dataset if isinstance(self.dataset, StreamingDataset) else None
        batches = self._batches(context, takes_ids=takes_ids)

        def begin() -> Iterator[Any]:
            if self.as_torchrec:
                device, on_host = self._where
                made = (kjt.to_batch(b, device, ids_on_host=on_host) for b in batches)
                return in_background(made, ahead, "batches ahead")
            started = (
                (stream.reader if stream else context).start_lookup(
                    kjt.to_persia(batch), settings
                )
                for batch in batches
            )
            return in_background(started, ahead, "lookups ahead", context.note_wait)

        if stream is None:
            ready = begin()
        else:
            arguments = self.as_torchrec, *self._where, self._timeout_s, settings
            ready = stream.read(context, arguments, begin)
            ready = ready if context is None else context.skip(ready, self._given)
        return ready if context is None else cast("Any", context.count(ready))

    def _batches(self, context: Any, *, takes_ids: bool) -> Iterator[Any]:
        """Return the batches of one pass, without those trained before a restart."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.takes_ids = takes_ids
        if context is not None and context.trained:
            self.dataset.trained = context.trained
        batches = self.dataset.batches(self._timeout_s, in_order=self._reproducible)
        if context is None or isinstance(self.dataset, StreamingDataset):
            return batches
        return cast("Iterator[Any]", context.skip(batches, self._given))


def _own(batch: Any) -> Any:
    # Not above: a data loader process, which needs this module, runs without torch.
    from persia_torchrec.persia import kjt

    return kjt.own(batch)


def in_background(
    items: Iterable[T],
    capacity: int,
    name: str,
    note_wait: Callable[[float], None] = lambda seconds: None,
) -> Iterator[T]:
    """Yield the items, made by a thread that is up to ``capacity`` ahead.

    An exception of the iterator is raised where its item would have come. When the
    caller stops early, so does the thread, at the next item. ``note_wait`` is told the
    seconds that each item was waited for.
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
            with changed, timeouts.saying(logger, lambda: f"waiting for the {name}"):
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
    """Put items, and at last their error or None, until one is rejected."""
    try:
        for item in items:
            if not put((item,)):
                return
            del item  # not kept alive while the next one is waited for
        put(None)
    except BaseException as exc:  # noqa: BLE001  # raised by the caller's thread
        put(exc)
