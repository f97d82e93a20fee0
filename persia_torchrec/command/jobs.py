"""Verbs of running jobs: who runs, how it is, what it logs, and its end."""

import itertools
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Group
from rich.live import Live

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.catalog import Manifest
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.command import console
from persia_torchrec.command.console import as_json, duration
from persia_torchrec.command.job_view import Job, View, find, is_here, opened
from persia_torchrec.job import failures, job_list
from persia_torchrec.job import report as job_report
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.member import LAST_CHECKPOINT
from persia_torchrec.job.member_lines import Numbers, age_s
from persia_torchrec.job.process_identity import IDS_OF
from persia_torchrec.job.progress import CURVES
from persia_torchrec.job.requests import Fail
from persia_torchrec.job.requests import View as JobView
from persia_torchrec.job.saves import SAVE_REQUEST, steps
from persia_torchrec.logger import printable

F = TypeVar("F", bound=Callable[..., Any])

a_job: Callable[[F], F] = click.argument("job", default="")
_BETWEEN_S = 1.5  # two looks, of which rates are made: a heartbeat comes between
_LOOK_S = 0.2
_WATCH_S = 2.0
_MOST_FEATURES = 40  # that are shown
_MEMBERS = (
    *("role", "index", "state", "host", "pid", "port", "since_s", "restarts"),
    *("memory_bytes", "rows", "capacity_rows", "bytes", "evictions"),
    *(
        "lookups_a_second",
        "updates_a_second",
        "hit_rate",
        "lookup_us",
        "p99_us",
        "queue",
        "idle",
    ),
    *("staleness", "step", "steps_a_second", "samples_a_second", "loss", "waits"),
)


@click.command()
@click.option("-a", "--all", "is_all", is_flag=True, help="Those that have ended, too.")
@as_json
def ps(is_all: bool, is_json: bool) -> None:
    """List the jobs of this user that run.

    persia-torchrec ps --all
    """
    jobs = [one for one in job_list.find_jobs() if is_all or one.state == "running"]
    lines = [
        {
            "job": one.job_id,
            "state": one.state,
            "coordinator": f"{one.host}:{one.port}",
            "pid": one.coordinator.pid,
            "since_s": age_s(one.began),
            "folder": one.folder,
            "why": one.reason or None,
        }
        for one in jobs
    ]
    if is_json:
        console.show_json(lines)
    elif lines:
        console.show(lines)
    else:
        console.echo("no job runs; persia-torchrec ps --all has those that have ended")


@click.command()
@a_job
@click.option("-w", "--watch", is_flag=True, help="Look again every 2 s, until Ctrl-C.")
@as_json
def status(job: str, watch: bool, is_json: bool) -> None:
    """Show how a job is: a line for each process, its step, its newest checkpoint.

    JOB is an id, its beginning, or HOST:PORT of a coordinator; by default the one job
    that runs. The exit code is 1 where a process is not there.

    persia-torchrec status --watch
    """
    with opened(job) as there:
        view = View(there)
        view.look()
        time.sleep(_BETWEEN_S)
        if watch and not is_json:
            with Live(console=console.console(), auto_refresh=False) as live:
                while True:
                    live.update(_drawn(view.look()), refresh=True)
                    time.sleep(_WATCH_S)
        while True:
            found = view.look()
            if is_json:
                console.show_json(found)
            else:
                console.console().print(_drawn(found))
            if not watch:
                break
            time.sleep(_WATCH_S)
    is_well = all(one["state"] in ("running", "left") for one in found["members"])
    sys.exit(0 if is_well and found["state"] != "failed" else 1)


