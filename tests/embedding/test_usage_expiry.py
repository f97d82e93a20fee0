import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.embedding.usage import EXPIRIES, Expiry
from persia_torchrec.errors import ConfigError

steps = st.integers(0, 2**31 - 1)
expiries = st.builds(Expiry, steps, st.floats(0, 1e9)) | st.builds(
    Expiry, steps, st.floats(0, 1e9), st.floats(1e-6, 1e6), steps
)


@given(expiries)
def test_an_expiry_comes_back_from_json_as_it_was(expiry):
    assert EXPIRIES.from_json(json.loads(json.dumps(expiry.to_json()))) == expiry


@pytest.mark.parametrize(
    ("expiry", "is_on"),
    [
        (Expiry(), False),
        (Expiry(steps_to_live=1), True),
        (Expiry(seconds_to_live=0.5), True),
        (Expiry(min_l2_norm=0.1), True),
    ],
)
def test_an_expiry_is_on_when_one_of_its_conditions_is(expiry, is_on):
    assert expiry.is_on is is_on


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps_to_live": -1}, r"Expiry: steps_to_live must be an integer in \[0, "),
        ({"steps_to_live": 1.5}, "Expiry: steps_to_live must be an integer in"),
        ({"steps_to_live": 2**31}, r"\[0, 2147483647\].*seconds_to_live.*: 2147483648"),
        ({"seconds_to_live": -1}, "seconds_to_live must be finite and >= 0"),
        ({"seconds_to_live": math.inf}, "seconds_to_live must be finite and >= 0"),
        ({"min_l2_norm": math.nan}, "min_l2_norm must be finite and >= 0"),
        ({"min_l2_norm": 1, "spared_steps": -1}, "spared_steps must be an integer"),
        ({"spared_steps": 5}, r"spared_steps must be 0 without min_l2_norm.*: 5\."),
    ],
)
def test_an_argument_out_of_its_range_is_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Expiry(**arguments)


def test_more_steps_than_a_row_can_count_of_an_earlier_version_are_as_many_as_it_can():
    described = {"kind": "expiry", "min_l2_norm": 1.0, "spared_steps": 2**31}
    found = EXPIRIES.from_json({**described, "steps_to_live": 2**48})
    assert found == Expiry(2**31 - 1, min_l2_norm=1.0, spared_steps=2**31 - 1)


def test_a_clock_of_an_earlier_version_is_the_running_time_with_one_warning(caplog):
    described = {"kind": "expiry", "seconds_to_live": 5.0}
    assert EXPIRIES.from_json({**described, "clock": "running"}) == Expiry(0, 5.0)
    assert caplog.text == ""
    for _ in range(2):
        assert EXPIRIES.from_json({**described, "clock": "wall"}) == Expiry(0, 5.0)
    [record] = caplog.records
    assert "Expiry: clock must be 'running'" in record.getMessage()


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"steps_to_live": 1}, r"An expiry must be .*one of \['expiry'\]"),
        ({"kind": "expiry", "ttl": 1}, "Expiry .*unexpected keyword argument 'ttl'"),
    ],
)
def test_a_description_of_no_expiry_is_rejected(description, message):
    with pytest.raises(ConfigError, match=message):
        EXPIRIES.from_json(description)
