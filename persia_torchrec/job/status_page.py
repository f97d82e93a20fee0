"""What a coordinator serves over HTTP: the job's page, its metrics, who else has some.

    GET /             the page: job/status.html, which asks for the next every 5 s
    GET /status.json  a line for each member, and curves of the last six hours
    GET /targets      the endpoints of all members, as Prometheus' http_sd expects them
    GET /metrics      members by state, restarts, step, time of the last checkpoint

``job/progress.py`` looks at the members.
"""

import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Self

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from persia_torchrec import env
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.errors import PersiaError
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.member import LAST_CHECKPOINT
from persia_torchrec.job.member_lines import age_s, of_checkpoint, of_training
from persia_torchrec.job.process_identity import METRICS_AT
from persia_torchrec.job.progress import Point, Progress
from persia_torchrec.job.registry import HostedBook
from persia_torchrec.job.saves import Saves
from persia_torchrec.metrics.endpoint import Answer, Endpoint, begin, labels_of

_MOST_POINTS = 360  # of a curve, as it is sent
_PAGE = Path(__file__).with_name("status.html")
_JSON, _HTML = "application/json", "text/html; charset=utf-8"


class StatusPage(Collector):
    """The page of one job, which answers from the beginning to the end of a block.

    Attributes:
        endpoint: at which it answers.
    """

    def __init__(
        self, book: HostedBook, progress: Progress, record: JobRecord, host: str
    ) -> None:
        self._book, self._progress, self._record = book, progress, record
        self._clock = time.monotonic
        self.endpoint: Endpoint = begin("coordinator", 0, record.job_id, host)
        self.endpoint.add_collector(self)
        self.endpoint.add_route("/", lambda _: Answer(_PAGE.read_bytes(), _HTML))
        self.endpoint.add_route("/status.json", lambda _: self._status())
        self.endpoint.add_route("/targets", self._targets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.close()

    def _checkpoint(self) -> str:
        with self._book.lock:
            return self._book.job.notes.get(LAST_CHECKPOINT, "")

    def _status(self) -> Answer:
        now_s, points = self._clock(), list(self._progress.points)
        view = self._book.view()
        with self._book.lock:
            saves = Saves.of(self._book.job.notes)
        status = {
            "job": self._record.job_id,
            "state": "ending" if view.signal else view.outcome,
            "reason": view.reason,
            "since_s": age_s(self._record.began),
            "folder": self._record.folder,
            **of_training(self._progress.lines),
            **of_checkpoint(self._checkpoint()),
            "failed_saves": saves.failed() if saves else "",
            "members": self._progress.lines,
            "curves": _columns(thinned(points, _MOST_POINTS), now_s),
        }
        return Answer(msgspec.json.encode(status), _JSON)

    def _targets(self, host: str) -> Answer:
        job_id = self._record.job_id
        name = env.text("PERSIA_METRICS_JOB_NAME") or ""
        with self._book.lock:
            job = self._book.job
            found = [
                (one.role, one.index, address)
                for one in job.members.values()
                if (address := job.notes.get(METRICS_AT + one.who))
                and one.ending() is None
            ]
        found.append(("coordinator", 0, host or self.endpoint.address))
        groups = [
            {"targets": [address], "labels": labels_of(role, index, job_id, name)}
            for role, index, address in found
        ]
        return Answer(msgspec.json.encode(groups), _JSON)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the job; a thread of the endpoint calls it."""
        with self._book.lock:
            members = list(self._book.job.members.values())
            outcome = self._book.job.outcome
            step = max((m.progress for m in members if m.role == "trainer"), default=0)
        states = Counter(
            "absent" if m.process is None else m.ending() or "running" for m in members
        )
        yield _family(
            "persia_job_running", "1 while the job runs", outcome == "running"
        )
        yield _family("persia_job_failed", "1 once it has failed", outcome == "failed")
        yield _family("persia_job_step", "steps that its trainers have reported", step)
        by_state = Metric("persia_members", "processes of the job by state", "gauge")
        for state in ("running", "absent", "left", "killed", "lost"):
            by_state.add_sample("persia_members", {"state": state}, states[state])
        yield by_state
        restarts = Metric(
            "persia_restarts", "how often members started again", "counter"
        )
        for one in members:
            labels = {"member": one.who}
            restarts.add_sample("persia_restarts_total", labels, one.restarts_in_all)
        yield restarts
        if created_s := _created_s(self._checkpoint()):
            name, text = (
                "persia_checkpoint_time_seconds",
                "when the newest one was taken",
            )
            yield _family(name, text, created_s)


def _family(name: str, text: str, value: float) -> Metric:
    family = Metric(name, text, "gauge")
    family.add_sample(name, {}, float(value))
    return family


def _manifest(path: str) -> Manifest:
    return Manifest.read(Folder(require_received(path)))


@functools.lru_cache(4)
def _created_s(path: str) -> float | None:
    """Return when a checkpoint was taken, in seconds since 1970, if that is known."""
    if not path:
        return None
    try:
        return datetime.fromisoformat(_manifest(path).created).timestamp()
    except (PersiaError, ValueError):
        return None


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most so many points, each the mean of some that follow each other."""
    num = max(-(-len(points) // most), 1)
    return [_mean(points[first : first + num]) for first in range(0, len(points), num)]


def _mean(points: Sequence[Point]) -> Point:
    columns = zip(*points, strict=True)
    known = ([v for v in column if v is not None] for column in columns)
    at_s, *values = (fmean(column) if column else None for column in known)
    return Point(at_s or 0.0, *values)


def _columns(points: Sequence[Point], now_s: float) -> dict[str, list[float | None]]:
    """Return the curves by name; their time is in seconds before now."""
    curves = {name: [getattr(p, name) for p in points] for name in Point._fields}
    return {**curves, "at_s": [point.at_s - now_s for point in points]}
