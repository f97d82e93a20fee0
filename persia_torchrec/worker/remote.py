"""The trainer's way to embedding workers in other processes.

``RemoteWorkers`` pulls and pushes like a ``SlotsLookup`` in this process; only the
work is done elsewhere. A batch whose ids a data loader has left with a worker is asked
for by its reference there; other batches go to the workers in turn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.errors import ConfigError, FrameError
from persia_torchrec.routing.dedup import Positions
from persia_torchrec.table import TableChange, TableSpec, changed_tables
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import (
    TRAINING,
    Frames,
    Header,
    Kind,
    Precision,
    array_of,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.precision import decode_floats, encode_floats
from persia_torchrec.wire.transport import Connections
from persia_torchrec.worker.bags import Bags, encode_bags
from persia_torchrec.worker.hello import Hello
from persia_torchrec.worker.pulled import Outputs

_ADD_TABLES_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class BatchReference:
    """Where the ids of a batch wait.

    Attributes:
        worker: number of the embedding worker.
        loader: number of the data loader that left them there.
        reference: what the worker called them.
    """

    worker: int
    loader: int
    reference: int


@dataclass(frozen=True, slots=True)
class RemoteBatch:
    """A batch that an embedding worker has pulled, and waits for its gradient."""

    worker: int
    number: BatchNumber
    places: tuple[Positions, ...] = ()
    """For each raw slot, int32 ``(B, F)``, see ``worker/raw_ids.py``."""

    slots: tuple[str, ...] = ()
    """Names of the slots that it has, in its order."""


class RemoteWorkers:
    """Connections to all embedding workers. Any thread may call any method.

    Args:
        addresses: of the workers, in their order.
        timeout_s: seconds that a request may take.
        precision: how embeddings and gradients travel to and from the workers.
        greeting: of this process; the workers must belong to the same job, or to none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = 60.0,
        precision: Precision = Precision.FP32,
        greeting: Greeting = NO_JOB,
    ) -> None:
        self._connections = Connections(
            "embedding worker", addresses, greeting=greeting
        )
        self._timeout_s = timeout_s
        self._precision = precision
        self._num_direct = 0
        self._tables: dict[str, TableSpec] = {}

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self._connections)

    def hello(self, timeout_s: float | None = None) -> Hello:
        """Ask all workers whether they and their servers are ready.

        Args:
            timeout_s: seconds that it may take, if not as many as any other request.

        Raises:
            ConfigError: the workers differ in their slots.
            ServerError: a worker or a server is not ready, or does not answer.
        """
        timeout_s = timeout_s or self._timeout_s
        replies = [
            self._connections.submit(
                worker,
                Header(Kind.HELLO),
                [encode_json(None)],
                timeout_s=timeout_s,
                what="asking whether it is ready",
            )
            for worker in range(self.num_workers)
        ]
        answers = [decode_json(reply.result(timeout_s + 5)[1]) for reply in replies]
        first, *others = map(Hello.from_json, answers)
        for worker, other in enumerate(others, start=1):
            if other.slots != first.slots:
                raise ConfigError(
                    "All embedding workers must have the same slots. Received: "
                    f"{self._connections.names[worker]} differs from "
                    f"{self._connections.names[0]}. Give all of them the same "
                    "embedding_config.yml, and servers of one checkpoint."
                )
        return first

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make every worker, and through it every server, know the tables.

        Raises:
            ServerError: a worker or a server refuses, or does not answer.
        """
        body = [encode_json([spec.to_json() for spec in specs])]
        for worker in range(self.num_workers):
            # One after the other: servers compile only once what the first one needs.
            self._connections.submit(
                worker,
                Header(Kind.ADD_TABLES),
                body,
                timeout_s=_ADD_TABLES_TIMEOUT_S,
                what="adding tables",
            ).result(_ADD_TABLES_TIMEOUT_S + 5)
        self._tables.update((spec.name, spec) for spec in specs)

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of the tables that were added.

        Updates are not in order with it: wait for those that must come before.

        Raises:
            ServerError: a worker or a server refuses, or does not answer.
        """
        if changed := changed_tables(self._tables.values(), change):
            self.add_tables(changed)

    def buffer(self, worker: int, loader: int, bags: Mapping[str, Bags]) -> int | None:
        """Leave the ids of a batch with a worker.

        Args:
            worker: number of the worker.
            loader: number of this data loader.
            bags: by name of feature.

        Returns:
            The reference, or None when the worker's buffer is full.

        Raises:
            BatchError: a feature's dtypes or lengths do not fit.
            ServerError: the worker refuses the batch, or does not answer in time.
        """
        header = Header(Kind.BUFFER_IDS, stream=loader)
        frames = encode_bags(bags)
        answer = decode_json(self._wait(self._send(worker, header, frames, "ids")))
        assert isinstance(answer, dict)
        reference = answer["reference"]
        return None if reference is None else int(reference)

    def pull(
        self,
        source: BatchReference | Mapping[str, Bags],
        number: BatchNumber | None,
    ) -> tuple[Outputs, RemoteBatch]:
        """Have a batch pulled and pooled; see ``SlotsLookup.pull``.

        Args:
            source: where its ids wait, or the ids themselves, in the order of the
                batch.
            number: which batch of which stream, when it is for training.
        """
        assert number is None or number.share is None, "no joint steps through workers"
        if isinstance(source, BatchReference):
            worker = source.worker
            origin = {"loader": source.loader, "reference": source.reference}
            frames: Frames = [encode_json(origin)]
        else:
            worker = self._num_direct % self.num_workers
            self._num_direct += 1
            frames = [encode_json(None), *encode_bags(source)]
        handle = RemoteBatch(worker, number or BatchNumber(0, 0))
        header = self._header(Kind.FORWARD, handle, TRAINING if number else 0)
        reply = self._wait(self._send(worker, header, frames, "lookup"))
        slots, shapes, places_shapes = _described(reply)
        # Copied: the frames are read-only, and torch wants memory that can be written.
        outputs = tuple(
            decode_floats(frame, math.prod(shape), self._precision)
            .reshape(shape)
            .copy()
            for frame, shape in zip(reply[2:], shapes, strict=False)
        )
        places = tuple(
            array_of(frame, np.int32).reshape(shape).copy()
            for frame, shape in zip(
                reply[2 + len(shapes) :], places_shapes, strict=True
            )
        )
        return outputs, replace(handle, places=places, slots=slots)

    def push(self, handle: RemoteBatch, grads: Outputs) -> list[Reply]:
        """Send the gradients of a batch; the reply comes when they are applied."""
        header = self._header(Kind.BACKWARD, handle, 0)
        frames: Frames = [encode_floats(grad, self._precision) for grad in grads]
        return [self._send(handle.worker, header, frames, "update")]

    def abandon(self, handle: RemoteBatch) -> list[Reply]:
        """Tell that a training batch gets no gradients."""
        header = self._header(Kind.ABANDON, handle, 0)
        return [self._send(handle.worker, header, [encode_json(None)], "giving up")]

    def missed(self, replies: Sequence[Reply]) -> int:
        """Wait until a push is applied; return how many ids had no row any more."""
        return self.outcome(replies).num_missed

    def outcome(self, replies: Sequence[Reply]) -> PushOutcome:
        """Wait until a push is applied; return which gradients were not."""
        return PushOutcome.read(reply.frames() for reply in replies)

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._connections.close()

    def _header(self, kind: Kind, handle: RemoteBatch, flags: int) -> Header:
        number = handle.number
        return Header(
            kind,
            stream=number.stream,
            batch=number.batch,
            precision=self._precision,
            flags=flags,
        )

    def _send(self, worker: int, header: Header, frames: Frames, what: str) -> Reply:
        return self._connections.submit(
            worker, header, frames, timeout_s=self._timeout_s, what=what
        )

    def _wait(self, reply: Reply) -> Frames:
        # The I/O thread fails the reply at its deadline; the margin is for its death.
        return reply.result(self._timeout_s + 5)[1]


def _described(
    reply: Frames,
) -> tuple[tuple[str, ...], list[list[int]], list[list[int]]]:
    """Return the slots of a reply, the shapes of its outputs, and of the places."""
    answer = decode_json(reply[:2])
    parts = answer if isinstance(answer, dict) else {}
    slots, outputs = parts.get("slots", []), parts.get("outputs", [])
    places = parts.get("places", [])
    are_names = bool(slots) and all(isinstance(name, str) for name in slots)
    if not are_names or not outputs or len(reply) != 2 + len(outputs) + len(places):
        raise FrameError(
            "The reply must have the slots of the batch, the shapes of its arrays, and "
            f"as many arrays. Received: {len(reply)} frames, {answer!r:.100}."
        )
    return tuple(slots), outputs, places
