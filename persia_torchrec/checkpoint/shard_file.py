"""The rows of one server in a file.

It is a file of blocks, see ``block_file.py``, and begins with "PTRCROWS". Its JSON is

    {"shard", "num_shards", "tables": [{"spec": see TableSpec.to_json,
                                        "has_metadata": bool}, ...]}

and its blocks, "ROWS", hold N rows of one table, a column for each of their parts (see
``RowColumns``):

    8 N   ids, uint64
    8 N   uses, uint64
    16 N  metadata, 4 uint32; only with "has_metadata"
    4 S N optimizer state, float32
    4 D N weights, float32; or 2 D N, the bits of fp16 or bf16
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from persia_torchrec.checkpoint.block_file import VERSION as VERSION
from persia_torchrec.checkpoint.block_file import BlockReader, BlockWriter
from persia_torchrec.checkpoint.block_file import Written as Written
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import ConfigError
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.table import TableSpec

ROWS = b"ROWS"
"""Letters of a block of rows."""

_MAGIC = b"PTRCROWS"


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table in a shard file.

    Attributes:
        spec: as it was when the file was begun.
        has_metadata: whether its rows have metadata.
    """

    spec: TableSpec
    has_metadata: bool

    @property
    def shape(self) -> RowShape:
        """What its columns look like."""
        return RowShape.of(self.spec, has_metadata=self.has_metadata)

    def to_json(self) -> dict[str, object]:
        """Describe it in plain JSON values."""
        return {"spec": self.spec.to_json(), "has_metadata": self.has_metadata}


class ShardWriter(BlockWriter):
    """Writes rows to a new file, block after block. Owned by one thread.

    Args:
        file: to be written to.
        shard: of the server.
        num_shards: of the job.
        tables: of the server, in the order of their numbers.
    """

    def __init__(
        self,
        file: IO[bytes],
        shard: int,
        num_shards: int,
        tables: Sequence[FileTable],
    ) -> None:
        in_header = [table.to_json() for table in tables]
        description = {"shard": shard, "num_shards": num_shards, "tables": in_header}
        super().__init__(file, _MAGIC, description)

    def write(self, table: int, rows: RowColumns) -> None:
        """Write a block of rows of one table."""
        self.write_block(ROWS, table, len(rows), rows.columns())


class ShardReader(BlockReader):
    """Reads the file that a :class:`ShardWriter` wrote. Use :func:`open_shard`.

    Args:
        file: at its beginning.
        path: of the file, for errors.

    Attributes:
        shard: of the server that wrote it.
        num_shards: of its job.
        tables: in the order of their numbers in this file.

    Raises:
        CheckpointError: these are not the bytes of such a file.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file, path, _MAGIC)
        value = self.header
        try:
            self.shard, self.num_shards = int(value["shard"]), int(value["num_shards"])
        except (KeyError, TypeError, ValueError) as exc:
            raise self.damaged(f"a header that cannot be understood ({exc})") from exc
        self.tables = tables_of(self)

    def rows(self) -> Iterator[tuple[int, RowColumns]]:
        """Yield number of the table and rows of each block, up to the end of the file.

        Raises:
            CheckpointError: the file is cut off or damaged.
        """
        shapes = [table.shape for table in self.tables]

        def row_bytes(kind: bytes, table: int) -> int:
            is_known = kind == ROWS and table < len(shapes)
            return shapes[table].row_bytes if is_known else 0

        for block in self.blocks(row_bytes):
            yield block.table, shapes[block.table].view(block.payload)


def tables_of(reader: BlockReader) -> list[FileTable]:
    """Return the tables in the JSON of a file.

    Raises:
        CheckpointError: they cannot be understood.
    """
    try:
        return [
            FileTable(TableSpec.from_json(t["spec"]), bool(t["has_metadata"]))
            for t in reader.header["tables"]
        ]
    except (KeyError, TypeError, ValueError, ConfigError) as exc:
        raise reader.damaged(f"a header that cannot be understood ({exc})") from exc


@contextmanager
def open_shard(folder: Folder, name: str) -> Iterator[ShardReader]:
    """Open a shard file.

    Raises:
        CheckpointError: it is missing, or not such a file.
    """
    with folder.opened(name) as file:
        yield ShardReader(file, folder.path_of(name))
