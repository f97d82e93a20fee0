"""Batches of TorchRec's: ids of all features, dense features and labels.

Servers have uint64 ids, torch int64: the same 64 bits, so that the id 2**64 - 1 is -1
on torch's side. Ids of fewer bits are int64 ids of the same value first.

Dimension key:
    B: samples
    L: ids of all features, or of one
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt
from torchrec.streamable import Pipelineable

from persia_torchrec.arrays import Lengths
from persia_torchrec.device.transfer import (
    copy_of,
    copy_to_send,
    empty_pinned,
    pin,
)
from persia_torchrec.errors import BatchError
from persia_torchrec.lookup.bags import Bags, JaggedIds

_SIGNED = torch.int64, torch.int32, torch.int16, torch.int8
_UNSIGNED = torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool
_ID_DTYPES = {*_SIGNED, *_UNSIGNED}

TBatch = TypeVar("TBatch", bound="Batch | TorchRecBatch")


class JaggedBatch:
    """A copy of a ``KeyedJaggedTensor``, and ids of the features that are wanted of it.

    A ``TensorDict`` of nested or jagged tensors becomes one first.
    A copy, as it is read again when the rows are there: the caller may change its own
    until then, and TorchRec's pipelines may free its memory. Ids that are on a GPU
    begin to come to the host with the caller's stream; :meth:`take` waits for them.

    Attributes:
        kjt: the copy, on the same device.
        batch_size: its samples.
    """

    def __init__(
        self, batch: KeyedJaggedTensor | TensorDict, keys: Sequence[str]
    ) -> None:
        require_keys(batch, keys)
        if isinstance(batch, TensorDict):
            batch = maybe_td_to_kjt(batch, list(keys))
        self.kjt = kjt = _copy(batch)
        self._keys, self.batch_size = keys, int(kjt.stride())
        self._weights: torch.Tensor | None = None
        self._features: Mapping[str, Bags] | None = None
        self._host, self._came = kjt, None
        if kjt.values().device.type == "cuda":
            require_ids(kjt)
            self._host, self._came = _to_host(kjt)
        else:
            self._features = to_jagged_ids(kjt, keys)

    def take(self, *, pins_weights: bool = False) -> Mapping[str, Bags]:
        """Wait for the ids, and return them; the pulling thread calls it first.

        With ``pins_weights``, weights that are on the host are copied to memory from
        which a GPU takes them without a thread that waits.
        """
        if self._features is None:
            if self._came is not None:
                self._came.synchronize()
            self._features = to_jagged_ids(self._host, self._keys)
            self._host = self.kjt
        weights = self.kjt.weights_or_none()
        if pins_weights and weights is not None and not weights.requires_grad:
            is_host = weights.device.type == "cpu"
            self._weights = weights.pin_memory() if is_host else None
        return self._features

    def on(self, device: torch.device) -> KeyedJaggedTensor:
        """Return the whole batch on a device."""
        return move(self.kjt, device)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell torch's allocator that a stream uses the tensors of a GPU."""
        if self.kjt.values().device.type != "cpu":
            self.kjt.record_stream(stream)

    def weights(self) -> torch.Tensor:
        """Return the weights of all ids, in their order, in the autograd graph."""
        weights: torch.Tensor | None = self._weights
        if weights is None:
            weights = self.kjt.weights_or_none()
        if weights is None:
            raise BatchError(
                "A weighted collection must be given a KeyedJaggedTensor with weights, "
                "one for each id. Received: one without. Pass weights=..., or build "
                "the collection with is_weighted=False."
            )
        return weights

    def ids(self, key: str) -> torch.Tensor:
        """Return the ids of a feature as they were given, ``(L,)``, int64 as a rule."""
        return self.of_feature(key, self.kjt.values())

    def of_feature(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a feature's slice, ``(L,)``, of a tensor that is as the values."""
        indices = self.take()[key].indices
        if isinstance(indices, np.ndarray):
            return tensor[torch.from_numpy(indices)]
        return tensor[indices]


class HostKeyedJaggedTensor(KeyedJaggedTensor):  # type: ignore[misc]
    """A ``KeyedJaggedTensor`` that stays on the host when its batch is moved to a GPU.

    The servers want ids on the host. TorchRec's train pipelines move a whole batch to
    the device, from where each collection would have to take them back, and wait for
    it. Collections on the servers, and those of a ``MixedSharder``, take this as any
    ``KeyedJaggedTensor``; TorchRec's own on a GPU do not.

    Example:
        >>> ids, lengths = torch.tensor([7]), torch.tensor([1])
        >>> kjt = KeyedJaggedTensor(["ad"], ids, lengths=lengths)
        >>> HostKeyedJaggedTensor.of(kjt).to(torch.device("meta")).values()
        tensor([7])
    """

    @classmethod
    def of(cls, kjt: KeyedJaggedTensor) -> Self:
        """Return the same tensors; those of a GPU are copied to the host."""
        host = cls.__new__(cls)
        host.__dict__.update(move(kjt, torch.device("cpu")).__dict__)
        return host

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return it as it is; ``dtype`` is that of the weights."""
        if dtype is None:
            return self
        return self.of(KeyedJaggedTensor.to(self, torch.device("cpu"), dtype=dtype))

    def pin_memory(self) -> "HostKeyedJaggedTensor":
        """Return it as it is: no device reads it."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: no stream uses it."""


class PulledKeyedJaggedTensor(HostKeyedJaggedTensor):
    """The ids of a batch whose rows are on their way to the collections of a model.

    Attributes:
        pulls: by collection, what was begun; a collection that is called takes its own.
    """

    pulls: dict[object, Any]

    def take(self, collection: object) -> Any:
        """Return the pull of a collection; BatchError if it has been called before."""
        if collection not in self.pulls:
            raise BatchError(
                "A collection must be called once with the ids of a batch, whose rows "
                "were pulled once. Received: a second call. Use its output twice."
            )
        return self.pulls.pop(collection)


def move(kjt: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """Return a ``KeyedJaggedTensor`` on a device, one that stays on the host too.

    What follows from its lengths is computed on the host, if it is there, and moved.
    """
    if kjt.values().device == device:
        return kjt
    if kjt.values().device.type == "cpu":
        kjt.offsets()
        kjt.length_per_key()
    return KeyedJaggedTensor.to(kjt, device, non_blocking=device.type != "cpu")


def copy_batch(batch: TBatch) -> TBatch:
    """Return a batch on the same device with tensors of its own.

    Those of the host are pinned where this process uses a GPU, but for ids that stay
    on the host.
    """
    own = copy.copy(batch)  # it may have attributes of the user's own
    for name, value in vars(batch).items():
        if isinstance(value, HostKeyedJaggedTensor):
            value = value.of(_copy(value))
        elif isinstance(value, KeyedJaggedTensor):
            value = _copy(value, copy_to_send)
        elif isinstance(value, torch.Tensor):
            value = copy_to_send(value)
        elif isinstance(value, tuple):
            is_tensor = [isinstance(one, torch.Tensor) for one in value]
            value = tuple(map(copy_to_send, value)) if all(is_tensor) else value
        object.__setattr__(own, name, value)  # TorchRecBatch is frozen
    return own


def _copy(
    kjt: KeyedJaggedTensor, copy_one: Callable[[torch.Tensor], torch.Tensor] = copy_of
) -> KeyedJaggedTensor:
    """Return a copy on the same device; of the weights in the autograd graph."""
    parts = kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none()
    with torch.enable_grad():  # pipelines begin pulls without
        copies = [part if part is None else copy_one(part) for part in parts]
    strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
    return KeyedJaggedTensor(
        kjt.keys(),
        copy_one(kjt.values()),
        *copies,
        stride=None if strides is not None else kjt.stride(),
        stride_per_key_per_rank=strides,
        inverse_indices=kjt.inverse_indices_or_none(),
    )


def _pin_ids(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ids in pinned memory, unless they are to stay on the host."""
    if isinstance(kjt, HostKeyedJaggedTensor) or kjt.values().device.type != "cpu":
        return kjt
    return kjt.pin_memory()


def _to_host(
    kjt: KeyedJaggedTensor,
) -> tuple[KeyedJaggedTensor, torch.cuda.Event]:
    """Begin to copy ids and lengths of a GPU, behind what its stream does already."""
    parts = [
        empty_pinned(part.shape, part.dtype).copy_(part, non_blocking=True)
        for part in (kjt.values().detach(), kjt.lengths().detach())
    ]
    came: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    came.record()
    is_variable = kjt.variable_stride_per_key()
    host = KeyedJaggedTensor(
        kjt.keys(),
        parts[0],
        lengths=parts[1],
        stride=None if is_variable else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() if is_variable else None,
        inverse_indices=kjt.inverse_indices_or_none(),
    )
    return host, came


def require_batch(given: Sequence[object], *others: type) -> Any:
    """Return the one batch that a collection is called with.

    Raises:
        BatchError: there is none, or several, or it is neither a ``KeyedJaggedTensor``,
            nor a ``TensorDict``, nor of a type of ``others``.
    """
    if len(given) == 1 and isinstance(given[0], KeyedJaggedTensor | TensorDict):
        return given[0]
    if len(given) == 1 and isinstance(given[0], others):
        return given[0]
    received = ", ".join([f"a {type(one).__name__}" for one in given]) or "nothing"
    raise BatchError(
        "A collection must be called with one KeyedJaggedTensor, the ids of all its "
        f"features, or a TensorDict of them. Received: {received}. Make one by "
        "KeyedJaggedTensor(keys, values, lengths=...), or from_jt_dict() of a dict of "
        "JaggedTensors."
    )


def require_keys(batch: KeyedJaggedTensor | TensorDict, keys: Iterable[str]) -> None:
    """Raise BatchError unless a batch has these features, and perhaps others."""
    received = dict.fromkeys(map(str, batch.keys()))
    for key in keys:
        if key not in received:
            raise BatchError(
                f"The batch must have the feature {key!r}. Received: {list(received)}."
            )


def require_ids(kjt: KeyedJaggedTensor) -> None:
    """Reject values that are no ids or not there, and keys that come twice.

    A batch without ids may have any dtype: ``torch.tensor([])`` is float32.
    """
    values = kjt.values()
    for part in (values, kjt.lengths_or_none(), kjt.offsets_or_none()):
        if part is not None and part.is_meta:
            raise BatchError(
                "A KeyedJaggedTensor's ids and lengths must be on the CPU or a GPU. "
                "Received: a tensor on the meta device, which has no numbers."
            )
    if values.dtype not in _ID_DTYPES and len(values):
        raise BatchError(
            "A KeyedJaggedTensor's ids must be int64, the same 64 bits as PERSIA's "
            f"uint64, or integers of another size. Received: {values.dtype}. Use "
            "values.long()."
        )
    if len(set(kjt.keys())) < len(kjt.keys()):
        raise BatchError(
            "A KeyedJaggedTensor's keys must be unique, or it is not known which "
            f"ids a key means. Received: {kjt.keys()}."
        )


def to_jagged_ids(kjt: KeyedJaggedTensor, keys: Iterable[str]) -> Mapping[str, Bags]:
    """Take the ids of some features out of a ``KeyedJaggedTensor``.

    Samples that are kept once are repeated as ``inverse_indices`` says: then all
    features have B. The ids are views of an int64 tensor on the CPU; the lengths, which
    the backward pass needs again, are copies.
    """
    require_ids(kjt)
    ids_L = kjt.values().to("cpu", torch.int64).numpy().view(np.uint64)
    flat = kjt.lengths().to("cpu").numpy().astype(np.int32)
    num_bags_K = np.array(kjt.stride_per_key(), dtype=np.int64)
    bag_starts = np.concatenate([[0], np.cumsum(num_bags_K)])
    if len(flat) != bag_starts[-1]:
        raise BatchError(
            "A KeyedJaggedTensor must have a length for each key and sample, "
            f"{bag_starts[-1]} of the samples {num_bags_K.tolist()}. Received: "
            f"{len(flat)} lengths for the keys {kjt.keys()}."
        )
    num_ids_K = _sums(flat, num_bags_K, bag_starts)
    id_starts = np.concatenate([[0], np.cumsum(num_ids_K)])
    if id_starts[-1] != len(ids_L):
        raise BatchError(
            "A KeyedJaggedTensor's lengths must sum up to the number of ids, "
            f"{len(ids_L)}. Received: a sum of {id_starts[-1]}."
        )
    if len(flat) and flat.min() < 0:
        k = int(np.searchsorted(bag_starts, int(flat.argmin()), side="right")) - 1
        raise BatchError(
            f"Feature {kjt.keys()[k]!r}: lengths must not be negative. "
            f"Received: {flat.min()}."
        )
    positions = {key: k for k, key in enumerate(kjt.keys())}
    jagged = JaggedIds(keys, positions, ids_L, flat, id_starts, bag_starts)
    if not kjt.variable_stride_per_key():
        return jagged
    repeats = _repeats(kjt)
    return {key: _repeated(key, bags, repeats[key]) for key, bags in jagged.items()}


def _sums(
    lengths: Lengths, num_bags_K: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the sum of each key's lengths."""
    num_keys = len(num_bags_K)
    if num_keys and (num_bags_K == num_bags_K[0]).all():
        sums: npt.NDArray[np.int64]
        sums = lengths.reshape(num_keys, -1).sum(axis=1, dtype=np.int64)
        return sums
    pieces = np.split(lengths, starts[1:-1]) if num_keys else []
    return np.array([of_key.sum(dtype=np.int64) for of_key in pieces], dtype=np.int64)


def _repeats(kjt: KeyedJaggedTensor) -> dict[str, npt.NDArray[np.int64]]:
    """Return which kept sample each sample is, by key, int64 ``(B,)``."""
    inverse = kjt.inverse_indices_or_none()
    if inverse is None or not set(kjt.keys()) <= set(inverse[0]):
        strides = dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
        raise BatchError(
            "All features of a KeyedJaggedTensor must have the same number of samples, "
            "or inverse_indices for every key, which map samples to their rows. "
            f"Received: {strides}."
        )
    keys, of_keys = inverse
    return dict(zip(keys, of_keys.detach().cpu().numpy(), strict=True))


def _repeated(key: str, jagged: Bags, samples_B: npt.NDArray[np.int64]) -> Bags:
    assert isinstance(jagged.indices, slice)
    num_kept = len(jagged.lengths)
    if len(samples_B) and not (samples_B.min() >= 0 and samples_B.max() < num_kept):
        raise BatchError(
            f"Feature {key!r}: inverse_indices must be in [0, {num_kept}). "
            f"Received: {samples_B.min()} to {samples_B.max()}."
        )
    ends = np.cumsum(jagged.lengths, dtype=np.int64)
    lengths = jagged.lengths[samples_B]
    # An id's index is the start of its bag, and its number within the bag.
    starts = np.repeat((ends - jagged.lengths)[samples_B], lengths)
    first = np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    indices = starts + np.arange(len(starts)) - first
    return Bags(jagged.ids[indices], lengths, indices + jagged.indices.start)


@dataclass
class LoadedBatch(Batch):  # type: ignore[misc]  # TorchRec's are Any to mypy
    """TorchRec's ``Batch``, of a ``DataLoader(as_torchrec=True)``.

    Train pipelines and models such as ``DLRMTrain`` take it as any ``Batch``:
    ``dense_features`` and ``labels`` are a tensor each, ``sparse_features`` are the ids
    in the order of the ``PersiaBatch``, int64 values and int32 lengths.

    Attributes:
        requires_grad: whether the batch is for training.
        meta: the user's own bytes.
        batch_id: the batch's number among all batches of all data loaders.
        loader: number of the data loader that sent it; None if none did.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    requires_grad: bool = True
    meta: bytes | None = None
    batch_id: int | None = None
    loader: int | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> "LoadedBatch":
        """Return the batch with its tensors on a device."""
        return dataclasses.replace(
            self,
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device, non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "LoadedBatch":
        """Return the batch in pinned memory, as :meth:`TorchRecBatch.pin_memory`."""
        return dataclasses.replace(
            self,
            dense_features=pin(self.dense_features),
            sparse_features=_pin_ids(self.sparse_features),
            labels=pin(self.labels),
        )


@dataclass(frozen=True, kw_only=True)
class TorchRecBatch(Pipelineable):  # type: ignore[misc]  # TorchRec's are Any to mypy
    """One batch, as tensors; TorchRec's train pipelines take it as it is.

    Attributes:
        id_features: int64 values and int32 lengths, the features' names as keys.
        dense_features: ``(B, ...)`` each, of a dtype that ``NonIDTypeFeature`` takes.
        labels: ``(B, ...)`` each, of a dtype that ``Label`` takes.
        dense_names: of ``dense_features``; None if they have none.
        label_names: of ``labels``; None if they have none.
        requires_grad: whether the batch is for training.
        meta: the user's own bytes.
        batch_id: the batch's number among all batches of all data loaders.
        fraction: of the samples of its step, in ``(0, 1]``. A step of several parts has
            the sum of their mean losses, each times its ``fraction``.
    """

    id_features: KeyedJaggedTensor
    dense_features: tuple[torch.Tensor, ...] = ()
    labels: tuple[torch.Tensor, ...] = ()
    dense_names: tuple[str, ...] | None = None
    label_names: tuple[str, ...] | None = None
    requires_grad: bool = True
    meta: bytes | None = None
    batch_id: int | None = None
    fraction: float = 1.0

    def to(self, device: torch.device, non_blocking: bool = False) -> "TorchRecBatch":
        """Return the batch with its tensors on a device."""
        dense, labels = (
            tuple(tensor.to(device, non_blocking=non_blocking) for tensor in tensors)
            for tensors in (self.dense_features, self.labels)
        )
        ids = self.id_features.to(device, non_blocking)
        return dataclasses.replace(
            self, id_features=ids, dense_features=dense, labels=labels
        )

    def pin_memory(self) -> "TorchRecBatch":
        """Return the batch in pinned memory, from where it goes to a GPU by itself.

        ``torch.utils.data.DataLoader(pin_memory=True)`` calls it. Ids that stay on the
        host, of a :class:`HostKeyedJaggedTensor`, are as they were.
        """
        return dataclasses.replace(
            self,
            id_features=_pin_ids(self.id_features),
            dense_features=tuple(map(pin, self.dense_features)),
            labels=tuple(map(pin, self.labels)),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell torch's allocator that a stream uses the tensors."""
        self.id_features.record_stream(stream)
        for tensor in (*self.dense_features, *self.labels):
            tensor.record_stream(stream)
