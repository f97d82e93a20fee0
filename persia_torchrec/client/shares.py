"""One server's share of a request, and of its answer.

Dimension key:
    U: unique ids of one table
    W: floats a row: weights, or weights and optimizer state
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.errors import BatchError
from persia_torchrec.routing.dedup import Counts
from persia_torchrec.routing.shard import ShardedIds
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.listener import MAX_MESSAGE_BYTES
from persia_torchrec.wire.messages import (
    METADATA_COLUMNS,
    STATE,
    Frame,
    Frames,
    Header,
    Kind,
    Precision,
    Scalar,
    TableIds,
    bytes_of,
    encode_segments,
)
from persia_torchrec.wire.precision import Floats, decode_floats, encode_floats

_NO_ROWS = np.empty(0, dtype=np.float32)
_NO_COUNTS = np.empty(0, dtype=np.uint32)


def encode_share(
    server: int,
    tables: Sequence[tuple[int, ShardedIds]],
    rows: Sequence[Floats] | None,
    precision: Precision,
) -> Frames:
    """Return the frames after the header of one server's request.

    Args:
        server: number of the server.
        tables: the server's number of each table, and the ids of all servers.
        rows: float32 ``(U, W)`` a table, in the order of its ids, if rows are sent.
        precision: how they travel.
    """
    frames = encode_segments([TableIds(n, ids.of_shard(server)) for n, ids in tables])
    if rows is not None:
        pieces = [
            rows_UW[ids.offsets[server] : ids.offsets[server + 1]].reshape(-1)
            for (_, ids), rows_UW in zip(tables, rows, strict=True)
        ]
        frames.append(encode_floats(_joined(pieces), precision))
    return frames


def _joined(pieces: Sequence[Floats]) -> Floats:
    """Return flat arrays behind one another; a view where they already are."""
    pieces = [piece for piece in pieces if len(piece)]
    if not pieces:
        return _NO_ROWS
    whole = pieces[0].base
    if isinstance(whole, np.ndarray) and all(piece.base is whole for piece in pieces):
        starts = [piece.ctypes.data for piece in pieces]
        stops = [
            start + piece.nbytes for start, piece in zip(starts, pieces, strict=True)
        ]
        if starts[1:] == stops[:-1] and whole.flags.c_contiguous:
            first = (starts[0] - whole.ctypes.data) // pieces[0].itemsize
            return whole.reshape(-1)[first : first + sum(map(len, pieces))]
    return np.concatenate(pieces)


def encode_counts(
    server: int, ids: Sequence[ShardedIds], counts: Sequence[Counts | None]
) -> memoryview:
    """Return the frame of one server's counts.

    Args:
        server: number of the server.
        ids: of all servers, a table each.
        counts: uint32 ``(U,)`` a table, in the order of its ids; None counts 1 each.
    """
    pieces = [
        np.ones(len(split.of_shard(server)), dtype=np.uint32)
        if counts_U is None
        else counts_U[split.offsets[server] : split.offsets[server + 1]]
        for split, counts_U in zip(ids, counts, strict=True)
    ]
    return bytes_of(np.concatenate([_NO_COUNTS, *pieces]))


def require_room(
    what: str,
    ids: Sequence[ShardedIds],
    bytes_a_row: Sequence[int],
    max_request_ids: Sequence[int],
) -> None:
    """Refuse a request that a server would refuse, before any server gets its share.

    Args:
        what: the request, in words.
        ids: of all servers, a table each.
        bytes_a_row: what a row of each table takes on the wire, either way.
        max_request_ids: ids that each server accepts.

    Raises:
        BatchError: a server's share is too large.
    """
    num_ids = sum(len(split.ids) for split in ids)
    num_bytes = num_ids * max(bytes_a_row, default=0)
    if num_ids <= min(max_request_ids) and num_bytes <= MAX_MESSAGE_BYTES:
        return  # so are the shares
    for server, max_ids in enumerate(max_request_ids):
        shares = [len(split.of_shard(server)) for split in ids]
        num_bytes = sum(map(int.__mul__, shares, bytes_a_row))
        if sum(shares) > max_ids or num_bytes > MAX_MESSAGE_BYTES:
            raise BatchError(
                f"{what}: a server's share must have at most {max_ids} ids and "
                f"{MAX_MESSAGE_BYTES} bytes of rows. Received: {sum(shares)} ids, "
                f"{num_bytes} bytes for server {server}. Use smaller batches."
            )


def require_shape(spec: TableSpec, noun: str, rows: Floats, num_ids: int) -> None:
    """Refuse rows that are not one an id.

    Raises:
        BatchError: their shape is another.
    """
    expected = (num_ids, spec.dim)
    if rows.shape != expected:
        raise BatchError(
            f"Table {spec.name!r}: {noun} must have the shape {expected}. "
            f"Received: {rows.shape}."
        )


def columns_a_row(header: Header, spec: TableSpec) -> int:
    """Return how many numbers a row of a table has in a request, or in its reply."""
    if header.kind is Kind.METADATA:
        return METADATA_COLUMNS
    has_state = header.kind is Kind.READ or (
        header.kind is Kind.WRITE and bool(header.flags & STATE)
    )
    return spec.dim + (spec.num_state_floats if has_state else 0)


def check_counts(
    tables: Sequence[tuple[str, ShardedIds]], counts: Sequence[Counts | None]
) -> None:
    """Refuse counts that are not one an id.

    Raises:
        BatchError: the dtype or the shape of one is another.
    """
    for (name, split), counts_U in zip(tables, counts, strict=True):
        if counts_U is None:
            continue
        if counts_U.dtype != np.uint32 or counts_U.shape != split.ids.shape:
            raise BatchError(
                f"Table {name!r}: counts must be uint32 of the shape "
                f"{split.ids.shape}. Received: {counts_U.dtype} {counts_U.shape}."
            )


def scatter_share(
    flat: npt.NDArray[Scalar],
    rows: Sequence[npt.NDArray[Scalar]],
    ids: Sequence[ShardedIds],
    server: int,
) -> None:
    """Copy one server's answer to its place in each table's rows.

    Args:
        flat: the rows of the server's ids, one table after the other.
        rows: ``(U, W)`` a table, of the same dtype, written to.
        ids: of all servers, a table each.
        server: whose answer it is.
    """
    place = 0
    for rows_UW, split in zip(rows, ids, strict=True):
        share = rows_UW[split.offsets[server] : split.offsets[server + 1]]
        share[:] = flat[place : place + share.size].reshape(share.shape)
        place += share.size


def gather_rows(
    answers: Sequence[Frame],
    ids: Sequence[ShardedIds],
    dims: Sequence[int],
    precision: Precision,
) -> list[Floats]:
    """Put the answers of all servers to a lookup together.

    Args:
        answers: the rows that each server sent, one table after the other.
        ids: of all servers, a table each.
        dims: of each table.
        precision: how the rows have travelled.

    Returns:
        float32 ``(U, D)`` a table, read-only; views of the answer if there is one.

    Raises:
        FrameError: an answer has another length.
    """
    if len(answers) == 1:
        rows = _views_of(answers[0], ids, dims, precision)
    else:
        shapes = zip((len(split.ids) for split in ids), dims, strict=True)
        rows = [np.empty(shape, dtype=np.float32) for shape in shapes]
        for server, answer in enumerate(answers):
            shares = [len(split.of_shard(server)) for split in ids]
            num = sum(map(int.__mul__, shares, dims))
            scatter_share(decode_floats(answer, num, precision), rows, ids, server)
    for rows_UD in rows:
        rows_UD.flags.writeable = False
    return rows


def _views_of(
    answer: Frame, ids: Sequence[ShardedIds], dims: Sequence[int], precision: Precision
) -> list[Floats]:
    shapes = [(len(split.ids), dim) for split, dim in zip(ids, dims, strict=True)]
    num = sum([num * dim for num, dim in shapes])
    flat = decode_floats(answer, num, precision)
    if not flat.flags.aligned:  # a small frame may begin anywhere in memory
        flat = flat.copy()
    if len(shapes) == 1:
        return [flat.reshape(shapes[0])]
    stops = itertools.accumulate([num * dim for num, dim in shapes])
    return [
        flat[stop - num * dim : stop].reshape(num, dim)
        for stop, (num, dim) in zip(stops, shapes, strict=True)
    ]
