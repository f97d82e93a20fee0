"""The messages between a client and a server, to the byte.

A message is a list of frames. Frame 0 is a header of 48 bytes, little-endian:

    offset  size  field
    0       4     magic, the bytes "PTRC"
    4       2     version of this protocol, 4
    6       2     kind, see Kind
    8       8     request: the reply carries the same number
    16      8     incarnation: which start of the server is meant; 0 for any
    24      8     stream of batches, or of other requests that change the server: 47
                  random bits, above them 16 of the generation; 0: see below
    32      8     batch: number within its stream; of a training batch the rank of its
                  trainer is above the lower 47 bits
    40      4     precision of rows and gradients, see Precision
    44      4     flags: bit 0, the lookup is for training; bit 1, it carries counts;
                  bit 2, the update is one trainer's share of a joint step; bit 3, the
                  rows written, or read by a lookup for training, carry optimizer
                  state; bit 4, the ids that a data loader leaves with a worker were
                  lost there; bit 5, an id without a row reads what its row would begin
                  with; bits 16 to 18, which
                  lookup of its batch it is

The frames after it, by kind:

    LOOKUP, UPDATE   1: segments, int64 (T, 2): number of a table, how many of its ids
    WRITE, READ,     2: ids, uint64, those of the first segment first
    METADATA
                     3: (UPDATE, WRITE) rows, in the precision of the header; with
                        bit 3 each row is weights, then optimizer state
                     3: (LOOKUP with bit 1) uint32, how often each id occurs in its
                        batch; without this frame, each counts once
                     4: (WRITE with bits 1 and 3) uint32, how often each id was used
                        since its row was read or written, once without it
                     5: uint32, how often it had been used before, at least
                     6: int64 (T): how many updates each table has had, at least;
                        each of 4 to 6 may be empty, and nothing is said then
                     4: (UPDATE with bit 2) the share, see Share
    LEAVE            1: a share: the trainer sends neither it nor later ones
    JOIN             1: JSON {"who": process and host of a trainer, "ended": why it
                        sends no more shares, or ""}
                     2: a share: the first that this trainer will send
    reply to LOOKUP  1: rows of the ids, in the precision of the header
                     2: (with bit 3) uint32, ascending, which ids have no row, in
                        training those that are not admitted: they read what a row
                        begins with, with the weights of the table's unadmitted_value
                     3: uint32, how often each id was used; empty if no table keeps it
    reply to READ    1, one per segment: float32 weights and optimizer state; zeros, or
                        with bit 5 what an id without a row would begin with
    reply to         1, one per segment: uint32 (N, 4): frequency, first step, last
      METADATA       step, second of the last step
    reply to EXPORT  1: JSON {"next": the next start, or null at the end}
                     2: ids, uint64
                     3: float32 weights and optimizer state
    reply to IDS     1: JSON {"next": as of EXPORT, "rows": how many were met}
                     2: ids, uint64: of these rows, those that are not below the bound
    the others       1: a JSON value, in UTF-8; so is every reply not named here
    ERROR            1: JSON {"kind": class of the error, "message": its text}

The JSON values of an embedding server; those not named here are null:

    reply to HELLO       {"shard", "num_shards", "incarnation", "max_request_ids",
                         "serves": the checkpoint, if its rows stay as they are,
                         "tables": all of them, as in the reply to ADD_TABLES}
    ADD_TABLES           {"tables": list, each as TableSpec.to_json describes it,
                         "who": process and host that will use them}, or the list
    reply to ADD_TABLES  list, one per table: {"number", "wants_counts": whether its
                         lookups should carry counts, "spec": as it was added}
    reply to UPDATE      {"missed": ids without a row, "refused": rows whose gradient
                         was not finite, "unadmitted": of the missed, those that never
                         had a row, "gradients": ids of the update}
    reply to COUNTERS    {name: number}
    CHECKPOINT           {"do": "dump", "task": chosen by the client, "folder": path or
                         URL}, {"do": "check" | "load", "task", "folder", "replace":
                         bool, "increments": path, URL or null},
                         {"do": "unused" | "drop", "task", "table": name, "numbers": of
                         it on each server, or -1}, or {"do": "cancel", "task"}
    PROGRESS             {"task"}
    reply to CHECKPOINT  {"phase", "progress": in [0, 1], "error": null or as in ERROR,
      and PROGRESS       "result"}; see server/checkpoint_service.py
    EXPORT               {"table": number, "start": 0, or "next" of the reply before,
                         "max_rows": rows at most}
    IDS                  {"table", "start": as of EXPORT, "first": the bound}
    reply to JOIN        text: which other trainers of the group are gone, and why
    BOOK                 a request to the job's address book, see registry.py
    SLAB                 {"proof", "drawn", "bytes"}, see slab_server.py; any listener
                         answers it
    reply to PING        text: what requests of this client wait for, as trainers; any
                         listener answers it
    OWN                  {"tables": numbers, "rank": of the trainer that caches their
                         rows from now on, or null to end leases, "who": process and
                         host}; see server/owners.py
    STEP                 {"table": number, "step": how many updates the table shall
                         have had, or null to only ask}
    reply to STEP        how many updates the table has had

A share is 32 bytes, little-endian:

    offset  size  field
    0       8     group of trainers, chosen by the trainers
    8       8     step: number within the group
    16      4     rank of the trainer in the group
    20      4     number of ranks
    24      8     milliseconds that the step may wait for its other shares

The updates of a joint step are applied as one, the sum of their gradients, once each
rank has sent its share or has left; then all are answered with the outcome of the whole
step.

A LOOKUP with bit 3 needs no UPDATE: the client writes the rows back. An UPDATE of its
batch may follow; batches of a stream with such lookups are not reopened by a server
that is started again.

A server applies what changes it once: an UPDATE, a training LOOKUP, an ADD_TABLES,
CLEAR, WRITE, OWN or STEP of a stream and number that it has answered before changes
nothing, and gets the same answer; JOIN and LEAVE may be repeated anyway. In stream 0,
each is another one. A stream of an older generation than the server has met is a
FencedError; 65535 is none and always accepted. See server/dedup.py.

A message of any other form is rejected with a FrameError, and nothing of it is applied.
A frame holds at most 2**31 bytes: the sender of a larger one is disconnected.
"""

