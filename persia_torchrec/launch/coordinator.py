"""The coordinator of a job: hosts the address book and decides when the job ends.

``python -m persia_torchrec.launch.coordinator --port P --num-trainers N ...``

It runs first and leaves last. The job is finished when every trainer has said that its
work is done; where it has inference servers and no trainers, when the coordinator is
told to end. It has failed when a member reports a failure, does not join in time,
ends without a word, or is silent for too long; also when the process that started the
coordinator is gone, or the coordinator of trainers is told to end. Then it stays until
all members have left, so that each of them learns why.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from persia_torchrec import env
from persia_torchrec.config import refuse_inference
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.logger import get_default_logger
from persia_torchrec.wire.discovery import AddressBook, JobState
from persia_torchrec.wire.membership import JobTimings
from persia_torchrec.wire.roll import Roll, Signature

logger = logging.getLogger("persia_torchrec.launch.coordinator")  # also as __main__

NAME = "coordinator"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of the coordinator.

    Raises:
        ConfigError: a count is negative, there is no trainer, or a time is too short.
    """

    port: int
    """TCP port of the address book; 0 takes a free one."""

    num_trainers: int = 0
    """How many NN workers the job has; it is finished when all are done."""

    num_predictors: int = 0
    """How many inference servers a job without NN workers has; it is finished when the
    coordinator is told to end."""

    num_servers: int = 0
    """How many embedding servers the job has."""

    num_workers: int = 0
    """How many embedding workers the job has."""

    num_loaders: int = 0
    """How many data loaders the job has."""

    loopback: bool = False
    """Listen for this machine only; so for a job of torchx's local_cwd."""

    join_timeout_s: float = 120.0
    """How long after the start a member may join."""

    leave_timeout_s: float = 30.0
    """How long after the end of the job a member may take to leave."""

    linger_s: float = 1.5
    """How long to stay after the last member: torchx 0.7 stops reading the logs of a
    local job at the moment its last process ends, and may lose lines of the others."""

    timings: JobTimings = field(default_factory=JobTimings)
    """The rhythm that all members follow."""

    def __post_init__(self) -> None:
        for name in ("num_servers", "num_workers", "num_loaders", "linger_s"):
            self._require(name, getattr(self, name) >= 0, ">= 0")
        for name in ("join_timeout_s", "leave_timeout_s"):
            self._require(name, getattr(self, name) > 0, "> 0")
        for name in ("num_trainers", "num_predictors"):
            self._require(name, getattr(self, name) >= 0, ">= 0")
        if bool(self.num_trainers) == bool(self.num_predictors):
            raise ConfigError(
                "num_trainers must be >= 1, or num_predictors, one of them. Received: "
                f"{self.num_trainers} and {self.num_predictors}."
            )

    def _require(self, name: str, holds: bool, must: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise ConfigError(f"{name} must be {must}. Received: {value}.")

    def members(self) -> list[tuple[str, int]]:
        """Return role and index of every member of the job."""
        counts = {
            "server": self.num_servers,
            "worker": self.num_workers,
            "loader": self.num_loaders,
            "trainer": self.num_trainers,
            "predictor": self.num_predictors,
        }
        return [(role, index) for role, n in counts.items() for index in range(n)]


class Coordinator:
    """Watches the members of one job; one thread does it all."""

    def __init__(self, config: CoordinatorConfig, book: AddressBook) -> None:
        self._config = config
        self._book = book
        self._tick_s = config.timings.heartbeat_s / 4
        self._members = [
            _Member(role, index, Roll(book, role, index))
            for role, index in config.members()
        ]
        self._parent = os.getppid()
        self._was_told_to_end = False

    def end(self) -> None:
        """End the job, because somebody ends the coordinator: it fails if it trains."""
        self._was_told_to_end = True

    def run(self) -> JobState:
        """Watch the job until it has ended and all members have left."""
        self._config.timings.publish(self._book)
        logger.info("the address book is open at port %d", self._book.port)
        state, reason = self._watch()
        if state == "failed":
            logger.error("the job failed: %s", reason)
        else:
            logger.info("the job is finished")
        stragglers = self._see_off()
        if stragglers:
            logger.error("did not leave in time: %s", ", ".join(stragglers))
            state = "failed"
        time.sleep(self._config.linger_s)
        return state

    def _watch(self) -> tuple[JobState, str]:
        join_deadline = time.monotonic() + self._config.join_timeout_s
        while True:
            reason = self._failure(time.monotonic() > join_deadline)
            if reason is not None:
                self._book.fail(NAME, reason)
            elif self._is_over():
                self._book.finish()
            state, reason = self._book.state()
            if state != "running":
                return state, reason
            time.sleep(self._tick_s)

    def _is_over(self) -> bool:
        trainers = [m for m in self._members if m.role == "trainer"]
        if not trainers:
            return self._was_told_to_end
        return all(trainer.roll.is_done() for trainer in trainers)

    def _failure(self, joining_is_over: bool) -> str | None:
        if self._was_told_to_end and self._config.num_trainers:
            return "it was told to end (SIGTERM)"
        if os.getppid() != self._parent:
            return "the process that started it is gone"
        for member in self._members:
            failure = member.failure(self._tick_s, self._config.timings.silent_s)
            if failure is not None:
                return failure
        absent = [m.who for m in self._members if m.signature is None]
        if absent and joining_is_over:
            within = f"within {self._config.join_timeout_s:g} s"
            return f"{', '.join(absent)} did not join {within}; see their logs"
        return None

    def _see_off(self) -> list[str]:
        """Wait until all members have left; return those that have not in time.

        A member that has not joined yet is waited for as well: it would look for the
        address book long after the book is gone.
        """
        deadline = time.monotonic() + self._config.leave_timeout_s
        while True:
            remaining = [m.who for m in self._members if not m.is_gone()]
            if not remaining or time.monotonic() >= deadline:
                return remaining
            time.sleep(self._tick_s)


class _Member:
    """What the coordinator knows of one member."""

    def __init__(self, role: str, index: int, roll: Roll) -> None:
        self.role = role
        self.who = f"{role} {index}"
        self.roll = roll
        self.signature: Signature | None = None
        self._num_beats = 0
        self._silent_ticks = 0

    def failure(self, tick_s: float, silent_s: float) -> str | None:
        """Look at the member once a tick; say what is wrong with it, or None."""
        # Ticks are counted, not seconds: if this process was kept from running, so
        # that it could not see the beats, nobody else is to blame.
        self.signature = self.roll.signature()
        if self.signature is None:
            return None
        num_beats = self.roll.num_beats()
        has_beaten = num_beats != self._num_beats
        self._silent_ticks = 0 if has_beaten else self._silent_ticks + 1
        self._num_beats = num_beats
        if self._silent_ticks * tick_s > silent_s:
            return f"{self.who} was silent for {silent_s:g} s"
        # In this order: a member leaves first and ends then.
        if self.signature.process_is_gone() and not self.roll.has_left(self.signature):
            return f"{self.who} (process {self.signature.pid}) was killed"
        return None

    def is_gone(self) -> bool:
        """Return whether the member has joined, and left or died since."""
        self.signature = self.roll.signature()
        return self.signature is not None and (
            self.roll.has_left(self.signature) or self.signature.process_is_gone()
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the coordinator of one job; return 0 if the job was finished."""
    get_default_logger()
    try:
        refuse_inference("coordinator", env.global_config_path())
        config = _config_from(argv)
        book = AddressBook.host(config.port, loopback=config.loopback)
    except PersiaError as exc:
        logger.error("%s", exc)
        return 1
    coordinator = Coordinator(config, book)

    def end(_number: int, _frame: FrameType | None) -> None:
        coordinator.end()

    signal.signal(signal.SIGTERM, end)
    return 0 if coordinator.run() == "finished" else 1


def _config_from(argv: Sequence[str] | None) -> CoordinatorConfig:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}", description=CoordinatorConfig.__doc__
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-trainers", type=int, default=0)
    parser.add_argument("--num-predictors", type=int, default=0)
    parser.add_argument("--num-servers", type=int, default=0)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--num-loaders", type=int, default=0)
    parser.add_argument("--join-timeout-s", type=float, default=120.0)
    parser.add_argument("--leave-timeout-s", type=float, default=30.0)
    parser.add_argument("--linger-s", type=float, default=1.5)
    parser.add_argument("--heartbeat-s", type=float, default=1.0)
    parser.add_argument("--silent-s", type=float, default=20.0)
    arguments = vars(parser.parse_args(argv))
    timings = JobTimings(
        heartbeat_s=arguments.pop("heartbeat_s"), silent_s=arguments.pop("silent_s")
    )
    loopback = env.is_local_job()
    return CoordinatorConfig(timings=timings, loopback=loopback, **arguments)


if __name__ == "__main__":
    sys.exit(main())
