"""A job as it is now, from outside: asked of its address book and of its servers.

Nothing of the job changes. One line a member; rates are those between two looks.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.command.console import age_s
from persia_torchrec.errors import PersiaError
from persia_torchrec.job import job_list
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.member import LAST_CHECKPOINT
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import FindRole, Found
from persia_torchrec.job.state import Member
from persia_torchrec.rpc.addresses import LOOPBACK

ROLES = ("coordinator", "server", "worker", "loader", "trainer", "predictor")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Job:
    """A running job that this process asks: its book, and a client of its servers."""

    book: AddressBook
    record: JobRecord | None
    client: EmbeddingClient | None


def find(name: str, *, is_running: bool = True) -> JobRecord:
    """Return the job of a name, or of its beginning; "": the one that there is.

    Raises:
        click.ClickException: there is none, or several.
    """
    known = job_list.find_jobs()
    found = [one for one in known if not is_running or one.state == "running"]
    found = [one for one in found if one.job_id.startswith(name)]
    if not name and not is_running:
        found = found[:1]  # the latest
    if len(found) == 1:
        return found[0]
    kind = "running job" if is_running else "job"
    names = ", ".join(one.job_id for one in found or known[:5]) or "none"
    raise click.ClickException(
        f"JOB must be one {kind} of this user, or HOST:PORT of a coordinator. "
        f"Received: {name or 'none'}, and "
        f"{'it may be' if found else 'there is none such. Known are'} {names}."
    )


@contextlib.contextmanager
def opened(name: str, *, needs_rows: bool = False) -> Iterator[Job]:
    """Connect to a running job, by id or HOST:PORT; ``needs_rows``: to its servers."""
    record = None if ":" in name else find(name)
    if record is None:
        host, _, port = name.rpartition(":")
        place = (host.strip("[]"), int(port) if port.isdecimal() else 0, "")
    else:
        place = (record.host, record.port, record.job_id)
        if record.token_file:
            env.set_variable("PERSIA_JOB_TOKEN_FILE", record.token_file)
        if record.encrypts:
            env.set_variable("PERSIA_ENCRYPT", "1")
    env.token_file("PERSIA_JOB_TOKEN")
    with contextlib.ExitStack() as stack:
        book = AddressBook.join(*place, timeout_s=timeouts.VERB_JOIN_S)
        stack.callback(book.close)
        client = None
        servers = book.call(FindRole("server"), Found).values or []
        known = [address for address in servers if address]
        if servers and known == servers:
            connect = EmbeddingClient.connect
            try:
                client = connect(
                    known, timeout_s=timeouts.VERB_ANSWER_S, greeting=book.greeting
                )
                stack.callback(client.close)
            except PersiaError:
                if needs_rows:
                    raise
        if needs_rows and client is None:
            raise click.ClickException(
                f"All servers of the job must have registered. Received: {servers}."
            )
        yield Job(book, record, client)


class View:
    """Looks at one job again and again; rates need two looks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._then_s = time.monotonic()
        self._before: list[dict[str, int]] = []
        self._steps: dict[int, int] = {}

    def look(self) -> dict[str, Any]:
        """Return the job, with a line for each member."""
        now_s = time.monotonic()
        passed_s = max(now_s - self._then_s, 1e-3)
        book, record = self._job.book, self._job.record
        view = book.view()
        lines, counters = [], self._counters()
        for role in ROLES:
            found = book.call(FindRole(role), Found).values or []
            size = 1 if role == "coordinator" else len(found)
            for index in range(size):
                address = found[index] if index < len(found) else None
                line = _describe(book.member(role, index), address)
                if role == "server" and index < len(counters):
                    before = self._before[index] if self._before else {}
                    line |= _rates(counters[index], before, passed_s)
                if role == "trainer":
                    line |= self._progress(index, line.pop("progress"), passed_s)
                line.pop("progress", None)
                lines.append(line)
        self._then_s, self._before = now_s, counters
        note = book.note(LAST_CHECKPOINT) or ""
        return {
            "job": book.greeting.job_id,
            "state": "ending" if view.signal else view.outcome,
            "reason": view.reason,
            "since_s": age_s(record.began) if record else None,
            "folder": record.folder if record else None,
            "step": max((one.get("step") or 0 for one in lines), default=0) or None,
            **_checkpoint(note),
            "members": lines,
        }

    def _counters(self) -> list[dict[str, int]]:
        if self._job.client is None:
            return []
        try:
            return self._job.client.counters(timeouts.VERB_ANSWER_S)
        except PersiaError:  # a server is away; its line says so
            return []

    def _progress(self, rank: int, steps: int, passed_s: float) -> dict[str, Any]:
        before = self._steps.get(rank)
        self._steps[rank] = steps
        if before is None:
            return {"step": steps}
        return {"step": steps, "steps_a_second": round((steps - before) / passed_s, 1)}


def _describe(member: Member, address: str | None) -> dict[str, Any]:
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
        "progress": member.progress,
    }
    if process is not None and process.is_running():
        with contextlib.suppress(OSError, ValueError):
            up_s = float(Path("/proc/uptime").read_text().split()[0])
            line["since_s"] = round(up_s - int(process.start) / _TICKS, 1)
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            line["memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    return line


def _rates(
    now: Mapping[str, int], before: Mapping[str, int], passed_s: float
) -> dict[str, Any]:
    """Return what a server's counters tell, and how fast they have risen."""
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
    levels = {int(n[10:]): v for n, v in now.items() if n.startswith("staleness_")}
    watched = sum(levels.values())
    return line | {
        "lookups_a_second": round(lookups / passed_s, 1),
        "updates_a_second": round(risen.get("requests_update", 0) / passed_s, 1),
        "lookup_us": round(times_us.get("lookup_us", 0) / lookups) if lookups else None,
        "p99_us": now.get("lookup_p99_us"),
        "idle": round(times_us.get("idle_us", 0) / (sum(times_us.values()) or 1), 3),
        "staleness": (
            round(sum(n * v for n, v in levels.items()) / watched, 2)
            if watched
            else None
        ),
    }


def _checkpoint(path: str) -> dict[str, Any]:
    """Return the newest checkpoint, its age, and whether it is whole by its sizes."""
    if not path:
        return {"checkpoint": None}
    try:
        folder = Folder(path)
        manifest = Manifest.read(folder)
        sizes = [
            folder.file_size(one.file) == one.size_bytes for one in manifest.shards
        ]
    except PersiaError as exc:
        return {"checkpoint": path, "checkpoint_is_whole": False, "why": str(exc)}
    return {
        "checkpoint": path,
        "checkpoint_age_s": age_s(manifest.created),
        "checkpoint_is_whole": all(sizes),
    }


def is_here(host: str) -> bool:
    """Return whether a job's host is this machine."""
    return host in (LOOPBACK, "localhost", os.uname().nodename)
