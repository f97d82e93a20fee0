"""What ``POST /predict`` takes: ``PersiaBatch.to_bytes()``, or its features as JSON.

    {"id_type_features": {"item": [[7, 8], []], "user": [[3], [4]]},
     "non_id_type_features": [[[0.5, 1.0], [0.0, 2.0]]]}

An ID feature has a list of ids, integers in ``[0, 2**64)``, for each sample; a dense
one, which may be left out, a number or a list of numbers, float32 to the model. Dense
features are a list, in the model's order, or an object by name. The order of an
object's keys means nothing.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

import msgspec
import numpy as np

from persia_torchrec.checkpoint.signature import distinct_names
from persia_torchrec.errors import BatchError
from persia_torchrec.parsing.decoding import KeyPath, convert, shown
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia_torchrec.serving.batching import Features


def features_of(batch: PersiaBatch) -> Features:
    """Return the features of a batch, without copies."""
    dense = batch.non_id_type_features
    names = distinct_names([feature.name for feature in dense])
    arrays = [feature.data for feature in dense]
    by_name = dict(zip(names, arrays, strict=True))
    return Features(batch.bags(), by_name, batch.batch_size)


def parse_json_batch(data: bytes) -> PersiaBatch:
    """Read a batch from JSON as at the head of this file, or raise BatchError."""
    try:
        value = json.loads(data, object_pairs_hook=_build_object)
    except (ValueError, RecursionError) as exc:
        raise BatchError(f"A batch must be JSON in UTF-8 ({exc}).") from exc
    batch = convert(value, _JsonBatch, KeyPath("A batch"), BatchError)
    return PersiaBatch(
        [_read_ids(name, ids) for name, ids in batch.id_type_features.items()],
        _read_all_dense(batch.non_id_type_features),
        requires_grad=False,
    )


class _JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    id_type_features: dict[str, object]
    non_id_type_features: list[object] | dict[str, object] = []


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object of JSON; reject duplicate keys."""
    value = dict(pairs)
    if len(value) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"each key must be given once. Received: {key!r} twice")
    return value


def _read_ids(name: str, value: object) -> IDTypeFeature:
    feature = f"Id type feature {name!r}"
    samples = convert(value, list[list[int]], KeyPath(feature), BatchError)
    try:
        flat = np.array([*chain.from_iterable(samples)], dtype=np.uint64)
    except OverflowError as exc:
        raise BatchError(
            f"{feature} must have ids in [0, 2**64). Received: {shown(value)}."
        ) from exc
    lengths = np.fromiter(map(len, samples), np.int32, len(samples))
    return IDTypeFeature.from_flat(name, flat, lengths)


def _read_all_dense(
    values: list[object] | dict[str, object],
) -> list[NonIDTypeFeature]:
    if isinstance(values, dict):
        return [_read_dense(repr(name), value, name) for name, value in values.items()]
    each = enumerate(values)
    return [_read_dense(str(n), value, f"number {n}") for n, value in each]


def _read_dense(which: str, value: object, feature: str) -> NonIDTypeFeature:
    name = f"Non-id type feature {which}"
    samples = convert(value, list[float | list[float]], KeyPath(name), BatchError)
    try:
        with np.errstate(over="raise"):
            array = np.array(samples, dtype=np.float32)
    except (ValueError, FloatingPointError) as exc:
        raise BatchError(
            f"{name} must have a number of float32, or a list of as many numbers, for "
            f"each sample. Received: {shown(value)}."
        ) from exc
    return NonIDTypeFeature(array, feature)


DECODERS: Mapping[str, Callable[[bytes], Features]] = {
    "application/octet-stream": lambda body: features_of(PersiaBatch.from_bytes(body)),
    "application/json": lambda body: features_of(parse_json_batch(body)),
}
"""By Content-Type, what reads the body of a request."""
