"""An embedding worker as a process of its own: messages in, pooled embeddings out.

    from a data loader   BUFFER_IDS  three frames of bags            -> {"reference"}
    from anybody         HELLO       nothing                         -> worker/hello.py
    from a trainer       ADD_TABLES  JSON list of tables             -> null
                         FORWARD     JSON {"loader", "reference"}    -> embeddings
                                     or JSON null and three frames of bags
                         BACKWARD    floats, a frame an output       -> outcome
                         ABANDON     nothing                         -> outcome

Embeddings are, as JSON, {"slots", "outputs", "places"}: the slots of the batch, and the
shapes of all arrays; then a frame of floats for each output, and a frame of int32 for
the places of each raw slot. All have the order of the batch, and slots that it has not
take no bytes.

In BUFFER_IDS the header's stream is the number of the data loader. BACKWARD is answered
when the servers have applied the update, with what they answer to it together.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.errors import FrameError
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    TRAINING,
    Frame,
    Frames,
    Header,
    Kind,
    bytes_of,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.precision import decode_floats, encode_floats
from persia_torchrec.worker.bags import Bags, decode_bags
from persia_torchrec.worker.buffers import AwaitingGradient, IdBuffer
from persia_torchrec.worker.slots import SlotsLookup

logger = logging.getLogger(__name__)


class WorkerProcess:
    """Answers the messages to an embedding worker; several threads may ask.

    Args:
        worker: pulls and pushes.
        buffer: keeps the ids of data loaders.
    """

    def __init__(self, worker: SlotsLookup, buffer: IdBuffer) -> None:
        self._worker = worker
        self._buffer = buffer
        self._open = AwaitingGradient()

    @property
    def num_pending(self) -> int:
        """Batches of data loaders that no trainer has asked for yet."""
        return len(self._buffer)

    @property
    def num_stale(self) -> int:
        """Training batches that are pulled, and whose update is not yet applied."""
        return len(self._open)

    def answer(self, header: Header, frames: Frames) -> Frames:
        """Answer one message; the handler of a ``Service``.

        Raises:
            PersiaError: what the sender is told.
        """
        match header.kind:
            case Kind.HELLO:
                self._worker.learn_tables()  # of a loaded checkpoint, with no trainer
                return [encode_json(self._worker.hello().to_json())]
            case Kind.FORWARD:
                return self._forward(header, frames)
            case Kind.BACKWARD:
                return [encode_json(self._backward(header, frames))]
            case Kind.ABANDON:
                with self._open.taken(_number(header)) as batch:
                    outcome = self._worker.outcome(self._worker.abandon(batch))
                return [encode_json(outcome.to_json())]
            case Kind.BUFFER_IDS:
                bags = decode_bags(frames[1:])
                self._worker.check(bags)
                reference = self._buffer.put(header.stream, bags)
                return [encode_json({"reference": reference})]
            case Kind.ADD_TABLES:
                self._add_tables(decode_json(frames))
                return [encode_json(None)]
            case _:
                raise FrameError(
                    f"An embedding worker answers no {header.kind.name} message. "
                    "Is this the address of another role?"
                )

    def _add_tables(self, descriptions: object) -> None:
        if not isinstance(descriptions, list) or not all(
            isinstance(description, dict) for description in descriptions
        ):
            raise FrameError("ADD_TABLES must carry a list of tables.")
        self._worker.add_tables([TableSpec.from_json(d) for d in descriptions])

    def _forward(self, header: Header, frames: Sequence[Frame]) -> Frames:
        origin = decode_json(frames[:2])
        number = _number(header) if header.flags & TRAINING else None
        if origin is None:
            return self._pull(header, decode_bags(frames[2:]), number)
        loader, reference = _reference(origin)
        reply = self._pull(header, self._buffer.peek(loader, reference), number)
        self._buffer.remove(loader, reference)
        return reply

    def _pull(
        self, header: Header, bags: dict[str, Bags], number: BatchNumber | None
    ) -> Frames:
        outputs, batch = self._worker.pull(bags, number)
        if number is not None:
            self._open.put(number, batch)
        described = {
            "slots": batch.slots,
            "outputs": _shapes(outputs),
            "places": _shapes(batch.places),
        }
        return [
            encode_json(described),
            *(encode_floats(output, header.precision) for output in outputs),
            *map(bytes_of, batch.places),
        ]

    def _backward(self, header: Header, frames: Sequence[Frame]) -> dict[str, int]:
        with self._open.taken(_number(header)) as batch:
            shapes = self._worker.shapes(batch)
            if len(frames) != 1 + len(shapes):
                raise FrameError(
                    f"BACKWARD has {1 + len(shapes)} frames. Received: {len(frames)}."
                )
            grads = tuple(
                decode_floats(frame, math.prod(shape), header.precision).reshape(shape)
                for frame, shape in zip(frames[1:], shapes, strict=True)
            )
            return self._worker.update(batch, grads).to_json()


def _shapes(arrays: Sequence[npt.NDArray[Any]]) -> list[tuple[int, ...]]:
    return [array.shape for array in arrays]


def _number(header: Header) -> BatchNumber:
    return BatchNumber(header.stream, header.batch)


def _reference(origin: object) -> tuple[int, int]:
    """Return the data loader that left a batch here, and the batch's reference."""
    numbers = origin if isinstance(origin, dict) else {}
    loader, reference = numbers.get("loader"), numbers.get("reference")
    if not isinstance(loader, int) or not isinstance(reference, int):
        raise FrameError(
            "FORWARD must name a loader and a reference, or carry the ids itself. "
            f"Received: {origin!r:.100}."
        )
    return loader, reference
