"""The stream of batches from data loaders to trainers.

The ids have gone to an embedding worker; what is left of the batch, and the number of
that worker, goes to the trainer whose turn it is. A trainer whose batches are
TorchRec's takes the ids itself, and no worker is needed:

    BATCH         1: JSON [worker, checksum of ids, dense features and labels];
                     WITH_BATCH for the worker says that 2 has the ids, too
                  2: the rest of the batch (persia/batch.py)
    END_OF_DATA   1: JSON null
    POSITION      1: JSON {number: worker}: which batches had lost their ids, and who
                     has them again; at first null

In each header stream is the loader, batch the number of the batch among those of the
loader, from 1, flags the number of loaders, and incarnation says which start of the
loader it is. The reply is a ``Position``: what has become of the loader's batches.

A loader that is started again begins with POSITION; its numbers begin at 1, and batches
that have arrived are not sent again. It keeps the ids of a batch until the batch is
trained, in case the embedding worker loses them. A message whose answer was lost comes
again with the same checksum; of a number that comes again with another one two batches
were given the same, which ends the job.

The trainer keeps a bounded queue per loader, so that one that is ahead takes no room of
one that is behind; a loader whose queue stays full for a moment sends the batch again.
In the order of all batches, number n of a loader is ``loader + (n - 1) * num_loaders``:
the next one in this order (``in_order``) is always at the head of a known queue.
"""

import functools
import logging
import secrets
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec import timeouts
from persia_torchrec.errors import DataflowError, FrameError, RemoteError, ServerError
from persia_torchrec.persia.batch import (
    WITH_BATCH,
    IDTypeFeature,
    Origin,
    PersiaBatch,
    ReferencedBatch,
    decode_rest,
    decode_whole,
    encode_rest,
)
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import (
    Frames,
    Header,
    Kind,
    decode_json,
    encode_json,
)
from persia_torchrec.rpc.peers import Peers

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_MAX_LOADERS_AT_ONCE = 16
_MAX_LOADERS = 2**16
_NUM_CHECKSUMS = 64  # of the latest batches of each loader
_FACTOR = 0x9E3779B97F4A7C15  # odd, and near 2**64 divided by the golden ratio

_Queue = deque[ReferencedBatch | None]


class Position(msgspec.Struct, kw_only=True):
    """What a trainer says of the batches of a data loader that are its own.

    Attributes:
        arrived: number of the last one that has arrived; they come in their order.
        open: numbers of those that have arrived, and are not trained yet.
        lost: of these, whose ids an embedding worker has lost.
        checksums: numbers of the latest, and their checksums; only for POSITION.
        has_room: whether there was room for the batch.
        takes_ids: whether the trainer takes the ids itself, with the batch.
    """

    arrived: int
    open: list[int]
    lost: list[int]
    checksums: dict[int, int] = {}
    has_room: bool = True
    takes_ids: bool = False


class _Loader:
    """What has come from one data loader; guarded by the lock of the inbox."""

    def __init__(self) -> None:
        self.start = 0
        self.arrived = self.trained = 0
        self.queue: _Queue = deque()
        self.open: dict[int, Origin] = {}
        self.checksums = deque[tuple[int, int]](maxlen=_NUM_CHECKSUMS)
        self.has_ended = False


