"""Gradients that wait to be applied, and how those of several trainers become one.

A trainer's gradient of a step is summed over its own batch. Where trainers update
jointly, the server adds up what each of them sends for the same row, in the order of
their ranks, so that the sum does not depend on who came first, and the optimizer sees
one gradient a row: that of the mean, or the sum, of all trainers' losses.

Dimension key:
    N: ids of one table in one trainer's update
    U: ids of one table in a joint update, each once
    D: its embedding dim
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from persia_torchrec.compiled import compiled, read_only
from persia_torchrec.routing.dedup import Positions, unique_ids
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.server.hints import Hints, Slots
from persia_torchrec.store.lookup import MISSING
from persia_torchrec.wire.messages import Header, TableIds
from persia_torchrec.wire.precision import Floats

_OBJECT_BYTES = 2048
"""What an update takes beside its ids and gradients."""


@dataclass(frozen=True, slots=True)
class Update:
    """One trainer's update, read and checked: it waits to be applied.

    Attributes:
        peer: who gets the acknowledgement.
        header: of its request.
        tables: ids, a table each; none when the trainer gives up its batch.
        grads: float32 ``(N, D)`` a table; views of the message, where they can be.
    """

    peer: bytes
    header: Header
    tables: list[TableIds]
    grads: list[Floats]

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, not less."""
        ids = sum(t.ids.nbytes for t in self.tables)
        return _OBJECT_BYTES + ids + sum(grads_ND.nbytes for grads_ND in self.grads)


@dataclass(frozen=True, slots=True)
class TableGradients:
    """What the store gets to apply to one table.

    Attributes:
        table: its number.
        ids: uint64 ``(U,)``.
        grads: float32 ``(U, D)``.
        hints: uint32 ``(U,)``, where the rows were at their lookup, if that is known.
    """

    table: int
    ids: Ids
    grads: Floats
    hints: Slots | None


def gradients_of(updates: Sequence[Update], hints: Hints) -> Iterator[TableGradients]:
    """Yield the gradients of updates that are applied together, table by table.

    Args:
        updates: a single one, or one a trainer in the order of their ranks.
        hints: of the lookups before; those of these updates are taken out.
    """
    pieces: dict[int, list[TableGradients]] = {}
    for update in updates:
        stream, batch = update.header.stream, update.header.batch
        for t, grads_ND in zip(update.tables, update.grads, strict=True):
            hints_N = hints.take(stream, batch, t.table, len(t.ids))
            piece = TableGradients(t.table, t.ids, grads_ND, hints_N)
            if len(updates) == 1:
                yield piece
            else:
                pieces.setdefault(t.table, []).append(piece)
    for of_table in pieces.values():
        yield of_table[0] if len(of_table) == 1 else _add_up(of_table)


def _add_up(pieces: Sequence[TableGradients]) -> TableGradients:
    """Return the gradients of one table as one, each id once."""
    unique = unique_ids(np.concatenate([piece.ids for piece in pieces]))
    num_unique, dim = len(unique.ids), pieces[0].grads.shape[1]
    grads_UD = np.zeros((num_unique, dim), dtype=np.float32)
    hints_U = np.full(num_unique, MISSING, dtype=np.uint32)
    start = 0
    for piece in pieces:
        inverse_N = unique.inverse[start : start + len(piece.ids)]
        start += len(piece.ids)
        _add(read_only(inverse_N), read_only(piece.grads), grads_UD)
        if piece.hints is not None:
            hints_U[inverse_N] = piece.hints
    return TableGradients(pieces[0].table, unique.ids, grads_UD, hints_U)


@compiled
def _add(inverse_N: Positions, grads_ND: Floats, out_UD: Floats) -> None:
    for i in range(len(inverse_N)):
        for d in range(out_UD.shape[1]):
            out_UD[inverse_N[i], d] += grads_ND[i, d]
