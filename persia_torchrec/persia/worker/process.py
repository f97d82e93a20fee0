r"""The requests to an embedding worker, and the lookup over servers that answers them.

    from a data loader   BUFFER_IDS  three frames of bags            -> true or false
    from any client      HELLO       nothing                         -> ``LookupHello``
    from a trainer       ADD_TABLES  JSON list of tables             -> null
                         FORWARD     an origin                       -> embeddings
                                     or JSON null and three frames of bags
                         BACKWARD    an origin or null, then floats, -> outcome
                                     a frame per output
                         ABANDON     an origin or null               -> outcome

An origin is JSON, {"loader", "number"}: a data loader, and a batch as it numbers them.
Embeddings are, as JSON, {"slots", "outputs", "places"}: the slots of the batch, and the
shapes of all arrays; then a frame of floats for each output, and a frame of int32 for
the places of each raw slot, all in the order of the batch. In BUFFER_IDS the header's
stream is the number of the data loader, batch that of the batch, and incarnation says
which start of the loader it is; the answer is false when the buffer is full. BACKWARD
is answered when the servers have applied the update, with the sum of their outcomes.

Between two messages about the same batch the worker keeps it, both times bounded:

    data loader --ids--> IdBuffer --origin--> ...trainer asks for it... --> pulled
    pulled --> AwaitingGradient --...trainer sends the gradient...--> pushed

Each message may come twice, when its sender has not seen the answer. A worker that was
restarted has nothing of both: a batch that it lacks is a ``LostBatchError``, the data
loader sends its ids again, and they are all that the gradient needs.

PERSIA gives ``embedding_config.yml`` to embedding workers and servers only. A trainer
needs it here too, since its embeddings are a TorchRec collection; so the workers leave
the text of the file in the job's address book. All of them must have the same slots.
"""

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from persia_torchrec import timeouts
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.embedding.embedding_config import (
    EmbeddingSchema,
    load_embedding_config,
)
from persia_torchrec.errors import (
    ConfigError,
    DataflowError,
    FrameError,
    LostBatchError,
    PersiaError,
    ServerError,
)
from persia_torchrec.job.lifetime import NoBook
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.lookup.bags import Bags, decode_bags
from persia_torchrec.lookup.sharded_lookup import RoutedBatch, RowSource
from persia_torchrec.metrics.push import is_published, publish_metrics
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import Means, Reading, readings_of
from persia_torchrec.parsing.yaml_file import read_text
from persia_torchrec.persia.slots import LookupMeasures, SlotsLookup, build_features
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.addresses import tcp_address
from persia_torchrec.rpc.float_codec import decode_floats, encode_floats
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.messages import (
    Frames,
    Header,
    Kind,
    decode_json,
    encode_json,
)
from persia_torchrec.table import TableSpec

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_NOTE = "embedding_config"

_PENDING_HELP = "batches of data loaders that no trainer has asked for yet"
_STALENESS_HELP = "training batches looked up and not yet updated"

_MAX_OPEN = 65536
_MAX_LOADERS = 65536
_MAX_KNOWN = 4096
"""Batches that were taken, and outcomes, by which a second message is recognised."""


