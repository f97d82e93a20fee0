"""The serving loop of one embedding server.

Lookups are answered as they come; updates wait in a bounded queue:

    lookup --> store --> reply
    update --> queue --(nothing else to do, or the queue is full)--> store --> ack

A full queue is back-pressure: updates are applied before anything else is read from
the socket, and the trainers wait. Background work gets bounded slices between messages.
"""

import logging
from collections.abc import Callable

from persia_torchrec.errors import ConfigError, FrameError, PersiaError, RestartedError
from persia_torchrec.metrics.push import publish_metrics
from persia_torchrec.metrics.values import ServerReadings, Snapshots
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.listener import Listener, ListenerLimits
from persia_torchrec.rpc.messages import TRAINING, Header, Kind
from persia_torchrec.server.checkpoint_service import KnownUpdates
from persia_torchrec.server.config import ServerConfig as ServerConfig
from persia_torchrec.server.handlers import KINDS
from persia_torchrec.server.shard import RequestKind, Shard, ShardRequest

logger = logging.getLogger(__name__)

UPDATE_QUEUE_BATCHES = 64
"""Updates that may wait; a full queue makes the trainers wait."""

_IDLE_POLL_MS = 100
_IDLE_TURNS = 10  # until there is time for what is not urgent

_MAX_OVERTAKING = 16
"""Messages that may be answered before the update that has waited longest."""

_MESSAGES_PER_SWEEP = 16  # answered between two slices of taking out expired rows

_SWEEP_ROWS = 2048  # rows per slice: a fraction of a millisecond


