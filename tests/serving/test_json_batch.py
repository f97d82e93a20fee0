"""Batches as JSON."""

import json

import numpy as np
import pytest

from persia_torchrec.errors import BatchError
from persia_torchrec.serving.json_batch import batch_of_json


def test_ids_and_dense_features_are_read():
    value = {
        "id_type_features": {"item": [[7, 2**64 - 1], []], "user": [[3], [4]]},
        "non_id_type_features": [[[0.5, 1], [0, 2]], [1, 2.5]],
    }
    batch = batch_of_json(json.dumps(value).encode())
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
        (b'{"id_type_features": {"a": [[1]], "a": [[2]]}}', "once.*Received: 'a' twi"),
        (b"[]", "must be a JSON object with the keys"),
        (b'{"ids": {}}', "must be a JSON object with the keys"),
        (b"{}", "must be an object of features"),
        (b'{"id_type_features": {}}', "at least one id type feature"),
        (b'{"id_type_features": {"a": 5}}', "'a' must have a list of ids"),
        (b'{"id_type_features": {"a": [5]}}', "'a' must have a list of ids"),
        (b'{"id_type_features": {"a": [[-1]]}}', "'a' must have a list of ids"),
        (b'{"id_type_features": {"a": [[1.0]]}}', "'a' must have a list of ids"),
        (b'{"id_type_features": {"a": [[true]]}}', "'a' must have a list of ids"),
        (
            b'{"id_type_features": {"a": [[18446744073709551616]]}}',
            "'a' must have a list of ids",
        ),
        (
            b'{"id_type_features": {"a": [[1]]}, "non_id_type_features": [["x"]]}',
            "feature 0 must have a number",
        ),
        (
            b'{"id_type_features": {"a": [[1]]}, "non_id_type_features": [3]}',
            "feature 0 must have a number",
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
def test_what_is_no_batch_is_refused(text, message):
    with pytest.raises(BatchError, match=message):
        batch_of_json(text)
