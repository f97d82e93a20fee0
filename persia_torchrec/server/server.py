"""The serving loop of one embedding server.

One thread owns the socket and the store. Lookups are answered as they come; updates
are queued and applied when no message is waiting, so that trainers that pull do not
wait for trainers that push:

    lookup --> store --> reply
    update --> queue --(nothing else to do, or the queue is full)--> store --> ack

The queue is bounded: when it is full, updates are applied before anything else is read
from the socket, and what the socket cannot hold makes the trainers wait. And no update
waits for ever: after a few messages that overtook it, it has its turn. Updates are
applied in the order in which they came; the acknowledgement is sent when an update is
applied, not when it is queued.
"""

import logging
import secrets
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from persia_torchrec.errors import ConfigError, FrameError, PersiaError
from persia_torchrec.metrics import Metrics
from persia_torchrec.server.staleness import OpenBatches
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    TRAINING,
    Frame,
    Frames,
    Header,
    Kind,
    TableIds,
    bytes_of,
    decode_json,
    decode_segments,
    encode_json,
)
from persia_torchrec.wire.precision import Floats, decode_floats, encode_floats
from persia_torchrec.wire.transport import Listener

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 100

_MAX_OVERTAKING = 16
"""Messages that may be answered before the update that has waited longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Settings of one embedding server."""

    shard: int = 0
    """Which shard this server is, in ``[0, num_shards)``."""

    num_shards: int = 1
    """How many servers there are."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 0
    """Port to listen on; 0 takes a free one."""

    capacity_rows: int = 1_000_000
    """Rows of all tables together; the least recently used is evicted beyond that."""

    update_queue_batches: int = 64
    """Updates that may wait. A full queue makes the trainers wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards:
            raise ConfigError(
                f"shard must be in [0, {self.num_shards}). Received: {self.shard}."
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be in [0, 65535]. Received: {self.port}.")
        if self.update_queue_batches < 1:
            raise ConfigError(
                "update_queue_batches must be >= 1. "
                f"Received: {self.update_queue_batches}."
            )


@dataclass(frozen=True, slots=True)
class _Update:
    """An update that has been read and checked, and waits to be applied."""

    peer: bytes
    header: Header
    tables: list[TableIds]
    grads: list[Floats]


class EmbeddingServer:
    """One shard of all tables, behind a socket.

    The thread that calls :meth:`serve` owns the store. Listening begins with the
    constructor, so that ``address`` is known before the first request is served.

    Args:
        config: see :class:`ServerConfig`.

    Raises:
        ConfigError: the capacity is out of its range.
        WireError: the address cannot be listened on.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._store = EmbeddingStore(config.capacity_rows)
        self._listener = Listener(config.host, config.port)
        self.address = self._listener.address
        self._incarnation = secrets.randbits(63) | 1
        self._metrics = Metrics()
        self._open_batches = OpenBatches(self._metrics)
        self._updates: deque[_Update] = deque()
        self._num_overtaking = 0
        self._stopping = threading.Event()

    def serve(self) -> None:
        """Answer requests until :meth:`stop` is called or a client asks to shut down.

        Queued updates are applied before this returns.
        """
        try:
            while not self._stopping.is_set():
                self._serve_once()
            self._apply_all_updates()
        finally:
            self._listener.close()

    def stop(self) -> None:
        """Make :meth:`serve` return soon. Any thread may call it, more than once."""
        self._stopping.set()

    def _serve_once(self) -> None:
        message = None
        if not self._update_is_due():
            message = self._listener.receive(0 if self._updates else _IDLE_POLL_MS)
        if message is not None:
            self._num_overtaking += bool(self._updates)
            self._answer(*message)
        elif self._updates:
            self._apply_oldest_update()

    def _update_is_due(self) -> bool:
        return (
            len(self._updates) >= self.config.update_queue_batches
            or self._num_overtaking >= _MAX_OVERTAKING
        )

    def _answer(self, peer: bytes, frames: Frames) -> None:
        request = 0
        try:
            header = Header.decode(frames[0])
            request = header.request
            self._require_incarnation(header)
            reply = self._handle(peer, header, frames)
        except Exception as exc:  # the server lives on; the peer is told
            if not isinstance(exc, PersiaError):
                logger.exception("a request failed")
            self._metrics.count("requests_refused")
            self._listener.send_error(peer, request, exc)
            return
        if reply is not None:
            self._listener.send(peer, Header(Kind.REPLY, request), reply)

    def _require_incarnation(self, header: Header) -> None:
        if header.incarnation not in (0, self._incarnation):
            raise ConfigError(
                "This server was started anew since the client connected, and the rows "
                "of before are gone. Connect again, and load a checkpoint."
            )

    def _handle(self, peer: bytes, header: Header, frames: Frames) -> Frames | None:
        self._metrics.count(f"requests_{header.kind.name.lower()}")
        match header.kind:
            case Kind.LOOKUP:
                return [self._lookup(header, frames)]
            case Kind.UPDATE:
                self._queue_update(peer, header, frames)
                return None
            case Kind.WRITE:
                self._write(header, frames)
                return [encode_json(None)]
            case Kind.READ:
                return self._read(frames)
            case _:
                return [encode_json(self._control(header, frames))]

    def _control(self, header: Header, frames: Frames) -> object:
        match header.kind:
            case Kind.HELLO:
                return {
                    "shard": self.config.shard,
                    "num_shards": self.config.num_shards,
                    "incarnation": self._incarnation,
                }
            case Kind.ADD_TABLES:
                return self._add_tables(decode_json(frames))
            case Kind.COUNTERS:
                self._metrics.set_gauge("updates_queued", len(self._updates))
                return {**self._store.counters(), **self._metrics.snapshot()}
            case Kind.CLEAR:
                self._apply_all_updates()  # whoever sent them waits for the ack
                self._store.clear()
                return None
            case Kind.SHUTDOWN:
                self.stop()
                return None
            case _:
                raise FrameError(
                    f"An embedding server answers no {header.kind.name} message. "
                    "Is this the address of another role?"
                )

    def _add_tables(self, descriptions: object) -> list[int]:
        if not isinstance(descriptions, list) or not all(
            isinstance(description, dict) for description in descriptions
        ):
            raise FrameError("ADD_TABLES must carry a list of tables.")
        specs = [TableSpec.from_json(description) for description in descriptions]
        numbers = [self._store.add_table(spec) for spec in specs]
        logger.info("tables %s", ", ".join(f"{s.name} (dim {s.dim})" for s in specs))
        logger.debug("tables %s", specs)
        return numbers

    def _lookup(self, header: Header, frames: Frames) -> Frame:
        tables = self._decode_tables(frames, num_frames=3)
        training = bool(header.flags & TRAINING)
        rows = np.empty(sum(self._num_weights(t) for t in tables), dtype=np.float32)
        place = 0
        for t in tables:
            out = rows[place : place + self._num_weights(t)]
            place += len(out)
            shape = (len(t.ids), self._store.tables[t.table].dim)
            self._store.lookup(t.table, t.ids, out.reshape(shape), training=training)
        if training:
            self._open_batches.begin(header.stream, header.batch)
        return encode_floats(rows, header.precision)

    def _queue_update(self, peer: bytes, header: Header, frames: Frames) -> None:
        tables = self._decode_tables(frames, num_frames=4)
        grads = self._decode_rows(tables, frames[3], header)
        self._updates.append(_Update(peer, header, tables, grads))

    def _apply_all_updates(self) -> None:
        while self._updates:
            self._apply_oldest_update()

    def _apply_oldest_update(self) -> None:
        update = self._updates.popleft()
        self._num_overtaking = 0
        header = update.header
        num_missed = sum(
            self._store.update(t.table, t.ids, grads_ND)
            for t, grads_ND in zip(update.tables, update.grads, strict=True)
        )
        self._open_batches.end(header.stream, header.batch)
        ack = Header(Kind.REPLY, header.request)
        self._listener.send(update.peer, ack, [encode_json(num_missed)])

    def _write(self, header: Header, frames: Frames) -> None:
        tables = self._decode_tables(frames, num_frames=4)
        weights = self._decode_rows(tables, frames[3], header)
        for t, weights_ND in zip(tables, weights, strict=True):
            self._store.write(t.table, t.ids, weights_ND)

    def _read(self, frames: Frames) -> Frames:
        tables = self._decode_tables(frames, num_frames=3)
        return [bytes_of(self._store.read(t.table, t.ids)) for t in tables]

    def _decode_tables(self, frames: Frames, *, num_frames: int) -> list[TableIds]:
        tables = decode_segments(frames, num_frames=num_frames)
        for t in tables:
            if not 0 <= t.table < len(self._store.tables):
                raise ConfigError(
                    f"Unknown table number {t.table}: this server has "
                    f"{len(self._store.tables)} tables. Add the tables first."
                )
        return tables

    def _decode_rows(
        self, tables: list[TableIds], frame: Frame, header: Header
    ) -> list[Floats]:
        num = sum(self._num_weights(t) for t in tables)
        flat = decode_floats(frame, num, header.precision)
        rows = []
        for t in tables:
            share, flat = np.split(flat, [self._num_weights(t)])
            rows.append(share.reshape(len(t.ids), self._store.tables[t.table].dim))
        return rows

    def _num_weights(self, t: TableIds) -> int:
        return len(t.ids) * self._store.tables[t.table].dim
