"""The roles of a job, as torchx starts them.

A job is one ``AppDef``: the coordinator first, because torchx's macro ``rank0_env``
names the host of the first role, then servers, embedding workers, data loaders and
trainers. Role names are plain letters: Kubernetes turns others into something else.
Variables tell a process its index, its files and where the others are, see ``env.py``;
flags, the rest. What a role asks the scheduler for is a file::

    all: {image: "registry/job:7", volumes: ["census:/data:ro"]}
    server: {replicas: 2, cpu: 8, memory: 64Gi}
    trainer: {gpus: 1, env: {CUBLAS_WORKSPACE_CONFIG: ":4096:8"}}
    loader: {secrets: {AWS_SECRET_ACCESS_KEY: census/key}}
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, structs
from torchx import specs

from persia_torchrec import env as environment
from persia_torchrec import timeouts
from persia_torchrec.embedding.limits import MAX_ROWS
from persia_torchrec.embedding.optimizer_engine import require_engine
from persia_torchrec.env import MAX_PORT, RUNS, is_loopback
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.script import split_module
from persia_torchrec.job.supervisor import ALL, under_supervisor
from persia_torchrec.job.survivable_memory import PRIVATE
from persia_torchrec.launch import pods
from persia_torchrec.launch.arguments import split_words
from persia_torchrec.launch.schedulers import (
    TOKEN_SECRETS,
    Role,
    as_it_is,
    as_they_are,
    quantity,
    require_memory,
    require_names,
    require_processors,
)
from persia_torchrec.parsing.command_line import format_flags
from persia_torchrec.parsing.decoding import KeyPath
from persia_torchrec.parsing.settings import SETTINGS, declared, require_used
from persia_torchrec.parsing.yaml_file import parse_yaml, read_section, read_text
from persia_torchrec.rpc.addresses import free_port

T = TypeVar("T")

NUMBER_OF = {
    "server": "servers",
    "worker": "embedding_workers",
    "loader": "data_loaders",
    "trainer": "trainers",
    "predictor": "predictors",
}
"""The setting that has the number of processes of a role."""

OF_ROLE = (
    *("python", "image", "env", "roles_file", "join_timeout_s", "restarts"),
    "metrics_port",
)
"""Fields of ``JobSettings`` that each component offers."""

OF_JOB = (
    *(*OF_ROLE, "port", "imports", "recovery_timeout_s", "max_retries", "grace_s"),
    "take_over",
)
"""Those that components of whole jobs offer."""

_TOKENS = ("PERSIA_JOB_TOKEN", "PERSIA_HTTP_TOKEN")  # of these, files are named
_ALL_TOKENS = (*_TOKENS, "PERSIA_HTTP_ADMIN_TOKEN")

_CLAIM = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
_VOLUME = re.compile(
    rf"(?P<source>/[^:,\s]*|{_CLAIM}):(?P<path>/[^:,\s]*)(:(?P<mode>ro|rw))?"
)
_SECRET = re.compile(rf"{_CLAIM}/[-._a-zA-Z0-9]+")

Count = Annotated[int, Meta(ge=0)]


class RoleSettings(Struct, frozen=True, kw_only=True):
    """What each process of a role asks the scheduler for; unset: the scheduler's."""

    replicas: Count | None = None  # processes of the role
    cpu: int | float | str | None = None  # processors, as 8 or 500m
    memory: int | str | None = None  # bytes, as 64Gi or 500M
    gpus: Count | None = None
    # A claim, or a path of the host: ``claim:/path/in/container`` and ``:ro``.
    volumes: tuple[str, ...] = ()
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}  # variables, each with "SECRET/KEY" of Kubernetes
    image: str | None = None
    pod: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for name in ("cpu", "memory"):
            amount = getattr(self, name)
            if amount is not None and quantity(amount) <= 0:
                raise ConfigError(f"{name} must be > 0. Received: {amount!r}.")
        if self.cpu is not None:
            require_processors(self.cpu)
        if self.memory is not None:
            require_memory(self.memory)
        # torchx has memory at /dev/shm itself.
        paths = [mount.dst_path.rstrip("/") for mount in self.mounts()] + ["/dev/shm"]
        if len(set(paths)) < len(paths):
            raise ConfigError(
                "volumes must mount one volume at a path, and none at /dev/shm, which "
                f"is memory. Received: {', '.join(self.volumes)}."
            )
        require_names({**self.env, **self.secrets})
        for name, secret in self.secrets.items():
            if _SECRET.fullmatch(secret) is None:
                raise ConfigError(
                    f"secrets must say SECRET/KEY of each variable. Received: {name}="
                    f"{secret!r}."
                )

    def over(self, other: "RoleSettings") -> "RoleSettings":
        """Return the settings of both; volumes add up, of others these replace."""
        given = {name: v for name, v in structs.asdict(self).items() if v is not None}
        given["volumes"] = (*other.volumes, *self.volumes)
        given["env"] = {**other.env, **self.env}
        given["secrets"] = {**other.secrets, **self.secrets}
        given["pod"] = pods.over(self.pod, other.pod)
        return structs.replace(other, **given)

    def resource(self, gpus: int) -> specs.Resource:
        """Return torchx's form; -1 is what the scheduler gives."""
        cpu, memory = quantity(self.cpu or -1), quantity(self.memory or -1)
        return specs.Resource(
            cpu=int(cpu) if cpu.denominator == 1 else float(cpu),
            memMB=math.ceil(memory / 10**6) if memory > 0 else -1,
            gpu=gpus,
        )

    def mounts(self) -> list[specs.VolumeMount | specs.BindMount]:
        """Return torchx's form of the volumes."""
        mounts = []
        for volume in self.volumes:
            match = _VOLUME.fullmatch(volume)
            if match is None:
                raise ConfigError(
                    "volumes must list CLAIM:/PATH or /PATH_OF_HOST:/PATH, with :ro "
                    "after it to be read only, and a claim's name of lower case "
                    f"letters, digits, - and dots. Received: {volume!r}."
                )
            kind = specs.BindMount if match["source"][0] == "/" else specs.VolumeMount
            mounts.append(kind(match["source"], match["path"], match["mode"] == "ro"))
        return mounts


