"""Files of rows: shard files (what a server dumped) and increments (what changed).

    magic | version | H | CRC-32 | JSON | blocks ... | "ENDS" | CRC-32 | rows
                                          `-- letters | table | N | CRC-32 | columns

docs/formats/checkpoint.md has them to the byte. A block of ROWS holds rows of one table
by column, see ``RowColumns``; one of GONE the ids of rows that were evicted or have
expired; one of SEEN what an admission remembers of ids, by column, see ``Sightings``.
Neither writer nor reader holds more than one block in memory. Bytes that do not fit
this layout raise a CheckpointError that names the file and the byte offset.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import (
    IO,
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    TypeAlias,
    TypeVar,
)

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Ids, Words
from persia_torchrec.checkpoint.catalog import Count, SavedTable, Tick, require_shard
from persia_torchrec.embedding.setting import Sightings
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.jit import intrinsics as cpu
from persia_torchrec.jit.compiled import compiled, read_only
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.store.expiry import ExpiryClock
from persia_torchrec.store.memory import MAX_TABLES
from persia_torchrec.store.row_columns import RowColumns, RowShape
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.table import TableSpec

_VERSION = 2
_READABLE = 1, 2
_BEGIN = struct.Struct("<8sIII")
_HEAD = struct.Struct("<4sIII")
_END = struct.Struct("<4sIQ")
_ROWS, _GONE, _SEEN, _ENDS = b"ROWS", b"GONE", b"SEEN", b"ENDS"
_ID_BYTES, _SIGHTING_BYTES = 8, 24
_FOLDED_BYTES = 64
_FOLDED_FROM = 1024  # bytes; less is as fast without
_BY_512, _BY_128 = (  # x to the power of so many bits, and 64 more, modulo CRC-32's
    (np.uint64(0x154442BD4), np.uint64(0x1C6E41596)),
    (np.uint64(0x1751997D0), np.uint64(0x0CCAA009E)),
)
_MAX_JSON_BYTES = 2**28
_MAX_BLOCK_BYTES = 2**28


class ShardHead(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of a shard file: tables by number, with their steps at its beginning."""

    magic: ClassVar[bytes] = b"PTRCROWS"

    shard: int
    num_shards: int
    tables: Annotated[tuple[SavedTable, ...], msgspec.Meta(max_length=MAX_TABLES)]

    def __post_init__(self) -> None:
        require_shard(self.shard, self.num_shards)


class IncrementHead(ShardHead, frozen=True, kw_only=True):
    """The JSON of an increment."""

    magic: ClassVar[bytes] = b"PTRCINCR"

    log: str
    number: Count  # in the log, from 1 on
    created_s: float
    """When it was begun, in seconds since 1970. All earlier changes are in it."""
    tick: Tick  # of the server's last request
    was_cleared: bool  # whether all rows were dropped before these changes
    dropped: tuple[str, ...] = ()  # names of tables that were, likewise


Head = TypeVar("Head", bound=ShardHead)
Block: TypeAlias = RowColumns | Ids | Sightings
"""Rows of one table, ids whose rows are gone, or what its admission remembers."""


def saved_tables(
    states: Iterable[TableState], seconds: ExpiryClock
) -> tuple[SavedTable, ...]:
    """Describe tables of a store, for the head of a file."""
    return tuple(
        SavedTable(
            _describe(state.spec),
            state.num_updates,
            state.has_metadata,
            state.thresholds.tolist(),
            seconds.now_s(state.spec.expiry),
        )
        for state in states
    )


def shape_of(table: SavedTable) -> RowShape:
    """Return the shape of a table's columns in a file."""
    return RowShape(table.spec, table.has_metadata)


class Written(NamedTuple):
    """What has been written; ``num_rows`` sums N of all blocks but SEEN."""

    num_rows: int
    size_bytes: int
    checksum: int


class RowFileWriter:
    """Writes a new file, block after block; ``head`` says of which kind."""

    def __init__(self, file: IO[bytes], head: ShardHead) -> None:
        self._file = file
        self._num_rows = self._size_bytes = self._checksum = 0
        text = msgspec.json.encode(head)
        self._write(_BEGIN.pack(head.magic, _VERSION, len(text), zlib.crc32(text)))
        self._write(text)

    def write(self, table: int, block: Block) -> None:
        """Write a block of one table; it may be empty."""
        kind, arrays = _columns(block)
        num = len(arrays[0])
        if num == 0:
            return
        columns = [column.data.cast("B") for column in arrays if column.size]
        checksum = 0
        for column in columns:
            checksum = crc32(column, checksum)
        head = _HEAD.pack(kind, table, num, checksum)
        self._checksum = zlib.crc32(head, self._checksum)
        self._num_rows += num if kind != _SEEN else 0
        self._write(head)
        for column in columns:
            self._write(column)

    def end(self) -> Written:
        """Write the end of the file; nothing may follow."""
        self._write(_END.pack(_ENDS, self._checksum, self._num_rows))
        return Written(self._num_rows, self._size_bytes, self._checksum)

    def _write(self, data: bytes | memoryview) -> None:
        self._size_bytes += len(data)
        while data:  # a raw file may accept less than all
            data = memoryview(data)[self._file.write(data) :]


