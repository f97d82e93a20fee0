"""Kills processes of a job that recovers, at random, and waits for their return."""

import contextlib
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import psutil

from persia_torchrec.errors import JobError
from persia_torchrec.job.member_record import MemberRecord
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import wait_until
from tests.support.repository import ROOT

SUPERVISOR = "supervisor"  # of any member
AGENT = "agent"  # which has started the trainers
RAISING = "exception"  # not a kill: a trainer finds a file of this name, and raises
KILLS = "kills"  # a file that has a byte for each

# What is waited for after a kill; else the next one comes sooner.
_BACK, _TRAINING = 0.75, 0.5
_MOST_STEPS = 20


class Killer:
    """Kills one process after the other of a job that runs in a folder.

    Args:
        folder: in which the job runs.
        job: whose output says what happened if one does not come back.
        book: its address book.
        draw: says who is killed, and when.
        progress: returns a number that grows with each step.
        roles: which are drawn, from a sequence that may have some several times.
        sizes: how many members each role has.

    Attributes:
        away_s: seconds from each kill to the return, by role.
    """

    def __init__(
        self,
        folder: Path,
        job: ForkedJob,
        book: AddressBook,
        draw: random.Random,
        progress: Callable[[], int],
        roles: Sequence[str],
        **sizes: int,
    ) -> None:
        self._folder, self._job, self._book = folder, job, book
        self._draw, self._progress, self._roles = draw, progress, roles
        self._records = {
            role: [MemberRecord(book, role, index) for index in range(size)]
            for role, size in {"coordinator": 1, **sizes}.items()
        }
        self._away: dict[MemberRecord, tuple[str, ProcessIdentity, float]] = {}
        self.away_s = defaultdict[str, list[float]](list)

    def kill(
        self, num: int, most_pause_s: float = 1.0, most_steps: int = _MOST_STEPS
    ) -> None:
        """Kill so many processes; all are back in the end."""
        for _ in range(num):
            before = self._progress()
            wait_until(self._kill_one, "a process is killed", details=self._job.output)
            with (self._folder / KILLS).open("a") as file:
                file.write(".")
            patience = self._draw.random()
            if patience < _BACK:
                self.wait()
            if patience < _TRAINING:
                self._wait_for_progress(before + self._draw.randint(1, most_steps))
            time.sleep(most_pause_s * self._draw.random())  # it is killed anywhere
        self.wait()
        assert self._book.state() == ("running", ""), self._job.output()

    def wait(self) -> None:
        """Wait until all that were killed are back."""
        names = ", ".join(record.who for record in self._away)
        wait_until(self._are_back, f"{names} are back", details=self._job.output)

    def summary(self) -> str:
        """Return how many of each role were killed, and how long they were away."""
        return "away " + ", ".join(
            f"{role} {len(away_s)}: {median(away_s):.1f} ({max(away_s):.1f})"
            for role, away_s in sorted(self.away_s.items())
        )

    def _wait_for_progress(self, num: int) -> None:
        output = self._job.output
        wait_until(lambda: self._progress() >= num, "it trains", details=output)

    def _kill_one(self) -> bool:
        """Kill a member that is there; return whether it was."""
        drawn = self._draw.choice(self._roles)
        role = {AGENT: "trainer", RAISING: "trainer"}.get(drawn, drawn)
        if drawn == SUPERVISOR:
            role = self._draw.choice([*self._records])
        record = self._draw.choice(self._records[role])
        process = record.process()
        if process is None or record in self._away:
            self._are_back()
            return False
        self._away[record] = drawn, process, time.monotonic()
        if drawn == RAISING:
            (self._folder / RAISING).touch()
            return True
        victim = process
        if drawn == SUPERVISOR:
            victim = process.supervisor
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if drawn == AGENT:
                victim = ProcessIdentity.of(psutil.Process(process.pid).ppid())
            if victim.kill():
                return True
        del self._away[record]  # it ends, or starts, by itself
        return False

    def _are_back(self) -> bool:
        for record, (role, process, began_s) in list(self._away.items()):
            if record.process() != process:
                self.away_s[role].append(time.monotonic() - began_s)
                del self._away[record]
        return not self._away


@contextlib.contextmanager
def recovering_job(
    folder: Path,
    trainer: str,
    loader: str,
    *arguments: str,
    **variables: str,
) -> Iterator[tuple[ForkedJob, AddressBook]]:
    """Run a job of two servers and two workers that recovers; give it, and its book.

    ``trainer`` and ``loader`` are scripts with their arguments, run in the folder, as
    are ``embedding_config.yml`` and ``global_config.yml``.
    """
    job = ForkedJob(
        folder,
        "train",
        *("--nn_worker", trainer, "--data_loader", loader),
        *("--embedding_config", str(folder / "embedding_config.yml")),
        *("--global_config", str(folder / "global_config.yml")),
        *("--servers", "2", "--embedding_workers", "2"),
        *("--restarts", "1000", "--python", sys.executable),
        *arguments,
        variables={
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
            "OMP_NUM_THREADS": "1",
            **variables,
        },
    )
    with (
        job,
        contextlib.closing(AddressBook.join("localhost", job.port)) as book,
    ):
        try:
            yield job, book
        except JobError as exc:  # of the address book: the job has ended
            raise AssertionError(job.output()) from exc