class ServerSettings(RoleSettings, frozen=True, kw_only=True):
    """What each embedding server asks for, and how it applies gradients."""

    optimizer_engine: str | None = None  # unset: that of global_config.yml

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer_engine is not None:
            require_engine(self.optimizer_engine)


class RolesFile(Struct, frozen=True, kw_only=True):
    """The file; a job takes the sections of the roles that it has."""

    all: RoleSettings = RoleSettings()  # of each role; what its own section says holds
    coordinator: RoleSettings = RoleSettings()
    server: ServerSettings = ServerSettings()
    worker: RoleSettings = RoleSettings()
    loader: RoleSettings = RoleSettings()
    trainer: RoleSettings = RoleSettings()
    predictor: RoleSettings = RoleSettings()

    def __post_init__(self) -> None:
        for name in ("all", "coordinator"):
            if getattr(self, name).replicas is not None:
                raise ConfigError(f"{name}.replicas must be left out.")


def read_settings(roles_file: str) -> dict[str, RoleSettings]:
    """Return the settings of a file by role; no file: those of the scheduler."""
    file = RolesFile()
    if roles_file:
        content = parse_yaml(read_text(roles_file), roles_file)
        file = read_section(RolesFile, content, KeyPath(roles_file))
    roles = RolesFile.__struct_fields__[1:]
    return {name: getattr(file, name).over(_of_all(file, name)) for name in roles}


