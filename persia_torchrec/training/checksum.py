"""A checksum of a batch: whether a loader gives the same batches a second time."""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    NdarrayDataBase,
    PersiaBatch,
)

_MAX_VALUES = 512  # of a tensor, evenly spread, whatever its size
_MAX_TENSORS = 512  # of a batch


def checksum_of(batch: object) -> int | None:
    """Return a checksum of the tensors on the host in a batch; None: it has none.

    They are found in tuples, lists, dictionaries, dataclasses, ``KeyedJaggedTensor``
    and ``PersiaBatch``. Of a large tensor 512 values count, and its shape. Nothing is
    copied from a device.
    """
    found = None
    for array in islice(_arrays(batch), _MAX_TENSORS):
        flat = array.reshape(-1)
        told = f"{array.dtype} {array.shape}".encode()
        some = np.ascontiguousarray(flat[:: -(-len(flat) // _MAX_VALUES) or 1])
        found = zlib.crc32(some.tobytes(), zlib.crc32(told, found or 0))
    return found


def _arrays(value: object) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufcmM":
            yield value
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    else:
        for part in _parts(value):
            yield from _arrays(part)


def _of_tensor(value: torch.Tensor) -> Iterator[np.ndarray]:
    is_plain = value.layout is torch.strided and type(value) is torch.Tensor
    if value.device.type == "cpu" and is_plain and not value.is_quantized:
        value = value.detach().resolve_conj().resolve_neg()
        if value.dtype is torch.bfloat16:
            value = value.view(torch.int16)
        if value.dtype.itemsize <= 8 and not value.dtype.is_complex:
            yield value.numpy()


def _parts(value: object) -> Iterator[object]:
    """Yield what a part of a batch consists of."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, KeyedJaggedTensor | JaggedTensor):
        # Lengths may have been made of offsets or not: they are always made here.
        on_host = value.values().device.type == "cpu"
        yield from (value.values(), value.weights_or_none())
        yield value.lengths() if on_host else None
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    elif isinstance(value, PersiaBatch):
        yield from (*value.id_type_features, *value.non_id_type_features, *value.labels)
    elif isinstance(value, IDTypeFeature):
        yield from (value.ids, value.lengths)
    elif isinstance(value, IDTypeFeatureWithSingleID | NdarrayDataBase):
        yield value.data
