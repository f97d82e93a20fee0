"""Embedding workers and data loaders that are killed while a job trains."""

from functools import partial

import pytest

from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.job.signals import START_AGAIN
from persia_torchrec.persia.stream import Inbox
from tests.support.feeding import (
    FROM_ZERO,
    NUM_BATCHES,
    NUM_IDS,
    NUM_LOADERS,
    Feeders,
    counted,
    load_and_stay,
)
from tests.support.local_job import LocalJob
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.multiprocess


KILLS = {
    6: ["worker 0"],
    14: ["loader 0"],
    22: ["worker 1", "loader 1"],
    30: ["worker 0", "worker 1"],
    38: ["loader 0", "loader 1"],
    46: ["loader 1", "worker 1", "worker 0", "loader 0"],
}


def test_every_batch_is_trained_once_when_processes_are_killed(tmp_path, monkeypatch):
    with (
        Processes(tmp_path) as processes,
        LocalJob(tmp_path, monkeypatch, num_workers=0, recovery_s=DEADLINE_S) as job,
    ):
        job.book.publish(JobTimings(heartbeat_s=0.1))
        feeders = Feeders(processes, job)
        for index in range(2):
            feeders.start_worker(index)
        with job.train_ctx(embedding_config=FROM_ZERO) as ctx:
            batches = iter(DataLoader(StreamingDataset(3), embedding_staleness=4))
            for index in range(NUM_LOADERS):
                feeders.start_loader(index)
            numbers = []
            for step, batch in enumerate(batches):
                for name in KILLS.get(step, ()):
                    feeders.kill(name)
                numbers.append(batch.batch_id)
                ctx.backward(-ctx.forward(batch)[0].sum())
        assert sorted(numbers) == list(range(NUM_BATCHES))
        feeders.finish()
        job.client.learn_tables()
        assert job.read("item", *range(NUM_IDS)).tolist() == counted()


def test_a_loader_that_has_ended_sends_its_batches_to_trainers_that_start_again(
    tmp_path, monkeypatch
):
    with (
        Processes(tmp_path) as processes,
        LocalJob(tmp_path, monkeypatch, recovery_s=DEADLINE_S) as job,
    ):
        loader = None
        for starts in (1, 2):
            inbox = Inbox(3, 0, 1)
            service = inbox.listen("127.0.0.1", job.book.greeting)
            job.book.register("trainer", 0, 1, service.address)
            if loader is not None:
                assert loader.status() == START_AGAIN, loader.output()
            loader = processes.start("loader", load_and_stay, 2)
            numbers = []
            while (batch := inbox.take(DEADLINE_S, in_order=True)) is not None:
                numbers.append(batch.origin.number)
                job.buffers[0].remove(0, batch.origin.number)
                batch.origin.settle()
            assert numbers == [1, 2]
            wait_until(
                partial(has_ended, loader, starts), "the loader ends", DEADLINE_S
            )
            service.close()


def has_ended(loader, times):
    return loader.output().count("waits") == times
