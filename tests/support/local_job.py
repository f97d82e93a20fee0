"""A whole job in this process: all roles are threads, but for the trainer itself."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.ctx import DataCtx, TrainCtx
from persia_torchrec.data import IterableDataset
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD, Optimizer
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.persia.batch import IDTypeFeature, Label, PersiaBatch
from persia_torchrec.persia.slots import SlotsLookup, build_features
from persia_torchrec.persia.worker.process import IdBuffer, WorkerProcess
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Frames, Header, Kind
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S, Servers, ids_of, once_the_port_is_free

Answer = Callable[[Header, Frames], Frames]

ONE_SLOT = """
feature_index_prefix_bit: 8
slots_config:
  item: {dim: 4}
"""


class LocalJob:
    """Servers, embedding workers and the address book; the environment names them.

    Trainers and data loaders of the test find the job as those of a real one do.
    Servers and workers belong to it, unless ``greeting`` is that of another.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        embedding_config: str = ONE_SLOT,
        *,
        num_servers: int = 2,
        num_workers: int = 1,
        forward_buffer_size: int = 1000,
        gate: "Gate | None" = None,
        greeting: Greeting | None = None,
        recovery_s: float = 0.0,
        **server_settings: object,
    ) -> None:
        self._monkeypatch = monkeypatch
        self._gate = gate or Gate()
        self._stack = ExitStack()
        path = folder / "embedding_config.yml"
        path.write_text(embedding_config)
        self.config_path = path
        self.schema = load_embedding_config(path)
        self.book = AddressBook.host(0, recovery_s=recovery_s)
        self._stack.callback(self.book.close)
        cluster = self._stack.enter_context(Servers())
        self._greeting = greeting or self.book.greeting
        self.servers = cluster.start(
            num_servers, greeting=self._greeting, **server_settings
        )
        for shard, server in enumerate(self.servers):
            self.book.register("server", shard, num_servers, server.address)
        self.workers: list[Service] = []
        self.buffers: list[IdBuffer] = []
        self._buffer_size = forward_buffer_size
        self.client = cluster.client(self.servers)
        for index in range(num_workers):
            if index:
                self.client = cluster.client(self.servers)
            self._start_worker(self.client)
            self.book.register("worker", index, num_workers, self.workers[-1].address)
        self._set("PERSIA_STORE_PORT", self.book.port)
        self._set("PERSIA_MEMBER", self.book.port)  # its contexts join nothing
        self._set("PERSIA_EMBEDDING_CONFIG", path)

    def _start_worker(self, client: EmbeddingClient, port: int = 0) -> None:
        buffer = IdBuffer(self._buffer_size, expires_s=60)
        worker = SlotsLookup(client, build_features(self.schema))
        answer = self._gate.before(WorkerProcess(worker, buffer).answer)
        service = Service(
            *("embedding worker", answer),
            port=port,
            num_threads=16,
            greeting=self._greeting,
        )
        self._stack.callback(service.close)
        self.workers.append(service)
        self.buffers.append(buffer)

    def restart_worker(self) -> None:
        """End the first worker, with all that it has; it is the last one then."""
        self.buffers.pop(0)
        ended = self.workers.pop(0)
        ended.close()
        port = int(ended.address.rpartition(":")[2])
        once_the_port_is_free(lambda: self._start_worker(self.client, port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._stack.close()

    def train_ctx(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        lr: float = 0.1,
        **settings: object,
    ) -> TrainCtx:
        """Make a context of a trainer on the CPU."""
        model = model or SumOfEmbeddings()
        return TrainCtx(
            model=model,
            embedding_optimizer=optimizer or SGD(1.0),
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            **{"mixed_precision": False, **settings},
        )

    def data_ctx(self, index: int = 0, size: int = 1) -> DataCtx:
        """Make the context of one of the data loaders; a trainer must listen."""
        self._set("REPLICA_INDEX", index)
        self._set("REPLICA_SIZE", size)
        return DataCtx()

    def read(self, slot: str, *numbers: int) -> np.ndarray:
        """Return the weights of a slot's ids; zeros where there is no row."""
        config = self.schema.slots[slot]
        ids = ids_of(*numbers) + np.uint64(config.index_prefix)
        return self.client.read(config.group, ids)[:, : config.dim]

    def num_rows(self) -> int:
        return sum(self.client.num_rows())

    def total(self, counter: str) -> int:
        """Return a counter, summed over the servers."""
        return sum(counters.get(counter, 0) for counters in self.client.counters())

    def _set(self, name: str, value: object) -> None:
        self._monkeypatch.setenv(name, str(value))


class Gate:
    """Holds messages of some kinds up before embedding workers answer them.

    Args:
        kinds: of the messages that it holds up while it is closed.

    Attributes:
        num_waiting: messages that it holds up.
    """

    def __init__(self, *kinds: Kind) -> None:
        self._kinds = kinds
        self._is_open = threading.Event()
        self._is_open.set()
        self._lock = threading.Lock()
        self.num_waiting = 0  # guarded by _lock

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def before(self, answer: Answer) -> Answer:
        """Return what answers a message when it has passed the gate."""

        def answer_later(header: Header, frames: Frames) -> Frames:
            if header.kind in self._kinds:
                with self._lock:
                    self.num_waiting += 1
                assert self._is_open.wait(DEADLINE_S)
                with self._lock:
                    self.num_waiting -= 1
            return answer(header, frames)

        return answer_later

    def holds_just(self, num: int) -> bool:
        """Wait until it holds so many messages up, and a moment for one more."""
        wait_until(lambda: self.num_waiting >= num, f"{num} messages", DEADLINE_S)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.num_waiting > num, "one more", 0.15)
        return self.num_waiting == num


class SumOfEmbeddings(nn.Module):
    """Sums up everything; the gradient of every embedding is that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors, embeddings):
        return self.bias + sum(e.sum(dim=1, keepdim=True) for e in embeddings)


class Batches(IterableDataset):
    """Given batches, or those that a function yields on each pass."""

    def __init__(
        self,
        batches: Sequence[PersiaBatch] | Callable[[], Iterable[PersiaBatch]],
        buffer_size: int = 10,
    ) -> None:
        super().__init__(buffer_size)
        self._batches = batches

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from self._batches() if callable(self._batches) else self._batches


class Sending:
    """Data loaders of a test, each in a thread."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(
        self,
        ctx: DataCtx,
        batches: Iterable[PersiaBatch],
        after_each: Callable[[int], None] = lambda _: None,
    ) -> threading.Thread:
        """Send the batches, in order, and end."""

        def send() -> None:
            try:
                with ctx:
                    for number, batch in enumerate(batches):
                        ctx.send_data(batch)
                        after_each(number)
            except Exception as exc:  # noqa: BLE001  # raised by join()
                self.errors.append(exc)

        thread = threading.Thread(target=send, name="data loader", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self) -> None:
        """Wait until all loaders have ended well."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a data loader still sends"
        assert self.errors == []


def run_two_trainers(
    processes: Processes, job: LocalJob, target: Callable[..., None], *arguments: object
) -> None:
    """Run a function in two trainer processes of a job, which must end well.

    Args:
        processes: ends them with the test.
        job: which they find as those of a real job do.
        target: of a module that can be imported.
        arguments: of the function.
    """
    trainers = [
        processes.start(
            f"trainer {rank}",
            target,
            *arguments,
            env={
                "PERSIA_STORE_PORT": str(job.book.port),
                "PERSIA_EMBEDDING_CONFIG": str(job.config_path),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
            },
        )
        for rank in range(2)
    ]
    for trainer in trainers:
        assert trainer.status() == 0, trainer.output()


def batch_of(
    *samples: list[int], name: str = "item", label: float = 0.0, **more: object
) -> PersiaBatch:
    """Return a batch with one slot, as batch_of([7, 8], [], [7])."""
    labels = np.full((len(samples), 1), label, dtype=np.float32)
    return PersiaBatch(
        [IDTypeFeature(name, [ids_of(*sample) for sample in samples])],
        labels=[Label(labels)],
        **more,
    )
