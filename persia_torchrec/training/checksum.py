"""A checksum of a batch: whether a loader gives the same batches a second time."""

import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

_MAX_VALUES = 512  # of a tensor, evenly spread, whatever its size
_MAX_TENSORS = 512  # of a batch


@runtime_checkable
class ArrayBatch(Protocol):
    """A batch, or a part of one, that names its arrays: a ``PersiaBatch``."""

    def batch_arrays(self) -> Iterable[np.ndarray]:
        """Return the arrays, in an order that is always the same."""


def checksum_of(batch: object) -> int | None:
    """Return a checksum of the tensors on the host in a batch; None: it has none.

    They are found in tuples, lists, dictionaries, dataclasses, ``KeyedJaggedTensor``
    and each ``ArrayBatch``. Of a large tensor 512 values count, and its shape. Nothing
    is copied from a device.
    """
    arrays: list[np.ndarray] = []
    _collect(batch, arrays)
    found = None
    for array in arrays[:_MAX_TENSORS]:
        told = f"{array.dtype.str} {array.shape}".encode()
        if array.size > _MAX_VALUES:
            array = array.reshape(-1)[:: -(-array.size // _MAX_VALUES)]
        found = zlib.crc32(array.tobytes(), zlib.crc32(told, found or 0))
    return found


def _collect(value: object, arrays: list[np.ndarray]) -> None:
    if value is None or len(arrays) >= _MAX_TENSORS:
        return
    if isinstance(value, torch.Tensor):
        array = _of_tensor(value)
        if array is not None:
            arrays.append(array)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufcmM":
            arrays.append(value)
    else:
        for part in _parts(value):
            _collect(part, arrays)


def _of_tensor(value: torch.Tensor) -> np.ndarray | None:
    """Return the values of a tensor, if it is on the host."""
    is_plain = value.is_cpu and type(value) is torch.Tensor
    if not is_plain or value.layout is not torch.strided or value.is_quantized:
        return None
    value = value.detach()
    if value.dtype is torch.bfloat16:
        value = value.view(torch.int16)
    if value.dtype.itemsize > 8 or value.is_complex():
        return None
    return value.resolve_neg().numpy() if value.is_neg() else value.numpy()


def _parts(value: object) -> Iterator[object]:
    """Yield what a part of a batch consists of."""
    if isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, KeyedJaggedTensor | JaggedTensor):
        # Lengths may have been made of offsets or not: they are always made here.
        on_host = value.values().device.type == "cpu"
        yield from (value.values(), value.weights_or_none())
        yield value.lengths() if on_host else None
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    elif isinstance(value, ArrayBatch):
        yield from value.batch_arrays()
