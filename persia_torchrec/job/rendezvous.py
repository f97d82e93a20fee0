"""Where torchrun's agents meet: notes in the job's address book, as JSON.

Only processes with the job's token write to the book, and nothing in it is unpickled,
as torch's own rendezvous does with what it finds. All NN workers start in rounds:

    note                          value
    nn-worker/round               the latest round that an agent has asked for
    nn-worker/round/N             the round for which agent N is ready: its NN workers
                                  have ended
    nn-worker/round/KEY           [round, text], what agents tell each other in a round

An agent that starts its NN workers asks for the next round, unless another one has. The
round begins when all agents are ready for it. Agents whose NN workers run see that a
later round is asked for, and restart theirs.

The first agent hosts the store of torch at which NN workers meet, one for each round.
It listens on the address by which the coordinator is reached: on one machine, the
loopback.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # no __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from persia_torchrec import env, timeouts
from persia_torchrec.errors import FrameError, JobError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import FindNotes, Found, View
from persia_torchrec.parsing.decoding import parse_json
from persia_torchrec.rpc.addresses import open_listening

logger = logging.getLogger(__name__)

BACKEND = "address-book"
"""The name under which torchrun finds :class:`BookRendezvous`."""

_ROUND = "nn-worker/round"
_STORE = "store"  # note of a round: its address and port


class BookRendezvous(RendezvousHandler):
    """The rendezvous of one of several agents. The agent's main thread calls it.

    Another thread calls :meth:`look`, several times a second. ``address`` is that of
    this machine, for the store.
    """

    def __init__(
        self, book: AddressBook, node_rank: int, nnodes: int, address: str
    ) -> None:
        self._book, self._address = book, address
        self._node_rank, self._nnodes = node_rank, nnodes
        self._round = self._asked = 0
        self._hosted: TCPStore | None = None

    def look(self) -> View:
        """Note whether a later round is asked for; return how the job is."""
        found = self._book.call(FindNotes([_ROUND]), Found)
        self._asked = _number((found.values or [None])[0])
        return found.view

    def get_backend(self) -> str:
        """Return the name under which torchrun finds it."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True: NN workers are clients of the store of the first agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; return the ranks of agents, and both stores."""
        self._hosted = None  # that of the NN workers that have ended
        try:
            self._round = self._await_round()
            notes = RoundNotes(self._book, self._round)
            if self._node_rank == 0:
                self._hosted = host_store(self._address)
                notes.set(_STORE, f"{self._address} {self._hosted.port}")
            address, port = notes.get(_STORE).decode().rsplit(" ", 1)
        except JobError as exc:
            raise RendezvousConnectionError(str(exc)) from exc
        where = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(notes, self._node_rank, self._nnodes, where)

    def _await_round(self) -> int:
        """Ask for the next round; return its number when all agents are ready."""
        book, own = self._book, f"{_ROUND}/{self._node_rank}"
        ready = [f"{_ROUND}/{n}" for n in range(self._nnodes)]
        # Of an agent before this one, its NN workers may have begun that round.
        last, asked = map(_number, _find(book, [own, _ROUND])[0])
        if asked <= last:
            expected = str(asked) if asked else ""
            asked = _number(book.claim_note(_ROUND, str(last + 1), expected))
        book.tell(own, str(asked))
        missing: list[str] = []

        def what() -> str:
            return timeouts.waiting_for(missing, self._nnodes, "torchruns")

        stop_s = time.monotonic() + env.join_timeout_s()
        with timeouts.saying(logger, what, level=logging.INFO):
            while True:
                (latest, *rounds), next_look_s = _find(book, [_ROUND, *ready])
                if _number(latest) > asked:
                    asked = _number(latest)
                    book.tell(own, str(asked))
                    continue
                missing = [
                    f"torchrun {n}"
                    for n, value in enumerate(rounds)
                    if _number(value) < asked
                ]
                if not missing:
                    return asked
                if time.monotonic() >= stop_s:
                    raise RendezvousTimeoutError(
                        f"All {self._nnodes} torchruns must be ready within "
                        f"{env.join_timeout_s():g} s. Received: none from "
                        f"{timeouts.some_of(missing)}. See their logs."
                    )
                time.sleep(next_look_s)

    def is_closed(self) -> bool:
        """Return False: it is open as long as the job runs."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the coordinator ends the job."""

    def num_nodes_waiting(self) -> int:
        """Return whether another agent waits for a later round, as 0 or 1."""
        return int(self._asked > self._round)

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._book.greeting.job_id

    def shutdown(self) -> bool:
        """Close the store of the NN workers, which have ended."""
        self._hosted = None
        return True


