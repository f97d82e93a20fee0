"""Run one embedding parameter server.

    python -m persia_torchrec.server --shard 0 --num-shards 2

In a job (the environment says where its address book is) the server registers there,
and ends when the job ends. With ``--standalone`` it belongs to the process that
started it, prints ``ready ADDRESS``, and ends with that process or by SIGTERM.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.config import (
    GlobalSettings,
    MetricsSettings,
    load_global_config,
)
from persia_torchrec.errors import PersiaError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.readings import serve_and_push
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.store.warm_up import warm_up
from persia_torchrec.wire import precision
from persia_torchrec.wire.memory import keep_freed_memory

logger = logging.getLogger("persia_torchrec.server")

_PARENT_CHECK_S = 1.0


def main() -> int:
    """Run the server; return the process's exit status."""
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=env.log_level("WARNING" if arguments.standalone else "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    keep_freed_memory()
    try:
        if arguments.standalone:
            _serve_standalone(arguments)
        else:
            # Only a job needs torch (for its address book), which takes two seconds.
            from persia_torchrec.server.job import serve_in_job

            serve_in_job(_shard(arguments), lambda host: _make_server(arguments, host))
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
    add("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
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
    add("--global-config", type=Path, default=None, help="PERSIA's global_config.yml")
    add(
        "--standalone",
        action="store_true",
        help="serve without a job, until the process that started this one is gone",
    )
    return parser


def _shard(arguments: argparse.Namespace) -> int:
    return env.get_replica_index() if arguments.shard is None else arguments.shard


def _make_server(
    arguments: argparse.Namespace, host: str
) -> tuple[EmbeddingServer, MetricsSettings]:
    path = arguments.global_config or env.global_config_path()
    settings = None if path is None else load_global_config(path)
    config = _config(arguments, host, settings)
    precision.warm_up()
    warm_up()
    metrics = MetricsSettings() if settings is None else settings.common.metrics
    return EmbeddingServer(config), metrics


def _config(
    arguments: argparse.Namespace, host: str, settings: GlobalSettings | None
) -> ServerConfig:
    num_shards = arguments.num_shards
    config = ServerConfig(
        shard=_shard(arguments),
        num_shards=env.get_replica_size() if num_shards is None else num_shards,
        host=arguments.host or host,
        port=arguments.port,
        capacity_rows=_capacity(arguments, settings),
        eviction=arguments.eviction,
        optimizer_engine=arguments.optimizer_engine,
    )
    logger.info("settings %s", config)
    return config


def _capacity(arguments: argparse.Namespace, settings: GlobalSettings | None) -> int:
    if arguments.capacity is not None:
        return int(arguments.capacity)
    if settings is None:
        return ServerConfig().capacity_rows
    return settings.embedding_parameter_server.capacity


def _serve_standalone(arguments: argparse.Namespace) -> None:
    parent = os.getppid()
    server, metrics = _make_server(arguments, "127.0.0.1")
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    watch = threading.Thread(
        target=_stop_with_parent, args=(server, parent), daemon=True
    )
    watch.start()
    sys.stdout.write(f"ready {server.address}\n")
    sys.stdout.flush()
    serve_and_push(server, metrics)


def _stop_with_parent(server: EmbeddingServer, parent: int) -> None:
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(_PARENT_CHECK_S)
    server.stop()


if __name__ == "__main__":
    sys.exit(main())