class RowFileReader(Generic[Head]):
    """Reads a file of rows; ``written`` is set when all blocks have been read."""

    written: Written

    def __init__(self, file: IO[bytes], path: str, head_type: type[Head]) -> None:
        self._file = file
        self._path = path
        self.num_bytes = 0
        magic, version, num_bytes, checksum = _BEGIN.unpack(self._take(_BEGIN.size))
        if magic != head_type.magic:
            raise CheckpointError(
                f"{path} must begin with {head_type.magic!r}. Received: {magic!r}."
            )
        if version not in _READABLE:
            raise CheckpointError(
                f"{path}: the format's version must be one of {_READABLE}. Received: "
                f"{version}. Load it with the version of persia_torchrec that wrote it."
            )
        self._require(num_bytes <= _MAX_JSON_BYTES, f"a header of {num_bytes} bytes")
        text = self._take(num_bytes)
        self._require(zlib.crc32(text) == checksum, "a header with another checksum")
        self.head: Head = parse_json(text, head_type, "header", self._damaged)
        try:
            self._shapes = list(map(shape_of, self.head.tables))
        except ConfigError as exc:
            raise self._damaged(f"header: tables: {exc}") from exc
        self._row_bytes = {(_ROWS, i): s.row_bytes for i, s in enumerate(self._shapes)}
        self._row_bytes |= {(_SEEN, i): _SIGHTING_BYTES for _, i in self._row_bytes}
        if isinstance(self.head, IncrementHead):
            self._row_bytes |= {(_GONE, i): _ID_BYTES for i in range(len(self._shapes))}

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield the number of a table, and the block."""
        total = all_heads = 0
        while (head := self._take(_HEAD.size))[:4] != _ENDS:
            kind, table, num_rows, checksum = _HEAD.unpack(head)
            num_bytes = num_rows * self._row_bytes.get((kind, table), 0)
            self._require(num_bytes > 0, f"{head!r} as the head of a block")
            self._require(
                num_bytes <= _MAX_BLOCK_BYTES, f"a block of {num_bytes} bytes"
            )
            payload = self._take(num_bytes)
            is_whole = crc32(payload) == checksum
            self._require(is_whole, "a block with another checksum")
            total += num_rows if kind != _SEEN else 0
            all_heads = zlib.crc32(head, all_heads)
            if kind == _ROWS:
                yield table, self._shapes[table].view(payload)
            elif kind == _SEEN:
                columns = np.frombuffer(payload, dtype=np.uint64).reshape(3, -1)
                yield table, Sightings(*columns)
            else:
                yield table, np.frombuffer(payload, dtype=np.uint64)
        is_end = _END.unpack(head) == (_ENDS, all_heads, total)
        self._require(is_end, f"an end that does not fit the {total} rows before it")
        self._require(not self._file.read(1), "more bytes after the end")
        self.written = Written(total, self.num_bytes, all_heads)

    def _require(self, holds: bool, received: str) -> None:
        if not holds:
            raise self._damaged(received)

    def _damaged(self, received: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged. Received: {received}, before byte "
            f"{self.num_bytes}. Load another checkpoint."
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


@lru_cache(maxsize=1024)  # a server describes the same tables every few seconds
def _describe(spec: TableSpec) -> dict[str, Any]:
    description: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(spec.to_json())
    )
    return description


def _columns(block: Block) -> tuple[bytes, list[npt.NDArray[Any]]]:
    """Return the kind of a block, and its columns."""
    match block:
        case RowColumns():
            return _ROWS, block.columns()
        case Sightings():
            return _SEEN, list(block)
    return _GONE, [block]


def crc32(data: bytes | memoryview, previous: int = 0) -> int:
    """Return ``zlib.crc32``, several times as fast where the processor helps.

    Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
    Instruction", Intel 2009: 16 bytes that have the same remainder stand for many.
    """
    num = len(data) // _FOLDED_BYTES * _FOLDED_BYTES
    if num < _FOLDED_FROM or not cpu.HAS_CARRYLESS_PRODUCT:
        return zlib.crc32(data, previous)
    folded = np.zeros(_FOLDED_BYTES // 8, dtype=np.uint64)
    _fold_blocks(
        read_only(np.frombuffer(data, np.uint8)[:num]),
        np.uint64(~previous % 2**32),
        folded,
    )
    first = zlib.crc32(folded[:2].tobytes(), 2**32 - 1)
    return zlib.crc32(memoryview(data)[num:], first)


@compiled
def _fold_blocks(
    data: npt.NDArray[np.uint8], remainder: np.uint64, folded: Words
) -> None:
    """Write 16 bytes to ``folded``, with the remainder of all the data."""
    begin, to = np.uint64(data.ctypes.data), np.uint64(folded.ctypes.data)
    cpu.copy_bytes(to, begin, np.uint64(_FOLDED_BYTES))
    folded[0] ^= remainder
    for offset in range(_FOLDED_BYTES, len(data), _FOLDED_BYTES):
        for lane in range(0, _FOLDED_BYTES, 16):
            at = begin + np.uint64(offset + lane)
            cpu.fold(to + np.uint64(lane), at, *_BY_512)
    for lane in range(16, _FOLDED_BYTES, 16):
        cpu.fold(to, to + np.uint64(lane), *_BY_128)
