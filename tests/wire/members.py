"""What the processes of the tests of membership do as members of a job."""

import os
import signal
import threading
import time

from persia_torchrec.logger import get_default_logger
from persia_torchrec.wire.membership import JobMember


def serve(port: int) -> None:
    """Serve until the job ends, as an embedding server does."""
    get_default_logger()
    stop = threading.Event()
    with _join(port) as member:
        member.call_at_end(stop.set)
        print("serving", flush=True)
        stop.wait(60)
    print("left", flush=True)


def fail(port: int) -> None:
    """Raise."""
    with _join(port):
        raise ValueError("the table is round")


def fail_after_the_end(port: int) -> None:
    """Send to a trainer that has left, as a data loader may."""
    get_default_logger()
    store = ("localhost", port)
    with JobMember.join("loader", 0, store=store, expendable=True) as member:
        print("serving", flush=True)
        while member.book.state()[0] == "running":
            time.sleep(0.01)
        raise ConnectionError("the trainer is gone")
    print("left", flush=True)


def leave_early(port: int) -> None:
    """Leave, as if that were all right."""
    with _join(port):
        pass


def be_stuck(port: int) -> None:
    """Listen to nothing and nobody."""
    get_default_logger()
    with _join(port):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stuck", flush=True)
        time.sleep(60)


def serve_as_a_child(port: int) -> None:
    """Have a child that serves, and tell its process number."""
    child = os.fork()
    if child == 0:
        serve(port)
        os._exit(0)
    print(f"child {child}.", flush=True)
    time.sleep(60)


def fork_a_child_that_leaves(port: int) -> None:
    """Serve, while a forked child runs out of the block."""
    with _join(port) as member:
        child = os.fork()
        if child == 0:
            raise SystemExit(3)
        os.waitpid(child, 0)
        print("the child has ended", flush=True)
        member.wait_for_end()


def _join(port: int) -> JobMember:
    return JobMember.join("server", 0, store=("localhost", port), timeout_s=20)
