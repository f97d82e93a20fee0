"""The base of the increments, which servers write where the log has grown."""

from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec.checkpoint.catalog import Manifest, find_checkpoint
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import (
    base_of,
    find_lines,
    find_start,
    list_increments,
    read_base,
)
from persia_torchrec.checkpoint.load import Target
from persia_torchrec.checkpoint.restore import restore
from persia_torchrec.errors import CheckpointError
from persia_torchrec.server import increments
from persia_torchrec.server.checkpoint_service import BaseDump
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from tests.support.increments import (
    ITEM,
    OTHER,
    Training,
    become_equal,
    follow,
    short_intervals,  # noqa: F401  # a fixture
)
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

IDS = np.arange(60, dtype=np.uint64)


@pytest.fixture(autouse=True)
def small_logs(monkeypatch):
    monkeypatch.setattr(increments, "_LEAST_BYTES", 2**14)


@pytest.fixture
def training(servers, tmp_path):
    ratio = {"increments_base_ratio": 1e-6}
    training = Training(servers, tmp_path, **ratio)
    training.train(*range(40))
    training.train(*range(40), table="other")
    training.dump()
    return training


def first_numbers(training):
    folders = [Folder(training.logs).child(n) for n in names_of(training)]
    return [min(list_increments(folder), default=0) for folder in folders]


def names_of(training):
    lines = find_lines(Folder(training.logs), {})
    return [line.logs[0].name for line in lines]


def train_until_a_base(training):
    """Train until the servers have a base, and have deleted what is before it."""
    before = read_base(Folder(training.logs))
    created = "" if before is None else before[1].created

    def has_base():
        training.train(*np.random.default_rng(1).integers(60, size=30).tolist())
        found = read_base(Folder(training.logs))
        return found and found[1].created > created and min(first_numbers(training)) > 1

    wait_until(has_base, "there is a base")
    training.train(*range(10, 50))
    training.write(*range(5, 20), table="other")


@pytest.mark.slow
def test_the_log_gets_a_base_and_what_is_before_it_goes(servers, training):
    follower = follow(servers, training)
    for _ in range(3):
        train_until_a_base(training)
    become_equal(follower, training)
    late = follow(servers, training, 3)  # whose checkpoint is continued by none
    become_equal(late, training)
    num_files = len([n for n in base_of(Folder(training.logs)).names() if "rows" in n])
    assert num_files <= 4
    client = servers.client(servers.start(3))
    client.checkpoints.load(training.run, increments=training.logs)
    client.learn_tables()
    for name in ("item", "other"):
        expected = training.client.read(name, IDS)
        assert np.array_equal(client.read(name, IDS), expected)


def test_the_last_increment_stays_so_that_others_are_missed(training):
    training.dump()
    first = find_checkpoint(training.run)
    for batches in (range(15), range(15, 30)):  # in two increments at least
        training.write(*batches)
    training.dump()
    second = find_checkpoint(training.run)
    training.client.checkpoints.prune()

    def are_pruned():
        return all(
            list_increments(Folder(training.logs).child(line.logs[0].name))
            == [line.position_in(Manifest.read(second)).number - 1]
            for line in find_lines(Folder(training.logs), {})
        )

    wait_until(are_pruned, "all but the last ones are deleted")
    for folder, has_all in (first, False), (second, True):
        checkpoint = folder, Manifest.read(folder)
        start = find_start(find_lines(Folder(training.logs), {}), [checkpoint])
        assert start.has_increments(Folder(training.logs)) == has_all


def test_a_lost_memory_is_restored_from_the_base(training):
    train_until_a_base(training)
    num_rows = training.client.num_rows()
    target = Target(1, 2, 1000, is_lfu=False)
    for run in (None, Folder(training.run)):

        def has_all(run=run):  # servers may write the base of what has come last
            store = ServerConfig(capacity_rows=1000).make_store()
            found = restore(store, target, run, Folder(training.logs))
            is_of_base = found.checkpoint == base_of(Folder(training.logs)).url
            return is_of_base and store.num_rows == num_rows[1]

        wait_until(has_all, "a restore from the base has all rows")


