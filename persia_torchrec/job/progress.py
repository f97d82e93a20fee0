"""How a job goes: its status from time to time, as one line and as curves.

    status --thread--> points  curves of the page
                  |--> log     one line of progress
                  |--> file    report/curves.csv
                  `--> events  report/tensorboard, where TensorBoard is installed

The thread asks for the status (``job/status.py``) every second at first, later every
``timeouts.STATUS_S``, and looks at the files of the newest checkpoint for it.
"""

import csv
import importlib.util
import logging
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, Self

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.errors import PersiaError
from persia_torchrec.job.registry import HostedBook
from persia_torchrec.job.saves import LAST_CHECKPOINT
from persia_torchrec.job.status import Checkpoint, Status

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

logger = logging.getLogger(__name__)

HOURS = 6  # of which there are curves in memory
CURVES, EVENTS = "curves.csv", "tensorboard"  # file and folder of a report
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
    cache_hits: float | None
    lookups_a_second: float | None
    updates_a_second: float | None
    p99_us: float | None
    queue: float | None
    rows: float | None


GROUPS = {
    "training": ("samples_a_second", "loss", "staleness", "waits", "cache_hits"),
    "servers": (
        *("lookups_a_second", "updates_a_second", "p99_us"),
        *("hit_rate", "rows", "queue"),
    ),
}
"""Curves that belong together: pictures of a report, tags of TensorBoard."""


def summed_up(at_s: float, status: Status) -> Point:
    """Return a point: rates and rows are of all, latency and queue of the worst."""

    def of(role: str, name: str) -> list[float]:
        found = (getattr(one, name) for one in status.members if one.role == role)
        return [value for value in found if value is not None]

    def total(name: str) -> float | None:
        return sum(found) if (found := of("server", name)) else None

    def mean(role: str, name: str) -> float | None:
        return fmean(found) if (found := of(role, name)) else None

    return Point(
        at_s,
        status.step,
        status.samples_a_second,
        status.loss,
        mean("server", "hit_rate"),
        mean("trainer", "staleness"),
        mean("trainer", "waits"),
        mean("trainer", "cache_hits"),
        total("lookups_a_second"),
        total("updates_a_second"),
        max(of("server", "p99_us"), default=None),
        max(of("server", "queue"), default=None),
        total("rows"),
    )


def look_at(path: str) -> Checkpoint | None:
    """Read the manifest of a checkpoint, and the sizes of its files; None: no path."""
    if not path:
        return None
    try:
        folder = Folder(require_received(path))
        manifest = Manifest.read(folder)
        sizes = (
            folder.file_size(one.file) == one.size_bytes for one in manifest.shards
        )
        return Checkpoint(path, manifest.created, all(sizes))
    except PersiaError as exc:
        return Checkpoint(path, why=str(exc))


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
    if parts and point.cache_hits is not None:
        parts.append(f"cached {100 * point.cache_hits:.1f} %")
    if parts and point.staleness is not None:
        parts.append(f"staleness {point.staleness:.2f}")
    if parts and eta_s is not None:
        minutes, seconds = divmod(round(eta_s), 60)
        hours, minutes = divmod(minutes, 60)
        shown = f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
        parts.append(f"ETA {shown}")
    return ", ".join(parts)


class Progress:
    """Looks at one job; in a block a thread does.

    Attributes:
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
        num_points = int(HOURS * 3600 / timeouts.STATUS_S)
        self.points = deque[Point](maxlen=num_points)
        self._events: EventFileWriter | None = None
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
        """Look at the job once, as the thread does."""
        with self._book.lock:
            if self._book.job.outcome != "running":  # members leave
                return
            newest = self._book.job.notes.get(LAST_CHECKPOINT, "")
        found = look_at(newest)
        with self._book.lock:
            self._book.statuses.checkpoint = found
        status, now_s = self._book.status(), self._clock()
        point = summed_up(now_s, status)
        self.points.append(point)
        self._say(point, status)
        self._keep(point)

    def _say(self, point: Point, status: Status) -> None:
        """Log how the job goes, ever more rarely: at least once a minute."""
        age_s = point.at_s - self._began_s
        if point.at_s - self._said_s < min(max(age_s / 20, timeouts.STATUS_S), 60):
            return
        if text := told(point, status.last_step, status.eta_s):
            self._said_s = point.at_s
            logger.info("%s", text)

    def _keep(self, point: Point) -> None:
        """Add the point to the files; later ones are further apart."""
        age_s = point.at_s - self._began_s
        if self._folder is None or point.at_s - self._kept_s < age_s / _MOST_ROWS:
            return
        if all(value is None for value in point[1:]):
            return
        self._kept_s = point.at_s
        point = point._replace(at_s=datetime.now(UTC).timestamp())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / CURVES).open("a", newline="") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(Point._fields)
                rows.writerow(["" if v is None else f"{v:.10g}" for v in point])
            self._add_event(self._folder / EVENTS, point)
        except OSError as exc:
            logger.warning("the curves of the job are not kept: %s", exc)
            self._folder = None

    def _add_event(self, folder: Path, point: Point) -> None:
        """Add the point to events of TensorBoard, by step; without steps by second."""
        if importlib.util.find_spec("tensorboard") is None:
            return
        # Optional; without torch.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._events is None:
            self._events = EventFileWriter(str(folder))
        values = [
            Summary.Value(tag=f"{group}/{name}", simple_value=value)
            for group, names in GROUPS.items()
            for name in names
            if (value := getattr(point, name)) is not None
        ]
        step = self._clock() - self._began_s if point.step is None else point.step
        event = Event(wall_time=point.at_s, step=int(step))
        event.summary.CopyFrom(Summary(value=values))
        self._events.add_event(event)
        self._events.flush()

    def _keep_looking(self) -> None:
        while not self._closing.wait(self._pause_s()):
            try:
                self.look()
            except Exception:  # the job continues, without a line of progress
                logger.exception("how the job goes could not be looked at")
        if self._events is not None:
            self._events.close()

    def _pause_s(self) -> float:
        age_s = self._clock() - self._began_s
        return min(max(age_s / _SHARE, 1.0), timeouts.STATUS_S)
