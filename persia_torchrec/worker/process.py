"""The requests to an embedding worker: messages in, pooled embeddings out.

    from a data loader   BUFFER_IDS  three frames of bags            -> {"reference"}
    from any client      HELLO       nothing                         -> ``LookupHello``
    from a trainer       ADD_TABLES  JSON list of tables             -> null
                         FORWARD     JSON {"loader", "reference"}    -> embeddings
                                     or JSON null and three frames of bags
                         BACKWARD    floats, a frame per output      -> outcome
                         ABANDON     nothing                         -> outcome

Embeddings are, as JSON, {"slots", "outputs", "places"}: the slots of the batch, and the
shapes of all arrays; then a frame of floats for each output, and a frame of int32 for
the places of each raw slot, all in the order of the batch. In BUFFER_IDS the header's
stream is the number of the data loader. BACKWARD is answered when the servers have
applied the update, with the sum of their outcomes.

Between two messages about the same batch the worker keeps it, both times bounded:

    data loader --ids--> IdBuffer --reference--> ...trainer asks for it... --> pulled
    pulled --> AwaitingGradient --...trainer sends the gradient...--> pushed
"""

import itertools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.errors import DataflowError, FrameError
from persia_torchrec.lookup.bags import Bags, decode_bags
from persia_torchrec.lookup.sharded_lookup import RoutedBatch
from persia_torchrec.lookup.slots import SlotsLookup
from persia_torchrec.table import TableSpec
from persia_torchrec.wire import messages
from persia_torchrec.wire.messages import Frames, Header, Kind, decode_json, encode_json
from persia_torchrec.wire.precision import decode_floats, encode_floats

logger = logging.getLogger(__name__)

_MAX_OPEN = 65536


class _Origin(msgspec.Struct):
    """The JSON of a FORWARD of a batch whose ids wait here."""

    loader: int
    reference: int


class IdBuffer:
    """Ids of batches that wait for their trainer. Any thread may call any method.

    Of each data loader there are ``capacity``; those that have waited for ``expires_s``
    seconds make room for others.
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
        # By loader. guarded by _lock
        self._batches: dict[int, dict[int, tuple[float, dict[str, Bags]]]]
        self._batches = defaultdict(dict)

    def put(self, loader: int, bags: dict[str, Bags]) -> int | None:
        """Keep a batch; return its reference, or None when the buffer is full."""
        with self._lock:
            batches = self._batches[loader]
            if len(batches) >= self._capacity:
                latest = self._clock() - self._expires_s
                expired = [n for n, (since, _) in batches.items() if since < latest]
                for number in expired:
                    del batches[number]
                if not expired:
                    return None
                logger.warning(
                    "dropped %d batches of data loader %d that no trainer asked for in "
                    "%g s",
                    *(len(expired), loader, self._expires_s),
                )
            reference = next(self._numbers)
            batches[reference] = (self._clock(), bags)
            return reference

    def peek(self, loader: int, reference: int) -> dict[str, Bags]:
        """Return a batch and keep it, so that a failed pull can be tried again."""
        with self._lock:
            entry = self._batches[loader].get(reference)
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
            self._batches[loader].pop(reference, None)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(batches) for batches in self._batches.values())


class AwaitingGradient:
    """Training batches that are pulled, and not yet updated. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # None while a gradient is applied. guarded by _lock
        self._batches: dict[BatchNumber, RoutedBatch | None] = {}

    def put(self, number: BatchNumber, batch: RoutedBatch) -> None:
        """Keep a batch; refused if too many are open."""
        with self._lock:
            if len(self._batches) >= _MAX_OPEN:
                raise DataflowError(
                    f"At most {_MAX_OPEN} batches may wait for their gradient. Does "
                    "every training batch get its backward pass?"
                )
            self._batches[number] = batch

    @contextmanager
    def taken(self, number: BatchNumber) -> Iterator[RoutedBatch]:
        """Take a batch once; its update is applied when the block ends."""
        with self._lock:
            batch = self._batches.get(number)
            if batch is not None:
                self._batches[number] = None
        if batch is None:
            raise DataflowError(
                f"Batch {number.batch} must have been pulled here for training, and "
                "not been updated since."
            )
        try:
            yield batch
        finally:
            with self._lock:
                del self._batches[number]

    def __len__(self) -> int:
        return len(self._batches)


class WorkerProcess:
    """Answers the messages to an embedding worker; several threads may ask.

    Attributes:
        buffer: batches of data loaders that no trainer has asked for yet.
        open: training batches that are pulled, and whose update is not yet applied.
    """

    def __init__(self, lookup: SlotsLookup, buffer: IdBuffer) -> None:
        self.lookup = lookup
        self.buffer = buffer
        self.open = AwaitingGradient()

    def answer(self, header: Header, frames: Frames) -> Frames:
        """Answer one message; the handler of a ``Service``."""
        number = BatchNumber(header.stream, header.batch)
        match header.kind:
            case Kind.HELLO:
                self.lookup.learn_tables()  # of a loaded checkpoint, with no trainer
                return [msgspec.json.encode(self.lookup.hello())]
            case Kind.FORWARD:
                return self._forward(header, number, frames)
            case Kind.BACKWARD:
                outcome = self._backward(header, number, frames)
                return [msgspec.json.encode(outcome)]
            case Kind.ABANDON:
                with self.open.taken(number) as batch:
                    replies = self.lookup.abandon(batch)
                    outcome = PushOutcome.read(reply.frames() for reply in replies)
                return [msgspec.json.encode(outcome)]
            case Kind.BUFFER_IDS:
                bags = decode_bags(frames[1:])
                self.lookup.select(bags)
                reference = self.buffer.put(header.stream, bags)
                return [encode_json({"reference": reference})]
            case Kind.ADD_TABLES:
                tables = decode_json(frames, list[dict[str, Any]])
                self.lookup.add_tables([TableSpec.from_json(t) for t in tables])
                return [encode_json(None)]
            case _:
                raise FrameError(
                    f"An embedding worker answers no {header.kind.name} message. "
                    "Is this the address of another role?"
                )

    def _forward(self, header: Header, number: BatchNumber, frames: Frames) -> Frames:
        is_training = bool(header.flags & messages.TRAINING)
        origin: _Origin | None = decode_json(frames[:2], _Origin | None)
        if origin is None:
            bags = decode_bags(frames[2:])
        else:
            bags = self.buffer.peek(origin.loader, origin.reference)
        outputs, batch = self.lookup.pull(bags, number if is_training else None)
        if is_training:
            self.open.put(number, batch)
        if origin is not None:
            self.buffer.remove(origin.loader, origin.reference)
        described = {
            "slots": batch.slots,
            "outputs": [output.shape for output in outputs],
            "places": [places.shape for places in batch.places],
        }
        return [
            encode_json(described),
            *(encode_floats(output, header.precision) for output in outputs),
            *map(messages.bytes_of, batch.places),
        ]

    def _backward(
        self, header: Header, number: BatchNumber, frames: Frames
    ) -> PushOutcome:
        with self.open.taken(number) as batch:
            shapes = self.lookup.shapes(batch)
            if len(frames) != 1 + len(shapes):
                raise FrameError(
                    f"BACKWARD has {1 + len(shapes)} frames. Received: {len(frames)}."
                )
            grads = tuple(
                decode_floats(frame, math.prod(shape), header.precision).reshape(shape)
                for frame, shape in zip(frames[1:], shapes, strict=True)
            )
            return self.lookup.update(batch, grads)
