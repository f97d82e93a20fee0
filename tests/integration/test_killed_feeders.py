"""Embedding workers and data loaders that are killed while a job trains."""

import contextlib
import signal
from functools import partial

import numpy as np
import pytest

from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.data.stream import Inbox
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.wire.membership import JobTimings
from tests.integration.feeding import NUM_IDS, load, load_and_stay, make_batches, work
from tests.local_job import LocalJob
from tests.processes import Processes, wait_until
from tests.servers import DEADLINE_S

pytestmark = pytest.mark.multiprocess

NUM_BATCHES = 70
NUM_LOADERS = 2
FROM_ZERO = EmbeddingConfig((0, 0), weight_bound=0)


class Feeders:
    """Starts the workers and loaders of a job, again when it has killed one."""

    def __init__(self, processes: Processes, job: LocalJob) -> None:
        self._processes = processes
        self._job = job
        self._running = {}
        self._ports = {}

    def start_worker(self, index: int) -> None:
        port = self._ports.get(index, 0)
        options = ["--index", str(index), "--num-workers", "2", "--port", str(port)]
        name = f"worker {index}"
        self._running[name] = self._processes.start(name, work, options)

    def start_loader(self, index: int) -> None:
        name = f"loader {index}"
        self._running[name] = self._processes.start(
            *(name, load, NUM_BATCHES, index, NUM_LOADERS),
            env={"REPLICA_INDEX": str(index), "REPLICA_SIZE": str(NUM_LOADERS)},
        )

    def kill(self, name: str) -> None:
        """Kill a process, wherever it is, and start it again, unless it has ended."""
        role, index = name.split()
        if role == "worker":
            address = self._job.book.peek(f"address/worker/{index}")
            self._ports[int(index)] = address.rpartition(":")[2]
        with contextlib.suppress(ProcessLookupError):
            self._running[name].send(signal.SIGKILL)
        if self._running[name].status() == 0:
            return  # a loader that was through
        getattr(self, f"start_{role}")(int(index))

    def finish(self) -> None:
        """Wait until the loaders have ended well."""
        for index in range(NUM_LOADERS):
            loader = self._running[f"loader {index}"]
            assert loader.status() == 0, loader.output()


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
        JobTimings(heartbeat_s=0.1).publish(job.book)
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


def counted():
    """Return the weights of all ids when each batch was trained once."""
    ids = np.concatenate([b.id_type_features[0].ids for b in make_batches(NUM_BATCHES)])
    expected = np.bincount(ids.astype(np.int64), minlength=NUM_IDS)
    return np.repeat(expected[:, None], 4, axis=1).tolist()


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
                assert loader.status() == -signal.SIGKILL, loader.output()
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
