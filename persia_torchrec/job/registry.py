"""The address book of a job: where its roles find each other, and how it ended.

The coordinator hosts the book; every other process is a client of it. Each server,
worker, ... registers its address under its role and index; a client of a role waits
until all of it has registered. A restarted process registers again. The first verdict
on the job stands. The book is a store of strings by key, served by one thread:

    job/id                      id of the job
    job/state                   absent: running; "finishing": finished, and only the
                                trainers leave yet; "finished"; "failed <who>: <why>"
    address/<role>/size         how many processes the role has
    address/<role>/<index>      the address of one of them
    note/<name>                 what one process tells the others: rendezvous, timings,
                                the last checkpoint
    member/<role>/<index>       identity of a process of the job, as JSON
    log/<role>/<index>          its host, and the file that its stderr is, if it is one
    agent/<role>/<index>        identity of the torchrun process that started it
    beats/<role>/<index>        number of its heartbeats
    compiling                   number of heartbeats of processes that compile
    progress/<role>/<index>     number that grows with its trained batches
    failed/<role>/<index>       process number of one that its supervisor starts again
                                because it has raised, and why
    raised/<role>/<index>       how often it had been started again when its script has
                                raised, what was trained then, and at which line;
                                raised/trainer is that of all trainers
    restarts/<role>/<index>     how often it was started again without progress of the
                                job, and how much there was when it was last
    job/recovery_s              how long its members wait for the coordinator; absent:
                                it has no supervisor
    job/ending                  absent, or the signal by which the job is told to end,
                                and the member that has got it: "SIGTERM trainer 0"
    job/last_step               "1": the NN workers of a job that is told to end train
                                no more, and need no more batches
    done/<role>/<index>         "1": the work of this member is done
    ended/<role>/<index>        "1": this member has saved what it had, in a job that is
                                told to end
    left/<role>/<index>         the member/ value of one that has left
    lost/<role>/<index>         the member/ value of one whose connection is lost

``registry_server.py`` has the requests, and what a book becomes when its host dies.
"""

import concurrent.futures
import contextlib
import errno
import logging
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from persia_torchrec import env, timeouts
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import (
    ConfigError,
    DiscoveryError,
    JobError,
    JobMismatchError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    TokenError,
    WireError,
)
from persia_torchrec.job.registry_server import (
    COMPILING,
    JOB_ID,
    Add,
    BookServer,
    Get,
    Journal,
    Put,
    Request,
    Swap,
)
from persia_torchrec.rpc.addresses import LOOPBACK, family_of, join_address
from persia_torchrec.rpc.auth import Greeting
from persia_torchrec.rpc.client import Connections
from persia_torchrec.rpc.messages import Header, Kind, decode_json

SERVED_CHECKPOINT = "served_checkpoint"
"""Note that names the checkpoint that servers of a job serve, if they follow none."""

logger = logging.getLogger(__name__)

JobState = Literal["running", "finished", "failed"]

_STATE = "job/state"
_RECOVERY = "job/recovery_s"
_ENDING, _LAST_STEP = "job/ending", "job/last_step"
_FINISHING, _FINISHED = "finishing", "finished"
_POLL_S = 0.05
_CONNECT_RETRY_S = 0.2
_HELD_S = 1.0  # how long a port is held by what does not listen when it is taken
_OVER_S = 10.0
_SOON_S = 1.0  # when to say what is waited for
_JOIN_ANSWER_S = 30.0
_ANSWER_S = 30.0
_RECONNECT_S = 3.0
_LOOK_S = 1.0
_BEATS_S = 5.0  # more than between two heartbeats of a process that compiles


