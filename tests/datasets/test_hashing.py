"""Hashes of many texts at once are those of the library, one at a time."""

import numpy as np
import pyarrow as pa
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.datasets.columns import EMPTY
from persia_torchrec.datasets.hashing import hash_texts, hashes_of

TEXTS = st.lists(st.none() | st.binary(max_size=20) | st.binary(max_size=300))


def expected(texts):
    trimmed = [(text or b"").strip(b" ") or EMPTY for text in texts]
    return [xxhash.xxh3_64_intdigest(text) for text in trimmed]


@given(TEXTS, st.sampled_from([pa.binary(), pa.large_binary()]), st.integers(0, 3))
def test_each_text_has_the_hash_of_the_library(texts, kind, skipped):
    array = pa.array(texts, kind)[skipped:]
    assert hash_texts(array).tolist() == expected(texts[skipped:])


@given(TEXTS)
def test_a_dictionary_has_the_hashes_of_its_texts(texts):
    array = pa.array(texts, pa.binary()).dictionary_encode()
    found = hashes_of(array)
    assert found.dtype == np.uint64
    assert found.tolist() == expected(texts)
