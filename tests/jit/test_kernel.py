import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.jit import kernel
from persia_torchrec.jit.compiled import inlined_kernel
from tests.support import reference
from tests.support.strategies import ids

splitmix64 = inlined_kernel(kernel.splitmix64)
mulhi = inlined_kernel(kernel.mulhi)


@given(ids)
def test_a_word_is_mixed_as_the_reference_does(word):
    assert int(splitmix64(np.uint64(word))) == reference.mixed(word)


@given(ids, ids | st.sampled_from([1, 2**32 - 1, 2**32, 2**32 + 1]))
def test_a_hash_is_scaled_to_any_number(hash_, num):
    assert int(mulhi(np.uint64(hash_), np.uint64(num))) == hash_ * num // 2**64
