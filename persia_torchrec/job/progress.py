"""How a job goes: looked at from time to time, told in one line, kept as curves.

    heartbeats of members --notes--> look() --> lines   the page of the job, status.json
                                           |--> points  its curves
                                           |--> log     one line of progress
                                           `--> file    report/curves.csv

The coordinator connects to no member: what these say of themselves has come with their
heartbeats. A thread looks at that, every second at first, later every
``timeouts.STATUS_S``.
"""

import csv
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from persia_torchrec import timeouts
from persia_torchrec.errors import FrameError
from persia_torchrec.job.member_lines import (
    ROLES,
    describe,
    of_role,
    of_training,
    read_status,
)
from persia_torchrec.job.process_identity import STATUS
from persia_torchrec.job.registry import HostedBook
from persia_torchrec.job.state import Member

logger = logging.getLogger(__name__)

HOURS = 6  # of which there are curves in memory
CURVES = "curves.csv"
_SHARE = 60  # a look comes after this share of the age of the job
_MOST_ROWS = 1000  # of the file, by the time that it has doubled twice and a half


class Point(NamedTuple):
    """The curves at one time; None where a value is unknown."""

    at_s: float
    step: float | None
    samples_a_second: float | None
    loss: float | None
    hit_rate: float | None
    staleness: float | None
    waits: float | None
    lookups_a_second: float | None
    updates_a_second: float | None
    p99_us: float | None
    queue: float | None
    rows: float | None


def summed_up(at_s: float, lines: Sequence[dict[str, Any]]) -> Point:
    """Return a point: rates and rows are of all, latency and queue of the worst."""
    training = of_training(lines)

    def of(role: str, name: str) -> list[float]:
        values = (one.get(name) for one in lines if one["role"] == role)
        return [value for value in values if value is not None]

    def total(name: str) -> float | None:
        return sum(found) if (found := of("server", name)) else None

    def mean(role: str, name: str) -> float | None:
        return fmean(found) if (found := of(role, name)) else None

    return Point(
        at_s,
        training["step"],
        training["samples_a_second"],
        training["loss"],
        mean("server", "hit_rate"),
        mean("trainer", "staleness"),
        mean("trainer", "waits"),
        total("lookups_a_second"),
        total("updates_a_second"),
        max(of("server", "p99_us"), default=None),
        max(of("server", "queue"), default=None),
        total("rows"),
    )


def told(
    point: Point, last_step: float | None = None, eta_s: float | None = None
) -> str:
    """Return a point as one line; empty: nothing is known yet."""
    parts = []
    if point.step:
        of_last = f" of {last_step:.0f}" if last_step else ""
        parts.append(f"step {point.step:.0f}{of_last}")
    if point.samples_a_second:
        parts.append(f"{point.samples_a_second:,.0f} samples/s")
    if point.loss is not None:
        parts.append(f"loss {point.loss:.4g}")
    if not point.step and point.lookups_a_second:
        parts.append(f"{point.lookups_a_second:,.0f} lookups/s")
    if parts and point.hit_rate is not None:
        parts.append(f"hit rate {100 * point.hit_rate:.1f} %")
    if parts and point.staleness is not None:
        parts.append(f"staleness {point.staleness:.2f}")
    if parts and eta_s is not None:
        minutes, seconds = divmod(round(eta_s), 60)
        hours, minutes = divmod(minutes, 60)
        shown = f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
        parts.append(f"ETA {shown}")
    return ", ".join(parts)


class _Seen(NamedTuple):
    """What a member said of itself when it was looked at, and its line by that."""

    text: str
    process: str
    numbers: dict[str, float]
    line: dict[str, Any]


class Progress:
    """Looks at one job; in a block a thread does.

    Attributes:
        lines: one for each member, as of the last look; replaced, never changed.
        points: the curves of the last hours.
    """

    def __init__(self, book: HostedBook, folder: Path | None = None) -> None:
        """Look at the job of a book, and keep the curves in a folder if one is given.

        A folder that cannot be written to is a warning.
        """
        self._book, self._folder = book, folder
        self._clock = time.monotonic
        self._began_s = self._clock()
        self._said_s = self._kept_s = self._began_s
        self.lines: list[dict[str, Any]] = []
        num_points = int(HOURS * 3600 / timeouts.STATUS_S)
        self.points = deque[Point](maxlen=num_points)
        self._seen: dict[str, _Seen] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_looking, name="progress", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeouts.STATUS_S)

    def look(self) -> None:
        """Look at the members once, as the thread does."""
        job = self._book.job
        with self._book.lock:
            if job.outcome != "running":  # members leave, and say nothing new
                return
            members = [one for one in job.members.values() if one.role in ROLES]
            said = {one.who: job.notes.get(STATUS + one.who, "") for one in members}
            addresses = dict(job.addresses)
        members.sort(key=lambda one: (ROLES.index(one.role), one.index))
        lines = []
        for member in members:
            line = describe(member, addresses.get(member.who))
            if member.role == "trainer":
                line["step"] = member.progress
            lines.append(line | self._hear(member, said[member.who]))
        self.lines = lines
        now_s = self._clock()
        point = summed_up(now_s, lines)
        self.points.append(point)
        self._say(point)
        self._keep(point)

    def _hear(self, member: Member, text: str) -> dict[str, Any]:
        """Return what a member says of itself; rates since it said something else."""
        before = self._seen.get(member.who)
        if not text or (before is not None and before.text == text):
            return {} if before is None else before.line
        try:
            numbers = dict(read_status(text))
        except FrameError as exc:
            logger.warning("%s: %s", member.who, exc)
            return {}
        process = member.process.nonce if member.process else ""
        then = before.numbers if before and before.process == process else {}
        line = of_role(member.role, numbers, then, timeouts.STATUS_S)
        self._seen[member.who] = _Seen(text, process, numbers, line)
        return line

    def _say(self, point: Point) -> None:
        """Log how the job goes, ever more rarely: at least once a minute."""
        age_s = point.at_s - self._began_s
        if point.at_s - self._said_s < min(max(age_s / 20, timeouts.STATUS_S), 60):
            return
        training = of_training(self.lines)
        if text := told(point, training["last_step"], training["eta_s"]):
            self._said_s = point.at_s
            logger.info("%s", text)

    def _keep(self, point: Point) -> None:
        """Add the point to the file; later ones are further apart."""
        age_s = point.at_s - self._began_s
        if self._folder is None or point.at_s - self._kept_s < age_s / _MOST_ROWS:
            return
        if all(value is None for value in point[1:]):
            return
        self._kept_s = point.at_s
        path = self._folder / CURVES
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(Point._fields)
                given = (datetime.now(UTC).timestamp(), *point[1:])
                rows.writerow(["" if v is None else f"{v:.10g}" for v in given])
        except OSError as exc:
            logger.warning("the curves of the job are not kept: %s", exc)
            self._folder = None

    def _keep_looking(self) -> None:
        while not self._closing.wait(self._pause_s()):
            try:
                self.look()
            except Exception:  # the job continues, without a line of progress
                logger.exception("how the job goes could not be looked at")

    def _pause_s(self) -> float:
        age_s = self._clock() - self._began_s
        return min(max(age_s / _SHARE, 1.0), timeouts.STATUS_S)
