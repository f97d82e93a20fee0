"""Embedding servers on this machine, for a first run, a notebook or a test.

Each server is a child process on the loopback interface. It ends when its cluster is
closed, and when the process that started it ends. Of the signals to all processes it
obeys SIGKILL alone: what this process answers at its end may need the servers. With
``restarts``, this process keeps the listening socket and the memory of each: it starts
a killed one again with both.
"""

import contextlib
import logging
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, Self

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint.catalog import Manifest, find_checkpoint
from persia_torchrec.checkpoint.writer import name_of_process
from persia_torchrec.embedding.limits import MAX_ROWS
from persia_torchrec.embedding.optimizer_engine import OptimizerEngine
from persia_torchrec.embedding.setting import non_defaults
from persia_torchrec.errors import ConfigError, ServerError
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.supervisor import Restarts
from persia_torchrec.job.survivable_memory import AUTO, open_memory
from persia_torchrec.parsing.command_line import format_flags
from persia_torchrec.parsing.settings import renamed
from persia_torchrec.routing.route import warm_up
from persia_torchrec.rpc.addresses import open_listening
from persia_torchrec.server.config import ServerConfig

logger = logging.getLogger(__name__)

_FLAG_OF = {"capacity_rows": "capacity", "imports": "import_"}


class Kept(NamedTuple):
    """Descriptors of what outlives a server: its listening socket and its memory."""

    listening: int
    memory: int


@dataclass
class _Servers:
    """What a cluster and the threads that start its servers again share."""

    processes: list["subprocess.Popen[str]"]
    kept: list[Kept] = field(default_factory=list)
    keepers: list[threading.Thread] = field(default_factory=list)
    identities: dict[int, ProcessIdentity] = field(default_factory=dict)  # by number
    # A finalizer may end them in the midst of what a keeper does.
    lock: threading.RLock = field(default_factory=threading.RLock)
    closing: threading.Event = field(default_factory=threading.Event)  # set under lock

    def begin(self, shard: int, process: "subprocess.Popen[str]") -> None:
        """Have a process be the server of a shard."""
        self.processes[shard : shard + 1] = [process]
        self.identities[process.pid] = ProcessIdentity.of(process.pid)

    def kill(self, process: "subprocess.Popen[str]", why: str) -> None:
        """Kill a server, and no later process of its number."""
        logger.warning("server pid=%d %s; killing it", process.pid, why)
        self.identities[process.pid].kill()


