"""``global_config.yml``: what the servers and embedding workers may use.

::

    common_config:
      job_type: Train
    embedding_worker_config:
      forward_buffer_size: 1000
    embedding_parameter_server_config:
      capacity: 1000000

With ``job_type: Infer`` the roles serve a checkpoint, and meet at no coordinator::

    common_config:
      job_type: Infer
      infer_config:
        servers: [10.0.0.1:8888, 10.0.0.2:8888]
        embedding_checkpoint: runs/7
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from persia_torchrec.config.differences import check_differences, with_present_keys
from persia_torchrec.config.yaml_file import Place, read_section, read_yaml
from persia_torchrec.errors import ConfigError

JOB_TYPES = ("Train", "Eval", "Infer")

_ADDRESS = re.compile(r"(?:tcp://)?([^\s:/\[\]]+):([0-9]{1,5})")
_MAX_PORT = 65_535
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """``common_config.metrics_config``."""

    enable_metrics: bool = True
    """Whether metrics are pushed, to the gateway that the environment names."""

    job_name: str = "persia_default_jobname"
    """The value of the label ``job``."""

    push_interval_seconds: int = 10
    """Seconds from one push to the next."""

    def __post_init__(self) -> None:
        if not self.job_name:
            raise ConfigError("job_name must not be empty. Received: ''.")
        _require_positive("push_interval_seconds", self.push_interval_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointingSettings:
    """``common_config.checkpointing_config``."""

    num_workers: int = 4
    """Threads that write or read a checkpoint."""

    def __post_init__(self) -> None:
        _require_positive("num_workers", self.num_workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferSettings:
    """``common_config.infer_config``."""

    servers: tuple[str, ...]
    """Addresses of the servers, as ``host:port``, in the order of their shards."""

    embedding_checkpoint: str
    """The folder that the servers start from: a checkpoint, or a folder with several,
    for its latest complete one."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError(
                "servers must list the address of every embedding server. Received: an "
                "empty list."
            )
        for address in self.servers:
            match = _ADDRESS.fullmatch(address)
            if match is None or not 1 <= int(match[2]) <= _MAX_PORT:
                raise ConfigError(
                    "servers must list addresses as host:port, with a port in "
                    f"[1, {_MAX_PORT}]. Received: {address!r}."
                )
        if len(set(self.servers)) < len(self.servers):
            raise ConfigError(
                "servers must list each embedding server once. "
                f"Received: {list(self.servers)}."
            )
        if not self.embedding_checkpoint:
            raise ConfigError(
                "embedding_checkpoint must name a folder. Received: nothing."
            )

    def port_of(self, shard: int) -> int:
        """Return the port of a server's address."""
        return int(self.servers[shard].rpartition(":")[2])

    @property
    def listen_host(self) -> str:
        """Where roles listen that are told nothing else.

        This machine only, if all servers have addresses of this machine only; else,
        like PERSIA's, on all interfaces.
        """
        hosts = [_ADDRESS.fullmatch(address) for address in self.servers]
        is_local = all(host and _LOOPBACK.fullmatch(host[1]) for host in hosts)
        return "127.0.0.1" if is_local else "0.0.0.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonSettings:
    """``common_config``: of all roles."""

    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    """See :class:`MetricsSettings`."""

    job_type: str = "Train"
    """``Train``; ``Eval``, which is the same, but that nothing is written
    incrementally; or ``Infer``: servers and workers serve a checkpoint."""

    infer: InferSettings | None = None
    """See :class:`InferSettings`; there if, and only if, the job is for inference."""

    checkpointing: CheckpointingSettings = field(default_factory=CheckpointingSettings)
    """See :class:`CheckpointingSettings`."""

    def __post_init__(self) -> None:
        if self.job_type not in JOB_TYPES:
            raise ConfigError(
                f"job_type must be one of {', '.join(JOB_TYPES)}. "
                f"Received: {self.job_type!r}."
            )
        if self.job_type == "Infer" and self.infer is None:
            raise ConfigError(
                "job_type: Infer must come with an infer_config, with servers and "
                "embedding_checkpoint. Received: none."
            )
        if self.job_type != "Infer" and self.infer is not None:
            raise ConfigError(
                "infer_config must come with job_type: Infer. "
                f"Received: job_type: {self.job_type}. Leave one of them out, or set "
                "job_type."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingWorkerSettings:
    """``embedding_worker_config``."""

    forward_buffer_size: int = 1000
    """Batches of one data loader that may wait for their lookup; a full buffer makes
    the loader wait."""

    buffered_data_expired_sec: int = 1000
    """After how many seconds a batch that nobody asked for may be forgotten."""

    def __post_init__(self) -> None:
        _require_positive("forward_buffer_size", self.forward_buffer_size)
        _require_positive("buffered_data_expired_sec", self.buffered_data_expired_sec)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingParameterServerSettings:
    """``embedding_parameter_server_config``."""

    capacity: int = 1_000_000_000
    """Rows that one server keeps; beyond, the least recently used leave."""

    num_hashmap_internal_shards: int = 100
    """Locks of PERSIA's index."""

    enable_incremental_update: bool = False
    """Whether servers write what changes in training; with ``job_type: Infer``,
    whether they follow that."""

    incremental_buffer_size: int = 1_000_000
    """Changed rows, each as often as it changes, after which an increment is begun
    before its time."""

    incremental_dir: str = "/workspace/incremental_dir/"
    """Where the increments are: a folder that all servers see, or a URL."""

    incremental_channel_capacity: int = 1000
    """How many times that may wait while increments cannot be written."""

    incremental_interval_seconds: int = 2
    """How often an increment is begun."""

    def __post_init__(self) -> None:
        for name in (
            "capacity",
            "num_hashmap_internal_shards",
            "incremental_buffer_size",
            "incremental_channel_capacity",
            "incremental_interval_seconds",
        ):
            _require_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalSettings:
    """The whole file."""

    common: CommonSettings = field(default_factory=CommonSettings)
    """Of all roles."""

    embedding_worker: EmbeddingWorkerSettings = field(
        default_factory=EmbeddingWorkerSettings
    )
    """Of the embedding workers."""

    embedding_parameter_server: EmbeddingParameterServerSettings = field(
        default_factory=EmbeddingParameterServerSettings
    )
    """Of the servers."""


def load_global_config(path: str | Path, *, warns: bool = True) -> GlobalSettings:
    """Read ``global_config.yml``; an empty file gives the defaults.

    Args:
        path: of the file.
        warns: whether keys that do not do what they say are logged, see
            ``differences.py``. False for a role beside another that logs them: in a
            job and in inference, server 0 does.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is of
            another type or out of its range. The message names the file and the key
            path.
    """
    place = Place(Path(path))
    content = with_present_keys(
        place.path, read_yaml(path), is_embedding_config=False, warns=warns
    )
    settings = read_section(GlobalSettings, content, place)
    check_differences(place.path, content, warns=warns)
    return settings


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be >= 1. Received: {value}.")
