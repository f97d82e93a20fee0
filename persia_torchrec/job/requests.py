"""Requests to the coordinator of a job and their replies, one struct each.

``state.py`` answers the requests. A heartbeat is a ``Beat``, answered by a ``View``:
how the job is, and when the next one is due. What is no heartbeat is asked seldom.
"""

import dataclasses
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.process_identity import Number, ProcessIdentity
from persia_torchrec.parsing.settings import declared

Outcome = Literal["running", "finished", "failed"]

MAX_TEXT = 2**16
"""Characters of what a member reports: why it fails, where its log is."""

MAX_FIGURE_NAME = 256
"""Characters of the name of a figure."""

MAX_REQUEST_BYTES = 2**20
"""Of a request to the address book."""

Role = Annotated[str, Meta(max_length=64)]
Index = Annotated[int, Meta(ge=0, lt=2**16)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Figures = Annotated[
    dict[Annotated[str, Meta(max_length=MAX_FIGURE_NAME)], int | float | None],
    Meta(max_length=2**10),
]
"""What a member has measured, by name; None: a number that is not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobTimings:
    """Heartbeat intervals and timeouts of a job, set by the coordinator for all."""

    heartbeat_s: float = timeouts.HEARTBEAT_S
    """Seconds between two heartbeats of a member; longer in a job of more than 100."""

    silent_s: float = timeouts.SILENT_S
    """A member, or the coordinator, without heartbeats for longer counts as dead."""

    grace_s: float = declared(
        "grace_s",
        default_factory=lambda: (
            timeouts.LOCAL_GRACE_S if env.is_local_job() else timeouts.GRACE_S
        ),
    )

    leave_s: float = timeouts.MAIN_THREAD_LEAVE_S
    """What an interrupted main thread has to end by itself."""

    finish_s: float = timeouts.FINISH_S
    """What a member has to leave after the job is finished."""

    recovery_timeout_s: float = declared("recovery_timeout_s")

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")
        if self.silent_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "silent_s must be at least two heartbeats. "
                f"Received: {self.silent_s} with heartbeat_s={self.heartbeat_s}."
            )


class Request(msgspec.Struct, frozen=True, tag=True):
    """What is asked of the coordinator; sent again if a connection breaks."""


class OfMember(Request, frozen=True):
    """A request about one member."""

    role: Role
    index: Index

    @property
    def who(self) -> str:
        """The member's name, as "server 0"."""
        return f"{self.role} {self.index}"


class Meet(Request, frozen=True):
    """Ask which job this is; answered by ``Welcome``."""


class Look(Request, frozen=True):
    """Ask how the job is; answered by a ``View``."""


class AskStatus(Request, frozen=True):
    """Ask how the job and all of its members are; answered by a ``Status``."""


class Beat(OfMember, frozen=True):
    """A heartbeat; answered by a ``View``."""

    nonce: str
    progress: Number = 0
    is_compiling: bool = False
    is_paused: bool = False
    """Whether steps wait for a checkpoint that is saved or loaded."""
    notes: dict[str, str] = {}
    figures: Figures = {}
    """Empty: they are as before."""


class Read(OfMember, frozen=True):
    """Ask for a member; answered by a ``Member``."""


class Register(OfMember, frozen=True):
    """Become a member whose process has the nonce ``expected``, or that has none: "".

    Answered by the nonce of its process then.
    """

    process: ProcessIdentity
    expected: str = ""
    agent: ProcessIdentity | None = None
    log: Text = ""


class Report(OfMember, frozen=True):
    """Report what a member has done; answered by whether ``cause`` is a new one."""

    progress: Number = 0
    is_done: bool = False
    has_saved: bool = False
    left: ProcessIdentity | None = None
    pid: Number = 0
    cause: Text = ""


class Raise(OfMember, frozen=True):
    """Report where a script has raised; answered by whether it did so before.

    ``progress`` is None where it is that of all trainers.
    """

    start: Number
    place: Text
    progress: Number | None = None


class ClaimSize(OfMember, frozen=True):
    """Tell the size of a role, and an address; answered by the size that is known."""

    size: Index
    address: str | None = None


class FindRole(Request, frozen=True):
    """Ask for the addresses of a role; answered by ``Found``."""

    role: Role


class FindNotes(Request, frozen=True):
    """Ask for notes; answered by ``Found``."""

    names: list[str]


class SetNote(Request, frozen=True):
    """Set a note, or only one that is ``expected``; answered by what it is then."""

    name: str
    value: str
    expected: str | None = None


class Finish(Request, frozen=True):
    """End the job as finished, unless it has failed: for all, or for trainers first."""

    is_over: bool


class Fail(Request, frozen=True):
    """End the job as failed, unless it has ended; answered by a ``View``."""

    who: Text
    reason: Text


class TellToEnd(Request, frozen=True):
    """Have the job take a last checkpoint and end; answered by a ``View``."""

    signal: Role
    who: Text


class TellLastStep(Request, frozen=True):
    """Tell that trainers of a job that ends train no more; answered by a ``View``."""


class Welcome(msgspec.Struct, frozen=True):
    """Which job this is, and how long its members wait for the coordinator."""

    job_id: str
    recovery_s: float


class View(msgspec.Struct, frozen=True):
    """How the job is, as members must know it."""

    outcome: Outcome = "running"
    reason: str = ""
    is_over: bool = False
    """Whether it has ended for all, and not for its trainers alone."""
    signal: str = ""
    """By which the job is told to end, or ""."""
    signal_to: str = ""
    is_after_last_step: bool = False
    """Whether the trainers of a job that is told to end need no more batches."""
    save_request: str = ""
    """By which a save is asked for; each is another text."""
    has_trainers: bool = False
    is_compiling: bool = False
    coordinator: ProcessIdentity | None = None
    successor: int = 0
    """Number of another process that has the place of the one that asks, or 0."""
    next_beat_s: float = 1.0


class Found(msgspec.Struct, frozen=True):
    """What was looked for, with None where it is missing; None: no size is known."""

    values: list[str | None] | None
    view: View
    next_look_s: float
