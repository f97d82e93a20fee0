"""Verbs of running jobs: who runs, how it is, what it logs, and its end."""

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec import structs
from rich.console import Group
from rich.live import Live
from rich.table import Table

from persia_torchrec import timeouts
from persia_torchrec.command import console
from persia_torchrec.command.console import as_json, duration
from persia_torchrec.command.job_view import (
    LOOK_S,
    Job,
    a_job,
    does_not_answer,
    find,
    has_ended,
    is_here,
    opened,
)
from persia_torchrec.errors import JobError, PersiaError, RequestTimeoutError
from persia_torchrec.job import failures, job_list
from persia_torchrec.job.job_list import JobRecord
from persia_torchrec.job.requests import Fail, View
from persia_torchrec.job.state import Member
from persia_torchrec.job.status import Problem, Status, age_s
from persia_torchrec.logger import printable

_WATCH_S = 2.0
_PROCESSES = (
    *("state", "host", "pid", "since_s", "restarts", "memory_bytes"),
    *("heard_s", "step_s"),
)
_SERVERS = (
    *("rows", "capacity_rows", "bytes", "evictions", "lookups_a_second"),
    *("updates_a_second", "hit_rate", "p99_us", "queue", "idle"),
)
_TRAINERS = (
    *("step", "steps_a_second", "samples_a_second", "loss", "waits", "staleness"),
    *("cache_hits", "cache_saves", "dirty_rows", "dirty_s"),
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
            "told": one.told or None,
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
    """Show how a job is: what is wrong, its step, its checkpoint, its processes.

    JOB is an id, its beginning, or HOST:PORT of a coordinator; by default the one job
    that runs, or the latest. The first line says what is wrong, and the command to run.
    The exit code is 1 then.

    persia-torchrec status --watch
    """
    record = None if ":" in job else find(job, or_has_ended=True)
    if record is not None and record.state != "running":
        found = _show(has_ended(record), _drawn, is_json=is_json)
        sys.exit(found.is_wrong)
    began_s = time.monotonic()
    try:
        with opened(job if record is None else record.job_id) as there:
            found = _look(there, _drawn, watch=watch, is_json=is_json)
    except JobError as exc:
        is_silent = isinstance(exc.__cause__, RequestTimeoutError | None)
        if record is None or not (is_silent and record.coordinator.is_running()):
            raise  # it answers something, or is gone
        silent = does_not_answer(record, time.monotonic() - began_s)
        found = _show(silent, _drawn, is_json=is_json)
    sys.exit(found.is_wrong)


def _show(found: Status, draw: Callable[[Status], Group], *, is_json: bool) -> Status:
    """Print a status, and return it."""
    if is_json:
        console.show_json(found)
    else:
        where = console.console()
        for part in draw(found).renderables:  # a command in a sentence stays one line
            where.print(part, soft_wrap=isinstance(part, str) or None)
    return found


def _look(
    there: Job, draw: Callable[[Status], Group], *, watch: bool, is_json: bool
) -> Status:
    """Show the status of a job, again and again if it is to be watched."""
    found = there.book.status()
    if is_json or not watch:
        while True:
            _show(found, draw, is_json=is_json)
            if not watch:
                return found
            time.sleep(_WATCH_S)
            found = there.book.status()
    with Live(console=console.console(), auto_refresh=False) as live:
        while True:
            live.update(draw(found), refresh=True)
            time.sleep(_WATCH_S)
            found = there.book.status()


def _drawn(found: Status) -> Group:
    is_first = [one.is_wrong or bool(one.remedy) for one in found.problems]
    lines = [*map(_sentence, itertools.compress(found.problems, is_first))]
    line = f"{found.job}: {found.state}, since {duration(found.since_s)}"
    if found.told:
        line += f", told to end by {found.told}"
    if found.step is not None:
        line += f", step {found.step}"
    if found.last_step is not None:
        line += f" of {found.last_step}"
    if found.samples_a_second is not None:
        line += f", {found.samples_a_second:.0f} samples/s"
    if found.loss is not None:
        line += f", loss {found.loss:.4g}"
    if found.eta_s is not None:
        line += f", ends in {duration(found.eta_s)}"
    lines += [line, _checkpoint(found)]
    if found.reason:
        lines.append(found.reason)
    others = [one for one in found.problems if not (one.is_wrong or one.remedy)]
    lines += map(_sentence, others)
    return Group(printable("\n".join(lines)), *_tables(found))


def _sentence(problem: Problem) -> str:
    """Return what is wrong, since when, and what to run, as one line."""
    line = problem.text
    if problem.since_s is not None:
        line += f", for {duration(problem.since_s)}"
    return line + (f". Run: {problem.remedy}" if problem.remedy else "")


def _checkpoint(found: Status) -> str:
    if not found.checkpoint:
        return "newest checkpoint: none yet"
    line = f"newest checkpoint: {found.checkpoint}"
    if found.checkpoint_is_whole is not None:
        line += ", whole" if found.checkpoint_is_whole else ", NOT WHOLE"
    if found.checkpoint_age_s is not None:
        line += f", of {duration(found.checkpoint_age_s)} ago"
    return line


def _tables(found: Status) -> list[Table]:
    """Return the processes, then what servers and trainers measure: 80 columns each."""
    lines = [{"process": one.who, **structs.asdict(one)} for one in found.members]
    if not lines:
        return []
    made = [console.table(lines, ("process", *_PROCESSES), is_narrow=True)]
    for role, names in (("server", _SERVERS), ("trainer", _TRAINERS)):
        of_role = [{**one, role: one["index"]} for one in lines if one["role"] == role]
        if any(one[name] is not None for one in of_role for name in names):
            made.append(console.table(of_role, (role, *names), is_narrow=True))
    return made


@click.command()
@a_job
@click.option("-w", "--watch", is_flag=True, help="Look again every 2 s, until Ctrl-C.")
@as_json
def top(job: str, watch: bool, is_json: bool) -> None:
    """Show the busiest tables and features of a job, by updates and ids a second.

    Features are those of trainers that look ids up by themselves, as TorchRec's do.

    persia-torchrec top --watch
    """
    with opened(job) as there:
        if is_json:
            console.show_json(_busiest(there.book.status()))
        else:
            _look(there, _drawn_busiest, watch=watch, is_json=False)


def _busiest(found: Status) -> dict[str, list[dict[str, Any]]]:
    whole = sum(one.a_second for one in found.features) or 1.0
    return {
        "tables": [
            {"table": one.table, "updates_a_second": one.a_second, "updates": one.num}
            for one in found.tables
        ],
        "features": [
            {
                "feature": one.feature,
                "table": one.table,
                "ids_a_second": one.a_second,
                "share": round(one.a_second / whole, 3),
                "ids": one.num,
            }
            for one in found.features
        ],
    }


def _drawn_busiest(found: Status) -> Group:
    return Group(*(console.table(lines) for lines in _busiest(found).values() if lines))


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
    who, place, first = f"{role} {index}", "", "coordinator 0"
    if record.state == "running":
        with opened(record.job_id) as there:
            place = there.book.member(role, index).log or ""
    place = place or record.logs.get(who, "")
    place = place or failures.find_log_beside(record.logs.get(first, ""), who)
    host, _, name = place.partition(" ")
    if not name:
        known = ", ".join(record.logs) or "none"
        raise click.ClickException(
            f"{who} must have a log that is a file. Received: none; known are {known}. "
            "Of a process that has not joined it is where that was started."
        )
    if not is_here(host) and not Path(name).exists():
        raise click.ClickException(f"The log of {who} is {name} on host {host}.")
    log = Path(name) if record.state == "running" else _whole(Path(name))
    with log.open("rb") as file:
        for line in file.readlines()[-lines:]:
            sys.stdout.buffer.write(line)
        sys.stdout.flush()
        while follow:
            more = file.read()
            sys.stdout.buffer.write(more)
            sys.stdout.flush()
            if not more and find(record.job_id, is_running=False).state != "running":
                break
            time.sleep(LOOK_S)


def _whole(log: Path) -> Path:
    """Return the log with the last lines of a process that has ended.

    torchx copies both streams into ``combined.log`` until it ends, or is killed.
    """
    streams = [log.with_name(f"{name}.log") for name in ("stdout", "stderr")]
    if log.name != "combined.log" or not all(one.is_file() for one in streams):
        return log
    if sum(one.stat().st_size for one in streams) <= log.stat().st_size:
        return log
    why = f"torchx ended before this process, whose last lines are in {streams[1]}:"
    console.echo(why, err=True)
    return streams[1]


@click.command()
@click.argument("role")
@click.argument("index", type=int, default=0)
@click.option("--job", default="", help="Id of the job [the one that runs].")
def kill(role: str, index: int, job: str) -> None:
    """Kill one process of a job by SIGKILL, also one that hangs or is stopped.

    Its supervisor starts it again. Of a process on another host the commands are
    printed, and the exit code is 1.

    persia-torchrec kill server 0
    """
    if (role, index) == ("coordinator", 0) and ":" not in job:  # it may hang
        record = find(job)
        member = Member(role, index, record.coordinator, log=record.host)
        job_id = record.job_id
    else:
        with opened(job) as there:
            member, job_id = there.book.member(role, index), there.book.greeting.job_id
    process, who = member.process, member.who
    if process is None or process.has_ended():
        received = "it has not joined" if process is None else "it has ended"
        raise click.ClickException(f"{who} must run. Received: {received}.")
    supervisor, pid = process.supervisor, process.pid
    if process.kill():
        is_supervised = supervisor is not None and not supervisor.has_ended()
        then = "is started again" if is_supervised else "is gone, and the job fails"
        console.echo(f"process {pid} is killed: {who} {then}")
        return
    host = printable((member.log or "").partition(" ")[0])
    commands = (
        f"  ssh {host} kill -KILL {pid}\n"
        f"  srun --jobid {job_id} --overlap --nodelist {host} kill -KILL {pid}\n"
        f"  kubectl exec {host} -- kill -KILL {pid}"
    )
    raise click.ClickException(
        f"{who} is process {pid} on host {host}, which is not this one. Run one of:\n"
        f"{commands}"
    )


@click.command()
@a_job
@click.option("--no-save", is_flag=True, help="End at once, without a last checkpoint.")
def stop(job: str, no_save: bool) -> None:
    """Stop a job; trainers save a last checkpoint before.

    persia-torchrec stop
    """
    saves = not no_save
    record = end(find(job) if ":" not in job else None, job, saves=saves)
    if saves and (lost := lost_by(record)):
        raise click.ClickException(lost)


def end(record: JobRecord | None, name: str, *, saves: bool) -> JobRecord:
    """Have a job end, and wait until it has; return its record then."""
    with opened(name if record is None else record.job_id) as there:
        record = record or find(there.book.greeting.job_id)
        has_trainers = there.book.view().has_trainers
        if not saves:
            reason = f"{failures.TOLD} (stop --no-save), without a save"
            there.book.call(Fail("persia-torchrec", reason), View)
        elif has_trainers:
            there.book.tell_to_end("SIGTERM", "persia-torchrec stop")
        elif record.coordinator.is_running():
            record.coordinator.send(signal.SIGTERM)
        else:
            raise click.ClickException(
                f"A job that serves is stopped where its coordinator runs. Received: "
                f"host {record.host}. Cancel it with its scheduler, or use --no-save."
            )
    console.echo(f"{record.job_id} ends", err=True)
    began_s, say_s = time.monotonic(), timeouts.SAY_S
    while (waited_s := time.monotonic() - began_s) < timeouts.VERB_END_S:
        if waited_s >= say_s:
            say_s *= 2
            _echo_left(record)
        known = find(record.job_id, is_running=False)
        if known.state != "running":
            last = known.checkpoint or "none"
            if has_trainers and known.saves is None:
                last = "none, as its script saves nothing (no recoverable())"
            console.echo(f"{known.job_id} has ended; its last checkpoint: {last}")
            return known
        time.sleep(LOOK_S)
    raise click.ClickException(
        f"{record.job_id} must end within {timeouts.VERB_END_S:.0f} s. Received: it "
        f"runs. See persia-torchrec status {record.job_id}."
    )


def _echo_left(record: JobRecord) -> None:
    """Print which processes of a job, that may end meanwhile, have not ended."""
    with (
        contextlib.suppress(PersiaError, click.ClickException),  # it has ended
        opened(record.job_id) as there,
    ):
        left = [
            f"{one.role} {one.index} ({one.state})"
            for one in there.book.status().members
            if one.role != "coordinator" and one.state not in ("absent", "left")
        ]
        console.echo(f"waiting for {', '.join(left) or 'coordinator 0'}", err=True)


def lost_by(record: JobRecord) -> str:
    """Return which steps a job that was told to end has lost, and why; or ""."""
    saves = record.saves
    return "" if saves is None else saves.lost(record.outcome, record.reason)
