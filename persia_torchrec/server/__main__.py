"""Run one embedding parameter server.

    python -m persia_torchrec.server --shard 0 --num-shards 2

In a job (the environment says where its address book is) the server registers there,
and ends when the job ends. With ``--standalone`` it belongs to the process that
started it, prints ``ready ADDRESS``, and ends with that process or by SIGTERM.

Where ``global_config.yml`` says ``job_type: Infer`` it belongs to no job: it serves the
checkpoint that the file names, see ``server/inference.py``.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.compiled import telling_of_compilation
from persia_torchrec.config import (
    GlobalSettings,
    inference_settings,
    load_global_config,
)
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.server.config import ServerConfig, config_of_job
from persia_torchrec.server.inference import inference_config, serve_inference
from persia_torchrec.server.readiness import tell_compiling, tell_ready
from persia_torchrec.server.readings import serve_and_push
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.store.warm_up import warm_up
from persia_torchrec.wire import precision
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.memory import keep_freed_memory
from persia_torchrec.wire.signals import EndSignals, end_by_signals

logger = logging.getLogger("persia_torchrec.server")

_PARENT_CHECK_S = 1.0


def main() -> int:
    """Run the server; return the process's exit status."""
    end_by_signals()
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=env.log_level("WARNING" if arguments.standalone else "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    keep_freed_memory()
    try:
        if arguments.standalone:
            _serve_standalone(arguments)
        elif (settings := _inference_settings(arguments)) is not None:
            _serve_inference(arguments, settings)
        else:
            # Only a job needs torch (for its address book), which takes two seconds.
            from persia_torchrec.server.job import serve_in_job

            serve_in_job(
                _shard(arguments),
                _num_shards(arguments),
                lambda host, job, tell: _started(_config(arguments, host), job, tell),
            )
    except PersiaError as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.server",
        description="Run one embedding parameter server: one shard of all tables.",
    )
    add = parser.add_argument
    add("--shard", type=int, default=None, help="which shard [REPLICA_INDEX]")
    add("--num-shards", type=int, default=None, help="of how many [REPLICA_SIZE]")
    add(
        "--host", default=None, help="address to listen on [the way to the job's store]"
    )
    add(
        "--port",
        type=int,
        default=None,
        help="port to listen on; 0 takes a free one [0; for inference that of servers]",
    )
    add(
        "--standalone",
        action="store_true",
        help="serve without a job, until the process that started this one is gone",
    )
    _add_what_it_holds(parser)
    return parser


def _add_what_it_holds(parser: argparse.ArgumentParser) -> None:
    defaults = ServerConfig()
    add = parser.add_argument
    add("--capacity", type=int, default=None, help="rows of all tables together")
    add(
        "--eviction",
        choices=["lru", "lfu"],
        default="lru",
        help="which row leaves a full server: least recently or frequently used [lru]",
    )
    add(
        "--optimizer-engine",
        choices=["auto", "fused", "fbgemm"],
        default="auto",
        help="what applies gradients [auto]",
    )
    add(
        "--checkpoint",
        default=None,
        help="serve this checkpoint, for inference [hold what is trained]",
    )
    add(
        "--incremental-dir",
        default=None,
        help="write what changes there; with a checkpoint, follow what others write",
    )
    add(
        "--incremental-interval-s",
        type=float,
        default=None,
        help=f"how often [{defaults.incremental_interval_s:g}]",
    )
    add("--global-config", type=Path, default=None, help="PERSIA's global_config.yml")


def _shard(arguments: argparse.Namespace) -> int:
    return env.get_replica_index() if arguments.shard is None else arguments.shard


def _num_shards(arguments: argparse.Namespace) -> int:
    num_shards = arguments.num_shards
    return env.get_replica_size() if num_shards is None else int(num_shards)


def _started(
    config: ServerConfig,
    greeting: Greeting = NO_JOB,
    tell: Callable[[bool], object] = bool,
) -> EmbeddingServer:
    """Make a server; ``tell`` as in ``telling_of_compilation``."""
    logger.info("settings %s", config)
    server = EmbeddingServer(config, greeting)
    with server.not_ready(), telling_of_compilation(tell):
        precision.warm_up()
        warm_up()
    return server


def _config(arguments: argparse.Namespace, host: str) -> ServerConfig:
    config = ServerConfig(
        shard=_shard(arguments),
        num_shards=_num_shards(arguments),
        host=arguments.host or host,
        port=arguments.port or 0,
        eviction=arguments.eviction,
        optimizer_engine=arguments.optimizer_engine,
        checkpoint=arguments.checkpoint,
    )
    path = _global_config(arguments)
    if path is not None:
        settings = load_global_config(path, warns=config.shard == 0)
        config = config_of_job(config, settings)
    given = {
        "capacity_rows": arguments.capacity,
        "incremental_dir": arguments.incremental_dir,
        "incremental_interval_s": arguments.incremental_interval_s,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config, **changes)


def _global_config(arguments: argparse.Namespace) -> str | Path | None:
    # A server that belongs to a process has its settings from that process alone.
    by_environment = None if arguments.standalone else env.global_config_path()
    return arguments.global_config or by_environment


def _inference_settings(arguments: argparse.Namespace) -> GlobalSettings | None:
    in_job = env.job_store() is not None
    return inference_settings(_global_config(arguments), in_job=in_job)


def _serve_inference(arguments: argparse.Namespace, settings: GlobalSettings) -> None:
    infer = settings.common.infer
    assert infer is not None
    if arguments.checkpoint is not None:
        raise ConfigError(
            "--checkpoint is for servers of a job. Received: it, and job_type: Infer, "
            "whose embedding_checkpoint says what to serve. Leave one of them out."
        )
    config = _config(arguments, infer.listen_host)
    config = inference_config(config, infer, has_port=arguments.port is not None)
    serve_inference(lambda: _started(config))


def _serve_standalone(arguments: argparse.Namespace) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    server = _started(_config(arguments, "127.0.0.1"), tell=tell_compiling)
    watch = threading.Thread(
        target=_stop_with_parent, args=(server, parent), daemon=True
    )
    watch.start()
    with EndSignals(lambda _: server.stop()):
        serve_and_push(server, tell_ready)


def _stop_with_parent(server: EmbeddingServer, parent: int) -> None:
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(_PARENT_CHECK_S)
    server.stop()


if __name__ == "__main__":
    sys.exit(main())
