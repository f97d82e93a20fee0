"""The settings that several commands take: each stands here once.

    components of torchx, persia-torchrec     --increments_dir, --increments-dir
    programs of roles, persia-launcher        --increments-dir
    dataclasses behind them                   increments_dir: str = declared("...")

A command that takes one takes type, default, unit and meaning from here; its own text
may say what else the setting means there. What a single command takes is declared where
that is. The names of PERSIA, torchx and TorchRec stand at their own commands.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """One setting."""

    kind: Any
    """Its type: int, float, bool, str, a Literal, or a mapping or tuple of texts."""
    help: str
    default: Any = ...
    """``...``: it must be given."""
    unit: str = "-"
    variable: str = ""
    """Variable of the environment that has it, where a flag does not."""
    needs: str = ""
    """Setting without which this one has no effect, so that it is an error."""
    previous: tuple[str, ...] = ()
    """Names of the release before, which are taken with a warning."""


SETTINGS: Mapping[str, Declared] = {
    # How many
    "servers": Declared(
        kind=int,
        default=1,
        unit="count",
        help="number of embedding servers; ids are sharded over them by hash",
        previous=("embedding_servers", "num_servers"),
    ),
    "embedding_workers": Declared(
        kind=int,
        default=1,
        unit="count",
        help="number of embedding workers; a training of TorchRec models has 0, as its "
        "data loaders send the ids to the trainers",
        previous=("num_workers",),
    ),
    "data_loaders": Declared(
        kind=int,
        default=1,
        unit="count",
        help="number of data loaders; 0 if the trainers read their own data",
        previous=("num_loaders",),
    ),
    "trainers": Declared(
        kind=int,
        default=1,
        unit="count",
        help="number of trainers (NN workers), of all machines together, a multiple "
        "of nproc_per_node; by default those of one machine",
        previous=("num_trainers",),
    ),
    "predictors": Declared(
        kind=int,
        default=1,
        unit="count",
        help="number of inference servers, which answer HTTP",
        previous=("num_predictors",),
    ),
    "nproc_per_node": Declared(
        kind=int,
        default=1,
        unit="count",
        help="trainers that torchrun starts on each machine",
    ),
    "gpus": Declared(
        kind=int,
        default=0,
        unit="count",
        help="GPUs that each machine with trainers asks the scheduler for",
        previous=("nn_worker_gpus",),
    ),
    # What they run
    "nn_worker": Declared(
        kind=str,
        unit="path",
        variable="PERSIA_NN_WORKER_ENTRY",
        help='the trainers\' script and its arguments, as "train.py --epochs 2", or '
        '"-m package.train"',
    ),
    "data_loader": Declared(
        kind=str,
        unit="path",
        variable="PERSIA_DATALOADER_ENTRY",
        help='the data loaders\' script and its arguments, as "loader.py --epochs 2", '
        'or "-m package.loader"',
    ),
    "embedding_config": Declared(
        kind=str,
        unit="path",
        variable="PERSIA_EMBEDDING_CONFIG",
        help="path of embedding_config.yml, where the roles run",
    ),
    "global_config": Declared(
        kind=str,
        unit="path",
        variable="PERSIA_GLOBAL_CONFIG",
        help="path of global_config.yml, where the roles run",
    ),
    "imports": Declared(
        kind=str,
        default="",
        help="modules that servers and embedding workers import, separated by commas, "
        "which register optimizers, initializers or admissions of their own",
    ),
    "python": Declared(
        kind=str,
        default="",
        unit="path",
        help="interpreter, where the roles run [that of torchx; in an image python3]",
    ),
    "image": Declared(
        kind=str, default="", help="container image; not used by local_cwd"
    ),
    "env": Declared(
        kind=dict[str, str],
        help="further variables for every role, as NAME=value,NAME=value",
    ),
    "roles_file": Declared(
        kind=str,
        default="",
        unit="path",
        help="a file of what each role asks the scheduler for, on the machine that "
        "starts the job: processors, memory, GPUs, volumes, variables, image, replicas",
    ),
    # Where, and until when
    "host": Declared(
        kind=str,
        help="host of the job's address book, where its coordinator runs",
        variable="PERSIA_STORE_HOST",
    ),
    "port": Declared(
        kind=int,
        unit="port",
        default=0,
        variable="PERSIA_STORE_PORT",
        help="TCP port of the job's address book; 0 takes one that is free on the "
        "machine that starts the job, so name one on a cluster",
    ),
    "join_timeout_s": Declared(
        kind=float,
        default=timeouts.JOIN_TIMEOUT_S,
        unit="s",
        variable="PERSIA_JOIN_TIMEOUT_S",
        help="seconds that each wait of the start may take",
    ),
    "metrics_port": Declared(
        kind=int,
        default=0,
        unit="port",
        variable="PERSIA_METRICS_PORT",
        help="serve /metrics, /healthz and /readyz over HTTP: the coordinator at this "
        "port, with the job's page and /targets for Prometheus, others at the next "
        "ones that are free where they run. 0: none",
    ),
    "grace_s": Declared(
        kind=float,
        default=0.0,
        unit="s",
        help="seconds that trainers have to save when the job is told to end: "
        "cancelled, preempted or by Ctrl-C. 0: 5 on one machine, as torchx kills after "
        "10; else 20",
    ),
    # What is started again
    "restarts": Declared(
        kind=int,
        default=3,
        unit="times",
        help="how often what is killed is started again without progress between, a "
        "trained batch, or in a job that serves, a minute: servers with their rows, "
        "trainers all together, from their last automatic checkpoint (of a TorchRec "
        "script, by recoverable()). 0: the job fails",
        previous=("max_restarts",),
    ),
    "recovery_timeout_s": Declared(
        kind=float,
        default=timeouts.RECOVERY_S,
        unit="s",
        needs="restarts",
        help="seconds after which the job fails if a process that is started again is "
        "not back",
    ),
    "memory_dir": Declared(
        kind=str,
        default="auto",
        unit="path",
        needs="restarts",
        help="where the rows of servers are that are started again: auto for the "
        "fastest memory there is, a folder of each host, or private: with the process",
    ),
    "max_retries": Declared(
        kind=int,
        default=3,
        unit="times",
        help="how often Slurm or Kubernetes may start the whole job again, as if a "
        "host was lost; Kubernetes does once less. 0: never",
    ),
    # Rows
    "capacity": Declared(
        kind=int,
        default=1_000_000,
        unit="rows",
        help="rows of each server, of all tables together; beyond that, rows are "
        "evicted",
    ),
    "eviction": Declared(
        kind=Literal["lru", "lfu"],
        default="lru",
        help="which row leaves a full server: the least recently (lru) or the least "
        "frequently (lfu) used",
    ),
    "optimizer_engine": Declared(
        kind=str,
        default="",
        help="what applies gradients on servers: compiled (loops), fbgemm (its CPU "
        "kernels, for SGD and Adagrad); by default what global_config.yml says, or "
        "compiled",
    ),
    # Folders
    "run_dir": Declared(
        kind=str,
        default="",
        unit="path",
        variable="PERSIA_RUN_DIR",
        help="folder of the job, with its checkpoints, and on one machine its logs and "
        "its report. A job that is started with that of another continues it. By "
        "default each job has one of its own, runs/JOB",
        previous=("resume_dir",),
    ),
    "increments_dir": Declared(
        kind=str,
        default="",
        unit="path",
        help="folder to which servers write what changes, or of a checkpoint that is "
        "served, which they follow; none by default",
        previous=("incremental_dir",),
    ),
    "take_over": Declared(
        kind=bool,
        default=False,
        variable="PERSIA_TAKE_OVER",
        help="write in folders of checkpoints and increments though another job may do "
        "so, too: without it, that job is waited for until it is silent, or this one "
        "is rejected",
    ),
    # Serving
    "checkpoint": Declared(
        kind=str,
        unit="path",
        help="folder of a checkpoint with a model, or of a run, for its latest; or its "
        "URL; where the roles run",
    ),
    "follow_model": Declared(
        kind=bool,
        default=False,
        help="load the dense model of each later checkpoint once it is complete",
    ),
    "device": Declared(
        kind=Literal["auto", "cpu", "cuda"],
        default="auto",
        help="where inference servers predict: cpu, cuda, or auto, a GPU where there "
        "is one; those of one host take its GPUs in turn",
    ),
    "allow_torchscript": Declared(
        kind=bool,
        default=False,
        help="take TorchScript, which is a program, also from a URL and from a folder "
        "that other users may write to",
    ),
}


def declared(name: str, **changes: Any) -> Any:
    """Return the field of a dataclass that is a setting, by its name here.

    Changes are ``default`` or ``default_factory``, where they are another at a command,
    ``also``, what else the setting means there, ``help`` in its place, and metadata of
    ``command_line``. A bool that is none in the field is a flag without a value.
    """
    of = SETTINGS[name]
    metadata = {"declared": name}
    default = {} if of.default is ... else {"default": of.default}
    for key, value in changes.items():
        if key in ("default", "default_factory"):
            default = {} if value is ... else {key: value}
        else:
            metadata[key] = value
    return dataclasses.field(**default, metadata=metadata)


def meaning(field: Any) -> str | None:
    """Return what a declared field means; None: it is declared in its class."""
    name = field.metadata.get("declared")
    if name is None:
        return None
    also = field.metadata.get("also", "")
    text = field.metadata.get("help") or SETTINGS[name].help
    return f"{text}. {also}" if also else text


def require_used(config: Any, given: Iterable[str]) -> None:
    """Reject a setting that is given and has no effect, as another one is off.

    Args:
        config: all settings of a command, a dataclass. A field's metadata, or its
            declaration, says what it ``needs``.
        given: names of the fields that the command line gives.
    """
    kinds = {field.name: field for field in dataclasses.fields(config)}
    for name in kinds.keys() & set(given):
        metadata = kinds[name].metadata
        declared = SETTINGS.get(metadata.get("declared", ""))
        needs = metadata.get("needs") or (declared.needs if declared else "")
        if needs in kinds and not getattr(config, needs):
            raise ConfigError(
                f"{name} must be left out, as it has no effect without {needs}. "
                f"Received: {name}={getattr(config, name)!r}, and {needs}="
                f"{getattr(config, needs)!r}."
            )


def present_name(previous: str, present: str) -> str:
    """Return the present name of a setting that has a previous one, and say so."""
    logger.warning(
        "%s is called %s now; the previous name goes with the next release",
        previous,
        present,
    )
    return present


def renamed(**present: str) -> Callable[[Function], Function]:
    """Have a function take keyword arguments by their previous names, too.

    ``present`` has the present name of each. Both at once are a TypeError.
    """

    def extend(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in present.keys() & kwargs.keys():
                value = kwargs.pop(name)
                if present[name] in kwargs:
                    raise TypeError(f"{name} is {present[name]}, which is given, too")
                kwargs[present_name(name, present[name])] = value
            return function(*args, **kwargs)

        return cast("Function", call)

    return extend
