"""Ids between PERSIA's world and TorchRec's.

PERSIA's ids are uint64, torch's int64; they are the same 64 bits, viewed the one way or
the other and never converted by value: the id 2**64 - 1 is -1 on torch's side.

A ``KeyedJaggedTensor`` holds the ids of all features of a batch: the values of the
first feature, then of the second, and the lengths of all bags in the same order.

Dimension key:
    B: samples
    F: features
    L: ids of all features
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from persia_torchrec.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID
from persia_torchrec.errors import BatchError

JaggedIds = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]
"""Ids of one feature, uint64 ``(L,)``, and how many each sample has, int32 ``(B,)``."""


def to_keyed_jagged_tensor(
    features: Sequence[IDTypeFeature | IDTypeFeatureWithSingleID],
) -> KeyedJaggedTensor:
    """Join the ID features of a batch.

    Args:
        features: at least one, all of the same number of samples.

    Returns:
        int64 values and int32 lengths on the CPU, with the features' names as keys.

    Example:
        >>> ids = [np.array([7, 8], dtype=np.uint64), np.array([], dtype=np.uint64)]
        >>> kjt = to_keyed_jagged_tensor([IDTypeFeature("ads", ids)])
        >>> kjt.keys(), kjt.values().tolist(), kjt.lengths().tolist()
        (['ads'], [7, 8], [2, 0])
    """
    ids = np.concatenate([feature.ids for feature in features])
    lengths = np.concatenate([feature.lengths for feature in features])
    return KeyedJaggedTensor(
        keys=[feature.name for feature in features],
        values=torch.from_numpy(ids.view(np.int64)),
        lengths=torch.from_numpy(lengths),
    )


def to_jagged_ids(kjt: KeyedJaggedTensor, keys: Iterable[str]) -> dict[str, JaggedIds]:
    """Take the ids of some features out of a ``KeyedJaggedTensor``.

    Args:
        kjt: int64 values on any device; unweighted values are all that is read.
        keys: the features wanted; others are left out.

    Returns:
        For each key its ids and lengths. The ids are views of the tensor where it is
        on the CPU; the lengths, which the backward pass needs again, are copies.

    Raises:
        BatchError: a key is missing, the values are not int64, the features have
            different numbers of samples, or the lengths do not sum up to the number of
            ids.
    """
    values = kjt.values()
    if values.dtype != torch.int64:
        raise BatchError(
            "A KeyedJaggedTensor's ids must be int64, the same 64 bits as PERSIA's "
            f"uint64. Received: {values.dtype}. Use values.long()."
        )
    if kjt.variable_stride_per_key():
        raise BatchError(
            "All features of a KeyedJaggedTensor must have the same number of samples. "
            f"Received: {dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))}."
        )
    ids_L = values.detach().cpu().numpy().view(np.uint64)
    lengths_FB = kjt.lengths().detach().to("cpu", torch.int32, copy=True)
    lengths = lengths_FB.reshape(len(kjt.keys()), kjt.stride()).numpy()
    stops = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    total = int(lengths.sum(dtype=np.int64))
    if total != len(ids_L):
        raise BatchError(
            "A KeyedJaggedTensor's lengths must sum up to the number of ids, "
            f"{len(ids_L)}. Received: a sum of {total}."
        )
    place = {key: f for f, key in enumerate(kjt.keys())}
    features = {}
    for key in keys:
        if key not in place:
            raise BatchError(
                f"The batch must have the feature {key!r}. Received: {kjt.keys()}."
            )
        f = place[key]
        start = 0 if f == 0 else stops[f - 1]
        features[key] = (ids_L[start : stops[f]], lengths[f])
    return features
