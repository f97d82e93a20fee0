"""Clients of embedding workers, with failover to another worker.

A data loader leaves the ids of a batch with a worker. Where something starts workers
again (``recovery_s``), what one that ended has not answered is asked of it again, or of
another one; ``persia/worker_client.py`` pulls and pushes.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from persia_torchrec import timeouts
from persia_torchrec.errors import (
    DataflowError,
    LostBatchError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
)
from persia_torchrec.persia.batch import NO_WORKER, Origin
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.greeting import NO_JOB, Greeting
from persia_torchrec.rpc.messages import Frames, Header, Kind
from persia_torchrec.rpc.peers import Peers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.1


class Workers(Peers):
    """Connections to all embedding workers. Any thread may call any method.

    The workers must belong to the job of ``greeting``, or to none. Requests to one that
    has ended wait ``recovery_s`` seconds for it or for another one; 0: they fail.

    Attributes:
        num_workers: how many workers there are.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = timeouts.REQUEST_S,
        greeting: Greeting = NO_JOB,
        recovery_s: float = 0.0,
    ) -> None:
        if not greeting.job_id:  # their numbers are not known: it is the user's list
            greeting = greeting.of("embedding worker")
        super().__init__("embedding worker", addresses, timeout_s, greeting)
        self.num_workers = len(addresses)
        self.recovery_s = recovery_s
        self._away: dict[int, float] = {}  # when it has hung last
        self._closing = threading.Event()
        self.share_memory(waits=False)  # one may not be there yet

    def buffer(
        self,
        worker: int,
        batch: Origin,
        frames: Frames,
        *,
        start: int = 0,
        again: bool = False,
    ) -> bool:
        """Leave a batch's ids, as of ``encode_bags``, with a worker.

        ``start`` tells one process of a data loader from another; ``again`` says that
        the ids were lost. Returns False when the worker's buffer is full.
        """
        flags = messages.AGAIN if again else 0
        loader, number = batch.loader, batch.number
        header = Header(Kind.BUFFER_IDS, 0, start, loader, number, flags=flags)
        reply = self.connections[worker].send(
            header, frames, timeout_s=self.timeout_s, what="ids"
        )
        is_kept: bool = self.read(worker, reply, bool)
        return is_kept

    def insist(
        self,
        worker: int,
        ask: Callable[[int], T],
        origin: Origin | None = None,
        *,
        only: bool = False,
    ) -> T:
        """Ask a worker, and others or itself again if it has ended meanwhile.

        What is asked needs the ids of ``origin``, or that worker ``only``. Raises the
        last error when no answer comes within ``recovery_s`` of the first one.
        """
        deadline_s: float | None = None
        may_choose = origin is None and not only
        worker = self._choose(worker) if may_choose else worker
        while True:
            try:
                answer = ask(worker)
            except PersiaError as exc:
                now_s = time.monotonic()
                deadline_s = deadline_s or now_s + self.recovery_s
                left_s = deadline_s - now_s
                if left_s <= 0 or self._closing.is_set() or not is_away(exc):
                    raise
                if not isinstance(exc, RemoteError):
                    self._note_away(worker, exc)
                if origin is None:
                    worker = self._choose(worker) if may_choose else worker
                    if worker in self._away:
                        self._closing.wait(min(_RETRY_S, left_s))
                else:
                    origin.lose(worker)
                    if not origin.wait(left_s):
                        raise
                    worker = worker_of(origin)
            else:
                if self._away.pop(worker, None) is not None:
                    logger.warning("%s answers again", self.names[worker])
                return answer

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._closing.set()
        super().close()

    def _choose(self, worker: int) -> int:
        """Return the worker, or the next that is there and has not hung lately."""
        now_s, num = time.monotonic(), self.num_workers
        for other in [at % num for at in range(worker, worker + num)]:
            has_hung = (
                now_s - self._away.get(other, -math.inf) <= timeouts.WORKER_AVOID_S
            )
            if not has_hung and self.connections[other].fails_with is None:
                return other
        return (worker + 1) % num

    def _note_away(self, worker: int, error: PersiaError) -> None:
        is_new = worker not in self._away
        is_late = isinstance(error, RequestTimeoutError)
        self._away[worker] = time.monotonic() if is_late else -math.inf
        if is_new:
            logger.warning(
                "%s Its batches continue through another one, or wait for it, for %g s "
                "at most.",
                error,
                self.recovery_s,
            )


def is_away(error: BaseException) -> bool:
    """Return whether a worker did not answer, or lacks what it had of a batch."""
    if isinstance(error, RemoteError):
        return error.kind == LostBatchError.__name__
    return isinstance(error, ServerError)


def worker_of(origin: Origin) -> int:
    """Return which worker has the ids of a data loader's batch."""
    if origin.worker == NO_WORKER:
        raise DataflowError(
            f"The ids of batch {origin.number} of data loader {origin.loader} must be "
            "with an embedding worker, or be made again by that loader's script. "
            "Received: neither. The worker was restarted, and the script, too, which "
            "continues at DataCtx.position: the batch is lost."
        )
    return origin.worker