class Inbox:
    """The trainer's end: queues of ``capacity`` batches, one per loader.

    Any thread may call any method. Trainer ``rank`` gets the batches
    ``rank + n * world_size``. Those up to ``trained``, by loader, have been there.
    With ``takes_ids`` the batches come with their ids. ``when_over`` is called when the
    data have ended, and :meth:`take` has said so.
    """

    when_over: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        capacity: int,
        rank: int,
        world_size: int,
        trained: Mapping[int, int] = {},  # only read
        *,
        takes_ids: bool = False,
    ) -> None:
        self._capacity = capacity
        self._takes_ids = takes_ids
        self._rank, self._world_size = rank, world_size
        self._changed = threading.Condition()
        self._error: DataflowError | None = None  # guarded by _changed
        self._is_over = False  # guarded by _changed
        self._loaders = defaultdict[int, _Loader](_Loader)  # guarded by _changed
        self._num_loaders: int | None = None  # guarded by _changed
        self._trained = dict(trained)
        last_batch = max(trained.values(), default=rank - world_size)
        self._next_batch = last_batch + world_size  # guarded by _changed

    def listen(self, host: str, greeting: Greeting = NO_JOB) -> Service:
        """Take what data loaders of a job send, until the service is closed."""
        return Service(
            f"trainer {self._rank}",
            self._receive,
            host=host,
            num_threads=_MAX_LOADERS_AT_ONCE,
            greeting=greeting,
        )

    def begin(self, header: Header) -> None:
        """Note which start of a loader sends from now on.

        One whose data had ended has more batches then.
        """
        with self._changed:
            loader = self._require_loader(header)
            if loader.start == header.incarnation and loader.has_ended:
                self._require_more(header)
                loader.has_ended = False
            loader.start = header.incarnation

    def put(
        self,
        header: Header,
        batch: ReferencedBatch,
        timeout_s: float,
        checksum: int = 0,
    ) -> bool:
        """Add a batch; return whether there was room for it within ``timeout_s``.

        One that has arrived is not added again: it must be the same.
        """
        number = header.batch
        with self._changed:
            loader = self._find(header)
            self._changed.wait_for(
                lambda: number <= loader.arrived or len(loader.queue) < self._capacity,
                timeout_s,
            )
            self._find(header)  # the loader may have started again meanwhile
            if number > loader.arrived and len(loader.queue) < self._capacity:
                loader.arrived = number
                loader.open[number] = batch.origin
                loader.checksums.append((number, checksum))
                loader.queue.append(batch)
                self._changed.notify_all()
            elif number <= loader.arrived:
                self._require_same(header, loader, checksum)
            return number <= loader.arrived

    def end(self, header: Header) -> None:
        """Note that a loader has no more batches."""
        with self._changed:
            self._find(header).has_ended = True
            self._changed.notify_all()

    def move(self, header: Header, moved: Mapping[int, int]) -> None:
        """Note which workers have the ids of a loader's batches again."""
        with self._changed:
            loader = self._find(header)
            for number, worker in moved.items():
                if number in loader.open:
                    loader.open[number].move(worker)

    def position(self, header: Header) -> Position:
        """Return what has become of the batches of a loader."""
        with self._changed:
            loader = self._find(header)
            numbers = [n for n, origin in loader.open.items() if origin.is_settled]
            for number in numbers:
                del loader.open[number]
            lost = [n for n, origin in loader.open.items() if origin.is_lost]
            position = Position(
                arrived=loader.arrived,
                open=[*loader.open],
                lost=lost,
                takes_ids=self._takes_ids,
            )
            if header.kind is Kind.POSITION:
                position.checksums = dict(loader.checksums)
            return position

    def take(self, timeout_s: float, *, in_order: bool) -> ReferencedBatch | None:
        """Return the next batch, or None when all loaders have ended."""
        with self._changed, timeouts.saying(logger, self._waits_for):
            queue = self._changed.wait_for(
                lambda: self._error or self._next_queue(in_order=in_order), timeout_s
            )
            if self._error is not None:
                raise self._error
            if not isinstance(queue, deque) or not queue:
                raise DataflowError(
                    f"A data loader must send a batch within {timeout_s:g} s. "
                    f"Received: nothing. Ended: {self._num_ended()} of "
                    f"{self._num_loaders or 'an unknown number of'} loaders. Does the "
                    "script of each send, or has it ended?"
                )
            self._next_batch += self._world_size
            self._changed.notify_all()
            batch = queue.popleft()
            self._is_over = batch is None
        if batch is None:
            self.when_over()
        return batch

    def _require_loader(self, header: Header) -> _Loader:
        num_loaders = header.flags
        if not header.stream < num_loaders <= _MAX_LOADERS:
            raise FrameError(
                f"A data loader must be one of 1 to {_MAX_LOADERS}. Received: "
                f"{header.stream} of {num_loaders}."
            )
        return self._loaders[header.stream]

    def _find(self, header: Header) -> _Loader:
        """Return the loader that has sent a message, which must be its last start."""
        num_loaders, loader = header.flags, self._require_loader(header)
        if self._num_loaders not in (None, num_loaders):
            raise DataflowError(
                f"Data loaders must agree on their number. Received: {num_loaders}, "
                f"and {self._num_loaders} before."
            )
        self._num_loaders = num_loaders
        if (last := self._trained.pop(header.stream, None)) is not None:
            loader.trained = last // num_loaders + 1
            loader.arrived = max(loader.arrived, loader.trained)
        if header.incarnation != loader.start:
            raise DataflowError(
                f"A process of data loader {header.stream} must ask first which "
                "batches have arrived, and be the last that did. Received: another "
                "one, or this NN worker was started after it. Start the data loader "
                "again."
            )
        return loader

    def _require_same(self, header: Header, loader: _Loader, checksum: int) -> None:
        """Reject other contents under a number that has arrived, and end the job."""
        known = dict(loader.checksums).get(header.batch)
        if header.batch > loader.trained and known != checksum:
            self._error = DataflowError(
                f"Each batch of data loader {header.stream} must have a number of its "
                f"own. Received: {header.batch} again, with other contents. Two "
                "processes may send as one data loader: check REPLICA_INDEX."
            )
            self._changed.notify_all()
            raise self._error

    def _require_more(self, header: Header) -> None:
        """Reject more batches where the training has seen the end of the data."""
        if self._is_over:
            raise DataflowError(
                f"Data loader {header.stream} must send all batches before the data "
                "end. Received: another DataCtx behind the end, which the training has "
                "seen. Put the batches into one DataCtx."
            )

    def _require_ids(self, origin: Origin) -> None:
        """Reject a batch whose ids are not where this trainer wants them."""
        comes_whole = origin.worker == WITH_BATCH
        if comes_whole != self._takes_ids:
            where = ("embedding workers", "the NN worker itself, for as_torchrec=True")
            left_with = f"embedding worker {origin.worker}"
            raise DataflowError(
                f"Data loader {origin.loader} must send its ids to "
                f"{where[self._takes_ids]}. Received: batch {origin.number}, whose ids "
                f"are {'with it' if comes_whole else f'with {left_with}'}. Start it "
                "again, with DataCtx() or with the NN worker's as_torchrec."
            )

    def _waits_for(self) -> str:
        """Return which loaders give no batch, in the thread of a long wait."""
        with self._changed:
            num = self._num_loaders or 1
            names = [
                f"data loader {index}"
                for index in range(num)
                if not (self._loaders[index].has_ended or self._loaders[index].queue)
            ]
        return f"the next batch: {timeouts.waiting_for(names, num, 'loaders')}"

    def _num_ended(self) -> int:
        return sum(loader.has_ended for loader in self._loaders.values())

    def _next_queue(self, *, in_order: bool) -> _Queue | None:
        """Return the queue to take from; at the end one of None."""
        loaders, num_loaders = self._loaders, self._num_loaders or 0
        queues = [loader.queue for loader in loaders.values()]
        if self._num_ended() == num_loaders > 0 and not any(queues):
            return deque([None])
        if not in_order:  # the longest, so that no loader is kept waiting for long
            return max(queues, key=len, default=None)
        # Once around, at most: when loaders and trainers have a common divisor, the
        # numbers of this trainer never come to some of the loaders.
        for _ in range(num_loaders):
            loader = loaders[self._next_batch % num_loaders]
            if loader.queue:
                return loader.queue
            if not loader.has_ended:
                return None
            # This loader had fewer batches: the number does not exist.
            self._next_batch += self._world_size
        return None

    def _receive(self, header: Header, frames: Frames) -> Frames:
        has_room = True
        if header.kind is Kind.POSITION:
            moved: dict[int, int] | None = decode_json(frames, dict[int, int] | None)
            if moved is None:
                self.begin(header)
            else:
                self.move(header, moved)
        elif header.kind is Kind.END_OF_DATA:
            self.end(header)
        elif header.kind is Kind.BATCH and len(frames) == 3:
            worker, checksum = decode_json(frames[:2], tuple[int, int])
            origin = Origin(header.stream, header.batch, worker)
            self._require_ids(origin)
            decode = decode_whole if self._takes_ids else decode_rest
            batch = decode(frames[2], origin)
            has_room = self.put(header, batch, timeouts.STREAM_PUT_S, checksum)
        else:
            raise FrameError(f"A trainer answers no such message: {header}.")
        position = self.position(header)
        position.has_room = has_room
        return [msgspec.json.encode(position)]


