"""The data loader's context: batches on their way to workers and trainers.

    ids  --> embedding worker --> trained: the NN worker says so, and they are dropped
     `- kept here until then ----> lost with the worker: sent again, there or to another

An NN worker whose batches are TorchRec's is sent the ids itself, with the batch.

Where something starts the processes of a job again, a thread asks the NN workers what
has become of the batches, and sends the ids again that a worker has lost.
"""

import contextlib
import logging
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Mapping

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, DataflowError
from persia_torchrec.job.implicit_member import join_job
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.lookup.bags import Bags, build_bags, encode_bags
from persia_torchrec.persia.batch import (
    NO_WORKER,
    WITH_BATCH,
    Origin,
    PersiaBatch,
)
from persia_torchrec.persia.ctx.base_ctx import BaseCtx
from persia_torchrec.persia.stream import BatchSender, Position
from persia_torchrec.persia.workers import Workers
from persia_torchrec.rpc.messages import Frames

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.002
_LAST_RETRY_S = 0.5
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.2
_PROGRESS_S = 1.0


class DataCtx(BaseCtx):
    """Send batches from a data loader process to embedding workers and trainers.

    The constructor waits until workers and trainers have registered: a trainer does
    when it first iterates over its ``StreamingDataset``. A process that no launcher has
    started becomes a member of its job here. Leaving the block without an exception
    tells the trainers that this loader has no more batches.

    A process that is started again runs its script from the start. Batches are counted
    over all processes of the loader: the first ones, which have arrived, are not sent
    again. A script that does not make the same batches in each run asks ``position``
    where to continue. Where processes are started again, leaving the block waits until
    all batches are trained. It stays connected then: when NN workers are started again,
    and need its batches once more, this process kills itself, so that its supervisor
    starts it again, too.

    Args:
        threadpool_worker_size: how many messages may be on their way at once, at least
            1. One is: ``send_data`` waits for the answer to each.
        device_id: CUDA device that becomes torch's current one, for the script's use;
            what is sent are arrays in the memory of the CPU.
        as_torchrec: whether ids go to the NN workers themselves, with their batches,
            as a ``DataLoader(as_torchrec=True)`` wants them, and not to embedding
            workers. None: as the NN workers ask for.

    Raises:
        ConfigError: this process belongs to no job, or ``as_torchrec`` is not what the
            NN workers ask for.
        DataflowError: the NN workers ask for different things.
    """

    def __init__(
        self,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        as_torchrec: bool | None = None,
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
        self._closing = threading.Event()
        with contextlib.ExitStack() as stack:
            self._book = book = stack.enter_context(
                contextlib.closing(AddressBook.join(*store))
            )
            self._recovery_s = book.recovery_s
            self._connect(stack, as_torchrec)
            stack.callback(self._closing.set)
            self._connections = stack.pop_all()
        self._num_sent = self._num_skipped = self._num_different = 0
        self._lock = threading.Lock()
        # Ids of batches that are not trained yet, by number. guarded by _lock
        self._kept: dict[int, Frames] = {}
        self._error: BaseException | None = None
        self._has_ended = False
        if self._recovery_s:
            threading.Thread(
                target=self._send_lost, name="lost batches", daemon=True
            ).start()

    @property
    def position(self) -> int:
        """How many batches of this loader had arrived when it connected; 0 at first.

        A script that asks before it sends continues there: it makes the batches
        behind them, and ``send_data`` numbers the first one ``position + 1``.
        """
        position = self._sender.position()
        self._num_sent = self._num_sent or position
        return position

    def send_data(self, persia_batch: PersiaBatch) -> None:
        """Send a batch; waits while the buffers of worker or trainer are full.

        The ids go to one of the embedding workers in turn, the rest to the trainer
        ``batch_id % number of trainers``. Sets the batch's ``batch_id``. A batch that
        has arrived from an earlier process of this loader is not sent.

        Raises:
            DataflowError: a buffer stayed full for 15 minutes, or an NN worker was
                started again, which needs batches that are gone here.
        """
        if self._error is not None:
            raise self._error
        number = self._num_sent + 1
        persia_batch.batch_id = self._sender.batch_id(number)
        bags = build_bags({f.name: f for f in persia_batch.id_type_features})
        if self._sender.had_arrived(number):
            self._skip(number, bags)
        else:
            self._send(number, bags, persia_batch)
        self._num_sent = number

    def _connect(self, stack: contextlib.ExitStack, as_torchrec: bool | None) -> None:
        """Connect to the trainers, and to workers unless those take the ids."""
        self._trainers, greeting = self._book.addresses("trainer"), self._book.greeting
        self._sender = BatchSender(
            self._trainers, self._loader, self._num_loaders, greeting
        )
        stack.callback(self._sender.close)
        self._sender.recovery_s, self._sender.look = self._recovery_s, self._look_for
        self._sender.begin()
        self._workers: Workers | None = None
        if not self._require_told(as_torchrec):
            workers, recovery_s = self._book.addresses("worker"), self._recovery_s
            self._workers = Workers(workers, greeting=greeting, recovery_s=recovery_s)
            stack.callback(self._workers.close)

    def _require_told(self, as_torchrec: bool | None) -> bool:
        """Return whether the trainers take the ids, as this loader was told."""
        takes_ids = self._sender.takes_ids()
        if as_torchrec not in (None, takes_ids):
            raise ConfigError(
                f"Data loader {self._loader}: as_torchrec must be as in the DataLoader "
                f"of the NN workers, {takes_ids}, which says where ids go. Received: "
                f"{as_torchrec}. Leave it out of DataCtx, which then asks them."
            )
        return takes_ids

    def _send(self, number: int, bags: Mapping[str, Bags], batch: PersiaBatch) -> None:
        deadline = time.monotonic() + timeouts.SEND_BATCH_S
        worker, checksum = WITH_BATCH, 0
        if self._workers is not None or self._recovery_s:
            ids = encode_bags(bags)
            checksum = _checksum(ids) if self._recovery_s else 0
            if self._workers is not None:
                worker = self._leave_ids(number, ids, deadline)
                if self._recovery_s:
                    with self._lock:
                        self._kept[number] = ids
        waits = _waits("trainer", deadline)
        while True:
            position = self._sender.send(number, batch, worker, checksum)
            self._note(self._sender.trainer_of(number), position)
            if position.has_room:
                return
            time.sleep(next(waits))

    def _skip(self, number: int, bags: Mapping[str, Bags]) -> None:
        """Do not send a batch that has arrived; keep its ids if it is not trained."""
        self._num_skipped += 1
        known = self._sender.known[self._sender.trainer_of(number)]
        checksum = known.checksums.get(number, 0)
        if not self._recovery_s or not (checksum or number in known.open):
            return
        ids = encode_bags(bags)
        if number in known.open:
            with self._lock:
                self._kept[number] = ids
        if checksum not in (0, _checksum(ids)):
            self._num_different += 1
            if self._num_different == 1:
                logger.warning(
                    "batch %d of data loader %d has arrived with other ids than its "
                    "script has made now, and is not sent. A script that does not make "
                    "the same batches in each run must continue at DataCtx.position.",
                    *(number, self._loader),
                )

    def _leave_ids(
        self, number: int, ids: Frames, deadline: float, *, again: bool = False
    ) -> int:
        """Leave the ids of a batch with a worker that has room; return which."""
        workers, start = self._workers, self._sender.start
        assert workers is not None
        first = (number - 1) % workers.num_workers
        waits = _waits("embedding worker", deadline)

        def leave(worker: int) -> int | None:
            origin = Origin(self._loader, number, worker)
            is_kept = workers.buffer(worker, origin, ids, start=start, again=again)
            return worker if is_kept else None

        while (worker := workers.insist(first, leave)) is None:
            time.sleep(next(waits))
        return worker

    def _note(self, trainer: int, position: Position) -> None:
        """Drop the ids of batches that a trainer has trained."""
        with self._lock:
            for number in [*self._kept]:
                is_its = self._sender.trainer_of(number) == trainer
                has_arrived = is_its and number <= position.arrived
                if has_arrived and number not in position.open:
                    del self._kept[number]

    def _send_lost(self) -> None:
        """Send ids again that embedding workers have lost, until the end."""
        wait_s, told_s = _LAST_LOOK_S, 0.0
        moved: dict[int, int] = {}
        record = MemberRecord(self._book, "loader", self._loader)
        try:
            while not self._closing.wait(0 if moved else wait_s):
                if time.monotonic() - told_s > _PROGRESS_S:
                    record.report_progress(self._num_sent)
                    told_s = time.monotonic()
                lost = self._look(moved)
                wait_s = _FIRST_LOOK_S if lost else min(2 * wait_s, _LAST_LOOK_S)
                deadline = time.monotonic() + timeouts.SEND_BATCH_S
                moved = {
                    number: self._leave_ids(number, ids, deadline, again=True)
                    if ids
                    else NO_WORKER
                    for number, ids in lost.items()
                }
                if moved:
                    logger.info("sent the ids of batches again: %s", [*moved])
        except BaseException as exc:  # noqa: BLE001  # raised by the script's thread
            if self._closing.is_set():
                return
            self._error = exc
            if self._has_ended and isinstance(exc, DataflowError):
                logger.warning("the data loader must be rerun: %s", exc)
                os.kill(os.getpid(), signal.SIGKILL)

    def _look(self, moved: dict[int, int]) -> dict[int, Frames]:
        """Tell the trainers where ids have gone; return those that are lost.

        Nothing is left of a batch that an earlier process has sent, and that the script
        does not make again.
        """
        lost: dict[int, Frames] = {}
        for trainer in range(self._sender.num_trainers):
            trainer_of = self._sender.trainer_of
            own = {n: w for n, w in moved.items() if trainer_of(n) == trainer}
            position = self._sender.move(trainer, own)
            self._note(trainer, position)
            with self._lock:
                for number in position.lost:
                    if number in self._kept or number <= self._num_sent:
                        lost[number] = self._kept.get(number, [])
        return lost

    def _look_for(self, trainer: int) -> None:
        """Raise DataflowError if a trainer is at another address now."""
        address = self._book.address("trainer", trainer)
        if address != self._trainers[trainer]:
            raise DataflowError(
                f"NN worker {trainer} must be the one that this data loader has sent "
                f"its batches to, at {self._trainers[trainer]}. Received: one that was "
                f"started again, at {address}. Start the data loader again, too: it "
                "continues where the NN workers do."
            )

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        with self._connections as stack:
            yield
            self._sender.end()
            self._await_training()
            logger.info(
                "data loader sent batches=%d, of which had arrived before=%d, with "
                "other ids=%d",
                *(self._num_sent, self._num_skipped, self._num_different),
            )
            if self._recovery_s:  # NN workers may want all batches once more
                self._has_ended = True
                self._connections = stack.pop_all()

    def _await_training(self) -> None:
        """Wait until no batch is kept any more; the end of the job interrupts it."""

        def what() -> str:
            return f"waiting until {len(self._kept)} batches are trained"

        with timeouts.saying(logger, what):
            while self._kept:
                if self._error is not None:
                    raise self._error
                time.sleep(_FIRST_LOOK_S)


def _checksum(ids: Frames) -> int:
    value = 0
    for frame in ids:
        value = zlib.crc32(frame, value)
    return value or 1  # 0: none


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
