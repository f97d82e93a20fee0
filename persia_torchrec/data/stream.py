"""How a batch gets from a data loader to a trainer.

The ids have gone to an embedding worker; what is left of the batch, and the reference
under which its ids wait there, goes to the trainer whose turn it is:

    BATCH         header: stream = loader, batch = number of the batch, flags = loaders
                  1: JSON [worker, loader, reference]
                  2: the rest of the batch (embedding/data.py)
    END_OF_DATA   header: stream = loader, flags = loaders
                  1: JSON null

The reply to BATCH is JSON true, or false when the trainer's buffer stays full for a
moment: the loader then sends the batch again. The trainer keeps a bounded queue per
loader, so that one that is ahead takes no room of one that is behind. A loader numbers
its batches ``loader + n * num_loaders``, so that the next one in the order of the
numbers (``in_order``) is always at the head of a known queue.
"""

import threading
from collections import deque
from collections.abc import Sequence

from persia_torchrec.embedding import data
from persia_torchrec.embedding.data import PersiaBatch, ReferencedBatch
from persia_torchrec.errors import DataflowError, FrameError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import Frames, Header, Kind, decode_json, encode_json
from persia_torchrec.wire.service import Service
from persia_torchrec.wire.transport import Connections

_PUT_TIMEOUT_S = 0.5
_MAX_LOADERS_AT_ONCE = 16

_Queue = deque[ReferencedBatch | None]


class Inbox:
    """The trainer's end: queues of ``capacity`` batches, one per loader.

    Any thread may call any method. Trainer ``rank`` gets the batches
    ``rank + n * world_size``.
    """

    def __init__(self, capacity: int, rank: int, world_size: int) -> None:
        self._capacity = capacity
        self._world_size = world_size
        self._changed = threading.Condition()
        self._queues: dict[int, _Queue] = {}  # guarded by _changed
        self._ended: set[int] = set()  # guarded by _changed
        self._num_loaders: int | None = None  # guarded by _changed
        self._next_batch = rank  # guarded by _changed

    def listen(self, host: str, greeting: Greeting = NO_JOB) -> Service:
        """Take what data loaders of a job send, until the service is closed."""
        return Service(
            "batch receiver",
            self._receive,
            host=host,
            num_threads=_MAX_LOADERS_AT_ONCE,
            greeting=greeting,
        )

    def put(
        self, loader: int, num_loaders: int, batch: ReferencedBatch, timeout_s: float
    ) -> bool:
        """Add a batch; return whether there was room for it within ``timeout_s``."""
        with self._changed:
            self._learn(num_loaders)
            waiting = self._queues.setdefault(loader, deque())
            has_room = self._changed.wait_for(
                lambda: len(waiting) < self._capacity, timeout_s
            )
            if has_room:
                waiting.append(batch)
                self._changed.notify_all()
        return has_room

    def end(self, loader: int, num_loaders: int) -> None:
        """Note that a loader has no more batches."""
        with self._changed:
            self._learn(num_loaders)
            self._ended.add(loader)
            self._changed.notify_all()

    def take(self, timeout_s: float, *, in_order: bool) -> ReferencedBatch | None:
        """Return the next batch, or None when all loaders have ended."""
        with self._changed:
            queue = self._changed.wait_for(
                lambda: self._next_queue(in_order=in_order), timeout_s
            )
            if not queue:
                raise DataflowError(
                    f"A data loader must send a batch within {timeout_s:g} s. "
                    f"Received: nothing. Ended: {len(self._ended)} of "
                    f"{self._num_loaders or 'an unknown number of'} loaders."
                )
            self._next_batch += self._world_size
            self._changed.notify_all()
            return queue.popleft()

    def _learn(self, num_loaders: int) -> None:
        if self._num_loaders not in (None, num_loaders):
            raise DataflowError(
                f"Data loaders must agree on their number. Received: {num_loaders}, "
                f"and {self._num_loaders} before."
            )
        self._num_loaders = num_loaders

    def _next_queue(self, *, in_order: bool) -> _Queue | None:
        """Return the queue to take from; at the end one of None."""
        queues, num_loaders = self._queues, self._num_loaders or 0
        if len(self._ended) == num_loaders > 0 and not any(queues.values()):
            return deque([None])
        if not in_order:  # the longest, so that no loader is kept waiting for long
            return max(queues.values(), key=len, default=None)
        # Once around, at most: when loaders and trainers have a common divisor, the
        # numbers of this trainer never come to some of the loaders.
        for _ in range(num_loaders):
            loader = self._next_batch % num_loaders
            if queues.get(loader):
                return queues[loader]
            if loader not in self._ended:
                return None
            # This loader had fewer batches: the number does not exist.
            self._next_batch += self._world_size
        return None

    def _receive(self, header: Header, frames: Frames) -> Frames:
        loader, num_loaders = header.stream, header.flags
        if header.kind is Kind.END_OF_DATA:
            self.end(loader, num_loaders)
            return [encode_json(None)]
        if header.kind is not Kind.BATCH or len(frames) != 3:
            raise FrameError(f"A trainer answers no such message: {header}.")
        worker, source, reference = decode_json(frames[:2], tuple[int, int, int])
        # Copied: a frame is read-only, and torch wants memory that can be written.
        batch = data.decode_rest(
            bytearray(frames[2]), worker=worker, loader=source, reference=reference
        )
        return [encode_json(self.put(loader, num_loaders, batch, _PUT_TIMEOUT_S))]


class BatchSender:
    """The data loader's end: sends batches to the trainers; addresses are by rank."""

    def __init__(
        self,
        addresses: Sequence[str],
        loader: int,
        num_loaders: int,
        greeting: Greeting = NO_JOB,
        timeout_s: float = 60.0,
    ) -> None:
        self._connections = Connections("trainer", addresses, greeting=greeting)
        self.num_trainers = len(addresses)
        self._loader = loader
        self._num_loaders = num_loaders
        self._timeout_s = timeout_s

    def send(
        self, trainer: int, batch: PersiaBatch, worker: int, reference: int
    ) -> bool:
        """Send a batch but for its ids; return whether the trainer had room for it."""
        origin = encode_json([worker, self._loader, reference])
        frames: Frames = [origin, data.encode_rest(batch)]
        return self._ask(trainer, Kind.BATCH, batch.batch_id or 0, frames) is True

    def end(self) -> None:
        """Tell every trainer that this loader has no more batches."""
        for trainer in range(self.num_trainers):
            self._ask(trainer, Kind.END_OF_DATA, 0, [encode_json(None)])

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._connections.close()

    def _ask(self, trainer: int, kind: Kind, batch: int, frames: Frames) -> object:
        header = Header(kind, stream=self._loader, batch=batch, flags=self._num_loaders)
        reply = self._connections.submit(
            trainer, header, frames, timeout_s=self._timeout_s, what="a batch"
        )
        return decode_json(reply.frames())
