"""Embedding servers on this machine, for a first run, a notebook or a test.

Each server is a child process on the loopback interface. It ends when its cluster is
closed, and when the process that started it ends.
"""

import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Literal, Self

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.catalog import Manifest, find_checkpoint
from persia_torchrec.command_line import format_flags
from persia_torchrec.errors import ConfigError, ServerError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.store.index import MAX_ROWS

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_LINE_S = 0.5  # for a line that a server has written already


class EmbeddingCluster:
    """Server processes, and their addresses: a context manager. Use :meth:`local`.

    Attributes:
        addresses: one per server, in the order of their shards.
        processes: the server processes.

    Example:
        ``with EmbeddingCluster.local(num_servers=2) as cluster: cluster.addresses``
    """

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self.processes = processes
        self.addresses: list[str] = []

    @classmethod
    def local(
        cls,
        num_servers: int = 2,
        capacity: int = 1_000_000,
        *,
        eviction: Literal["lru", "lfu"] = "lru",
        optimizer_engine: Literal["auto", "fused", "fbgemm"] = "auto",
        incremental_dir: str | None = None,
        incremental_interval_s: float = 2.0,
        imports: Sequence[str] = (),
        start_timeout_s: float = 120.0,
    ) -> "EmbeddingCluster":
        """Start servers on this machine.

        Args:
            num_servers: number of processes, one per shard; at least 1.
            capacity: rows per server, of all tables together.
            eviction: which row of a full server is evicted: the least recently ("lru"),
                or the least frequently ("lfu") used.
            optimizer_engine: what applies gradients, see ``EmbeddingStore``.
            incremental_dir: a folder to which the servers write what changes, for
                :meth:`of_checkpoint`, and for a restart that loses little.
            incremental_interval_s: how often they do, in seconds.
            imports: modules that the servers import, which register optimizers,
                initializers or admissions of their own.
            start_timeout_s: seconds until all must be ready. The first start on a
                machine compiles the store's loops, which does not count.

        Raises:
            ConfigError: ``num_servers`` or ``capacity`` is out of its range.
            ServerError: a server ended, or was not ready in time.
        """
        if num_servers < 1 or capacity < 1:
            raise ConfigError(
                "num_servers and capacity must be >= 1. "
                f"Received: {num_servers} and {capacity}."
            )
        config = ServerConfig(
            num_shards=num_servers,
            capacity_rows=capacity,
            eviction=eviction,
            optimizer_engine=optimizer_engine,
            incremental_dir=incremental_dir,
            incremental_interval_s=incremental_interval_s,
            imports=tuple(imports),
        )
        return cls._start_all(config, start_timeout_s)

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: str,
        num_servers: int = 1,
        capacity: int | None = None,
        *,
        incremental_dir: str | None = None,
        imports: Sequence[str] = (),
        start_timeout_s: float = 600.0,
    ) -> "EmbeddingCluster":
        """Start servers on this machine that serve a checkpoint for inference.

        Nothing can be trained on them. They are ready when they have loaded it.

        Args:
            checkpoint: path, or URL, of a checkpoint's folder, or of a folder with
                several, for its latest.
            num_servers: number of processes, however many wrote the checkpoint.
            capacity: rows per server; by default as many as it can ever be given.
            incremental_dir: follow what a training writes there.
            imports: as for :meth:`local`, if the training needed them.
            start_timeout_s: seconds until all must be ready.

        Raises:
            CheckpointError: there is no complete checkpoint.
            ConfigError: ``num_servers`` or ``capacity`` is out of its range.
            ServerError: a server ended, or was not ready in time.
        """
        manifest = Manifest.read(find_checkpoint(checkpoint))
        if capacity is None:
            # Ids are spread by a hash: a server may get more than an equal fraction.
            most = None if incremental_dir is None else manifest.capacity_rows
            capacity = manifest.num_rows if most is None else most
        if num_servers < 1 or capacity < 0:
            raise ConfigError(
                "num_servers must be >= 1, and capacity >= 0. "
                f"Received: {num_servers} and {capacity}."
            )
        config = ServerConfig(
            num_shards=num_servers,
            capacity_rows=min(max(capacity, 1), MAX_ROWS),
            checkpoint=checkpoint,
            incremental_dir=incremental_dir,
            imports=tuple(imports),
        )
        return cls._start_all(config, start_timeout_s)

    @classmethod
    def _start_all(cls, config: ServerConfig, timeout_s: float) -> "EmbeddingCluster":
        shards = range(config.num_shards)
        cluster = cls([_start(replace(config, shard=shard)) for shard in shards])
        deadline = time.monotonic() + timeout_s
        try:
            for shard, process in enumerate(cluster.processes):
                address, deadline = _wait_until_ready(shard, process, deadline)
                cluster.addresses.append(address)
        except BaseException:
            cluster.close()
            raise
        return cluster

    def close(self) -> None:
        """End all servers; their rows are gone. May be called twice."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                logger.warning(
                    "server pid=%d does not terminate; killing it", process.pid
                )
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _start(config: ServerConfig) -> "subprocess.Popen[str]":
    settings = asdict(config)
    capacity, imports = settings.pop("capacity_rows"), list(settings.pop("imports"))
    del settings["metrics"]  # has no flag
    flags = format_flags(
        standalone=True, capacity=capacity, import_=imports, **settings
    )
    command = [sys.executable, "-m", "persia_torchrec.server", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _wait_until_ready(
    shard: int, process: "subprocess.Popen[str]", deadline: float
) -> tuple[str, float]:
    """Return the address of a ready server, and the deadline: compiling moves it."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stdout = process.stdout
    assert stdout is not None

    def read() -> None:
        line = "compiling"
        while line in ("compiling", "compiled"):
            line = stdout.readline().strip()
            lines.put(line)

    threading.Thread(target=read, name="server start", daemon=True).start()
    name, line = f"embedding server {shard}", "compiled"
    try:
        while line in ("compiling", "compiled"):
            begun = time.monotonic()
            if line == "compiled":
                line = lines.get(timeout=max(deadline - begun, _LINE_S))
            else:
                logger.info("%s compiles its loops, once for this machine", name)
                line = lines.get(timeout=timeouts.COMPILING_S)
                deadline += time.monotonic() - begun
    except queue.Empty:
        raise ServerError("not ready in time.", server=name) from None
    word, _, address = line.partition(" ")
    if word != "ready":
        code = process.wait(_STOP_TIMEOUT_S)
        raise ServerError(
            f"ended with exit status {code} instead of becoming ready; its error "
            "is above.",
            server=name,
        )
    return address, deadline