def _drawn(found: dict[str, Any]) -> Group:
    members = found["members"]
    lines = [f"{found['job']}: {found['state']}"]
    if found["since_s"] is not None:
        lines[0] += f", since {duration(found['since_s'])}"
    if found["step"] is not None:
        lines[0] += f", step {found['step']}"
    if found["last_step"] is not None:
        lines[0] += f" of {found['last_step']}"
    if found["samples_a_second"] is not None:
        lines[0] += f", {found['samples_a_second']:.0f} samples/s"
    if found["loss"] is not None:
        lines[0] += f", loss {found['loss']:.4g}"
    if found["eta_s"] is not None:
        lines[0] += f", ends in {duration(found['eta_s'])}"
    if found["reason"]:
        lines.append(found["reason"])
    if found["checkpoint"]:
        whole = "whole" if found["checkpoint_is_whole"] else "NOT WHOLE"
        age = found.get("checkpoint_age_s")
        lines.append(
            f"newest checkpoint: {found['checkpoint']}, {whole}"
            + (f", of {duration(age)} ago" if age is not None else "")
        )
    else:
        lines.append("newest checkpoint: none yet")
    if found["failed_saves"]:
        lines.append(found["failed_saves"])
    return Group(printable("\n".join(lines)), console.table(members, _MEMBERS))


@click.command()
@a_job
@click.option("-w", "--watch", is_flag=True, help="Look again every 2 s, until Ctrl-C.")
@as_json
def top(job: str, watch: bool, is_json: bool) -> None:
    """Show the busiest tables and features of a job, by updates and ids a second.

    Features are those of trainers that look ids up by themselves, as TorchRec's do.

    persia-torchrec top --watch
    """
    with opened(job, needs_rows=True) as there:
        looks = zip(_busiest_tables(there), _busiest_features(there), strict=False)
        next(looks)
        time.sleep(_BETWEEN_S)
        if is_json or not watch:
            tables, features = next(looks)
            if is_json:
                console.show_json({"tables": tables, "features": features})
            else:
                console.console().print(_both(tables, features))
            return
        with Live(console=console.console(), auto_refresh=False) as live:
            for tables, features in looks:
                live.update(_both(tables, features), refresh=True)
                time.sleep(_WATCH_S)


def _both(tables: list[dict[str, Any]], features: list[dict[str, Any]]) -> Group:
    shown = [console.table(lines) for lines in (tables, features) if lines]
    return Group(*shown)


def _busiest_features(there: Job) -> Iterator[list[dict[str, Any]]]:
    """Yield the features, with rates since the look before; trainers tell of them."""
    before: dict[str, Numbers] = {}
    while True:
        now = there.statuses("trainer")
        rates, ids = defaultdict[str, float](float), Counter[str]()
        for who, status in now.items():
            then = before.get(who, status)
            passed_s = max(status.get("at_s", 0.0) - then.get("at_s", 0.0), 1e-3)
            for name in (one for one in status if one.startswith(IDS_OF)):
                num = status[name] - then.get(name, status[name])
                ids[name] += int(status[name])
                rates[name] += num / passed_s
        whole = sum(rates.values()) or 1.0
        before = now
        yield [
            {
                "feature": name.rpartition("/")[2],
                "table": name.removeprefix(IDS_OF).rpartition("/")[0],
                "ids_a_second": round(rate, 1),
                "share": round(rate / whole, 3),
                "ids": ids[name],
            }
            for name, rate in sorted(rates.items(), key=lambda one: -one[1])[
                :_MOST_FEATURES
            ]
        ]


def _busiest_tables(there: Job) -> Iterator[list[dict[str, Any]]]:
    """Yield the tables, with rates since the look before."""
    client = there.client
    assert client is not None
    steps: dict[str, int] = {}
    then_s = time.monotonic()
    while True:
        specs, now_s = client.learn_tables(), time.monotonic()
        lines = []
        for spec in specs:
            step = client.step(spec.name)
            risen = step - steps.get(spec.name, step)
            steps[spec.name] = step
            line = {
                "table": spec.name,
                "updates_a_second": round(risen / max(now_s - then_s, 1e-3), 1),
                "updates": step,
                "dim": spec.dim,
                "weights": spec.weight_dtype,
                "optimizer": type(spec.optimizer).__name__,
            }
            lines.append(line)
        then_s = now_s
        yield sorted(lines, key=lambda one: -float(one["updates_a_second"]))


