import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import FrameError
from persia_torchrec.rpc.messages import (
    Header,
    Kind,
    Precision,
    Share,
    TableIds,
    array_of,
    bytes_of,
    decode_counts,
    decode_json,
    decode_segments,
    encode_json,
    encode_segments,
    error_frames,
)
from tests.support.strategies import id_arrays

uint64s = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    request=uint64s,
    incarnation=uint64s,
    stream=uint64s,
    batch=uint64s,
    precision=st.sampled_from(Precision),
    flags=st.integers(0, 2**32 - 1),
)
requests = st.lists(st.builds(TableIds, st.integers(0, 2**40), id_arrays(9)))


@given(headers)
def test_a_header_round_trips(header):
    frame = header.encode()
    assert len(frame) == 48
    assert Header.decode(frame) == Header.decode(memoryview(frame)) == header


def test_a_header_is_laid_out_as_the_protocol_says():
    header = Header(Kind.UPDATE, 6, 7, 8, 9, Precision.BF16, 1)
    assert header.encode() == b"PTRC" + struct.pack("<HHQQQQII", 4, 5, 6, 7, 8, 9, 2, 1)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"PTRX", r"must begin with b'PTRC'\. Received: b'PTRX'"),
        (4, b"\1\0", r"version must be 4\. Received: 1\. Run the same version"),
        (6, b"\x63\0", "Unknown field.*99 is not a valid Kind"),
        (40, b"\3\0\0\0", "Unknown field.*3 is not a valid Precision"),
    ],
)
def test_a_header_of_another_protocol_is_rejected(offset, value, message):
    frame = bytearray(Header(Kind.HELLO).encode())
    frame[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=message):
        Header.decode(bytes(frame))


@pytest.mark.parametrize("size", [0, 1, 47, 49, 4096])
def test_a_header_of_another_size_is_rejected(size):
    frame = Header(Kind.HELLO).encode().ljust(size, b"\0")[:size]
    with pytest.raises(FrameError, match=rf"48 bytes\. Received: {size} bytes"):
        Header.decode(frame)


@given(st.binary(max_size=60) | st.binary(min_size=44, max_size=44))
def test_random_bytes_are_not_a_header(data):
    for frame in (data, b"PTRC" + data):
        try:
            header = Header.decode(frame)
        except FrameError:
            continue
        assert header.encode() == frame


@given(requests)
def test_the_ids_of_each_table_round_trip(tables):
    segments = [(t.table, len(t.ids)) for t in tables]
    segments = np.array(segments, dtype=np.int64).reshape(-1, 2)
    frames = [b"", *encode_segments(segments, [t.ids for t in tables])]
    decoded = decode_segments(frames, num_frames=3).pieces()
    assert [t.table for t in decoded] == [t.table for t in tables]
    for mine, yours in zip(decoded, tables, strict=True):
        assert np.array_equal(mine.ids, yours.ids)


def test_segments_are_laid_out_as_the_protocol_says():
    ids = np.array([5, 2**64 - 1, 6], dtype=np.uint64)
    segments, body = encode_segments(np.array([[3, 2], [1, 1]]), [ids[:2], ids[2:]])
    assert bytes(segments) == struct.pack("<qqqq", 3, 2, 1, 1)
    assert bytes(body) == struct.pack("<QQQ", 5, 2**64 - 1, 6)


TWO_IDS = struct.pack("<QQ", 5, 6)


@pytest.mark.parametrize(
    ("segments", "ids", "message"),
    [
        (struct.pack("<qq", 0, 1), TWO_IDS, r"as many ids as follow, 2\. .* \[1\]"),
        (struct.pack("<qq", 0, 3), TWO_IDS, r"as many ids as follow, 2\. .* \[3\]"),
        (struct.pack("<qqqq", 0, 3, 0, -1), TWO_IDS, r"Received: counts \[3, -1\]"),
        (struct.pack("<6q", 0, 2, 0, 1, 0, -1), TWO_IDS, r"counts \[2, 1, -1\]"),
        # Their sum is 2 modulo 2**64.
        (
            struct.pack("<10q", *[0, 2**62] * 4, 0, 2),
            TWO_IDS,
            "as many ids as follow, 2",
        ),
        (struct.pack("<qqq", 0, 2, 0), TWO_IDS, "pairs of table and count"),
        (
            struct.pack("<qq", 0, 2)[:-1],
            TWO_IDS,
            r"pairs of table and count, of 16 bytes.*: 15 and",
        ),
        (struct.pack("<qq", 0, 2), TWO_IDS[:-1], r"ids a multiple of 8 bytes.* and 15"),
        (b"", TWO_IDS, r"as many ids as follow, 2"),
    ],
)
def test_segments_that_do_not_fit_the_ids_are_rejected(segments, ids, message):
    with pytest.raises(FrameError, match=message):
        decode_segments([b"", segments, ids], num_frames=3)


