"""A job as it is now, from outside: asked of its address book and of its servers.

Nothing of the job changes. One line a member; rates are those between two looks.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from persia_torchrec import env, timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import PersiaError
from persia_torchrec.job import job_list
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.member import LAST_CHECKPOINT
from persia_torchrec.job.member_lines import (
    ROLES,
    Numbers,
    age_s,
    describe,
    of_checkpoint,
    of_role,
    of_training,
    read_status,
)
from persia_torchrec.job.process_identity import STATUS
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import FindNotes, FindRole, Found
from persia_torchrec.job.saves import SAVES, Saves
from persia_torchrec.rpc.addresses import LOOPBACK


@dataclass(frozen=True)
class Job:
    """A running job that this process asks: its book, and a client of its servers."""

    book: AddressBook
    record: JobRecord | None
    client: EmbeddingClient | None

    def statuses(self, role: str) -> dict[str, Numbers]:
        """Return what the members of a role say of themselves with their heartbeats."""
        size = len(self.book.call(FindRole(role), Found).values or [])
        names = [f"{role} {index}" for index in range(size)]
        notes = FindNotes([STATUS + name for name in names])
        texts = self.book.call(notes, Found).values or []
        told = zip(names, texts, strict=True)
        return {name: read_status(text) for name, text in told if text is not None}

    def saves(self) -> Saves | None:
        """Return how its saves went; None: it saves nothing."""
        text = self.book.note(SAVES)
        return None if text is None else Saves.of({SAVES: text})

    def step(self) -> int:
        """Return the step at which its training is."""
        every = self.statuses("trainer").values()
        return max((int(one.get("step", 0)) for one in every), default=0)


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
        self._before: dict[str, Numbers] = {}

    def look(self) -> dict[str, Any]:
        """Return the job, with a line for each member."""
        now_s = time.monotonic()
        passed_s = max(now_s - self._then_s, 1e-3)
        book, record = self._job.book, self._job.record
        view, saves = book.view(), self._job.saves()
        lines, found = [], self._counters()
        for role in ROLES:
            addresses = book.call(FindRole(role), Found).values or []
            size = 1 if role == "coordinator" else len(addresses)
            if role == "trainer":
                found |= self._job.statuses(role)
            for index in range(size):
                address = addresses[index] if index < len(addresses) else None
                member = book.member(role, index)
                line = describe(member, address)
                if role == "trainer":
                    line["step"] = member.progress
                if (now := found.get(member.who)) is not None:
                    before = self._before.get(member.who, {})
                    line |= of_role(role, now, before, passed_s)
                lines.append(line)
        self._then_s, self._before = now_s, found
        return {
            "job": book.greeting.job_id,
            "state": "ending" if view.signal else view.outcome,
            "reason": view.reason,
            "since_s": age_s(record.began) if record else None,
            "folder": record.folder if record else None,
            **of_training(lines),
            **of_checkpoint(book.note(LAST_CHECKPOINT) or ""),
            "failed_saves": saves.failed() if saves else "",
            "members": lines,
        }

    def _counters(self) -> dict[str, Numbers]:
        """Return the counters of the servers; none if one is away: its line says so."""
        if self._job.client is None:
            return {}
        with contextlib.suppress(PersiaError):
            found = self._job.client.counters(timeouts.VERB_ANSWER_S)
            return {f"server {index}": one for index, one in enumerate(found)}
        return {}


def is_here(host: str) -> bool:
    """Return whether a job's host is this machine."""
    return host in (LOOPBACK, "localhost", os.uname().nodename)
