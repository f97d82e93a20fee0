"""The address book of a job: where its roles find each other, and how it ended.

The coordinator hosts the book; every other process is a client of it. Each server,
worker, ... registers its address under its role and index; a client of a role waits
until all of it has registered. A restarted process registers again. The first verdict
on the job stands.

``requests.py`` has what is asked and answered, ``state.py`` the state of a job,
``registry_server.py`` the thread that answers, and what remains when its host dies.
"""

import concurrent.futures
import contextlib
import errno
import logging
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from persia_torchrec import env, timeouts
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import (
    ConfigError,
    DiscoveryError,
    FrameError,
    JobError,
    JobMismatchError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    TokenError,
    WireError,
)
from persia_torchrec.job.registry_server import BookServer, Journal
from persia_torchrec.job.requests import (
    MAX_REQUEST_BYTES,
    MAX_TEXT,
    AskStatus,
    ClaimSize,
    Fail,
    FindNotes,
    FindRole,
    Finish,
    Found,
    JobTimings,
    Look,
    Meet,
    Outcome,
    Read,
    Request,
    SetNote,
    TellLastStep,
    TellToEnd,
    View,
    Welcome,
)
from persia_torchrec.job.state import AwakeClock, JobState, Member
from persia_torchrec.job.status import Status, Statuses
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.addresses import LOOPBACK, family_of, join_address
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.greeting import Greeting
from persia_torchrec.rpc.messages import Header, Kind, decode_json

