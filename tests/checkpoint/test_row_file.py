"""Shard files: what is written is read, and anything else is rejected."""

import json
import struct
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.row_file import crc32
from persia_torchrec.errors import CheckpointError
from persia_torchrec.store.row_columns import RowShape
from tests.support.row_files import HEAD, TABLES, read, reader_of, rows_of, written

KEYS_OF_A_TABLE = [
    ["tables", 0, key] for key in ("spec", "num_updates", "has_metadata")
]
blocks = st.lists(
    st.tuples(st.integers(0, len(TABLES) - 1), st.integers(1, 9)), max_size=8
)


@pytest.mark.slow
@given(blocks=blocks)
def test_written_data_are_read_back(blocks):
    data, said = written(blocks)
    reader = reader_of(data)
    assert reader.head == HEAD
    found = list(reader.blocks())
    assert [(table, len(rows)) for table, rows in found] == blocks
    for seed, (table, rows) in enumerate(found):
        expected = rows_of(table, len(rows), seed).columns()
        for column, other in zip(rows.columns(), expected, strict=True):
            assert column.dtype == other.dtype
            assert column.shape == other.shape
            assert column.tobytes() == other.tobytes()
    assert reader.written == said
    assert said.size_bytes == len(data)
    assert said.num_rows == sum(num_rows for _, num_rows in blocks)


@given(data=st.data(), blocks=blocks)
def test_a_file_that_is_cut_off_is_rejected(data, blocks):
    whole, _ = written(blocks)
    place = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CheckpointError, match=r"some/file is cut off: \d+ bytes must"):
        read(whole[:place])


@given(data=st.data(), blocks=blocks)
def test_a_file_of_which_a_bit_has_changed_is_rejected(data, blocks):
    whole, _ = written(blocks)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointError, match=r"some/file"):
        read(bytes(changed))


@given(data=st.data(), blocks=blocks.filter(lambda blocks: len(blocks) > 1))
def test_a_file_that_lacks_a_block_is_rejected(data, blocks):
    heads = [len(written(blocks[:n])[0]) - 16 for n in range(len(blocks) + 1)]
    whole, _ = written(blocks)
    n = data.draw(st.integers(0, len(blocks) - 1))
    with pytest.raises(CheckpointError, match=r"some/file is damaged. .* an end that"):
        read(whole[: heads[n]] + whole[heads[n + 1] :])


@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_shard_file(data):
    with pytest.raises(CheckpointError, match="some/file"):
        read(data)
    with pytest.raises(CheckpointError, match="some/file"):
        read(b"PTRCROWS\1\0\0\0" + data)


@pytest.mark.parametrize("wrong", [None, "x", 1.5, -1, [], {}, [1], True])
@pytest.mark.parametrize(
    "path", [[], ["shard"], ["num_shards"], ["tables"], ["tables", 0], *KEYS_OF_A_TABLE]
)
def test_a_header_with_a_wrong_type_is_rejected_by_name(path, wrong):
    value = json.loads(msgspec.json.encode(HEAD))
    if path:
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        if type(parent[path[-1]]) is type(wrong) and path[-1] not in ("shard", "spec"):
            return  # of the right type
        parent[path[-1]] = wrong
    else:
        value = wrong
    text = json.dumps(value).encode()
    begin = struct.pack("<8sIII", b"PTRCROWS", 1, len(text), zlib.crc32(text))
    with pytest.raises(CheckpointError, match=r"some/file is damaged\. .*header"):
        read(begin + text)


def test_more_bytes_after_the_end_are_rejected():
    data, _ = written([(0, 1)])
    with pytest.raises(CheckpointError, match="more bytes after the end"):
        read(data + b"\0")


def test_a_later_version_is_rejected_with_what_to_do():
    data = bytearray(written([])[0])
    data[8:12] = struct.pack("<I", 3)
    with pytest.raises(CheckpointError, match=r"Received: 3. Load it with"):
        read(bytes(data))


@pytest.mark.parametrize("table", range(len(TABLES)))
def test_a_file_is_as_long_as_its_rows(table):
    spec = TABLES[table].spec
    weight_bytes = spec.dim * (2 if spec.weight_dtype == "bf16" else 4)
    metadata_bytes = 16 if TABLES[table].has_metadata else 0
    row_bytes = 16 + metadata_bytes + 4 * spec.num_state_floats + weight_bytes
    empty, thousand = (len(written(b)[0]) for b in ([], [(table, 1000)]))
    assert thousand - empty == 1000 * row_bytes + 16
    assert empty < 2000


@pytest.mark.parametrize("previous", [0, 1, 0xDEADBEEF, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1087, 5000, 2**17 + 7])
def test_checksums_equal_those_of_zlib(size, previous):
    data = np.random.default_rng(size).bytes(size)
    assert crc32(data, previous) == zlib.crc32(data, previous)
    assert crc32(memoryview(data), previous) == zlib.crc32(data, previous)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"Could not read .*nothing\.rows"),
        Folder(tmp_path).opened("nothing.rows"),
    ):
        pass


def test_empty_columns_have_the_shapes_of_their_table():
    rows = RowShape(TABLES[1].spec, has_metadata=True).empty(2)
    assert [c.shape for c in rows.columns()] == [(2,), (2,), (2, 4), (2, 6), (2, 3)]
