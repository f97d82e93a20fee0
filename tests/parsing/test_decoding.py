import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, make_dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.errors import CheckpointError, ConfigError, FrameError
from persia_torchrec.parsing.decoding import KeyPath, convert, parse_json

TREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda tree: st.lists(tree) | st.dictionaries(st.text(), tree),
)


class Row(msgspec.Struct, forbid_unknown_fields=True):
    dim: int
    names: tuple[str, ...] = ()


@dataclass
class Table:
    rows: list[Row]
    scale: float = 1.0


def test_json_becomes_the_declared_type():
    text = '{"rows": [{"dim": 3, "names": ["a"]}], "scale": 2}'
    assert parse_json(text, Table, "m", FrameError) == Table([Row(3, ("a",))], 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "m must be JSON in UTF-8. Received: Input data was truncated."),
        (b"\xff", "m must be JSON in UTF-8"),
        (b'{"rows": [{"dim": 1, "names": ["\xff"]}]}', "m must be JSON in UTF-8"),
        (b"[" * 100_000, "m must be JSON in UTF-8"),
        (b"[]", r"m must be a mapping. Received: \[\]"),
        (b"{}", "m must have the key 'rows'"),
        (b'{"rows": {}}', "m: rows must be a list. Received: {}"),
        (b'{"rows": [{}]}', r"m: rows\[0\] must have the key 'dim'"),
        (b'{"rows": [{"dim": 1.0}]}', r"rows\[0\].dim must be an integer. .*: 1.0"),
        (b'{"rows": [{"dim": true}]}', r"rows\[0\].dim must be an integer. .*: True"),
        (b'{"rows": [{"dim": null}]}', r"rows\[0\].dim must be an integer. .*: None"),
        (b'{"rows": [{"dim": 1, "dims": 2}]}', r"rows\[0\].dims is unknown"),
        (b'{"rows": [{"dim": 1, "names": [2]}]}', r"names\[0\] must be a string. .*2"),
        (
            b'{"rows": [{"dim": "a"}], "rows": []}',
            r"rows\[0\].dim must be an integer.$",
        ),
        (b'{"rows": [{"dim": "a"}], "rows": 3}', r"rows\[0\].dim must be an integer.$"),
        (b'{"rows": [{"dim": "a"}], "rows": [{}]}', r"dim must be an integer.$"),
        (b'{"rows": [], "scale": "1"}', "m: scale must be a number. Received: '1'"),
    ],
)
def test_json_of_another_form_is_a_named_error(text, message):
    with pytest.raises(CheckpointError, match=message):
        parse_json(text, Table, "m", CheckpointError)


def test_an_entry_of_a_dict_has_no_name_in_the_error():
    with pytest.raises(ConfigError, match=r"f: a\[...\] must be an integer\.$"):
        convert({"b": ""}, dict[str, int], KeyPath("f", "a"), ConfigError)
    with pytest.raises(ConfigError, match="each key of f must be a string"):
        convert({3: 4}, dict[str, int], KeyPath("f"), ConfigError)


@pytest.mark.slow
@given(TREE)
def test_any_value_is_taken_or_rejected_by_name(tree):
    try:
        found = convert(tree, Table, KeyPath("f"), ConfigError)
    except ConfigError as exc:
        found = str(exc)
    assert isinstance(found, Table) or found.startswith("f")


@pytest.fixture
def switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_often")
def test_threads_that_decode_to_a_class_first_do_not_end_the_process():
    for _ in range(200):
        inner = make_dataclass("Inner", [("d", int)])
        fields = [("a", tuple[int, ...]), ("b", int | None), ("c", inner)]
        outer, begin = make_dataclass("Outer", fields), threading.Barrier(4)

        def decode(kind=outer, begin=begin):
            begin.wait()
            text = b'{"a": [1], "b": null, "c": {"d": 2}}'
            return parse_json(text, kind, "a test", ValueError).c.d

        with ThreadPoolExecutor(4) as threads:
            decoded = [threads.submit(decode) for _ in range(4)]
            assert [one.result() for one in decoded] == [2] * 4