SERVED_CHECKPOINT = "served_checkpoint"
"""Note that names the checkpoint that servers of a job serve, if they follow none."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMINGS = "timings"  # note
_POLL_S = 0.05
_CONNECT_RETRY_S = 0.2
_SOON_S = 1.0  # when to say what is waited for
_LOOK_S = 1.0


class AddressBook:
    """One connection to the job's address book. Any thread may call any method.

    Every method raises :class:`JobError` when the coordinator is gone.
    ``timeout_s`` is ``PERSIA_JOIN_TIMEOUT_S`` unless it is given; a long wait says
    what for.
    """

    def __init__(
        self, address: tuple[str, int], greeting: Greeting, host_name: str
    ) -> None:
        self._address = address
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
    ) -> "HostedBook":
        """Open the address book of a new job, on the loopback; the coordinator does.

        Port 0 takes a free one, which ``.port`` tells. Without a job's id one is drawn.
        ``memory`` is the descriptor of a file: what a coordinator before this one has
        written there is in the book. Members wait ``recovery_s`` for the next one.
        ``everywhere`` it listens on all addresses of this machine.
        """
        if not 0 <= port <= MAX_PORT:
            raise ConfigError(f"port must be in [0, {MAX_PORT}]. Received: {port}.")
        journal, now_s = Journal(memory), time.monotonic()
        job = journal.read()
        job_id = job.job_id if job else job_id
        greeting = Greeting(job_id) if job_id else Greeting.draw()
        if job is None:
            job = JobState(greeting.job_id, AwakeClock(now_s))
        job.resume(now_s)
        job.recovery_s = recovery_s
        try:
            listen = "*" if everywhere else LOOPBACK
            server = BookServer(listen, port, greeting, job, journal)
        except WireError as exc:
            raise JobError(
                f"The address book must be able to listen on port {port}. "
                f"Received: {exc} Does another job use the port?"
            ) from exc
        return HostedBook(server, greeting)

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
        # A process that was started again is rejected where its job is over.
        listens_by = (
            min(deadline, now + timeouts.REGISTRY_OVER_S) if is_back else deadline
        )
        with timeouts.saying(
            logger,
            lambda: f"waiting for the coordinator at {host}:{port}",
            first_s=_SOON_S,
            level=logging.INFO,
        ):
            address = _await_listener(host, port, listens_by, look)
        book = cls((address, port), own, host)
        try:
            answer_s = max(deadline - time.monotonic(), 0.1)
            answer_s = answer_s if is_back else min(answer_s, timeouts.REGISTRY_JOIN_S)
            there = book._ask_first(answer_s, look)
        except PersiaError as exc:
            book.close()
            if isinstance(exc, RemoteError) and exc.kind == JobMismatchError.__name__:
                raise JobMismatchError(str(exc)) from exc
            if not isinstance(exc, ServerError):
                raise
            if isinstance(exc, TokenError):
                why = str(exc).removeprefix(f"{exc.server}: ")
                raise DiscoveryError(
                    f"The coordinator at {host}:{port} rejects this process. "
                    f"{why.removeprefix('a request: ')} Something else listens there, "
                    "if the token is the same."
                ) from exc
            raise DiscoveryError(
                f"The job's address book must be at {host}:{port}. Received: {exc} "
                "Something else listens there, or another version of persia_torchrec."
            ) from exc
        book.greeting = Greeting(there.job_id)
        book.recovery_s = there.recovery_s
        return book

    def close(self) -> None:
        """Close the connection; the host's book is gone for all with it."""
        self._is_closed = True
        self._connection.close()

    def register(self, role: str, index: int, size: int, address: str) -> None:
        """Publish the address of a process of a role; replaces a previous one."""
        self.claim_size(role, index, size, address)

    def claim_size(
        self, role: str, index: int, size: int, address: str | None = None
    ) -> None:
        """Register the size of a role; ConfigError if another one is registered."""
        if not 0 <= index < size:
            raise ConfigError(
                f"The index of a {role} must be in [0, {size}). Received: {index}."
            )
        known = self.call(ClaimSize(role, index, size, address), int)
        if known != size:
            raise ConfigError(
                f"Every {role} and the coordinator must be started with the same "
                f"number of them. Received: {size} from {role} {index}, {known} from "
                f"another. Start {known}, or tell the coordinator {size}. "
                f"{env.rank_hint(role)}{self.another_port()}"
            )

    def addresses(self, role: str, *, timeout_s: float | None = None) -> list[str]:
        """Return the addresses of a role, by index; DiscoveryError if one is late."""
        timeout_s = _seconds(timeout_s)
        found = self._wait_for(FindRole(role), role, timeout_s)
        if found is None:
            raise DiscoveryError(
                f"Every {role} must register within {timeout_s:g} s. Received: none. "
                f"Is the role '{role}' part of the job, and did it start?"
            )
        missing = [f"{role} {i}" for i, value in enumerate(found) if value is None]
        if missing:
            raise DiscoveryError(
                f"All {len(found)} of the role '{role}' must register within "
                f"{timeout_s:g} s. Missing: {', '.join(missing)}. See their logs."
            )
        return [str(value) for value in found]

    def address(self, role: str, index: int) -> str | None:
        """Return the address of a process, or None; does not wait."""
        found = self.call(FindRole(role), Found).values or []
        return found[index] if index < len(found) else None

    def tell(self, name: str, value: str) -> None:
        """Publish a note for the other processes; replaces a previous one."""
        self.call(SetNote(name, value), str)

    def claim_note(self, name: str, value: str, expected: str = "") -> str:
        """Publish a note that is ``expected``, or not there; return the one there."""
        return self.call(SetNote(name, value, expected), str)

    def note(self, name: str) -> str | None:
        """Return a note, or None; does not wait."""
        (value,) = self.call(FindNotes([name]), Found).values or [None]
        return value

    def ask(self, names: Sequence[str], *, timeout_s: float | None = None) -> list[str]:
        """Return the notes of these names; DiscoveryError if one is late."""
        timeout_s = _seconds(timeout_s)
        found = self._wait_for(FindNotes([*names]), "", timeout_s) or []
        if None in found:
            pairs = zip(names, found, strict=True)
            missing = ", ".join(name for name, value in pairs if value is None)
            raise DiscoveryError(
                f"Notes must be published within {timeout_s:g} s. Missing: {missing}."
            )
        return [str(value) for value in found]

    def timings(self) -> JobTimings:
        """Return the timings of the job, once the coordinator has published them."""
        (text,) = self.ask([_TIMINGS])
        timings: JobTimings = parse_json(text, JobTimings, "note 'timings'", FrameError)
        return timings

    def member(self, role: str, index: int) -> Member:
        """Return a member as the coordinator knows it now; it may have to join yet."""
        return self.call(Read(role, index), Member)

    def view(self) -> View:
        """Return how the job is."""
        return self.call(Look(), View)

    def status(self) -> Status:
        """Return how the job and its members are, with their figures."""
        return self.call(AskStatus(), Status)

    def state(self) -> tuple[Outcome, str]:
        """Return the state of the job, and the reason if it failed."""
        view = self.view()
        return view.outcome, view.reason

    def is_over(self) -> bool:
        """Return whether a job has ended for all, and not for its trainers alone."""
        return self.view().is_over

    def fail(self, who: str, reason: str) -> View:
        """End the job as failed, unless it has ended already; return how it is."""
        return self.call(Fail(who[:MAX_TEXT], reason[:MAX_TEXT]), View)

    def tell_to_end(self, signal_name: str, who: str) -> None:
        """Have the job take a last checkpoint and end, as a signal to a member says."""
        self.call(TellToEnd(signal_name, who), View)

    def report_last_step(self) -> None:
        """Make known that the trainers of a job that is told to end train no more."""
        self.call(TellLastStep(), View)

    def another_port(self) -> str:
        """Return what to do if another job has this port, for an error."""
        return (
            f"If another job uses port {self.port}, give this one another (--port, or "
            "PERSIA_STORE_PORT)."
        )

    def _wait_for(
        self, request: FindNotes | FindRole, role: str, timeout_s: float
    ) -> list[str | None] | None:
        """Wait until all is there; return it, with None for what is not.

        ``role`` is that of the addresses, or "".
        """
        found = self.call(request, Found)

        def what() -> str:
            if found.values is None:
                return timeouts.waiting_for([f"any {role}"], 1)
            missing = [n for n, v in enumerate(found.values) if v is None]
            if isinstance(request, FindRole):
                names = [f"{role} {n}" for n in missing]
                return timeouts.waiting_for(names, len(found.values))
            names = [request.names[n].replace("/", " ") for n in missing]
            return timeouts.waiting_for(names, len(found.values), "notes")

        now = time.monotonic()
        patience = ExtendableDeadline(now + timeout_s, now)
        with timeouts.saying(logger, what, level=logging.INFO):
            while found.values is None or None in found.values:
                if found.view.outcome == "failed":
                    raise JobError(f"The job failed: {found.view.reason}")
                if patience.is_over(found.view.is_compiling, time.monotonic()):
                    break
                time.sleep(found.next_look_s)
                found = self.call(request, Found)
        return found.values

    def call(self, request: Request, kind: type[T]) -> T:
        """Send a request, again if the connection breaks; return its answer.

        The socket of a coordinator that has a supervisor outlives it. So one that is
        rejected has ended for good.
        """
        started = time.monotonic()
        next_look = started
        while not self._is_closed:
            try:
                return self._send(request, kind, timeouts.REGISTRY_ANSWER_S)
            except ServerError as exc:
                now = time.monotonic()
                late = isinstance(exc, RequestTimeoutError) and not self.recovery_s
                is_over = late or isinstance(exc, RemoteError | TokenError)
                is_over |= now > started + max(
                    self.recovery_s, timeouts.REGISTRY_RECONNECT_S
                )
                if not is_over and now >= next_look:
                    is_over, next_look = self._is_rejected(), now + _LOOK_S
                if is_over:
                    raise JobError(
                        f"The job's address book at {self.host_name}:{self.port} must "
                        f"answer. Received: {exc} The coordinator has ended, or the "
                        "network is cut."
                    ) from exc
            time.sleep(_POLL_S)
        raise JobError(
            "The connection to the address book must be open. Received: a closed one."
        )

    def _ask_first(self, timeout_s: float, look: Callable[[], None]) -> Welcome:
        """Return what a client must know, also if the coordinator starts again."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.1)
            try:
                return self._send(Meet(), Welcome, left_s, look)
            except ServerError as exc:
                final = RemoteError | RequestTimeoutError | TokenError
                if isinstance(exc, final) or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)

    def _send(
        self,
        request: Request,
        kind: type[T],
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> T:
        body = [msgspec.json.encode(request)]
        if len(body[0]) > MAX_REQUEST_BYTES:
            raise JobError(
                f"A request to the address book must have at most {MAX_REQUEST_BYTES} "
                f"bytes. Received: {len(body[0])}, of a {type(request).__name__}."
            )
        reply = self._connection[0].send(
            Header(Kind.BOOK), body, timeout_s=timeout_s, what="a request"
        )
        try:
            while not reply.done():
                concurrent.futures.wait([reply], timeout=_CONNECT_RETRY_S)
                look()
            answer: T = decode_json(reply.frames(), kind)
        except WireError as exc:
            name = self._connection.names[0]
            raise RemoteError(str(exc), server=name, kind=type(exc).__name__) from exc
        return answer

    def _is_rejected(self) -> bool:
        """Return whether it is known that no process listens at the address."""
        try:
            socket.create_connection(self._address, timeout=_POLL_S).close()
        except OSError as exc:  # any other: the host may be out of reach for a moment
            return isinstance(exc, ConnectionRefusedError)
        return False


class HostedBook(AddressBook):
    """The address book in the process that hosts it, without a connection.

    ``job`` is the state of the job, ``statuses`` what its members say of themselves; a
    thread that reads or changes them has ``lock``.
    """

    def __init__(self, server: BookServer, greeting: Greeting) -> None:
        self._server = server
        self._is_closed = False
        self.lock, self.job = server.lock, server.job
        self.statuses: Statuses = server.statuses
        self.recovery_s = 0.0
        self.host_name, self.greeting = LOOPBACK, greeting
        self.port = int(server.address.rpartition(":")[2])

    def close(self) -> None:
        """Close the book, which is gone for all."""
        self._is_closed = True
        self._server.close()

    def publish(self, timings: JobTimings) -> None:
        """Make these the timings of the job; the coordinator calls it first."""
        with self.lock:
            self.job.timings = timings
            self.tell(_TIMINGS, msgspec.json.encode(timings).decode())

    def finish_trainers(self) -> None:
        """End the job as finished, but the others than trainers stay yet."""
        self.call(Finish(is_over=False), View)

    def finish(self) -> None:
        """End the job as finished, unless it has ended already."""
        self.call(Finish(is_over=True), View)

    def call(self, request: Request, kind: type[T]) -> T:
        """Answer a request."""
        if self._is_closed:
            raise JobError(
                "The connection to the address book must be open. Received: a closed "
                "one."
            )
        try:
            answer = self._server.answer(request)
        except FrameError as exc:
            raise JobError(str(exc)) from exc
        assert isinstance(answer, kind)
        return answer


class ExtendableDeadline:
    """A deadline, extended while a process compiles: by ``COMPILING_S`` at most."""

    def __init__(self, deadline: float, now: float) -> None:
        self._deadline = deadline
        self._last_deadline = deadline + timeouts.COMPILING_S
        self._last_look = now

    def is_over(self, is_compiling: bool, now: float) -> bool:
        """Return whether the time has run out; call it several times a second."""
        if is_compiling:
            self._deadline += now - self._last_look
        self._last_look = now
        return now >= min(self._deadline, self._last_deadline)


def _seconds(timeout_s: float | None) -> float:
    return env.join_timeout_s() if timeout_s is None else timeout_s


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
            if held_since is not None and now - held_since > timeouts.PORT_HELD_S:
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
