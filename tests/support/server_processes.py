"""Embedding servers as processes of a job, whose memory ends with them."""

from contextlib import closing, contextmanager

import numpy as np

from persia_torchrec import Constant
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.server.__main__ import main
from persia_torchrec.table import TableSpec
from tests.support.ports import draw_port
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S

COUNT = TableSpec(name="count", dim=1, optimizer=SGD(1.0), initializer=Constant(0.0))
NUM_IDS = 10  # of a batch, which no other has


def address_of(server):
    server.has_printed("ready tcp")
    return server.output().partition("ready ")[2].split()[0]


def known_updates(book):
    """Return how many updates the job knows of server 0."""
    return int((book.note("updates/server/0") or "0").split()[0])


class Counted:
    """A job of one server, and a client that continues when that lost its memory.

    An id's weight is how often it was trained. The server's memory ends with it.
    """

    def __init__(self, processes, book, *flags):
        self._processes, self._book, self.num_starts = processes, book, 0
        self._flags = "--port", str(draw_port()), "--capacity", "1000000", *flags
        self._logs = "--increments-dir", str(processes.folder / "increments")
        self.run = str(processes.folder / "run")
        self.start()
        self.client = EmbeddingClient.connect(
            [address_of(self.server)], timeout_s=DEADLINE_S, recovery_s=DEADLINE_S
        )
        self.client.add_tables([COUNT])

    def start(self):
        env = {"PERSIA_STORE_PORT": str(self._book.port)}
        env["PERSIA_STORE_HOST"] = "127.0.0.1"
        self.num_starts += 1
        name, flags = f"start {self.num_starts}", [*self._flags, *self._logs]
        self.server = self._processes.start(name, main, flags, env=env)

    def pull(self, number):
        ids = np.arange(NUM_IDS * number, NUM_IDS * (number + 1), dtype=np.uint64)
        tables = [("count", self.client.split(ids))]
        self.client.pull(tables, batch=BatchNumber(7, number))
        return tables

    def train(self, number):
        grads = np.full((NUM_IDS, 1), -1.0, np.float32)
        batch, tables = BatchNumber(7, number), self.pull(number)
        return self.client.outcome(self.client.push(tables, [grads], batch))

    def dump(self):
        self.client.checkpoints.dump(self.run)
        wait_until(lambda: self._book.note("checkpoint_dir"), "the run is known")

    def lose_memory(self):
        self.server.kill()
        self.start()

    def counts(self, num_batches):
        """Return how often each id was trained, by batch."""
        ids = np.arange(NUM_IDS * num_batches, dtype=np.uint64)
        return self.client.read("count", ids).reshape(num_batches, NUM_IDS)


@contextmanager
def counted_job(folder, *flags):
    book = AddressBook.host(0, recovery_s=DEADLINE_S)
    book.publish(JobTimings(heartbeat_s=0.1, silent_s=30.0))
    with closing(book), Processes(folder) as processes:
        job = Counted(processes, book, *flags)
        with closing(job.client):
            yield job, book
        book.finish()
        assert job.server.status() == 0
