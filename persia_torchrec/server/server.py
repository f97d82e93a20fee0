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
applied, not when it is queued. What changes tables or drops rows waits for the updates
that came before it. Shares of a joint step are queued as one when the last one is there
(see ``server/joint_steps.py``). When nothing waits, and now and then when much does,
the store gets time for a bounded slice of its own work.

Dimension key:
    N: ids of one table in a request
    D: its embedding dim
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from persia_torchrec.errors import ConfigError, FrameError, PersiaError
from persia_torchrec.metrics import Metrics
from persia_torchrec.server.config import ServerConfig as ServerConfig
from persia_torchrec.server.joint_steps import JointSteps, Member
from persia_torchrec.server.requests import (
    RequestReader,
    error_to_tell,
    require_reply_fits,
)
from persia_torchrec.server.row_replies import rows_reply, tell_tables
from persia_torchrec.server.served_checkpoint import checkpoints_of
from persia_torchrec.server.snapshots import Snapshots
from persia_torchrec.server.stages import Stages
from persia_torchrec.server.staleness import OpenBatches
from persia_torchrec.server.updates import Update, gradients_of
from persia_torchrec.service_main import refusing_requests
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.messages import (
    COUNTS,
    SHARE,
    STATE,
    TRAINING,
    Frame,
    Frames,
    Header,
    Kind,
    Share,
    decode_counts,
    decode_json,
    encode_json,
)
from persia_torchrec.wire.precision import encode_floats, size_of
from persia_torchrec.wire.transport import Listener

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 100

_MAX_OVERTAKING = 16
"""Messages that may be answered before the update that has waited longest."""

_MESSAGES_A_SWEEP = 16  # answered between two slices of the store's own work

_SWEEP_ROWS = 2048
"""Rows a slice: a fraction of a millisecond."""


