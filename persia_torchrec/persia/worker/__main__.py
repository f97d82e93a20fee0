r"""Run one embedding worker.

    python -m persia_torchrec.worker --index 0 --num-workers 1 \
        --embedding-config embedding_config.yml --global-config global_config.yml

It is a member of a job: the environment says where the job's address book is, from
which the worker learns the servers' addresses, and in which it registers its own.

With ``--servers``, or with ``job_type: Infer`` in ``global_config.yml``, which then
lists the servers, it does not belong to a job: it ends by SIGTERM. In each case it
prints ``ready ADDRESS``.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from persia_torchrec import env, timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding import embedding_config
from persia_torchrec.embedding.setting import import_settings
from persia_torchrec.errors import ConfigError
from persia_torchrec.jit.compiled import report_compilation
from persia_torchrec.job.lifetime import Lifetime, report_ready, run_service
from persia_torchrec.job.member import JobMember, tell_before_joining
from persia_torchrec.lookup.pooling import warm_up
from persia_torchrec.parsing.command_line import ImportFlags, parse_flags
from persia_torchrec.parsing.settings import declared
from persia_torchrec.persia import global_config
from persia_torchrec.persia.worker.process import (
    IdBuffer,
    WorkerProcess,
    make_lookup,
    pushing_metrics,
    ready_client,
    tell_slots,
)
from persia_torchrec.rpc.listener import keep_freed_memory
from persia_torchrec.rpc.listener_thread import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFlags(ImportFlags):
    """Run one embedding worker, in a job or without one."""

    index: int = field(default_factory=env.get_replica_index)
    """Which worker [REPLICA_INDEX]"""
    num_workers: int = field(default_factory=env.get_replica_size)
    """Of how many [REPLICA_SIZE]"""
    servers: tuple[str, ...] = ()
    """Serve lookups without a job: addresses of all embedding servers."""
    learn_tables: bool = False
    """The job's servers serve a checkpoint, and have the tables from it."""
    host: str | None = None
    """Address to listen on [in a job, the interface that leads to its coordinator]"""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    embedding_config: str | None = declared(
        "embedding_config", default_factory=env.embedding_config_path
    )
    global_config: str | None = declared(
        "global_config", default_factory=env.global_config_path
    )
    metrics_port: int | None = declared("metrics_port", default=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return the process's exit status."""
    keep_freed_memory()
    prog = "python -m persia_torchrec.worker"
    return run_service(
        "persia_torchrec.worker",
        lambda: _serve(parse_flags(WorkerFlags, argv, prog=prog)),
    )


def _serve(flags: WorkerFlags) -> None:
    env.set_metrics_port(flags.metrics_port)
    infer = global_config.inference_settings(flags.global_config)
    if flags.servers:
        with Lifetime() as life:
            life.serve_metrics("worker", flags.index, "", life.host)
            _run(flags, life, lambda: flags.servers)
    elif infer is not None:
        if flags.learn_tables:
            raise ConfigError(
                "--learn-tables cannot be combined with job_type: Infer, where"
                " they learn them anyway. Leave one of them out."
            )
        with Lifetime(infer.listen_host) as life:
            life.serve_metrics("worker", flags.index, "", life.host)
            servers = infer.servers
            _run(flags, life, lambda: servers)
    else:
        store = env.require_job_store(
            "An embedding worker",
            ", or pass --servers, or a global_config.yml with job_type: Infer",
        )
        index, size = flags.index, flags.num_workers
        try:
            _read(flags)
        except ConfigError as exc:
            tell_before_joining(exc)  # and in the block below, the job
        with JobMember("worker", index, size, store=store) as member:
            servers_of_job = partial(member.book.addresses, "server")
            _run(flags, member, servers_of_job, trains=not flags.learn_tables)


def _run(
    flags: WorkerFlags,
    life: JobMember | Lifetime,
    find_servers: Callable[[], Sequence[str]],
    *,
    trains: bool = False,
) -> None:
    """Serve until the end. In a job that trains, the trainers create the tables."""
    import_settings(flags.imports)
    slots_path, settings = _read(flags)
    schema = tell_slots(life.book, slots_path, warns=flags.index == 0)
    with report_compilation(life.report_compiling):
        warm_up()
    metrics = settings.common.metrics
    client: EmbeddingClient | None
    if trains:
        client = EmbeddingClient.connect(
            find_servers(),
            timeout_s=timeouts.REQUEST_S,
            greeting=life.greeting,
            recovery_s=life.book.recovery_s,
        )
    else:
        ending, awaits = threading.Event(), bool(flags.servers)
        servers, greeting = find_servers(), life.greeting
        life.call_at_end(ending.set)
        client = ready_client(
            servers, schema, ending, await_tables=awaits, greeting=greeting
        )
    if client is None:
        return
    buffer = IdBuffer(
        settings.embedding_worker.forward_buffer_size,
        settings.embedding_worker.buffered_data_expired_sec,
    )
    process = WorkerProcess(make_lookup(client, schema, metrics), buffer)
    life.progress = lambda: process.open.num_settled
    with pushing_metrics(process, flags.index, metrics):
        service = Service(
            f"embedding worker {flags.index}",
            process.answer,
            host=flags.host or life.host,
            port=flags.port,
            num_threads=8,
            greeting=life.greeting,
        )
        process.shared_memory = service.shared_memory
        life.register(service.address)
        report_ready(service.address)
        life.wait_for_end()
        service.close()
    client.close()


def _read(flags: WorkerFlags) -> tuple[Path, global_config.GlobalSettings]:
    """Check both files; return the path of the first, and what the second says."""
    slots_path, path = flags.embedding_config, flags.global_config
    if slots_path is None:
        raise ConfigError("--embedding-config, or PERSIA_EMBEDDING_CONFIG, is needed.")
    embedding_config.load_embedding_config(slots_path, warns=False)
    if path is None:
        return Path(slots_path), global_config.GlobalSettings()
    settings = global_config.load_global_config(path, warns=bool(flags.servers))
    return Path(slots_path), settings


if __name__ == "__main__":
    sys.exit(main())
