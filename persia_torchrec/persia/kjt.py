"""PERSIA's batches as TorchRec's, and back.

    PersiaBatch               TorchRecBatch        Batch of torchrec.datasets.utils
    id_type_features     ->   id_features          sparse_features
    non_id_type_features ->   dense_features       dense_features
    labels               ->   labels               labels
                              a tensor each        one tensor, columns side by side

Ids are a ``KeyedJaggedTensor``, its keys in the order of the features. PERSIA's ids are
uint64, torch's int64: the same 64 bits, so that the id 2**64 - 1 is -1 on torch's side.
The tensors share the arrays' memory where they can.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from persia_torchrec.device.batches import (
    HostKeyedJaggedTensor,
    LoadedBatch,
    TorchRecBatch,
    copy_batch,
    to_jagged_ids,
)
from persia_torchrec.device.transfer import uses_gpu
from persia_torchrec.errors import BatchError
from persia_torchrec.persia import batch as persia_batch
from persia_torchrec.persia.batch import IDTypeFeature, PersiaBatch, ReferencedBatch

D = TypeVar("D", bound=persia_batch.NdarrayDataBase)


def to_torchrec(batch: PersiaBatch) -> TorchRecBatch:
    """Return a batch as tensors on the CPU, which share its arrays' memory.

    Args:
        batch: any; its arrays are kept, not changed.

    Returns:
        ``id_features``: int64 values ``(L,)``, the same 64 bits, and int32 lengths
        ``(F * B,)``; a tensor for each dense feature and label, with shape and dtype
        of its array.

    Example:
        >>> ids = np.array([7, 2**64 - 1], dtype=np.uint64)
        >>> features = [persia_batch.IDTypeFeatureWithSingleID("ads", ids)]
        >>> tensors = to_torchrec(PersiaBatch(features, requires_grad=False))
        >>> tensors.id_features["ads"].values().tolist()
        [7, -1]
    """
    dense = batch.non_id_type_features
    return TorchRecBatch(
        id_features=to_kjt(batch),
        dense_features=tuple(map(_tensor, dense)),
        labels=tuple(map(_tensor, batch.labels)),
        dense_names=tuple(feature.name for feature in dense),
        label_names=tuple(label.name for label in batch.labels),
        requires_grad=batch.requires_grad,
        meta=batch.meta,
        batch_id=batch.batch_id,
    )


def to_kjt(batch: PersiaBatch | ReferencedBatch) -> KeyedJaggedTensor:
    """Return the ids of a batch, its features in their order."""
    features = batch.id_type_features
    ids = np.concatenate([feature.ids for feature in features])
    lengths = np.concatenate([feature.lengths for feature in features])
    return KeyedJaggedTensor(
        keys=[feature.name for feature in features],
        values=torch.from_numpy(ids.view(np.int64)),
        lengths=torch.from_numpy(lengths),
    )


def to_batch(
    batch: PersiaBatch | ReferencedBatch | Batch | TorchRecBatch,
    device: torch.device | None = None,
    *,
    ids_on_host: bool = False,
) -> Batch:
    """Return a batch as TorchRec's ``Batch``; see ``DataLoader(as_torchrec=True)``.

    Raises:
        BatchError: dense features, or labels, are several that do not fit into one
            tensor.
    """
    loaded = batch if isinstance(batch, Batch) else _to_loaded(to_persia(batch))
    if ids_on_host:
        loaded = copy.copy(loaded)  # a Batch is the user's
        loaded.sparse_features = HostKeyedJaggedTensor.of(loaded.sparse_features)
    if uses_gpu() or (device is not None and device.type == "cuda"):
        loaded = loaded.pin_memory()
    return loaded if device is None else loaded.to(device, non_blocking=True)


def _to_loaded(batch: PersiaBatch | ReferencedBatch) -> LoadedBatch:
    dense = list(map(_tensor, batch.non_id_type_features))
    return LoadedBatch(
        dense_features=join_columns(dense, batch.batch_size, "dense features"),
        sparse_features=to_kjt(batch),
        labels=join_columns(list(map(_tensor, batch.labels)), batch.batch_size),
        requires_grad=batch.requires_grad,
        meta=batch.meta,
        batch_id=batch.batch_id,
        loader=batch.loader if isinstance(batch, ReferencedBatch) else None,
    )


def join_columns(
    tensors: Sequence[torch.Tensor], num_samples: int, what: str = "labels"
) -> torch.Tensor:
    """Return one tensor: the only one as it is; several side by side, ``(B, C)``.

    Several are ``(B,)`` or ``(B, C)``, of one dtype. None are float32 ``(B, 0)``.
    """
    if not tensors:
        return torch.empty(num_samples, 0, device="cpu")
    if len(tensors) == 1:
        return tensors[0]
    if len({t.dtype for t in tensors}) > 1 or any(t.dim() > 2 for t in tensors):
        raise BatchError(
            f"TorchRec's Batch has one tensor of {what}: several must be (B,) or "
            "(B, C), of one dtype, to stand side by side. Received: "
            f"{[(str(t.dtype), tuple(t.shape)) for t in tensors]}. Send them as one "
            "array, or use to_torchrec(batch), which keeps a tensor for each."
        )
    return torch.cat([t.reshape(num_samples, -1) for t in tensors], dim=1)


def from_torchrec(batch: TorchRecBatch | Batch) -> PersiaBatch:
    """Return tensors as a batch.

    A feature with one id in every sample becomes an ``IDTypeFeatureWithSingleID``,
    which means the same. Tensors on the CPU are not copied.

    Args:
        batch: of this package's datasets, or any ``torchrec.datasets.utils.Batch``,
            whose dense features and labels become one of each. It is for training
            unless its ``requires_grad`` says otherwise.

    Raises:
        BatchError: the ids have weights, a dtype is none of a ``PersiaBatch``'s, or the
            batch is a part of one.
    """
    if isinstance(batch, Batch):
        batch = _with_tuples(batch)
    kjt = batch.id_features
    if batch.fraction != 1.0:
        raise BatchError(
            "A PersiaBatch is a step of its own. Received: a part of one, with the "
            f"fraction {batch.fraction}. Leave micro_batches out."
        )
    if kjt.weights_or_none() is not None:
        raise BatchError(
            "The ids of a PersiaBatch have no weights. Received: a KeyedJaggedTensor "
            "with weights. Give it without, or to TorchRec's modules."
        )
    features: list[persia_batch.IDFeature] = [
        persia_batch.IDTypeFeatureWithSingleID(name, bags.ids)
        if (bags.lengths == 1).all()
        else IDTypeFeature.from_flat(name, bags.ids, bags.lengths)
        for name, bags in to_jagged_ids(kjt, kjt.keys()).items()
    ]
    result = PersiaBatch(
        features,
        _arrays(persia_batch.NonIDTypeFeature, batch.dense_features, batch.dense_names),
        _arrays(persia_batch.Label, batch.labels, batch.label_names),
        requires_grad=batch.requires_grad,
        meta=batch.meta,
    )
    result.batch_id = batch.batch_id
    return result


def to_persia(batch: Any) -> PersiaBatch | ReferencedBatch:
    """Return a batch of any kind as PERSIA's; BatchError if it is none."""
    if isinstance(batch, PersiaBatch | ReferencedBatch):
        return batch
    if isinstance(batch, TorchRecBatch | Batch):
        return from_torchrec(batch)
    raise BatchError(
        "A batch must be a PersiaBatch, or TorchRec's, as a Batch of "
        f"torchrec.datasets.utils. Received: {persia_batch.describe(batch)}."
    )


