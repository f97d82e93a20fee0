import json
from collections import Counter
from contextlib import ExitStack, closing
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.data import (
    CsvDataset,
    IdColumn,
    LabelColumn,
    ParquetDataset,
    RowGroups,
    WorkQueue,
    row_group_slices,
)
from persia_torchrec.datasets.work_queue import _Counter
from persia_torchrec.errors import ConfigError, DataError, JobError
from persia_torchrec.job.registry import AddressBook
from tests.support.threads import all_at_once

COLUMNS = (IdColumn("id", is_text=False), LabelColumn("label"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def book():
    with closing(AddressBook.host(0)) as hosted:
        yield hosted


def numbered(folder, *sizes):
    """Files of rows whose numbers, over all files, are their IDs."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.csv")
        lines = [f"{n},{n}\n" for n in range(first, first + size)]
        paths[-1].write_text("".join(lines))
        first += size
    return paths


def ids_of(batches):
    return [n for b in batches for n in b.id_features["id"].values().tolist()]


class Trainers:
    """Trainers of one queue in this process, each with a connection to its host."""

    def __init__(self, book, start, num_trainers, make):
        self.stack = ExitStack()
        self.datasets = []
        for rank in range(num_trainers):
            dataset = make()
            joined = AddressBook.join("127.0.0.1", book.port)
            self.stack.enter_context(closing(joined))
            dataset._queue._counter = _Counter(joined, f"queue/{start}", rank)
            self.datasets.append(dataset)

    def load(self, state):
        for dataset in self.datasets:
            dataset.load_state_dict(state)

    def begin(self):
        self.iterators = [iter(dataset) for dataset in self.datasets]
        self.taken = [[] for _ in self.datasets]

    def to_the_end(self, parts):
        """Return the batches of each trainer, which are whole steps."""
        for batches, rest in zip(self.taken, self.iterators, strict=True):
            batches += rest
            assert len(batches) % parts == 0
        return self.taken

    def save(self, num_trained):
        """Do what data_state.py does for trainers that are processes."""
        num_taken = self.datasets[0].num_taken()
        leases = [
            dataset.leases(num_taken, trained)
            for dataset, trained in zip(self.datasets, num_trained, strict=True)
        ]
        return self.datasets[0].joint_state(num_taken, list(chain(*leases)))


starts = iter(range(2**62))


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_each_row_counts_once_along_the_history_that_survives(folder, book, data):
    """Trainers read ahead, save, are killed, and are others in number afterwards."""
    least, parts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(
        st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(
            lambda sizes: sum(sizes) >= least * parts
        )
    )
    paths, num_epochs = numbered(folder, *sizes), data.draw(st.integers(1, 2))
    shuffle = data.draw(st.booleans())
    batch_size = st.integers(least * parts, 9)
    settings = {"shuffle": shuffle, "min_batch_size": least, "micro_batches": parts}

    def make():
        queue = WorkQueue(paths, num_epochs, seed=3)
        return CsvDataset(queue, data.draw(batch_size), COLUMNS, **settings)

    def ids_of_some(batches):
        found = [ids_of([batch]) for batch in batches]
        assert min(map(len, found), default=least) >= least
        return chain(*found)

    survived, state = [], None
    for life in range(data.draw(st.integers(1, 4))):
        is_last = life == 3 or data.draw(st.booleans())
        num_trainers = data.draw(st.integers(1, 3))
        trainers = Trainers(book, next(starts), num_trainers, make)
        with trainers.stack:
            if state is not None:
                trainers.load(state)
            trainers.begin()
            for rank in data.draw(st.lists(st.integers(0, num_trainers - 1))):
                if (batch := next(trainers.iterators[rank], None)) is not None:
                    trainers.taken[rank].append(batch)
            if is_last:
                survived += chain(*map(ids_of_some, trainers.to_the_end(parts)))
                break
            num_steps = [len(taken) // parts for taken in trainers.taken]
            trained = [data.draw(st.integers(0, num)) * parts for num in num_steps]
            state = json.loads(json.dumps(trainers.save(trained)))
            for batches, num in zip(trainers.taken, trained, strict=True):
                survived += ids_of_some(batches[:num])
            for iterator in trainers.iterators:  # these are lost
                next(iterator, None)
    else:
        trainers = Trainers(book, next(starts), 1, make)
        with trainers.stack:
            trainers.load(state)
            trainers.begin()
            survived += chain(*map(ids_of_some, trainers.to_the_end(parts)))
    assert Counter(survived) == dict.fromkeys(range(sum(sizes)), num_epochs)


def test_rows_that_are_too_few_for_a_trainer_go_to_the_one_before(tmp_path, book):
    paths = numbered(tmp_path, 5, 5, 1)

    def make():
        queue = WorkQueue(paths, shuffle=False)
        return CsvDataset(queue, 3, COLUMNS, min_batch_size=2)

    trainers = Trainers(book, next(starts), 2, make)
    with trainers.stack:
        trainers.begin()
        first, other = trainers.iterators
        taken = [next(first), next(first)]
        assert list(other) == []
        assert ids_of([*taken, *first]) == list(range(11))
    with pytest.raises(DataError, match=r"A WorkQueue must have at least 2 rows"):
        CsvDataset(WorkQueue(paths[2:]), 3, COLUMNS, min_batch_size=2)


def test_a_number_is_taken_once_when_trainers_race(book):
    def take_all(rank):
        with closing(AddressBook.join("127.0.0.1", book.port)) as joined:
            counter = _Counter(joined, "queue/race", rank)
            return list(iter(lambda: counter.take(200), None))

    taken = all_at_once(take_all, range(4))
    assert sorted(chain(*taken)) == list(range(200))
    assert all(numbers == sorted(numbers) for numbers in taken)


def test_a_change_that_was_made_counts_when_its_answer_is_lost(book, monkeypatch):
    """The request is sent again, when another trainer has already gone on."""
    own, other = (_Counter(book, "queue/resent", rank) for rank in range(2))
    claim = book.claim_note

    def claim_again(key, value, expected=""):
        claim(key, value, expected)
        monkeypatch.setattr(book, "claim_note", claim)
        assert other.take(9) == 1
        return claim(key, value, expected)

    monkeypatch.setattr(book, "claim_note", claim_again)
    assert own.take(9) == 0
    assert [own.take(9), other.take(9), own.num_taken()] == [2, 3, 4]


def test_each_epoch_has_all_items_in_an_order_of_its_own(tmp_path):
    paths = numbered(tmp_path, *[1] * 20)
    items = list(iter(WorkQueue(paths, 3, seed=1).take, None))
    assert [item.number for item in items] == list(range(60))
    assert [item.epoch for item in items] == [n // 20 for n in range(60)]
    orders = [[i.place for i in items if i.epoch == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    again = list(iter(WorkQueue(paths, 3, seed=1).take, None))
    assert items == again
    in_order = iter(WorkQueue(paths, shuffle=False).take, None)
    assert [item.file for item in in_order] == paths


def test_row_groups_are_items_of_about_the_same_size(tmp_path):
    paths = []
    for name, num_rows in (("a", 70), ("b", 7), ("c", 30)):
        paths.append(tmp_path / name)
        column = list(range(num_rows))
        table = pa.table({"id": column, "label": column})
        pq.write_table(table, paths[-1], row_group_size=5)
    slices = row_group_slices(paths, 7)
    assert slices[-2:] == [RowGroups(paths[2], 0, 3), RowGroups(paths[2], 3, 6)]
    assert [s.stop - s.first for s in slices] == [3, 4, 3, 4, 2, 3, 3]
    dataset = ParquetDataset(WorkQueue(slices, 2), 8, COLUMNS, shuffle=True)
    assert Counter(ids_of(dataset)) == {
        **dict.fromkeys(range(7), 6),
        **dict.fromkeys(range(7, 30), 4),
        **dict.fromkeys(range(30, 70), 2),
    }
    assert dataset.num_rows == 107
    with pytest.raises(ConfigError, match="at most the number of row groups, 22"):
        row_group_slices(paths, 23)


def test_rows_that_a_broken_loop_left_come_first_in_the_next(tmp_path):
    queue = WorkQueue(numbered(tmp_path, 5, 6, 7), shuffle=False)
    dataset = CsvDataset(queue, 4, COLUMNS, num_parallel_reads=3)
    batches = iter(dataset)
    first = ids_of([next(batches)])
    rest = iter(dataset)
    assert dataset.state_dict()["leases"][:2] == [(0, 4), (1, 0)]
    assert first + ids_of(rest) == list(range(18))
    assert ids_of(dataset) == []
    assert dataset.state_dict()["leases"] == []


def test_only_wanted_rows_of_a_queue_are_read(tmp_path):
    queue = WorkQueue(numbered(tmp_path, 5, 6, 7), 2)
    dataset = CsvDataset(queue, 4, COLUMNS, rows=[1, 9, 16])
    assert Counter(ids_of(dataset)) == {1: 2, 9: 2, 16: 2}
    assert dataset.num_rows == 3


def test_a_state_of_another_queue_names_the_difference(tmp_path):
    paths = numbered(tmp_path, 5, 6, 7)
    state = CsvDataset(WorkQueue(paths[:2], seed=1), 4, COLUMNS).state_dict()
    other = CsvDataset(WorkQueue(paths[1:], 2, seed=2), 4, COLUMNS)
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state)
    message = str(caught.value)
    for part in (
        "files that were saved and are not here: ['0.csv (20 bytes, xxh3 ",
        "files that are here and were not saved: ['2.csv (42 bytes, xxh3 ",
        "num_epochs: 1 was saved, 2 is here",
        "seed of the queue: 1 was saved, 2 is here",
    ):
        assert part in message
    begun = CsvDataset(WorkQueue(paths[:2], seed=1), 4, COLUMNS)
    next(iter(begun))
    with pytest.raises(ConfigError, match="before its first item is taken"):
        begun.load_state_dict(state)


def test_settings_that_cannot_work_are_errors(tmp_path):
    paths = numbered(tmp_path, 5, 6)
    for wrong, message in (
        ({"items": []}, "at least one"),
        ({"items": [paths[0]] * 2}, "2 items, 1 of them different"),
        ({"num_epochs": 0}, "num_epochs must be >= 1"),
        ({"seed": -1}, "seed -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            WorkQueue(**{"items": paths, **wrong})
    with pytest.raises(DataError, match=r"none.csv must be a file"):
        WorkQueue([tmp_path / "none.csv"])
    for wrong in ({"partition_count": 2}, {"drop_remainder": True}):
        with pytest.raises(ConfigError, match="A WorkQueue divides files"):
            CsvDataset(WorkQueue(paths), 4, COLUMNS, **wrong)


def test_trainers_without_a_process_group_cannot_make_a_queue(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"Call torch.distributed.init_process_group"):
        WorkQueue(numbered(tmp_path, 5))


def test_one_of_several_trainers_cannot_save_alone(tmp_path, book):
    dataset = CsvDataset(WorkQueue(numbered(tmp_path, 5)), 4, COLUMNS)
    dataset._queue._counter = _Counter(book, "queue/alone", 0)
    with pytest.raises(ConfigError, match="by all trainers together"):
        dataset.state_dict()


def test_without_its_host_a_queue_is_an_error_and_no_end_of_data(tmp_path):
    with closing(AddressBook.host(0)) as host:
        joined = AddressBook.join("127.0.0.1", host.port)
        dataset = CsvDataset(WorkQueue(numbered(tmp_path, 5, 5)), 4, COLUMNS)
        dataset._queue._counter = _Counter(joined, "queue/gone", 0)
    with closing(joined), pytest.raises(JobError, match="address book"):
        list(dataset)
