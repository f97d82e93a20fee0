"""Asynchronous copies between host and device through pinned memory.

    Staging   arrays -> one pinned buffer a dtype -> device, on a stream of its own
    ToHost    a small tensor -> pinned memory; there when it is there

Pinned memory is torch's, which keeps a block while a copy of it is under way, and uses
it again. Where there is none left to pin, pageable memory does: copies then wait.
"""

import contextlib
import ctypes
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from persia_torchrec.arrays import Array
from persia_torchrec.rpc.slab import PINNED

logger = logging.getLogger(__name__)


_NUMPY = {torch.float32: np.float32, torch.int16: np.int16}
_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs
_empty = functools.partial(torch.empty, device="cpu")  # whatever torch's default is
_ALIGNED_BYTES = 512
"""Where a tensor of torch's allocator begins; kernels read wide words from there."""


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return pinned memory, unfilled; pageable memory where it cannot be pinned."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as exc:
        _tell_once(str(exc).partition("\n")[0])
        return _empty(shape, dtype=dtype)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host in pinned memory; others as they are."""
    if tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return _copied(tensor, empty_pinned)


def register(device: torch.device, address: int, num_bytes: int) -> Callable[[], None]:
    """Pin memory that torch has not made, for copies of a GPU; return what undoes it.

    Where it cannot be pinned it stays pageable.
    """
    runtime, pid = torch.cuda.cudart(), os.getpid()
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
    if int(error):
        _tell_once(f"of shared memory, {num_bytes} bytes: {error}")
        return lambda: None

    def undo() -> None:
        if os.getpid() == pid and not sys.is_finalizing():  # a fork has no GPU
            with torch.cuda.device(device):
                runtime.cudaHostUnregister(address)

    return undo


def copy_into(out: torch.Tensor, arrays: Sequence[Array]) -> None:
    """Begin to copy arrays, one after the other, into a flat tensor of their length.

    It is copied on the current stream. From pinned memory, also what was registered
    between multiples of ``PINNED``, a GPU copies at once; the rest is staged. Arrays
    have numbers of the tensor's size, and must stay until that has ended.
    """
    at, whole = 0, out.numpy() if out.device.type == "cpu" else None
    for array in arrays:
        begin, at = at, at + len(array)
        if whole is not None:
            whole[begin:at] = array.view(whole.dtype)
        elif len(array):
            _copy_one(out[begin:at], array.view(_NUMPY[out.dtype]))


def _copy_one(out: torch.Tensor, array: Array) -> None:
    if not (array.flags.aligned and array.flags.writeable):  # as torch wants it
        staged = empty_pinned(out.shape, out.dtype)
        staged.numpy()[:] = array
        out.copy_(staged, non_blocking=True)
        return
    source = torch.from_numpy(array)
    for start, stop in _registered(array):
        out[start:stop].copy_(pin(source[start:stop]), non_blocking=True)


def copy_out(tensor: torch.Tensor, array: Array) -> None:
    """Begin to copy a flat tensor of a GPU into an array, on the current stream.

    It copies to pinned memory while others run, and to other memory before this
    returns.
    """
    out = torch.from_numpy(array)
    for start, stop in _registered(array):
        out[start:stop].copy_(tensor[start:stop], non_blocking=True)


def _registered(array: Array) -> Iterator[tuple[int, int]]:
    """Yield the parts of an array between which no copy may cross a boundary."""
    size, first = array.itemsize, PINNED - array.ctypes.data % PINNED
    stops = [*range(first // size, len(array), PINNED // size), len(array)]
    return pairwise([0, *stops])


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, from the host by pinned memory: no thread waits.

    It comes with the current stream. A copy from there to the host is waited for.
    """
    if device.type == "cpu":
        return tensor.to(device)
    return pin(tensor).to(device, non_blocking=True)


