"""What a job leaves behind: its curves as pictures, a table, and logs for TensorBoard.

    REPORT/curves.csv       while the job runs, by its coordinator (job/progress.py)
    REPORT/tensorboard/     the same curves by step, where TensorBoard is installed
    REPORT/training.png     samples a second, loss, staleness, waits; from here on
    REPORT/servers.png      lookups, updates, p99, rows, hit rate, queue
    REPORT/table.md         each curve in five numbers, and how the job has ended

``persia-torchrec run`` draws it when its job has ended, ``persia-torchrec report`` at
any time. Pictures need matplotlib, the logs tensorboard: the extra ``report``.
"""

import csv
import importlib.util
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from persia_torchrec import env
from persia_torchrec.errors import DataError
from persia_torchrec.job import failures
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.progress import CURVES, EVENTS, GROUPS, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = (
    "no {}: they need {}. Run: pip install 'persia-torchrec[report]', then "
    "persia-torchrec report {}"
)
NO_EVENTS = (
    "no logs for TensorBoard: a job writes them where tensorboard is installed. Run: "
    "pip install 'persia-torchrec[report]' before the next one"
)
LEAST = 5  # points, of which a picture is drawn
_MOST = 2000  # points of a picture: its width has no more
_WIDTH, _HEIGHT = 9.0, 1.9  # inches, the height of one curve
_LINE, _QUIET, _RULE = "#1769aa", "#556", "#d5d9e0"


class _Curve(NamedTuple):
    title: str
    begins_at_0: bool = True
    is_log: bool = False


_CURVES = {
    "samples_a_second": _Curve("samples a second"),
    "loss": _Curve("loss", begins_at_0=False),
    "staleness": _Curve("staleness of lookups, batches"),
    "waits": _Curve("share of the time that trainers wait for rows"),
    "cache_hits": _Curve("share of unique rows in the caches of trainers"),
    "lookups_a_second": _Curve("lookups a second, of all servers"),
    "updates_a_second": _Curve("updates a second, of all servers"),
    "p99_us": _Curve("p99 of a lookup in the slowest server, us", is_log=True),
    "hit_rate": _Curve("share of looked-up ids that had a row"),
    "rows": _Curve("rows"),
    "queue": _Curve("updates that wait, of the longest queue"),
}
_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def folder_of(job_id: str) -> Path | None:
    """Return where the job of this coordinator leaves its report; None: nowhere.

    In a folder of the job in ``PERSIA_REPORT_DIR``, else beside its logs, if torchx has
    a folder for these: ``runs/JOB/logs`` and ``runs/JOB/report``; of the second start
    in this folder ``logs/2`` and ``report/2``.
    """
    if chosen := env.text("PERSIA_REPORT_DIR"):
        return Path(chosen) / job_id.replace("/", "_")
    log = Path(failures.find_own_log())
    if log.name != "combined.log" or log.parents[1].name != "coordinator":
        return None
    logs = log.parents[2]
    if logs.parent.name == env.LOGS and logs.name.isdecimal():  # of a later start
        return logs.parents[1] / "report" / logs.name
    return (logs.parent if logs.name == env.LOGS else logs) / "report"


def read(folder: Path) -> list[Point]:
    """Return the curves of a job, with times in seconds since 1970.

    Raises:
        DataError: there are none, or they are malformed.
    """
    path = folder / CURVES
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [
            Point(*(float(row[n]) if row[n] else None for n in Point._fields))  # type: ignore[arg-type]  # a time is never missing
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError) as exc:
        raise DataError(
            f"A report needs the curves that a job's coordinator writes. Received: "
            f"{path} ({exc!r}). A job that has ended within a second has none."
        ) from exc


def write(folder: Path, record: JobRecord | None) -> list[str]:
    """Write the report of a job into its folder; return what is to be said of it.

    Raises:
        DataError: there are no curves.
    """
    points = read(folder)
    (folder / "table.md").write_text(_table(points, record))
    said, name = [], record.job_id if record else str(folder)
    if len(points) < LEAST:
        return [f"{len(points)} points are no curve: the table alone is written"]
    if importlib.util.find_spec("matplotlib") is None:
        said.append(MISSING.format("pictures", "matplotlib", name))
    else:
        for picture, names in GROUPS.items():
            _draw(folder / f"{picture}.png", points, names, f"{name}: {picture}")
    if not (folder / EVENTS).is_dir():
        said.append(NO_EVENTS)
    return said


