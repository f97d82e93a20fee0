"""What the processes of the tests of membership do as members of a job."""

import ctypes
import os
import signal
import sys
import threading
import time

from persia_torchrec.job.member import JobMember
from persia_torchrec.logger import get_default_logger


def serve(port: int) -> None:
    """Serve until the job ends, as an embedding server does."""
    get_default_logger()
    stop = threading.Event()
    with _join(port) as member:
        member.call_at_end(stop.set)
        print("serving", flush=True)
        stop.wait(180)
    print("left", flush=True)


def fail(port: int) -> None:
    """Raise."""
    with _join(port):
        raise ValueError("the table is round")


def fail_after_the_end(port: int) -> None:
    """Send to a trainer that has left, as a data loader may."""
    get_default_logger()
    store = ("localhost", port, "")
    with JobMember("loader", 0, 1, store=store, expendable=True) as member:
        while member._num_beats == 0:  # the next is due in 30 s
            time.sleep(0.01)
        print("serving", flush=True)
        while member.book.state()[0] == "running":
            time.sleep(0.01)
        raise ConnectionError("the trainer is gone")
    print("left", flush=True)


def lose_the_process_group(port: int) -> None:
    """Raise as a collective does, a moment before the cause is known."""
    get_default_logger()
    with _join(port) as member:
        cause = ("coordinator", "trainer 1 was killed")
        threading.Timer(0.2, member.book.fail, cause).start()
        raise RuntimeError("Connection closed by peer")


def leave_early(port: int) -> None:
    """Leave, as if that were all right."""
    with _join(port):
        pass


def exit_early(port: int) -> None:
    """Exit with status 0, as if that were all right."""
    with _join(port):
        sys.exit()


def compile_loops(port: int) -> None:
    """Wait for the end, and report that loops are compiled meanwhile."""
    with _join(port) as member:
        member.report_compiling(is_compiling=True)
        member.wait_for_end()


def break_heartbeat(port: int) -> None:
    """Wait for the end, with a heartbeat that raises what is no JobError."""
    get_default_logger()
    with _join(port) as member:
        member.record.beat = lambda *_, **__: int("no number")
        member.wait_for_end()


def be_stuck(port: int) -> None:
    """Listen to nothing."""
    get_default_logger()
    with _join(port):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stuck", flush=True)
        time.sleep(60)


def be_in_a_callback(port: int) -> None:
    """Wait where an exception is lost: in a function that native code calls."""
    get_default_logger()
    with _join(port):

        @ctypes.CFUNCTYPE(None)
        def wait() -> None:
            print("serving", flush=True)
            time.sleep(60)

        wait()
        time.sleep(60)


def be_in_the_compiler(port: int) -> None:
    """Wait where an exception does damage: between numba and LLVM."""
    get_default_logger()
    text = (
        "def compile():\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except BaseException:\n"
        "        print('damaged', flush=True)\n"
    )
    module = {"__name__": "llvmlite.binding.executionengine", "time": time}
    exec(text, module)
    with _join(port):
        print("serving", flush=True)
        module["compile"]()


def wait_for_end(port: int) -> None:
    """Wait for a lock, beside a thread that is in native code."""
    get_default_logger()
    with _join(port) as member:
        other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        other.start()
        print(f"thread {other.native_id} is there.", flush=True)
        member.wait_for_end()


def hear_by_itself(port: int) -> None:
    """Serve, and note the signal."""
    heard = threading.Event()
    with _join(port) as member:
        signal.signal(signal.SIGTERM, lambda *_: heard.set())
        print("serving", flush=True)
        assert heard.wait(60)
        print("heard", flush=True)
        member.wait_for_end()


def end_a_forked_child(port: int) -> None:
    """Serve, while a forked child is ended by the signal."""
    with _join(port) as member:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        print(f"the child has ended by {os.WTERMSIG(status)}.", flush=True)
        member.wait_for_end()


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
    return JobMember("server", 0, 1, store=("localhost", port, ""))
