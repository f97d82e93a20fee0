"""One request for tables becomes one a server: its part of every table.

Dimension key:
    U: unique ids of one table
    D: its embedding dim
    S: its optimizer-state floats a row
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from persia_torchrec.client.answers import body_of
from persia_torchrec.client.known_tables import KnownTables
from persia_torchrec.client.row_block import RowBlock
from persia_torchrec.client.servers import Reply, Servers
from persia_torchrec.client.shares import (
    columns_a_row,
    encode_counts,
    encode_share,
    require_room,
    require_shape,
    scatter_share,
)
from persia_torchrec.errors import BatchError, FrameError
from persia_torchrec.routing.dedup import Counts
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.routing.shard import ShardedIds, split_by_shard
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.messages import (
    COUNTS,
    STATE,
    Frames,
    Header,
    Kind,
    Scalar,
    Share,
    array_of,
)
from persia_torchrec.wire.precision import Floats, size_of


class TableRequests:
    """Sends requests that name ids of tables. Any thread may call any method.

    Args:
        servers: all of them.
        tables: those that the servers know.
    """

    def __init__(self, servers: Servers, tables: KnownTables) -> None:
        self._servers = servers
        self._tables = tables

    def send(
        self,
        header: Header,
        tables: Sequence[tuple[str, ShardedIds]],
        rows: Sequence[Floats] | None = None,
        *,
        counts: Sequence[Counts | None] | None = None,
        share: Share | None = None,
    ) -> list[Reply]:
        """Send every server its part of the tables, and of rows or counts if given.

        Args:
            header: of the messages.
            tables: names with their ids, grouped by server.
            rows: float32 ``(U, D)``, or ``(U, D + S)``, a table, in the order of its
                grouped ids.
            counts: uint32 ``(U,)`` a table; sent if the header says so.
            share: of which joint step this is a part, if it is.

        Raises:
            BatchError: a server's part is too large.
            ConfigError: a table has not been added.
        """
        specs = [self._tables.spec(name) for name, _ in tables]
        verb = header.kind.name.lower()
        what = f"{verb} of table {', '.join(repr(spec.name) for spec in specs)}"
        ids = [split for _, split in tables]
        size = size_of(header.precision)
        sizes = [columns_a_row(header, spec) * size for spec in specs]
        require_room(what, ids, sizes, self._servers.max_request_ids)

        def frames_of(server: int) -> Frames:
            numbers = self._tables.numbers[server]
            part = [(numbers[name], split) for name, split in tables]
            frames = encode_share(server, part, rows, header.precision)
            if header.flags & COUNTS and counts is not None:
                frames.append(encode_counts(server, ids, counts))
            if share is not None:
                frames.append(share.encode())
            return frames

        # A joint step waits for the other trainers as well.
        waits_s = share.timeout_ms / 1000 if share else 0
        timeout_s = self._servers.timeout_s + waits_s
        return self._servers.send(header, frames_of, what, timeout_s)

    def read(
        self, header: Header, table: str, ids: Ids, dtype: type[Scalar]
    ) -> npt.NDArray[Scalar]:
        """Ask for numbers of ids of one table, and wait for them.

        Args:
            header: of the messages.
            table: its name.
            ids: uint64 ``(U,)``.
            dtype: of the numbers.

        Returns:
            ``(U, columns)``, in the order of ``ids``.

        Raises:
            FrameError: an answer has another length.
            ServerError: a server failed, refused, or did not answer in time.
        """
        split = split_by_shard(ids, len(self._servers))
        replies = self.send(header, [(table, split)])
        width = columns_a_row(header, self._tables.spec(table))
        grouped = np.empty((len(ids), width), dtype)
        for server, reply in enumerate(replies):
            flat = array_of(body_of(self._servers.wait(reply)), dtype)
            num = len(split.of_shard(server)) * width
            if len(flat) != num:
                raise FrameError(f"{num} numbers were asked. Received: {len(flat)}.")
            scatter_share(flat, [grouped], [split], server)
        return grouped[split.place]

    def write(self, table: str, block: RowBlock) -> list[Reply]:
        """Send rows to be written.

        Raises:
            BatchError: the shapes do not fit the table.
        """
        rows, flags = _rows_and_flags(self._tables.spec(table), block)
        split = split_by_shard(block.ids, len(self._servers))
        header = Header(Kind.WRITE, flags=flags)
        return self.send(header, [(table, split)], [split.grouped(rows)])


def _rows_and_flags(spec: TableSpec, block: RowBlock) -> tuple[Floats, int]:
    """Return a block as a WRITE carries it: its rows and the header's flags."""
    num = len(block.ids)
    require_shape(spec, "weights", block.weights, num)
    if block.state is None:
        return np.asarray(block.weights, dtype=np.float32), 0
    if block.state.shape != (num, spec.num_state_floats):
        raise BatchError(
            f"Table {spec.name!r}: the state of {type(spec.optimizer).__name__} must "
            f"have the shape {(num, spec.num_state_floats)}. "
            f"Received: {block.state.shape}."
        )
    rows = np.concatenate([block.weights, block.state], axis=1, dtype=np.float32)
    return rows, STATE
