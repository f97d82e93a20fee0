"""Run one embedding parameter server.

    python -m persia_torchrec.server --shard 0 --num-shards 2

In a job the server registers in its address book, and ends with the job. If it had
registered before, and its memory is lost, it restores what was written of its rows; so
it does if ``--run-dir`` has a checkpoint, as where the whole job is started again.
With ``--standalone`` it belongs to the process that started it, prints ``ready
ADDRESS``, and ends with that process or by SIGTERM; one of an ``EmbeddingCluster`` not
by a signal.

With ``job_type: Infer`` in ``global_config.yml`` it does not belong to a job. It loads
its shard of the checkpoint that the file names, however many servers wrote it, and
answers lookups until SIGTERM: see ``follower.py``.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from persia_torchrec import env, timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.checkpoint.writer import name_of_process
from persia_torchrec.embedding.setting import import_settings, non_defaults
from persia_torchrec.errors import ConfigError
from persia_torchrec.jit.compiled import report_compilation, share
from persia_torchrec.job.lifetime import (
    ChildLifetime,
    Lifetime,
    reject_until_ready,
    report_ready,
    run_service,
)
from persia_torchrec.job.member import JobMember, tell_before_joining
from persia_torchrec.job.process_identity import UPDATES_OF, memory_bytes
from persia_torchrec.job.registry import SERVED_CHECKPOINT, AddressBook
from persia_torchrec.job.requests import MAX_FIGURE_NAME
from persia_torchrec.parsing.command_line import given_flags
from persia_torchrec.parsing.settings import declared, require_used
from persia_torchrec.persia.global_config import (
    InferSettings,
    inference_settings,
    load_global_config,
)
from persia_torchrec.rpc import float_codec
from persia_torchrec.rpc.listener import keep_freed_memory
from persia_torchrec.server.checkpoint_service import KnownUpdates
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.store.warm_up import warm_up

logger = logging.getLogger("persia_torchrec.server")

_ASK_S = 0.2  # that a heartbeat waits for counters; else they are the previous ones
_MAX_TABLES = 100  # of which a heartbeat tells, those with the most updates


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFlags(ServerConfig):
    """Run one embedding parameter server: one shard of all tables."""

    host: str = ""
    """Address to listen on [in a job, the interface that leads to its coordinator]"""
    standalone: bool = False
    """Serve without a job, until the process that started this one is gone."""
    global_config: Path | None = declared("global_config", default=None)
    metrics_port: int | None = declared("metrics_port", default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; return the process's exit status."""
    flags = given_flags(ServerFlags, argv, prog="python -m persia_torchrec.server")
    keep_freed_memory()
    is_child = flags.pop("standalone", False)
    level = "WARNING" if is_child else "INFO"
    return run_service(logger.name, lambda: _serve(flags, is_child=is_child), level)


def _serve(flags: dict[str, Any], *, is_child: bool) -> None:
    path = flags.pop("global_config", None)
    metrics_port = flags.pop("metrics_port", None)
    env.set_metrics_port(metrics_port)
    shard = flags.setdefault("shard", env.get_replica_index())
    num_shards = flags.setdefault("num_shards", env.get_replica_size())
    if is_child:  # its settings are not of the environment, but of its parent
        with ChildLifetime() as life:
            if metrics_port:
                life.serve_metrics("server", shard, "", life.host)
            _run(_config(flags, path, life.host), life)
        return
    path = path or env.global_config_path()
    infer = inference_settings(path)
    if infer is not None:
        with Lifetime(infer.listen_host) as life:
            life.serve_metrics("server", shard, "", life.host)
            _run(_config(flags, path, life.host, infer), life)
        return
    store = env.require_job_store(
        "An embedding server",
        ", or pass --standalone, or a global_config.yml with job_type: Infer",
    )
    try:
        _config(flags, path, "")
    except ConfigError as exc:
        tell_before_joining(exc)  # and in the block below, so that the job learns of it
    with JobMember("server", shard, num_shards, store=store) as member:
        flags.setdefault("recovery_s", member.book.recovery_s)
        config = _config(flags, path, member.host)
        if config.checkpoint is not None and config.increments_dir is None:
            served = choose_served(member.book, config.checkpoint)
            config = replace(config, checkpoint=served)
        _run(config, member)


def choose_served(book: AddressBook, path: str) -> str:
    """Return the checkpoint that all servers of a job serve, whenever they start.

    It is the latest one when the first of them has started.
    """
    served = book.claim_note(SERVED_CHECKPOINT, catalog.find_checkpoint(path).url)
    return require_received(served, [path])


