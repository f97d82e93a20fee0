"""Verbs that start something: jobs, by torchx, and the examples of the package."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

import persia_torchrec
from persia_torchrec.checkpoint.catalog import find_checkpoint
from persia_torchrec.checkpoint.signature import SERVED_MODEL
from persia_torchrec.command import console
from persia_torchrec.command.job_view import a_job, find
from persia_torchrec.errors import ConfigError
from persia_torchrec.job import report as job_report
from persia_torchrec.job.progress import CURVES
from persia_torchrec.job.script import MODULE, require_script, split_module
from persia_torchrec.parsing.settings import SETTINGS, present_name

F = TypeVar("F", bound=Callable[..., Any])


def _with_hyphens(option: str) -> str:
    """Return an option as commands name it, where components have underscores."""
    return option.replace("_", "-")


_OF_TORCHX: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "token_normalize_func": _with_hyphens,
}
_HERE = "local_cwd"
_TORCHXCONFIG = """\
# Plain "torchx run" trains the adult-income example on this machine.
# "torchx run -- --servers 3" overrides an argument, "-s slurm" the scheduler.

[cli:run]
scheduler = local_cwd
component = persia.train

[component:persia.train]
nn_worker = {examples}/adult_income/train.py
data_loader = {examples}/adult_income/data_loader.py
embedding_config = {examples}/adult_income/embedding_config.yml
global_config = {examples}/adult_income/global_config.yml
servers = 2
embedding_workers = 1
data_loaders = 1
trainers = 1
"""
OF_RUN = (
    *("servers", "trainers", "nproc_per_node", "gpus", "run_dir", "capacity"),
    *("eviction", "optimizer_engine", "increments_dir", "imports", "take_over"),
    *("restarts", "recovery_timeout_s"),
    *("max_retries", "memory_dir", "grace_s", "join_timeout_s", "metrics_port"),
    *("port", "roles_file", "env", "image", "python"),
)
"""Settings of ``run``: those of its component."""

_ELSEWHERE = "python", "image", "env", "roles_file"  # Python may look elsewhere then
_IN_BACKGROUND = "-d", "--detach"


def _setting(name: str) -> Callable[[F], F]:
    """Return the option of a setting; None where it is not given."""
    of = SETTINGS[name]
    kind: Any = click.STRING if get_origin(of.kind) is dict else of.kind
    if get_origin(of.kind) is Literal:
        kind = click.Choice(get_args(of.kind))
    default = "" if of.default in ("", ...) else f" [{of.default}]"
    flag = "--" + name.replace("_", "-")
    return click.option(flag, name, type=kind, help=of.help + default)


def _settings(function: F) -> F:
    """Give a command the options of all settings of its component."""
    for name in reversed(OF_RUN):
        function = _setting(name)(function)
    return function


@click.command(context_settings=_OF_TORCHX)
@_settings
@click.option("--resume_dir", hidden=True)
@click.option("--set", "more", default="", hidden=True)
@click.option("-s", "--scheduler", default=_HERE, show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="Show whole logs.")
@click.option(*_IN_BACKGROUND, is_flag=True, help="Do not wait for its end.")
@click.argument(
    "script",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGUMENTS]...",
)
def run(
    resume_dir: str | None,
    more: str,
    scheduler: str,
    verbose: bool,
    detach: bool,
    script: tuple[str, ...],
    **given: object,
) -> None:
    """Train by SCRIPT: servers and trainers as one job, of which servers are told.

    It is torchx run -s local_cwd persia.train_torchrec, with a line for each event that
    matters, and a report at the end. With --run-dir the job saves into that folder, and
    continues from there when it is started again.

    persia-torchrec run --servers 2 --run-dir runs/7 train.py --epochs 3
    """
    if script[0].startswith("-") and script[0] != MODULE:
        raise click.NoSuchOption(script[0])
    is_known = scheduler == _HERE and not any(map(given.get, _ELSEWHERE))
    try:
        (require_script if is_known else split_module)(list(script))
    except ConfigError as exc:
        raise click.UsageError(str(exc)) from exc
    component = ["persia.train_torchrec", "--script", shlex.join(script)]
    if resume_dir is not None:
        present_name("--resume_dir", "--run-dir")
        given["run_dir"] = resume_dir
    if given["nproc_per_node"] is None:
        given["nproc_per_node"] = given["trainers"]
    for name, value in given.items():
        if value is not None:
            component += [f"--{name}", str(value)]
    if more:
        present_name("--set", "an option of its own for each setting")
        component += shlex.split(more)
    _start(component, scheduler, detach=detach, verbose=verbose)


@click.command(context_settings=_OF_TORCHX)
@click.option("--servers", default=1, show_default=True, help="Embedding servers.")
@click.option("--port", default=8080, show_default=True, help="Of HTTP.")
@click.option("-s", "--scheduler", default=_HERE, show_default=True)
@click.option(*_IN_BACKGROUND, is_flag=True, help="Do not wait for its end.")
@click.argument("checkpoint")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(
    servers: int,
    port: int,
    scheduler: str,
    detach: bool,
    checkpoint: str,
    arguments: tuple[str, ...],
) -> None:
    """Predict over HTTP from CHECKPOINT, a folder or URL.

    One of export_for_serving is served by one process, here, that starts its embedding
    servers; ARGUMENTS are those of python -m persia_torchrec.serving. One of PERSIA's
    TrainCtx is served by a job, whose ARGUMENTS are those of persia.serve.

    persia-torchrec serve runs/7

    persia-torchrec serve runs/7 --embedding_config e.yml --global_config g.yml
    """
    if scheduler == _HERE and _is_exported(checkpoint):
        module = [sys.executable, "-m", "persia_torchrec.serving"]
        flags = ["--checkpoint", checkpoint, "--port", str(port)]
        _become([*module, *flags, "--servers", str(servers), *arguments], detach)
        return
    if scheduler == _HERE:
        find_checkpoint(checkpoint)  # an error here, before a job starts
    component = [
        *("persia.serve", "--checkpoint", checkpoint, "--http_port", str(port)),
        *("--servers", str(servers), *arguments),
    ]
    _start(component, scheduler, detach=detach)


def _is_exported(checkpoint: str) -> bool:
    """Return whether a checkpoint is one of ``export_for_serving``."""
    from persia_torchrec.serving.predictor import find_model  # imports torch

    return find_model(checkpoint) == SERVED_MODEL


def _start(
    component: list[str], scheduler: str, *, detach: bool, verbose: bool = False
) -> None:
    """Start a component: here, with a terminal of its own, or by ``torchx run``."""
    if scheduler == _HERE:
        words = [
            "persia_torchrec.launch.local_run",
            *(["--verbose"] if verbose else []),
        ]
    else:
        words = ["torchx.cli.main", "run", "-s", scheduler]
    _become([sys.executable, "-m", *words, *component], detach)


def _become(command: list[str], detach: bool) -> None:
    if detach:
        log = Path("persia-torchrec.log")
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )
        click.echo(
            f"process {process.pid} runs it, and writes {log}: persia-torchrec ps"
        )
    else:
        os.execv(command[0], command)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default="examples")
def examples(folder: Path) -> None:
    """Copy the examples into FOLDER, a new one.

    Beside it, unless there is one, stands a .torchxconfig then: torchx run starts jobs
    on this machine, where nothing names a scheduler, and trains the adult-income
    example, where nothing names a component.

    persia-torchrec examples && python examples/quickstart.py
    """
    package = Path(persia_torchrec.__file__).parent
    source = package / "examples"
    if not source.is_dir():  # a checkout
        source = package.parent / "examples"
    if folder.exists():
        raise click.ClickException(
            f"FOLDER must be a new folder. Received: {folder}, which exists."
        )
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    click.echo(f"copied to {folder}; begin with python {folder}/quickstart.py")
    config = folder.absolute().parent / ".torchxconfig"
    if not config.exists():
        config.write_text(_TORCHXCONFIG.format(examples=folder.name))
        click.echo(f"{config}: torchx run trains {folder.name}/adult_income here")


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
