"""Files of blocks with checksums: what shard files and increments share.

    offset  size
    0       8     bytes that say what kind of file it is
    8       4     version of this format, 1
    12      4     H, bytes of the JSON that follows
    16      4     CRC-32 of the JSON
    20      H     JSON: an object
    then blocks:
            4     four letters: what is in it
            4     number of the table: its place in the JSON's list
            4     N, rows or ids in this block, at least 1
            4     CRC-32 of the columns
                  columns, one after the other
    and at the end:
            4     the bytes "ENDS"
            4     CRC-32 of all heads of blocks, from their letters to the columns
            8     N of all blocks together

All numbers are little-endian. A block is written as it comes and never touched again,
so that a file is as long as its rows, and neither writer nor reader holds more than a
block of it. What does not fit this is refused with a CheckpointError that names the
file and the byte.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy.typing as npt

from persia_torchrec.errors import CheckpointError

VERSION = 1
"""Version of the format that is written, and the only one that is read so far."""

_BEGIN = struct.Struct("<8sIII")
_HEAD = struct.Struct("<4sIII")
_END = struct.Struct("<4sIQ")
_ENDS = b"ENDS"
_MAX_HEADER_BYTES = 2**28
_MAX_BLOCK_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Written:
    """What has been written.

    Attributes:
        num_rows: rows in the file; N of all blocks.
        size_bytes: bytes of the file.
        checksum: CRC-32 of the heads of all blocks, which hold those of their columns.
    """

    num_rows: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a file.

    Attributes:
        kind: four letters.
        table: number of the table.
        num_rows: N.
        payload: its columns, one after the other.
    """

    kind: bytes
    table: int
    num_rows: int
    payload: bytes


class BlockWriter:
    """Writes a new file, block after block. Owned by one thread.

    Args:
        file: to be written to.
        magic: eight bytes that say what kind of file it is.
        description: what the JSON says.
    """

    def __init__(
        self, file: IO[bytes], magic: bytes, description: Mapping[str, object]
    ) -> None:
        self._file = file
        self._num_rows = self._size_bytes = self._checksum = 0
        header = json.dumps(description).encode()
        self._write(_BEGIN.pack(magic, VERSION, len(header), zlib.crc32(header)))
        self._write(header)

    def write_block(
        self, kind: bytes, table: int, num_rows: int, arrays: Sequence[npt.NDArray[Any]]
    ) -> None:
        """Write a block.

        Args:
            kind: four letters.
            table: number of the table.
            num_rows: rows, at least 1.
            arrays: C-contiguous columns.
        """
        columns = [column.data.cast("B") for column in arrays if column.size]
        checksum = 0
        for column in columns:
            checksum = zlib.crc32(column, checksum)
        head = _HEAD.pack(kind, table, num_rows, checksum)
        self._checksum = zlib.crc32(head, self._checksum)
        self._num_rows += num_rows
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


class BlockReader:
    """Reads the file that a :class:`BlockWriter` wrote.

    Args:
        file: at its beginning.
        path: of the file, for errors.
        magic: what it must begin with.

    Attributes:
        header: what its JSON says.
        num_bytes: read so far.
        written: what its writer said of it, when all blocks have been read.

    Raises:
        CheckpointError: these are not the bytes of such a file.
    """

    written: Written

    def __init__(self, file: IO[bytes], path: str, magic: bytes) -> None:
        self._file = file
        self._path = path
        self.num_bytes = 0
        begin, version, num_bytes, checksum = _BEGIN.unpack(self._take(_BEGIN.size))
        if begin != magic:
            raise CheckpointError(
                f"{path} must begin with {magic!r}. Received: {begin!r}."
            )
        if version != VERSION:
            raise CheckpointError(
                f"{path}: the format's version must be {VERSION}. Received: {version}. "
                "Load it with the version of persia_torchrec that wrote it."
            )
        if num_bytes > _MAX_HEADER_BYTES:
            raise self.damaged(f"a header of {num_bytes} bytes")
        header = self._take(num_bytes)
        if zlib.crc32(header) != checksum:
            raise self.damaged("a header with another checksum")
        try:
            self.header: Any = json.loads(header)
        except ValueError as exc:
            raise self.damaged(f"a header that cannot be understood ({exc})") from exc

    def blocks(self, row_bytes: Callable[[bytes, int], int]) -> Iterator[Block]:
        """Yield each block, up to the end of the file.

        Args:
            row_bytes: given letters and table of a block, returns the bytes of a row;
                0 if there is no such block.

        Raises:
            CheckpointError: the file is cut off or damaged.
        """
        total = all_heads = 0
        while (head := self._take(_HEAD.size))[:4] != _ENDS:
            kind, table, num_rows, checksum = _HEAD.unpack(head)
            num_bytes = num_rows * row_bytes(kind, table)
            if num_bytes == 0:
                raise self.damaged(f"{head!r} as the head of a block")
            if num_bytes > _MAX_BLOCK_BYTES:
                raise self.damaged(f"a block of {num_bytes} bytes")
            payload = self._take(num_bytes)
            if zlib.crc32(payload) != checksum:
                raise self.damaged("a block with another checksum")
            total += num_rows
            all_heads = zlib.crc32(head, all_heads)
            yield Block(kind, table, num_rows, payload)
        if _END.unpack(head) != (_ENDS, all_heads, total):
            raise self.damaged(f"an end that does not fit the {total} rows before it")
        if self._file.read(1):
            raise self.damaged("more bytes behind the end")
        self.written = Written(total, self.num_bytes, all_heads)

    def damaged(self, what: str) -> CheckpointError:
        """Return the error that says what was read instead of what must be there."""
        return CheckpointError(
            f"{self._path} is damaged. Received: {what}, before byte {self.num_bytes}. "
            "Load another checkpoint."
        )

    def _take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise CheckpointError(
                f"{self._path} is cut off: {num_bytes} bytes must follow byte "
                f"{self.num_bytes}. Received: {len(data)}."
            )
        self.num_bytes += num_bytes
        return data