@click.command()
@click.argument("role")
@click.argument("index", type=int, default=0)
@click.option("--job", default="", help="Id of the job [the latest].")
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until the job ends.")
@click.option("-n", "--lines", default=50, show_default=True, help="Last lines shown.")
def logs(role: str, index: int, job: str, follow: bool, lines: int) -> None:
    """Show the log of one process of a job, also when it has ended.

    persia-torchrec logs -f trainer 0
    """
    record = find(job, is_running=False)
    who = f"{role} {index}"
    place = record.logs.get(who, "")
    if record.state == "running":
        with opened(record.job_id) as there:
            place = there.book.member(role, index).log or ""
    host, _, name = place.partition(" ")
    if not name:
        known = ", ".join(record.logs) or "none"
        raise click.ClickException(
            f"{who} must have a log that is a file. Received: none; known are {known}."
        )
    if not is_here(host) and not Path(name).exists():
        raise click.ClickException(f"The log of {who} is {name} on host {host}.")
    with Path(name).open("rb") as file:
        for line in file.readlines()[-lines:]:
            sys.stdout.buffer.write(line)
        sys.stdout.flush()
        while follow:
            more = file.read()
            sys.stdout.buffer.write(more)
            sys.stdout.flush()
            if not more and find(record.job_id, is_running=False).state != "running":
                break
            time.sleep(_LOOK_S)


@click.command()
@a_job
def report(job: str) -> None:
    """Draw the curves of a job, by default the latest one: also while it runs.

    Into its folder of logs: pictures, a table, and logs for TensorBoard. JOB may be the
    folder of a report, too.

    persia-torchrec report && tensorboard --logdir runs
    """
    folder, record = Path(job), None
    if not job or not (folder / CURVES).is_file():
        record = find(job, is_running=False)
        folder = Path(record.report)
        if not record.report:
            raise click.ClickException(
                "The job must keep its curves. Received: one that torchx has not "
                "started on this machine. Start it with PERSIA_REPORT_DIR=FOLDER."
            )
    for line in job_report.write(folder, record):
        console.echo(line, err=True)
    for path in sorted(folder.iterdir()):
        console.echo(path)


@click.command()
@a_job
@click.option("--no-save", is_flag=True, help="End at once, without a last checkpoint.")
def stop(job: str, no_save: bool) -> None:
    """Stop a job; trainers save a last checkpoint before.

    persia-torchrec stop
    """
    saves = not no_save
    record = end(find(job) if ":" not in job else None, job, saves=saves)
    if saves and (lost := _lost(record)):
        raise click.ClickException(lost)


def end(record: JobRecord | None, name: str, *, saves: bool) -> JobRecord:
    """Have a job end, and wait until it has; return its record then."""
    with opened(name if record is None else record.job_id) as there:
        record = record or find(there.book.greeting.job_id)
        has_trainers = there.book.view().has_trainers
        if not saves:
            reason = "stopped by persia-torchrec, without a checkpoint"
            there.book.call(Fail("persia-torchrec", reason), JobView)
        elif has_trainers:
            there.book.tell_to_end("SIGTERM", "persia-torchrec stop")
        elif is_here(record.host):
            os.kill(record.coordinator.pid, signal.SIGTERM)
        else:
            raise click.ClickException(
                f"A job that serves is stopped where its coordinator runs. Received: "
                f"host {record.host}. Cancel it with its scheduler, or use --no-save."
            )
    console.echo(f"{record.job_id} ends", err=True)
    deadline = time.monotonic() + timeouts.VERB_END_S
    while time.monotonic() < deadline:
        known = find(record.job_id, is_running=False)
        if known.state != "running":
            last = known.checkpoint or "none"
            if has_trainers and known.saves is None:
                last = "none, as its script saves nothing (no recoverable())"
            console.echo(f"{known.job_id} has ended; its last checkpoint: {last}")
            return known
        time.sleep(_LOOK_S)
    raise click.ClickException(
        f"{record.job_id} must end within {timeouts.VERB_END_S:.0f} s. Received: it "
        f"runs. See persia-torchrec status {record.job_id}."
    )


