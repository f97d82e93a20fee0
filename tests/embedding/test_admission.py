import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.admission import (
    ADMISSIONS,
    AdmitAll,
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
)
from persia_torchrec.errors import ConfigError

values = st.floats(-1e6, 1e6)
admissions = st.one_of(
    st.builds(AdmitAll, unadmitted_value=values),
    st.builds(AdmitProbability, st.floats(0, 1), unadmitted_value=values),
    st.builds(
        AdmitFrequency,
        st.integers(1, 2**32 - 1),
        st.integers(1, 2**32 - 2),
        unadmitted_value=values,
    ),
    st.builds(
        AdmitBloom,
        st.integers(1, 255),
        st.integers(1, 2**48),
        st.floats(1e-9, 0.999),
        unadmitted_value=values,
    ),
)


@given(admissions)
def test_an_admission_comes_back_from_json_as_it_was(admission):
    text = json.dumps(admission.to_json())
    assert ADMISSIONS.from_json(json.loads(text)) == admission


def test_an_id_without_a_row_reads_zeros_unless_something_else_is_said():
    assert AdmitAll().unadmitted_value == 0
    assert AdmitProbability(0.5).unadmitted_value == 0
    assert AdmitFrequency(3) == AdmitFrequency(
        threshold=3, max_waiting_rows=1_000_000, unadmitted_value=0.0
    )
    assert AdmitBloom(3, 10) == AdmitBloom(
        threshold=3, expected_ids=10, false_positive_rate=0.01, unadmitted_value=0.0
    )


@pytest.mark.parametrize(
    ("rate", "num_ids", "num_counters", "num_hashes"),
    [(0.01, 2**30, 10_291_878_066, 7), (0.5, 100, 145, 1), (0.25, 1, 3, 2)],
)
def test_a_bloom_filter_is_as_large_as_its_rate_asks(
    rate, num_ids, num_counters, num_hashes
):
    bloom = AdmitBloom(3, num_ids, rate)
    assert (bloom.num_counters, bloom.num_hashes) == (num_counters, num_hashes)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (AdmitAll, {"unadmitted_value": math.nan}, "AdmitAll: unadmitted_value must"),
        (AdmitProbability, {"probability": -0.1}, r"probability must be in \[0, 1\]"),
        (AdmitProbability, {"probability": 1.1}, r"probability must be in \[0, 1\]"),
        (AdmitProbability, {"probability": math.nan}, "probability must be in"),
        (
            AdmitProbability,
            {"probability": 1, "unadmitted_value": math.inf},
            "AdmitProbability: unadmitted_value must be a finite number",
        ),
        (AdmitFrequency, {"threshold": 0}, r"threshold must be an integer in \[1, 42"),
        (AdmitFrequency, {"threshold": 2**32}, "threshold must be an integer in"),
        (AdmitFrequency, {"threshold": 2.0}, "threshold must be an integer in"),
        (AdmitFrequency, {"threshold": True}, "threshold must be an integer in"),
        (
            AdmitFrequency,
            {"threshold": 2, "max_waiting_rows": 0},
            r"AdmitFrequency: max_waiting_rows must be an integer in \[1, 4294967294\]",
        ),
        (
            AdmitBloom,
            {"threshold": 256, "expected_ids": 9},
            r"AdmitBloom: threshold must be an integer in \[1, 255\]\. Received: 256",
        ),
        (
            AdmitBloom,
            {"threshold": 2, "expected_ids": 0},
            "expected_ids must be an integer in",
        ),
        (
            AdmitBloom,
            {"threshold": 2, "expected_ids": 9, "false_positive_rate": 0},
            r"false_positive_rate must be in \(0, 1\)",
        ),
        (
            AdmitBloom,
            {"threshold": 2, "expected_ids": 9, "false_positive_rate": 1},
            r"false_positive_rate must be in \(0, 1\)",
        ),
        (
            AdmitBloom,
            {"threshold": 2, "expected_ids": 9, "false_positive_rate": "0.1"},
            r"false_positive_rate must be in \(0, 1\)\. Received: '0.1'",
        ),
    ],
)
def test_an_argument_out_of_its_range_is_rejected(cls, arguments, message):
    with pytest.raises(ConfigError, match=message):
        cls(**arguments)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (7, r"one of \['all', 'bloom', 'frequency', 'probability'\]\. Received: 7"),
        ({"kind": "some"}, "An admission must be an object whose kind is one of"),
        (
            {"kind": "all", "threshold": 1},
            "AdmitAll .*unexpected keyword argument 'threshold'",
        ),
        ({"kind": "bloom", "threshold": 1}, "arguments of AdmitBloom must be complete"),
    ],
)
def test_a_description_of_no_admission_is_rejected(description, message):
    with pytest.raises(ConfigError, match=message):
        ADMISSIONS.from_json(description)
