"""PERSIA's batches as TorchRec's, and back.

    PersiaBatch               TorchRecBatch
    id_type_features     ->   id_features      KeyedJaggedTensor, the same 64 bits
    non_id_type_features ->   dense_features   a tensor each, in order
    labels               ->   labels           a tensor each, in order

PERSIA's ids are uint64, torch's int64: the same 64 bits, so that the id 2**64 - 1 is -1
on torch's side. Both ways give equal batches. The tensors share the arrays' memory
where they can.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from persia_torchrec.datasets.batches import TorchRecBatch, to_jagged_ids
from persia_torchrec.errors import BatchError
from persia_torchrec.persia import batch as persia_batch
from persia_torchrec.persia.batch import IDTypeFeature, PersiaBatch

D = TypeVar("D", bound=persia_batch.NdarrayDataBase)


def to_torchrec(batch: PersiaBatch) -> TorchRecBatch:
    """Return a batch as tensors on the CPU, which share its arrays' memory.

    Example:
        >>> ids = np.array([7, 2**64 - 1], dtype=np.uint64)
        >>> features = [persia_batch.IDTypeFeatureWithSingleID("ads", ids)]
        >>> tensors = to_torchrec(PersiaBatch(features, requires_grad=False))
        >>> tensors.id_features["ads"].values().tolist()
        [7, -1]
    """
    features, dense = batch.id_type_features, batch.non_id_type_features
    ids = np.concatenate([feature.ids for feature in features])
    lengths = np.concatenate([feature.lengths for feature in features])
    return TorchRecBatch(
        id_features=KeyedJaggedTensor(
            keys=[feature.name for feature in features],
            values=torch.from_numpy(ids.view(np.int64)),
            lengths=torch.from_numpy(lengths),
        ),
        dense_features=tuple(torch.from_numpy(feature.data) for feature in dense),
        labels=tuple(torch.from_numpy(label.data) for label in batch.labels),
        dense_names=tuple(feature.name for feature in dense),
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
        BatchError: the ids have weights, a dtype is none of a ``PersiaBatch``'s, or the
            batch is a part of one.
    """
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
