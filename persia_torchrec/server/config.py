"""Settings of an embedding server."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from persia_torchrec import env
from persia_torchrec.embedding.limits import MAX_ROWS
from persia_torchrec.embedding.optimizer_engine import require_engine
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import ConfigError
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.parsing.command_line import ImportFlags
from persia_torchrec.parsing.settings import declared
from persia_torchrec.rpc.slab_server import DEFAULT_MIB, MOST_MIB
from persia_torchrec.store.embedding_store import EmbeddingStore

_AT_LEAST_ONE = (*("max_request_ids", "increments_buffer_rows", "increments_queue"),)


def _of_increments(default: float, previous: str) -> Any:
    """Return the field of a setting that has no effect where none are written."""
    metadata = {"previous": (previous,), "needs": "increments_dir"}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(ImportFlags):
    """Settings of one embedding server."""

    shard: int = 0
    """Which shard [REPLICA_INDEX]"""
    num_shards: int = 1
    """Of how many [REPLICA_SIZE]"""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 takes a free one [0; for inference, that of ``servers``]"""
    capacity_rows: int = declared("capacity")
    eviction: Literal["lru", "lfu"] = declared("eviction")
    optimizer_engine: str = declared("optimizer_engine", default="compiled")
    memory_file: str | None = None
    """File in which a server that trains keeps its rows and all that belongs to them: a
    server that is started with the file of a killed one continues with them. It stays
    when the server ends. None: memory that ends with the process."""
    run_dir: str | None = declared(
        "run_dir",
        default=None,
        also="A server whose memory is lost restores its rows from the newest complete "
        "checkpoint in it, and from the increments behind that [that of the last "
        "checkpoint that the job dumped or loaded]",
    )
    checkpoint_root: tuple[str, ...] = field(default=(), metadata={"repeat": True})
    """Folder, or URL, in which clients may name checkpoints, as they may in those that
    other flags name; may be given several times [any, for a server that listens on
    loopback; else the working directory, and PERSIA_CKPT_DIR]"""
    checkpoint_protocols: tuple[str, ...] = field(default=(), metadata={"repeat": True})
    """Protocol of fsspec that URLs of clients and of files may have, beside the usual
    ones; may be given several times [file, s3, s3a, gs, gcs, abfs, az, oss, hdfs,
    webhdfs, http and https]"""
    recovery_s: float = 0.0
    """How long a lost trainer of joint steps may be away; 0: a second, or a few if the
    server is busy [where processes are started again, ``recovery_timeout_s``]"""
    max_request_ids: int = 16_777_216
    """Ids that one request may name, of all its tables. More are rejected."""
    increments_dir: str | None = declared("increments_dir", default=None)
    writer: str = ""
    """Id under which this server writes there, which all of a job have [the job's]"""
    take_over: bool = declared("take_over", default_factory=env.takes_over)
    increments_interval_s: float = _of_increments(2.0, "incremental_interval_s")
    """How often an increment begins, if something has changed. It is written before the
    next one: what is lost with the memory of a server changed within two intervals."""
    increments_base_ratio: float = _of_increments(10.0, "incremental_base_ratio")
    """How many times the bytes of the rows the increments since the last checkpoint may
    have: then the servers write their rows there, too, and older increments go. 0:
    never."""
    increments_buffer_rows: int = _of_increments(1_000_000, "incremental_buffer_rows")
    """Changed rows, each counted once, after which an increment begins earlier."""
    increments_queue: int = _of_increments(1000, "incremental_queue")
    """How many such buffers may wait while increments cannot be written."""
    shm_mib: int = DEFAULT_MIB
    """MiB of memory, at most, that clients of this host share with the server; only
    what is used takes memory. 0: all connect over TCP."""
    metrics: MetricsSettings = field(
        default_factory=MetricsSettings, metadata={"flag": None}
    )
    """Whether and how metrics are pushed, if the environment names a gateway."""
    checkpoint: str | None = declared(
        "checkpoint",
        default=None,
        also="The server loads it at its start, and serves it. None: it trains",
    )

    def __post_init__(self) -> None:
        require_engine(self.optimizer_engine)
        rules = {
            "shard": (0 <= self.shard < self.num_shards, f"in [0, {self.num_shards})"),
            "port": (0 <= self.port <= MAX_PORT, f"in [0, {MAX_PORT}]"),
            "capacity": (
                1 <= self.capacity_rows <= MAX_ROWS,
                f"in [1, {MAX_ROWS}]",
            ),
            "increments_interval_s": (self.increments_interval_s > 0, "> 0"),
            "shm_mib": (0 <= self.shm_mib <= MOST_MIB, f"in [0, {MOST_MIB}]"),
            "recovery_s": (self.recovery_s >= 0, ">= 0"),
            "increments_base_ratio": (self.increments_base_ratio >= 0, ">= 0"),
            **{name: (getattr(self, name) >= 1, ">= 1") for name in _AT_LEAST_ONE},
        }
        for name, (holds, must) in rules.items():
            if not holds:
                received = getattr(self, {"capacity": "capacity_rows"}.get(name, name))
                raise ConfigError(f"{name} must be {must}. Received: {received}.")
        if self.memory_file is not None and self.checkpoint is not None:
            raise ConfigError(
                "memory_file is for servers that train. Received: "
                f"{self.memory_file!r}, and the checkpoint {self.checkpoint!r} to "
                "serve, which every start loads. Leave one of them out."
            )

    def roots(self, address: str) -> tuple[str, ...] | None:
        """Return the folders in which clients may name paths; None: they may name any.

        ``address`` is that of the server's socket.
        """
        if not self.checkpoint_root and env.is_loopback(env.host_of(address)):
            return None
        usual = str(Path.cwd()), env.text("PERSIA_CKPT_DIR"), env.checkpoint_dir()
        named = self.run_dir, self.increments_dir
        return tuple(
            path for path in (*(self.checkpoint_root or usual), *named) if path
        )

    @property
    def own_urls(self) -> tuple[str, ...]:
        """URLs whose protocols the user has named, which received ones may have."""
        named = self.run_dir, self.increments_dir, self.checkpoint
        protocols = (f"{one}://" for one in self.checkpoint_protocols)
        return (*protocols, *self.checkpoint_root, *(one for one in named if one))

    def make_store(self) -> EmbeddingStore:
        """Return a store with these settings; without a memory file it is empty."""
        return EmbeddingStore(
            self.capacity_rows,
            eviction=self.eviction,
            optimizer_engine=self.optimizer_engine,
            memory_file=self.memory_file,
        )
