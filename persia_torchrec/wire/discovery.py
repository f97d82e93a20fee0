"""The job's address book: where the roles of a job find each other.

One process of the job, the coordinator, hosts a c10d ``TCPStore``; every other process
is a client of it. Each server, worker, ... registers its address under its role and
index; who needs a role waits until all of it has registered. A process that was
started again registers again, and its new address replaces the old one. The book also
holds the state of the job: it runs, until it is finished or has failed; the first
verdict stands.

What lies in the store:

    job/id                      whose book it is; written first of all
    address/<role>/size         how many the role has
    address/<role>/<index>      the address of one of them
    note/<name>                 what one process tells the others: rendezvous, timings
    job/state                   absent: running; "finished"; "failed <who>: <why>"
    member/<role>/<index> ...   who is part of the job, see ``roll.py``
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # torch has no __all__

from persia_torchrec.errors import ConfigError, DiscoveryError, JobError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.patience import Patience
from persia_torchrec.wire.ports import LOOPBACK

JobState = Literal["running", "finished", "failed"]

COMPILING = "compiling"
"""A number that grows while a process of the job compiles its loops."""

_JOB_ID = "job/id"
_STATE = "job/state"
_POLL_S = 0.05
_CONNECT_RETRY_S = 0.2
_ANSWER_S = 10.0
_OPERATION_TIMEOUT = timedelta(seconds=30)
_GREETING_TIMEOUT_S = 10.0


class AddressBook:
    """One connection to the job's address book.

    Owned by the process that made it. Its methods may be called from any thread; a
    call waits while another thread's is under way, so a thread of its own rhythm
    takes a :meth:`clone`. Every method raises :class:`JobError` when the coordinator
    is gone.

    Attributes:
        greeting: of the job, with which its processes greet each other.
    """

    def __init__(self, store: TCPStore, host: str) -> None:
        store.set_timeout(_OPERATION_TIMEOUT)
        self._store: TCPStore | None = store
        self.host_name = host
        self.port = int(store.port)
        self.greeting = NO_JOB

    @classmethod
    def host(
        cls,
        port: int,
        *,
        loopback: bool = False,
        timeout_s: float = 60.0,
        job_id: str = "",
    ) -> "AddressBook":
        """Open the address book of a new job; only the coordinator does.

        Args:
            port: where to listen, in ``[0, 65535]``; 0 takes a free one, which
                ``.port`` tells.
            loopback: listen for this machine only, instead of on every interface.
            timeout_s: how long opening may take.
            job_id: of the job; empty: one is drawn.

        Raises:
            ConfigError: the port is out of its range, or the id is none.
            JobError: the port cannot be listened on.
        """
        if not 0 <= port <= 65_535:
            raise ConfigError(f"port must be in [0, 65535]. Received: {port}.")
        greeting = Greeting(job_id) if job_id else Greeting.draw()
        try:
            listener = None
            if loopback:
                # The store takes the descriptor over, and closes it.
                listener = socket.create_server((LOOPBACK, port), backlog=4096).detach()
            store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except (OSError, DistError) as exc:
            raise JobError(
                f"The address book must be able to listen on port {port}. "
                f"Received: {_first_line(exc)}. Does another job use the port?"
            ) from exc
        book = cls(store, LOOPBACK)
        book.put(_JOB_ID, greeting.job_id)
        book.greeting = greeting
        return book

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        job_id: str = "",
        *,
        timeout_s: float = 60.0,
        look: Callable[[], None] = lambda: None,
    ) -> "AddressBook":
        """Connect to the address book of a job, which may not be there yet.

        Args:
            host: where it is.
            port: at which it listens.
            job_id: of this process's job; empty: it belongs to the job that is there.
            timeout_s: how long to wait for it. What listens must answer in 10 s.
            look: called several times a second meanwhile; raises to give up.

        Raises:
            ConfigError: the id is none.
            DiscoveryError: no address book answered within ``timeout_s``.
            JobMismatchError: it is that of another job.
        """
        own = Greeting(job_id)
        deadline = time.monotonic() + timeout_s
        address = _await_listener(host, port, deadline, look)
        deadline = min(deadline, time.monotonic() + _ANSWER_S)
        book = cls(_connect(address, host, port, deadline, look), host)
        book._meet(own)
        return book

    def clone(self) -> "AddressBook":
        """Open a further connection, for another thread."""
        with self._store_errors() as store:
            address = store.host
        deadline = time.monotonic() + _OPERATION_TIMEOUT.total_seconds()
        store = _connect(address, self.host_name, self.port, deadline)
        book = AddressBook(store, self.host_name)
        book._meet(self.greeting)
        return book

    def close(self) -> None:
        """Close the connection; the host's book is gone for everybody with it."""
        self._store = None

    # Addresses

    def register(self, role: str, index: int, size: int, address: str) -> None:
        """Publish the address of one process of a role; replaces an earlier one.

        Args:
            role: as ``"server"``.
            index: which of the role, in ``[0, size)``.
            size: how many the role has; all of them must say the same.
            address: as ``"tcp://10.0.0.7:18000"``.

        Raises:
            ConfigError: as :meth:`claim_size`.
        """
        self.claim_size(role, index, size)
        self.put(f"address/{role}/{index}", address)

    def claim_size(self, role: str, index: int, size: int) -> None:
        """Say how many a role has, unless another has said so; they must agree.

        Args:
            role: as ``"server"``.
            index: which of the role says so.
            size: how many there are.

        Raises:
            ConfigError: ``index`` is out of its range, or ``size`` is not what
                another process, or the coordinator, said.
        """
        if not 0 <= index < size:
            raise ConfigError(
                f"The index of a {role} must be in [0, {size}). Received: {index}."
            )
        known = self.claim(f"address/{role}/size", str(size))
        if known != str(size):
            raise ConfigError(
                f"Every {role} must say how many there are alike, as the coordinator. "
                f"Received: {size} from {role} {index}, {known} from another. "
                f"Start {known}. {self.another_port()}"
            )

    def addresses(self, role: str, *, timeout_s: float) -> list[str]:
        """Return the addresses of a role, by index, once all of it has registered.

        Raises:
            DiscoveryError: some of the role did not register within ``timeout_s``.
            JobError: the job has failed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        size_key = f"address/{role}/size"
        if not self._wait_for([size_key], deadline):
            raise DiscoveryError(
                f"Every {role} must register within {timeout_s:g} s. Received: none. "
                f"Is the role '{role}' part of the job, and did it start?"
            )
        size = int(self.peek(size_key) or 0)
        keys = [f"address/{role}/{index}" for index in range(size)]
        if not self._wait_for(keys, deadline):
            missing = [i for i, key in enumerate(keys) if self.peek(key) is None]
            raise DiscoveryError(
                f"All {size} of the role '{role}' must register within "
                f"{timeout_s:g} s. Missing: {_numbered(role, missing)}. "
                "See their logs."
            )
        with self._store_errors() as store:
            return [value.decode() for value in store.multi_get(keys)]

    # Notes from one process to the others

    def tell(self, name: str, value: str) -> None:
        """Leave a note for the other processes; replaces an earlier one."""
        self.put(f"note/{name}", value)

    def claim_note(self, name: str, value: str) -> str:
        """Leave a note unless there is one of that name; return what is there then."""
        return self.claim(f"note/{name}", value)

    def ask(self, names: Sequence[str], *, timeout_s: float) -> list[str]:
        """Return the notes of these names, once all of them are there.

        Raises:
            DiscoveryError: one was not told within ``timeout_s``.
            JobError: the job has failed meanwhile.
        """
        keys = [f"note/{name}" for name in names]
        if not self._wait_for(keys, time.monotonic() + timeout_s):
            missing = [n for n in names if self.peek(f"note/{n}") is None]
            raise DiscoveryError(
                f"Notes must be told within {timeout_s:g} s. Missing: "
                f"{', '.join(missing)}."
            )
        with self._store_errors() as store:
            return [value.decode() for value in store.multi_get(keys)]

    # State of the job

    def state(self) -> tuple[JobState, str]:
        """Return the state of the job, and the reason if it failed."""
        verdict = self.peek(_STATE)
        if verdict is None:
            return "running", ""
        state, _, reason = verdict.partition(" ")
        return ("failed", reason) if state == "failed" else ("finished", "")

    def fail(self, who: str, reason: str) -> None:
        """End the job as failed, unless it has ended already."""
        self.claim(_STATE, f"failed {who}: {reason}")

    def finish(self) -> None:
        """End the job as finished, unless it has ended already."""
        self.claim(_STATE, "finished")

    # Plain keys, for the neighbours in this folder

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        with self._store_errors() as store:
            store.set(key, value)

    def peek(self, key: str) -> str | None:
        """Return what a key holds, or None; does not wait."""
        with self._store_errors() as store:
            return store.get(key).decode() if store.check([key]) else None

    def claim(self, key: str, value: str) -> str:
        """Set a key unless it is set; return what it holds then."""
        return self.swap(key, "", value)

    def swap(self, key: str, expected: str, value: str) -> str:
        """Set a key if it holds what is expected; return what it holds then."""
        with self._store_errors() as store:
            return str(store.compare_set(key, expected, value).decode())

    def increase(self, key: str) -> None:
        """Add 1 to a number, which starts at 0."""
        with self._store_errors() as store:
            store.add(key, 1)

    def _meet(self, own: Greeting) -> None:
        """Learn whose book it is, and whether that is our job."""
        where = f"the address book at {self.host_name}:{self.port}"
        if not self._wait_for([_JOB_ID], time.monotonic() + _GREETING_TIMEOUT_S):
            raise DiscoveryError(
                f"The coordinator must say whose is {where}. Received: nothing for "
                f"{_GREETING_TIMEOUT_S:g} s. Is it a coordinator, of the same version "
                "of persia_torchrec?"
            )
        greeting = Greeting(self.peek(_JOB_ID) or "")
        greeting.require_same_job(own, where, self.another_port())
        self.greeting = greeting

    def another_port(self) -> str:
        """Return what to do if another job has this port, for an error."""
        return (
            f"If another job uses port {self.port}, give this one another (--port, or "
            "PERSIA_STORE_PORT)."
        )

    def _wait_for(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait until all keys are set; False when they are not at the deadline."""
        # Polled: the store's own wait writes a stack trace for every time-out.
        patience = Patience(deadline, time.monotonic())
        while not self._are_set(keys):
            state, reason = self.state()
            if state == "failed":
                raise JobError(f"The job failed: {reason}")
            num_beats = int(self.peek(COMPILING) or 0)
            if patience.is_over(num_beats, time.monotonic()):
                return False
            time.sleep(_POLL_S)
        return True

    def _are_set(self, keys: Sequence[str]) -> bool:
        with self._store_errors() as store:
            return bool(store.check(list(keys)))

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[TCPStore]:
        """Hand out the store, and turn its errors into ours."""
        if self._store is None:
            raise JobError("The address book must be open. Received: a closed one.")
        try:
            yield self._store
        except DistError as exc:
            raise JobError(
                f"The job's address book at {self.host_name}:{self.port} must answer. "
                f"Received: {_first_line(exc)}. The coordinator has ended, or the "
                "network is cut."
            ) from exc


