"""One server's share of a request, and of its answer.

Dimension key:
    U: unique ids of one table
    W: floats a row: weights, or weights and optimizer state
"""

from collections.abc import Sequence

import numpy as np

from persia_torchrec.routing.shard import ShardedIds
from persia_torchrec.wire.messages import Frames, Precision, TableIds, encode_segments
from persia_torchrec.wire.precision import Floats, encode_floats

_NO_ROWS = np.empty(0, dtype=np.float32)


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
        flat = pieces[0] if len(pieces) == 1 else np.concatenate([_NO_ROWS, *pieces])
        frames.append(encode_floats(flat, precision))
    return frames


def scatter_share(
    flat: Floats, rows: Sequence[Floats], ids: Sequence[ShardedIds], server: int
) -> None:
    """Copy one server's answer to its place in each table's rows.

    Args:
        flat: float32, the rows of the server's ids, one table after the other.
        rows: float32 ``(U, W)`` a table, written to.
        ids: of all servers, a table each.
        server: whose answer it is.
    """
    place = 0
    for rows_UW, split in zip(rows, ids, strict=True):
        share = rows_UW[split.offsets[server] : split.offsets[server + 1]]
        share[:] = flat[place : place + share.size].reshape(share.shape)
        place += share.size
