"""Updates that wait for their turn: the queue of a shard, and what it applies as one.

    update of a batch        alone ------------------------.
    share of a joint step    when all trainers' are there --+--> queue --> applied

They are applied in the order in which they came, between other requests, and
acknowledged then. Updates of several trainers that are one joint step are one update:
the gradients of an id are added up first.

Dimension key:
    N: ids of one table in one request
    U: ids of one table in a joint update, each once
    D: its embedding dim
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Floats, Ids, Slots
from persia_torchrec.errors import PersiaError, StoreError
from persia_torchrec.metrics.values import Durations, Stages
from persia_torchrec.routing.route import split_rows, sum_by_id
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.listener import Listener
from persia_torchrec.rpc.messages import Header, Kind, TableIds, TableSegments
from persia_torchrec.server.dedup import REJECTED, Outcome, Streams
from persia_torchrec.server.open_batches import Batch, LookedUp, OpenBatches
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import MISSING

logger = logging.getLogger(__name__)

_OBJECT_BYTES = 2048  # what an update takes besides its ids and gradients
_COUNTS = "missed", "refused", "unadmitted", "gradients"


class QueuedUpdate(NamedTuple):
    """One trainer's update, read and checked; ``peer`` gets the acknowledgement.

    It names no table when the trainer gives up its batch. ``dims`` are the tables', and
    ``grads`` float32, flat, table by table; a view of the message, where possible.
    """

    peer: bytes
    header: Header
    asked: TableSegments
    dims: npt.NDArray[np.int64]
    grads: Floats

    @property
    def batch(self) -> Batch:
        """Whose gradients they are."""
        return self.header.stream, self.header.batch

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, at least."""
        return _OBJECT_BYTES + self.asked.ids.nbytes + self.grads.nbytes

    def pieces(self) -> Iterator[tuple[TableIds, Floats]]:
        """Yield the ids of each table, and their gradients ``(N, D)``."""
        grads = split_rows(self.grads, self.asked.starts, self.dims)
        yield from zip(self.asked.pieces(), grads, strict=True)

    def hints(self, lookups: Sequence[LookedUp]) -> Slots | None:
        """Return the slots of all ids, if one of the lookups was of as many."""
        tables, starts, _ = self.asked
        for (looked_up, begins, _), slots, _ in lookups:
            if looked_up == tables and np.array_equal(begins, starts):
                return slots[0]
        return None


class TableGradients(NamedTuple):
    """What the store applies to one table, with the slots of its rows if known."""

    table: int
    ids: Ids
    grads: Floats
    hints: Slots | None


def build_gradients(
    updates: Sequence[QueuedUpdate], lookups: Sequence[list[LookedUp]]
) -> Iterator[TableGradients]:
    """Yield what is applied together, by table; use the slots of each lookup once."""
    pieces: dict[int, list[TableGradients]] = {}
    for update, of_batch in zip(updates, lookups, strict=True):
        kept = [found for lookup in of_batch for found in lookup.by_table()]
        for t, grads_ND in update.pieces():
            hints_N = None
            for i, (table, slots_N) in enumerate(kept):
                if table == t.table and len(slots_N) == len(t.ids):
                    hints_N = slots_N
                    del kept[i]
                    break
            piece = TableGradients(t.table, t.ids, grads_ND, hints_N)
            if len(updates) == 1:
                yield piece
            else:
                pieces.setdefault(t.table, []).append(piece)
    for to_add in pieces.values():
        yield to_add[0] if len(to_add) == 1 else _add_up(to_add)


def _add_up(pieces: Sequence[TableGradients]) -> TableGradients:
    """Return the gradients of one table as one, each id once.

    Of a table with blocks, those of blocks that a lookup has not found are left out.
    """
    hinted = [piece.hints for piece in pieces if piece.hints is not None]
    shape = hinted[0].shape[1:] if hinted else ()
    unique, grads_UD = sum_by_id(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate(
            [
                _of_found_blocks(piece.grads, piece.hints)
                if shape and piece.hints is not None
                else piece.grads
                for piece in pieces
            ]
        ),
    )
    hints_U = np.full((len(unique.ids), *shape), MISSING, dtype=np.uint32)
    start = 0
    for piece in pieces:
        inverse_N = unique.inverse[start : start + len(piece.ids)]
        start += len(piece.ids)
        if piece.hints is not None:
            hints_U[inverse_N] = np.minimum(hints_U[inverse_N], piece.hints)
        elif shape:
            hints_U[inverse_N] = 0  # wrong, perhaps; but it leaves no block out
    return TableGradients(pieces[0].table, unique.ids, grads_UD, hints_U)


def _of_found_blocks(grads_ND: Floats, slots_NB: Slots) -> Floats:
    """Return gradients with zeros for further blocks that a lookup has not found."""
    num, num_blocks = slots_NB.shape
    is_found_NB = slots_NB != MISSING
    is_found_NB[:, 0] = True
    width = grads_ND.shape[1] // num_blocks
    of_blocks = grads_ND.reshape(num, num_blocks, width)
    left: Floats = of_blocks * is_found_NB[:, :, None]  # NaN stays NaN
    return left.reshape(grads_ND.shape)


