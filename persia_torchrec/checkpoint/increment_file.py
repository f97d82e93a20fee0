"""What has changed on one server since the increment before, in a file.

It is a file of blocks, see ``block_file.py``, and begins with "PTRCINCR". Its JSON is

    {"log": name of the log, "number": 1 for its first increment, and so on,
     "shard", "num_shards": of the server, "created_s": seconds since 1970,
     "tick": of the server's last request, "was_cleared": all rows were dropped first,
     "tables": as in a shard file, "num_updates": each table's step}

and its blocks are "ROWS", as in a shard file: rows as they are now, whole; their uses
are 0 where a row has changed without having been used. And "GONE": 8 N bytes, the ids
of rows that are not there any more. A row comes in one block at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np

from persia_torchrec.checkpoint.block_file import BlockReader, BlockWriter, Written
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.shard_file import ROWS, FileTable, tables_of
from persia_torchrec.routing.hashing import Ids
from persia_torchrec.store.row_columns import RowColumns

GONE = b"GONE"
"""Letters of a block of ids whose rows have left."""

_MAGIC = b"PTRCINCR"
_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class IncrementHead:
    """What an increment says before its rows."""

    log: str
    """Name of the log that it is in."""

    number: int
    """Its place in the log, from 1 on."""

    shard: int
    """Which server wrote it."""

    num_shards: int
    """Of how many."""

    created_s: float
    """When it was begun, in seconds since 1970: what happened before is in it."""

    tick: int
    """Of the server's last request."""

    was_cleared: bool
    """All rows were dropped before these came."""

    tables: Sequence[FileTable]
    """Of the server, in the order of their numbers."""

    num_updates: Sequence[int]
    """Update requests that each table has had: its step."""

    def to_json(self) -> dict[str, object]:
        """Describe it in plain JSON values."""
        return {
            "log": self.log,
            "number": self.number,
            "shard": self.shard,
            "num_shards": self.num_shards,
            "created_s": self.created_s,
            "tick": self.tick,
            "was_cleared": self.was_cleared,
            "tables": [table.to_json() for table in self.tables],
            "num_updates": list(self.num_updates),
        }


@dataclass(frozen=True, slots=True)
class Increment:
    """One increment, read.

    Attributes:
        head: what it says before its rows.
        rows: number of the table, and rows of it.
        gone: number of the table, and ids without a row; uint64.
        size_bytes: of its file.
    """

    head: IncrementHead
    rows: list[tuple[int, RowColumns]] = field(default_factory=list)
    gone: list[tuple[int, Ids]] = field(default_factory=list)
    size_bytes: int = 0


class IncrementWriter(BlockWriter):
    """Writes an increment to a new file. Owned by one thread.

    Args:
        file: to be written to.
        head: what is said before the rows.
    """

    def __init__(self, file: IO[bytes], head: IncrementHead) -> None:
        super().__init__(file, _MAGIC, head.to_json())

    def write_rows(self, table: int, rows: RowColumns) -> None:
        """Write rows of one table; there may be none."""
        if len(rows):
            self.write_block(ROWS, table, len(rows), rows.columns())

    def write_gone(self, table: int, ids_N: Ids) -> None:
        """Write which ids of one table have no row any more; there may be none."""
        if len(ids_N):
            self.write_block(GONE, table, len(ids_N), [ids_N])


def write_increment(folder: Folder, increment: Increment) -> Written:
    """Write a whole increment to its place in the folder of its log."""
    with folder.created(increment_name(increment.head.number)) as file:
        writer = IncrementWriter(file, increment.head)
        for table, rows in increment.rows:
            writer.write_rows(table, rows)
        for table, ids_N in increment.gone:
            writer.write_gone(table, ids_N)
        return writer.end()


def read_increment(folder: Folder, number: int) -> Increment:
    """Read an increment, and check all of it.

    Args:
        folder: of its log.
        number: its place in the log.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    name = increment_name(number)
    with folder.opened(name) as file:
        reader = BlockReader(file, folder.path_of(name), _MAGIC)
        increment = Increment(_head_of(reader))
        shapes = [table.shape for table in increment.head.tables]

        def row_bytes(kind: bytes, table: int) -> int:
            if table >= len(shapes) or kind not in (ROWS, GONE):
                return 0
            return shapes[table].row_bytes if kind == ROWS else _ID_BYTES

        for block in reader.blocks(row_bytes):
            if block.kind == ROWS:
                rows = shapes[block.table].view(block.payload)
                increment.rows.append((block.table, rows))
            else:
                ids_N = np.frombuffer(block.payload, dtype=np.uint64)
                increment.gone.append((block.table, ids_N))
    head = increment.head
    return Increment(head, increment.rows, increment.gone, reader.num_bytes)


def increment_name(number: int) -> str:
    """Return the name of an increment's file."""
    return f"{number:012d}.increment"


def increment_number(name: str) -> int | None:
    """Return the place in its log of a file, or None if it is no increment."""
    stem, _, ending = name.partition(".")
    return int(stem) if ending == "increment" and stem.isdecimal() else None


def _head_of(reader: BlockReader) -> IncrementHead:
    value = reader.header
    tables = tables_of(reader)
    try:
        head = IncrementHead(
            log=str(value["log"]),
            number=int(value["number"]),
            shard=int(value["shard"]),
            num_shards=int(value["num_shards"]),
            created_s=float(value["created_s"]),
            tick=int(value["tick"]),
            was_cleared=bool(value["was_cleared"]),
            tables=tables,
            num_updates=[int(number) for number in value["num_updates"]],
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise reader.damaged(f"a header that cannot be understood ({exc})") from exc
    if len(head.num_updates) != len(tables):
        raise reader.damaged(f"{len(head.num_updates)} steps of {len(tables)} tables")
    return head
