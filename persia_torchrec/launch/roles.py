"""The roles of a job, as torchx starts them.

A job is one ``AppDef``: the coordinator first, because torchx's macro ``rank0_env``
names the host of the first role, then servers, embedding workers, data loaders and
trainers. Role names are plain letters: Kubernetes turns others into something else.
Variables tell a process its index, its files and where the others are, see ``env.py``;
flags, the rest.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchx import specs

from persia_torchrec.command_line import format_flags
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import ConfigError

APP_NAME = "persia"

_SETTINGS = {  # how components call the number of processes of a role
    "server": "embedding_servers",
    "worker": "embedding_workers",
    "loader": "data_loaders",
    "trainer": "nn_workers",
    "predictor": "predictors",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """What all roles of one job have in common."""

    embedding_config: str  # path where the roles run, like the next
    global_config: str
    port: int  # of the address book, in ``[1, 65535]``
    host: str = ""  # of the address book; empty: of the first role of the whole job
    python: str = "python3"  # the interpreter, looked up in PATH where the role runs
    image: str = ""  # passed to the scheduler unchanged
    env: Mapping[str, str] = field(default_factory=dict)  # further variables
    imports: str = ""  # modules that servers and workers import, separated by commas

    def __post_init__(self) -> None:
        for name in ("embedding_config", "global_config", "python"):
            _require_text(name, getattr(self, name))
        if not 1 <= self.port <= MAX_PORT:
            raise ConfigError(
                f"port must be in [1, {MAX_PORT}]. Received: {self.port}."
            )
        variables = self._variables(1)
        reserved = sorted(self.env.keys() & variables.keys())
        if reserved:
            raise ConfigError(
                f"env must not set what the job sets itself. Received: {reserved}."
            )
        # Slurm takes the variables as one list, separated by commas.
        for name, value in {**variables, **self.env}.items():
            if "," in value:
                raise ConfigError(
                    f"A variable must hold no comma. Received: {name}={value!r}."
                )

    def _variables(self, num_replicas: int) -> dict[str, str]:
        """Return the variables by which a process finds the job and its index in it."""
        job = {"PERSIA_STORE_HOST": self.host}
        if not self.host:  # else a single role, which joins whichever job is there
            job = {
                "PERSIA_STORE_HOST_ENV": specs.macros.rank0_env,
                "PERSIA_JOB_ID": specs.macros.app_id,
            }
        return {
            "PERSIA_STORE_PORT": str(self.port),
            **job,
            "REPLICA_INDEX": specs.macros.replica_id,
            "REPLICA_SIZE": str(num_replicas),
            "PERSIA_EMBEDDING_CONFIG": self.embedding_config,
            "PERSIA_GLOBAL_CONFIG": self.global_config,
            "PYTHONUNBUFFERED": "1",
        }

    def imported_modules(self) -> list[str]:
        """Return the modules of ``imports``."""
        return [name.strip() for name in self.imports.split(",") if name.strip()]

    def role(
        self,
        name: str,
        module: str,
        arguments: list[str],
        num_replicas: int = 1,
        *,
        gpus: int = 0,
    ) -> specs.Role:
        """Build a role that runs a module of this package."""
        if num_replicas < 1:
            raise ConfigError(
                f"{_SETTINGS[name]} must be >= 1. Received: {num_replicas}."
            )
        return specs.Role(
            name=name,
            image=self.image,
            entrypoint=self.python,
            args=["-m", f"persia_torchrec.{module}", *arguments],
            env={**self._variables(num_replicas), **self.env},  # torchx adds to it
            num_replicas=num_replicas,
            resource=specs.Resource(cpu=-1, gpu=gpus, memMB=-1),
        )


def coordinator(job: JobSettings, **counts: int) -> specs.Role:
    """Build the first role of a job, with ``num_servers`` and the other counts."""
    flags = format_flags(port=job.port, **counts)
    return job.role("coordinator", "launch.coordinator", flags)


def embedding_servers(
    job: JobSettings,
    num_servers: int,
    eviction: str = "lru",
    *,
    checkpoint: str | None = None,
) -> specs.Role:
    """Build the role of the servers; with a checkpoint they serve it, for inference."""
    if eviction not in ("lru", "lfu"):
        raise ConfigError(f"eviction must be lru or lfu. Received: {eviction!r}.")
    if checkpoint is not None:
        _require_text("checkpoint", checkpoint)
    imports = job.imported_modules()
    flags = format_flags(eviction=eviction, checkpoint=checkpoint, import_=imports)
    return job.role("server", "server", flags, num_servers)


def embedding_workers(
    job: JobSettings, num_workers: int, *, learn_tables: bool = False
) -> specs.Role:
    """Build the role of the workers, which may learn the tables from a checkpoint."""
    flags = format_flags(learn_tables=learn_tables, import_=job.imported_modules())
    return job.role("worker", "worker", flags, num_workers)


def predictors(
    job: JobSettings,
    checkpoint: str,
    num_predictors: int,
    *,
    host: str,
    port: int,
    follow_model: bool = False,
) -> specs.Role:
    """Build the role of the inference servers; the i-th listens on ``port + i``."""
    _require_text("http_host", host)
    if port < 1 or port + num_predictors - 1 > MAX_PORT:
        raise ConfigError(
            f"http_port must be in [1, {MAX_PORT}], with those that follow it for the "
            f"other predictors. Received: {port}, and {num_predictors} predictors."
        )
    flags = format_flags(checkpoint=checkpoint, host=host, port=port)
    flags += format_flags(workers_of_job=True, follow_model=follow_model)
    return job.role("predictor", "serving", flags, num_predictors)


def scripts(
    job: JobSettings,
    role: Literal["loader", "trainer"],
    script: str,
    num: int,
    *,
    gpus: int = 0,
) -> specs.Role:
    """Build the role of the data loaders, or of NN workers with ``gpus`` devices each.

    ``script`` may hold arguments, as in a shell.
    """
    name = _SETTINGS[role].removesuffix("s")
    _require_text(name, script)
    if gpus < 0:
        raise ConfigError(f"{name}_gpus must be >= 0. Received: {gpus}.")
    try:
        words = shlex.split(script)
    except ValueError as exc:
        raise ConfigError(
            f"{name} must be a file name and its arguments, as in a shell. "
            f"Received: {script!r} ({exc})."
        ) from exc
    return job.role(role, "launch.script", [role, *words], num, gpus=gpus)


def _require_text(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{name} must name a file. Received: {value!r}.")
