"""Rows of columns: cut, joined, merged and counted."""

from collections import Counter

import numpy as np

from persia_torchrec.data import DenseColumn, IdColumn, LabelColumn
from persia_torchrec.datasets.columns import (
    Columns,
    Ids,
    Rows,
    join_rows,
    merge_rows,
    note_others,
    to_offsets,
)


def rows(*lists, label=0.0, others=None):
    """Return rows with lists of ids, each id the weight of itself."""
    values = np.array([one for of_row in lists for one in of_row], np.int64)
    ids = Ids(values, to_offsets(np.array([len(one) for one in lists])), values / 1)
    numbers = np.full(len(lists), label, np.float32)
    return Rows(len(lists), [ids], [numbers], [], {"id": 1}, {"label": others or {}})


def lists_of(ids):
    return np.split(ids.values, np.cumsum(ids.lengths())[:-1])


def test_parts_of_rows_that_are_joined_are_the_rows():
    whole = rows([1, 2], [], [3], [4, 5, 6])
    again = join_rows([whole.part(0, 1), whole.part(1, 4)])
    assert again.num_rows == 4
    assert again.ids[0].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert again.ids[0].lengths().tolist() == [2, 0, 1, 3]
    assert again.ids[0].weights.tolist() == again.ids[0].values.tolist()
    assert again.missing == {}


def test_rows_are_taken_in_any_order_with_their_lists():
    taken = rows([1, 2], [], [3]).take(np.array([2, 0, 2]))
    assert [one.tolist() for one in lists_of(taken.ids[0])] == [[3], [1, 2], [3]]


def test_blocks_that_are_joined_count_together():
    one, two = (rows([1], others={"pv": 2}), rows([2], others={"pv": 1, "buy": 3}))
    joined = join_rows([one, two])
    assert joined.missing == {"id": 2}
    assert joined.others == {"label": {"pv": 3, "buy": 3}}
    has_positive = two._replace(others={})
    assert join_rows([one, has_positive]).others == {}


def test_columns_that_were_read_apart_are_merged_in_their_order():
    ids, label = IdColumn("id"), LabelColumn("label")
    dense = DenseColumn("age")
    columns = Columns((ids, label, dense))
    of_ids = rows([7])._replace(labels=[], others={})
    of_rest = rows([])._replace(
        num_rows=1, ids=[], labels=[np.ones(1)], dense=[np.full(1, 5.0)], missing={}
    )
    parts = [
        (Columns((dense, label), needs_ids=False), of_rest),
        (Columns((ids,)), of_ids),
    ]
    merged = merge_rows(columns, parts)
    assert merged.ids[0].values.tolist() == [7]
    assert (merged.labels[0].tolist(), merged.dense[0].tolist()) == ([1.0], [5.0])
    assert merged.missing == {"id": 1}


def test_a_label_with_a_positive_row_is_told_of_no_more():
    others = {"label": Counter()}
    note_others(others, rows([1], others={"pv": 2}))
    assert others == {"label": {"pv": 2}}
    note_others(others, rows([1])._replace(others={}))
    assert others == {}