def dense_tensor(array: Array, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; on the CPU it shares writable memory."""
    writable = array if array.flags.writeable else array.copy()
    return to_device(torch.from_numpy(writable), device)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the same device, in the autograd graph if the tensor is."""
    if tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.clone()
    return _copied(tensor, _empty)


def copy_to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, in pinned memory where a GPU may take it from the host."""
    is_host = tensor.device.type == "cpu" and not tensor.requires_grad
    return _copied(tensor, empty_pinned) if is_host and uses_gpu() else copy_of(tensor)


def _copied(tensor: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Copy a tensor of the host by one thread.

    Those of torch's pool spin for milliseconds when they have copied a part of it, on
    cores that servers of the same host need.
    """
    copy = make(tensor.shape, dtype=tensor.dtype)
    if tensor.is_contiguous():
        ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return copy
    return copy.copy_(tensor.detach())


def uses_gpu() -> bool:
    """Return whether this process has used a GPU; does not begin to."""
    return torch.cuda.is_initialized()


def join_arrays(arrays: Sequence[Array], *, is_pinned: bool) -> torch.Tensor:
    """Return arrays of one dtype one after the other; each is copied once."""
    if not is_pinned:
        return torch.from_numpy(np.concatenate(arrays))
    joined = empty_pinned((sum(map(len, arrays)),), _dtype_of(arrays[0]))
    np.concatenate(arrays, out=joined.numpy())
    return joined


def _dtype_of(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


@functools.cache
def _tell_once(why: str) -> None:
    logger.warning(
        "memory cannot be pinned, copies to the device are synchronous: %s. Is there "
        "a CUDA device, and do `ulimit -l` and the container's limits allow it?",
        why,
    )


class Staged:
    """Arrays on their way to a device; the thread that uses them waits by a stream."""

    def __init__(
        self,
        arrays: Sequence[Array],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        by_dtype: dict[np.dtype[Any], list[int]] = {}
        for number, array in enumerate(arrays):
            by_dtype.setdefault(array.dtype, []).append(number)
        self._device = device
        self._came: torch.cuda.Event | None = None
        self._buffers: list[torch.Tensor] = []
        found: dict[int, torch.Tensor] = {}
        with torch.cuda.stream(stream):  # does nothing for None
            for numbers in by_dtype.values():
                views = self._copy([arrays[n] for n in numbers], stream is not None)
                found.update(zip(numbers, views, strict=True))
            if stream is not None:
                self._came = stream.record_event()
        self._tensors = [found[number] for number in range(len(arrays))]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Make the current stream wait for the copy; return the arrays as tensors."""
        if self._came is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._came)
            for buffer in self._buffers:
                buffer.record_stream(stream)  # it was made on the side stream
        # Tensors of their own: those that autograd is given refer to this batch.
        return tuple([tensor.detach() for tensor in self._tensors])

    def _copy(self, arrays: Sequence[Array], is_pinned: bool) -> list[torch.Tensor]:
        """Begin to copy arrays of one dtype, each aligned; return them there."""
        aligned = _ALIGNED_BYTES // arrays[0].itemsize
        starts, stop = [], 0
        for array in arrays:
            starts.append(stop)
            stop += math.ceil(array.size / aligned) * aligned
        make = empty_pinned if is_pinned else _empty
        host = make((stop,), dtype=_dtype_of(arrays[0]))
        on_host = host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            on_host[start : start + array.size] = array.reshape(-1)
        buffer = host.to(self._device, non_blocking=True)
        self._buffers.append(buffer)
        return [
            buffer[start : start + array.size].view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]


class Staging:
    """Begins copies to one device, on a stream of its own; any thread may."""

    DEVICES: ClassVar[frozenset[str]] = frozenset({"cuda"})
    """Types of devices to which it pays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def start(self, arrays: Sequence[Array]) -> Staged:
        """Begin to copy arrays; they may be changed when this returns."""
        here: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._device.type == "cuda":
            # A thread begins at device 0, where it would make a context of CUDA's.
            here = torch.cuda.device(self._device)
        with here:
            return Staged(arrays, self._device, self._stream)


class ToHost:
    """A small tensor's copy on the host, which comes when it comes.

    Args:
        tensor: of any device; on the CPU it is its own copy.
        until_then: what :meth:`read` returns, everywhere, before the copy is there.
    """

    def __init__(self, tensor: torch.Tensor, *, until_then: float) -> None:
        self._came: torch.cuda.Event | None = None
        self._copy = tensor.detach()
        if tensor.device.type != "cpu":
            host = empty_pinned(tensor.shape, tensor.dtype).fill_(until_then)
            self._copy = host.copy_(tensor.detach(), non_blocking=True)
            self._came = torch.cuda.Event()
            self._came.record(torch.cuda.current_stream(tensor.device))

    def is_here(self) -> bool:
        """Return whether the copy is there; waits for nothing."""
        return self._came is None or self._came.query()

    def read(self) -> Array:
        """Return what is there now."""
        array: Array = self._copy.numpy()
        return array