import itertools
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Ids
from persia_torchrec.errors import FrameError, RemoteError
from persia_torchrec.parsing.decoding import parse_json

VERSION = 4
TRAINING = 1
COUNTS = 2
SHARE = 4
STATE = 8
AGAIN = 16
INITIAL = 32
PART_SHIFT = 16
MAX_PARTS = 7  # lookups of one batch
GENERATION_SHIFT = 47
NO_GENERATION = 2**16 - 1
METADATA_COLUMNS = 4
MAX_STEP = 2**62
MAX_MEMBER_CHARS = 500  # of each text of a JOIN

Frame = bytes | memoryview
Frames = list[Frame]


class DeferredFrame(ABC):
    """A frame whose bytes are copied when it is known where they go; they stay so.

    Any thread may call any method. ``len`` is how many bytes there are.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def write(self, out: npt.NDArray[np.uint8]) -> None:
        """Write the bytes; they are there when this returns."""

    @abstractmethod
    def whole(self) -> memoryview:
        """Return the bytes in memory of their own."""


class DeferredRows(ABC):
    """Rows of groups of tables, float32 ``(U, W)``, that are sent as a late frame."""

    shapes: Sequence[tuple[int, ...]]

    @abstractmethod
    def part(self, pieces: Sequence[slice]) -> DeferredFrame:
        """Return a frame of some rows, of each group its piece."""


SentFrame = Frame | DeferredFrame


Scalar = TypeVar("Scalar", bound=np.generic)

_HEADER = struct.Struct("<4sHHQQQQII")
_SHARE = struct.Struct("<QQIIQ")
_MAGIC = b"PTRC"
_MAX_RANKS = 2**16
_NO_IDS = np.empty(0, dtype=np.uint64)


class Kind(IntEnum):
    """What a message asks for, or answers."""

    REPLY = 0
    ERROR = 1
    HELLO = 2
    ADD_TABLES = 3
    LOOKUP = 4
    UPDATE = 5
    WRITE = 6
    READ = 7
    COUNTERS = 8
    CLEAR = 9
    SHUTDOWN = 10
    BUFFER_IDS = 11
    FORWARD = 12
    BACKWARD = 13
    ABANDON = 14
    BATCH = 15
    END_OF_DATA = 16
    METADATA = 17
    LEAVE = 18
    EXPORT = 19
    STEP = 20
    CHECKPOINT = 21
    PROGRESS = 22
    JOIN = 23
    BOOK = 24
    POSITION = 25
    IDS = 26
    SLAB = 27
    PING = 28
    OWN = 29

    @classmethod
    def define(cls, name: str, number: int) -> "Kind":
        """Add a kind from its own file, see ``server/handlers.py``."""
        if number in cls._value2member_map_:
            raise ValueError(f"{name}: number {number} is {cls(number).name}'s.")
        kind = int.__new__(cls, number)
        kind._name_, kind._value_ = name, number
        cls._value2member_map_[number] = kind
        return kind


class Precision(IntEnum):
    """How rows and gradients travel."""

    FP32 = 0
    FP16 = 1
    BF16 = 2


class Header(NamedTuple):
    """Frame 0 of a message; the fields are explained at the top of this file."""

    kind: Kind
    request: int = 0
    incarnation: int = 0
    stream: int = 0
    batch: int = 0
    precision: Precision = Precision.FP32
    flags: int = 0

    def encode(self, *, request: int | None = None) -> bytes:
        """Return the 48 bytes; ``request`` stands for the number of this header."""
        kind, number, *others = self
        number = number if request is None else request
        return _HEADER.pack(_MAGIC, VERSION, kind, number, *others)

    @classmethod
    def decode(cls, frame: Frame) -> "Header":
        """Read the 48 bytes; raise FrameError if they are not such a header."""
        if len(frame) != _HEADER.size:
            raise FrameError(
                f"A message's header must be {_HEADER.size} bytes. "
                f"Received: {len(frame)} bytes."
            )
        magic, version, kind, *numbers, precision, flags = _HEADER.unpack(frame)
        if magic != _MAGIC:
            raise FrameError(
                f"A message must begin with {_MAGIC!r}. Received: {magic!r}."
            )
        if version != VERSION:
            raise FrameError(
                f"The protocol's version must be {VERSION}. Received: {version}. "
                "Run the same version of persia_torchrec on both sides."
            )
        try:
            return cls._make((Kind(kind), *numbers, Precision(precision), flags))
        except ValueError as exc:
            raise FrameError(f"Unknown field in a message's header: {exc}.") from exc


class Share(NamedTuple):
    """One trainer's share of a joint step; the fields are explained above."""

    group: int
    step: int
    rank: int
    num_ranks: int
    timeout_ms: int

    def encode(self) -> bytes:
        """Return the 32 bytes."""
        return _SHARE.pack(*self)

    @classmethod
    def decode(cls, frames: Sequence[Frame], *, num_frames: int) -> "Share":
        """Read the last of ``num_frames`` frames; raise FrameError if it is not one."""
        frame = frames[-1]
        if len(frames) != num_frames or len(frame) != _SHARE.size:
            raise FrameError(
                f"The message must have {num_frames} frames, and its share "
                f"{_SHARE.size} bytes. Received: {len(frames)} frames, the last of "
                f"{len(frame)} bytes."
            )
        share = cls(*_SHARE.unpack(frame))
        if not share.rank < share.num_ranks <= _MAX_RANKS:
            raise FrameError(
                "A share's rank must be below the number of ranks, of which there may "
                f"be {_MAX_RANKS}. Received: {share}."
            )
        return share


