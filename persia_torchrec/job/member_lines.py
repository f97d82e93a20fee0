"""A line for each member of a job, as ``persia-torchrec status`` and the page show it.

A line has what the coordinator knows of a member, what its host does if that is this
one, and what the member says of itself (``job/process_identity.py``; of servers
also their counters). Rates are those between two looks: what was counted then and now.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.errors import FrameError, PersiaError, without_secrets
from persia_torchrec.job.state import Member
from persia_torchrec.metrics.values import bins_of, quantile_us
from persia_torchrec.parsing.decoding import parse_json

ROLES = ("coordinator", "server", "worker", "loader", "trainer", "predictor")
_TICKS = os.sysconf("SC_CLK_TCK")

Numbers = Mapping[str, float]


def describe(member: Member, address: str | None) -> dict[str, Any]:
    """Return the line of a member: what its coordinator and this host know of it."""
    process, ending = member.process, member.ending()
    host = (member.log or "").partition(" ")[0]
    port = (address or "").rpartition(":")[2]
    line: dict[str, Any] = {
        "role": member.role,
        "index": member.index,
        "state": "absent" if process is None else ending or "running",
        "host": host or None,
        "pid": process.pid if process else None,
        "port": int(port) if port.isdecimal() else None,
        "since_s": None,
        "restarts": member.restarts_in_all,
        "memory_bytes": None,
    }
    if process is not None and process.is_running():
        with contextlib.suppress(OSError, ValueError):
            up_s = float(Path("/proc/uptime").read_text().split()[0])
            line["since_s"] = round(up_s - int(process.start) / _TICKS, 1)
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            line["memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    return line


def of_role(
    role: str, now: Numbers, before: Numbers, passed_s: float
) -> dict[str, Any]:
    """Return what a member says of itself, and how fast it has changed.

    ``now`` and ``before`` are what it has counted, ``passed_s`` seconds apart, unless
    they tell when that was (``at_s``); without ``before`` there are no rates.
    """
    if "at_s" in now and "at_s" in before:
        passed_s = now["at_s"] - before["at_s"]
        before = before if passed_s > 0 else {}
    line = {"memory_bytes": now["memory_bytes"]} if "memory_bytes" in now else {}
    if role == "server":
        return line | _of_server(now, before, passed_s)
    return line | (_of_trainer(now, before, passed_s) if role == "trainer" else {})


def _of_server(now: Numbers, before: Numbers, passed_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "rows": now.get("rows"),
        "capacity_rows": now.get("capacity_rows"),
        "bytes": now.get("bytes"),
        "evictions": now.get("evictions"),
        "queue": now.get("updates_queued"),
    }
    if not before:
        return line
    risen = {name: now[name] - before.get(name, 0) for name in now}
    times_us = {name: us for name, us in risen.items() if name.endswith("_us")}
    lookups = risen.get("requests_lookup", 0)
    found = risen.get("hits", 0) + risen.get("misses", 0)
    bins = bins_of({name: int(value) for name, value in risen.items()}, "lookup")
    p99_us = quantile_us(bins, 0.99)
    return line | {
        "lookups_a_second": round(lookups / passed_s, 1),
        "updates_a_second": round(risen.get("requests_update", 0) / passed_s, 1),
        "hit_rate": round(risen["hits"] / found, 4) if found else None,
        "lookup_us": round(times_us.get("lookup_us", 0) / lookups) if lookups else None,
        "p99_us": None if p99_us is None else round(p99_us),
        "idle": round(times_us.get("idle_us", 0) / (sum(times_us.values()) or 1), 3),
    }


def _of_trainer(now: Numbers, before: Numbers, passed_s: float) -> dict[str, Any]:
    names = "step", "last_step", "loss"
    line: dict[str, Any] = {name: now.get(name) for name in names}
    if not before:
        return line
    risen = {name: now[name] - before.get(name, 0) for name in now}
    lookups = risen.get("lookups", 0)
    return line | {
        "steps_a_second": round(risen.get("step", 0) / passed_s, 1),
        "samples_a_second": round(risen.get("samples", 0) / passed_s, 1),
        "waits": round(min(risen.get("row_wait_seconds", 0) / passed_s, 1.0), 3),
        "staleness": (
            round(risen.get("batches_lacking", 0) / lookups, 2) if lookups else None
        ),
    }


def of_training(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the training goes, by the lines of its trainers; None: it is unknown.

    The step is the largest, samples a second the sum, the loss the mean; how long the
    training takes until its last step is told where a trainer knows that step.
    """
    trainers = [line for line in lines if line["role"] == "trainer"]
    step = max((line.get("step") or 0 for line in trainers), default=0)
    rates = [r for t in trainers if (r := t.get("samples_a_second")) is not None]
    losses = [one for t in trainers if (one := t.get("loss")) is not None]
    paces = [one for t in trainers if (one := t.get("steps_a_second")) is not None]
    last = max((line.get("last_step") or 0 for line in trainers), default=0)
    has_eta = last >= step and bool(last) and max(paces, default=0) > 0
    return {
        "step": int(step) or None,
        "last_step": int(last) or None,
        "eta_s": round((last - step) / max(paces), 1) if has_eta else None,
        "samples_a_second": round(sum(rates), 1) if rates else None,
        "loss": fmean(losses) if losses else None,
    }


def read_status(text: str) -> Numbers:
    """Return what a member says of itself, but for numbers that are not finite.

    Raises:
        FrameError: it is malformed.
    """
    kind = dict[str, int | float | None]  # JSON has null for a NaN
    status = parse_json(text, kind, "what a member says of itself", FrameError)
    return {name: value for name, value in status.items() if value is not None}


def of_checkpoint(path: str) -> dict[str, Any]:
    """Return the newest checkpoint, its age, and whether it is whole by its sizes."""
    if not path:
        return {"checkpoint": None}
    shown = without_secrets(path)
    try:
        folder = Folder(require_received(path))
        manifest = Manifest.read(folder)
        sizes = [
            folder.file_size(one.file) == one.size_bytes for one in manifest.shards
        ]
    except PersiaError as exc:
        return {"checkpoint": shown, "checkpoint_is_whole": False, "why": str(exc)}
    return {
        "checkpoint": shown,
        "checkpoint_age_s": age_s(manifest.created),
        "checkpoint_is_whole": all(sizes),
    }


def age_s(iso: str) -> float | None:
    """Return the seconds since a time in ISO 8601; None if it is none."""
    try:
        then = datetime.fromisoformat(iso)
    except ValueError:
        return None
    return max((datetime.now(UTC) - then).total_seconds(), 0.0)
