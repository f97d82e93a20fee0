"""Verbs that stop a job, and start it again in another way."""

import itertools
import os
import secrets
import shlex
import shutil
import time
from pathlib import Path

import click

from persia_torchrec import timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.command import console
from persia_torchrec.command.job_view import LOOK_S, Job, a_job, find, is_here, opened
from persia_torchrec.command.jobs import end, lost_by
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.saves import LAST_CHECKPOINT, SAVE_REQUEST, steps
from persia_torchrec.parsing.settings import SETTINGS


@click.command()
@a_job
@click.option("--servers", type=int, required=True, help="Number of servers from now.")
@click.option("--no-save", is_flag=True, help="Go back to the newest checkpoint.")
def scale(job: str, servers: int, no_save: bool) -> None:
    """Continue a job with another number of servers: save, stop, start.

    A job whose save fails runs on. It runs in this terminal from then on.

    persia-torchrec scale --servers 3
    """
    record = _restartable(find(job))
    with opened(record.job_id) as there:
        if not no_save:
            _save(there)
        checkpoint = there.book.note(LAST_CHECKPOINT)
        trained = there.book.status().step or 0
    if not checkpoint:
        raise click.ClickException(
            f"{record.job_id} must have a checkpoint. Received: none; the job runs on."
        )
    ended = end(record, record.job_id, saves=not no_save)
    lost = _given_up(checkpoint, trained) if no_save else lost_by(ended)
    if lost:
        console.echo(lost, err=True)
    run = catalog.run_of_checkpoint(Path(checkpoint))
    _start_again(record, servers=str(servers), run_dir=str(run))


def _save(there: Job) -> None:
    """Have a job save a checkpoint, and wait until it is complete."""
    name, hint = there.book.greeting.job_id, "Use --no-save to go back to the last one."
    wanted = f"{name} must save a checkpoint before it stops. Received:"
    if there.saves() is None:
        raise click.ClickException(f"{wanted} its script has no recoverable().")
    request = secrets.token_hex(8)
    there.book.tell(SAVE_REQUEST, request)
    console.echo(f"{name} saves", err=True)
    deadline = time.monotonic() + timeouts.CHECKPOINT_S
    while time.monotonic() < deadline:
        view, saves = there.book.view(), there.saves()
        if saves is not None and saves.request == request:
            if saves.num_failed:
                raise click.ClickException(
                    f"{wanted} {saves.failed()}. The job runs on. {hint}"
                )
            return
        if view.outcome != "running" or view.signal:
            raise click.ClickException(f"{wanted} it ends meanwhile: {view.reason}")
        time.sleep(LOOK_S)
    raise click.ClickException(
        f"{wanted} none within {timeouts.CHECKPOINT_S:.0f} s. The job runs on. {hint}"
    )


def _given_up(checkpoint: str, trained: int) -> str:
    """Return which steps are behind a checkpoint, where a job continues; or ""."""
    step = Manifest.read(Folder(require_received(checkpoint))).step
    if step is None or trained <= step:
        return ""
    return f"given up: {steps(step + 1, trained)}"


@click.command()
@a_job
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False))
def rollback(job: str, checkpoint: str) -> None:
    """Continue a job from an earlier CHECKPOINT: stop without a save, start.

    The checkpoint is copied, by links where that is possible, into a new folder beside
    that of the run. There the job saves from then on; the other history stays.

    persia-torchrec rollback JOB runs/JOB/checkpoints/checkpoint-00000010
    """
    record = _restartable(find(job))
    folder = copy_alone(Path(checkpoint).resolve())
    with opened(record.job_id) as there:
        trained = there.book.status().step or 0
    end(record, record.job_id, saves=False)
    if lost := _given_up(checkpoint, trained):
        console.echo(lost, err=True)
    _start_again(record, run_dir=str(folder))


def copy_alone(checkpoint: Path) -> Path:
    """Copy a checkpoint into a new run, as the only one; return its folder."""
    Manifest.read(Folder(checkpoint))  # a CheckpointError if it is not complete
    run = catalog.run_of_checkpoint(checkpoint)
    names = (
        run.with_name(f"{run.name}-back-{number}") for number in itertools.count(1)
    )
    folder = next(name for name in names if not name.exists())
    copy = folder / catalog.CHECKPOINTS / checkpoint.name
    shutil.copytree(checkpoint, copy, copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # files of checkpoints are replaced, never changed
    except OSError:
        shutil.copy2(source, target)


def _restartable(record: JobRecord) -> JobRecord:
    if not record.command or not is_here(record.host):
        raise click.ClickException(
            "The job must have been started by persia-torchrec run, or by torchx run "
            "-s local_cwd, on this machine. Received: "
            f"{record.job_id} of host {record.host}. Stop it by persia-torchrec stop, "
            "and start it with --run_dir and the new number."
        )
    return record


def _start_again(record: JobRecord, **changes: str) -> None:
    """Become what has started a job, with other arguments."""
    command = list(record.command)
    for name, value in changes.items():
        for previous in SETTINGS[name].previous:
            command = _without_argument(command, previous)
        command = [*_without_argument(command, name), f"--{name}", value]
    console.echo(shlex.join(command), err=True)
    _await_end_of_all(record)
    os.chdir(record.folder)
    os.execvp(command[0], command)


def _without_argument(command: list[str], name: str) -> list[str]:
    """Leave an argument of a component out of a command line."""
    kept, words = [], iter(command)
    for word in words:
        if word == f"--{name}":
            next(words, None)
        elif not word.startswith(f"--{name}="):
            kept.append(word)
    return kept


def _await_end_of_all(record: JobRecord) -> None:
    """Wait until the coordinator's process has ended, and others had time to."""
    deadline = time.monotonic() + timeouts.VERB_END_S
    while record.coordinator.is_running() and time.monotonic() < deadline:
        time.sleep(LOOK_S)
