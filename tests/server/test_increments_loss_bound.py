"""What is lost with a server's memory: at most two intervals, reported as it is."""

import contextlib
import re
import threading

import numpy as np
import pytest

from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.job.requests import JobTimings
from persia_torchrec.server import increments
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.store.embedding_store import EmbeddingStore
from tests.server.clocks import Clock
from tests.support.processes import wait_until
from tests.support.server_processes import COUNT, NUM_IDS, counted_job, known_updates
from tests.support.servers import DEADLINE_S

INTERVAL_S = 10.0


class Busy:
    """The increments of a server that is never idle, whose slices take a second."""

    def __init__(self, folder, monkeypatch):
        monkeypatch.setattr(increments, "_SLICE_BYTES", 2**8)
        monkeypatch.setattr(increments, "_CHECK_S", 0.001)
        self.clock = clock = Clock()
        clock.thread_time = self.thread_time
        self.activity = Activity(clock.monotonic, clock.thread_time)
        self.store = EmbeddingStore(1000)
        self.store.add_table(COUNT)
        logs = {"increments_dir": str(folder), "increments_interval_s": INTERVAL_S}
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
    busy.work(0.25 * INTERVAL_S / 2)  # a quarter of it is for all
    half = num_slices // 2
    wait_until(lambda: busy.work() >= half, "half of the rows are copied")
    assert busy.work() in range(half, half + 3)
    busy.use(500)
    busy.work(0.25 * INTERVAL_S / 2)
    wait_until(lambda: busy.counter("increments") == 1, "it is written")
    assert busy.counter("unwritten_ms") == 250 * INTERVAL_S
    assert busy.counter("unwritten_ms_max") == 1250 * INTERVAL_S
    busy.work(0.75 * INTERVAL_S)
    busy.work(0.25 * INTERVAL_S)
    wait_until(lambda: busy.counter("increments") == 2, "the next one is written")
    assert busy.counter("unwritten_ms") == 0
    assert busy.counter("unwritten_ms_max") == 1250 * INTERVAL_S


def test_late_increments_are_logged(busy, monkeypatch, caplog):
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
    assert "changes since then are lost" not in caplog.text
    busy.work(1.0)
    busy.work(5.0)
    said = re.findall(r"increments are (\S+) s behind", caplog.text)
    assert said == ["21.5"]
    assert busy.counter("unwritten_ms") == 26_500
    busy.work(30.0)
    assert caplog.text.count("changes since then are lost") == 2  # it has doubled
    released.set()
    wait_until(lambda: busy.counter("unwritten_ms") == 0, "all is written")


@pytest.mark.multiprocess
def test_a_job_continues_and_learns_what_was_lost_with_a_memory(tmp_path):
    flags = "--increments-interval-s", "1000", "--increments-buffer-rows", "40"
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
            book.publish(JobTimings(heartbeat_s=heartbeat_s, silent_s=300.0))
            job.lose_memory()
            job.client.counters()
        assert job.client.lost["lost_updates"] == 4
