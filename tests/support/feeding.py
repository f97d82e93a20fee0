"""The processes of a job that are killed: data loaders, and embedding workers."""

import contextlib
import signal
import sys
from collections.abc import Sequence

import numpy as np

from persia_torchrec.ctx import DataCtx
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.persia.batch import PersiaBatch
from persia_torchrec.persia.worker import __main__ as worker
from tests.support.local_job import LocalJob, batch_of
from tests.support.processes import Processes

NUM_IDS = 20
NUM_BATCHES = 70
NUM_LOADERS = 2
FROM_ZERO = EmbeddingConfig((0, 0), weight_bound=0)


def make_batches(num: int) -> list[PersiaBatch]:
    """Return the same batches in each process."""
    rng = np.random.default_rng(7)
    return [batch_of(*rng.integers(0, NUM_IDS, (4, 3)).tolist()) for _ in range(num)]


def load(num: int, index: int, size: int) -> None:
    """Send this loader's part of the batches."""
    with DataCtx() as ctx:
        for batch in make_batches(num)[index::size]:
            ctx.send_data(batch)


def load_and_stay(num: int) -> None:
    """Send all batches, and wait as a process of a job does for its end."""
    load(num, 0, 1)
    print("waits")  # the test waits for it
    signal.pause()


def work(arguments: Sequence[str]) -> int:
    """Run an embedding worker."""
    sys.argv = ["worker", *arguments]
    return worker.main()


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
            address = self._job.book.address("worker", int(index))
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


def counted():
    """Return the weights of all ids when each batch was trained once."""
    ids = np.concatenate([b.id_type_features[0].ids for b in make_batches(NUM_BATCHES)])
    expected = np.bincount(ids.astype(np.int64), minlength=NUM_IDS)
    return np.repeat(expected[:, None], 4, axis=1).tolist()