class UpdateQueue:
    """The updates of a shard that wait. Owned by the serving thread.

    ``listener`` sends acknowledgements; ``reject`` tells a peer that a request failed.

    Attributes:
        num_overtaking: messages that were answered since the last update was applied.
        updated: updates of tables, and their rows, by this process; one object, as
            another thread reads it.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        streams: Streams,
        listener: Listener,
        stages: Stages,
        reject: Callable[[bytes, int, Exception], None],
    ) -> None:
        self._store, self._streams = store, streams
        self._listener, self._stages, self._reject = listener, stages, reject
        self.open_batches = OpenBatches()
        self.open_batches.reopen(streams.open_batches())
        # Each list is applied as one, and when it was queued.
        self._waiting: deque[tuple[list[QueuedUpdate], int]] = deque()
        self._batches: set[Batch] = set()  # of these
        self.num_overtaking = self._max_waiting = self._num_hinted = 0
        self.updated = 0, 0
        self._durations = {"queue": Durations(), "update": Durations()}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, batch: Batch) -> bool:
        return batch in self._batches

    def add(self, updates: list[QueuedUpdate]) -> None:
        """Queue updates that are applied as one."""
        self._waiting.append((updates, self._stages.last_ns))
        self._batches.update([update.batch for update in updates])
        self._max_waiting = max(self._max_waiting, len(self._waiting))

    def apply_all(self) -> None:
        """Apply all updates that wait."""
        while self._waiting:
            self.apply_oldest()

    def apply_oldest(self) -> None:
        """Apply the update that has waited longest, and acknowledge it."""
        updates, queued_ns = self._waiting.popleft()
        self.num_overtaking = 0
        self._batches.difference_update([update.batch for update in updates])
        stages = self._stages
        stages.lap("other")
        began_ns = stages.last_ns
        self._durations["queue"].add(began_ns - queued_ns)
        try:
            outcome = self._apply(updates)
        except Exception as exc:  # the server continues; the peers are told
            if not isinstance(exc, PersiaError | MemoryError):
                logger.exception("an update failed")
            for update in updates:
                self.reject(update, exc)
            return
        stages.lap("update")
        self._durations["update"].add(stages.last_ns - began_ns)
        frame = describe_update(outcome)
        for update in updates:
            self.open_batches.end(update.batch)
            ack = Header(Kind.REPLY, update.header.request)
            self._listener.send(update.peer, ack, [frame])
        stages.lap("send")

    def reject(self, update: QueuedUpdate, exc: Exception) -> None:
        """Give an update up, and tell its trainer."""
        self.open_batches.end(update.batch)
        with self._store.rows.transaction() as transaction:
            self._streams.settle(transaction, update.batch, REJECTED)
        self._reject(update.peer, update.header.request, exc)

    def counters(self) -> dict[str, int]:
        """Return what waits, and what was applied, see ``docs/metrics.md``."""
        counted = {
            "updates_queued": len(self._waiting),
            "updates_queued_max": self._max_waiting,
            "updates_hinted": self._num_hinted,
            **self.open_batches.counters(),
        }
        for name, durations in self._durations.items():
            counted |= durations.counters(name)
        return counted

    def _apply(self, updates: list[QueuedUpdate]) -> Outcome:
        """Apply updates as one."""
        given = [update for update in updates if update.asked.tables]
        lookups = self.open_batches.apply([update.batch for update in given])
        num_updates = num_ids = 0
        with self._store.rows.transaction() as transaction:
            if len(given) == 1:
                (update,), (found,) = given, lookups
                tables, starts, ids = update.asked
                hints_N = update.hints(found)
                # A lookup of other tables, or one of several, has hints table by table.
                is_known = hints_N is not None or not found
                if is_known and self._store.group(tables).updates:
                    self._num_hinted += len(tables) * len(found)
                    self._store.add_updates(tables, ids, starts, update.grads, hints_N)
                    num_updates, num_ids, given = len(tables), len(ids), []
            for part in build_gradients(given, lookups if given else []):
                state = self._store.states[part.table]
                if state.spec.is_frozen or state.is_dropped:
                    continue
                self._num_hinted += part.hints is not None
                self._store.add_update(part.table, part.ids, part.grads, part.hints)
                num_updates += 1
                num_ids += len(part.ids)
            for update in updates:
                self._streams.settle_update(transaction, update.batch, num_ids)
        before, rows_before = self.updated
        self.updated = before + num_updates, rows_before + num_ids
        return *transaction.totals, num_ids


def describe_update(outcome: Outcome) -> bytes:
    """Return the reply to an update."""
    if outcome == REJECTED:
        raise StoreError(
            "An update must not have been rejected before. Received: a repeated "
            "request; see the log of the server, or of the trainer that sent it first."
        )
    return messages.encode_json(dict(zip(_COUNTS, outcome, strict=True)))