@pytest.mark.parametrize("num", [0, 1, 2, 4])
def test_a_request_with_another_number_of_frames_is_rejected(num):
    frames = [b"", struct.pack("<qq", 0, 2), TWO_IDS, b""][:num]
    with pytest.raises(FrameError, match=rf"must have 3 frames\. Received: {num}\."):
        decode_segments(frames, num_frames=3)


@given(st.binary(max_size=80), st.binary(max_size=40))
def test_random_bytes_are_rejected_or_name_exactly_the_ids_that_follow(segments, ids):
    try:
        tables = decode_segments([b"", segments, ids], num_frames=3).pieces()
    except FrameError:
        return
    assert b"".join(t.ids.tobytes() for t in tables) == ids


def test_json_round_trips():
    value = {"name": "Stra\u00dfe", "dims": [1, 2.5, None]}
    assert decode_json([b"", encode_json(value)]) == value


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"'a'", b'{"a": 1} x', b"[" * 100_000],
    ids=["nothing", "half", "no text", "quotes", "more", "deep"],
)
def test_a_body_that_is_not_json_is_rejected(body):
    with pytest.raises(FrameError, match="Frame 1 must be JSON"):
        decode_json([b"", body])


@pytest.mark.parametrize("num", [1, 3])
def test_json_comes_in_one_frame(num):
    with pytest.raises(FrameError, match=rf"must have 2 frames\. Received: {num}"):
        decode_json([b"null"] * num)


def test_an_error_names_its_class_and_keeps_its_text():
    error = FrameError("the table is round")
    assert decode_json([b"", *error_frames(error)]) == {
        "kind": "FrameError",
        "message": "the table is round",
    }


def test_arrays_become_frames_without_a_copy():
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    frame = bytes_of(floats)
    assert np.shares_memory(array_of(frame, np.float32), floats)
    assert bytes(bytes_of(floats.T)) == floats.T.tobytes()
    assert len(bytes_of(floats[:0])) == 0


def test_kinds_and_precisions_keep_their_numbers():
    # They are on the wire: a number that changes its meaning needs a new version.
    assert [kind.name for kind in Kind] == [
        *("REPLY", "ERROR", "HELLO", "ADD_TABLES", "LOOKUP", "UPDATE", "WRITE", "READ"),
        *("COUNTERS", "CLEAR", "SHUTDOWN", "BUFFER_IDS", "FORWARD", "BACKWARD"),
        *("ABANDON", "BATCH", "END_OF_DATA", "METADATA", "LEAVE", "EXPORT", "STEP"),
        *("CHECKPOINT", "PROGRESS", "JOIN", "BOOK", "POSITION", "IDS"),
        *("SLAB", "PING", "OWN"),
    ]
    assert list(Kind) == list(range(len(Kind)))
    assert [(p.name, p.value) for p in Precision] == [
        *(("FP32", 0), ("FP16", 1), ("BF16", 2))
    ]
    assert list(Header._fields) == [
        *("kind", "request", "incarnation", "stream", "batch", "precision", "flags")
    ]


def test_a_share_is_laid_out_as_the_protocol_says():
    share = Share(group=2**63, step=3, rank=1, num_ranks=2, timeout_ms=600_000)
    frame = share.encode()
    assert frame == struct.pack("<QQIIQ", 2**63, 3, 1, 2, 600_000)
    assert Share.decode([b"", frame], num_frames=2) == share


def test_counts_are_laid_out_as_the_protocol_says():
    frames = [b"", b"", TWO_IDS, struct.pack("<II", 7, 2**32 - 1)]
    assert decode_counts(frames).tolist() == [7, 2**32 - 1]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (bytes(4), r"one count an id, 2\. Received: 1\."),
        (bytes(12), r"one count an id, 2\. Received: 3\."),
        (b"", r"one count an id, 2\. Received: 0\."),
        (bytes(7), r"uint32 must be a multiple of 4 bytes\. Received: 7 bytes"),
    ],
)
def test_counts_that_are_not_one_per_id_are_rejected(frame, message):
    with pytest.raises(FrameError, match=message):
        decode_counts([b"", b"", TWO_IDS, frame])


def test_a_header_may_be_sent_under_another_number():
    header = Header(Kind.UPDATE, 6, 7, 8, 9, Precision.BF16, 1)
    assert Header.decode(header.encode(request=77)) == header._replace(request=77)