def own(batch: Any) -> Any:
    """Return a batch of any kind with memory of its own: its maker may use its again.

    What is no batch is returned as it is.
    """
    if isinstance(batch, PersiaBatch):
        return batch.copy()
    return copy_batch(batch) if isinstance(batch, TorchRecBatch | Batch) else batch


def _with_tuples(batch: Batch) -> TorchRecBatch:
    """Return TorchRec's ``Batch`` in our form; empty tensors stand for none."""
    dense, labels = batch.dense_features, batch.labels
    return TorchRecBatch(
        id_features=batch.sparse_features,
        dense_features=(dense,) if dense.numel() else (),
        labels=(labels,) if labels.numel() else (),
        requires_grad=getattr(batch, "requires_grad", True),
        meta=getattr(batch, "meta", None),
        batch_id=getattr(batch, "batch_id", None),
    )


def _tensor(part: persia_batch.NdarrayDataBase) -> torch.Tensor:
    return torch.from_numpy(part.data)


def _arrays(
    kind: type[D], tensors: Sequence[torch.Tensor], names: Sequence[str] | None
) -> list[D]:
    if names is not None and len(names) != len(tensors):
        raise BatchError(
            f"Every {kind.KIND} must have a name, or none of them. "
            f"Received: {len(names)} names for {len(tensors)}."
        )
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):  # not in NumPy
        raise BatchError(
            f"A {kind.KIND} cannot be of bfloat16, as is one here. Use tensor.float()."
        )
    named: Sequence[str | None] = [None] * len(tensors) if names is None else names
    arrays = (tensor.detach().cpu().numpy() for tensor in tensors)
    return [kind(array, name) for array, name in zip(arrays, named, strict=True)]