def set_created(training, year):
    """Set when the latest checkpoint was written; return its URL."""
    folder = find_checkpoint(training.run)
    manifest = replace(Manifest.read(folder), created=f"{year}-01-01T00:00:00+00:00")
    manifest.write(folder)
    return folder.url


def restored(training):
    """Return what a server without memory restores from."""
    store = ServerConfig(capacity_rows=1000).make_store()
    target, run = Target(1, 2, 1000, is_lfu=False), Folder(training.run)
    return restore(store, target, run, Folder(training.logs)).checkpoint


@pytest.mark.parametrize("year", [1999, 2099])
def test_no_clock_decides_what_is_deleted_and_read(servers, training, year):
    set_created(training, year)
    train_until_a_base(training)
    base = base_of(Folder(training.logs)).url
    wait_until(lambda: restored(training) == base, "the base is restored")
    become_equal(follow(servers, training, 3), training)

    def is_restored():
        training.dump()  # again, if a base that had begun before it came after it
        return restored(training) == set_created(training, year)

    wait_until(is_restored, "the checkpoint is restored")
    become_equal(follow(servers, training, 3), training)


def test_no_delta_is_saved_whose_increments_were_deleted(training):
    first, *_ = (training.folder / "run").iterdir()
    train_until_a_base(training)
    task = training.client.checkpoints.start_delta(Folder(first), timeout_s=60)
    with pytest.raises(CheckpointError, match="Save a whole checkpoint"):
        task.wait(60)


@pytest.fixture
def write_base(monkeypatch):
    """Return what has one server of a training write its part of the base."""
    wanting = set()  # shards
    begin = Increments.begin_base
    wants = property(lambda self: self.is_writing and self._config.shard in wanting)
    monkeypatch.setattr(Increments, "wants_base", wants)

    def begin_wanted(self):
        wanting.discard(self._config.shard)
        return begin(self)

    monkeypatch.setattr(Increments, "begin_base", begin_wanted)

    def write(training, shard):
        service = training.running[shard].server.shard.checkpoints
        wanting.add(shard)
        wait_until(
            lambda: shard not in wanting and not isinstance(service._dump, BaseDump),
            "the server has written its part",
        )

    return write


def are_read(servers, training):
    """Whether a load with increments gives what the training has."""
    expected = training.client.read("item", IDS)
    client = servers.client(servers.start(3))
    client.checkpoints.load(training.run, increments=training.logs)
    client.learn_tables()
    return np.array_equal(client.read("item", IDS), expected)


@pytest.mark.parametrize("dim", [4, 6])
def test_no_base_mixes_rows_before_and_after_a_drop(servers, tmp_path, write_base, dim):
    training = Training(servers, tmp_path)
    training.dump()
    training.write(*range(40))
    for shard in (0, 1):
        write_base(training, shard)
    training.client.drop_table("item")
    training.client.add_tables([replace(ITEM, dim=dim)])
    training.write(*range(30, 50))
    write_base(training, 1)
    training.write(*range(45, 55))
    assert are_read(servers, training)
    _, manifest = read_base(Folder(training.logs))
    write_base(training, 0)
    assert read_base(Folder(training.logs))[1] != manifest
    assert are_read(servers, training)


def test_no_base_mixes_rows_before_and_after_a_load(servers, tmp_path, write_base):
    training = Training(servers, tmp_path)
    training.dump()
    training.write(*range(40))
    for shard in (0, 1):
        write_base(training, shard)
    training.client.checkpoints.load(training.run)
    for first in (30, 35):
        training.write(*range(first, first + 15))
    write_base(training, 1)
    training.client.checkpoints.prune()
    training.write(*range(40, 55))
    assert are_read(servers, training)
    become_equal(follow(servers, training), training)


def test_there_is_none_where_it_is_turned_off(servers, tmp_path):
    training = Training(servers, tmp_path, 1, increments_base_ratio=0)
    wait_until(lambda: grows(training), "the log has grown")
    assert read_base(Folder(training.logs)) is None
    assert OTHER.name in training.client.tables


def grows(training):
    training.train(*range(60))
    return training.total("increment_bytes") > 2**17