def _of_all(file: RolesFile, name: str) -> RoleSettings:
    """Return what is of all roles, as settings of one."""
    kind: RoleSettings = getattr(RolesFile(), name)
    return file.all.over(kind)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What all roles of one job have in common; fields with docs are for components."""

    host: str = ""  # of the address book; empty: of the first role of the whole job
    port: int = declared("port")
    # Both None: a job without PERSIA's contexts.
    embedding_config: str | None = declared("embedding_config", default=None)
    global_config: str | None = declared("global_config", default=None)
    nproc_per_node: int = declared("nproc_per_node")
    python: str = declared("python")
    image: str = declared("image")
    env: dict[str, str] = declared("env", default_factory=dict)
    imports: str = declared("imports")
    roles_file: str = declared("roles_file")
    join_timeout_s: float = declared("join_timeout_s")
    metrics_port: int = declared("metrics_port")
    restarts: int = declared("restarts")
    memory_dir: str = declared("memory_dir")
    recovery_timeout_s: float = declared("recovery_timeout_s")
    grace_s: float = declared("grace_s")
    max_retries: int = declared("max_retries")
    optimizer_engine: str = declared("optimizer_engine")
    take_over: bool = declared("take_over")
    run_dir: str = declared("run_dir")

    def __post_init__(self) -> None:
        # torchx gives None for an empty word.
        object.__setattr__(self, "env", self.env or {})
        if not self.port and not self.host:
            object.__setattr__(self, "port", free_port(""))
        for name in ("embedding_config", "global_config", "memory_dir"):
            if (text := getattr(self, name)) is not None:
                _require_text(name, text)
        _require_port("port", self.port, 1)
        _require_port("metrics_port", self.metrics_port, 0)
        counts = (("nproc_per_node", 1), ("grace_s", 0), ("restarts", 0))
        for name, least in (*counts, ("max_retries", 0)):
            if (given := getattr(self, name)) < least:
                raise ConfigError(f"{name} must be >= {least}. Received: {given}.")
        for name in ("join_timeout_s", "recovery_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name} must be > 0. Received: {getattr(self, name)}."
                )
        default_of = {one.name: one.default for one in fields(self)}
        changed = [n for n, value in default_of.items() if getattr(self, n) != value]
        require_used(self, changed)
        require_names(self.env)
        variables = self.variables(1)
        roles = self.settings.values()
        of_user = [self.env, *(role.env | role.secrets for role in roles)]
        reserved = sorted({name for env in of_user for name in env.keys() & variables})
        if reserved:
            raise ConfigError(
                f"env must not set what the job sets itself. Received: {reserved}."
            )

    @cached_property
    def settings(self) -> dict[str, RoleSettings]:
        """What each role asks for."""
        return read_settings(self.roles_file)

    def variables(self, num_replicas: int) -> dict[str, str]:
        """Return the variables by which a process finds the job and its index in it."""
        job = {"PERSIA_STORE_HOST": self.host}
        if not self.host:  # else a single role, which joins whichever job is there
            job = {
                "PERSIA_STORE_HOST_ENV": specs.macros.rank0_env,
                "PERSIA_JOB_ID": specs.macros.app_id,
            }
        if self.run_dir:
            job["PERSIA_RUN_DIR"] = self.run_dir
        if self.take_over:
            job["PERSIA_TAKE_OVER"] = "1"
        # Empty: what the shell has exported is not of this job.
        job["PERSIA_EMBEDDING_CONFIG"] = self.embedding_config or ""
        job["PERSIA_GLOBAL_CONFIG"] = self.global_config or ""
        return {
            "PERSIA_STORE_PORT": str(self.port),
            **job,
            "PERSIA_JOIN_TIMEOUT_S": f"{self.join_timeout_s:g}",
            "REPLICA_INDEX": specs.macros.replica_id,
            "REPLICA_SIZE": str(num_replicas),
            "PYTHONUNBUFFERED": "1",
        }

    def engine_of_servers(self) -> str | None:
        """Return what applies gradients; None: what ``global_config.yml`` says."""
        given = require_engine(self.optimizer_engine) if self.optimizer_engine else None
        own = self.settings["server"]
        assert isinstance(own, ServerSettings)
        return _agree(
            "optimizer_engine",
            given,
            None,
            "server.optimizer_engine",
            own.optimizer_engine,
        )

    def imported_modules(self) -> list[str]:
        """Return the modules of ``imports``."""
        return [name.strip() for name in self.imports.split(",") if name.strip()]

    def num_replicas(self, role: str, number: int) -> int:
        """Return the number of processes that an argument or the settings give."""
        given = self.settings[role].replicas
        return _agree(NUMBER_OF[role], number, 1, f"{role}.replicas", given)

    def role(
        self,
        name: str,
        module: str,
        arguments: list[str],
        num_replicas: int = 1,
        *,
        gpus: int = 0,
        tokens: Sequence[str] = _TOKENS[:1],
    ) -> specs.Role:
        """Build a role that runs a module of this package, and has tokens' files."""
        own = self.settings[name]
        usual = SETTINGS["restarts"].default
        if self.host and name != "coordinator" and self.restarts not in (0, usual):
            raise ConfigError(
                "restarts must be 0, or left out, for a role by itself, which its "
                f"coordinator restarts. Received: {self.restarts}."
            )
        image = own.image or self.image
        python = self.python or ("python3" if image else sys.executable)
        words = ["-m", f"persia_torchrec.{module}", *map(as_it_is, arguments)]
        if self.restarts:
            words = under_supervisor([python, *words], **self._survives(name))
        if name in NUMBER_OF:
            num_replicas = self.num_replicas(name, num_replicas)
        if num_replicas < 1:
            must = f"{NUMBER_OF[name]} must be >= 1."
            raise ConfigError(f"{must} Received: {num_replicas}.")
        gpus = _agree("gpus", gpus, 0, f"{name}.gpus", own.gpus)
        return Role(
            name=name,
            image=image,
            entrypoint=python,
            args=words,
            # torchx adds to it. An exported host is that of another job.
            env={
                "PERSIA_STORE_HOST": "",
                **as_they_are(self.variables(num_replicas)),
                **self._metrics(name),
                **_token_files(self._tokens(tokens), {**self.env, **own.env}),
                **as_they_are({**self.env, **own.env}),
            },
            num_replicas=num_replicas,
            max_retries=0 if self.host else self.max_retries,
            resource=own.resource(gpus),
            memory_bytes=math.ceil(quantity(own.memory or 0)),
            mounts=own.mounts(),
            secrets=self._secrets(own),
            pod=own.pod,
        )

    def _metrics(self, name: str) -> dict[str, str]:
        """Return where a role serves metrics; empty: what was exported does not hold.

        The coordinator must have its port, before others on its host look for one.
        """
        is_next = name != "coordinator" and not self.host
        port = self.metrics_port + is_next if self.metrics_port else ""
        return {"PERSIA_METRICS_PORT": str(port)}

    def _tokens(self, tokens: Sequence[str]) -> Sequence[str]:
        """Return the tokens of a role: that of HTTP, too, if there is one for metrics.

        Predictors have it anyway.
        """
        name = _TOKENS[1]
        has_one = environment.text(name) or environment.text(f"{name}_FILE")
        return _TOKENS if self.metrics_port and has_one else tokens

    def _survives(self, name: str) -> dict[str, object]:
        """Return the flags of a role's supervisor: what outlives the process."""
        longest = self.grace_s + timeouts.COMMAND_END_S
        end = {"end_timeout_s": longest} if self.grace_s else {}
        if name == "coordinator":
            return {"host": ALL, "port": self.port, **end}
        memory_dir = self.memory_dir if name == "server" else PRIVATE
        # The others connect, or have a port of their own.
        port = 0 if name in ("server", "worker") else None
        return {"port": port, "memory_dir": memory_dir, **end}

    def _secrets(self, own: RoleSettings) -> dict[str, str]:
        """Return the variables that pods take of Secrets; the token may be a file."""
        has_file = "PERSIA_JOB_TOKEN_FILE" in {**self.env, **own.env}
        return {**({} if has_file else TOKEN_SECRETS), **own.secrets}

    def folder(self) -> str:
        """Return the folder of the job, with its checkpoints, as trainers do."""
        variables = {**self.variables(1), **self.env, **self.settings["trainer"].env}
        folder = variables.get("PERSIA_CHECKPOINT_DIR", RUNS)
        own = f"{folder}/{specs.macros.app_id}"
        return next((variables[n] for n in environment.RUN_DIR if n in variables), own)

    def machines(self, num_trainers: int) -> int:
        """Return the machines of trainers; one, where fewer are named than it has."""
        size = self.nproc_per_node
        if num_trainers == SETTINGS["trainers"].default:
            num_trainers = size
        if num_trainers % size:
            raise ConfigError(
                "trainers must be a multiple of nproc_per_node, which each machine has."
                f" Received: {num_trainers}, and {size}."
            )
        return num_trainers // size