class EmbeddingServer:
    """One shard of all tables, behind a socket.

    The thread that calls :meth:`serve` owns the store. Listening begins with the
    constructor, so that ``address`` is known before the first request is served.

    Args:
        config: see :class:`ServerConfig`.
        greeting: of the job whose processes are served.

    Attributes:
        snapshots: of the counters, for another thread.

    Raises:
        CheckpointError: the settings name a checkpoint that is not there.
        ConfigError: the capacity is out of its range.
        WireError: the address cannot be listened on.
    """

    def __init__(self, config: ServerConfig, greeting: Greeting = NO_JOB) -> None:
        self.config = config
        self._store = EmbeddingStore(
            config.capacity_rows,
            eviction=config.eviction,
            optimizer_engine=config.optimizer_engine,
        )
        self._reader = RequestReader(self._store, config.max_request_ids)
        self._checkpoints = checkpoints_of(config, self._store)
        self._listener = Listener(config.host, config.port, greeting=greeting)
        self.address = self._listener.address
        self._metrics = Metrics()
        self.snapshots = Snapshots()
        self._open_batches = OpenBatches(self._metrics)
        self._updates: deque[list[Update]] = deque()  # each list is applied as one
        self._joint_steps = JointSteps(
            self._metrics,
            self._queue,
            self._refuse_update,
            is_connected=self._listener.is_connected,
            max_bytes=config.joint_update_bytes,
        )
        self._num_overtaking = self._num_since_sweep = 0
        self._must_sweep_on = False
        self._stages = Stages()
        self._stopping = threading.Event()

    def not_ready(self) -> AbstractContextManager[None]:
        """Return a block within which requests are refused as ``NotReadyError``."""
        return refusing_requests(self._listener)

    def serve(self, when_ready: Callable[[str], None] | None = None) -> None:
        """Answer requests until :meth:`stop` is called or a client asks to shut down.

        Queued updates are applied before this returns.

        Args:
            when_ready: given the address, once rows may be asked for.

        Raises:
            CheckpointError: the checkpoint of the settings cannot be loaded.
        """
        try:
            while not self._stopping.is_set():
                if when_ready is not None and not self._checkpoints.is_loading:
                    when_ready(self.address)
                    when_ready = None
                self._serve_once()
            self._apply_all_updates()
            self._joint_steps.refuse_all("The server was shut down.")
        finally:
            self._checkpoints.close()
            self.snapshots.close(self._counters())
            self._listener.close()

    def stop(self) -> None:
        """Make :meth:`serve` return soon. Any thread may call it, more than once."""
        self._stopping.set()

    def _serve_once(self) -> None:
        self._checkpoints.work()
        self._stages.lap("dump")
        if self.snapshots.is_wanted and not self._checkpoints.is_loading:
            self.snapshots.give(self._counters())
        if self._joint_steps:
            self._joint_steps.refuse_overdue()
        if self._update_is_due():
            self._apply_oldest_update()
        elif self._listener.wait(self._wait_ms()):
            self._stages.lap("idle")
            self._num_overtaking += bool(self._updates)
            self._num_since_sweep += 1
            message = self._listener.take()
            self._stages.lap("receive")
            if message is not None:
                self._answer(*message)
            if self._num_since_sweep >= _MESSAGES_A_SWEEP:
                self._sweep()
        elif self._updates:
            self._apply_oldest_update()
        else:
            self._stages.lap("idle")
            self._joint_steps.has_read_all()
            self._sweep()

    def _wait_ms(self) -> int:
        has_more = self._updates or self._must_sweep_on
        return 0 if has_more else self._checkpoints.wait_ms(_IDLE_POLL_MS)

    def _sweep(self) -> None:
        self._num_since_sweep = 0
        may = self._checkpoints.may_sweep
        self._must_sweep_on = may and self._store.sweep(_SWEEP_ROWS)
        self._stages.lap("sweep")

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
            if not isinstance(exc, PersiaError | MemoryError):
                logger.exception("a request failed")
            self._refuse(peer, request, exc)
            return
        if reply is not None:
            self._listener.send(peer, Header(Kind.REPLY, request), reply)
            self._stages.lap("send")

    def _refuse(self, peer: bytes, request: int, exc: Exception) -> None:
        """Tell a peer that its request failed."""
        self._metrics.count("requests_refused")
        self._listener.send_error(peer, request, error_to_tell(exc))
        self._stages.lap("send")

    def _require_incarnation(self, header: Header) -> None:
        if header.incarnation not in (0, self._checkpoints.incarnation):
            raise ConfigError(
                "This server was started anew since the client connected, and the rows "
                "of before are gone. Connect again, and load a checkpoint."
            )

    def _handle(self, peer: bytes, header: Header, frames: Frames) -> Frames | None:
        self._metrics.count(f"requests_{header.kind.name.lower()}")
        self._checkpoints.admit(header)
        match header.kind:
            case Kind.LOOKUP:
                return [self._lookup(header, frames)]
            case Kind.UPDATE:
                self._queue_update(peer, header, frames)
                return None
            case Kind.JOIN:
                who, ended = self._reader.member(decode_json(frames[:2]))
                share = Share.decode(frames, num_frames=3)
                gone = self._joint_steps.join(share, Member(peer, who, ended))
                return [encode_json(", ".join(gone))]
            case Kind.LEAVE:
                self._joint_steps.leave(Share.decode(frames, num_frames=2))
                return [encode_json(None)]
            case Kind.WRITE:
                self._write(header, frames)
                return [encode_json(None)]
            case Kind.READ | Kind.METADATA | Kind.EXPORT:
                reply = rows_reply(header.kind, self._store, self._reader, frames)
                self._stages.lap("lookup")
                return reply
            case _:
                return [encode_json(self._control(header, frames))]

    def _control(self, header: Header, frames: Frames) -> object:
        match header.kind:
            case Kind.HELLO:
                return {
                    "shard": self.config.shard,
                    "num_shards": self.config.num_shards,
                    "incarnation": self._checkpoints.incarnation,
                    "max_request_ids": self.config.max_request_ids,
                    "tables": tell_tables(self._store),
                }
            case Kind.ADD_TABLES:
                return self._add_tables(decode_json(frames))
            case Kind.COUNTERS:
                return self._counters()
            case Kind.CHECKPOINT | Kind.PROGRESS:
                self._apply_all_updates()  # what was pushed before is in a dump
                return self._checkpoints.answer(header.kind, decode_json(frames))
            case Kind.STEP:
                return self._step(frames)
            case Kind.CLEAR:
                self._apply_all_updates()  # whoever sent them waits for the ack
                self._checkpoints.cancel("the rows were dropped")
                self._store.clear()
                self._open_batches.hints.clear()
                return None
            case Kind.SHUTDOWN:
                self.stop()
                return None
            case _:
                raise FrameError(
                    f"An embedding server answers no {header.kind.name} message. "
                    "Is this the address of another role?"
                )

    def _counters(self) -> dict[str, int]:
        self._stages.lap("other")
        return {
            **self._store.counters(),
            **self._metrics.snapshot(),
            **self._stages.counters(),
            **self._open_batches.counters(),
            **self._checkpoints.counters(),
            "bytes_received": self._listener.bytes_received,
            "bytes_sent": self._listener.bytes_sent,
        }

    def _add_tables(self, descriptions: object) -> list[dict[str, object]]:
        specs = self._reader.specs(descriptions)
        self._apply_all_updates()  # with the settings that they were sent under
        self._stages.lap("update")
        num_before = len(self._store.tables)
        numbers = self._store.add_tables(specs)
        for spec in self._store.tables[num_before:]:
            logger.info("table %s", spec)
        logger.debug("tables %s", specs)
        return tell_tables(self._store, numbers)

    def _lookup(self, header: Header, frames: Frames) -> Frame:
        has_counts = bool(header.flags & COUNTS)
        training = bool(header.flags & TRAINING)
        tables = self._reader.tables(frames, num_frames=4 if has_counts else 3)
        counts = decode_counts(frames) if has_counts else None
        num_floats = sum(self._reader.num_weights(t) for t in tables)
        require_reply_fits(num_floats * size_of(header.precision))
        rows = np.empty(num_floats, dtype=np.float32)
        self._stages.lap("decode")
        found = []
        place = first = 0
        for t in tables:
            shape = (len(t.ids), self._store.tables[t.table].dim)
            out_ND = rows[place : place + self._reader.num_weights(t)].reshape(shape)
            of_table = None
            if counts is not None and self._store.wants_counts(t.table):
                of_table = counts[first : first + len(t.ids)]
            slots_N = self._store.lookup(
                t.table, t.ids, out_ND, training=training, counts_N=of_table
            )
            found.append((t.table, slots_N))
            place += out_ND.size
            first += len(t.ids)
        if training:
            self._open_batches.begin(header.stream, header.batch, found, tables)
        self._metrics.count("requests_lookup_inference", not training)
        self._stages.lap("lookup" if training else "inference")
        frame = encode_floats(rows, header.precision)
        self._stages.lap("encode")
        return frame

    def _queue_update(self, peer: bytes, header: Header, frames: Frames) -> None:
        is_share = bool(header.flags & SHARE)
        tables = self._reader.tables(frames, num_frames=5 if is_share else 4)
        grads = self._reader.rows(tables, frames[3], header.precision)
        update = Update(peer, header, tables, grads)
        if is_share:
            self._joint_steps.add(Share.decode(frames, num_frames=5), update)
        else:
            self._queue([update])
        self._stages.lap("decode")

    def _queue(self, updates: list[Update]) -> None:
        self._updates.append(updates)
        self._metrics.set_gauge("updates_queued", len(self._updates))

    def _apply_all_updates(self) -> None:
        while self._updates:
            self._apply_oldest_update()

    def _apply_oldest_update(self) -> None:
        updates = self._updates.popleft()
        self._num_overtaking = 0
        self._metrics.set_gauge("updates_queued", len(self._updates))
        self._stages.lap("other")
        try:
            outcome = self._apply(updates)
        except Exception as exc:  # the server lives on; the peers are told
            if not isinstance(exc, PersiaError | MemoryError):
                logger.exception("an update failed")
            for update in updates:
                self._refuse_update(update, exc)
            return
        self._stages.lap("update")
        for update in updates:
            header = update.header
            self._open_batches.end(header.stream, header.batch)
            ack = Header(Kind.REPLY, header.request)
            self._listener.send(update.peer, ack, [encode_json(outcome)])
        self._stages.lap("send")

    def _refuse_update(self, update: Update, exc: Exception) -> None:
        self._open_batches.end(update.header.stream, update.header.batch)
        self._refuse(update.peer, update.header.request, exc)

    def _apply(self, updates: list[Update]) -> dict[str, int]:
        applied = [u.header for u in updates if u.tables]
        self._open_batches.rows.applied([(h.stream, h.batch) for h in applied])
        counts = Counter(missed=0, refused=0, unadmitted=0, gradients=0)
        for part in gradients_of(updates, self._open_batches.hints):
            self._metrics.count("updates_hinted", part.hints is not None)
            result = self._store.update(part.table, part.ids, part.grads, part.hints)
            counts["missed"] += result.num_missed
            counts["refused"] += result.num_refused
            counts["unadmitted"] += result.num_unadmitted
            counts["gradients"] += len(part.ids)
        self._metrics.count("gradients_refused", counts["refused"])
        return counts

    def _write(self, header: Header, frames: Frames) -> None:
        tables = self._reader.tables(frames, num_frames=4)
        has_state = bool(header.flags & STATE)
        rows = self._reader.rows(
            tables, frames[3], header.precision, has_state=has_state
        )
        self._stages.lap("decode")
        for t, rows_NK in zip(tables, rows, strict=True):
            self._store.write(t.table, t.ids, rows_NK)
        self._stages.lap("write")

    def _step(self, frames: Frames) -> int:
        table, step = self._reader.step(decode_json(frames))
        self._apply_all_updates()  # they count
        if step is not None:
            self._store.set_step(table, step)
        return self._store.step(table)
