"""``global_config.yml``: what the servers and embedding workers may use.

::

    embedding_worker_config: {forward_buffer_size: 1000}
    embedding_parameter_server_config: {capacity: 1000000}
    common_config:
      job_type: Infer         # serve a checkpoint, without a coordinator
      infer_config:
        servers: [10.0.0.1:8888, 10.0.0.2:8888]
        embedding_checkpoint: runs/7
"""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from persia_torchrec.embedding.limits import MAX_ROWS
from persia_torchrec.embedding.optimizer_engine import require_engine
from persia_torchrec.env import MAX_PORT, host_of, is_loopback, job_store
from persia_torchrec.errors import ConfigError
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.parsing.decoding import KeyPath
from persia_torchrec.parsing.yaml_file import parse_file, read_text

Positive = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]


class CheckpointingSettings(Struct, frozen=True, kw_only=True):
    """``common_config.checkpointing_config``."""

    num_workers: Positive = 4  # threads that write or read a checkpoint, in PERSIA


class InferSettings(Struct, frozen=True, kw_only=True):
    """``common_config.infer_config``."""

    # Addresses of the servers, as ``host:port``, in the order of their shards.
    servers: Annotated[tuple[str, ...], Meta(min_length=1)]
    # A checkpoint, or a folder with several, for its latest complete one.
    embedding_checkpoint: Text

    def __post_init__(self) -> None:
        for address in self.servers:
            host = r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\])"
            match = re.fullmatch(rf"(?:tcp://)?{host}:([0-9]{{1,5}})", address)
            if match is None or not 1 <= int(match[1]) <= MAX_PORT:
                raise ConfigError(
                    "servers must list addresses as host:port, with a port in "
                    f"[1, {MAX_PORT}]. Received: {address!r}."
                )
        if len(set(self.servers)) < len(self.servers):
            raise ConfigError(
                "servers must list each embedding server once. "
                f"Received: {list(self.servers)}."
            )

    def port_of(self, shard: int) -> int:
        """Return the port of a server's address."""
        return int(self.servers[shard].rpartition(":")[2])

    @property
    def listen_host(self) -> str:
        """Default of ``--host``: loopback if all servers are local, else any."""
        hosts = [host_of(server) for server in self.servers]
        if not all(map(is_loopback, hosts)):
            return "*"
        return "::1" if all(":" in host for host in hosts) else "127.0.0.1"


class CommonSettings(Struct, frozen=True, kw_only=True):
    """``common_config``: for all roles."""

    metrics: MetricsSettings = field(name="metrics_config", default=MetricsSettings())
    job_type: str = "Train"  # or Eval, the same without increments; or Infer
    infer: InferSettings | None = field(name="infer_config", default=None)
    checkpointing: CheckpointingSettings = field(
        name="checkpointing_config", default=CheckpointingSettings()
    )

    def __post_init__(self) -> None:
        job_type = self.job_type
        if job_type not in ("Train", "Eval", "Infer"):
            raise ConfigError(
                f"job_type must be one of Train, Eval, Infer. Received: {job_type!r}."
            )
        if (job_type == "Infer") != (self.infer is not None):
            does = "no" if self.infer is None else "an"
            raise ConfigError(
                "job_type: Infer must come with an infer_config, with servers and "
                "embedding_checkpoint, and infer_config must come with job_type: Infer."
                f" Received: job_type: {job_type}, and {does} infer_config."
            )


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """``embedding_worker_config``."""

    # Batches of one data loader that may wait for their lookup; then the loader waits.
    forward_buffer_size: Positive = 1000
    # After which a batch that no trainer asked for may be forgotten.
    buffered_data_expired_sec: Positive = 1000


class ParameterServerSettings(Struct, frozen=True, kw_only=True):
    """``embedding_parameter_server_config``."""

    # Rows per server; beyond that, the least recently used are evicted.
    capacity: Annotated[int, Meta(ge=1, le=MAX_ROWS)] = 1_000_000_000
    num_hashmap_internal_shards: Positive = 100  # locks of PERSIA's index
    # Write increments in training; with job_type: Infer, follow those of a training.
    enable_incremental_update: bool = False
    # Changes of rows after which an increment is begun before its time.
    incremental_buffer_size: Positive = 1_000_000
    incremental_dir: Text = "/workspace/incremental_dir/"  # of all servers, or a URL
    # Increments that may wait while they cannot be written.
    incremental_channel_capacity: Positive = 1000
    incremental_interval_seconds: Positive = 2  # from one increment to the next
    # Times the rows' bytes, after which servers write the rows there; 0: never.
    incremental_base_ratio: Annotated[float, Meta(ge=0)] = 10.0
    optimizer_engine: str = "compiled"  # what applies gradients

    def __post_init__(self) -> None:
        require_engine(self.optimizer_engine)


class GlobalSettings(Struct, frozen=True, kw_only=True, rename="{}_config".format):
    """The whole file."""

    common: CommonSettings = CommonSettings()
    embedding_worker: WorkerSettings = WorkerSettings()
    embedding_parameter_server: ParameterServerSettings = ParameterServerSettings()

    def server_arguments(self) -> dict[str, Any]:
        """Return what the file says of a server, as arguments of its settings."""
        server = self.embedding_parameter_server
        is_on = server.enable_incremental_update and self.common.job_type != "Eval"
        return {
            "capacity_rows": server.capacity,
            "optimizer_engine": server.optimizer_engine,
            "metrics": self.common.metrics,
            "increments_dir": server.incremental_dir if is_on else None,
            "increments_interval_s": float(server.incremental_interval_seconds),
            "increments_base_ratio": server.incremental_base_ratio,
            "increments_buffer_rows": server.incremental_buffer_size,
            "increments_queue": server.incremental_channel_capacity,
        }


def load_global_config(path: str | Path, *, warns: bool = True) -> GlobalSettings:
    """Read ``global_config.yml``, or raise ConfigError with file and key path.

    ``warns``: keys without effect are logged, as server 0 of a job does.
    """
    text, top = read_text(path), KeyPath(str(path))
    return parse_file(GlobalSettings, text, top, "global_config", warns=warns)


def inference_settings(path: str | Path | None) -> InferSettings | None:
    """Return ``infer_config``; None if the role is not for inference.

    In a job a file with a mistake is not an error yet: the role joins first and reads
    it again, so that the job learns why it fails.
    """
    if path is None:
        return None
    try:
        return load_global_config(path, warns=False).common.infer
    except ConfigError:
        if job_store() is not None:
            return None
        raise


def reject_inference(role: str, path: str | Path | None) -> None:
    """Raise if ``global_config.yml`` has ``job_type: Infer``.

    For a role, as ``"data loader"``, that only a training job has. It has no other use
    for the file, so that a missing one, or one with a mistake, is not an error.
    """
    infer = None
    with contextlib.suppress(ConfigError):
        infer = inference_settings(path)
    if infer is not None:
        raise ConfigError(
            f"A {role} must belong to a job that trains. Received: job_type: Infer in "
            f"{path}. Inference has embedding servers and embedding workers only; for "
            "training, give a global_config.yml with job_type: Train."
        )