class ErrorReply(msgspec.Struct):
    """Frame 1 of an ERROR."""

    kind: str  # name of the error's class
    message: str


class TaskState(msgspec.Struct):
    """Frame 1 of a reply to CHECKPOINT or PROGRESS: see ``checkpoint_service.py``."""

    phase: str
    progress: float  # the fraction of the work that is done, in [0, 1]
    error: ErrorReply | None = None  # what made it fail
    result: Any = None  # of a task that is done


class TableIds(NamedTuple):
    """Ids of one table, as a request names them."""

    table: int
    ids: Ids


def encode_json(value: object) -> bytes:
    """Return a JSON value as a frame."""
    return json.dumps(value).encode()


def decode_json(frames: Sequence[Frame], type_: Any = Any) -> Any:
    """Return the JSON value of frame 1, the last, of a type as for ``parse_json``."""
    if len(frames) != 2:
        raise FrameError(f"The message must have 2 frames. Received: {len(frames)}.")
    return parse_json(frames[1], type_, "Frame 1", FrameError)


def error_frames(error: BaseException) -> Frames:
    """Return the frames after the header of an ERROR."""
    kind = error.kind if isinstance(error, RemoteError) else type(error).__name__
    return [msgspec.json.encode(ErrorReply(kind, str(error)))]


