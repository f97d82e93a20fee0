"""A trainer's client of embedding workers in other processes.

``RemoteWorkers`` pulls and pushes like a ``SlotsLookup`` in this process; only the
work is done elsewhere. A batch whose ids a data loader has left with a worker is asked
for by its loader and number; other batches go to the workers round-robin.

Where something starts workers again (``recovery_s``), what one that ended has not
answered is asked of it again, or of another one. FORWARD and BACKWARD need nothing but
the ids of the batch: those of a data loader are sent by that again (see ``Origin``),
and others come from here. A push keeps its stream and number, by which servers
recognise what they have applied.
"""

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from persia_torchrec import timeouts
from persia_torchrec.arrays import Positions
from persia_torchrec.client.client import BatchNumber, Reply
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    PersiaError,
)
from persia_torchrec.lookup.bags import Bags, encode_bags
from persia_torchrec.lookup.sharded_lookup import Outputs
from persia_torchrec.metrics.values import Observations
from persia_torchrec.persia.batch import Origin, ReferencedBatch
from persia_torchrec.persia.slots import LookupHello
from persia_torchrec.persia.workers import Workers, is_away, worker_of
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.float_codec import (
    UNDERFLOWS,
    decode_floats,
    encode_floats,
    num_zeroed,
)
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.messages import Frame, Frames, Header, Kind, Precision
from persia_torchrec.rpc.slab import size_of_message
from persia_torchrec.table import TableChange, TableSpec, changed_tables

logger = logging.getLogger(__name__)

_FORWARD = "forward_client_time_cost_sec"
_FORWARD_ERROR = "forward_error"
_BACKWARD = "backward_client_time_cost_sec"
_UNDERFLOWS = f"persia_{UNDERFLOWS}_total"
WAIT = "get_train_batch_time_cost_more_than_1ms_sec"

# PERSIA's metrics of its NN workers. What PERSIA has as the value of the last batch is
# here the mean of the batches since the last push. One of this package's own.
_HELPS = {
    _FORWARD: "a lookup by an embedding worker",
    _FORWARD_ERROR: "lookups that failed",
    _BACKWARD: "an update by an embedding worker, until it is applied",
    _UNDERFLOWS: "see docs/metrics.md",
    WAIT: "waiting for a training batch and its rows, where it took more than 1 ms",
}


@dataclass(frozen=True, slots=True)
class RemoteBatch:
    """A batch that an embedding worker has pulled, and waits for its gradient.

    ``places`` are int32 ``(B, F)`` for each raw slot, see ``RawIds``. ``source`` is
    what another worker needs of it, if it may come to that.
    """

    worker: int
    number: BatchNumber
    source: Origin | Mapping[str, Bags] | None = None
    places: tuple[Positions, ...] = ()
    slots: tuple[str, ...] = ()


Size = Annotated[int, msgspec.Meta(ge=0)]


class _Forwarded(msgspec.Struct):
    """The JSON of a reply to FORWARD: slots, and the shapes of the arrays."""

    slots: tuple[str, ...]
    outputs: list[list[Size]]
    places: list[list[Size]]


@dataclass(frozen=True, slots=True)
class _End:
    """A message that ends a batch, whose worker has ended, and the reply to come."""

    handle: RemoteBatch
    header: Header
    frames: Frames
    reply: Reply