def _draw(
    path: Path, points: Sequence[Point], names: Sequence[str], title: str
) -> None:
    """Draw the curves that the points have, one below the other."""
    # Optional; without pyplot, which looks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    points = _thin(points)
    known = [n for n in names if any(getattr(p, n) is not None for p in points)]
    path.unlink(missing_ok=True)
    if not known:
        return
    began_s = points[0].at_s
    unit_s, unit = next(
        (u for u in _UNITS if points[-1].at_s - began_s >= 2 * u[0]), _UNITS[-1]
    )
    figure = Figure((_WIDTH, _HEIGHT * len(known) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    day = datetime.fromtimestamp(began_s, UTC).isoformat(" ", "seconds")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
    at = [(point.at_s - began_s) / unit_s for point in points]
    for axis, name in zip(axes, known, strict=True):
        values = [getattr(point, name) for point in points]
        _plot(axis, at, [math.nan if v is None else v for v in values], _CURVES[name])
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes[-1].set_xlim(0, at[-1] or 1)
    axes[-1].set_xlabel(f"{unit} since {day.removesuffix('+00:00')} UTC", color=_QUIET)
    figure.savefig(path, dpi=110)


def _plot(axis: "Axes", at: list[float], values: list[float], curve: _Curve) -> None:
    finite = [value for value in values if math.isfinite(value)]
    axis.plot(at, values, color=_LINE, linewidth=1.4, clip_on=False)
    if len(finite) == 1 or any(map(_is_alone, *_neighbours(values))):
        axis.plot(at, values, ".", color=_LINE, markersize=3)
    axis.set_title(curve.title, loc="left", fontsize=9, color=_QUIET)
    last = finite[-1]
    shown = f"last {last:,.0f}" if abs(last) >= 1000 else f"last {last:.4g}"
    axis.set_title(shown, loc="right", fontsize=9, color=_QUIET)
    if curve.is_log and min(finite) > 0 and max(finite) > 10 * min(finite):
        axis.set_yscale("log")
    elif curve.begins_at_0:
        axis.set_ylim(bottom=0, top=max(finite) * 1.08 or 1)
    axis.grid(visible=True, axis="y", color=_RULE, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_RULE)
    axis.tick_params(colors=_QUIET, labelsize=8)


def _neighbours(values: list[float]) -> tuple[list[float], list[float], list[float]]:
    return [math.nan, *values[:-1]], values, [*values[1:], math.nan]


def _is_alone(before: float, value: float, after: float) -> bool:
    """Return whether no line leads to a value, so that it needs a dot."""
    return math.isnan(before) and math.isnan(after) and not math.isnan(value)


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: max(-(-len(points) // _MOST), 1)]


def _table(points: Sequence[Point], record: JobRecord | None) -> str:
    """Return what is known of the job, and each curve in five numbers, as Markdown."""
    lines = ["# " + (f"Job {record.job_id}" if record else "Job"), ""]
    if record is not None:
        known: dict[str, Any] = {
            "state": record.state,
            "why": record.reason,
            "began": record.began,
            "ended": record.ended,
            "folder": record.folder,
            "last checkpoint": record.checkpoint,
        }
        lines += [f"- {name}: {value}" for name, value in known.items() if value]
        lines += [""]
    lines += ["| curve | first | least | mean | most | last |", "|---|" + "---:|" * 5]
    for name in Point._fields[1:]:
        values = [v for point in points if (v := getattr(point, name)) is not None]
        if values:
            mean = math.fsum(values) / len(values)
            five = (values[0], min(values), mean, max(values), values[-1])
            cells = " | ".join(f"{value:,.6g}" for value in five)
            lines.append(f"| {name.replace('_a_second', '/s')} | {cells} |")
    return "\n".join(lines) + "\n"
