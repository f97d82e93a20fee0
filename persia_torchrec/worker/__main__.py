r"""Run one embedding worker.

    python -m persia_torchrec.worker --index 0 --num-workers 1 \
        --embedding-config embedding_config.yml --global-config global_config.yml

It is a member of a job: the environment says where the job's address book is, from
which the worker learns the servers' addresses, and in which it registers its own.

With ``--servers``, or where ``global_config.yml`` says ``job_type: Infer`` and names
the servers, it belongs to no job: it prints ``ready ADDRESS``, and ends by SIGTERM.
"""

import argparse
import logging
import sys
import threading
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.compiled import telling_of_compilation
from persia_torchrec.config import (
    EmbeddingSchema,
    GlobalSettings,
    MetricsSettings,
    inference_settings,
    load_embedding_config,
    load_global_config,
)
from persia_torchrec.errors import ConfigError, JobError, PersiaError
from persia_torchrec.wire.membership import JobMember
from persia_torchrec.wire.memory import keep_freed_memory
from persia_torchrec.wire.ports import local_address
from persia_torchrec.wire.service import Service
from persia_torchrec.wire.signals import end_by_signals
from persia_torchrec.worker.buffers import buffer_of
from persia_torchrec.worker.measured import make_lookup, pushing_metrics
from persia_torchrec.worker.process import WorkerProcess
from persia_torchrec.worker.slots import SlotsLookup
from persia_torchrec.worker.slots_of_job import tell_slots
from persia_torchrec.worker.standalone import ready_lookup, serve_standalone
from persia_torchrec.worker.warm_up import warm_up

logger = logging.getLogger("persia_torchrec.worker")

_DISCOVERY_TIMEOUT_S = 180.0
_REQUEST_TIMEOUT_S = 60.0


def main() -> int:
    """Run the worker; return the process's exit status."""
    end_by_signals()
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=env.log_level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    keep_freed_memory()
    try:
        if arguments.servers is not None:
            _serve_beside_a_job(arguments)
        elif (settings := _inference_settings(arguments)) is not None:
            _serve_inference(arguments, settings)
        else:
            _serve(arguments)
    except PersiaError as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.worker",
        description="Run one embedding worker, of a job or beside none.",
    )
    add = parser.add_argument
    add("--index", type=int, default=None, help="which worker [REPLICA_INDEX]")
    add("--num-workers", type=int, default=None, help="of how many [REPLICA_SIZE]")
    add(
        "--servers",
        nargs="+",
        default=None,
        help="serve lookups beside no job: addresses of all embedding servers",
    )
    add(
        "--learn-tables",
        action="store_true",
        help="the job's servers serve a checkpoint, and have the tables from it",
    )
    add(
        "--host",
        default=None,
        help="address to listen on [the way to the job's store; 127.0.0.1 beside one]",
    )
    add("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    add("--embedding-config", type=Path, default=None, help="embedding_config.yml")
    add("--global-config", type=Path, default=None, help="global_config.yml")
    return parser


def _serve_beside_a_job(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments, warns=True)
    serve_standalone(
        arguments.servers,
        load_embedding_config(_embedding_config(arguments)),
        settings,
        host=arguments.host or "127.0.0.1",
        port=arguments.port,
    )


def _serve_inference(arguments: argparse.Namespace, settings: GlobalSettings) -> None:
    infer = settings.common.infer
    assert infer is not None
    if arguments.learn_tables:
        raise ConfigError(
            "--learn-tables is for workers of a job. Received: it, and job_type: "
            "Infer, where they learn them anyway. Leave one of them out."
        )
    serve_standalone(
        infer.servers,
        load_embedding_config(_embedding_config(arguments)),
        settings,
        host=arguments.host or infer.listen_host,
        port=arguments.port,
        await_tables=False,
    )


def _serve(arguments: argparse.Namespace) -> None:
    store = env.job_store()
    if store is None:
        raise ConfigError(
            "An embedding worker must know its job: PERSIA_STORE_PORT is not set. "
            "Start it through torchx (see components/), or pass --servers to serve "
            "lookups beside a job, or a global_config.yml with job_type: Infer."
        )
    index = env.get_replica_index() if arguments.index is None else arguments.index
    size = arguments.num_workers or env.get_replica_size()
    # Joined before anything can go wrong, so that the others learn of it.
    with JobMember.join("worker", index, size, store=store) as member:
        path = _embedding_config(arguments)
        schema = tell_slots(member.book, path, warns=index == 0)
        settings = _settings(arguments, warns=False)
        with telling_of_compilation(member.tell_compiling):
            warm_up()
        metrics = settings.common.metrics
        learns = arguments.learn_tables
        client, lookup = _lookup(member, schema, metrics, learns=learns)
        process = WorkerProcess(lookup, buffer_of(settings.embedding_worker))
        with pushing_metrics(process, lookup, index, metrics):
            service = Service(
                "embedding worker",
                process.answer,
                host=arguments.host or local_address(store.host),
                port=arguments.port,
                num_threads=8,
                greeting=member.book.greeting,
            )
            member.book.register("worker", index, size, service.address)
            sys.stdout.write(f"ready {service.address}\n")
            sys.stdout.flush()
            member.wait_for_end()
            service.close()
        client.close()


def _lookup(
    member: JobMember,
    schema: EmbeddingSchema,
    metrics: MetricsSettings,
    *,
    learns: bool,
) -> tuple[EmbeddingClient, SlotsLookup]:
    """Connect to the job's servers; their tables come from trainers or are learnt."""
    servers = member.book.addresses("server", timeout_s=_DISCOVERY_TIMEOUT_S)
    if not learns:
        client = EmbeddingClient.connect(
            servers, timeout_s=_REQUEST_TIMEOUT_S, greeting=member.book.greeting
        )
        return client, make_lookup(client, schema, metrics)
    ending = threading.Event()
    member.call_at_end(ending.set)
    ready = ready_lookup(
        *(servers, schema, metrics, ending),
        await_tables=False,
        greeting=member.book.greeting,
    )
    if ready is None:
        raise JobError("The job ended before its servers were ready.")
    return ready


def _embedding_config(arguments: argparse.Namespace) -> Path:
    path = arguments.embedding_config or env.embedding_config_path()
    if path is None:
        raise ConfigError("--embedding-config, or PERSIA_EMBEDDING_CONFIG, is needed.")
    return Path(path)


def _settings(arguments: argparse.Namespace, *, warns: bool) -> GlobalSettings:
    path = _global_config(arguments)
    return GlobalSettings() if path is None else load_global_config(path, warns=warns)


def _inference_settings(arguments: argparse.Namespace) -> GlobalSettings | None:
    in_job = env.job_store() is not None
    return inference_settings(_global_config(arguments), in_job=in_job)


def _global_config(arguments: argparse.Namespace) -> str | Path | None:
    return arguments.global_config or env.global_config_path()


if __name__ == "__main__":
    sys.exit(main())
