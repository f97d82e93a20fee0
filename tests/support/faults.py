"""Faults: processes that are killed or stopped, and a network that is cut.

kill_self()          this process, at the line that calls it
kill(*pids)          processes at once: none sees the end of another
stopped(pid)         a process for a block, after which it continues
Point                a function in which a server dies, given to ``Killed.start``
Relay                the network between two processes
deaths.py            a store, before any of its instructions that write
kills.py             a store, at any time
chaos/killing.py     a process of a whole job, drawn at random
"""

import contextlib
import os
import signal
import socket
import threading
from contextlib import closing
from enum import Enum

from persia_torchrec.checkpoint import load, restore
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.rpc import slab_server
from persia_torchrec.server import __main__ as server_main
from persia_torchrec.server import checkpoint_service, dedup, update_queue
from persia_torchrec.store.embedding_store import EmbeddingStore
from tests.support.ports import draw_port
from tests.support.servers import DEADLINE_S


class Point(Enum):
    """Where a server may die: a function of an owner, when it is called first."""

    DUMP_WRITES_ROWS = checkpoint_service.RowFileWriter, "write"
    LOAD_CHECKS_FILES = load.ShardLoad, "check"
    LOAD_HAS_DROPPED_ROWS = load.RowImport, "__init__"
    LOAD_HAS_WRITTEN_ROWS = load.RowImport, "finish"
    RESTORE_APPLIES_INCREMENT = restore, "apply_increment"
    REQUEST_IS_NOTED = dedup.Streams, "settle"
    TABLE_FREES_ROWS = EmbeddingStore, "free_rows"

    def __reduce_ex__(self, protocol):
        """Pickle the name: a module cannot be."""
        return getattr, (Point, self.name)

    SLAB_REQUEST_IS_READ = slab_server.Slabs, "take"
    SLAB_ROWS_ARE_GATHERED = slab_server.Slabs, "body_in_place"
    SLAB_REPLY_IS_WRITTEN = slab_server.SharedClient, "answer"
    UPDATE_IS_QUEUED = update_queue.UpdateQueue, "add"
    UPDATE_IS_APPLIED = update_queue.UpdateQueue, "_apply"


def kill_self() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill(*pids: int) -> None:
    """Kill processes; if they are several, all are stopped before the first ends."""
    for number in (signal.SIGSTOP, signal.SIGKILL)[len(pids) == 1 :]:
        for pid in pids:
            os.kill(pid, number)


@contextlib.contextmanager
def stopped(pid: int):
    """Stop a process, and have it continue after the block."""
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


def serve_and_die(point, flags):
    """Serve without a warm-up, and be killed at a point."""
    setattr(*point.value, lambda *_, **__: kill_self())
    return serve(flags)


def serve(flags):
    """Serve without a warm-up: of all loops, a test needs few."""
    server_main.warm_up = lambda **_: None
    return server_main.main(flags)


class Killed:
    """A server with a memory file, each start of which listens on the same port."""

    def __init__(self, processes):
        self.address = f"tcp://127.0.0.1:{draw_port()}"
        self._processes = processes
        self.memory = os.memfd_create("store")
        self._num_starts = 0
        self._flags = (
            *("--standalone", "--capacity", "1000"),
            *("--port", self.address.rpartition(":")[2]),
            *("--memory-file", f"/proc/{os.getpid()}/fd/{self.memory}"),
        )

    def start(self, *flags, dies_in=None, **env):
        """Start it, maybe to die at a ``Point``."""
        self._num_starts += 1
        target, args = (serve_and_die, [dies_in]) if dies_in else (serve, ())
        self.process = self._processes.start(
            f"server {self._num_starts}", target, *args, (*self._flags, *flags), env=env
        )

    def dies(self):
        assert self.process.status() == -signal.SIGKILL, self.process.output()

    def lose_memory(self):
        os.truncate(self.memory, 0)

    def connect(self):
        return closing(
            EmbeddingClient.connect(
                [self.address], timeout_s=DEADLINE_S, recovery_s=DEADLINE_S
            )
        )

    def close(self):
        os.close(self.memory)


class Relay:
    """Passes bytes on; can break the connection at one end, unseen by the other.

    While ``is_open`` is not set, it passes nothing on, as a network that is cut.
    """

    def __init__(self, address):
        host, _, port = address.rpartition("/")[2].rpartition(":")
        self._target = host, int(port)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._near, self._ends = [], []
        self.is_open = threading.Event()
        self.is_open.set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                self._near.append(near)
                self._ends.append(near)
                far = socket.create_connection(self._target)
                self._ends.append(far)
                for ends in ((near, far), (far, near)):
                    args = self.is_open, *ends
                    threading.Thread(target=_pass_on, args=args, daemon=True).start()

    def break_the_near_end(self):
        _shut(self._near)

    def break_both_ends(self):
        _shut(self._ends)

    def close(self):
        self.is_open.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._thread.join(DEADLINE_S)
        _shut(self._ends)
        for each in [self._socket, *self._ends]:
            each.close()


def _shut(ends):
    for each in ends:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _pass_on(is_open, source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            is_open.wait()
            target.sendall(data)
