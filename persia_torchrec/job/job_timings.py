"""How long the members of a job wait for one another; the coordinator sets it."""

import json
from dataclasses import asdict, dataclass, field

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError, FrameError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.parsing.decoding import parse_json

_TIMINGS = "timings"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTimings:
    """Heartbeat intervals and timeouts of a job, set by the coordinator for all."""

    heartbeat_s: float = 1.0
    """Seconds between two heartbeats of a member."""

    silent_s: float = 20.0
    """A member, or the coordinator, without heartbeats for longer counts as dead."""

    grace_s: float = field(default_factory=lambda: 5.0 if env.is_local_job() else 20.0)
    """Seconds that trainers have to save when the job is told to end: by SIGTERM, as at
    a cancellation or a preemption, Ctrl-C, SIGUSR1 or SIGUSR2 [20; 5 for a job on one
    machine, as torchx kills such a job 10 s after SIGTERM]"""

    leave_s: float = 3.0
    """What an interrupted main thread has to end by itself."""

    finish_s: float = 20.0
    """What a member has to leave after the job is finished."""

    recovery_timeout_s: float = timeouts.RECOVERY_S
    """How long the job waits for a member with a supervisor, or the coordinator, that
    was killed, is lost or silent. Then it fails."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")
        if self.silent_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "silent_s must be at least two heartbeats. "
                f"Received: {self.silent_s} with heartbeat_s={self.heartbeat_s}."
            )

    def publish(self, book: AddressBook) -> None:
        """Make these the timings of the job; the coordinator calls it first."""
        book.tell(_TIMINGS, json.dumps(asdict(self)))

    @classmethod
    def read(cls, book: AddressBook) -> "JobTimings":
        """Return the timings of the job, once the coordinator has published them."""
        (text,) = book.ask([_TIMINGS])
        timings: JobTimings = parse_json(text, cls, "note 'timings'", FrameError)
        return timings
