import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia_torchrec.errors import FrameError
from persia_torchrec.rpc.float_codec import (
    decode_floats,
    encode_floats,
    num_zeroed,
    read_numbers,
    size_of,
)
from persia_torchrec.rpc.messages import Precision

floats = hnp.arrays(
    np.float32,
    st.integers(0, 30),
    elements=st.floats(width=32)
    # Around every rounding to 16 bits: the upper half and a few values of the lower.
    | st.tuples(
        st.integers(0, 2**16 - 1),
        st.sampled_from([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
    ).map(lambda halves: np.uint32(halves[0] << 16 | halves[1]).view(np.float32)),
)

HALVES = [Precision.FP16, Precision.BF16]
EDGES_OF_LOW_HALVES = [
    *(0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001),
    *(0xE000, 0xEFFF, 0xF000, 0xF001, 0xFFFF),
]


def frame_size(num, precision):
    """Return the bytes of one row."""
    return {"FP32": 4 * num, "FP16": 5 + 2 * num, "BF16": 2 * num}[precision.name]


def there_and_back(values, precision):
    frame = encode_floats(values, precision)
    assert len(frame) == frame_size(len(values), precision)
    back = decode_floats(frame, [values.shape], precision)
    assert back.dtype == np.float32
    return back


@given(floats)
def test_float32_travels_bit_for_bit(values):
    assert there_and_back(values, Precision.FP32).tobytes() == values.tobytes()


@given(floats)
def test_bfloat16_is_rounded_as_torch_rounds_it(values):
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(there_and_back(values, Precision.BF16), expected)


def exponent_of(values):
    """Return what brings the largest finite magnitude, as a half, to [2**15, 2**16)."""
    sizes = np.abs(values[np.isfinite(values)])
    largest = max(sizes.tolist(), default=0)
    if not largest:
        return 126
    mantissa, power = math.frexp(largest)
    return min(16 - power - (mantissa >= 1 - 2**-12), 126)


def scaled(values):
    """Return values as halves that are scaled, and the scale."""
    exponent = exponent_of(values)
    products = np.ldexp(values.astype(np.float64), exponent)
    return products.astype(np.float16), exponent


@given(floats)
@example(np.array([1.9996 * 2.0**127, 1.0], dtype=np.float32))  # an infinity then
def test_float16_is_rounded_as_numpy_rounds_it_at_the_best_scale(values):
    halves, exponent = scaled(values)
    with np.errstate(over="ignore"):
        expected = np.ldexp(halves.astype(np.float64), -exponent).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(values, Precision.FP16), expected)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=4), st.data()
)
def test_each_row_of_float16_is_scaled_by_itself(shapes, data):
    rows = [
        data.draw(hnp.arrays(np.float32, width, elements=st.floats(width=32)))
        for num, width in shapes
        for _ in range(num)
    ]
    values = np.concatenate([np.empty(0, np.float32), *rows])
    frame = encode_floats(values, Precision.FP16, shapes)
    assert len(frame) == size_of(shapes, Precision.FP16)
    back = decode_floats(frame, shapes, Precision.FP16)
    alone = [there_and_back(row, Precision.FP16) for row in rows]
    np.testing.assert_array_equal(back, np.concatenate([back[:0], *alone]))
    assert num_zeroed(frame, Precision.FP16) == np.sum((back == 0) & (values != 0))


def test_a_huge_row_leaves_the_others_as_they_are():
    values = np.array([[1e14, -1e14], [1.0, 3e-6], [0.0, -2.5]], dtype=np.float32)
    frame = encode_floats(values, Precision.FP16)
    back = decode_floats(frame, [values.shape], Precision.FP16)
    np.testing.assert_allclose(back, values.reshape(-1), rtol=2**-11)
    assert num_zeroed(frame, Precision.FP16) == 0


def test_numbers_that_become_zero_are_counted():
    values = np.array([[1.0, 2**-41, 2**-42, 0.0], [0.0] * 4], dtype=np.float32)
    frame = encode_floats(values, Precision.FP16)
    back = decode_floats(frame, [values.shape], Precision.FP16)
    assert back.tolist() == [1.0, 0.0, 0.0, 0.0] + 4 * [0.0]
    assert num_zeroed(frame, Precision.FP16) == 2


def test_a_scale_for_each_row_takes_few_bytes():
    assert size_of([(10_000, 16)], Precision.FP16) <= 1.04 * (2 * 160_000 + 2)


@given(
    st.integers(-80, 110),
    hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-1, 1, width=16)),
)
def test_float16_is_as_exact_for_small_numbers_as_for_large_ones(exponent, values):
    """Down to 2**-29 of the largest number, 11 bits of each are kept."""
    values = np.ldexp(values, exponent).astype(np.float32)
    back = there_and_back(values, Precision.FP16)
    bound = np.maximum(np.abs(values) * 2.0**-11, np.abs(values).max() * 2.0**-40)
    assert (np.abs(back - values) <= bound).all()


def test_a_gradient_beyond_the_range_of_float16_travels_scaled():
    values = np.array([3e-12, -1.25e-9, 0, 7e-17], dtype=np.float32)
    back = there_and_back(values, Precision.FP16)
    assert not values.astype(np.float16).any()
    np.testing.assert_allclose(back, values, rtol=2**-11)