def app(*roles: specs.Role) -> specs.AppDef:
    """Build what torchx starts; of a whole job the coordinator is the first role."""
    return specs.AppDef(name="persia", roles=list(roles))


def coordinator(job: JobSettings, **counts: int) -> specs.Role:
    """Build the first role of a job, with ``servers`` and the other counts."""
    for role, name in NUMBER_OF.items():
        if name in counts:
            number = counts[name]
            number = job.machines(number) if role == "trainer" else number
            counts[name] = job.num_replicas(role, number)
    if job.nproc_per_node > 1:
        counts["trainers"] *= job.nproc_per_node
        counts["nproc_per_node"] = job.nproc_per_node
    flags = format_flags(port=job.port, grace_s=job.grace_s or None, **counts)
    if job.restarts:
        timeout_s, restarts = job.recovery_timeout_s, job.restarts
        flags += format_flags(recovery_timeout_s=timeout_s, restarts=restarts)
    return job.role("coordinator", "job.coordinator", flags)


def embedding_servers(
    job: JobSettings,
    num_servers: int,
    eviction: str = "lru",
    *,
    checkpoint: str | None = None,
    capacity: int | None = None,
    increments_dir: str | None = None,
) -> specs.Role:
    """Build the role of the servers; with a checkpoint they serve it, for inference.

    Capacity and folder of increments, if given, are not those of ``global_config.yml``.
    """
    if eviction not in ("lru", "lfu"):
        raise ConfigError(f"eviction must be lru or lfu. Received: {eviction!r}.")
    if checkpoint is not None:
        _require_text("checkpoint", checkpoint)
        if job.restarts:
            job = replace(job, memory_dir=PRIVATE)  # they load the rows again
    imports = job.imported_modules()
    flags = format_flags(eviction=eviction, checkpoint=checkpoint, import_=imports)
    if capacity is not None and not 1 <= capacity <= MAX_ROWS:
        raise ConfigError(f"capacity must be in [1, {MAX_ROWS}]. Received: {capacity}.")
    flags += format_flags(capacity=capacity, increments_dir=increments_dir)
    flags += format_flags(optimizer_engine=job.engine_of_servers())
    may_continue = job.restarts or job.max_retries
    if may_continue and checkpoint is None and not job.host:
        flags += format_flags(run_dir=job.folder())
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
    **flags_of_each: object,
) -> specs.Role:
    """Build the role of the inference servers; the i-th listens on ``port + i``.

    ``flags_of_each`` are others of ``python -m persia_torchrec.serving``.
    """
    _require_text("http_host", host)
    if (device := flags_of_each.get("device", "auto")) not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda. Received: {device!r}.")
    num_predictors = job.num_replicas("predictor", num_predictors)
    if port < 1 or port + num_predictors - 1 > MAX_PORT:
        raise ConfigError(
            f"http_port must be in [1, {MAX_PORT}], with those that follow it for the "
            f"other predictors. Received: {port}, and {num_predictors} predictors."
        )
    flags = format_flags(checkpoint=checkpoint, host=host, port=port)
    flags += format_flags(workers_of_job=True, **flags_of_each)
    tokens = _TOKENS[: 1 if is_loopback(host) else 2]
    return job.role("predictor", "serving", flags, num_predictors, tokens=tokens)


