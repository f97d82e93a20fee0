"""Batches from their lookup to their update: their slots, the sums of gradients.

    lookup of a batch   it is open: the slots of its rows are kept for its update
    update of a batch   applied alone, or as one trainer's share of a joint step

An update with the slots of its lookup needs no search. What is kept is bounded; an
update without its slots looks its ids up again.

Dimension key:
    N: ids of one table in one request
    U: ids of one table in a joint update, each once
    D: its embedding dim
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from persia_torchrec.routing.route import Ids, split_rows, sum_by_id
from persia_torchrec.rpc.float_codec import Floats
from persia_torchrec.rpc.messages import Header, TableIds, TableSegments
from persia_torchrec.store.memory import MISSING

Slots = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.uint32]
Batch = tuple[int, int]
"""Stream of a batch (one trainer's embedding collection), and its number there."""
TableSlots = tuple[int, Slots]
"""A table, and where a lookup found its rows, in the order of the request; with blocks
``(N, blocks)``."""

_NO_IDS = np.empty(0, dtype=np.uint64)
MAX_SLOTS = 2**25  # slots kept by default: 128 MiB
_MAX_OPEN = 4096
_ARRAY_COST = 64  # what an array costs besides its slots, in slots

_OBJECT_BYTES = 2048  # what an update takes besides its ids and gradients


class LookedUp(NamedTuple):
    """The slots of a training lookup: of all ids in one array, or one a table."""

    asked: TableSegments
    slots: list[Slots]
    cost: int

    def by_table(self) -> list[TableSlots]:
        """Return the slots of each table."""
        tables, slots = self.asked.tables, self.slots
        if len(slots) != len(tables):
            slots = np.split(slots[0], self.asked.starts[1:-1])
        return list(zip(tables, slots, strict=True))


class OpenBatches:
    """Training batches whose update is not yet applied. Owned by the serving thread.

    Beyond ``max_slots`` slots (64 more count for each lookup and table), the batch
    begun first loses its own: its update searches its rows again.
    """

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self._max_slots = max_slots
        self._open: dict[int, set[int]] = {}
        self._max_open = 0
        self._lookups: OrderedDict[Batch, list[LookedUp]] = OrderedDict()
        self.num_slots = 0

    def begin(self, batch: Batch, asked: TableSegments, slots: list[Slots]) -> None:
        """Keep the slots of a training lookup, maybe one of several of its batch."""
        stream, number = batch
        numbers = self._open.setdefault(stream, set())
        numbers.add(number)
        if len(self._open) > _MAX_OPEN:  # of clients that have died
            self.drop(next(iter(self._open)).__eq__)
        self._max_open = max(self._max_open, len(numbers))
        if len(numbers) > _MAX_OPEN:
            # A trainer that died leaves its stream open; a live one is bounded.
            for forgotten in numbers:
                self._pop((stream, forgotten))
            numbers.clear()
        cost = sum(slots_N.size for slots_N in slots)
        cost += _ARRAY_COST * (1 + len(asked.tables))
        kept = asked._replace(ids=_NO_IDS)  # which hold their message
        self._lookups.setdefault(batch, []).append(LookedUp(kept, slots, cost))
        self.num_slots += cost
        while self.num_slots > self._max_slots:
            self._pop(next(iter(self._lookups)))

    def apply(self, batches: Sequence[Batch]) -> list[list[LookedUp]]:
        """Return the lookups of each batch that is updated; keep them no longer."""
        return [self._pop(batch) for batch in batches]

    def end(self, batch: Batch) -> None:
        """The update of a batch has been applied, or its trainer gave it up."""
        stream, number = batch
        self._pop(batch)  # if its update was not applied
        numbers = self._open.get(stream, set())
        numbers.discard(number)
        if not numbers:
            self._open.pop(stream, None)

    def reopen(self, batches: Iterable[Batch]) -> None:
        """Open batches that were open before the server was started again."""
        for stream, number in batches:
            self._open.setdefault(stream, set()).add(number)

    def drop(self, is_over: Callable[[int], bool]) -> None:
        """Give up the batches of streams."""
        for stream in list(filter(is_over, self._open)):
            for number in list(self._open[stream]):
                self.end((stream, number))

    def clear_slots(self) -> None:
        """Forget all slots: the rows were dropped."""
        self._lookups.clear()
        self.num_slots = 0

    def counters(self) -> dict[str, int]:
        """Return the slots kept, and the open batches of a stream."""
        return {
            "hinted_slots": self.num_slots,
            "open_batches": max(map(len, self._open.values()), default=0),
            "open_batches_max": self._max_open,
        }

    def _pop(self, batch: Batch) -> list[LookedUp]:
        lookups = self._lookups.pop(batch, [])
        self.num_slots -= sum(lookup.cost for lookup in lookups)
        return lookups


class Update(NamedTuple):
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
    updates: Sequence[Update], lookups: Sequence[list[LookedUp]]
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
