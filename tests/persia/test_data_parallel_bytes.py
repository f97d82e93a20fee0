import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.persia.data_parallel import BLOCK, decode_blocks, encode_blocks


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31), st.floats(-6, 6))
def test_a_number_comes_back_to_half_a_step_of_its_block(rows, blocks, seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    sent = torch.randn(rows, blocks, BLOCK, generator=generator) * 10**exponent
    data = encode_blocks(sent)
    assert data.dtype == torch.uint8
    assert data.shape == (rows, blocks * (BLOCK + 8))
    received = decode_blocks(data, blocks)
    step = (sent.amax(2, keepdim=True) - sent.amin(2, keepdim=True)) / 255
    assert ((received - sent).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("value", [0.0, 0.3, -7.0])
def test_equal_numbers_come_back_as_they_are(value):
    sent = torch.full((2, 1, BLOCK), value)
    assert torch.equal(decode_blocks(encode_blocks(sent), 1), sent)


def test_a_block_of_small_numbers_does_not_suffer_from_its_neighbour():
    sent = torch.stack([torch.linspace(-1e-6, 1e-6, BLOCK), torch.ones(BLOCK) * 1e6])
    received = decode_blocks(encode_blocks(sent.view(1, 2, BLOCK)), 2)
    assert (received[0, 0] - sent[0]).abs().max() < 1e-8


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(value):
    sent = torch.zeros(1, 2, BLOCK)
    sent[0, 0, 3] = value
    received = decode_blocks(encode_blocks(sent), 2)
    assert not received[0, 0].isfinite().any()
    assert torch.equal(received[0, 1], sent[0, 1])