def test_rows_that_are_stored_as_halves_travel_in_float16_exactly():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = halves[np.isfinite(halves)].astype(np.float32)
    assert np.array_equal(there_and_back(values, Precision.FP16), values)


def in_brain_floats(values):
    """Return the 16 bits of each float32, in NumPy's words."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


@pytest.mark.parametrize("precision", HALVES)
def test_halves_are_numpys_bit_for_bit(precision):
    rng = np.random.default_rng(0)
    # Every exponent and sign with many mantissas, so every rounding and both ends.
    high = np.repeat(np.arange(2**16, dtype=np.uint32), 16) << np.uint32(16)
    low = rng.choice(EDGES_OF_LOW_HALVES, len(high)).astype(np.uint32)
    values = (high | low).view(np.float32)
    values = values[~np.isnan(values)]
    if precision is Precision.FP16:
        values = values[np.abs(values) < 65520]
        halves, exponent = scaled(values)
        assert exponent == 0
        expected = halves.view(np.uint16)
    else:
        expected = in_brain_floats(values)
    numbers, exponents = read_numbers(
        encode_floats(values, precision), [values.shape], precision
    )
    np.testing.assert_array_equal(numbers, expected)
    assert exponents.tolist() == [0] * (precision is Precision.FP16)


@pytest.mark.parametrize("exponent", [0, 1, -9, 126, -126])
def test_every_half_is_read_as_numpy_reads_it(exponent):
    halves = np.arange(2**16, dtype=np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.ldexp(halves.view(np.float16).astype(np.float32), -exponent)
    frame = bytes(4) + halves.tobytes() + struct.pack("<b", exponent)
    read = decode_floats(frame, [halves.shape], Precision.FP16)
    assert np.array_equal(np.isnan(read), np.isnan(expected))
    is_number = ~np.isnan(expected)
    assert read[is_number].tobytes() == expected[is_number].tobytes()


@pytest.mark.parametrize("exponent", [-127, 127, -128])
def test_an_exponent_that_no_sender_chooses_is_rejected(exponent):
    frame = struct.pack("<IHHbb", 0, 0, 0, 5, exponent)
    with pytest.raises(FrameError, match=rf"in \[-126, 126\]\. Received: {exponent}"):
        decode_floats(frame, [(2, 1)], Precision.FP16)


def test_every_upper_half_is_read_as_a_float_of_its_own():
    halves = np.arange(2**16, dtype=np.uint16)
    read = decode_floats(halves.data.cast("B"), [halves.shape], Precision.BF16)
    bits = read.view(np.uint32)
    assert np.array_equal(bits >> np.uint32(16), halves)
    assert not (bits & np.uint32(0xFFFF)).any()


@pytest.mark.parametrize("precision", Precision)
def test_frames_may_begin_anywhere_in_memory(precision):
    frame = encode_floats(np.array([1.5, -2, 0], dtype=np.float32), precision)
    shifted = memoryview(b"x" + bytes(frame))[1:]
    assert decode_floats(shifted, [(3,)], precision).tolist() == [1.5, -2, 0]


@pytest.mark.parametrize("precision", Precision)
def test_infinities_stay_infinite_and_do_not_affect_the_others(precision):
    values = np.array([np.inf, 1e-9, -np.inf, 0.5e-9], dtype=np.float32)
    back = there_and_back(values, precision)
    assert back[[0, 2]].tolist() == [np.inf, -np.inf]
    np.testing.assert_allclose(back[[1, 3]], values[[1, 3]], rtol=2**-8)


@pytest.mark.parametrize("value", [3.4e38, 65520, -1e-38, 1e-40])
def test_float16_holds_whatever_float32_does(value):
    values = np.array([value], dtype=np.float32)
    back = there_and_back(values, Precision.FP16)
    np.testing.assert_allclose(back, values, rtol=2**-10)


def test_bfloat16_ties_go_to_the_even_neighbour_and_overflow_to_infinity():
    # 1 + 2**-8 lies between 1 and 1 + 2**-7; 1 + 3 * 2**-8 between that and 1 + 2**-6.
    values = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20, 3.4e38, np.inf],
        dtype=np.float32,
    )
    assert there_and_back(values, Precision.BF16).tolist() == [
        *(1, 1 + 2**-6, -1, 1 + 2**-7, np.inf, np.inf)
    ]


@pytest.mark.parametrize("precision", Precision)
def test_a_nan_stays_a_nan(precision):
    bits = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF]
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    assert np.isnan(there_and_back(values, precision)).all()


@pytest.mark.parametrize("precision", Precision)
def test_rows_that_are_not_contiguous_travel_in_their_order(precision):
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    frame = encode_floats(values, precision)
    assert decode_floats(frame, [values.shape], precision).tolist() == [
        0,
        3,
        1,
        4,
        2,
        5,
    ]


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_frame_of_another_length_is_rejected(precision, change):
    size = frame_size(3, precision) + change
    message = rf"3 numbers as {precision.name} take .* Received: {size} bytes"
    with pytest.raises(FrameError, match=message):
        decode_floats(bytes(size), [(3,)], precision)


def test_float32_is_not_copied():
    values = np.ones(3, dtype=np.float32)
    frame = encode_floats(values, Precision.FP32)
    assert np.shares_memory(decode_floats(frame, [(3,)], Precision.FP32), values)
