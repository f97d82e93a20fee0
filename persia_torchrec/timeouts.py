"""Default timeouts in seconds of what a job waits for: servers, trainers, checkpoints.

What waits for a process that is started again outlasts what that may take: a request is
shorter than ``RECOVERY_S``, joint steps and collective operations are longer.

Heartbeats, and how long a job waits for members to leave, are flags of the coordinator.
What a single connection, poll or thread waits for stands beside its code.
Each wait of a start may take ``PERSIA_JOIN_TIMEOUT_S``; a long one says what for.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

SAY_S = 10.0  # between two lines about one wait

READY_S = 600.0  # servers have loaded their checkpoint, the workers over them answer
REQUEST_S = 60.0  # a server answers a worker, a worker an inference server
AWAY_S = 10.0  # an embedding worker or server of inference is back, or another is asked
TRAINING_REQUEST_S = 120.0  # a server or a worker answers a trainer
ADD_TABLES_S = 120.0  # the servers have all tables; the first time they compile
PERMIT_S = 3600.0  # a staleness permit is free: the trainer takes steps meanwhile
SEND_BATCH_S = 900.0  # a loader's batch is taken; full buffers make it wait
RECOVERY_S = 600.0  # a member with a supervisor is back after it was killed
JOINT_UPDATE_S = 900.0  # all trainers have sent their gradients of a joint step
COMPILING_S = 900.0  # the longest extension while a process compiles its loops
CHECKPOINT_S = 3600.0  # all servers have written or loaded a checkpoint

_MAX_NAMES = 12


def exchange_s(
    recovery_s: float = RECOVERY_S, checkpoint_s: float = CHECKPOINT_S
) -> float:
    """Return how long trainers wait for one of them that waits for servers.

    These may write a checkpoint, and be away before and meanwhile.
    """
    away_s = 2 * max(recovery_s, RECOVERY_S)
    return max(checkpoint_s, CHECKPOINT_S) + TRAINING_REQUEST_S + away_s


@contextlib.contextmanager
def saying(
    logger: logging.Logger, what: Callable[[], str], *, first_s: float | None = None
) -> Iterator[None]:
    """Log every ten seconds what a block waits for; an empty text is left out.

    The first time is after ``first_s`` seconds, if it is given. A thread of its own
    calls ``what``, which must be quick and must not raise.
    """
    over = threading.Event()

    def say() -> None:
        wait_s = SAY_S if first_s is None else first_s
        while not over.wait(wait_s):
            wait_s = SAY_S
            if text := what():
                logger.info("%s", text)

    threading.Thread(target=say, name="long wait", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def waiting_for(missing: Sequence[str], num: int, kind: str = "roles") -> str:
    """Return "2 of 5 roles: waiting for server 1, trainer 0"; empty if none is."""
    if not missing:
        return ""
    names = [*missing[:_MAX_NAMES], *(["..."] if missing[_MAX_NAMES:] else [])]
    return f"{len(missing)} of {num} {kind}: waiting for {', '.join(names)}"
