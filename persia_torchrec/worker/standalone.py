"""An embedding worker beside no job: over servers whose addresses it is given.

It learns the tables from the servers, which have them from the checkpoint that they
have loaded or from a job that trains, and changes nothing there.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence

from persia_torchrec import env
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.config import EmbeddingSchema, MetricsSettings
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.wire.ports import tcp_address
from persia_torchrec.wire.service import Service
from persia_torchrec.worker.buffers import IdBuffer
from persia_torchrec.worker.hello import Slot
from persia_torchrec.worker.measured import make_lookup, pushing_metrics
from persia_torchrec.worker.process import WorkerProcess
from persia_torchrec.worker.warm_up import warm_up

logger = logging.getLogger(__name__)

_SERVERS_TIMEOUT_S = 600.0
_REQUEST_TIMEOUT_S = 60.0
_RETRY_S = 0.2


def serve_standalone(
    servers: Sequence[str],
    schema: EmbeddingSchema,
    buffer: IdBuffer,
    metrics: MetricsSettings,
    *,
    host: str,
    port: int,
) -> None:
    """Answer lookups until SIGTERM or SIGINT; the main thread calls this.

    Args:
        servers: addresses of all servers, in the order of their shards.
        schema: the slots.
        buffer: keeps the ids of data loaders, if there are any.
        metrics: whether and how metrics are pushed.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError: a slot's table has another dim, or is not there in time.
        ServerError: the servers did not answer in time, or not with their rows.
        WireError: the address cannot be listened on.
    """
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    warm_up()
    client = EmbeddingClient.connect(
        [tcp_address(server) for server in servers], timeout_s=_REQUEST_TIMEOUT_S
    )
    lookup = make_lookup(client, schema, metrics)
    deadline = time.monotonic() + _SERVERS_TIMEOUT_S
    while not ending.is_set():
        try:
            client.learn_tables()
            slots = lookup.hello().slots
        except PersiaError:
            if time.monotonic() >= deadline:
                raise
            ending.wait(_RETRY_S)
        else:
            require_dims(slots, schema)
            process = WorkerProcess(lookup, buffer)
            with pushing_metrics(process, lookup, env.get_replica_index(), metrics):
                _serve(process, host, port, ending)
    client.close()


def require_dims(slots: Sequence[Slot], schema: EmbeddingSchema) -> None:
    """Check that the slots have the dims of their tables on the servers.

    Args:
        slots: as the servers' tables make them.
        schema: as the user wrote them.

    Raises:
        ConfigError: a slot has another dim.
    """
    for slot in slots:
        dim = schema.slots[slot.name].dim
        if slot.dim != dim:
            raise ConfigError(
                f"Slot {slot.name!r} must have the dim of its table on the servers, "
                f"{slot.dim}. Received: {dim} in the embedding config. Give the "
                "embedding_config.yml of the training."
            )


def _serve(
    process: WorkerProcess, host: str, port: int, ending: threading.Event
) -> None:
    service = Service(
        "embedding worker", process.answer, host=host, port=port, num_threads=8
    )
    sys.stdout.write(f"ready {service.address}\n")
    sys.stdout.flush()
    ending.wait()
    service.close()