class _Origin(msgspec.Struct):
    """The JSON that says which batch of which data loader is meant."""

    loader: int
    number: int


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
        # By loader and number: when it came, from which start of the loader, and bags.
        self._batches: dict[int, dict[int, tuple[float, int, dict[str, Bags]]]]
        self._batches = defaultdict(dict)  # guarded by _lock
        # Start, loader and number of the latest. guarded by _lock
        self._removed = OrderedDict[tuple[int, int, int], None]()

    def put(
        self,
        loader: int,
        number: int,
        bags: dict[str, Bags],
        *,
        start: int = 0,
        again: bool = False,
    ) -> bool:
        """Keep a batch; return False when the buffer is full.

        A batch that is here is replaced. One that was here, of the same ``start`` of
        the loader, is not kept; but ``again``, as its trainer asks for it, it is,
        however full the buffer.
        """
        with self._lock:
            batches = self._batches[loader]
            if not again:
                if (start, loader, number) in self._removed:
                    return True
                if number not in batches and not self._has_room(loader, batches):
                    return False
            batches[number] = (self._clock(), start, bags)
            return True

    def peek(self, loader: int, number: int) -> dict[str, Bags]:
        """Return a batch and keep it, so that a failed pull can be tried again."""
        with self._lock:
            entry = self._batches.get(loader, {}).get(number)
        if entry is None:
            raise LostBatchError(
                f"Batch {number} of data loader {loader} must be in this embedding "
                "worker's buffer. It was never sent here, was taken before, waited for "
                f"more than buffered_data_expired_sec ({self._expires_s:g} s), or the "
                "worker was restarted."
            )
        return entry[2]

    def remove(self, loader: int, number: int) -> None:
        """Forget a batch."""
        with self._lock:
            entry = self._batches.get(loader, {}).pop(number, None)
            if entry is not None:
                self._removed[entry[1], loader, number] = None
                if len(self._removed) > _MAX_KNOWN:
                    self._removed.popitem(last=False)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(batches) for batches in self._batches.values())

    def _has_room(self, loader: int, batches: dict[int, Any]) -> bool:
        if len(batches) < self._capacity:
            return True
        latest = self._clock() - self._expires_s
        expired = [n for n, (since, *_) in batches.items() if since < latest]
        for number in expired:
            del batches[number]
        if expired:
            logger.warning(
                "dropped %d batches of data loader %d: no trainer requested them "
                "within %g s",
                len(expired),
                loader,
                self._expires_s,
            )
        return bool(expired)