class RemoteWorkers(Workers):
    """Pulls and pushes through all embedding workers. Any thread may call any method.

    Embeddings and gradients travel at ``precision``.

    Attributes:
        observed: latencies of pulls and pushes, and failures, for a trainer's metrics.
        generation: of the trainer that changes tables, as of ``EmbeddingClient``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = timeouts.REQUEST_S,
        precision: Precision = Precision.FP32,
        greeting: Greeting = NO_JOB,
        recovery_s: float = 0.0,
    ) -> None:
        super().__init__(
            addresses, timeout_s=timeout_s, greeting=greeting, recovery_s=recovery_s
        )
        self._precision = precision
        self.generation = messages.NO_GENERATION
        self.observed = Observations(_HELPS)
        self.observed.count(_FORWARD_ERROR, 0)
        self._num_direct = itertools.count()
        self._reply_bytes = 0  # of the largest batch of embeddings so far
        self._tables: dict[str, TableSpec] = {}
        # Bounded by the permits: each is a push in flight.
        self._again: queue.SimpleQueue[_End | None] = queue.SimpleQueue()
        if recovery_s:
            threading.Thread(
                target=self._end_again, name="pushes again", daemon=True
            ).start()

    def hello(
        self, timeout_s: float | None = None, *, of_any: bool = False
    ) -> LookupHello:
        """Ask all workers whether they and their servers are ready.

        With ``of_any``, it is enough that one of them is.
        """
        what, nothing = "asking whether it is ready", [messages.encode_json(None)]
        replies = self.send_all(Header(Kind.HELLO), nothing, what, timeout_s)
        hellos: dict[str, LookupHello] = {}
        for worker, reply in enumerate(replies):
            try:
                hellos[self.names[worker]] = self.read(worker, reply, LookupHello)
            except PersiaError:
                if not of_any or (worker + 1 == len(replies) and not hellos):
                    raise
        first, *_ = hellos.values()
        for name, hello in hellos.items():
            if hello.slots != first.slots:
                raise ConfigError(
                    "All embedding workers must have the same slots. Received: "
                    f"{name} differs from {next(iter(hellos))}. Give all the same "
                    "embedding_config.yml, and servers of one checkpoint."
                )
        return first

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Make every worker, and through it every server, know the tables."""
        stream = BatchNumber.new_stream(self.generation)
        header = Header(Kind.ADD_TABLES, stream=stream)
        body: Frames = [messages.encode_json([spec.to_json() for spec in specs])]
        for worker in range(self.num_workers):
            # One after the other: servers compile only once what the first one needs.
            self.insist(worker, partial(self._add_tables, header, body), only=True)
        self._tables.update((spec.name, spec) for spec in specs)

    def change_tables(self, change: TableChange) -> None:
        """Change the settings of the tables that were added.

        Updates are not in order with it: wait for those that must come before.
        """
        if changed := changed_tables(self._tables.values(), change):
            self.add_tables(changed)

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
        origin: Origin | None = None
        kept: Origin | Mapping[str, Bags] | None
        if isinstance(source, ReferencedBatch):
            kept = origin = source.origin
            worker, frames = origin.worker, [_encode(origin)]
        else:
            kept = source if self.recovery_s else None
            worker = next(self._num_direct) % self.num_workers
            frames = [_encode(None), *encode_bags(source)]
        flags = 0 if number is None else messages.TRAINING
        is_training, number = number is not None, number or BatchNumber(0, 0)
        header = self._header(Kind.FORWARD, number, flags)

        def ask(worker: int) -> tuple[int, Frames]:
            return worker, self.send(
                worker, header, frames, "lookup", reply_bytes=self._reply_bytes
            ).frames()

        worker, reply = self.insist(worker, ask, origin)
        num_bytes = size_of_message(list(map(len, reply)))
        self._reply_bytes = max(self._reply_bytes, num_bytes)
        if origin is not None and not is_training:
            origin.settle()
        told: _Forwarded = messages.decode_json(reply[:2], _Forwarded)
        first = 2 + len(told.outputs)
        sizes = list(map(len, reply[first:]))
        fits = sizes == [4 * math.prod(shape) for shape in told.places]
        if not told.slots or len(reply) < first or not fits:
            raise FrameError(
                "The reply must have the slots of the batch, the shapes of its arrays, "
                f"and as many arrays. Received: {len(reply)} frames, {told!r:.100}."
            )
        outputs, places = self._read_arrays(told, reply)
        return outputs, RemoteBatch(worker, number, kept, places, told.slots)

    def _read_arrays(
        self, told: _Forwarded, reply: Frames
    ) -> tuple[Outputs, tuple[Positions, ...]]:
        # Copied: the frames are read-only, and torch wants memory that can be written.
        outputs = tuple(
            decode_floats(frame, [tuple(shape)], self._precision).reshape(shape).copy()
            for frame, shape in zip(reply[2:], told.outputs, strict=False)
        )
        self._count_zeroed(reply[2 : 2 + len(outputs)])
        first = 2 + len(outputs)
        places = tuple(
            messages.array_of(frame, np.int32).reshape(shape).copy()
            for frame, shape in zip(reply[first:], told.places, strict=True)
        )
        return outputs, places

    def _count_zeroed(self, floats: Sequence[Frame]) -> None:
        num = sum(num_zeroed(frame, self._precision) for frame in floats)
        self.observed.count(_UNDERFLOWS, num)

    def push(self, handle: RemoteBatch, grads: Outputs) -> list[Reply]:
        """Send the gradients of a batch; the reply comes when they are applied."""
        header = self._header(Kind.BACKWARD, handle.number)
        began_s = time.perf_counter()
        encoded = [encode_floats(grad, self._precision) for grad in grads]
        self._count_zeroed(encoded)
        frames = [_origin_of(handle), *encoded]
        reply = self._end(handle, header, frames, "update")

        def observe(_: object) -> None:
            if reply.exception() is None:
                self.observed.observe(_BACKWARD, time.perf_counter() - began_s)

        reply.add_done_callback(observe)
        return [reply]

    def again(self, handle: RemoteBatch, _: BatchNumber) -> RemoteBatch:
        """Reject: the worker has forgotten the batch."""
        raise BatchError(
            "A batch that an embedding worker looked up gets one backward pass. "
            "Received: a second one. Add the losses up, and call backward once."
        )

    def abandon(self, handle: RemoteBatch) -> list[Reply]:
        """Tell that a training batch gets no gradients."""
        header = self._header(Kind.ABANDON, handle.number)
        return [self._end(handle, header, [_origin_of(handle)], "giving up")]

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._closing.set()
        self._again.put(None)
        super().close()

    def _end(
        self, handle: RemoteBatch, header: Header, frames: Frames, what: str
    ) -> Reply:
        """Send the end of a batch; the reply comes when a worker has carried it out."""
        reply = Reply(self.timeout_s + self.recovery_s, what)

        def note(first: Future[tuple[Header, Frames]]) -> None:
            # The thread of the connections calls it, which must not wait.
            error = first.exception()
            if error is None:
                _settle(handle, reply, first.result())
            elif not self.recovery_s or self._closing.is_set() or not is_away(error):
                reply.set_exception(error)
            else:
                if origin := _needed_of(handle, header):  # all that are lost, at once
                    origin.lose(handle.worker)
                self._again.put(_End(handle, header, frames, reply))

        self.send(handle.worker, header, frames, what).add_done_callback(note)
        return reply

    def _end_again(self) -> None:
        while (end := self._again.get()) is not None:
            origin, worker = _needed_of(end.handle, end.header), end.handle.worker
            try:
                if origin is not None and origin.wait(self.recovery_s):
                    worker = worker_of(origin)
                answer = self.insist(worker, partial(self._ask_end, end), origin)
            except Exception as exc:  # noqa: BLE001  # raised by the next caller
                end.reply.set_exception(exc)
            else:
                _settle(end.handle, end.reply, answer)

    def _ask_end(self, end: _End, worker: int) -> tuple[Header, Frames]:
        handle, frames, what = end.handle, end.frames, end.reply.what
        is_push = end.header.kind is Kind.BACKWARD
        if is_push and isinstance(handle.source, Mapping):
            # Left there as a data loader would, whose batches are those of a stream.
            origin = Origin(handle.number.stream, handle.number.batch, worker)
            self.buffer(worker, origin, encode_bags(handle.source), again=True)
            frames = [_encode(origin), *frames[1:]]
        return self.send(worker, end.header, frames, what).result()

    def _add_tables(self, header: Header, body: Frames, worker: int) -> Frames:
        limit_s = timeouts.ADD_TABLES_S
        return self.send(worker, header, body, "adding tables", limit_s).frames()

    def _header(self, kind: Kind, number: BatchNumber, flags: int = 0) -> Header:
        stream, batch, _ = number
        return Header(kind, 0, 0, stream, batch, self._precision, flags)


def _encode(origin: Origin | None) -> Frame:
    """Return the frame that says which batch of which data loader is meant."""
    if origin is None:
        return messages.encode_json(None)
    return messages.encode_json({"loader": origin.loader, "number": origin.number})


def _needed_of(handle: RemoteBatch, header: Header) -> Origin | None:
    """Return which ids of a data loader the end of a batch needs, if any."""
    is_push = header.kind is Kind.BACKWARD
    return handle.source if is_push and isinstance(handle.source, Origin) else None


def _origin_of(handle: RemoteBatch) -> Frame:
    source = handle.source
    return _encode(source if isinstance(source, Origin) else None)


def _settle(handle: RemoteBatch, reply: Reply, answer: tuple[Header, Frames]) -> None:
    if isinstance(handle.source, Origin):
        handle.source.settle()
    reply.set_result(answer)
