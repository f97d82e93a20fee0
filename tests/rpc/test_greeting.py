import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import ConfigError, FrameError, JobMismatchError, WireError
from persia_torchrec.rpc.greeting import NO_JOB, Greeting

JOB_IDS = st.text("abcXYZ019._:-", max_size=128)
OURS, THEIRS = Greeting("ads-7"), Greeting("news-1")
ADDRESS = "tcp://127.0.0.1:7000"


@given(JOB_IDS)
def test_a_greeting_round_trips(job_id):
    name = Greeting(job_id).encode()
    assert Greeting.decode(name) == Greeting(job_id)
    assert len(name) <= 255
    assert name[0] != 0  # such names are ZeroMQ's own


def test_routing_ids_and_job_ids_are_unique():
    assert OURS.encode() != OURS.encode()
    assert Greeting.draw() != Greeting.draw()
    assert Greeting.draw().job_id


@pytest.mark.parametrize("job_id", ["two words", "a,b", "\u00e4", "x" * 129, "a\n"])
def test_an_id_that_no_job_can_have_is_rejected(job_id):
    with pytest.raises(ConfigError, match=r"PERSIA_JOB_ID\) must have 1 to 128"):
        Greeting(job_id)


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"\x01",
        b"\x00\x12\x34\x56\x78",  # as ZeroMQ names who says nothing
        b"\x02" + OURS.encode()[1:],  # another version
        OURS.encode()[:-1],
        OURS.encode() + b"x",
        b"\x01\xff" + OURS.encode()[2:],
        b"\x01\x03a b" + bytes(16),
        b"\x01\x02\xc3\xa4" + bytes(16),
        b"\x01" * 255,
    ],
    ids=range(10),  # the names hold random bytes
)
def test_a_routing_id_that_is_not_a_greeting_is_rejected(name):
    with pytest.raises(FrameError, match="greeting"):
        OURS.admit(name, ADDRESS)
    NO_JOB.admit(name, ADDRESS)  # which lets everybody in


@given(st.binary(max_size=255))
def test_any_bytes_are_parsed_or_rejected(name):
    try:
        OURS.admit(name, ADDRESS)
    except (WireError, JobMismatchError):
        return
    assert Greeting.decode(name).job_id in ("", OURS.job_id)


def test_a_job_admits_its_own_clients_and_those_of_no_job():
    OURS.admit(OURS.encode(), ADDRESS)
    OURS.admit(NO_JOB.encode(), ADDRESS)
    NO_JOB.admit(OURS.encode(), ADDRESS)


def test_a_client_of_another_job_learns_the_address_and_both_ids():
    expected = rf"of {ADDRESS} must belong to job 'ads-7'\. Received: job 'news-1'"
    with pytest.raises(JobMismatchError, match=expected):
        OURS.admit(THEIRS.encode(), ADDRESS)