def encode_segments(
    segments_T2: npt.NDArray[np.int64], pieces: Sequence[Ids]
) -> Frames:
    """Return frames 1 and 2 of a request: segments, and the ids of all of them."""
    ids = pieces[0] if len(pieces) == 1 else np.concatenate([_NO_IDS, *pieces])
    return [segments_T2.tobytes(), bytes_of(ids)]


class TableSegments(NamedTuple):
    """The ids of T tables: those of table t are ``ids[starts[t]:starts[t + 1]]``."""

    tables: tuple[int, ...]
    starts: npt.NDArray[np.int64]  # (T + 1,)
    ids: Ids

    def pieces(self) -> list[TableIds]:
        """Return the ids of each table; views."""
        starts = self.starts.tolist()
        return [
            TableIds(table, self.ids[starts[t] : starts[t + 1]])
            for t, table in enumerate(self.tables)
        ]


def decode_segments(frames: Sequence[Frame], *, num_frames: int) -> TableSegments:
    """Read frames 1 and 2 of a request; the ids are a view of them."""
    if len(frames) != num_frames:
        raise FrameError(
            f"The message must have {num_frames} frames. Received: {len(frames)}."
        )
    segments_bytes, ids_bytes = map(len, frames[1:3])
    if segments_bytes % 16 or ids_bytes % 8:
        raise FrameError(
            "The segments must be pairs of table and count, of 16 bytes, and ids a "
            f"multiple of 8 bytes. Received: {segments_bytes} and {ids_bytes} bytes."
        )
    ids = np.frombuffer(frames[2], np.uint64)
    # Plain integers: a request has few segments, and their sums cannot overflow.
    numbers = struct.unpack(f"<{segments_bytes // 8}q", frames[1])
    starts = [*itertools.accumulate(numbers[1::2], initial=0)]
    if starts[-1] != len(ids) or min(numbers[1::2], default=0) < 0:
        raise FrameError(
            f"The segments must name as many ids as follow, {len(ids)}. "
            f"Received: counts {list(numbers[1:17:2])}."
        )
    return TableSegments(numbers[::2], np.array(starts), ids)


def decode_counts(frames: Sequence[Frame]) -> Counts:
    """Read frame 3 of a LOOKUP: how often each id of frame 2 occurs."""
    counts = array_of(frames[3], np.uint32)
    if 2 * len(frames[3]) != len(frames[2]):
        raise FrameError(
            f"There must be one count an id, {len(frames[2]) // 8}. "
            f"Received: {len(counts)}."
        )
    return counts


class RowUse(NamedTuple):
    """How rows of a WRITE were used: frames 4 to 6, None where nothing is said.

    Counts and frequencies are one an id, steps one a table.
    """

    counts: Counts | None = None
    frequencies: Counts | None = None
    steps: npt.NDArray[np.int64] | None = None

    @classmethod
    def decode(cls, frames: Sequence[Frame]) -> "RowUse":
        """Read the frames; raise FrameError if they do not fit the ids."""
        num_ids, num_tables = len(frames[2]) // 8, len(frames[1]) // 16
        counts, frequencies = (array_of(frame, np.uint32) for frame in frames[4:6])
        steps = array_of(frames[6], np.int64)
        nums = (len(counts), num_ids), (len(frequencies), num_ids)
        for num, expected in (*nums, (len(steps), num_tables)):
            if num not in (0, expected):
                raise FrameError(
                    "A WRITE must have one count and one frequency an id, and one step "
                    f"a table, or none. Received: {num} for {expected}."
                )
        if not 0 <= steps.min(initial=0) <= steps.max(initial=0) <= MAX_STEP:
            raise FrameError(f"A step must be in [0, {MAX_STEP}]. Received: {steps}.")
        return cls(
            counts if len(counts) else None,
            frequencies if len(frequencies) else None,
            steps if len(steps) else None,
        )


def bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    """Return an array's bytes, without a copy where it is contiguous."""
    if not array.size:
        return memoryview(b"")
    return np.ascontiguousarray(array).data.cast("B")


def array_of(frame: Frame, dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """View a frame as a flat array, without a copy."""
    try:
        return np.frombuffer(frame, dtype)
    except ValueError:
        size = np.dtype(dtype).itemsize
        raise FrameError(
            f"A frame of {np.dtype(dtype).name} must be a multiple of {size} bytes. "
            f"Received: {len(frame)} bytes."
        ) from None
