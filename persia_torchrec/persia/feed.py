"""What a process sends as one data loader: ids to workers, the rest to trainers.

    ids  --> embedding worker --> trained: the NN worker says so, and they are dropped
     `- kept here until then ----> lost with the worker: sent again, there or to another

An NN worker whose batches are TorchRec's is sent the ids itself, with the batch.

A process has one feed for each data loader that it is, as a rule one: every ``DataCtx``
sends through it, from any thread, and one lock gives each batch its number.

    DataCtx, DataCtx, ... --> feed --> the script has ended well: the data have ended
                                 `---- where no job sees it end: the last block is left

Where something starts the processes of a job again, a thread asks the NN workers what
has become of the batches, and sends the ids again that a worker has lost.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping

from persia_torchrec import env, timeouts
from persia_torchrec.errors import DataflowError
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.signals import START_AGAIN
from persia_torchrec.lookup.bags import Bags, encode_bags
from persia_torchrec.persia.batch import (
    NO_WORKER,
    WITH_BATCH,
    Origin,
    PersiaBatch,
)
from persia_torchrec.persia.stream import BatchSender, Position, contents_sum
from persia_torchrec.persia.workers import Workers
from persia_torchrec.rpc.messages import Frames

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.002
_LAST_RETRY_S = 0.5
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.2
_PROGRESS_S = 1.0

_opening = threading.Lock()
_feeds: dict[tuple[int, str, int, int], "Feed"] = {}  # guarded by _opening


class Feed:
    """The batches of one data loader of this process. Any thread may call any method.

    Numbers continue from ``previous``, a closed feed of the same loader.

    Attributes:
        num_blocks: of contexts, that were entered and not left.
        num_sent: batches that have a number; those of an earlier process are too.
        takes_ids: whether the trainers take the ids themselves.
        kept: ids of batches that are not trained yet, by number; guarded by a lock.
    """

    def __init__(
        self,
        book: AddressBook,
        loader: int,
        num_loaders: int,
        previous: "Feed | None" = None,
    ) -> None:
        self._book, self._loader = book, loader
        self._recovery_s = book.recovery_s
        self._closing = threading.Event()
        self._trainers, greeting = book.addresses("trainer"), book.greeting
        with contextlib.ExitStack() as stack:
            stack.callback(book.close)
            self._sender = sender = BatchSender(
                self._trainers, loader, num_loaders, greeting
            )
            stack.callback(sender.close)
            if previous is not None:
                sender.start = previous.start
            sender.recovery_s, sender.look = self._recovery_s, self._look_for
            sender.begin()
            self.takes_ids = sender.takes_ids()
            self._workers: Workers | None = None
            if not self.takes_ids:
                workers, recovery_s = book.addresses("worker"), self._recovery_s
                self._workers = Workers(
                    workers, greeting=greeting, recovery_s=recovery_s
                )
                stack.callback(self._workers.close)
            stack.callback(self._closing.set)
            self._connections = stack.pop_all()
        self.num_blocks = 0  # guarded by _opening
        self._sending = threading.Lock()
        # Guarded by _sending, as is the order in which batches arrive.
        self.num_sent: int = 0 if previous is None else previous.num_sent
        self._num_skipped = self._num_different = 0
        self._lock = threading.Lock()
        self.kept: dict[int, Frames] = {}  # guarded by _lock
        self._error: BaseException | None = None
        self._has_ended = False  # guarded by _sending
        if self._recovery_s:
            threading.Thread(
                target=self._send_lost, name="lost batches", daemon=True
            ).start()

    @classmethod
    def of_process(cls, store: env.JobStore, loader: int, num_loaders: int) -> "Feed":
        """Return the feed of this process, for one more context; it is made once."""
        book = AddressBook.join(*store)
        key = os.getpid(), book.greeting.job_id, loader, num_loaders
        with _opening:
            feed = _feeds.get(key)
            if feed is None or feed.is_closed:
                _feeds[key] = feed = cls(book, loader, num_loaders, feed)
                if (member := _member()) is not None:
                    member.call_when_done(feed.end)
            else:
                book.close()
                feed.reopen()
            return feed

    def enter(self) -> None:
        """Count the block of a context that was entered."""
        with _opening:
            self.num_blocks += 1

    @property
    def start(self) -> int:
        """What tells this process from earlier ones of the same loader."""
        return self._sender.start

    @property
    def is_closed(self) -> bool:
        """Whether it sends no more."""
        return self._closing.is_set()

    def position(self) -> int:
        """Return how many batches have arrived, of this process or earlier ones."""
        with self._sending:
            position = max(self.num_sent, self._sender.position())
            self.num_sent = self.num_sent or position
            return position

    def send(self, batch: PersiaBatch) -> None:
        """Give a batch the next number, and send it unless that one has arrived."""
        with self._sending:
            if self._error is not None:
                raise self._error
            number = self.num_sent + 1
            batch.batch_id = self._sender.batch_id(number)
            bags = batch.bags()
            checksum = contents_sum(batch)
            if self._sender.had_arrived(number):
                self._skip(number, bags, checksum)
            else:
                self._send(number, bags, batch, checksum)
            self.num_sent = number

    def leave(self, *, has_failed: bool) -> None:
        """Count the block of a context that was left; the last one may end the data.

        Waits until all batches are trained where processes are started again.
        """
        with _opening:
            self.num_blocks -= 1
            is_last = self.num_blocks == 0
        if not has_failed:
            self._await_training()
        if is_last and _member() is None:
            if not has_failed:
                self.end()
            if has_failed or not self._recovery_s:
                self._connections.close()

    def reopen(self) -> None:
        """Let batches follow those of a context that has ended the data."""
        with self._sending:
            if self._has_ended:
                self._sender.begin()
                self._has_ended = False

    def end(self) -> None:
        """Tell the trainers that no more batches come, and wait as :meth:`leave`."""
        with self._sending:
            if self._has_ended or self._closing.is_set():
                return
            if self._error is not None:
                raise self._error
            self._sender.end()
            self._has_ended = True
        self._await_training()
        logger.info(
            "data loader sent batches=%d, of which had arrived before=%d, with "
            "other contents=%d",
            self.num_sent,
            self._num_skipped,
            self._num_different,
        )
        if not self._recovery_s:  # else NN workers may want all batches once more
            self._connections.close()

    def _send(
        self, number: int, bags: Mapping[str, Bags], batch: PersiaBatch, checksum: int
    ) -> None:
        deadline = time.monotonic() + timeouts.SEND_BATCH_S
        worker = WITH_BATCH
        if self._workers is not None:
            ids = encode_bags(bags)
            worker = self._leave_ids(number, ids, deadline)
            if self._recovery_s:
                with self._lock:
                    self.kept[number] = ids
        waits = _waits("trainer", deadline)
        while True:
            position = self._sender.send(number, batch, worker, checksum)
            self._note(self._sender.trainer_of(number), position)
            if position.has_room:
                return
            time.sleep(next(waits))

    def _skip(self, number: int, bags: Mapping[str, Bags], checksum: int) -> None:
        """Do not send a batch that has arrived; keep its ids if it is not trained."""
        self._num_skipped += 1
        known = self._sender.known[self._sender.trainer_of(number)]
        if self._recovery_s and number in known.open:
            with self._lock:
                self.kept[number] = encode_bags(bags)
        if known.checksums.get(number, checksum) != checksum:
            self._num_different += 1
            if self._num_different == 1:
                logger.warning(
                    "batch %d of data loader %d has arrived with other contents than "
                    "its script has made now, and is not sent. A script that does not "
                    "make the same batches in each run must continue at "
                    "DataCtx.position.",
                    number,
                    self._loader,
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
            for number in [*self.kept]:
                is_its = self._sender.trainer_of(number) == trainer
                has_arrived = is_its and number <= position.arrived
                if has_arrived and number not in position.open:
                    del self.kept[number]

    def _send_lost(self) -> None:
        """Send ids again that embedding workers have lost, until the end."""
        wait_s, told_s = _LAST_LOOK_S, 0.0
        moved: dict[int, int] = {}
        record = MemberRecord(self._book, "loader", self._loader)
        try:
            while not self._closing.wait(0 if moved else wait_s):
                if time.monotonic() - told_s > _PROGRESS_S:
                    record.report_progress(self.num_sent)
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
                os._exit(START_AGAIN)

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
                    if number in self.kept or number <= self.num_sent:
                        lost[number] = self.kept.get(number, [])
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

    def _await_training(self) -> None:
        """Wait until no batch is kept any more; the end of the job interrupts it."""

        def what() -> str:
            return f"waiting until {len(self.kept)} batches are trained"

        with timeouts.saying(logger, what):
            while self.kept:
                if self._error is not None:
                    raise self._error
                time.sleep(_FIRST_LOOK_S)


def end_all() -> None:
    """End the data of contexts of this process that were not left."""
    with _opening:
        feeds = [one for key, one in _feeds.items() if key[0] == os.getpid()]
    for feed in feeds:
        feed.end()


def _member() -> JobMember | None:
    """Return the data loader that this process is, if the job sees its script end."""
    member = JobMember.current
    is_own = member is not None and member.expendable and member.is_here
    return member if is_own else None


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
