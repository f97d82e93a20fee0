"""Rows in a random order are those of the blocks, each with its ids and numbers."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.data import CsvDataset, IdColumn, LabelColumn, ParquetDataset
from persia_torchrec.datasets import reading, shuffling, tables
from persia_torchrec.datasets.columns import Ids, Rows
from persia_torchrec.errors import ConfigError

COLUMNS = IdColumn("id", is_text=False), LabelColumn("label")


def ids_of(batches):
    return [n for b in batches for n in b.id_features["id"].values().tolist()]


def block_of(rows, dtype, *, is_weighted):
    """Return rows, lists of ids, as a block; offsets begin anywhere."""
    offsets = np.cumsum([3, *map(len, rows)]).astype(dtype)
    values = np.array([i for row in rows for i in row], np.int64)
    weights = values.astype(np.float32) / 2 if is_weighted else None
    one_each = np.array([sum(row) for row in rows], np.int64)
    numbers = one_each.astype(np.float32)
    ids = [Ids(values, offsets, weights), Ids(one_each)]
    both = np.stack([numbers, -numbers], 1)
    return Rows(len(rows), ids, [numbers], [numbers, both], {"id": 1}, {})


ROW = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)
BLOCK = st.tuples(st.lists(ROW, min_size=1, max_size=9), st.sampled_from(["i4", "i8"]))


@settings(max_examples=40)
@given(st.data(), st.lists(BLOCK, min_size=1, max_size=4), st.booleans())
def test_rows_of_blocks_in_an_order_are_the_rows(data, blocks, is_weighted):
    rows = [row[:] for block, _ in blocks for row in block]
    for row in rows:
        row[:] = [i % 2**40 for i in row]
    order = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    order = order[data.draw(st.integers(0, len(rows) - 1)) :]
    given_blocks = [
        block_of(
            [[i % 2**40 for i in r] for r in block], dtype, is_weighted=is_weighted
        )
        for block, dtype in blocks
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffling, "PIECE_ROWS", data.draw(st.integers(1, 9)))
        pieces = shuffling.in_order(given_blocks, order)
    expected = [rows[i] for i in order]
    flat = [i for row in expected for i in row]
    many, one = zip(*(piece.ids for piece in pieces), strict=True)
    assert [i for ids in many for i in ids.values] == flat
    assert [n for ids in many for n in ids.lengths()] == list(map(len, expected))
    sums = [sum(row) for row in expected]
    assert [i for ids in one for i in ids.values] == sums
    if is_weighted:
        weights = np.array(flat, np.int64).astype(np.float32) / 2
        assert [w for ids in many for w in ids.weights] == weights.tolist()
    numbers = np.array(sums, np.int64).astype(np.float32)
    assert np.concatenate([piece.labels[0] for piece in pieces]).tolist() == (
        numbers.tolist()
    )
    both = np.concatenate([piece.dense[1] for piece in pieces])
    assert both.tolist() == np.stack([numbers, -numbers], 1).tolist()
    assert sum(piece.missing.get("id", 0) for piece in pieces) == len(blocks)


def orders_of(groups, seed, most):
    """The reference: groups, lists of rows, in the order of an epoch."""
    found, number, members, num_rows = [], 0, [], 0
    indices = np.random.default_rng(seed).permutation(len(groups)).tolist()
    for last, index in enumerate(indices, 1):
        members.append(index)
        num_rows += len(groups[index])
        if num_rows < most and last < len(indices):
            continue
        number += 1
        rows = [row for i in sorted(members) for row in groups[i]]
        part = 0
        while rows:
            whole = len(rows) < most + max(most // 8, 1)
            count = len(rows) if whole else most
            of_part = (*seed, number, part) if part else (*seed, number)
            order = np.random.default_rng(of_part).permutation(count)
            found += [rows[i] for i in order]
            rows, part = rows[count:], part + 1
        members, num_rows = [], 0
    return found


@settings(max_examples=25)
@given(st.data(), st.integers(2, 30), st.integers(1, 40), st.integers(1, 90))
def test_an_epoch_has_the_order_of_its_seed(tmp_path_factory, data, most, group, num):
    path = tmp_path_factory.getbasetemp() / "order.parquet"
    rows = list(range(num))
    table = pa.table({"id": rows, "label": [0.0] * num})
    pq.write_table(table, path, row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BLOCK_ROWS", 7)
        size = data.draw(st.integers(1, 20))
        dataset = ParquetDataset(path, size, COLUMNS, shuffle=most, seed=4)
        groups = [rows[i : i + group] for i in range(0, num, group)]
        for epoch in range(2):
            assert ids_of(dataset) == orders_of(groups, (4, epoch), most)


def test_how_many_rows_are_shuffled_together_is_of_a_position(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{n},0\n" for n in range(90)))
    state = CsvDataset(path, 8, COLUMNS, shuffle=50).state_dict()
    CsvDataset(path, 8, COLUMNS, shuffle=50).load_state_dict(state)
    with pytest.raises(ConfigError, match="shuffle: 50 was saved, None is here"):
        CsvDataset(path, 8, COLUMNS, shuffle=True).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"a boolean or a number of rows.*shuffle -1"):
        CsvDataset(path, 8, COLUMNS, shuffle=-1)


@pytest.mark.parametrize(
    ("shuffle", "version", "num"),
    [(False, 2, 90), (True, 2, 90), (True, 2, 20), (False, None, 90), (True, None, 20)],
)
def test_a_position_of_an_earlier_version_loads_where_its_order_is_the_same(
    tmp_path, monkeypatch, shuffle, version, num
):
    monkeypatch.setattr(reading, "SHUFFLE_ROWS", 20)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": list(range(num)), "label": [0.0] * num}), path)
    dataset = ParquetDataset(path, 8, COLUMNS, shuffle=shuffle)
    rows = iter(dataset)
    seen = ids_of([next(rows), next(rows)])
    state = json.loads(json.dumps(dataset.state_dict()))
    del state["of"]["shuffle"]
    state["of"]["order"] = version
    if version is None:
        del state["of"]["order"]
        size = path.stat().st_size
        state["of"]["files"] = [f"rows.parquet ({size} bytes)"]
    second = ParquetDataset(path, 8, COLUMNS, shuffle=shuffle)
    if shuffle and num > 20:
        with pytest.raises(ConfigError, match="order: 2 was saved, 3 is here"):
            second.load_state_dict(state)
        return
    second.load_state_dict(state)
    assert sorted(seen + ids_of(second)) == list(range(num))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_positive_of_one_block_alone_is_no_warning(
    tmp_path, monkeypatch, caplog, shuffle
):
    monkeypatch.setattr(tables, "BLOCK_ROWS", 10)
    path = tmp_path / "rows.parquet"
    texts = ["buy"] + ["pv"] * 59
    pq.write_table(pa.table({"id": list(range(60)), "label": texts}), path)
    for positive, is_told in (("buy", False), ("Buy", True)):
        columns = COLUMNS[0], LabelColumn("label", positive=positive)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            list(ParquetDataset(path, 8, columns, shuffle=shuffle))
        assert ("has no row with the positive" in caplog.text) == is_told
    assert "{'pv': 59, 'buy': 1}" in caplog.text
