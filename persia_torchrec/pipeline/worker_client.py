"""A trainer's client of embedding workers in other processes.

``RemoteWorkers`` pulls and pushes like a ``SlotsLookup`` in this process; only the
work is done elsewhere. A batch whose ids a data loader has left with a worker is asked
for by its reference there; other batches go to the workers round-robin.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.client.servers import Peers
from persia_torchrec.embedding.data import ReferencedBatch
from persia_torchrec.errors import ConfigError, FrameError, PersiaError
from persia_torchrec.lookup.bags import Bags, encode_bags
from persia_torchrec.lookup.sharded_lookup import Outputs
from persia_torchrec.lookup.slots import LookupHello
from persia_torchrec.metrics import Observations
from persia_torchrec.routing.shard import Positions
from persia_torchrec.table import TableChange, TableSpec, changed_tables
from persia_torchrec.wire import messages
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import Frames, Header, Kind, Precision
from persia_torchrec.wire.precision import decode_floats, encode_floats

_FORWARD = "forward_client_time_cost_sec"
_FORWARD_ERROR = "forward_error"
_BACKWARD = "backward_client_time_cost_sec"
WAIT = "get_train_batch_time_cost_more_than_1ms_sec"

# PERSIA's metrics of its NN workers. What PERSIA has as the value of the last batch is
# here the mean of the batches since the last push.
_HELPS = {
    _FORWARD: "a lookup by an embedding worker",
    _FORWARD_ERROR: "lookups that failed",
    _BACKWARD: "an update by an embedding worker, until it is applied",
    WAIT: "waiting for a training batch and its rows, where it took more than 1 ms",
}


@dataclass(frozen=True, slots=True)
class RemoteBatch:
    """A batch that an embedding worker has pulled, and waits for its gradient.

    ``places`` are int32 ``(B, F)`` for each raw slot, see ``RawIds``.
    """

    worker: int
    number: BatchNumber
    places: tuple[Positions, ...] = ()
    slots: tuple[str, ...] = ()


Size = Annotated[int, msgspec.Meta(ge=0)]


class _Forwarded(msgspec.Struct):
    """The JSON of a reply to FORWARD: slots, and the shapes of the arrays."""

    slots: tuple[str, ...]
    outputs: list[list[Size]]
    places: list[list[Size]]


class _Buffered(msgspec.Struct):
    """The JSON of a reply to BUFFER_IDS; no reference where the buffer is full."""

    reference: int | None


class RemoteWorkers(Peers):
    """Connections to all embedding workers. Any thread may call any method.

    Embeddings and gradients travel at ``precision``. The workers must belong to the job
    of ``greeting``, or to none.

    Attributes:
        num_workers: how many workers there are.
        observed: latencies of pulls and pushes, and failures, for a trainer's metrics.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = timeouts.REQUEST_S,
        precision: Precision = Precision.FP32,
        greeting: Greeting = NO_JOB,
    ) -> None:
        super().__init__("embedding worker", addresses, timeout_s, greeting)
        self.num_workers = len(addresses)
        self._precision = precision
        self.observed = Observations(_HELPS)
        self.observed.count(_FORWARD_ERROR, 0)
        self._num_direct = itertools.count()
        self._tables: dict[str, TableSpec] = {}

    def hello(self, timeout_s: float | None = None) -> LookupHello:
        """Ask all workers whether they and their servers are ready."""
        what = "asking whether it is ready"
        hellos: list[LookupHello] = self.ask(
            Kind.HELLO, None, what, answer=LookupHello, timeout_s=timeout_s
        )
        for name, hello in zip(self.names, hellos, strict=True):
            if hello.slots != hellos[0].slots:
                raise ConfigError(
                    "All embedding workers must have the same slots. Received: "
                    f"{name} differs from {self.names[0]}. Give all of them the same "
                    "embedding_config.yml, and servers of one checkpoint."
                )
        return hellos[0]

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make every worker, and through it every server, know the tables."""
        header = Header(Kind.ADD_TABLES)
        body: Frames = [messages.encode_json([spec.to_json() for spec in specs])]
        for worker in range(self.num_workers):
            # One after the other: servers compile only once what the first one needs.
            what = "adding tables"
            self.send(worker, header, body, what, timeouts.ADD_TABLES_S).frames()
        self._tables.update((spec.name, spec) for spec in specs)

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of the tables that were added.

        Updates are not in order with it: wait for those that must come before.
        """
        if changed := changed_tables(self._tables.values(), change):
            self.add_tables(changed)

    def buffer(self, worker: int, loader: int, bags: Mapping[str, Bags]) -> int | None:
        """Leave a batch's ids with a worker; None when the worker's buffer is full."""
        header = Header(Kind.BUFFER_IDS, stream=loader)
        reply = self.send(worker, header, encode_bags(bags), "ids")
        told: _Buffered = self.read(worker, reply, _Buffered)
        return told.reference

    def pull(
        self,
        source: ReferencedBatch | Mapping[str, Bags],
        number: BatchNumber | None,
    ) -> tuple[Outputs, RemoteBatch]:
        """Have a batch pulled and pooled; see ``SlotsLookup.pull``."""
        try:
            with self.observed.timed(_FORWARD):
                return self._pull(source, number)
        except PersiaError:
            self.observed.count(_FORWARD_ERROR)
            raise

    def _pull(
        self,
        source: ReferencedBatch | Mapping[str, Bags],
        number: BatchNumber | None,
    ) -> tuple[Outputs, RemoteBatch]:
        assert number is None or number.share is None, "no joint steps through workers"
        if isinstance(source, ReferencedBatch):
            worker = source.worker
            origin = {"loader": source.loader, "reference": source.reference}
            frames: Frames = [messages.encode_json(origin)]
        else:
            worker = next(self._num_direct) % self.num_workers
            frames = [messages.encode_json(None), *encode_bags(source)]
        flags = 0 if number is None else messages.TRAINING
        number = number or BatchNumber(0, 0)
        header = self._header(Kind.FORWARD, number, flags)
        reply = self.send(worker, header, frames, "lookup").frames()
        told: _Forwarded = messages.decode_json(reply[:2], _Forwarded)
        first = 2 + len(told.outputs)
        sizes = list(map(len, reply[first:]))
        fits = sizes == [4 * math.prod(shape) for shape in told.places]
        if not told.slots or len(reply) < first or not fits:
            raise FrameError(
                "The reply must have the slots of the batch, the shapes of its arrays, "
                f"and as many arrays. Received: {len(reply)} frames, {told!r:.100}."
            )
        # Copied: the frames are read-only, and torch wants memory that can be written.
        outputs = tuple(
            decode_floats(frame, math.prod(shape), self._precision)
            .reshape(shape)
            .copy()
            for frame, shape in zip(reply[2:], told.outputs, strict=False)
        )
        places = tuple(
            messages.array_of(frame, np.int32).reshape(shape).copy()
            for frame, shape in zip(reply[first:], told.places, strict=True)
        )
        return outputs, RemoteBatch(worker, number, places, told.slots)

    def push(self, handle: RemoteBatch, grads: Outputs) -> list[Reply]:
        """Send the gradients of a batch; the reply comes when they are applied."""
        header = self._header(Kind.BACKWARD, handle.number)
        began_s = time.perf_counter()
        frames: Frames = [encode_floats(grad, self._precision) for grad in grads]
        reply = self.send(handle.worker, header, frames, "update")

        def observe(_: object) -> None:
            if reply.exception() is None:
                self.observed.observe(_BACKWARD, time.perf_counter() - began_s)

        reply.add_done_callback(observe)
        return [reply]

    def abandon(self, handle: RemoteBatch) -> list[Reply]:
        """Tell that a training batch gets no gradients."""
        header = self._header(Kind.ABANDON, handle.number)
        nothing = [messages.encode_json(None)]
        return [self.send(handle.worker, header, nothing, "giving up")]

    def _header(self, kind: Kind, number: BatchNumber, flags: int = 0) -> Header:
        stream, batch, _ = number
        return Header(kind, 0, 0, stream, batch, self._precision, flags)
