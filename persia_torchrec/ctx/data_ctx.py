"""The data loader's context: batches on their way to workers and trainers."""

import contextlib
import logging
import time
from collections.abc import Iterator

from persia_torchrec import env, timeouts
from persia_torchrec.ctx.base_ctx import BaseCtx
from persia_torchrec.data.stream import BatchSender
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import ConfigError, DataflowError
from persia_torchrec.lookup.slots import build_bags
from persia_torchrec.pipeline.worker_client import RemoteWorkers
from persia_torchrec.wire.address_book import AddressBook
from persia_torchrec.wire.direct_start import join_job

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.002
_LAST_RETRY_S = 0.5


class DataCtx(BaseCtx):
    """Send batches from a data loader process to embedding workers and trainers.

    The constructor waits until workers and trainers have registered: a trainer does
    when it first iterates over its ``StreamingDataset``. A process that no launcher has
    started becomes a member of its job here. Leaving the block without an exception
    tells the trainers that this loader has no more batches.

    Args:
        threadpool_worker_size: how many messages may be on their way at once, at least
            1. One is: ``send_data`` waits for the answer to each.
        device_id: CUDA device that becomes torch's current one, for the script's use;
            what is sent are arrays in the memory of the CPU.
    """

    def __init__(
        self, threadpool_worker_size: int = 10, device_id: int | None = None
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        store = env.require_job_store("A DataCtx")
        self._loader = env.get_replica_index()
        self._num_loaders = env.get_replica_size()
        if self._loader >= self._num_loaders:
            raise ConfigError(
                f"REPLICA_INDEX must be in [0, {self._num_loaders}), below "
                f"REPLICA_SIZE. Received: {self._loader}."
            )
        join_job("loader", self._loader, self._num_loaders, store)
        with contextlib.closing(AddressBook.join(*store)) as book:
            workers, trainers = book.addresses("worker"), book.addresses("trainer")
        self._workers = RemoteWorkers(workers, greeting=book.greeting)
        self._sender = BatchSender(
            trainers, self._loader, self._num_loaders, book.greeting
        )
        self._num_sent = 0

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send a batch; waits while the buffers of worker or trainer are full.

        The ids go to one of the embedding workers in turn, the rest to the trainer
        ``batch_id % number of trainers``. Sets the batch's ``batch_id``.

        Raises:
            DataflowError: a buffer stayed full for 15 minutes.
        """
        worker = self._num_sent % self._workers.num_workers
        batch_id = self._num_sent * self._num_loaders + self._loader
        persia_batch.batch_id = batch_id
        bags = build_bags({f.name: f for f in persia_batch.id_type_features})
        deadline = time.monotonic() + timeouts.SEND_BATCH_S
        waits = _waits("embedding worker", deadline)
        while (ref := self._workers.buffer(worker, self._loader, bags)) is None:
            time.sleep(next(waits))
        trainer = batch_id % self._sender.num_trainers
        waits = _waits("trainer", deadline)
        while not self._sender.send(trainer, persia_batch, worker, ref):
            time.sleep(next(waits))
        self._num_sent += 1

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        with contextlib.closing(self._workers), contextlib.closing(self._sender):
            yield
            self._sender.end()
            logger.info("data loader sent batches=%d", self._num_sent)


def _waits(where: str, deadline: float) -> Iterator[float]:
    """Yield growing times to wait, until the deadline."""
    wait_s = _FIRST_RETRY_S
    while time.monotonic() < deadline:
        yield wait_s
        wait_s = min(2 * wait_s, _LAST_RETRY_S)
    raise DataflowError(
        f"The {where} must take the batch within {timeouts.SEND_BATCH_S:g} s. "
        "Received: its buffer stayed full. Is the training running?"
    )