class EmbeddingCluster:
    """Server processes, and their addresses: a context manager. Use :meth:`local`.

    They end with the block, with :meth:`close`, or when nothing refers to the cluster.

    Attributes:
        addresses: one per server, in the order of their shards.
        processes: the server processes, those that run now.
        recovery_s: seconds for which a server may be away, to be given to
            ``EmbeddingClient.connect``.
        kept: what outlives each server, if they are started again.

    Example:
        ``with EmbeddingCluster.local(servers=2) as cluster: cluster.addresses``
    """

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        known = {one.pid: ProcessIdentity.of(one.pid) for one in processes}
        self._servers = _Servers(processes, identities=known)
        self.processes, self.kept = processes, self._servers.kept
        self.addresses: list[str] = []
        self.recovery_s = 0.0
        # A notebook's cell that runs again drops what it made before. At exit the
        # servers end by themselves.
        self._end = weakref.finalize(self, _end_dropped, os.getpid(), self._servers)
        self._end.atexit = False

    @classmethod
    @renamed(
        num_servers="servers",
        incremental_dir="increments_dir",
        incremental_interval_s="increments_interval_s",
        incremental_base_ratio="increments_base_ratio",
    )
    def local(
        cls,
        servers: int = 2,
        capacity: int = 1_000_000,
        *,
        eviction: Literal["lru", "lfu"] = "lru",
        optimizer_engine: OptimizerEngine = "compiled",
        increments_dir: str | None = None,
        increments_interval_s: float = 2.0,
        increments_base_ratio: float = 10.0,
        imports: Sequence[str] = (),
        start_timeout_s: float = 120.0,
        restarts: bool = False,
    ) -> "EmbeddingCluster":
        """Start servers on this machine.

        Args:
            servers: number of processes, one per shard; at least 1.
            capacity: rows per server, of all tables together.
            eviction: which row of a full server is evicted: the least recently ("lru"),
                or the least frequently ("lfu") used.
            optimizer_engine: what applies gradients: loops that are "compiled", or the
                CPU kernels of "fbgemm". fbgemm has SGD and Adagrad without decay there;
                another table is an error.
            increments_dir: a folder to which the servers write what changes, for
                :meth:`of_checkpoint`, and for a restart that loses little.
            increments_interval_s: how often they do, in seconds. What is lost with the
                memory of a server changed within two of these.
            increments_base_ratio: how many times the bytes of the rows the increments
                since the last checkpoint may have: then the servers write their rows
                there, and older increments go. 0: never.
            imports: modules that the servers import, which register optimizers,
                initializers or admissions of their own.
            start_timeout_s: seconds until all must be ready. The first start on a
                machine compiles the store's loops, which does not count.
            restarts: start a server that was killed again, with its rows. A client
                that connects with the cluster's ``recovery_s`` continues.

        Raises:
            ConfigError: ``servers`` or ``capacity`` is out of its range.
            ServerError: a server ended, or was not ready in time.
        """
        if servers < 1 or capacity < 1:
            raise ConfigError(
                "servers and capacity must be >= 1. "
                f"Received: {servers} and {capacity}."
            )
        config = ServerConfig(
            num_shards=servers,
            capacity_rows=capacity,
            eviction=eviction,
            optimizer_engine=optimizer_engine,
            increments_dir=increments_dir,
            increments_interval_s=increments_interval_s,
            increments_base_ratio=increments_base_ratio,
            writer=f"{name_of_process(os.getpid())}, cluster {secrets.token_hex(4)}",
            imports=tuple(imports),
            recovery_s=timeouts.CLUSTER_RECOVERY_S if restarts else 0.0,
        )
        return cls._start_all(config, start_timeout_s, restarts=restarts)

    @classmethod
    @renamed(num_servers="servers", incremental_dir="increments_dir")
    def of_checkpoint(
        cls,
        checkpoint: str,
        servers: int = 1,
        capacity: int | None = None,
        *,
        increments_dir: str | None = None,
        imports: Sequence[str] = (),
        start_timeout_s: float = 600.0,
        restarts: bool = False,
    ) -> "EmbeddingCluster":
        """Start servers on this machine that serve a checkpoint for inference.

        Nothing can be trained on them. They are ready when they have loaded it.

        Args:
            checkpoint: path, or URL, of a checkpoint's folder, or of a folder with
                several, for its latest.
            servers: number of processes, however many wrote the checkpoint.
            capacity: rows per server; by default as many as it can ever be given.
            increments_dir: follow what a training writes there.
            imports: as for :meth:`local`, if the training needed them.
            start_timeout_s: seconds until all must be ready.
            restarts: start a server that was killed again, which loads the same
                checkpoint again, or follows.

        Raises:
            CheckpointError: there is no complete checkpoint.
            ConfigError: ``servers`` or ``capacity`` is out of its range.
            ServerError: a server ended, or was not ready in time.
        """
        folder = find_checkpoint(checkpoint)
        manifest = Manifest.read(folder)
        if capacity is None:
            # Ids are spread by a hash: a server may get more than an equal fraction.
            most = None if increments_dir is None else manifest.capacity_rows
            capacity = manifest.num_rows if most is None else most
        if servers < 1 or capacity < 0:
            raise ConfigError(
                "servers must be >= 1, and capacity >= 0. "
                f"Received: {servers} and {capacity}."
            )
        config = ServerConfig(
            num_shards=servers,
            capacity_rows=min(max(capacity, 1), MAX_ROWS),
            checkpoint=checkpoint if increments_dir is not None else folder.url,
            increments_dir=increments_dir,
            imports=tuple(imports),
        )
        return cls._start_all(config, start_timeout_s, restarts=restarts)

    @classmethod
    def _start_all(
        cls, config: ServerConfig, timeout_s: float, *, restarts: bool = False
    ) -> "EmbeddingCluster":
        configs = [replace(config, shard=n) for n in range(config.num_shards)]
        env.draw_token()
        cluster = cls([])
        deadline = time.monotonic() + timeout_s
        try:
            for one in configs:
                if restarts:
                    cluster.kept.append(_keep(one.shard))
                kept = cluster.kept[-1] if restarts else None
                cluster._servers.begin(one.shard, _start(one, kept))
            for shard, process in enumerate(cluster.processes):
                address, deadline = _wait_until_ready(shard, process, deadline)
                cluster.addresses.append(address)
        except BaseException:
            cluster.close()
            raise
        if restarts:
            cluster.keep_running(configs)
        return cluster

    def keep_running(self, configs: Sequence[ServerConfig]) -> None:
        """Have each server started again when it has been killed, with what is kept."""
        self.recovery_s = timeouts.CLUSTER_RECOVERY_S
        for config in configs:
            again, name = (
                partial(_start_again, self._servers, config),
                "server restarts",
            )
            keeper = threading.Thread(target=again, name=name, daemon=True)
            self._servers.keepers.append(keeper)
            keeper.start()

    def close(self) -> None:
        """End all servers; their rows are gone. May be called twice."""
        self._end.detach()
        _end(self._servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _start_again(servers: _Servers, config: ServerConfig) -> None:
    """Wait for the ends of a server, until one is in order or too many are not."""
    shard, restarts, is_ready = config.shard, Restarts(), True
    while True:
        process = servers.processes[shard]
        status = process.wait()
        _close_output(process)
        if status == 0 or servers.closing.is_set():
            return
        delay_s = restarts.delay_s(has_joined=is_ready)
        if delay_s is None:
            logger.error("giving up on embedding server %d; see its log", shard)
            return
        if servers.closing.wait(delay_s):
            return
        logger.warning(
            "embedding server %d ended with exit status %d; starting it again",
            shard,
            status,
        )
        with servers.lock:
            if servers.closing.is_set():
                return
            process = _start(config, servers.kept[shard])
            servers.begin(shard, process)
        deadline, is_ready = time.monotonic() + timeouts.CLUSTER_RESTART_S, False
        try:
            _wait_until_ready(shard, process, deadline)
            is_ready = True
        except ServerError:
            servers.kill(process, "is not ready in time")


def _end_dropped(pid: int, servers: _Servers) -> None:
    if pid != os.getpid():  # they are not those of a forked child
        return
    logger.warning(
        "stopping the embedding servers pid=%s: their cluster was garbage-collected. "
        "Keep it in a variable, or use it as a context manager.",
        [process.pid for process in servers.processes],
    )
    _end(servers)


def _end(servers: _Servers) -> None:
    with servers.lock:  # none is started meanwhile, or after it
        servers.closing.set()
    for process in servers.processes:
        if process.poll() is None and process.stdin is not None:
            with contextlib.suppress(OSError):  # it has just ended
                os.write(process.stdin.fileno(), b"\n")
    deadline = time.monotonic() + timeouts.CLUSTER_STOP_S
    for process in servers.processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            servers.kill(process, "does not terminate")
            process.wait()
    for keeper in servers.keepers:
        if keeper is not threading.current_thread():
            keeper.join(timeouts.CLUSTER_STOP_S)
    for process in servers.processes:
        _close_output(process)
    while servers.kept:
        for descriptor in servers.kept.pop():
            os.close(descriptor)


def _close_output(process: "subprocess.Popen[str]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ended(code: int) -> str:
    """Return how a server has ended, and where to look for the cause."""
    if code >= 0:
        how = f"exit status {code} instead of becoming ready; its error is above."
        return f"ended with {how}"
    how = f"was killed by {signal.Signals(-code).name} before it was ready."
    if code == -signal.SIGKILL:
        how += " If memory was short, the log of the kernel (dmesg) says so."
    return how


def _keep(shard: int) -> Kept:
    """Open what a server is handed at each of its starts."""
    listening = open_listening().detach()
    try:
        return Kept(listening, open_memory(AUTO))
    except OSError as exc:
        os.close(listening)
        raise ServerError(
            f"The operating system must have memory files. Received: {exc}.",
            server=f"embedding server {shard}",
        ) from exc


def _start(config: ServerConfig, kept: Kept | None = None) -> "subprocess.Popen[str]":
    settings = non_defaults(config)
    settings.pop("metrics", None)  # has no flag
    given = {_FLAG_OF.get(name, name): value for name, value in settings.items()}
    flags = format_flags(standalone=True, **given)
    command = [sys.executable, "-m", "persia_torchrec.server", *flags]
    variables = {"PERSIA_PARENT_FD": "0"}
    if kept is not None:
        variables["PERSIA_LISTEN_FD"] = str(kept.listening)
        variables["PERSIA_MEMORY_FD"] = str(kept.memory)
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=kept or (),
        env=env.of_child(variables),
    )


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
                most_s = max(deadline - begun, timeouts.CLUSTER_LINE_S)
                with timeouts.saying(logger, lambda: f"waiting for {name} to start"):
                    line = lines.get(timeout=most_s)
            else:
                # A warning, which a script that configures no logging shows.
                logger.warning(
                    "%s compiles its loops, once for this machine: a minute", name
                )
                warm_up()  # meanwhile, for clients of this process
                line = lines.get(timeout=timeouts.COMPILING_S)
                deadline += time.monotonic() - begun
    except queue.Empty:
        raise ServerError("not ready in time.", server=name) from None
    word, _, address = line.partition(" ")
    if word != "ready":
        raise ServerError(_ended(process.wait(timeouts.CLUSTER_STOP_S)), server=name)
    return address, deadline