def contents_sum(batch: PersiaBatch) -> int:
    """Return a checksum of ids, dense features and labels; never 0.

    Each word of 8 bytes is multiplied by an odd number of its position: a batch in
    which one word differs, or two have changed places, has another sum.
    """
    parts = (*batch.non_id_type_features, *batch.labels)
    arrays: list[npt.NDArray[Any]] = [part.data for part in parts]
    for feature in batch.id_type_features:
        arrays += [feature.ids]
        if isinstance(feature, IDTypeFeature):
            arrays += [feature.lengths]
    total = 0
    for array in arrays:
        of_bytes = array.reshape(-1).view(np.uint8)
        num_words, rest = divmod(len(of_bytes), 8)
        words = of_bytes[: 8 * num_words].view(np.uint64)
        weights = _weights(1 << max(num_words - 1, 0).bit_length())[:num_words]
        total = total * _FACTOR + int(words @ weights)
        if rest:
            total = total * _FACTOR + zlib.crc32(of_bytes[8 * num_words :].tobytes())
    return total % 2**63 or 1


@functools.lru_cache(maxsize=24)
def _weights(num: int) -> npt.NDArray[np.uint64]:
    weights: npt.NDArray[np.uint64] = np.random.PCG64(0).random_raw(num)
    return weights | np.uint64(1)