def _run(config: ServerConfig, life: JobMember | Lifetime) -> None:
    if config.shard == 0:
        given = (f"{name}={value!r}" for name, value in non_defaults(config).items())
        settings = ", ".join(given) or "none"
        logger.info("settings that are not the default: %s", settings)
    logger.debug("settings %s", config)
    import_settings(config.imports)
    if not config.writer and config.checkpoint is None:
        job_id = life.greeting.job_id
        config = replace(config, writer=job_id or name_of_process(os.getppid()))
    server = EmbeddingServer(config, life.greeting, fd=env.listen_fd())
    if server.has_rows:  # what they need is loaded, and the process before had it all
        server.when_idle = partial(_load_all, config)
    else:
        with (
            reject_until_ready(server.listener),
            report_compilation(life.report_compiling),
        ):
            _load_all(config)
            _restore(server, life)
    life.progress = _teller(server, life)
    life.figures = _Figures(server)
    life.is_paused = lambda: server.shard.checkpoints.is_loading
    life.progress()
    for name, value in life.notes.items():  # a successor counts from here on
        life.book.tell(name, value)
    life.call_at_end(server.stop)
    life.register(server.address)
    life.become_ready(server.why_not_ready)
    server.serve_and_push(report_ready)


def _load_all(config: ServerConfig) -> None:
    """Load all compiled loops; compile those that never were, with other servers."""
    in_file = config.memory_file is not None
    share(
        {
            "store": partial(warm_up, in_file=in_file),
            "floats": float_codec.warm_up,
        }
    )


def _restore(server: EmbeddingServer, life: JobMember | Lifetime) -> None:
    """Restore the rows of a server that had run before, if they were lost."""
    config = server.config
    address = life.book.address("server", config.shard)
    run, known = life.book.note("checkpoint_dir"), None
    if told := life.book.note(f"updates/server/{config.shard}"):
        num, mean = told.split()
        known = KnownUpdates(int(num), float(mean))
    has_run = env.num_restarts() > 0 or address is not None
    has_run |= server.shard.store.rows.was_loading
    # The whole job may have been started again.
    if has_run or _has_checkpoint(config.run_dir):
        server.restore(config.run_dir or run, known, begins=not has_run)


def _has_checkpoint(path: str | None) -> bool:
    return path is not None and any(catalog.complete_checkpoints(Folder(path)))


def _teller(server: EmbeddingServer, life: JobMember | Lifetime) -> Callable[[], int]:
    """Return what leaves in the job, with each heartbeat, what a successor needs."""

    def tell() -> int:
        shard, notes = server.shard, life.notes
        updates, (num, num_rows) = shard.store.num_updates, shard.updates.updated
        mean = num_rows / max(num, 1)
        notes[f"updates/server/{server.config.shard}"] = f"{updates} {mean:.9g}"
        if run := shard.checkpoints.run:
            notes["checkpoint_dir"] = run
        return updates

    return tell


class _Figures:
    """The counters of a server, for heartbeats; the serving thread is asked seldom.

    They stay as they are while it does not answer.
    """

    def __init__(self, server: EmbeddingServer) -> None:
        self._snapshots, self._store = server.snapshots, server.shard.store
        self._latest = dict[str, float]()

    def __call__(self) -> Mapping[str, float]:
        last_s = self._latest.get("at_s", -math.inf)
        if time.monotonic() < last_s + timeouts.STATUS_S:
            return self._latest
        counters = self._snapshots.ask(_ASK_S)
        given_s = self._snapshots.given_s
        if counters is not None and given_s > last_s:
            own = {"memory_bytes": memory_bytes(), "at_s": given_s}
            self._latest = {**counters, **own, **self._updates()}
        return self._latest

    def _updates(self) -> dict[str, float]:
        """Return the updates of the busiest tables."""
        tables = [one for one in self._store.present if not one.is_part]
        tables.sort(key=lambda one: one.num_updates, reverse=True)
        names = [(one, f"{UPDATES_OF}{one.spec.name}") for one in tables]
        fit = [both for both in names if len(both[1]) <= MAX_FIGURE_NAME]
        return {name: one.num_updates for one, name in fit[:_MAX_TABLES]}


def _config(
    flags: dict[str, Any],
    path: str | Path | None,
    host: str,
    infer: InferSettings | None = None,
) -> ServerConfig:
    """Return the settings: flags first, then the file, then defaults."""
    config = ServerConfig(shard=flags["shard"], num_shards=flags["num_shards"])
    if path is not None:
        settings = load_global_config(path, warns=config.shard == 0)
        config = replace(config, **settings.server_arguments())
    if infer is None:
        require_used(replace(config, **flags), flags)
        fd = env.memory_fd() if flags.get("checkpoint") is None else None
        kept = {} if fd is None else {"memory_file": f"/proc/self/fd/{fd}"}
        return replace(config, **{"host": host, **kept, **flags})
    if flags.get("checkpoint") is not None:
        raise ConfigError(
            "--checkpoint cannot be combined with job_type: Infer, whose"
            " embedding_checkpoint says what to serve. Leave one of them out."
        )
    if len(infer.servers) != config.num_shards:
        raise ConfigError(
            "infer_config.servers must list all embedding servers, in the order of "
            f"their shards. Received: {len(infer.servers)} addresses, and "
            f"{config.num_shards} servers (--num-shards, or REPLICA_SIZE)."
        )
    served = {"port": infer.port_of(config.shard), "host": host, **flags}
    return replace(config, **{**served, "checkpoint": infer.embedding_checkpoint})


if __name__ == "__main__":
    sys.exit(main())
