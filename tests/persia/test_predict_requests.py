"""Batches as JSON."""

import json

import numpy as np
import pytest

from persia_torchrec.errors import BatchError
from persia_torchrec.persia.predict_requests import parse_json_batch


def test_ids_and_dense_features_are_read():
    value = {
        "id_type_features": {"item": [[7, 2**64 - 1], []], "user": [[3], [4]]},
        "non_id_type_features": [[[0.5, 1], [0, 2]], [1, 2.5]],
    }
    batch = parse_json_batch(json.dumps(value).encode())
    item, user = batch.id_type_features  # in the order of the text
    assert (item.name, item.ids.tolist()) == ("item", [7, 2**64 - 1])
    assert (user.name, user.lengths.tolist()) == ("user", [1, 1])
    matrix, column = (feature.data for feature in batch.non_id_type_features)
    np.testing.assert_array_equal(matrix, np.float32([[0.5, 1], [0, 2]]))
    np.testing.assert_array_equal(column, np.float32([1, 2.5]))
    assert matrix.dtype == column.dtype == np.float32
    assert not batch.requires_grad
    assert batch.labels == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "must be JSON in UTF-8"),
        (b"\xff", "must be JSON in UTF-8"),
        (b"[" * 100_000, "must be JSON in UTF-8"),
        (
            b'{"id_type_features": {"a": [[1]], "a": [[2]]}}',
            "once.*Received: 'a' t",
        ),
        (b"[]", r"A batch must be a mapping. Received: \[\]"),
        (b'{"id_type_features": {}, "ids": {}}', "A batch: ids is unknown"),
        (b"{}", "A batch must have the key 'id_type_features'"),
        (b'{"id_type_features": {}}', "at least one id type feature"),
        (b'{"id_type_features": {"a": 5}}', "'a' must be a list. Received: 5"),
        (
            b'{"id_type_features": {"a": [5]}}',
            r"'a': \[0\] must be a list. Received: 5",
        ),
        (
            b'{"id_type_features": {"a": [[-1]]}}',
            r"'a' must have ids in \[0, 2\*\*64\)",
        ),
        (
            b'{"id_type_features": {"a": [[1.0]]}}',
            r"'a': \[0\]\[0\] must be an integer",
        ),
        (b'{"id_type_features": {"a": [[true]]}}', r"\[0\]\[0\] must be an integer"),
        (
            b'{"id_type_features": {"a": [[18446744073709551616]]}}',
            r"'a' must have ids in \[0, 2\*\*64\). Received: \[\[18446744073709551616",
        ),
        (
            b'{"id_type_features": {"a": [[1]]}, "non_id_type_features": [["x"]]}',
            r"feature 0: \[0\] must be a number or a list. Received: 'x'",
        ),
        (
            b'{"id_type_features": {"a": [[1]]}, "non_id_type_features": [3]}',
            "feature 0 must be a list. Received: 3",
        ),
        (
            b'{"id_type_features": {"a": [[1]]}, "non_id_type_features": '
            b"[[[1], [1, 2]]]}",
            "feature 0 must have a number",
        ),
        (
            b'{"id_type_features": {"a": [[1]]}, "non_id_type_features": [[1, 2]]}',
            "must have its 1 samples",
        ),
    ],
)
def test_an_invalid_batch_is_rejected(text, message):
    with pytest.raises(BatchError, match=message):
        parse_json_batch(text)
