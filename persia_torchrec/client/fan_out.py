"""One request becomes one a server: its share of every table.

Dimension key:
    U: unique ids of one table
    D: its embedding dim
    S: its optimizer-state floats a row
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from persia_torchrec.client.answers import body_of
from persia_torchrec.client.servers import Reply, Servers
from persia_torchrec.client.shares import (
    encode_counts,
    encode_share,
    require_room,
    scatter_share,
)
from persia_torchrec.errors import BatchError, FrameError
from persia_torchrec.routing.dedup import Counts
from persia_torchrec.routing.shard import ShardedIds
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    COUNTS,
    METADATA_COLUMNS,
    STATE,
    Frames,
    Header,
    Kind,
    Scalar,
    array_of,
)
from persia_torchrec.wire.precision import Floats, size_of


@dataclass(frozen=True, slots=True)
class TablePart:
    """Ids of one table in a request.

    Attributes:
        spec: the table.
        ids: grouped by server.
    """

    spec: TableSpec
    ids: ShardedIds


def fan_out(
    servers: Servers,
    numbers: Sequence[Mapping[str, int]],
    header: Header,
    parts: Sequence[TablePart],
    *,
    rows: Sequence[Floats] | None = None,
    counts: Sequence[Counts | None] | None = None,
) -> list[Reply]:
    """Send every server its share of the tables, and of rows or counts if given.

    Args:
        servers: all of them.
        numbers: of the tables by name, for each server.
        header: of the messages.
        parts: one a table.
        rows: float32 ``(U, D)``, or ``(U, D + S)``, a table, in the order of its
            grouped ids.
        counts: uint32 ``(U,)`` a table; sent if the header says so.

    Raises:
        BatchError: a server's share is too large.
    """
    names = ", ".join(repr(part.spec.name) for part in parts)
    what = f"{header.kind.name.lower()} of table {names}"
    ids = [part.ids for part in parts]
    size = size_of(header.precision)
    sizes = [columns_a_row(header, part.spec) * size for part in parts]
    require_room(what, ids, sizes, servers.max_request_ids)

    def frames_of(server: int) -> Frames:
        share = [(numbers[server][part.spec.name], part.ids) for part in parts]
        frames = encode_share(server, share, rows, header.precision)
        if header.flags & COUNTS and counts is not None:
            frames.append(encode_counts(server, ids, counts))
        return frames

    return servers.send(header, frames_of, what)


def gather_columns(
    servers: Servers,
    replies: Sequence[Reply],
    header: Header,
    part: TablePart,
    dtype: type[Scalar],
) -> npt.NDArray[Scalar]:
    """Wait for what servers tell of ids of one table; put it in the ids' order.

    Args:
        servers: all of them.
        replies: one a server.
        header: of the request.
        part: the ids that were asked for.
        dtype: of the answers.

    Returns:
        ``(U, columns)``, in the order in which the ids were given.

    Raises:
        FrameError: an answer has another length.
        ServerError: a server failed, refused, or did not answer in time.
    """
    width = columns_a_row(header, part.spec)
    grouped = np.empty((len(part.ids.ids), width), dtype)
    for server, reply in enumerate(replies):
        flat = array_of(body_of(servers.wait(reply)), dtype)
        num = len(part.ids.of_shard(server)) * width
        if len(flat) != num:
            raise FrameError(f"{num} numbers were asked. Received: {len(flat)}.")
        scatter_share(flat, [grouped], [part.ids], server)
    return grouped[part.ids.place]


def columns_a_row(header: Header, spec: TableSpec) -> int:
    """Return how many numbers a row of a table has in a request or its answer."""
    if header.kind is Kind.METADATA:
        return METADATA_COLUMNS
    has_state = header.kind in (Kind.READ, Kind.EXPORT) or bool(header.flags & STATE)
    return spec.dim + (spec.num_state_floats if has_state else 0)


def require_shape(spec: TableSpec, noun: str, rows: Floats, num_ids: int) -> None:
    """Refuse rows that are not one an id.

    Raises:
        BatchError: the shape is another than ``(num_ids, D)``.
    """
    expected = (num_ids, spec.dim)
    if rows.shape != expected:
        raise BatchError(
            f"Table {spec.name!r}: {noun} must have the shape {expected}. "
            f"Received: {rows.shape}."
        )
