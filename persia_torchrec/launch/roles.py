"""The roles of a job, as torchx starts them.

A job is one ``AppDef``: the coordinator first, because torchx's macro ``rank0_env``
names the host of the first role, then servers, embedding workers, data loaders and
trainers. Role names are plain letters: Kubernetes turns others into something else.
What a process must know to find the others comes to it as variables, see ``env.py``;
what else it must know, as arguments.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchx import specs

from persia_torchrec.errors import ConfigError
from persia_torchrec.wire.ports import free_port

APP_NAME = "persia"

MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """What all roles of one job have in common.

    Raises:
        ConfigError: a path or the interpreter is missing, the port is out of its
            range, or a variable cannot be passed on.
    """

    embedding_config: str
    """Path of ``embedding_config.yml``, as every role finds it."""

    global_config: str
    """Path of ``global_config.yml``, as every role finds it."""

    port: int
    """TCP port of the job's address book, in ``[1, 65535]``."""

    host: str = ""
    """Host of the address book; empty: where torchx puts the first role, of an app that
    holds the whole job."""

    python: str = "python3"
    """The interpreter, looked up in PATH where the role runs."""

    image: str = ""
    """Handed to the scheduler as it is."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables for every role."""

    def __post_init__(self) -> None:
        for name in ("embedding_config", "global_config", "python"):
            _require_text(name, getattr(self, name))
        if not 1 <= self.port <= MAX_PORT:
            raise ConfigError(
                f"port must be in [1, {MAX_PORT}]. Received: {self.port}."
            )
        reserved = sorted(self.env.keys() & self._discovery(1).keys())
        if reserved:
            raise ConfigError(
                f"env must not set what the job sets itself. Received: {reserved}."
            )
        # Slurm takes the variables as one list with commas in between.
        for name, value in {**self._discovery(1), **self.env}.items():
            if "," in value:
                raise ConfigError(
                    f"A variable must hold no comma. Received: {name}={value!r}."
                )

    def _discovery(self, num_replicas: int) -> dict[str, str]:
        """Return the variables by which a process finds its place in the job."""
        # A role by itself joins the job that is at the host, whatever its id is.
        job = (
            {"PERSIA_STORE_HOST": self.host}
            if self.host
            else {
                "PERSIA_STORE_HOST_ENV": specs.macros.rank0_env,
                "PERSIA_JOB_ID": specs.macros.app_id,
            }
        )
        return {
            "PERSIA_STORE_PORT": str(self.port),
            **job,
            "REPLICA_INDEX": specs.macros.replica_id,
            "REPLICA_SIZE": str(num_replicas),
            "PERSIA_EMBEDDING_CONFIG": self.embedding_config,
            "PERSIA_GLOBAL_CONFIG": self.global_config,
            "PYTHONUNBUFFERED": "1",
        }

    def role(
        self, name: str, arguments: list[str], num_replicas: int, *, gpus: int = 0
    ) -> specs.Role:
        """Build one role; its variables are a dict of its own, torchx adds to it."""
        return specs.Role(
            name=name,
            image=self.image,
            entrypoint=self.python,
            args=arguments,
            env={**self._discovery(num_replicas), **self.env},
            num_replicas=num_replicas,
            resource=specs.Resource(cpu=-1, gpu=gpus, memMB=-1),
        )


def job_port(port: int) -> int:
    """Return ``port``, or for 0 a free one of the machine that this runs on."""
    return port or free_port("")


def coordinator(
    job: JobSettings,
    *,
    num_servers: int,
    num_workers: int,
    num_loaders: int,
    num_trainers: int,
) -> specs.Role:
    """Build the role that hosts the address book; the first one of a job."""
    arguments = [
        *("-m", "persia_torchrec.launch.coordinator"),
        *("--port", str(job.port)),
        *("--num-servers", str(num_servers)),
        *("--num-workers", str(num_workers)),
        *("--num-loaders", str(num_loaders)),
        *("--num-trainers", str(num_trainers)),
    ]
    return job.role("coordinator", arguments, 1)


