"""A batch as JSON, for whoever has no ``PersiaBatch``.

    {"id_type_features": {"item": [[7, 8], []], "user": [[3], [4]]},
     "non_id_type_features": [[[0.5, 1.0], [0.0, 2.0]]]}

An ID feature has a list of ids, integers in ``[0, 2**64)``, for each sample. The model
gets the embeddings in the order in which the ID features stand in the text, so it must
be the model's: write the text without sorting its keys. The dense features stand in the
model's order too; each has a number, or a list of numbers, for each sample, and comes
to the model as float32. They may be left out.
"""

import json
from collections import Counter
from typing import Any

import numpy as np

from persia_torchrec.embedding.data import IDTypeFeature, NonIDTypeFeature, PersiaBatch
from persia_torchrec.errors import BatchError

_KEYS = {"id_type_features", "non_id_type_features"}


def batch_of_json(data: bytes) -> PersiaBatch:
    """Read a batch.

    Args:
        data: UTF-8 text, as at the head of this file.

    Raises:
        BatchError: it is no such JSON, or the parts do not fit one another.

    Example:
        >>> batch = batch_of_json(b'{"id_type_features": {"item": [[7, 8], []]}}')
        >>> batch.batch_size, batch.id_type_features[0].ids.tolist()
        (2, [7, 8])
    """
    try:
        value = json.loads(data, object_pairs_hook=_object_of)
    except (ValueError, RecursionError) as exc:
        raise BatchError(f"A batch must be JSON in UTF-8 ({exc}).") from exc
    if not isinstance(value, dict) or not value.keys() <= _KEYS:
        raise BatchError(
            "A batch must be a JSON object with the keys id_type_features and "
            f"non_id_type_features. Received: {_shown(value)}."
        )
    ids, dense = value.get("id_type_features"), value.get("non_id_type_features", [])
    if not isinstance(ids, dict) or not isinstance(dense, list):
        raise BatchError(
            "id_type_features must be an object of features, and "
            f"non_id_type_features a list. Received: {_shown(ids)}, {_shown(dense)}."
        )
    return PersiaBatch(
        [_ids_of(name, samples) for name, samples in ids.items()],
        [_dense_of(number, samples) for number, samples in enumerate(dense)],
        requires_grad=False,
    )


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON in the order of the text, each key once."""
    value = dict(pairs)
    if len(value) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"each key must stand there once. Received: {twice!r} twice")
    return value


def _ids_of(name: str, samples: object) -> IDTypeFeature:
    if not isinstance(samples, list) or not all(map(_are_ids, samples)):
        raise BatchError(
            f"Id type feature {name!r} must have a list of ids, integers in "
            f"[0, 2**64), for each sample. Received: {_shown(samples)}."
        )
    return IDTypeFeature(name, [np.array(ids, dtype=np.uint64) for ids in samples])


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(
        type(number) is int and 0 <= number < 2**64 for number in ids
    )


def _dense_of(number: int, samples: object) -> NonIDTypeFeature:
    try:
        array = np.array(samples)
    except ValueError as exc:
        raise _misfit(number, samples) from exc
    if array.ndim == 0 or (array.size and array.dtype.kind not in "iuf"):
        raise _misfit(number, samples)
    return NonIDTypeFeature(array.astype(np.float32), f"number {number}")


def _misfit(number: int, samples: object) -> BatchError:
    return BatchError(
        f"Non-id type feature {number} must have a number, or a list of as many "
        f"numbers, for each sample. Received: {_shown(samples)}."
    )


def _shown(value: Any) -> str:
    return f"{value!r:.100}"
