"""A batch as bytes: frame, header, arrays.

The bytes are a frame of fixed width, a JSON header that says what follows, and the
arrays themselves, little-endian, each at a multiple of 8 and padded with zeros::

    offset
    0         magic "PTRB"
    4         version, uint32
    8         size of the header, uint64
    16        header, JSON: BatchHeader
    then      for each id type feature: ids, uint64 (L,)
                                        lengths, int32 (B,), unless all are 1 by class
              for each non-id type feature, then for each label: the array
              meta, if there is any

Writing copies every array once; reading copies none: arrays are views of the bytes,
and can be written to only where the bytes can. Equal batches give equal bytes. Bytes
from outside are not trusted: every size is compared with what is there before it is
used, and what is there must be used up to the last byte.

Dimension key:
    B: samples
    L: ids of a feature in the batch, over all samples
"""

import math
import struct
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.decoding import parse_json
from persia_torchrec.errors import FrameError

MAGIC = b"PTRB"
VERSION = 1

Array = npt.NDArray[np.generic]
Buffer = bytes | bytearray | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
S = TypeVar("S", bound=np.generic)

_FRAME = struct.Struct("<4sIQ")
_ALIGNMENT = 8


class IdsHeader(msgspec.Struct):
    """An id type feature in the header."""

    name: str
    num_ids: Count
    single_id: bool


class DenseHeader(msgspec.Struct):
    """An array in the header: a non-id type feature or a label."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class BatchHeader(msgspec.Struct, kw_only=True):
    """The header; the arrays follow in the order of the fields' meaning above."""

    batch_id: Count | None
    batch_size: Count
    ids: list[IdsHeader]
    labels: list[DenseHeader]
    meta_bytes: Count | None
    dense: list[DenseHeader]
    requires_grad: bool


def write_sections(header: BatchHeader, arrays: Iterable[Array], meta: bytes) -> bytes:
    """Return frame, header, arrays and meta, each padded."""
    text = msgspec.json.encode(header)
    sections: list[Buffer] = [_FRAME.pack(MAGIC, VERSION, len(text)), text]
    for array in arrays:
        dtype = array.dtype.newbyteorder("<")
        sections.append(array.astype(dtype, copy=False).data)
    sections.append(meta)
    padded = []
    for section in sections:
        padding = bytes(_padding(memoryview(section).nbytes))
        padded += [section, padding]
    return b"".join(padded)


class SectionReader:
    """Reads one section after the other, never beyond the end.

    ``data`` is kept, not copied: arrays are views of it. FrameError says what does not
    fit.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self._offset = 0
        frame = self.read(_FRAME.size, "the frame")
        magic, version, header_bytes = _FRAME.unpack(frame)
        if magic != MAGIC:
            raise FrameError(
                f"The bytes of a batch must start with {MAGIC!r}. Received: {magic!r}."
            )
        if version != VERSION:
            raise FrameError(
                f"The bytes of a batch must be of version {VERSION}. Received: "
                f"{version}. Run the same release in all processes of a job."
            )
        text = self.read(header_bytes, "the header")
        self.header: BatchHeader = parse_json(
            text, BatchHeader, "header of a batch", FrameError
        )

    def read(self, num_bytes: int, what: str) -> memoryview:
        """Return the next section, and step over it and its padding."""
        start, end = self._offset, self._offset + num_bytes
        padded = end + _padding(num_bytes)
        if padded > len(self._data):
            raise FrameError(
                f"The bytes of a batch must not end within {what}. "
                f"Received: {len(self._data)} bytes."
            )
        if any(self._data[end:padded]):
            raise FrameError(f"The padding of {what} must be zeros.")
        self._offset = padded
        return self._data[start:end]

    def read_array(
        self, dtype: np.dtype[S], shape: tuple[int, ...], what: str
    ) -> npt.NDArray[S]:
        """Return the next section as an array."""
        section = self.read(math.prod(shape) * dtype.itemsize, what)
        if dtype == np.bool_ and (np.frombuffer(section, dtype=np.uint8) > 1).any():
            raise FrameError(f"The booleans of {what} must be 0 or 1.")
        try:
            array = np.frombuffer(section, dtype=dtype.newbyteorder("<"))
            return array.astype(dtype, copy=False).reshape(shape)
        except ValueError as exc:
            raise FrameError(f"{what} must have a shape for NumPy ({exc}).") from exc

    def expect_end(self) -> None:
        """Raise FrameError if there are bytes beyond the last section."""
        if self._offset != len(self._data):
            raise FrameError(
                f"The bytes of a batch must end with it, after {self._offset}. "
                f"Received: {len(self._data)} bytes."
            )


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT
