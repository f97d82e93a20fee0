"""Which rows of files are read, in which order, from which one on."""

import contextlib
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_torchrec import timeouts
from persia_torchrec.data import IdColumn, LabelColumn, ParquetDataset
from persia_torchrec.datasets.reading import partition, runs_from, select, windows_of
from persia_torchrec.errors import ConfigError
from tests.support.threads import InThread

COLUMNS = IdColumn("id", is_text=False), LabelColumn("label")
GROUP, NUM = 7, 50


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of eight groups each."""
    folder = tmp_path_factory.mktemp("reading")
    for name in ("a", "b"):
        table = pa.table({"id": [*range(NUM)], "label": [0.0] * NUM})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=GROUP)
    return ParquetDataset(folder, 8, COLUMNS)._files


def numbers_of(groups):
    return [(group.file.source.name, group.group) for group in groups]


def test_all_groups_are_selected_or_those_rows_that_are_wanted(files):
    every = select(files, None)
    assert [group.num_rows for group in every] == [*[GROUP] * 7, 1] * 2
    assert sum(group.kept is not None for group in every) == 0
    wanted = np.array([NUM + 8, 3, 6])
    kept = [group for group in select(files, wanted) if group.num_rows]
    assert numbers_of(kept) == [("a.parquet", 0), ("b.parquet", 1)]
    assert [group.kept.tolist() for group in kept] == [[3, 6], [1]]


@pytest.mark.parametrize("rows", [[], [1, 1], [-1], [2 * NUM]])
def test_rows_that_are_none_of_the_files_are_rejected(files, rows):
    with pytest.raises(ConfigError, match=r"different row numbers in \[0, 100\)"):
        select(files, np.array(rows, np.int64))


def test_partitions_have_each_group_once(files):
    groups = select(files, None)
    parts = [partition(groups, 3, index) for index in range(3)]
    assert sorted(numbers_of(g for part in parts for g in part)) == numbers_of(groups)
    with pytest.raises(ConfigError, match="at most the number of groups of rows, 16"):
        partition(groups, 17, 0)


def test_windows_follow_from_the_seed_and_have_every_group_once(files):
    groups = select(files, None)
    plain = [*windows_of(groups, None, 20)]
    assert [numbers_of(w.groups)[0] for w in plain] == [
        ("a.parquet", 0),
        ("b.parquet", 0),
    ]
    shuffled = [*windows_of(groups, (3, 1), 20)]
    assert sorted(numbers_of(g for w in shuffled for g in w.groups)) == numbers_of(
        groups
    )
    assert all(window.num_rows >= 20 for window in shuffled[:-1])
    assert len({window.seed for window in shuffled}) == len(shuffled)
    again, other = windows_of(groups, (3, 1), 20), windows_of(groups, (3, 2), 20)
    assert [numbers_of(w.groups) for w in again] == [
        numbers_of(w.groups) for w in shuffled
    ]
    assert [numbers_of(w.groups) for w in other] != [
        numbers_of(w.groups) for w in shuffled
    ]


@given(st.integers(0, 2 * NUM - 1))
def test_reading_begins_at_any_row(files, row):
    runs = [*runs_from(windows_of(select(files, None), None, 20), row)]
    num_rows = sum(group.num_rows for run in runs for group in run.groups)
    assert num_rows - sum(run.skip for run in runs) == 2 * NUM - row
    assert all(run.skip < run.groups[0].num_rows for run in runs)
    assert all(run.ends_window for run in runs)


@pytest.mark.parametrize("settings", [{}, {"num_parallel_reads": 2}, {"shuffle": True}])
def test_an_iterator_may_be_garbage_wherever_a_thread_starts(
    tmp_path, monkeypatch, settings
):
    monkeypatch.setattr(timeouts, "READS_CLOSE_S", 0.1)
    table = pa.table({"id": [*range(NUM)], "label": [0.0] * NUM})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=GROUP)
    iterator = iter(ParquetDataset(tmp_path, 8, COLUMNS, **settings))
    next(iterator)
    # Until Python 3.13 threads that start, end or are joined take it.
    lock = getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext())

    def close():
        nonlocal iterator
        with lock:
            del iterator

    InThread(close).result()
