import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import FrameError
from persia_torchrec.persia.batch import (
    WITH_BATCH,
    NdarrayDataBase,
    Origin,
    PersiaBatch,
    decode_rest,
    decode_whole,
    encode_rest,
)
from tests.support.batches import content, small_batch
from tests.support.strategies import batches

VERSION_1 = Path(__file__).parent / "batch_v1.bin"


def with_header(change):
    """Return the bytes of the small batch after a change to its header."""
    data = small_batch().to_bytes()
    magic, version, size = struct.unpack_from("<4sIQ", data)
    header = json.loads(data[16 : 16 + size])
    change(header)
    text = json.dumps(header).encode()
    body = data[16 + size + -size % 8 :]
    frame = struct.pack("<4sIQ", magic, version, len(text))
    return frame + text + bytes(-len(text) % 8) + body


@given(batches())
def test_a_batch_comes_back_as_it_was(batch):
    data = batch.to_bytes()
    again = PersiaBatch.from_bytes(data)
    assert content(again) == content(batch)
    assert again.to_bytes() == data


@given(batches())
def test_equal_batches_give_equal_bytes(batch):
    twin = PersiaBatch(
        list(batch.id_type_features),
        list(batch.non_id_type_features),
        list(batch.labels),
        batch_size=np.int64(batch.batch_size),
        requires_grad=np.bool_(batch.requires_grad),
        meta=batch.meta,
    )
    twin.batch_id = batch.batch_id
    assert twin.to_bytes() == batch.to_bytes()


def test_the_first_version_of_the_format_is_still_read_and_written():
    data = VERSION_1.read_bytes()
    assert content(PersiaBatch.from_bytes(data)) == content(small_batch())
    assert small_batch().to_bytes() == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_reading_copies_no_array(kind):
    data = kind(small_batch().to_bytes())
    memory = np.frombuffer(data, dtype=np.uint8)
    batch = PersiaBatch.from_bytes(data)
    for array in (
        batch.id_type_features[0].ids,
        batch.id_type_features[0].lengths,
        batch.id_type_features[1].ids,
        batch.non_id_type_features[0].data,
        batch.labels[0].data,
    ):
        assert np.shares_memory(array, memory)
        assert array.flags.aligned


def test_bytes_that_are_cut_off_anywhere_are_rejected():
    data = small_batch().to_bytes()
    for size in range(len(data)):
        with pytest.raises(FrameError, match="must not end within"):
            PersiaBatch.from_bytes(data[:size])


def test_bytes_beyond_the_end_are_rejected():
    data = small_batch().to_bytes()
    with pytest.raises(FrameError, match=f"must end with it, after {len(data)}"):
        PersiaBatch.from_bytes(data + bytes(8))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (4, 2, r"of version 1\. Received: 2\."),
        (-1, 1, "padding of meta must be zeros"),
    ],
)
def test_another_version_and_other_padding_are_rejected(place, value, message):
    data = bytearray(small_batch().to_bytes())
    data[place] = value
    with pytest.raises(FrameError, match=message):
        PersiaBatch.from_bytes(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(data):
    with pytest.raises(FrameError):
        PersiaBatch.from_bytes(data)


@given(st.binary(max_size=200))
def test_random_bytes_behind_a_frame_are_rejected(data):
    with pytest.raises(FrameError):
        PersiaBatch.from_bytes(struct.pack("<4sIQ", b"PTRB", 1, len(data)) + data)


@given(st.data())
def test_a_changed_byte_is_rejected_or_gives_a_valid_batch(data):
    changed = bytearray(small_batch().to_bytes())
    position = data.draw(st.integers(0, len(changed) - 1))
    changed[position] = data.draw(st.integers(0, 255))
    try:
        batch = PersiaBatch.from_bytes(changed)
    except FrameError:
        return
    assert content(PersiaBatch.from_bytes(batch.to_bytes())) == content(batch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"\xff\xfe\xff", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"1" * 10_000, "must be JSON"),
        (b"[]", "header of a batch must be a mapping"),
        (b"{}", "header of a batch must have the key 'batch_id'"),
    ],
)
def test_a_header_that_is_no_object_of_json_is_rejected(text, message):
    data = struct.pack("<4sIQ", b"PTRB", 1, len(text)) + text + bytes(-len(text) % 8)
    with pytest.raises(FrameError, match=message):
        PersiaBatch.from_bytes(data)


