"""Unique rows on the device of the model, and the pooling of them there.

    pulling thread   rows, index of bags -> device, on a side stream: rows out of the
                     memory that a server of this host shares, all else by pinned memory
    compute          the model's stream waits for that copy, and pools
    backward pass    gradient of the rows
    pushing thread   that gradient -> the memory that a server of this host shares, on
                     another side stream; to other hosts by pinned memory

On a GPU the trainer's thread never blocks: the streams wait for one another, and the
pipeline's threads for the copies, asleep. Nothing waits within the backward pass. All
tables of one dim are one matrix of rows, pooled by one ``embedding_bag``; the gradient
of its rows is another one over the transposed index (``lookup/transposed.py``). Rows
that travel in 16 bits become float32 there.

Dimensions: B samples, F features of one dim D, L ids of them, U unique rows.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from persia_torchrec.arrays import Positions
from persia_torchrec.client.client import EmbeddingClient, PendingRows, Reply
from persia_torchrec.device.transfer import (
    copy_into,
    copy_out,
    empty_pinned,
    register,
)
from persia_torchrec.lookup.bags import FeatureSpec
from persia_torchrec.lookup.sharded_lookup import (
    Outputs,
    RoutedBatch,
    RowGradients,
    ShardedLookup,
)
from persia_torchrec.lookup.transposed import (
    IndexParts,
    IndexSizes,
    build_index,
    most_numbers,
)
from persia_torchrec.rpc import slab
from persia_torchrec.rpc.messages import DeferredFrame, DeferredRows, Precision
from persia_torchrec.sharding import torchrec_api

Tensors = tuple[torch.Tensor, ...]

_SWITCH_S = 5e-4
"""After which a thread has Python's lock that waits for it; 5 ms by default, for which
the thread that launches kernels would wait for those that pull and push."""

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}


class DeviceIndex:
    """Which rows make up the bags of a group, on a device; int32 but for the scales.

    The parts are those of ``IndexSizes``, and of ``further`` arrays behind them.
    """

    def __init__(
        self, flat: torch.Tensor, sizes: IndexSizes, further: Sequence[int]
    ) -> None:
        self.flat = flat
        parts = flat.split([*sizes.parts, *sizes.levels, *further])
        self.offsets, self.rows, self.bags, self.starts = parts[:4]
        self.scales, self.chunk_scales = parts[4:6]
        self.sources, self.chunk_sources, self.bag_of = parts[6:9]
        behind = 9 + len(sizes.levels)
        self.levels, self.further = parts[9:behind], parts[behind:]

    def weights(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Return the factor of each of ``rows``, if any; ``weights`` are of all ids."""
        if weights is None:
            return self.scales.view(torch.float32) if len(self.scales) else None
        chosen = weights.index_select(0, self.sources)
        return chosen * self.scales.view(torch.float32) if len(self.scales) else chosen

    def add_up(
        self, grads: torch.Tensor, weights_L: torch.Tensor | None, num_rows: int
    ) -> torch.Tensor:
        """Return the gradient of the rows, ``(U, D)``; those of all bags are given.

        ``weights_L`` are those of :meth:`weights`.
        """
        of_chunks = None
        if weights_L is not None and len(self.chunk_sources):
            of_chunks = weights_L.index_select(0, self.chunk_sources)
        elif weights_L is not None:
            of_chunks = self.chunk_scales.view(torch.float32)
        sums = _sum_bags(grads, self.bags, self.starts, of_chunks)
        self._add_chunks(sums, self.levels)
        return sums if len(sums) == num_rows else sums[:num_rows]

    def _add_chunks(self, sums: torch.Tensor, levels: Tensors) -> None:
        """Replace the first chunks of rows of several by the sums of all of them."""
        if levels:
            chunks, starts, replaced = levels[:3]
            whole = _sum_bags(sums, chunks, starts, None)
            self._add_chunks(whole, levels[3:])
            sums.index_copy_(0, replaced.long(), whole[: len(replaced)])

    def weights_gradient(
        self,
        grads: torch.Tensor,
        rows_ND: torch.Tensor,
        rows_L: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient of the weights of all ids; ``rows_L`` are their rows."""
        of_ids = torchrec_api.weights_gradient(
            grads, rows_ND, rows_L, self.offsets, self.bag_of
        )
        if len(self.scales):
            of_ids = of_ids * self.scales.view(torch.float32)
        return torch.zeros_like(weights).index_add_(0, self.sources, of_ids)


def _sum_bags(
    matrix: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    return functional.embedding_bag(
        rows,
        matrix,
        starts,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights,
    )


class Pooled(NamedTuple):
    """What a batch gave, per group, and what its backward pass needs."""

    outputs: Tensors  # float32 (B, F * D), or of each id a row (L, D)
    rows: Tensors = ()  # float32 (U, D)
    weights: tuple[torch.Tensor | None, ...] = ()  # (L,)
    graphs: Tensors = ()  # bags whose rows are trained where they are


class PulledBatch(Protocol):
    """What a lookup gives a model's device: unique rows, or what a worker has pooled.

    Only rows have ids with weights, and the gradient of these.
    """

    def pool(self, weights: torch.Tensor | None) -> Pooled:
        """Return the outputs; ``weights`` are of all ids of the batch, if any."""

    def gradients(self, pooled: Pooled, grads: Sequence[torch.Tensor]) -> Tensors:
        """Return what is pushed, float32, in memory of its own."""


@dataclass(slots=True)
class DeviceBatch:
    """A batch's unique rows on a device, and the bags that they make up."""

    batch: RoutedBatch  # on the host
    rows: Tensors  # (U, D) per group, as they travelled
    indices: tuple[DeviceIndex, ...]  # one per group
    each_id: bool  # whether every id is a bag of its own
    came: torch.cuda.Event | None  # ends when all of that is there; None on the CPU
    elsewhere: Collection[int] = ()  # groups that have no rows here

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        if self.came is not None:
            torchrec_api.require_no_capture()
            stream = torch.cuda.current_stream(self.rows[0].device)
            stream.wait_event(self.came)
            for tensor in (*self.rows, *[index.flat for index in self.indices]):
                tensor.record_stream(stream)  # it was made on the side stream

    def wide_rows(self) -> Tensors:
        """Return the rows as float32, once they are there."""
        self.wait()
        pairs = enumerate(zip(self.rows, self.indices, strict=True))
        return tuple(
            [
                rows_UD if g in self.elsewhere else _widened(rows_UD, index)
                for g, (rows_UD, index) in pairs
            ]
        )

    def pool(self, weights: torch.Tensor | None) -> Pooled:
        """Pool all bags; ``weights`` are of all ids of the batch, on the device."""
        outputs, of_ids, rows = [], [], self.wide_rows()
        plan = self.batch.plan
        for group, (rows_UD, index) in enumerate(zip(rows, self.indices, strict=True)):
            weights_L = index.weights(weights)
            if group in self.elsewhere:
                pooled = rows_UD
            elif self.each_id:
                pooled = rows_UD.index_select(0, index.rows)
            else:
                pooled = _sum_bags(rows_UD, index.rows, index.offsets, weights_L)
                num_columns = plan.group_of.count(group) * plan.dims[group]
                pooled = pooled.view(-1, num_columns)
            outputs.append(pooled)
            of_ids.append(weights_L)
        return Pooled(tuple(outputs), rows, tuple(of_ids))

    def gradients(self, pooled: Pooled, grads: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradient of each group's rows; those of the outputs are given.

        Of groups that have no rows here it is that of the output.
        """
        each = zip(self.indices, grads, pooled.rows, pooled.weights, strict=True)
        return tuple(
            [
                grad.clone()
                if group in self.elsewhere
                else index.add_up(_by_bag(grad, rows_UD), weights_L, len(rows_UD))
                for group, (index, grad, rows_UD, weights_L) in enumerate(each)
            ]
        )

    def weights_gradient(
        self, pooled: Pooled, grads: Sequence[torch.Tensor], weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the weights of all ids."""
        parts = []
        for group, (index, grad) in enumerate(zip(self.indices, grads, strict=True)):
            rows_ND, rows_L = self.rows_of(group, pooled)
            grad_ND = _by_bag(grad, rows_ND)
            parts.append(index.weights_gradient(grad_ND, rows_ND, rows_L, weights))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def rows_of(self, group: int, pooled: Pooled) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix with a group's rows, and which of it each id is, int32."""
        return pooled.rows[group], self.indices[group].rows


def _by_bag(grad: torch.Tensor, rows_UD: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output, a line for each bag."""
    return grad.reshape(-1, rows_UD.shape[1])


def _widened(rows_UD: torch.Tensor, index: DeviceIndex) -> torch.Tensor:
    """Return rows as float32, as :func:`write_floats` does on the host."""
    if rows_UD.dtype == torch.float32:
        return rows_UD
    if rows_UD.dtype == torch.float16:
        scales_U1 = index.further[0].view(torch.float32).unsqueeze(1)
        return rows_UD.to(torch.float32).mul_(scales_U1)
    return rows_UD.to(torch.float32)


class GradientCopy:
    """Gradients on their way from a device to the host; on the CPU they are there.

    The thread of the backward pass makes it. On a GPU ``stream`` copies, when the
    current stream has computed the gradients; these are kept until then, so that
    autograd neither changes nor frees them. ``check`` wants to know if all are finite.
    Those of rows ``of`` a ``DeviceBatch`` that travel as float32 are copied when they
    are sent.
    """

    def __init__(
        self,
        grads: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
        *,
        check: bool,
        of: object = None,
    ) -> None:
        self._grads: Sequence[torch.Tensor] = grads
        self._device = None if stream is None else stream.device
        self._is_finite: torch.Tensor | None = None
        self._checked = self._left = None
        late = isinstance(of, DeviceBatch) and of.rows[0].dtype == torch.float32
        if check and grads:
            each = [torch.isfinite(grad).all() for grad in grads]
            self._is_finite = each[0] if len(each) == 1 else torch.stack(each).all()
        grads = [grad.contiguous() for grad in grads]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                if self._is_finite is not None:
                    self._is_finite = _copied(self._is_finite, stream)
                    self._checked = _end_of_work(stream)
                if not late:
                    grads = [_copied(grad, stream) for grad in grads]
                self._left = _end_of_work(stream)
        self._late = DeviceGradients(grads, stream) if late else None
        self._arrays = () if late else tuple([grad.numpy() for grad in grads])

    def is_finite(self) -> bool:
        """Return whether all are finite, True unchecked; waits for the check alone."""
        if self._checked is not None:
            use_device(self._device)
            self._checked.synchronize()
        # By NumPy, which reads memory of the host only.
        return self._is_finite is None or bool(self._is_finite.numpy())

    def wait(self) -> Any:
        """Wait until the gradients are on the host, and return them; any thread.

        Their memory is not written again: it may be sent more than once. Those that are
        copied when they are sent are ``DeviceGradients``.
        """
        if self._left is not None:
            use_device(self._device)
            self._left.synchronize()
        self._grads = ()
        return self._arrays if self._late is None else self._late


class DeviceGradients(DeferredRows):
    """Gradients of rows, float32 ``(U, D)`` per group, computed; ``stream`` copies."""

    def __init__(
        self, grads: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
    ) -> None:
        self.shapes = [tuple(grad.shape) for grad in grads]
        self._flat: list[Any] = [grad.view(-1) for grad in grads]
        if stream is None:
            self._flat = [flat.numpy() for flat in self._flat]
        self._stream = stream

    def part(self, pieces: Sequence[slice]) -> DeferredFrame:
        """Return a frame of some rows, of each group its piece."""
        each = zip(self._flat, self.shapes, pieces, strict=True)
        found = [flat[piece.start * D : piece.stop * D] for flat, (_, D), piece in each]
        return _Slice(found, self._stream)

    def arrays(self) -> Outputs:
        """Return all rows on the host."""
        whole = [_Slice([flat], self._stream).whole() for flat in self._flat]
        each = zip(whole, self.shapes, strict=True)
        return tuple([np.frombuffer(one, np.float32).reshape(s) for one, s in each])


class _Slice(DeferredFrame):
    """Pieces of float32, flat: tensors that ``stream`` copies, or without it arrays."""

    def __init__(self, pieces: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        self._pieces, self._stream = pieces, stream
        self._num = sum(map(len, pieces))

    def __len__(self) -> int:
        return 4 * self._num

    def write(self, out: npt.NDArray[np.uint8]) -> None:
        """Write the rows; they are there when this returns."""
        at, floats, stream = 0, out.view(np.float32), self._stream
        if stream is None:
            np.concatenate(self._pieces, out=floats)
            return
        use_device(stream.device)
        with torch.cuda.stream(stream):
            for tensor in self._pieces:
                copy_out(tensor, floats[at : at + len(tensor)])
                at += len(tensor)
            _end_of_work(stream).synchronize()

    def whole(self) -> memoryview:
        """Return the rows in memory of their own."""
        if self._stream is None:
            one = len(self._pieces) == 1
            array = self._pieces[0] if one else np.concatenate(self._pieces)
            found: memoryview = array.view(np.uint8).data
            return found
        out = empty_pinned((self._num,), torch.float32).numpy().view(np.uint8)
        self.write(out)
        return out.data


def use_device(device: torch.device | None) -> None:
    """Make a GPU the current one of this thread, or its first call makes another's."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def _copied(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Begin to copy to pinned memory, on the stream, which is current."""
    staged = empty_pinned(tensor.shape, tensor.dtype)
    tensor.record_stream(stream)  # it may be forgotten before
    return staged.copy_(tensor, non_blocking=True)


def _end_of_work(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event; a thread that waits for it sleeps, and does not spin."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class RowsOnDevice(ShardedLookup):
    """Gives each row to a device once, which pools; it gives a ``DeviceBatch``.

    A push needs nothing of it, so that its rows leave the device with the graph.
    ``each_id`` gives a row for each id instead; ``has_weights``: ids have weights.
    """

    def __init__(
        self,
        client: EmbeddingClient,
        features: Sequence[FeatureSpec],
        *,
        precision: Precision,
        device: torch.device,
        each_id: bool = False,
        has_weights: bool = False,
    ) -> None:
        super().__init__(client, features, precision=precision)
        self.each_id, self._has_weights = each_id, has_weights
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            slab.pin_with(partial(register, device))
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))

    def fetch(self, batch: RoutedBatch, elsewhere: Collection[int] = ()) -> Any:
        """Fetch the rows of a batch; begin to copy them; return the ``DeviceBatch``.

        It has none of the groups that are ``elsewhere``.
        """
        use_device(self._device)
        groups, counts = range(len(batch.groups)), batch.counts
        here = [g for g in groups if g not in elsewhere]
        asked: PendingRows | None = None
        if here:
            asked = self.client.begin_pull(
                [batch.groups[g] for g in here],
                batch.number,
                self.precision,
                [counts[g] for g in here],
            )
        indices = [self._index(batch, group) for group in groups]  # meanwhile
        dtype = _DTYPES[self.precision]
        received = [] if asked is None else asked.received()
        if self.precision is Precision.FP16:
            for n, g in enumerate(here):
                exponents_U = np.concatenate([one.exponents[n] for one in received])
                scales_U = np.exp2(-exponents_U.astype(np.float32))
                further = indices[g].further[0]
                further[:] = torch.from_numpy(scales_U).view(torch.int32)
        with torch.cuda.stream(self._stream):  # does nothing for None
            device = self._device
            shapes = batch.row_shapes
            rows = [
                torch.empty(shapes[g] if g in here else 0, dtype=dtype, device=device)
                for g in groups
            ]
            for n, g in enumerate(here):
                copy_into(_flat(rows[g]), [one.pieces[n] for one in received])
            moved = tuple([index.to(device) for index in indices])
            came = None if self._stream is None else _end_of_work(self._stream)
        if came is not None:  # the servers write there again, when ``received`` is gone
            came.synchronize()
        return DeviceBatch(batch, tuple(rows), moved, self.each_id, came, elsewhere)

    def push(self, batch: RoutedBatch, grads: Any) -> list[Reply]:
        """Send the gradients of the rows, which are given, or late."""
        assert batch.number is not None, "a batch that was not pulled for training"
        return self.client.push(
            batch.groups, grads, batch.number, precision=self.precision
        )

    def gradients_of(self, batch: RoutedBatch, grads: Any) -> RowGradients:
        """Return the gradients of the rows, which are given, or late."""
        arrays = grads.arrays() if isinstance(grads, DeviceGradients) else grads
        return RowGradients(batch.groups, arrays)

    def _index(self, batch: RoutedBatch, group: int) -> "_HostIndex":
        """Build the index of a group in memory from which it is copied at once."""
        further = self._further(batch, group)
        has_scales = not self.each_id and batch.plan.of_groups[group].has_scales
        wanted = IndexParts(self.each_id, has_scales, self._has_weights)
        num = most_numbers(batch, group, wanted) + sum(map(len, further))
        make = torch.empty if self._stream is None else empty_pinned
        staged = make([num], dtype=torch.int32)
        array: Positions = staged.numpy()
        sizes = build_index(batch, group, wanted, array)
        if wanted.sources and batch.sources is not None:
            start = sum(sizes.parts[:6])
            sources_L = array[start : start + sizes.parts[6]]
            sources_L[:] = batch.sources[sources_L]
        stop = sizes.total
        views = []
        for behind in further:
            start, stop = stop, stop + len(behind)
            array[start:stop] = behind
            views.append(staged[start:stop])
        return _HostIndex(staged[:stop], sizes, views)

    def _further(self, batch: RoutedBatch, group: int) -> list[Positions]:
        """Return what follows an index: scales of halves; lengths and offsets of ids.

        The lengths are ``(F * B,)``, the offsets ``(F * (B + 1),)``.
        """
        num_rows = len(batch.groups[group].ids) * (self.precision is Precision.FP16)
        further = [np.zeros(num_rows, dtype=np.int32)]
        if self.each_id:
            keys = batch.plan.of_groups[group].keys
            num_keys = len(batch.bag_starts) - 1
            lengths_FB = batch.lengths.reshape(num_keys, -1)[keys]
            offsets = np.zeros((len(keys), lengths_FB.shape[1] + 1), dtype=np.int32)
            np.cumsum(lengths_FB, axis=1, out=offsets[:, 1:])
            further += [lengths_FB.reshape(-1), offsets.reshape(-1)]
        return further


class _HostIndex(NamedTuple):
    """An index on the host, and views of what follows it."""

    flat: torch.Tensor
    sizes: IndexSizes
    further: list[torch.Tensor]

    def to(self, device: torch.device) -> DeviceIndex:
        flat = self.flat.to(device, non_blocking=True)
        further = [len(tensor) for tensor in self.further]
        return DeviceIndex(flat, self.sizes, further)


def _flat(rows_UD: torch.Tensor) -> torch.Tensor:
    """Return all numbers of rows, as they travel: of halves the bits."""
    flat = rows_UD.view(-1)
    return flat if flat.dtype == torch.float32 else flat.view(torch.int16)


def by_feature(
    pulled: DeviceBatch, tensors: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the rows of each feature, lengths, and offsets of its bags.

    Both, so that no kernel of fbgemm computes one of the other.
    """
    batch, by_feature = pulled.batch, list[tuple[int, tuple[Any, Any, Any]]]()
    num_ids = np.diff(batch.starts).tolist()
    for group, (rows_LD, index) in enumerate(zip(tensors, pulled.indices, strict=True)):
        chosen = batch.plan.of_groups[group].indices.tolist()
        _, lengths, offsets = index.further
        by_feature += zip(
            chosen,
            zip(
                rows_LD.split([num_ids[f] for f in chosen]),
                lengths.view(len(chosen), -1).unbind(),
                offsets.view(len(chosen), -1).unbind(),
                strict=True,
            ),
            strict=True,
        )
    ordered = [of_feature for _, of_feature in sorted(by_feature, key=itemgetter(0))]
    values, lengths, offsets = zip(*ordered, strict=True)
    return list(values), list(lengths), list(offsets)