def inference_coordinator(
    job: JobSettings, *, num_servers: int, num_workers: int, num_predictors: int
) -> specs.Role:
    """Build the coordinator of a job that serves; the first role of it."""
    arguments = [
        *("-m", "persia_torchrec.launch.coordinator"),
        *("--port", str(job.port)),
        *("--num-servers", str(num_servers)),
        *("--num-workers", str(num_workers)),
        *("--num-predictors", str(num_predictors)),
    ]
    return job.role("coordinator", arguments, 1)


def checkpoint_servers(
    job: JobSettings, checkpoint: str, num_servers: int
) -> specs.Role:
    """Build the role of embedding servers that serve a checkpoint."""
    _require_text("checkpoint", checkpoint)
    role = embedding_servers(job, num_servers)
    role.args += ["--checkpoint", checkpoint]
    return role


def checkpoint_workers(job: JobSettings, num_workers: int) -> specs.Role:
    """Build the role of embedding workers over servers that serve a checkpoint."""
    role = embedding_workers(job, num_workers)
    role.args += ["--learn-tables"]
    return role


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
    _require_count("predictors", num_predictors, 1)
    _require_text("http_host", host)
    last = port + num_predictors - 1
    if port < 1 or last > MAX_PORT:
        raise ConfigError(
            f"http_port must be in [1, {MAX_PORT}], with those that follow it for the "
            f"other predictors. Received: {port}, and {num_predictors} predictors."
        )
    arguments = [
        *("-m", "persia_torchrec.serving", "--workers-of-job"),
        *("--checkpoint", checkpoint, "--host", host, "--port", str(port)),
    ]
    if follow_model:
        arguments.append("--follow-model")
    return job.role("predictor", arguments, num_predictors)


def embedding_servers(
    job: JobSettings, num_servers: int, eviction: str = "lru"
) -> specs.Role:
    """Build the role of the embedding servers, one process per shard."""
    _require_count("embedding_servers", num_servers, 1)
    if eviction not in ("lru", "lfu"):
        raise ConfigError(f"eviction must be lru or lfu. Received: {eviction!r}.")
    arguments = [
        *("-m", "persia_torchrec.server"),
        *("--shard", specs.macros.replica_id),
        *("--num-shards", str(num_servers), "--eviction", eviction),
        *("--global-config", job.global_config),
    ]
    return job.role("server", arguments, num_servers)


def embedding_workers(job: JobSettings, num_workers: int) -> specs.Role:
    """Build the role of the embedding workers."""
    _require_count("embedding_workers", num_workers, 1)
    arguments = [
        *("-m", "persia_torchrec.worker"),
        *("--index", specs.macros.replica_id),
        *("--num-workers", str(num_workers)),
        *("--embedding-config", job.embedding_config),
        *("--global-config", job.global_config),
    ]
    return job.role("worker", arguments, num_workers)


def data_loaders(job: JobSettings, script: str, num_loaders: int) -> specs.Role:
    """Build the role of the data loaders; ``script`` may hold arguments."""
    _require_count("data_loaders", num_loaders, 1)
    words = _words("data_loader", script)
    return job.role("loader", _script_arguments("loader", words), num_loaders)


def nn_workers(
    job: JobSettings, script: str, num_trainers: int, *, gpus: int = 0
) -> specs.Role:
    """Build the role of the NN workers, with ``gpus`` devices each."""
    _require_count("nn_workers", num_trainers, 1)
    _require_count("nn_worker_gpus", gpus, 0)
    words = _words("nn_worker", script)
    arguments = _script_arguments("trainer", words)
    return job.role("trainer", arguments, num_trainers, gpus=gpus)


def _script_arguments(role: str, words: list[str]) -> list[str]:
    return ["-m", "persia_torchrec.launch.script", role, *words]


def _words(name: str, script: str) -> list[str]:
    _require_text(name, script)
    try:
        return shlex.split(script)
    except ValueError as exc:
        raise ConfigError(
            f"{name} must be a file name and its arguments, as in a shell. "
            f"Received: {script!r} ({exc})."
        ) from exc


def _require_text(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{name} must name a file. Received: {value!r}.")


def _require_count(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{name} must be >= {minimum}. Received: {value}.")