def test_a_header_that_claims_more_bytes_than_there_are_is_rejected():
    data = struct.pack("<4sIQ", b"PTRB", 1, 2**64 - 1) + b"{}"
    with pytest.raises(FrameError, match="must not end within the header"):
        PersiaBatch.from_bytes(data)


NESTED = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("ids", "num_ids", 10**9, "must not end within id type feature 'basket'"),
        ("ids", "num_ids", 10**30, "num_ids must be <= "),
        ("ids", "num_ids", -1, "num_ids must be >= 0. Received: -1"),
        ("ids", "num_ids", True, "num_ids must be an integer. Received: True"),
        ("ids", "num_ids", 2.0, "num_ids must be an integer. Received: 2.0"),
        ("ids", "num_ids", NESTED, "num_ids must be an integer"),
        ("ids", "single_id", 1, "single_id must be true or false"),
        ("ids", "single_id", True, "padding of 'clicked' must be zeros"),
        ("ids", "name", None, "name must be a string. Received: None"),
        ("ids", "name", "", "must have a name, a string that is not empty"),
        ("ids", "name", "user", "must differ. Received: id type feature 'user' twice"),
        ("dense", "dtype", "object", "dtype of 'height' must be one of bool, int8"),
        ("dense", "shape", [2, 10**15], "must not end within 'height'"),
        ("dense", "shape", [2**62, 2**62, 0], "must have a shape for NumPy"),
        ("dense", "shape", [0] * 100, "must have a shape for NumPy"),
        ("dense", "shape", [2, -1], "must be >= 0. Received: -1"),
        ("dense", "shape", [NESTED], "must be an integer"),
        ("dense", "shape", 2, "shape must be a list"),
        ("dense", "shape", [], "padding of 'height' must be zeros"),
        ("dense", "shape", [1, 2], "Received: 1 in non-id type feature 'height'"),
        (None, "ids", None, "ids must be a list"),
        (None, "ids", [1], "must be a mapping. Received: 1"),
        (None, "batch_size", -1, "batch_size must be >= 0"),
        (None, "batch_size", "2", "batch_size must be an integer. Received: '2'"),
        (None, "batch_id", -1, "batch_id must be >= 0"),
        (None, "meta_bytes", 9, "must not end within meta"),
        (None, "meta_bytes", None, "must end with it"),
        (None, "requires_grad", "yes", "requires_grad must be true or false"),
    ],
)
def test_a_header_that_does_not_fit_is_rejected(part, key, value, message):
    def change(header):
        (header if part is None else header[part][0])[key] = value

    with pytest.raises(FrameError, match=message):
        PersiaBatch.from_bytes(with_header(change))


def test_lengths_that_do_not_sum_up_are_rejected():
    data = small_batch().to_bytes()
    ids, lengths = b"\xff" * 8, np.array([2, 0], dtype="<i4").tobytes()
    assert data.count(ids + lengths) == 1
    negative = np.array([3, -1], dtype="<i4").tobytes()
    wrong = data.replace(ids + lengths, ids + negative)
    with pytest.raises(FrameError, match="lengths must be >= 0 and sum up"):
        PersiaBatch.from_bytes(wrong)


def test_booleans_other_than_0_and_1_are_rejected():
    data = small_batch().to_bytes()
    clicked = b"\x01\x00" + bytes(6) + b"day 3"
    assert data.count(clicked) == 1
    with pytest.raises(FrameError, match="booleans of 'clicked' must be 0 or 1"):
        PersiaBatch.from_bytes(data.replace(clicked, b"\x02" + clicked[1:]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (small_batch().to_bytes(), "rest of a batch must be without ids"),
        (with_header(lambda header: header["dense"][0].update(name="")), "valid one"),
    ],
)
def test_bytes_that_are_not_the_rest_of_a_batch_are_rejected(data, message):
    with pytest.raises(FrameError, match=message):
        decode_rest(data, Origin(0, 1, 0))


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_array_of_a_received_batch_holds_no_other(is_whole):
    origin = Origin(0, 1, WITH_BATCH)
    if is_whole:
        batch = decode_whole(small_batch().to_bytes(), origin)
    else:
        batch = decode_rest(encode_rest(small_batch()), origin)
    for part in (*batch.non_id_type_features, *batch.labels, *batch.id_type_features):
        array = part.data if is_dense(part) else part.ids
        base = array if array.base is None else array.base
        assert (base.base, base.nbytes) == (None, array.nbytes)
        assert array.flags.writeable


def is_dense(part):
    return isinstance(part, NdarrayDataBase)
