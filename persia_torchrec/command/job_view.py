"""The jobs that verbs are about: of this user, or at an address; nothing is changed."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from persia_torchrec import env, timeouts
from persia_torchrec.job import job_list
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.saves import SAVES, Saves
from persia_torchrec.rpc.addresses import LOOPBACK

if TYPE_CHECKING:
    from persia_torchrec.job.registry import AddressBook

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
def opened(name: str) -> Iterator[Job]:
    """Connect to the coordinator of a running job, by id or HOST:PORT."""
    # zmq and NumPy, for a job that runs; a verb that finds none needs neither.
    from persia_torchrec.job.registry import AddressBook

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
    book = AddressBook.join(*place, timeout_s=timeouts.VERB_JOIN_S)
    with contextlib.closing(book):
        yield Job(book, record)


def is_here(host: str) -> bool:
    """Return whether a job's host is this machine."""
    return host in (LOOPBACK, "localhost", os.uname().nodename)
