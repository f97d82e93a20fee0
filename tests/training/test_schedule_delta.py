"""Joint deltas: a checkpoint, the increments up to a delta, and its dense half."""

import itertools
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from persia_torchrec import (
    DynamicDim,
    EmbeddingClient,
    Expiry,
    TableSettings,
    load_checkpoint,
    recoverable,
)
from persia_torchrec.checkpoint import catalog, increment_log
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.job.saves import LAST_CHECKPOINT
from persia_torchrec.training import schedule
from tests.support.delta_job import DIM, SETTINGS, Job, Trainer
from tests.support.groups import run_trainers, trainer_of_group
from tests.support.processes import Processes, wait_until
from tests.support.remote_job import kjt_of

pytestmark = pytest.mark.slow

EXPIRING = {
    name: replace(settings, expiry=Expiry(steps_to_live=1))
    for name, settings in SETTINGS.items()
}
PLAIN = ["plain"]


@pytest.fixture
def start(servers, tmp_path, group):
    jobs = []

    def start(*args, **settings):
        jobs.append(Job(servers, tmp_path, *args, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def job_with_deltas(start, num_servers=2, **settings):
    """Return a job with a checkpoint, and two deltas between which it trained."""
    job = start(num_servers, **settings)
    job.train(5)
    job.save()
    job.train(4)
    job.save_delta()
    job.train(4)
    return job


@pytest.mark.parametrize("capacity_rows", [1000, 30])
def test_a_delta_is_the_live_job_to_the_bit(start, capacity_rows):
    job = job_with_deltas(start, capacity_rows=capacity_rows)
    delta = job.save_delta(step=13)
    expected, order = job.snapshot(), job.order()
    assert sum(store.num_rows for store in job.stores) > 0
    losses = job.train(4)
    resumed = start(2, capacity_rows=capacity_rows)
    loaded = resumed.load()
    assert (loaded.path, loaded.step) == (delta.path, 13)
    assert loaded.num_increments == 2 * 2
    assert resumed.snapshot() == expected
    assert resumed.order() == order
    assert resumed.train(4) == losses
    assert resumed.snapshot(with_time=False) == job.snapshot(with_time=False)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_another_number_of_servers_takes_a_delta(start, num_servers, monkeypatch):
    # Each server would rank its own ids, and so do others.
    unranked = TableSettings(optimizer=Adam(0.1), dynamic=DynamicDim(2, period=1000))
    monkeypatch.setitem(SETTINGS, "dynamic", unranked)
    job = job_with_deltas(start)
    job.save_delta()
    expected = job.snapshot()
    losses = job.train(4)
    resumed = start(num_servers)
    resumed.load()
    assert resumed.snapshot() == expected
    assert resumed.train(4) == losses
    with pytest.raises(
        CheckpointError, match="logs with a gap between it and the current"
    ):
        resumed.save_delta()
    resumed.save()
    resumed.train(1)
    resumed.save_delta()


def test_deltas_continue_after_a_restart(start):
    job = job_with_deltas(start)
    job.save_delta()
    resumed = start(2)
    resumed.load()
    resumed.train(3)
    resumed.save_delta()
    expected = resumed.snapshot()
    once_more = start(2)
    once_more.load()
    assert once_more.snapshot() == expected


def test_later_changes_are_not_in_a_delta(start):
    job = job_with_deltas(start, increments_interval_s=0.02)
    job.save_delta()
    expected = job.snapshot()
    job.train(6)
    wait_until(
        lambda: not sum(c["increments_waiting"] for c in job.client.counters()),
        "the rest is written",
    )
    resumed = start(2)
    resumed.load()
    assert resumed.snapshot() == expected


def test_a_delta_that_was_not_finished_is_not_loaded(start, monkeypatch):
    job = job_with_deltas(start)
    first = job.save_delta()
    expected = job.snapshot()
    job.train(2)
    write = Folder.write_json

    def die(folder, name, value):
        if name == catalog.DELTA:
            raise CheckpointError("killed")
        write(folder, name, value)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write_json", die)
        with pytest.raises(CheckpointError, match="killed"):
            job.save_delta()
    checkpoint = Folder(first.path.rpartition("/")[0])
    assert checkpoint.numbers(r"delta-(\d+)")[-1] == int(first.path[-8:])
    catalog.begin_delta(checkpoint)  # as trainers leave one that are killed
    resumed = start(2)
    assert resumed.load().path == first.path
    assert resumed.snapshot() == expected
    job.train(1)
    assert job.save_delta().path > first.path  # and the servers are free


def test_the_rows_of_a_delta_are_those_that_changed_once(start):
    job = start(1, names=["plain"], num_ids=5000, capacity_rows=10_000)
    everything = kjt_of({"f": [list(range(4000))]})
    some = kjt_of({"f": [list(range(1000))]})
    job.model(everything).sum().backward()
    job.save()
    before = job.client.counters()[0]
    for _ in range(20):
        job.model(some).sum().backward()
    job.save_delta()
    after = job.client.counters()[0]
    assert after["increment_rows"] - before["increment_rows"] == 1000
    row_bytes = 8 + 8 + 4 * (DIM + 2 * DIM)
    written = after["increment_bytes"] - before["increment_bytes"]
    assert written <= 1.2 * 1000 * row_bytes


def test_a_delta_needs_increments_and_a_checkpoint(start):
    job = start(1)
    with pytest.raises(CheckpointError, match="must be a checkpoint, or hold one"):
        job.save_delta()
    without = start(1, increments_dir=None)
    without.save()
    with pytest.raises(CheckpointError, match="must write increments"):
        without.save_delta()
    both = without.client, without.sharders
    deltas = recoverable(without.run, without.state, *both, delta_interval_s=5)
    with pytest.raises(ConfigError, match=r"an interval of 5 s, .*--increments_dir"):
        deltas.__enter__()


def test_a_delta_names_no_increments_of_another_protocol(start):
    job = start(1)
    job.train(2)
    job.save()
    job.train(2)
    folder = Folder(job.save_delta().path)
    named = folder.read_json(catalog.DELTA, dict)
    folder.write_json(catalog.DELTA, {**named, "increments": "reference::file:///a"})
    with pytest.raises(CheckpointError, match="that a client or a file names must be"):
        job.load()


def checkpoints_of(job):
    return [
        f.url.rpartition("-")[2] for f in catalog.complete_checkpoints(Folder(job.run))
    ]


def increments_of(job):
    """Return the numbers of increments that are there, by log, oldest first."""
    logs = Folder(job.servers[0].server.shard.config.increments_dir)
    lines = increment_log.find_lines(logs, {})
    return [
        increment_log.list_increments(logs.child(line.logs[0].name)) for line in lines
    ]


def test_the_newest_checkpoints_stay_with_the_increments_that_they_need(start):
    job = start(1, names=PLAIN)
    for number in range(1, 5):
        job.save(keep=2)
        job.train(1)
        job.save_delta()
        assert len(checkpoints_of(job)) == min(number, 2)
    job.save(keep=2)
    assert checkpoints_of(job) == ["00000005", "00000004"]
    # Each save ends an increment, and so does each delta: these are of the fourth's
    # delta, and of the fifth.
    wait_until(lambda: increments_of(job) == [[8, 9]], "others are deleted")
    resumed = start(1, names=PLAIN)
    delta = next(catalog.complete_deltas(Folder(job.run).child("checkpoint-00000004")))
    assert resumed.load(delta.url).step is None


def test_logs_of_earlier_starts_are_deleted_when_nothing_needs_them(start, monkeypatch):
    job = start(2, names=PLAIN)
    with monkeypatch.context() as patched:  # no server has the time to
        patched.setattr(increment_log.Retention, "apply", lambda *_, **__: None)
        for _ in range(3):
            job.save(keep=1)
            job.train(1)
            job.save_delta()
            job = start(2, names=PLAIN)
            job.load()
    assert len(increments_of(job)) > 2
    logs = Folder(job.servers[0].server.shard.config.increments_dir)
    half_deleted = increment_log.find_lines(logs, {})[0].logs[0].name
    logs.child(half_deleted).remove(increment_log.LOG_FILE)
    job.train(1)
    job.save(keep=1)
    job.save(keep=1)
    wait_until(lambda: len(logs.names()) == 2, "only current logs are left")
    job.train(1)
    job.save_delta()
    expected = job.snapshot()
    resumed = start(2, names=PLAIN)
    resumed.load()
    assert resumed.snapshot() == expected


def test_a_death_between_save_and_deletion_leaves_what_can_be_loaded(
    start, monkeypatch
):
    job = start(1, names=PLAIN)
    job.save(keep=1)
    job.train(1)

    def die(*_):
        raise CheckpointError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(catalog, "delete_older", die)
        with pytest.raises(CheckpointError, match="killed"):
            job.save(keep=1)
    assert checkpoints_of(job) == ["00000002", "00000001"]
    expected = job.snapshot()
    resumed = start(1, names=PLAIN)
    resumed.load()
    assert resumed.snapshot() == expected
    job.save(keep=1)
    assert checkpoints_of(job) == ["00000003"]


def test_a_negative_number_of_checkpoints_is_rejected(start):
    with pytest.raises(ConfigError, match="keep must be >= 0"):
        start(1).save(keep=-1)


def train_recoverably(job, num):
    """Train some batches; return their losses, and from where training was resumed."""
    both, state = (job.client, job.sharders), {**job.state}
    del state["step"]
    losses = []
    with recoverable(
        job.run, state, *both, interval_s=0.0, delta_interval_s=1e-9
    ) as run:
        for number in itertools.islice(run.skip(range(20)), num):
            job.state["step"] = number
            losses += job.train(1)
            job.sweep()
            run.step()
    return losses, run.resumed_from


def test_recoverable_saves_deltas_and_resumes_from_the_last(start, monkeypatch):
    monkeypatch.setattr(schedule, "_LEAST_INTERVAL", 0)
    job = start(2, names=PLAIN)
    _, resumed_from = train_recoverably(job, 6)
    assert resumed_from is None
    (checkpoint,) = catalog.complete_checkpoints(Folder(job.run))
    assert len(list(catalog.complete_deltas(checkpoint))) == 5
    expected = job.train(4)
    resumed = start(2, names=PLAIN)
    losses, resumed_from = train_recoverably(resumed, 4)
    assert resumed_from.endswith("checkpoint-00000001/delta-00000005")
    assert losses == expected
    assert len(list(catalog.complete_deltas(checkpoint))) == 5 + 4


def train_together(rank, folder, *jobs):
    """Be one of two trainers, on the servers of one job and then on those of others."""
    schedule._LEAST_INTERVAL = 0
    with trainer_of_group(rank, 2, folder / "process group"):
        for addresses, num in jobs:
            client = EmbeddingClient.connect(addresses)
            trainer = Trainer(client, folder, EXPIRING)
            with closing(client), closing(trainer):
                train_recoverably(trainer, num)
                name = f"dense {rank} of {len(addresses)}"
                (folder / name).write_bytes(trainer.dense())


@pytest.mark.multiprocess
def test_deltas_of_two_trainers_are_the_live_job_to_the_bit(start, tmp_path):
    few = {"tables": EXPIRING, "capacity_rows": 64}
    many = {"tables": EXPIRING, "capacity_rows": 1000}
    job, later = start(2, **few), start(3, **many)
    jobs = [
        ([server.address for server in each.servers], num)
        for each, num in ((job, 11), (later, 4))
    ]
    with Processes(tmp_path) as processes:
        run_trainers(processes, train_together, tmp_path, *jobs)
    checkpoints = [*catalog.complete_checkpoints(Folder(job.run))][::-1]
    for live, checkpoint, num, others in (
        (job, checkpoints[0], 10, [(2, few), (1, many)]),
        (later, checkpoints[1], 2, [(3, many), (1, many)]),
    ):
        deltas = list(catalog.complete_deltas(checkpoint))
        assert len(deltas) == num
        for num_servers, settings in others:
            resumed = start(num_servers, **settings)
            dense = {key: resumed.state[key] for key in ("model", "optimizer")}
            load_checkpoint(deltas[0].url, dense, resumed.client)
            assert resumed.snapshot()[:3] == live.snapshot()[:3]
            if num_servers == len(live.servers):
                assert resumed.order() == live.order()
            for rank in range(2):
                name = f"dense {rank} of {len(live.servers)}"
                assert (tmp_path / name).read_bytes() == resumed.dense()
    for store in job.stores:
        counts = store.counters()
        assert min(counts[n] for n in ("evictions", "expired_steps", "rejected")) > 0
    parts = {"adaptive/shared", "dynamic/block 2"}
    assert parts <= {name for name, *_ in later.snapshot()[0]}


@pytest.fixture
def member(book, monkeypatch):
    """This process as a trainer, until the test ends."""
    book.publish(JobTimings())
    monkeypatch.setenv("PERSIA_MEMBER", "")
    member = JobMember("trainer", 0, 1, store=("localhost", book.port, ""))
    monkeypatch.setattr(JobMember, "current", member)
    yield member
    member.book.close()


def test_a_job_that_resumes_knows_the_checkpoint(start, member, book, monkeypatch):
    monkeypatch.setattr(schedule, "_LEAST_INTERVAL", 0)
    job = start(2, names=PLAIN)
    train_recoverably(job, 2)
    book.tell(LAST_CHECKPOINT, "")
    train_recoverably(start(2, names=PLAIN), 0)
    assert book.note(LAST_CHECKPOINT) == f"{job.run}/checkpoint-00000001"


class _Probe:
    """Notes whether its trainer says that it makes no steps, when it is saved."""

    num_pauses = 0

    def state_dict(self):
        self.num_pauses = JobMember.current.num_pauses
        return {"x": torch.zeros(1)}

    def load_state_dict(self, _):
        self.num_pauses = 0


def test_a_trainer_that_saves_says_so(start, member):
    job, probe = start(1, names=PLAIN), _Probe()
    job.state["probe"] = probe
    job.save()
    assert probe.num_pauses == 1
    assert member.num_pauses == 0