class BatchSender:
    """The data loader's end: sends batches to the trainers; addresses are by rank.

    Any thread may call any method, after :meth:`begin`.

    Attributes:
        num_trainers: how many trainers there are.
        start: tells this process from earlier ones of the same loader.
        recovery_s: how long a message to a trainer that is away is sent again; ``look``
            is called meanwhile with its rank, and raises if that is useless.
        known: by trainer, what had become of earlier batches at :meth:`begin`.
    """

    recovery_s = 0.0

    def __init__(
        self,
        addresses: Sequence[str],
        loader: int,
        num_loaders: int,
        greeting: Greeting = NO_JOB,
        timeout_s: float = 60.0,
    ) -> None:
        self._trainers = Peers("trainer", addresses, timeout_s, greeting)
        self._trainers.share_memory(waits=False)
        self.num_trainers = len(addresses)
        self.start = secrets.randbits(63)
        self.look: Callable[[int], None] = lambda trainer: None
        self.known: list[Position] = []
        self._loader = loader
        self._num_loaders = num_loaders
        self._timeout_s = timeout_s
        self._closing = threading.Event()

    def begin(self) -> None:
        """Ask every trainer which batches of this loader have arrived."""
        self.known = [
            self._ask(trainer, Kind.POSITION, 0, [encode_json(None)])
            for trainer in range(self.num_trainers)
        ]

    def takes_ids(self) -> bool:
        """Return whether the trainers take the ids themselves; they must all agree."""
        takes = [position.takes_ids for position in self.known]
        if len(set(takes)) > 1:
            raise DataflowError(
                "NN workers must all have as_torchrec=True in their DataLoader, or "
                f"none of them. Received: NN worker {takes.index(True)} has, and NN "
                f"worker {takes.index(False)} has not."
            )
        return takes[0]

    def position(self) -> int:
        """Return up to which number all batches had arrived at :meth:`begin`."""
        missing = (
            number
            for trainer, position in enumerate(self.known)
            for number in range(
                position.arrived + 1, position.arrived + self.num_trainers + 1
            )
            if self.trainer_of(number) == trainer
        )
        return min(missing) - 1

    def had_arrived(self, number: int) -> bool:
        """Return whether a batch had arrived at :meth:`begin`."""
        return number <= self.known[self.trainer_of(number)].arrived

    def batch_id(self, number: int) -> int:
        """Return the number of a batch among those of all loaders, from 0."""
        return (number - 1) * self._num_loaders + self._loader

    def trainer_of(self, number: int) -> int:
        """Return the rank of the trainer that a batch goes to."""
        return self.batch_id(number) % self.num_trainers

    def send(
        self, number: int, batch: PersiaBatch, worker: int, checksum: int = 0
    ) -> Position:
        """Send a batch but for its ids, which ``worker`` has, unless it is WITH_BATCH.

        Its trainer may have no room for it.
        """
        data = batch.to_bytes() if worker == WITH_BATCH else encode_rest(batch)
        frames: Frames = [encode_json([worker, checksum]), data]
        return self._ask(self.trainer_of(number), Kind.BATCH, number, frames)

    def move(self, trainer: int, moved: Mapping[int, int]) -> Position:
        """Tell a trainer which workers have the ids of lost batches again."""
        return self._ask(trainer, Kind.POSITION, 0, [encode_json(moved)])

    def end(self) -> None:
        """Tell every trainer that this loader has no more batches."""
        for trainer in range(self.num_trainers):
            self._ask(trainer, Kind.END_OF_DATA, 0, [encode_json(None)])

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._closing.set()
        self._trainers.close()

    def _ask(self, trainer: int, kind: Kind, number: int, frames: Frames) -> Position:
        header = Header(
            kind, 0, self.start, self._loader, number, flags=self._num_loaders
        )
        deadline_s: float | None = None
        # Nothing answers at the address before a restart: look for the next one.
        timeout_s = (
            min(self._timeout_s, timeouts.STREAM_TRY_S)
            if self.recovery_s
            else self._timeout_s
        )
        while True:
            reply = self._trainers.send(trainer, header, frames, "a batch", timeout_s)
            try:
                return _read(reply.frames())
            except ServerError as exc:
                now_s = time.monotonic()
                deadline_s = deadline_s or now_s + self.recovery_s
                if isinstance(exc, RemoteError) or now_s >= deadline_s:
                    raise
                self.look(trainer)
                if self._closing.wait(_RETRY_S):
                    raise


def _read(frames: Frames) -> Position:
    position: Position = decode_json(frames, Position)
    return position
