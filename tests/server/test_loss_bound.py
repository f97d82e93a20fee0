"""What is lost with a server's memory: at most two intervals, reported as it is."""

import contextlib
import re
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest

from persia_torchrec import Constant
from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.server.__main__ import main
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.membership import JobTimings
from tests.ports import draw_port
from tests.processes import Processes, wait_until
from tests.server.test_checkpoints import Clock
from tests.server.test_lost_memory import address_of, kill, known_updates
from tests.servers import DEADLINE_S

COUNT = TableSpec(name="count", dim=1, optimizer=SGD(1.0), initializer=Constant(0.0))
INTERVAL_S = 10.0
NUM_IDS = 10  # of a batch, which no other has


class Busy:
    """The increments of a server that is never idle, whose slices take a second."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.setattr("persia_torchrec.server.increments._SLICE_BYTES", 2**8)
        monkeypatch.setattr("persia_torchrec.server.increments._CHECK_S", 0.001)
        self.clock = clock = Clock()
        clock.thread_time = self.thread_time
        self.activity = Activity(clock.monotonic, clock.thread_time)
        self.store = EmbeddingStore(1000)
        self.store.add_table(COUNT)
        logs = {"incremental_dir": str(folder), "incremental_interval_s": INTERVAL_S}
        config = ServerConfig(capacity_rows=1000, **logs)
        self.increments = Increments(config, self.store, self.activity)
        self.work()

    def thread_time(self):
        self.clock.num_calls += 1
        self.clock.cpu_s += 1.0
        return self.clock.cpu_s

    def use(self, first):
        ids = np.arange(first, first + 500, dtype=np.uint64)
        self.store.lookup(0, ids, np.empty((500, 1), np.float32), training=True)

    def work(self, seconds=0.0):
        """Let time pass; return how many slices have been copied in all."""
        self.clock.now_s += seconds
        self.activity.last_s = self.clock.now_s
        self.increments.work(100)
        return self.clock.num_calls // 2

    def counter(self, name):
        self.work()
        return self.increments.counters()[name]


@pytest.fixture
def busy(tmp_path, monkeypatch):
    busy = Busy(tmp_path, monkeypatch)
    yield busy
    busy.increments.close()


def test_an_increment_is_written_before_the_next_one_whatever_the_budget(busy):
    busy.use(0)
    assert busy.work(INTERVAL_S - 0.1) == 0
    num_slices = 2 * 500 // (2**8 // 20) // 2  # 20 bytes of a row
    busy.work(0.1)
    # The budget allows one a moment: a second is that of 16 seconds.
    wait_until(lambda: busy.work() == 1, "one is copied")
    busy.work(0.75 * INTERVAL_S / 2)
    half = num_slices // 2
    wait_until(lambda: busy.work() >= half, "half of the rows are copied")
    assert busy.work() in range(half, half + 3)
    busy.use(500)
    busy.work(0.75 * INTERVAL_S / 2)
    wait_until(lambda: busy.counter("increments") == 1, "it is written")
    assert busy.counter("unwritten_ms") == 750 * INTERVAL_S
    assert busy.counter("unwritten_ms_max") == 1750 * INTERVAL_S
    busy.work(0.25 * INTERVAL_S)
    busy.work(0.75 * INTERVAL_S)
    wait_until(lambda: busy.counter("increments") == 2, "the next one is written")
    assert busy.counter("unwritten_ms") == 0
    assert busy.counter("unwritten_ms_max") == 1750 * INTERVAL_S


def test_what_cannot_be_written_in_time_is_said(busy, monkeypatch, caplog):
    released, created = threading.Event(), Folder.created

    @contextlib.contextmanager
    def hangs(folder, name):
        assert released.wait(DEADLINE_S)
        with created(folder, name) as file:
            yield file

    monkeypatch.setattr(Folder, "created", hangs)
    busy.use(0)
    for seconds in (INTERVAL_S, INTERVAL_S, 0.5):
        busy.work(seconds)
    assert "in no increment yet" not in caplog.text
    busy.work(1.0)
    busy.work(5.0)
    said = re.findall(r"in the last (\S+) s is in no increment yet", caplog.text)
    assert said == ["21.5"]
    assert busy.counter("unwritten_ms") == 26_500
    busy.work(30.0)
    assert caplog.text.count("in no increment yet") == 2  # it has doubled
    released.set()
    wait_until(lambda: busy.counter("unwritten_ms") == 0, "all is written")


class Counted:
    """A job of one server, and a client that continues when that lost its memory.

    An id's weight is how often it was trained. The server's memory ends with it.
    """

    def __init__(self, processes, book, *flags):
        self._processes, self._book, self.num_starts = processes, book, 0
        self._flags = "--port", str(draw_port()), "--capacity", "1000000", *flags
        self._logs = "--incremental-dir", str(processes.folder / "increments")
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
        wait_until(lambda: self._book.peek("note/checkpoint_dir"), "the run is known")

    def lose_memory(self):
        kill(self.server)
        self.start()

    def counts(self, num_batches):
        """Return how often each id was trained, by batch."""
        ids = np.arange(NUM_IDS * num_batches, dtype=np.uint64)
        return self.client.read("count", ids).reshape(num_batches, NUM_IDS)


@contextmanager
def counted_job(folder, *flags):
    book = AddressBook.host(0, recovery_s=DEADLINE_S)
    JobTimings(heartbeat_s=0.1, silent_s=30.0).publish(book)
    with closing(book), Processes(folder) as processes:
        job = Counted(processes, book, *flags)
        with closing(job.client):
            yield job, book
        book.finish()
        assert job.server.status() == 0


@pytest.mark.multiprocess
def test_a_job_continues_and_is_told_what_was_lost_with_a_memory(tmp_path):
    flags = "--incremental-interval-s", "1000", "--incremental-buffer-rows", "40"
    with counted_job(tmp_path, *flags) as (job, book):
        for number in range(2):
            job.train(number)
        job.dump()
        job.train(2)
        job.pull(3)  # 40 rows have changed
        written = lambda: job.client.counters()[0]["increments"] == 1  # noqa: E731
        wait_until(written, "an increment is written")
        for number in range(3, 6):
            job.train(number)
        wait_until(lambda: known_updates(book) == 6, "the job knows of all updates")
        job.lose_memory()
        counts = job.counts(6)
        assert counts.tolist() == [[1] * NUM_IDS] * 3 + [[0] * NUM_IDS] * 3
        told = {name: job.client.lost[name] for name in ("lost_updates", "lost_rows")}
        assert told == {"lost_updates": 3, "lost_rows": np.sum(counts == 0)}
        assert job.train(6).num_gradients == NUM_IDS
        assert (job.counts(7)[6] == 1).all()
        assert "lost_updates=3, lost_rows=30" in job.server.output()
        # Before the next heartbeat nothing more is known to be lost.
        wait_until(lambda: known_updates(book) == 4, "the job knows of the update")
        for heartbeat_s in 100.0, 0.1:
            JobTimings(heartbeat_s=heartbeat_s, silent_s=300.0).publish(book)
            job.lose_memory()
            job.client.counters()
        assert job.client.lost["lost_updates"] == 4