class AwaitingGradient:
    """Training batches that are pulled, and not yet settled. Thread-safe.

    It remembers the outcomes of the latest that are, for who asks again.
    ``num_settled`` counts them all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[BatchNumber, RoutedBatch] = {}  # guarded by _lock
        # Those under way, too. guarded by _lock
        self._outcomes = OrderedDict[BatchNumber, Future[PushOutcome]]()
        self.num_settled = 0

    def put(self, number: BatchNumber, batch: RoutedBatch) -> None:
        """Keep a batch that is not settled yet; rejected if too many are open."""
        with self._lock:
            if number in self._outcomes:  # a second message, which was late
                return
            if len(self._batches) >= _MAX_OPEN and number not in self._batches:
                raise DataflowError(
                    f"At most {_MAX_OPEN} batches may wait for their gradient. Does "
                    "every training batch get its backward pass?"
                )
            self._batches[number] = batch

    def find(self, number: BatchNumber) -> RoutedBatch | None:
        """Return a batch, or None if it is not kept."""
        with self._lock:
            return self._batches.get(number)

    def settle(
        self, number: BatchNumber, settle: Callable[[], PushOutcome]
    ) -> PushOutcome:
        """Settle a batch, once; return the outcome, also to who asks again.

        After an error the batch is kept, and may be settled once more.
        """
        own: Future[PushOutcome] = Future()
        with self._lock:
            outcome = self._outcomes.setdefault(number, own)
            if len(self._outcomes) > _MAX_KNOWN:
                self._outcomes.popitem(last=False)
        if outcome is not own:
            return outcome.result()  # in time: requests to servers have deadlines
        try:
            own.set_result(settle())
        except BaseException as exc:
            with self._lock:
                self._outcomes.pop(number, None)
            own.set_exception(exc)
            raise
        with self._lock:
            self._batches.pop(number, None)
            self.num_settled += 1
        return own.result()

    def __len__(self) -> int:
        return len(self._batches)


class WorkerProcess:
    """Answers the messages to an embedding worker; several threads may ask.

    Attributes:
        buffer: batches of data loaders that no trainer has asked for yet.
        open: training batches that are pulled, and whose update is not yet applied.
        shared_memory: returns the counters of what its service shares.
    """

    shared_memory: Callable[[], Mapping[str, int]] = staticmethod(dict)

    def __init__(self, lookup: SlotsLookup, buffer: IdBuffer) -> None:
        self.lookup = lookup
        self.buffer = buffer
        self.open = AwaitingGradient()

    def answer(self, header: Header, frames: Frames) -> Frames:
        """Answer one message; the handler of a ``Service``."""
        match header.kind:
            case Kind.HELLO:
                self.lookup.learn_tables()  # of a loaded checkpoint, with no trainer
                return [msgspec.json.encode(self.lookup.hello())]
            case Kind.FORWARD:
                return self._forward(header, frames)
            case Kind.BACKWARD | Kind.ABANDON:
                return [msgspec.json.encode(self._settle(header, frames))]
            case Kind.BUFFER_IDS:
                return [encode_json(self._keep_ids(header, frames))]
            case Kind.ADD_TABLES:
                self.lookup.client.require_current(header.stream)
                tables = decode_json(frames, list[dict[str, Any]])
                self.lookup.add_tables([TableSpec.from_json(t) for t in tables])
                return [encode_json(None)]
            case _:
                raise FrameError(
                    f"An embedding worker answers no {header.kind.name} message. "
                    "Is this the address of another role?"
                )

    def _keep_ids(self, header: Header, frames: Frames) -> bool:
        bags = decode_bags(frames[1:])
        self.lookup.select(bags)
        again = bool(header.flags & messages.AGAIN)
        start, loader, number = header.incarnation, header.stream, header.batch
        if loader >= _MAX_LOADERS:
            raise FrameError(
                f"The number of a data loader must be below {_MAX_LOADERS}. "
                f"Received: {loader}."
            )
        return self.buffer.put(loader, number, bags, start=start, again=again)

    def _forward(self, header: Header, frames: Frames) -> Frames:
        number = None
        if header.flags & messages.TRAINING:
            number = BatchNumber(header.stream, header.batch)
        origin: _Origin | None = decode_json(frames[:2], _Origin | None)
        batch = None if number is None else self.open.find(number)
        if batch is not None:  # the message came before
            outputs = self.lookup.fetch(batch)
        else:
            bags = decode_bags(frames[2:]) if origin is None else self._ids(origin)
            self.lookup.learn_tables()  # which trainers tell once, maybe before a start
            outputs, batch = self.lookup.pull(bags, number)
        if number is not None:
            self.open.put(number, batch)
        if origin is not None:
            self.buffer.remove(origin.loader, origin.number)
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

    def _settle(self, header: Header, frames: Frames) -> PushOutcome:
        number = BatchNumber(header.stream, header.batch)
        origin: _Origin | None = decode_json(frames[:2], _Origin | None)

        def settle() -> PushOutcome:
            if header.kind is Kind.BACKWARD:
                return self._update(header, number, origin, frames[2:])
            replies = self.lookup.client.push([], [], number)
            return PushOutcome.read(replies)

        outcome = self.open.settle(number, settle)
        if origin is not None:
            self.buffer.remove(origin.loader, origin.number)
        return outcome

    def _update(
        self,
        header: Header,
        number: BatchNumber,
        origin: _Origin | None,
        floats: Frames,
    ) -> PushOutcome:
        batch = self.open.find(number)
        if batch is None and origin is not None:  # pulled by a worker that has ended
            ids = self._ids(origin)
            self.lookup.learn_tables()
            batch = self.lookup.route(ids, number)
        if batch is None:
            raise LostBatchError(
                f"Batch {number.batch} must have been pulled here for training, or its "
                "ids must be here."
            )
        shapes = self.lookup.shapes(batch)
        if len(floats) != len(shapes):
            raise FrameError(
                f"BACKWARD has {2 + len(shapes)} frames. Received: {2 + len(floats)}."
            )
        grads = tuple(
            decode_floats(frame, [shape], header.precision).reshape(shape)
            for frame, shape in zip(floats, shapes, strict=True)
        )
        return self.lookup.update(batch, grads)

    def _ids(self, origin: _Origin) -> dict[str, Bags]:
        return self.buffer.peek(origin.loader, origin.number)


def tell_slots(
    book: AddressBook | NoBook, path: Path, *, warns: bool = True
) -> EmbeddingSchema:
    """Read the file, and leave it in the address book; each embedding worker does."""
    text = read_text(path)
    schema = load_embedding_config(path, text, warns=warns)  # before others read it
    known = load_embedding_config(
        "that of another embedding worker", book.claim_note(_NOTE, text), warns=False
    )
    if known != schema:
        raise ConfigError(
            "All embedding workers of a job must have the same slots. Received: "
            f"{path}, which differs from that of another worker. Give all of them the "
            "same embedding_config.yml."
        )
    return schema


def ask_for_slots(
    store: tuple[str, int, str], *, timeout_s: float | None = None
) -> EmbeddingSchema:
    """Return the slots that the embedding workers of a job have told."""
    with closing(AddressBook.join(*store)) as book:
        (text,) = book.ask([_NOTE], timeout_s=timeout_s)
    return load_embedding_config("embedding_config.yml of the job", text, warns=False)


def make_lookup(
    client: EmbeddingClient, schema: EmbeddingSchema, settings: MetricsSettings
) -> SlotsLookup:
    """Return the lookup of an embedding worker: measured, if metrics are pushed."""
    features = build_features(schema)
    measures = LookupMeasures(features) if is_published(settings) else None
    return SlotsLookup(client, features, measures)


def pushing_metrics(
    process: WorkerProcess, index: int, settings: MetricsSettings
) -> ExitStack:
    """Push the metrics of an embedding worker while a block runs, and at its end."""
    measures = process.lookup.measures

    def read(means: Means) -> list[Reading]:
        return [
            Reading("num_pending_batches", len(process.buffer), _PENDING_HELP),
            Reading("staleness", len(process.open), _STALENESS_HELP),
            *readings_of(process.shared_memory()),
            *(measures.read(means) if measures else ()),
        ]

    stack = ExitStack()
    stack.callback(publish_metrics("embedding_worker", index, settings, read))
    return stack


def ready_client(
    servers: Sequence[str],
    schema: EmbeddingSchema,
    ending: threading.Event,
    *,
    await_tables: bool,
    greeting: Greeting = NO_JOB,
) -> EmbeddingClient | None:
    """Wait until all servers have the tables of the slots; return a client of them.

    The result is None when ``ending`` is set, as the process is to end. With
    ``await_tables``, missing tables may still come, from a job that trains.
    """
    addresses = [tcp_address(server) for server in servers]

    def connect(timeout_s: float) -> EmbeddingClient:
        return EmbeddingClient.connect(
            addresses, timeout_s=timeout_s, greeting=greeting
        )

    if not _wait(lambda: connect(timeouts.WORKER_CONNECT_S).close(), ending):
        return None
    client = connect(timeouts.REQUEST_S)

    def learn() -> None:
        client.num_rows()  # rejected until the tables are all there
        known = {spec.name for spec in client.learn_tables()}
        missing = [slot for slot in schema.slots.values() if slot.group not in known]
        if missing:
            message = (
                f"Slot {missing[0].name!r} must have its table on the servers, "
                f"{missing[0].group!r}. They have no such table. Give the "
                "embedding_config.yml of the training."
            )
            if not await_tables:
                raise ConfigError(message)
            raise ServerError(message, server="embedding servers")

    if not _wait(learn, ending):
        client.close()
        return None
    require_dims(client, schema)
    return client


def _wait(attempt: Callable[[], None], ending: threading.Event) -> bool:
    """Try until it succeeds, or until the process is to end: then return False.

    A ConfigError, which no waiting mends, is raised at once.
    """
    deadline, logged, line = time.monotonic() + timeouts.READY_S, "", ""
    with timeouts.saying(logger, lambda: line):
        while not ending.is_set():
            try:
                attempt()
                return True
            except PersiaError as exc:
                if isinstance(exc, ConfigError) or time.monotonic() >= deadline:
                    raise
                line = f"waiting for the embedding servers: {exc}"
                if type(exc).__name__ != logged:
                    logged = type(exc).__name__
                    logger.info("%s", line)
            ending.wait(_RETRY_S)
        return False


def require_dims(source: RowSource, schema: EmbeddingSchema) -> None:
    """Check that slots have the dims of their tables on the servers."""
    for slot in schema.slots.values():
        dim = source.table(slot.group).dim
        if slot.dim != dim:
            raise ConfigError(
                f"Slot {slot.name!r} must have the dim of its table on the servers, "
                f"{dim}. Received: {slot.dim} in the embedding config. Give the "
                "embedding_config.yml of the training."
            )
