"""What a new row starts with: numbers drawn from its id alone.

The same id of the same table always gets the same weights, whatever the number of
servers, the order of the ids or the process. The numbers are PERSIA's, bit for bit:
the generator xoshiro256++ (Blackman and Vigna, "Scrambled Linear Pseudorandom Number
Generators", ACM TOMS 2021), its 256 bits of state filled from the id by eight steps of
the generator PCG32, and each weight made from the upper 23 of 32 random bits:

    u = bits / 2**23            in [0, 1)
    w = u * (upper - lower) + lower      in float32
"""

import numpy as np
import numpy.typing as npt

from persia_torchrec.compiled import compiled, compiled_as_written

_PCG_MUL = np.uint64(6364136223846793005)
_PCG_INC = np.uint64(11634580027462260723)
_32_BITS = np.uint64(2**32 - 1)
_S9, _S17, _S18, _S19, _S23, _S27, _S31, _S32, _S41, _S45, _S59 = (
    np.uint64(bits) for bits in (9, 17, 18, 19, 23, 27, 31, 32, 41, 45, 59)
)
_UNIT = np.float32(2.0**-23)


@compiled_as_written
def fill_uniform(
    weights_D: npt.NDArray[np.float32],
    seed: np.uint64,
    lower: np.float32,
    upper: np.float32,
) -> None:
    """Draw a row's weights from ``[lower, upper)``.

    Args:
        weights_D: float32 ``(D,)``, overwritten.
        seed: the id, mixed with the table's seed.
        lower: smallest weight.
        upper: bound above the largest weight.
    """
    s0, seed = _next_seed_word(seed)
    s1, seed = _next_seed_word(seed)
    s2, seed = _next_seed_word(seed)
    s3, seed = _next_seed_word(seed)
    width = upper - lower
    for d in range(len(weights_D)):
        total = s0 + s3
        bits = (((total << _S23) | (total >> _S41)) + s0) >> _S32
        weights_D[d] = np.float32(bits >> _S9) * _UNIT * width + lower
        shifted = s1 << _S17
        s2 ^= s0
        s3 ^= s1
        s1 ^= s2
        s0 ^= s3
        s2 ^= shifted
        s3 = (s3 << _S45) | (s3 >> _S19)


@compiled
def _next_seed_word(state: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return 64 bits of seed, two PCG32 outputs, and the generator's next state."""
    state = state * _PCG_MUL + _PCG_INC
    low = _pcg_output(state)
    state = state * _PCG_MUL + _PCG_INC
    return low | (_pcg_output(state) << _S32), state


@compiled
def _pcg_output(state: np.uint64) -> np.uint64:
    bits = (((state >> _S18) ^ state) >> _S27) & _32_BITS
    rotation = state >> _S59
    # Rotate 32 bits to the right, in a 64-bit word.
    return ((bits >> rotation) | (bits << ((_S32 - rotation) & _S31))) & _32_BITS
