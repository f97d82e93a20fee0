"""The signature of a dense model, as its file has it."""

from types import SimpleNamespace

import numpy as np
import pytest

from persia_torchrec.checkpoint.signature import ModelSignature, distinct_names
from persia_torchrec.errors import CheckpointError


def test_a_signature_is_of_its_batch_and_comes_back_from_bytes():
    dense = [
        SimpleNamespace(name="numbers", data=np.zeros((7, 5), np.float32)),
        SimpleNamespace(name="numbers", data=np.zeros((7, 2, 3), np.int64)),
    ]
    signature = ModelSignature.of(["user", "item"], dense, np.zeros((7, 1)))
    told = [(one.name, one.dtype, one.shape) for one in signature.dense]
    assert told == [("numbers", "float32", (5,)), ("numbers.1", "int64", (2, 3))]
    assert (signature.slots, signature.output) == (("user", "item"), (1,))
    assert ModelSignature.decode(signature.encode(), "m.pt") == signature
    assert ModelSignature.of([], [], (1, 2)).output is None  # no tensor


def test_names_that_come_again_are_told_apart():
    assert distinct_names(["a", "b", "a", "a"]) == ["a", "b", "a.1", "a.2"]


@pytest.mark.parametrize("data", [b"", b"{}", b'{"slots": [1], "dense": []}', b"\xff"])
def test_bytes_that_are_no_signature_are_an_error_of_the_file(data):
    with pytest.raises(CheckpointError, match=r"m\.pt must have a valid signature"):
        ModelSignature.decode(data, "m.pt")
