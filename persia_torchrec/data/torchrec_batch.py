"""A whole ``PersiaBatch`` as TorchRec has it, and back.

    PersiaBatch               TorchRecBatch
    id_type_features     ->   id_features      KeyedJaggedTensor, the same 64 bits
    non_id_type_features ->   dense_features   a tensor each, in order
    labels               ->   labels           a tensor each, in order

Nothing is converted by value, so that both ways give equal batches. The tensors share
the arrays' memory where they can. TorchRec's train pipelines take a ``TorchRecBatch``
as it is: it can be moved to a device.

Dimension key:
    B: samples
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from persia_torchrec.data.kjt import to_jagged_ids, to_keyed_jagged_tensor
from persia_torchrec.embedding.data import (
    IDFeature,
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NdarrayDataBase,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.errors import BatchError
from persia_torchrec.lookup.bags import Bags

D = TypeVar("D", bound=NdarrayDataBase)


@dataclass(frozen=True, kw_only=True)
class TorchRecBatch(Pipelineable):  # type: ignore[misc]  # TorchRec's are Any to mypy
    """One batch, as tensors."""

    id_features: KeyedJaggedTensor
    """int64 values and int32 lengths, the features' names as keys."""

    dense_features: tuple[torch.Tensor, ...] = ()
    """``(B, ...)`` each, of a dtype that ``NonIDTypeFeature`` takes."""

    labels: tuple[torch.Tensor, ...] = ()
    """``(B, ...)`` each, of a dtype that ``Label`` takes."""

    dense_names: tuple[str, ...] | None = None
    """Of ``dense_features``; None if they have none."""

    label_names: tuple[str, ...] | None = None
    """Of ``labels``; None if they have none."""

    requires_grad: bool = True
    """Whether the batch is for training."""

    meta: bytes | None = None
    """The user's own bytes."""

    batch_id: int | None = None
    """The batch's number among all batches of all data loaders."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "TorchRecBatch":
        """Return the batch with its tensors on a device."""
        return replace(
            self,
            id_features=self.id_features.to(device, non_blocking),
            dense_features=_to(self.dense_features, device, non_blocking),
            labels=_to(self.labels, device, non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell torch's allocator that a stream uses the tensors."""
        self.id_features.record_stream(stream)
        for tensor in (*self.dense_features, *self.labels):
            tensor.record_stream(stream)


def to_torchrec(batch: PersiaBatch) -> TorchRecBatch:
    """Return a batch as tensors on the CPU, which share its arrays' memory.

    Example:
        >>> ids = np.array([7, 2**64 - 1], dtype=np.uint64)
        >>> features = [IDTypeFeatureWithSingleID("ads", ids)]
        >>> tensors = to_torchrec(PersiaBatch(features, requires_grad=False))
        >>> tensors.id_features["ads"].values().tolist()
        [7, -1]
    """
    return TorchRecBatch(
        id_features=to_keyed_jagged_tensor(batch.id_type_features),
        dense_features=tuple(_tensors(batch.non_id_type_features)),
        labels=tuple(_tensors(batch.labels)),
        dense_names=tuple(feature.name for feature in batch.non_id_type_features),
        label_names=tuple(label.name for label in batch.labels),
        requires_grad=batch.requires_grad,
        meta=batch.meta,
        batch_id=batch.batch_id,
    )


def from_torchrec(batch: TorchRecBatch) -> PersiaBatch:
    """Return tensors as a batch.

    A feature with one id in every sample becomes an ``IDTypeFeatureWithSingleID``,
    which means the same. Tensors on the CPU are not copied.

    Raises:
        BatchError: the ids are weighted or not int64, a tensor has a dtype that a
            ``PersiaBatch`` cannot have, or the parts do not fit one another.
    """
    kjt = batch.id_features
    if kjt.weights_or_none() is not None:
        raise BatchError(
            "The ids of a PersiaBatch have no weights. Received: a KeyedJaggedTensor "
            "with weights. Give it without, or look weighted ids up with TorchRec's "
            "modules."
        )
    result = PersiaBatch(
        [
            _id_feature(key, jagged)
            for key, jagged in to_jagged_ids(kjt, kjt.keys()).items()
        ],
        _arrays(NonIDTypeFeature, batch.dense_features, batch.dense_names),
        _arrays(Label, batch.labels, batch.label_names),
        requires_grad=batch.requires_grad,
        meta=batch.meta,
    )
    result.batch_id = batch.batch_id
    return result


def _id_feature(name: str, jagged: Bags) -> IDFeature:
    if (jagged.lengths == 1).all():
        return IDTypeFeatureWithSingleID(name, jagged.ids)
    return IDTypeFeature.from_flat(name, jagged.ids, jagged.lengths)


def _tensors(parts: Iterable[NdarrayDataBase]) -> Iterable[torch.Tensor]:
    return (torch.from_numpy(part.data) for part in parts)


def _arrays(
    kind: type[D], tensors: Sequence[torch.Tensor], names: Sequence[str] | None
) -> list[D]:
    if names is not None and len(names) != len(tensors):
        raise BatchError(
            f"Every {kind.KIND} must have a name, or none of them. "
            f"Received: {len(names)} names for {len(tensors)}."
        )
    return [
        kind(_array(tensor, kind.KIND), None if names is None else names[position])
        for position, tensor in enumerate(tensors)
    ]


def _array(tensor: torch.Tensor, kind: str) -> npt.NDArray[np.generic]:
    if tensor.dtype == torch.bfloat16:  # the one that NumPy does not know
        raise BatchError(
            f"A {kind} cannot be of bfloat16. Received: a tensor of it. Use "
            "tensor.float()."
        )
    return tensor.detach().cpu().numpy()


def _to(
    tensors: Sequence[torch.Tensor], device: torch.device, non_blocking: bool
) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(device, non_blocking=non_blocking) for tensor in tensors)
