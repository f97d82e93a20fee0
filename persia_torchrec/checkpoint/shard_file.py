"""The rows of one server in a file, to the byte.

    offset  size
    0       8     the bytes "PTRCROWS"
    8       4     version of this format, 1
    12      4     H, bytes of the JSON that follows
    16      4     CRC-32 of the JSON
    20      H     JSON: {"shard", "num_shards", "tables": [{"spec": see
                  TableSpec.to_json, "has_metadata": bool}, ...]}
    then blocks, each of rows of one table:
            4     the bytes "ROWS"
            4     number of the table: its place in the JSON's list
            4     N, rows in this block, at least 1
            4     CRC-32 of the columns
                  columns, one after the other (see RowColumns):
            8 N   ids, uint64
            8 N   uses, uint64
            16 N  metadata, 4 uint32; only with "has_metadata"
            4 S N optimizer state, float32
            4 D N weights, float32; or 2 D N, the bits of fp16 or bf16
    and at the end:
            4     the bytes "ENDS"
            4     CRC-32 of all heads of blocks, from "ROWS" to the columns
            8     rows in the file

All numbers are little-endian. A block is written as it comes and never touched again,
so that a file is as long as its rows, and neither writer nor reader holds more than a
block of it. What does not fit this is refused with a CheckpointError that names the
file and the byte.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.table import TableSpec

VERSION = 1
"""Version of the format that is written, and the only one that is read so far."""

_MAGIC = b"PTRCROWS"
_BEGIN = struct.Struct("<8sIII")
_HEAD = struct.Struct("<4sIII")
_END = struct.Struct("<4sIQ")
_ROWS, _ENDS = b"ROWS", b"ENDS"
_MAX_HEADER_BYTES = 2**28
_MAX_BLOCK_BYTES = 2**28


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


@dataclass(frozen=True, slots=True)
class Written:
    """What has been written.

    Attributes:
        num_rows: rows in the file.
        size_bytes: bytes of the file.
        checksum: CRC-32 of the heads of all blocks, which hold those of their columns.
    """

    num_rows: int
    size_bytes: int
    checksum: int


class ShardWriter:
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
        tables: list[FileTable],
    ) -> None:
        self._file = file
        self._num_rows = self._size_bytes = self._checksum = 0
        description = {
            "shard": shard,
            "num_shards": num_shards,
            "tables": [
                {"spec": t.spec.to_json(), "has_metadata": t.has_metadata}
                for t in tables
            ],
        }
        header = json.dumps(description).encode()
        self._write(_BEGIN.pack(_MAGIC, VERSION, len(header), zlib.crc32(header)))
        self._write(header)

    def write(self, table: int, rows: RowColumns) -> None:
        """Write a block of rows of one table."""
        columns = [column.data.cast("B") for column in rows.columns() if column.size]
        checksum = 0
        for column in columns:
            checksum = zlib.crc32(column, checksum)
        head = _HEAD.pack(_ROWS, table, len(rows), checksum)
        self._checksum = zlib.crc32(head, self._checksum)
        self._num_rows += len(rows)
        self._write(head)
        for column in columns:
            self._write(column)

    def end(self) -> Written:
        """Write the end of the file; nothing may follow."""
        self._write(_END.pack(_ENDS, self._checksum, self._num_rows))
        return Written(self._num_rows, self._size_bytes, self._checksum)

    def _write(self, data: bytes | memoryview) -> None:
        self._size_bytes += len(data)
        while data:  # a raw file may take a part
            data = memoryview(data)[self._file.write(data) :]


class ShardReader:
    """Reads the file that a :class:`ShardWriter` wrote. Use :func:`open_shard`.

    Args:
        file: at its beginning.
        path: of the file, for errors.

    Attributes:
        shard: of the server that wrote it.
        num_shards: of its job.
        tables: in the order of their numbers in this file.
        num_bytes: read so far.

    Raises:
        CheckpointError: these are not the bytes of such a file.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path
        self.num_bytes = 0
        magic, version, num_bytes, checksum = _BEGIN.unpack(self._take(_BEGIN.size))
        if magic != _MAGIC:
            raise CheckpointError(
                f"{path} must begin with {_MAGIC!r}. Received: {magic!r}."
            )
        if version != VERSION:
            raise CheckpointError(
                f"{path}: the format's version must be {VERSION}. Received: {version}. "
                "Load it with the version of persia_torchrec that wrote it."
            )
        if num_bytes > _MAX_HEADER_BYTES:
            raise self._damaged(f"a header of {num_bytes} bytes")
        header = self._take(num_bytes)
        if zlib.crc32(header) != checksum:
            raise self._damaged("a header with another checksum")
        try:
            value = json.loads(header)
            self.shard, self.num_shards = int(value["shard"]), int(value["num_shards"])
            self.tables = [
                FileTable(TableSpec.from_json(t["spec"]), bool(t["has_metadata"]))
                for t in value["tables"]
            ]
        except (KeyError, TypeError, ValueError, ConfigError) as exc:
            raise self._damaged(f"a header that cannot be understood ({exc})") from exc

    def blocks(self) -> Iterator[tuple[int, RowColumns]]:
        """Yield number of the table and rows of each block, up to the end of the file.

        Raises:
            CheckpointError: the file is cut off or damaged.
        """
        shapes = [table.shape for table in self.tables]
        total = all_heads = 0
        while (head := self._take(_HEAD.size))[:4] != _ENDS:
            magic, table, num_rows, checksum = _HEAD.unpack(head)
            if magic != _ROWS or table >= len(shapes) or num_rows == 0:
                raise self._damaged(f"{head!r} as the head of a block")
            num_bytes = num_rows * shapes[table].row_bytes
            if num_bytes > _MAX_BLOCK_BYTES:
                raise self._damaged(f"a block of {num_bytes} bytes")
            payload = self._take(num_bytes)
            if zlib.crc32(payload) != checksum:
                raise self._damaged("a block with another checksum")
            total += num_rows
            all_heads = zlib.crc32(head, all_heads)
            yield table, shapes[table].view(payload)
        if _END.unpack(head) != (_ENDS, all_heads, total):
            raise self._damaged(f"an end that does not fit the {total} rows before it")
        if self._file.read(1):
            raise self._damaged("more bytes behind the end")
        self.written = Written(total, self.num_bytes, all_heads)

    def _take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise CheckpointError(
                f"{self._path} is cut off: {num_bytes} bytes must follow byte "
                f"{self.num_bytes}. Received: {len(data)}."
            )
        self.num_bytes += num_bytes
        return data

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged. Received: {what}, before byte {self.num_bytes}. "
            "Load another checkpoint."
        )


@contextmanager
def open_shard(folder: Folder, name: str) -> Iterator[ShardReader]:
    """Open a shard file.

    Raises:
        CheckpointError: it is missing, or not such a file.
    """
    with folder.opened(name) as file:
        yield ShardReader(file, folder.path_of(name))