def _await_listener(
    host: str, port: int, deadline: float, look: Callable[[], None]
) -> str:
    """Return the IP address of ``host`` once something listens on the port there."""
    # A TCPStore would wait as well, but twice as long, and with stack traces.
    started = time.monotonic()
    while True:
        look()
        remaining = max(deadline - time.monotonic(), 0.1)
        try:
            with socket.create_connection((host, port), timeout=remaining) as probe:
                return str(probe.getpeername()[0])
        except OSError as exc:
            if time.monotonic() + _CONNECT_RETRY_S >= deadline:
                waited = time.monotonic() - started
                raise DiscoveryError(
                    f"The job's address book must be at {host}:{port}. "
                    f"Received: {exc}, for {waited:.1f} s. "
                    "Is the coordinator running there?"
                ) from exc
        time.sleep(_CONNECT_RETRY_S)


def _connect(
    address: str,
    host: str,
    port: int,
    deadline: float,
    look: Callable[[], None] = lambda: None,
) -> TCPStore:
    """Connect to the store, in a thread: one that never answers is waited for."""
    answer: queue.Queue[TCPStore | DistError] = queue.Queue(maxsize=1)
    remaining = max(deadline - time.monotonic(), 0.1)

    def connect() -> None:
        try:
            answer.put(
                TCPStore(
                    address,
                    port,
                    is_master=False,
                    timeout=timedelta(seconds=remaining),
                    wait_for_workers=False,
                )
            )
        except DistError as exc:
            answer.put(exc)

    threading.Thread(target=connect, name="join-job", daemon=True).start()
    store = None
    while store is None and time.monotonic() < deadline:
        look()
        with contextlib.suppress(queue.Empty):
            store = answer.get(timeout=_CONNECT_RETRY_S)
    if isinstance(store, TCPStore):
        return store
    why = "no answer" if store is None else _first_line(store)
    raise DiscoveryError(
        f"The job's address book must be at {host}:{port}. Received: {why}. "
        "Something else listens there."
    ) from store


def _numbered(role: str, indices: Sequence[int]) -> str:
    return ", ".join(f"{role} {index}" for index in indices)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