class AddressBook:
    """One connection to the job's address book. Any thread may call any method.

    Every method raises :class:`JobError` when the coordinator is gone.
    ``timeout_s`` is ``PERSIA_JOIN_TIMEOUT_S`` unless it is given; a longer wait says
    every ten seconds what for.
    """

    def __init__(
        self, address: tuple[str, int], greeting: Greeting, host_name: str
    ) -> None:
        self._address = address
        self._server: BookServer | None = None
        self._is_closed = False
        self.recovery_s = 0.0  # how long a request waits for the coordinator's return
        self._connection = Connections(
            "address book",
            [f"tcp://{join_address(*address)}"],
            greeting=greeting,
            encrypts=BookServer.encrypts,
        )
        weakref.finalize(self, self._connection.abandon).atexit = False
        self.host_name = host_name
        self.port = address[1]
        self.greeting = greeting

    @classmethod
    def host(
        cls,
        port: int,
        *,
        everywhere: bool = False,
        job_id: str = "",
        memory: int | None = None,
        recovery_s: float = 0.0,
    ) -> "AddressBook":
        """Open the address book of a new job, on the loopback; the coordinator does.

        Port 0 takes a free one, which ``.port`` tells. Without a job's id one is drawn.
        ``memory`` is the descriptor of a file: what a coordinator before this one has
        written there is in the book. Members wait ``recovery_s`` for the next one.
        ``everywhere`` it listens on all addresses of this machine.
        """
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(f"port must be in [0, {MAX_PORT}]. Received: {port}.")
        journal = Journal(memory)
        job_id = journal.values.get(JOB_ID) or job_id
        greeting = Greeting(job_id) if job_id else Greeting.draw()
        if recovery_s:
            journal.values[_RECOVERY] = str(recovery_s)
        try:
            listen = "*" if everywhere else LOOPBACK
            server = BookServer(listen, port, greeting, journal)
        except WireError as exc:
            raise JobError(
                f"The address book must be able to listen on port {port}. "
                f"Received: {exc} Does another job use the port?"
            ) from exc
        port = int(server.address.rpartition(":")[2])
        book = cls((LOOPBACK, port), greeting, LOOPBACK)
        book._server = server
        return book

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        job_id: str = "",
        *,
        timeout_s: float | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> "AddressBook":
        """Connect to the address book of a job, which may not be there yet.

        Without ``job_id`` this process belongs to the job that is there. ``look`` is
        called several times a second meanwhile, and raises to give up.
        """
        own = Greeting(job_id)
        # This machine's own: a coordinator of a local job listens on 127.0.0.1.
        host = LOOPBACK if host == "::1" else host
        now, is_back = time.monotonic(), env.num_restarts() > 0
        deadline = now + _seconds(timeout_s)
        # A process that was started again is refused where its job is over.
        listens_by = min(deadline, now + _OVER_S) if is_back else deadline
        with timeouts.saying(
            logger,
            lambda: f"waiting for the coordinator at {host}:{port}",
            first_s=_SOON_S,
        ):
            address = _await_listener(host, port, listens_by, look)
        book = cls((address, port), own, host)
        try:
            answer_s = max(deadline - time.monotonic(), 0.1)
            answer_s = answer_s if is_back else min(answer_s, _JOIN_ANSWER_S)
            job_id_there, recovery_s = book._ask_first(answer_s, look)
        except PersiaError as exc:
            book.close()
            if isinstance(exc, RemoteError) and exc.kind == JobMismatchError.__name__:
                raise JobMismatchError(str(exc)) from exc
            if not isinstance(exc, ServerError):
                raise
            raise DiscoveryError(
                f"The job's address book must be at {host}:{port}. Received: {exc} "
                "Something else listens there, or another version of persia_torchrec."
            ) from exc
        book.greeting = Greeting(job_id_there or "")
        book.recovery_s = float(recovery_s or 0)
        return book

    def close(self) -> None:
        """Close the connection; the host's book is gone for all with it."""
        self._is_closed = True
        self._connection.close()
        if self._server is not None:
            self._server.close()

    def register(self, role: str, index: int, size: int, address: str) -> None:
        """Publish the address of a process of a role; replaces a previous one."""
        self.claim_size(role, index, size)
        self.put(f"address/{role}/{index}", address)

    def claim_size(self, role: str, index: int, size: int) -> None:
        """Register the size of a role; ConfigError if another one is registered."""
        if not 0 <= index < size:
            raise ConfigError(
                f"The index of a {role} must be in [0, {size}). Received: {index}."
            )
        known = self.claim(f"address/{role}/size", str(size))
        if known != str(size):
            raise ConfigError(
                f"Every {role} and the coordinator must be started with the same "
                f"number of them. Received: {size} from {role} {index}, {known} from "
                f"another. Start {known}, or tell the coordinator {size}. "
                f"{env.rank_hint(role)}{self.another_port()}"
            )

    def addresses(self, role: str, *, timeout_s: float | None = None) -> list[str]:
        """Return the addresses of a role, by index; DiscoveryError if one is late."""
        timeout_s = _seconds(timeout_s)
        deadline = time.monotonic() + timeout_s
        (size,) = self._wait_for([f"address/{role}/size"], deadline)
        if size is None:
            raise DiscoveryError(
                f"Every {role} must register within {timeout_s:g} s. Received: none. "
                f"Is the role '{role}' part of the job, and did it start?"
            )
        keys = [f"address/{role}/{index}" for index in range(int(size))]
        found = self._wait_for(keys, deadline)
        missing = [f"{role} {i}" for i, value in enumerate(found) if value is None]
        if missing:
            raise DiscoveryError(
                f"All {size} of the role '{role}' must register within "
                f"{timeout_s:g} s. Missing: {', '.join(missing)}. See their logs."
            )
        return [str(value) for value in found]

    def tell(self, name: str, value: str) -> None:
        """Publish a note for the other processes; replaces a previous one."""
        self.put(f"note/{name}", value)

    def claim_note(self, name: str, value: str) -> str:
        """Publish a note unless there is one of that name; return the one there."""
        return self.claim(f"note/{name}", value)

    def ask(self, names: Sequence[str], *, timeout_s: float | None = None) -> list[str]:
        """Return the notes of these names; DiscoveryError if one is late."""
        timeout_s = _seconds(timeout_s)
        keys = [f"note/{name}" for name in names]
        found = self._wait_for(keys, time.monotonic() + timeout_s)
        if None in found:
            pairs = zip(names, found, strict=True)
            missing = ", ".join(name for name, value in pairs if value is None)
            raise DiscoveryError(
                f"Notes must be published within {timeout_s:g} s. Missing: {missing}."
            )
        return [str(value) for value in found]

    def state(self) -> tuple[JobState, str]:
        """Return the state of the job, and the reason if it failed."""
        verdict = self.peek(_STATE)
        if verdict is None:
            return "running", ""
        state, _, reason = verdict.partition(" ")
        return ("failed", reason) if state == "failed" else ("finished", "")

    def is_over(self) -> bool:
        """Return whether a job has ended for all, and not for its trainers alone."""
        return self.peek(_STATE) not in (None, _FINISHING)

    def fail(self, who: str, reason: str) -> None:
        """End the job as failed, unless it has ended already."""
        self.claim(_STATE, f"failed {who}: {reason}")

    def finish_trainers(self) -> None:
        """End the job as finished, but the others than trainers stay yet."""
        self.claim(_STATE, _FINISHING)

    def finish(self) -> None:
        """End the job as finished, unless it has ended already."""
        if self.claim(_STATE, _FINISHED) == _FINISHING:
            self.claim(_STATE, _FINISHED, _FINISHING)

    def tell_to_end(self, signal_name: str, who: str) -> None:
        """Have the job take a last checkpoint and end, as a signal to a member says."""
        self.claim(_ENDING, f"{signal_name} {who}")

    def ending(self) -> tuple[str, str]:
        """Return the signal by which the job was told to end, and who got it; or ""."""
        name, _, who = (self.peek(_ENDING) or "").partition(" ")
        return name, who

    def tell_last_step(self) -> None:
        """Make known that the trainers of a job that is told to end train no more."""
        self.put(_LAST_STEP, "1")

    def is_after_last_step(self) -> bool:
        """Return whether the trainers of a job that is told to end train no more."""
        return self.peek(_LAST_STEP) is not None

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(Put(key, value))

    def peek(self, key: str) -> str | None:
        """Return what a key holds, or None; does not wait."""
        (value,) = self._call(Get([key]))
        return value

    def claim(self, key: str, value: str, expected: str = "") -> str:
        """Set a key that holds ``expected``, or nothing; return what it holds then."""
        (held,) = self._call(Swap(key, expected, value))
        return str(held)

    def increase(self, key: str) -> None:
        """Add 1 to a number, which starts at 0."""
        self._call(Add(key))

    def another_port(self) -> str:
        """Return what to do if another job has this port, for an error."""
        return (
            f"If another job uses port {self.port}, give this one another (--port, or "
            "PERSIA_STORE_PORT)."
        )

    def _wait_for(self, keys: Sequence[str], deadline: float) -> list[str | None]:
        """Wait until all keys are set; return them, with None for one that is not."""
        values = self._call(Get([*keys]))
        if None not in values:
            return values

        def what() -> str:
            pairs = zip(keys, values, strict=True)
            missing = [_name(key) for key, value in pairs if value is None]
            kind = "notes" if keys[0].startswith("note/") else "roles"
            return timeouts.waiting_for(missing, len(keys), kind)

        patience = Patience(deadline, time.monotonic())
        with timeouts.saying(logger, what):
            while None in (values := self._call(Get([*keys]))):
                state, reason = self.state()
                if state == "failed":
                    raise JobError(f"The job failed: {reason}")
                num_beats = int(self.peek(COMPILING) or 0)
                if patience.is_over(num_beats, time.monotonic()):
                    break
                time.sleep(_POLL_S)
        return values

    def _call(self, request: Request) -> list[str | None]:
        """Send a request, again if the connection breaks; return its answer.

        The socket of a coordinator that has a supervisor outlives it. So one that is
        refused has ended for good.
        """
        started = time.monotonic()
        next_look = started
        while not self._is_closed:
            try:
                return self._send(request, _ANSWER_S)
            except ServerError as exc:
                now = time.monotonic()
                late = isinstance(exc, RequestTimeoutError) and not self.recovery_s
                is_over = late or isinstance(exc, RemoteError | TokenError)
                is_over |= now > started + max(self.recovery_s, _RECONNECT_S)
                if not is_over and now >= next_look:
                    is_over, next_look = self._is_refused(), now + _LOOK_S
                if is_over:
                    raise JobError(
                        f"The job's address book at {self.host_name}:{self.port} must "
                        f"answer. Received: {exc} The coordinator has ended, or the "
                        "network is cut."
                    ) from exc
            time.sleep(_POLL_S)
        raise JobError("The address book must be open. Received: a closed one.")

    def _ask_first(
        self, timeout_s: float, look: Callable[[], None]
    ) -> list[str | None]:
        """Return what a client must know, also if the coordinator starts again."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.1)
            try:
                return self._send(Get([JOB_ID, _RECOVERY]), left_s, look)
            except ServerError as exc:
                final = RemoteError | RequestTimeoutError | TokenError
                if isinstance(exc, final) or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)

    def _send(
        self,
        request: Request,
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> list[str | None]:
        body = [msgspec.json.encode(request)]
        reply = self._connection.submit(
            0, Header(Kind.BOOK), body, timeout_s=timeout_s, what="a request"
        )
        try:
            while not reply.done():
                concurrent.futures.wait([reply], timeout=_CONNECT_RETRY_S)
                look()
            values: list[str | None] = decode_json(reply.frames(), list[str | None])
        except WireError as exc:
            name = self._connection.names[0]
            raise RemoteError(str(exc), server=name, kind=type(exc).__name__) from exc
        return values

    def _is_refused(self) -> bool:
        """Return whether it is known that no process listens at the address."""
        try:
            socket.create_connection(self._address, timeout=_POLL_S).close()
        except OSError as exc:  # any other: the host may be out of reach for a moment
            return isinstance(exc, ConnectionRefusedError)
        return False


class Patience:
    """A deadline, extended while a process compiles: by ``COMPILING_S`` at most."""

    def __init__(self, deadline: float, now: float) -> None:
        self._deadline = deadline
        self._last_deadline = deadline + timeouts.COMPILING_S
        self._last_look = now
        self._num_beats: int | None = None
        self._compiles_until = 0.0

    def is_over(self, num_beats: int, now: float) -> bool:
        """Return whether the time has run out; ``num_beats`` grows by heartbeats."""
        if self._num_beats is not None and num_beats != self._num_beats:
            self._compiles_until = now + _BEATS_S
        if now < self._compiles_until:
            self._deadline += now - self._last_look
        self._num_beats, self._last_look = num_beats, now
        return now >= min(self._deadline, self._last_deadline)


def _seconds(timeout_s: float | None) -> float:
    return env.join_timeout_s() if timeout_s is None else timeout_s


def _name(key: str) -> str:
    """Return what a line about a wait calls a key: "server 1", "trainer master"."""
    _, *words = key.split("/")
    return f"any {words[0]}" if words[-1] == "size" else " ".join(words)


def _await_listener(
    host: str, port: int, deadline: float, look: Callable[[], None]
) -> str:
    """Return the IP address of ``host`` once something listens on the port there."""
    started, held_since, is_said = time.monotonic(), None, False
    while True:
        look()
        remaining = max(deadline - time.monotonic(), 0.1)
        try:
            with socket.create_connection((host, port), min(remaining, 5.0)) as probe:
                return str(probe.getpeername()[0])
        except OSError as exc:
            now = time.monotonic()
            if isinstance(exc, socket.gaierror) and not is_said:
                is_said = True
                text = "the coordinator's host %r is unknown here (%s); asked again"
                logger.warning(text, host, exc.strerror)
            held_since = (held_since or now) if _is_held(host, port) else None
            if held_since is not None and now - held_since > _HELD_S:
                raise DiscoveryError(
                    f"The job's address book must be at {host}:{port}. Received: "
                    f"{exc}; another process of this machine holds the port, and does "
                    "not listen. Name another port (--port, or PERSIA_STORE_PORT)."
                ) from exc
            if now + _CONNECT_RETRY_S >= deadline:
                raise DiscoveryError(
                    f"The job's address book must be at {host}:{port}. "
                    f"Received: {exc}, for {now - started:.1f} s. "
                    "Is the coordinator running there?"
                ) from exc
        time.sleep(_CONNECT_RETRY_S)


def _is_held(host: str, port: int) -> bool:
    """Return whether, on this machine, a coordinator could not listen on the port."""
    with contextlib.suppress(socket.gaierror), socket.socket(family_of(host)) as probe:
        # As a coordinator does: a connection that was closed before does not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return exc.errno == errno.EADDRINUSE
    return False
