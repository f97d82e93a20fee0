"""What a coordinator serves over HTTP: the job's page, its metrics, who else has some.

    GET /             the page: job/status.html, which asks for the next every 5 s
    GET /status.json  the job's status, and curves of the last six hours
    GET /targets      the endpoints of all members, as Prometheus' http_sd expects them
    GET /metrics      members by state, problems, restarts, step, time of the checkpoint

All show the one status of ``job/status.py``; the curves are those of ``progress.py``.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Self

import msgspec
from msgspec import structs
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from persia_torchrec import env
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.process_identity import METRICS_AT
from persia_torchrec.job.progress import Point, Progress
from persia_torchrec.job.registry import HostedBook
from persia_torchrec.job.status import STATES, at_s
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

    def _status(self) -> Answer:
        now_s, points = self._clock(), list(self._progress.points)
        curves = _columns(thinned(points, _MOST_POINTS), now_s)
        status = {**structs.asdict(self._book.status()), "curves": curves}
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
        status = self._book.status()
        with self._book.lock:
            outcome = self._book.job.outcome
            checkpoint = self._book.statuses.checkpoint
        yield _family(
            "persia_job_running", "1 while the job runs", outcome == "running"
        )
        has_failed = status.state == "failed"
        yield _family("persia_job_failed", "1 once it has failed", has_failed)
        text = "steps that its trainers have reported"
        yield _family("persia_job_step", text, status.step or 0)
        states = Counter(one.state for one in status.members)
        by_state = Metric("persia_members", "processes of the job by state", "gauge")
        for state in STATES:
            by_state.add_sample("persia_members", {"state": state}, states[state])
        yield by_state
        name, text = "persia_problem_seconds", "since when it is so; needs a hand"
        problems = Metric(name, text, "gauge")
        for one in status.problems:
            if one.is_wrong:
                labels = {"kind": one.kind, "member": one.who}
                problems.add_sample(name, labels, one.since_s or 0.0)
        yield problems
        restarts = Metric(
            "persia_restarts", "how often members started again", "counter"
        )
        for member in status.members:
            labels = {"member": member.who}
            restarts.add_sample("persia_restarts_total", labels, member.restarts)
        yield restarts
        if checkpoint and (taken_s := at_s(checkpoint.created)) is not None:
            name, text = (
                "persia_checkpoint_time_seconds",
                "when the newest one was taken",
            )
            yield _family(name, text, taken_s)


def _family(name: str, text: str, value: float) -> Metric:
    family = Metric(name, text, "gauge")
    family.add_sample(name, {}, float(value))
    return family


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
