"""An embedding server for inference: beside no job, over a checkpoint.

``global_config.yml`` says ``job_type: Infer``, where all servers are, and which
checkpoint they serve. Each loads its share of it, however many servers wrote it, then
prints ``ready ADDRESS``, and answers lookups until SIGTERM or SIGINT. What is loaded,
and what is refused, is in ``served_checkpoint.py``.
"""

import dataclasses
from collections.abc import Callable

from persia_torchrec.config import InferSettings
from persia_torchrec.errors import ConfigError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.readiness import tell_ready
from persia_torchrec.server.readings import serve_and_push
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.wire.signals import EndSignals


def inference_config(
    config: ServerConfig, infer: InferSettings, *, has_port: bool
) -> ServerConfig:
    """Return the settings of a server that serves a checkpoint.

    Args:
        config: as the command line has them.
        infer: as ``global_config.yml`` has them.
        has_port: the port was given; otherwise it is that of the server's address.

    Raises:
        ConfigError: there are more or fewer addresses than servers.
    """
    if len(infer.servers) != config.num_shards:
        raise ConfigError(
            "infer_config.servers must list all embedding servers, in the order of "
            f"their shards. Received: {len(infer.servers)} addresses, and "
            f"{config.num_shards} servers (--num-shards, or REPLICA_SIZE)."
        )
    return dataclasses.replace(
        config,
        port=config.port if has_port else infer.port_of(config.shard),
        checkpoint=infer.embedding_checkpoint,
    )


def serve_inference(make_server: Callable[[], EmbeddingServer]) -> None:
    """Serve until SIGTERM or SIGINT; the main thread calls this.

    Args:
        make_server: returns the server.

    Raises:
        CheckpointError: the checkpoint is not there, or cannot be loaded.
        ConfigError: a setting is out of its range.
        WireError: the address cannot be listened on.
    """
    server = make_server()
    with EndSignals(lambda _: server.stop()):
        serve_and_push(server, tell_ready)
