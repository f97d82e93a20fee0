"""Unique rows on the device of the model, and the pooling of them there.

    pulling thread   rows, inverse indices -> pinned memory -> device, on a side stream
    compute          the model's stream waits for that copy; pools; autograd
    backward pass    gradient of the rows -> pinned memory, on another side stream
    pushing thread   waits for that copy, and sends

On a GPU the trainer's thread never blocks: the streams wait for one another, and the
pipeline's threads for the copies, asleep. Nothing waits within the backward pass. Bags
are pooled by torch's operators; the gradients of weighted ones on the CPU come from a
faster loop of ``lookup/pooling.py``.

Dimensions: B samples, L ids of one feature, U unique ids of its table, D embedding dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.lookup import pooling as host
from persia_torchrec.lookup.bags import FeatureSpec, Pooling
from persia_torchrec.lookup.sharded_lookup import (
    Outputs,
    RoutedBatch,
    RowGradients,
    ShardedLookup,
)
from persia_torchrec.rpc.float_codec import Floats
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.sharding.torchrec_api import require_no_capture

Tensors = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class DeviceBatch:
    """A batch's unique rows on a device, and which of them each id is."""

    batch: RoutedBatch  # on the host
    rows: Tensors  # float32 (U, D), one per table
    inverses: Tensors  # int32 (L,), one per feature
    offsets: Tensors  # int32 (B + 1,), one per feature: where its bags begin, and L
    came: torch.cuda.Event | None  # ends when all of that is there; None on the CPU

    def wait(self) -> Tensors:
        """Make the current stream wait for the copy; return the rows."""
        if self.came is not None:
            require_no_capture()
            stream = torch.cuda.current_stream(self.rows[0].device)
            stream.wait_event(self.came)
            for tensor in (*self.rows, *self.inverses, *self.offsets):
                tensor.record_stream(stream)  # it was made on the side stream
        # Tensors of their own: those that autograd is given refer to this batch.
        return tuple(rows_UD.detach() for rows_UD in self.rows)


class Leaving:
    """Gradients on their way from a device to the host; on the CPU they are there.

    The thread of the backward pass makes it. On a GPU ``stream`` copies, when the
    current stream has computed the gradients; these are kept until then, so that
    autograd neither changes nor frees them. ``check`` wants to know if all are finite.
    """

    def __init__(
        self,
        grads: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
        *,
        check: bool,
    ) -> None:
        self._grads: Sequence[torch.Tensor] = grads
        self._is_finite: torch.Tensor | None = None
        self._checked = self._left = None
        if check:
            each = [torch.isfinite(grad).all() for grad in grads]
            self._is_finite = torch.stack(each).all()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                if self._is_finite is not None:
                    self._is_finite = _copied(self._is_finite, stream)
                    self._checked = _end_of_work(stream)
                grads = [_copied(grad, stream) for grad in grads]
                self._left = _end_of_work(stream)
        self._arrays = tuple([grad.contiguous().numpy() for grad in grads])

    def is_finite(self) -> bool:
        """Return whether all are finite, True unchecked; waits for the check alone."""
        if self._checked is not None:
            self._checked.synchronize()
        # By NumPy, which reads memory of the host only.
        return self._is_finite is None or bool(self._is_finite.numpy())

    def wait(self) -> Outputs:
        """Wait until the gradients are on the host, and return them; any thread."""
        if self._left is not None:
            self._left.synchronize()
        self._grads = ()
        return self._arrays


def _copied(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Begin to copy to pinned memory, on the stream, which is current."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    tensor.record_stream(stream)  # it may be forgotten before
    return pinned.copy_(tensor, non_blocking=True)


def _end_of_work(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event; a thread that waits for it sleeps, and does not spin."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class RowsOnDevice(ShardedLookup):
    """Gives each row to a device once, which pools; it gives a ``DeviceBatch``.

    A push needs nothing of it, so that its rows leave the device with the graph.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Sequence[FeatureSpec],
        *,
        precision: Precision,
        device: torch.device,
    ) -> None:
        super().__init__(client, features, precision=precision)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def outputs_of(self, rows: Sequence[Floats], batch: RoutedBatch) -> Any:
        """Begin to copy rows to the device; return the ``DeviceBatch``."""
        offsets = [np.append(np.int32(0), np.cumsum(n)) for n in batch.lengths]
        indices, num = [*batch.inverses, *offsets], len(batch.inverses)
        with torch.cuda.stream(self._stream):  # does nothing for None
            on_device = tuple(
                [self._copy([of_table], torch.float32) for of_table in rows]
            )
            flat = self._copy(indices, torch.int32)
            came = None if self._stream is None else self._stream.record_event()
        tensors = torch.split(flat, [len(index) for index in indices])
        return DeviceBatch(batch, on_device, tensors[:num], tensors[num:], came)

    def gradients_of(self, batch: RoutedBatch, grads: Outputs) -> RowGradients:
        """Return the gradients of the rows, which are given."""
        return RowGradients(batch.tables, grads)

    def _copy(
        self, arrays: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return arrays on the device, one after the other."""
        shape = (sum([len(array) for array in arrays]), *arrays[0].shape[1:])
        is_pinned = self._stream is not None
        staged = torch.empty(shape, dtype=dtype, pin_memory=is_pinned)
        np.concatenate(arrays, out=staged.numpy())
        return staged.to(self._device, non_blocking=True)


def pool_rows(
    rows_UD: torch.Tensor,
    weights_L: torch.Tensor | None,
    batch: DeviceBatch,
    feature: int,
    pooling: Pooling,
) -> torch.Tensor:
    """Pool the bags of the feature of an index; float32 ``(B, D)``."""
    pool = pool_by_torch
    if weights_L is not None and rows_UD.device.type == "cpu":
        pool = _WeightedBags.apply
    pooled_BD: torch.Tensor = pool(rows_UD, weights_L, batch, feature, pooling)
    return pooled_BD


def pool_by_torch(
    rows_UD: torch.Tensor,
    weights_L: torch.Tensor | None,
    batch: DeviceBatch,
    feature: int,
    pooling: Pooling,
) -> torch.Tensor:
    """Pool the bags of a feature with torch's operators."""
    offsets = batch.offsets[feature]
    pooled_BD = functional.embedding_bag(
        batch.inverses[feature],
        rows_UD,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights_L,
    )
    if pooling == "sum":
        return pooled_BD
    lengths_B1 = offsets.diff().clamp(min=1).to(torch.float32).unsqueeze(1)
    return pooled_BD / (lengths_B1 if pooling == "mean" else lengths_B1.sqrt())


class _WeightedBags(torch.autograd.Function):
    """Weighted bags on the CPU, where torch is slow in the backward pass alone."""

    @staticmethod
    def forward(
        ctx: Any, rows_UD: torch.Tensor, weights_L: torch.Tensor, *bags: Any
    ) -> torch.Tensor:
        batch, feature, pooling = bags
        on_host = batch.batch
        ctx.bags = on_host.inverses[feature], on_host.lengths[feature], pooling
        ctx.save_for_backward(rows_UD, weights_L)
        return pool_by_torch(rows_UD, weights_L, *bags)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_UD, weights_L = (tensor.numpy() for tensor in ctx.saved_tensors)
        bags = host.FeatureBags(rows_UD, *ctx.bags)
        both = host.weighted_gradients(grads[0].numpy(), bags, weights_L)
        return *map(torch.from_numpy, both), None, None, None