def _lost(record: JobRecord) -> str:
    """Return which steps a job that was told to end has lost, and why; or ""."""
    saves, reason = record.saves, record.reason.removeprefix("coordinator: ")
    if saves is None:
        return ""
    if saves.trained > saves.step:
        cause = saves.cause if saves.num_failed else reason
        lost = steps(saves.step + 1, saves.trained)
        return f"the last save failed: {cause}; {lost} are lost"
    if record.state == "finished" or failures.TOLD_ALONE.fullmatch(reason):
        return ""
    return f"no last save: {reason}; steps behind step {saves.step} are lost"


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
        checkpoint, trained = there.book.note(LAST_CHECKPOINT), there.step()
    if not checkpoint:
        raise click.ClickException(
            f"{record.job_id} must have a checkpoint. Received: none; the job runs on."
        )
    ended = end(record, record.job_id, saves=not no_save)
    lost = _given_up(checkpoint, trained) if no_save else _lost(ended)
    if lost:
        console.echo(lost, err=True)
    run = str(Path(checkpoint).parent)
    _start_again(record, embedding_servers=str(servers), resume_dir=run)


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
        time.sleep(_LOOK_S)
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

    persia-torchrec rollback JOB persia_checkpoints/JOB/checkpoint-00000010
    """
    record = _restartable(find(job))
    folder = copy_alone(Path(checkpoint).resolve())
    with opened(record.job_id) as there:
        trained = there.step()
    end(record, record.job_id, saves=False)
    if lost := _given_up(checkpoint, trained):
        console.echo(lost, err=True)
    _start_again(record, resume_dir=str(folder))


def copy_alone(checkpoint: Path) -> Path:
    """Copy a checkpoint into a new folder, as the only one; return the folder."""
    Manifest.read(Folder(checkpoint))  # a CheckpointError if it is not complete
    run = checkpoint.parent
    names = (
        run.with_name(f"{run.name}-back-{number}") for number in itertools.count(1)
    )
    folder = next(name for name in names if not name.exists())
    shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)  # files of checkpoints are replaced, never changed
    except OSError:
        shutil.copy2(source, target)


def _restartable(record: JobRecord) -> JobRecord:
    if not record.command or not is_here(record.host):
        raise click.ClickException(
            "The job must have been started by torchx run on this machine. Received: "
            f"{record.job_id} of host {record.host}. Stop it by persia-torchrec stop, "
            "and start it with --resume_dir and the new number."
        )
    return record


def _start_again(record: JobRecord, **changes: str) -> None:
    """Become the torchx that starts a job again, with other arguments."""
    command = list(record.command)
    for name, value in changes.items():
        command = _with_argument(command, name, value)
    console.echo(shlex.join(command), err=True)
    _await_end_of_all(record)
    os.chdir(record.folder)
    os.execv(command[0], command)


def _with_argument(command: list[str], name: str, value: str) -> list[str]:
    """Replace the argument of a component on a command line, or add it."""
    kept, words = [], iter(command)
    for word in words:
        if word == f"--{name}":
            next(words, None)
        elif not word.startswith(f"--{name}="):
            kept.append(word)
    return [*kept, f"--{name}", value]


def _await_end_of_all(record: JobRecord) -> None:
    """Wait until the coordinator's process has ended, and others had time to."""
    deadline = time.monotonic() + timeouts.VERB_END_S
    while record.coordinator.is_running() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