def scripts(
    job: JobSettings,
    role: Literal["loader", "trainer"],
    script: str,
    num: int,
    *,
    gpus: int = 0,
) -> specs.Role:
    """Build the role of the data loaders, or of NN workers with ``gpus`` devices each.

    ``script`` may be ``-m MODULE``, and may hold arguments, as in a shell.
    """
    name = {"loader": "data_loader", "trainer": "nn_worker"}[role]
    _require_text(name, script)
    if gpus < 0:
        raise ConfigError(f"gpus must be >= 0. Received: {gpus}.")
    if role == "trainer":
        num = job.machines(num)
    words = split_words(name, "a file name and its arguments", script)
    split_module(words)
    if role == "loader" or (job.nproc_per_node == 1 and not job.restarts):
        return job.role(role, "job.script", [role, *words], num, gpus=gpus)
    restarts = None if job.restarts else 0
    flags = format_flags(nproc_per_node=job.nproc_per_node, max_restarts=restarts)
    return job.role(role, "job.torchrun", [*flags, "--", *words], num, gpus=gpus)


def _token_files(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the files of tokens, on this machine."""
    if tokens := [name for name in _ALL_TOKENS if name in given]:
        raise ConfigError(
            "env must hold no token, which would be on command lines. Received: "
            f"{tokens[0]}. Set {tokens[0]}_FILE to the path of a file, where roles run."
        )
    paths = {name: environment.token_file(name) for name in names}
    return {f"{n}_FILE": path.replace("$", "$$") for n, path in paths.items() if path}


def _agree(argument: str, value: T, default: T, setting: str, given: T | None) -> T:
    """Return what an argument, or a setting of the role in its place, says."""
    if given is None:
        return value
    if value not in (default, given):
        raise ConfigError(
            f"{argument} and {setting} must be the same, or one of them left out. "
            f"Received: {value} and {given}."
        )
    return given


def _require_port(name: str, port: int, least: int) -> None:
    if not least <= port <= MAX_PORT:
        raise ConfigError(f"{name} must be in [{least}, {MAX_PORT}]. Received: {port}.")


def _require_text(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{name} must name a file. Received: {value!r}.")
