import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import BatchError, FrameError
from persia_torchrec.lookup.bags import Bags, check_bags, decode_bags, encode_bags
from tests.support.strategies import ids


def bags_of(*samples):
    """Return the bags of samples, each a list of ids."""
    flat = [id_ for sample in samples for id_ in sample]
    lengths = [len(sample) for sample in samples]
    return Bags(np.array(flat, dtype=np.uint64), np.array(lengths, dtype=np.int32))


def batches_of(num_samples):
    bag = st.lists(ids, max_size=4)
    samples = st.lists(bag, min_size=num_samples, max_size=num_samples)
    bags = samples.map(lambda drawn: bags_of(*drawn))
    return st.dictionaries(st.text(max_size=5), bags, max_size=4)


batches = st.integers(0, 5).flatmap(batches_of)


def same(bags, others):
    """Return whether the features are equal, and stand in one order."""
    return [*bags] == [*others] and all(
        np.array_equal(bag.ids, others[name].ids)
        and np.array_equal(bag.lengths, others[name].lengths)
        for name, bag in bags.items()
    )


@given(batches)
def test_a_batch_comes_back_as_it_was(bags):
    assert same(decode_bags(encode_bags(bags)), bags)


@given(batches)
def test_equal_batches_give_equal_bytes(bags):
    copied = decode_bags([bytes(frame) for frame in encode_bags(bags)])
    frames = [bytes(frame) for frame in encode_bags(bags)]
    assert [bytes(frame) for frame in encode_bags(copied)] == frames


FRAMES = [bytes(frame) for frame in encode_bags({"a": bags_of([7, 8], [], [7])})]


@pytest.mark.parametrize(
    ("place", "frame", "message"),
    [
        (0, b"{", "Frame 0"),
        (0, b"\xff", "Frame 0"),
        (0, b"5", "Frame 0"),
        pytest.param(0, b"[" * 100_000, "Frame 0", id="nested too deep"),
        (0, b'[["a", 3]]', "Frame 0"),
        (0, b'[["a", "3", 3]]', "Frame 0"),
        (0, b'[["a", 1.5, 3]]', "Frame 0"),
        (0, b'[["a", 4, 3]]', "'a' is longer than what follows"),
        (0, b'[["a", 3, 4]]', "'a' is longer than what follows"),
        (0, b'[["a", -1, 3]]', "'a' is longer than what follows"),
        (0, b'[["a", 3, 3], ["a", 0, 0]]', "Duplicate feature 'a'"),
        (0, b"[]", "3 ids and 3 lengths follow the last feature"),
        (1, FRAMES[1][:-1], r"int32 must be a multiple of 4 bytes\. Received: 11"),
        (1, FRAMES[1][:-4], "'a' is longer than what follows"),
        (1, FRAMES[1] + bytes(4), "0 ids and 1 lengths follow the last feature"),
        (2, FRAMES[2][:-8], "'a' is longer than what follows"),
        (2, FRAMES[2] + bytes(8), "1 ids and 0 lengths follow the last feature"),
    ],
)
def test_invalid_frames_of_a_batch_are_rejected(place, frame, message):
    frames = list(FRAMES)
    frames[place] = frame
    with pytest.raises(FrameError, match=message):
        decode_bags(frames)


@pytest.mark.parametrize("num", [0, 2, 4])
def test_a_batch_has_three_frames(num):
    with pytest.raises(FrameError, match=rf"has 3 frames\. Received: {num}\."):
        decode_bags([*FRAMES, b""][:num])


def test_lengths_on_the_wire_that_do_not_sum_up_are_rejected():
    lengths = np.array([1, 0, 1], dtype=np.int32).tobytes()
    with pytest.raises(BatchError, match=r"number of ids, 3\. Received: a sum of 2"):
        decode_bags([FRAMES[0], lengths, FRAMES[2]])


@given(st.lists(st.tuples(st.text(), st.integers(), st.integers())), st.binary())
def test_random_frames_are_rejected_or_are_a_batch(shapes, data):
    frames = [json.dumps(shapes).encode(), data[::2], data[1::2]]
    try:
        bags = decode_bags(frames)
    except (FrameError, BatchError):
        return
    assert sum(len(bag.ids) for bag in bags.values()) * 8 == len(frames[2])


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        (np.array([1]), np.ones(1, np.int32), "must be a flat uint64 array. .*=int64"),
        (np.ones((1, 1), np.uint64), np.ones(1, np.int32), r"uint64 .*shape=\(1, 1\)"),
        (np.ones(1, np.uint64), np.ones(1, np.int64), "must be a flat int32 .*=int64"),
        (np.ones(1, np.uint64), np.ones((1, 1), np.int32), r"int32 .*shape=\(1, 1\)"),
        (np.ones(1, np.uint64), np.zeros(1, np.int32), "number of ids, 1. .* of 0"),
        (np.ones(1, np.uint64), np.full(1, 2, np.int32), "number of ids, 1. .* of 2"),
        (
            np.ones(1, np.uint64),
            np.array([2, -1], dtype=np.int32),
            "must not be negative",
        ),
        (
            np.ones(0, np.uint64),
            np.full(2, 2**31 - 1, np.int32),
            "number of ids, 0. Received: a sum of 4294967294",
        ),
    ],
)
def test_bags_that_do_not_fit_are_rejected_by_name(ids, lengths, message):
    with pytest.raises(BatchError, match=f"^Feature 'item': .*{message}"):
        check_bags({"item": Bags(ids, lengths)})
    with pytest.raises(BatchError, match="Feature 'item': "):
        encode_bags({"item": Bags(ids, lengths)})