class EmbeddingServer:
    """One shard of all tables, behind a socket.

    The thread that calls :meth:`serve` owns ``shard`` and ``listener``; ``snapshots``
    are for another one. Listening begins with the constructor, so that ``address`` is
    known before the first request is served. ``fd`` is a socket that listens already.
    ``when_idle`` may be set to what is called once, when requests leave time for it.
    """

    def __init__(
        self,
        config: ServerConfig,
        greeting: Greeting = NO_JOB,
        *,
        fd: int | None = None,
    ) -> None:
        self.config = config
        self.listener = Listener(
            config.host,
            config.port,
            greeting.of(f"embedding server {config.shard}"),
            fd=fd,
            limits=ListenerLimits(shm_bytes=config.shm_mib * 2**20),
        )
        try:
            self.shard = Shard(config, self.listener)
        except BaseException:
            self.listener.close()
            raise
        self.address = self.listener.address
        self.snapshots = Snapshots()
        self.when_idle: Callable[[], object] | None = None
        self._num_idle = 0
        self._num_since_sweep = 0
        self._must_sweep_on = False

    @property
    def has_rows(self) -> bool:
        """Whether it continues with the tables, and rows, of an earlier process."""
        store = self.shard.store
        return bool(store.states) and not store.rows.was_loading

    def restore(
        self,
        run: str | None,
        known: KnownUpdates | None = None,
        *,
        begins: bool = False,
    ) -> None:
        """Restore the rows of a server that had run, unless its memory has them.

        Before it serves; the arguments are those of ``CheckpointService.restore``.
        """
        tasks, store = self.shard.checkpoints, self.shard.store
        if store.rows.was_loading:
            for state in store.states:
                state.num_updates = 0
        if not self.has_rows:
            tasks.restore(run, known, begins=begins)
            self.shard.restored = {state.number for state in store.present}

    def serve_and_push(self, when_ready: Callable[[str], None]) -> None:
        """Serve as :meth:`serve`, and push metrics if the environment says where."""
        read = ServerReadings(self.snapshots.ask).read
        shard, settings = self.config.shard, self.config.metrics
        stop_pushes = publish_metrics(
            "embedding_parameter_server", shard, settings, read
        )
        try:
            self.serve(when_ready)
        finally:
            stop_pushes()

    def serve(self, when_ready: Callable[[str], None] | None = None) -> None:
        """Answer requests until :meth:`stop` is called or a client asks to shut down.

        Queued updates are applied before this returns. ``when_ready`` is called with
        the address, once rows can be asked for.
        """
        shard = self.shard
        try:
            while not shard.stopping.is_set():
                if when_ready is not None and not shard.checkpoints.is_loading:
                    when_ready(self.address)
                    when_ready = None
                self._serve_once(shard)
            shard.updates.apply_all()
            shard.joint_steps.reject_all("The server was shut down.")
        finally:
            shard.stopping.set()  # a signal that comes now must not wait for a lock
            shard.checkpoints.close()
            self.snapshots.give(shard.counters(), is_last=True)
            self.listener.close()
            shard.store.close()

    def why_not_ready(self) -> str:
        """Return why rows cannot be asked for now, or ""; any thread may call it."""
        if self.shard.stopping.is_set():
            return "it ends"
        return "its rows are loaded" if self.shard.checkpoints.is_loading else ""

    def stop(self) -> None:
        """Make :meth:`serve` return soon. Any thread may call it, more than once."""
        if not self.shard.stopping.is_set():
            self.shard.stopping.set()
            self.listener.wakeup.wake()

    def _serve_once(self, shard: Shard) -> None:
        tasks = shard.checkpoints
        wait_ms = tasks.work(_IDLE_POLL_MS) if tasks.is_active else _IDLE_POLL_MS
        shard.stages.lap("dump")
        if self.snapshots.is_wanted and not tasks.is_loading:
            self.snapshots.give(shard.counters())
        if shard.must_drop and not tasks.is_loading:
            shard.drop_older_streams()
        if shard.joint_steps.num_steps and not tasks.is_loading:
            shard.joint_steps.reject_overdue()
        is_full = len(shard.updates) >= UPDATE_QUEUE_BATCHES
        if is_full or shard.updates.num_overtaking >= _MAX_OVERTAKING:
            shard.updates.apply_oldest()
            return
        is_behind = shard.updates or self._must_sweep_on
        if self.listener.wait(0 if is_behind else wait_ms):
            self._answer_next(shard)
        elif shard.updates:
            shard.updates.apply_oldest()
        else:
            shard.stages.lap("idle")
            shard.joint_steps.has_read_all()
            self._sweep(shard)
            self._num_idle += 1
            if self.when_idle is not None and self._num_idle >= _IDLE_TURNS:
                self.when_idle()
                self.when_idle = None

    def _sweep(self, shard: Shard) -> None:
        """Take out some expired rows; those of a served checkpoint never expire."""
        self._num_since_sweep = 0
        may_sweep = self.config.checkpoint is None and not shard.checkpoints.is_loading
        self._must_sweep_on = may_sweep and shard.store.sweep(_SWEEP_ROWS)
        shard.stages.lap("sweep")

    def _answer_next(self, shard: Shard) -> None:
        shard.stages.lap("idle")
        shard.updates.num_overtaking += bool(shard.updates)
        self._num_since_sweep += 1
        began_ns = shard.stages.last_ns
        message = self.listener.take()
        shard.stages.lap("receive")
        if message is None:
            shard.counts["requests_refused"] += self.listener.was_rejected
        else:
            peer, header, frames = message
            try:
                kind = self._admit(shard, header)
                reply = kind.answer(shard, ShardRequest(peer, header, frames))
            except Exception as exc:  # the server continues; the peer is told
                if not isinstance(exc, PersiaError | MemoryError):
                    logger.exception("a request failed")
                shard.reject(peer, header.request, exc)
            else:
                if reply is not None:
                    self.listener.send(peer, Header(Kind.REPLY, header.request), reply)
                    shard.stages.lap("send")
                    if header.kind is Kind.LOOKUP:
                        took_ns = shard.stages.last_ns - began_ns
                        shard.lookup_durations.add(took_ns)
                if shard.afterwards is not None:
                    shard.afterwards()
                    shard.afterwards = None
                    shard.stages.lap("lookup")
        if self._num_since_sweep >= _MESSAGES_PER_SWEEP:
            self._sweep(shard)

    def _admit(self, shard: Shard, header: Header) -> RequestKind:
        """Return how a request is answered, if that is possible now."""
        name = header.kind.name
        shard.counts[f"requests_{name.lower()}"] += 1
        kind, tasks = KINDS.get(header.kind), shard.checkpoints
        if kind is None:
            raise FrameError(
                f"An embedding server answers no {name} message. Is this the address "
                "of another role?"
            )
        if header.incarnation not in (0, tasks.incarnation):
            why, do = "the previous rows are gone", "load a checkpoint"
            if self.config.checkpoint:
                why, do = f"serves {tasks.serves}", "load its dense model"
            raise RestartedError(
                f"it restarted since the client connected, and {why}. Connect again, "
                f"and {do}.",
                server="",
            )
        if header.stream and shard.streams.admit(header.stream, header.batch):
            shard.drop_older_streams()
        is_training = bool(header.flags & TRAINING)
        if self.config.checkpoint and (is_training or not kind.in_inference):
            raise ConfigError(
                f"This server serves inference, from {self.config.checkpoint}: it "
                "answers lookups, and no client changes its rows. Received: "
                f"{'training ' if is_training else ''}{name}. Train with servers of a "
                "job_type: Train."
            )
        if kind.needs_rows:
            shard.activity.last_s = shard.activity.clock()
            if tasks.is_loading:
                raise tasks.not_loaded()
        return kind
