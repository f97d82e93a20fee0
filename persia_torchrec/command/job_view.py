"""The jobs that verbs are about: of this user, or at an address; nothing is changed."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from persia_torchrec import env, timeouts
from persia_torchrec.job import job_list
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.saves import SAVES, Saves
from persia_torchrec.job.status import Problem, Status, age_s, failed
from persia_torchrec.rpc.addresses import LOOPBACK

if TYPE_CHECKING:
    from persia_torchrec.job.registry import AddressBook

LOOK_S = 0.2  # between two looks at a job

F = TypeVar("F", bound=Callable[..., Any])

a_job: Callable[[F], F] = click.argument("job", default="")


@dataclass(frozen=True)
class Job:
    """A running job whose coordinator this process asks."""

    book: "AddressBook"
    record: JobRecord | None

    def saves(self) -> Saves | None:
        """Return how its saves went; None: it saves nothing."""
        text = self.book.note(SAVES)
        return None if text is None else Saves.of({SAVES: text})


def find(
    name: str, *, is_running: bool = True, or_has_ended: bool = False
) -> JobRecord:
    """Return the job of a name, or of its beginning; "": the one that there is.

    Where none runs that ``is_running`` asks for, it may be one that has ended, by its
    name, or the latest.

    Raises:
        click.ClickException: there is none, or several.
    """
    known = job_list.find_jobs()
    named = [one for one in known if one.job_id.startswith(name)]
    found = [one for one in named if one.state == "running"]
    if not is_running or (or_has_ended and not found):
        found = named if name else named[:1]  # the latest
    if len(found) == 1:
        return found[0]
    if not known:
        raise click.ClickException(
            "A job must have been started by this user on this machine. Received: none."
            " Start one by persia-torchrec run, or name HOST:PORT of its coordinator."
        )
    kind = "running job" if is_running else "job"
    names = ", ".join(one.job_id for one in found or (named or known)[:5])
    why = "there is none such. Known are"
    if found:
        why = "it may be"
    elif named:  # none of them runs
        why = "that has ended:" if name else "none runs. Ended are"
    raise click.ClickException(
        f"JOB must be one {kind} of this user, or HOST:PORT of a coordinator. "
        f"Received: {name or 'none'}, and {why} {names}."
    )


def has_ended(record: JobRecord) -> Status:
    """Return the status of a job that has ended, as its record tells it."""
    since_s, reason = age_s(record.ended or record.began), record.reason
    if record.state == "lost":
        reason = f"its coordinator, process {record.coordinator.pid}, was killed"
    return _status_of(record, failed(record.job_id, record.state, reason, since_s))


def does_not_answer(record: JobRecord, seconds: float) -> Status:
    """Return the status of a job whose coordinator runs, and has not answered."""
    who, pid = "coordinator 0", record.coordinator.pid
    text = f"{who} is lost: process {pid} does not answer"
    kill = f"persia-torchrec kill {who} --job {record.job_id}"
    return _status_of(record, [Problem("lost", who, seconds, kill, text)])


def _status_of(record: JobRecord, problems: Sequence[Problem]) -> Status:
    return Status(
        job=record.job_id,
        state=record.state,
        reason=record.reason,
        told=record.told,
        since_s=age_s(record.ended or record.began) or 0.0,
        folder=record.folder,
        checkpoint=record.checkpoint or None,
        problems=problems,
    )


@contextlib.contextmanager
def opened(name: str) -> Iterator[Job]:
    """Connect to the coordinator of a running job, by id or HOST:PORT."""
    # zmq and NumPy, for a job that runs; a verb that finds none needs neither.
    from persia_torchrec.job.registry import AddressBook

    record = None if ":" in name else find(name)
    if record is None:
        host, _, port = name.rpartition(":")
        if not port.isdecimal():
            raise click.ClickException(
                f"JOB must be an id, or HOST:PORT of a coordinator. Received: {name}."
            )
        place = (host.strip("[]"), int(port), "")
    else:
        host = LOOPBACK if is_here(record.host) else record.host  # has it a name?
        place = (host, record.port, record.job_id)
        if record.token_file:
            env.set_variable("PERSIA_JOB_TOKEN_FILE", record.token_file)
        if record.encrypts:
            env.set_variable("PERSIA_ENCRYPT", "1")
    book = AddressBook.join(*place, timeout_s=timeouts.VERB_JOIN_S)
    with contextlib.closing(book):
        yield Job(book, record)


def is_here(host: str) -> bool:
    """Return whether a job's host is this machine."""
    return host in (LOOPBACK, "localhost", os.uname().nodename)