class RoundNotes(Store):
    """What agents tell each other in a round, as torch's store; one thread calls it.

    A note of an earlier round is none. NN workers end with the job; so a wait ends with
    it, too.
    """

    def __init__(self, book: AddressBook, round_: int) -> None:
        super().__init__()
        self._book, self._round = book, round_
        self._timeout = timedelta(seconds=env.join_timeout_s())

    @property
    def timeout(self) -> timedelta:
        """How long a wait may take."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait may take."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value for all agents."""
        text = value.decode() if isinstance(value, bytes) else value
        with contextlib.suppress(JobError):  # the job has ended
            self._book.tell(_name(key), _Note(self._round, text).encode())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        try:
            return [text.encode() for text in self._await(keys, self.timeout)]
        except JobError as exc:
            raise RendezvousConnectionError(str(exc)) from exc

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; return what it is then."""
        name, found = _name(key), ""
        with contextlib.suppress(JobError):  # the job has ended
            found = self._book.note(name) or ""
            while True:
                note = _Note.decode(found)
                value = amount + (int(note.text) if note.round == self._round else 0)
                own = _Note(self._round, str(value)).encode()
                known = self._book.claim_note(name, own, found)
                if known == own:
                    return value
                found = known
        return 0

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values, or until the job has ended."""
        with contextlib.suppress(JobError):
            self._await(keys, timeout or self.timeout)

    def _await(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        stop_s = time.monotonic() + timeout.total_seconds()
        names = [_ROUND, *map(_name, keys)]
        while True:
            (latest, *found), next_look_s = _find(self._book, names)
            notes = [_Note.decode(value or "") for value in found]
            if all(note.round == self._round for note in notes):
                return [note.text for note in notes]
            if _number(latest) > self._round:
                raise RendezvousStateError(
                    f"Round {self._round} of the NN workers must be the latest. "
                    f"Received: a torchrun that asks for round {latest}."
                )
            if time.monotonic() >= stop_s:
                raise RendezvousTimeoutError(
                    f"All torchruns must answer within {timeout.total_seconds():g} s. "
                    f"Missing: {timeouts.some_of(keys)}."
                )
            time.sleep(next_look_s)


@dataclass(frozen=True, slots=True)
class _Note:
    """A value of a round."""

    round: int = 0
    text: str = ""

    def encode(self) -> str:
        return msgspec.json.encode([self.round, self.text]).decode()

    @classmethod
    def decode(cls, text: str) -> "_Note":
        if not text:
            return cls()
        return cls(*parse_json(text, tuple[int, str], "note of a round", FrameError))


def host_store(address: str) -> TCPStore:
    """Host a store of torch at which NN workers meet, on one address of this machine.

    By itself torch listens on all.
    """
    listener = open_listening(address)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=env.join_timeout_s()),
        master_listen_fd=listener.detach(),
    )


def _find(book: AddressBook, names: Sequence[str]) -> tuple[list[str | None], float]:
    """Return notes, and when to look again; JobError if the job has ended."""
    found = book.call(FindNotes([*names]), Found)
    if found.view.outcome != "running":
        raise JobError(f"The job has ended: {found.view.outcome}. {found.view.reason}")
    return found.values or [], found.next_look_s


def _name(key: str) -> str:
    return f"{_ROUND}/{key}"


def _number(text: str | None) -> int:
    number: int = parse_json(text or "0", int, "note of a round", FrameError)
    return number


def _find_handler(params: RendezvousParameters) -> RendezvousHandler:
    handler: BookRendezvous = params.get("handler")
    return handler


rendezvous_handler_registry.register(BACKEND, _find_handler)
