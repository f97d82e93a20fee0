"""An embedding worker beside no job: over servers whose addresses it is given.

It learns the tables from the servers, which have them from the checkpoint that they
serve (``server/inference.py``) or from a job that trains, and changes nothing there.
Servers that are not there yet, or not ready, are waited for.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.config import EmbeddingSchema, MetricsSettings
from persia_torchrec.errors import ConfigError, PersiaError, ServerError
from persia_torchrec.wire.greeting import NO_JOB, Greeting
from persia_torchrec.wire.ports import tcp_address
from persia_torchrec.worker.hello import Slot
from persia_torchrec.worker.measured import make_lookup
from persia_torchrec.worker.slots import SlotsLookup

logger = logging.getLogger(__name__)

_SERVERS_TIMEOUT_S = 600.0
_REQUEST_TIMEOUT_S = 60.0
_CONNECT_S = 5.0
_RETRY_S = 0.2


def ready_lookup(
    servers: Sequence[str],
    schema: EmbeddingSchema,
    metrics: MetricsSettings,
    ending: threading.Event,
    *,
    await_tables: bool,
    greeting: Greeting = NO_JOB,
) -> tuple[EmbeddingClient, SlotsLookup] | None:
    """Wait until all servers have their tables, which belong to them.

    Args:
        servers: addresses of all servers, in the order of their shards.
        schema: the slots.
        metrics: whether the lookup is measured.
        ending: set when the process is to end.
        await_tables: tables that are missing may still come, from a job that trains.
        greeting: of this process.

    Returns:
        The client, and the lookup over it; None if the process is to end.

    Raises:
        ConfigError: the servers are not these shards, or a slot's table has another
            dim, or is missing.
        ServerError: the servers did not answer in time, or not with their rows.
    """
    addresses = [tcp_address(server) for server in servers]
    client = _connect(addresses, ending, greeting)
    if client is None:
        return None
    lookup = make_lookup(client, schema, metrics)

    def learn() -> None:
        try:
            _learn_tables(client, lookup)
        except ConfigError as exc:
            if not await_tables:
                raise
            raise ServerError(str(exc), server="embedding servers") from exc

    if not _wait(learn, ending):
        client.close()
        return None
    require_dims(lookup.hello().slots, schema)
    return client, lookup


def _connect(
    addresses: Sequence[str], ending: threading.Event, greeting: Greeting
) -> EmbeddingClient | None:
    """Connect when all servers are there; return None if the process is to end."""

    def connect(timeout_s: float) -> EmbeddingClient:
        return EmbeddingClient.connect(
            addresses, timeout_s=timeout_s, greeting=greeting
        )

    if not _wait(lambda: connect(_CONNECT_S).close(), ending):
        return None
    return connect(_REQUEST_TIMEOUT_S)


def _learn_tables(client: EmbeddingClient, lookup: SlotsLookup) -> None:
    """Get to know the servers' tables.

    Raises:
        ConfigError: there are none for some slots, or the servers differ in them.
        ServerError: a server is not ready.
    """
    client.num_rows()  # refused until the tables are all there
    client.learn_tables()
    for feature in lookup.features:
        try:
            client.table(feature.table)
        except ConfigError as exc:
            raise ConfigError(
                f"Slot {feature.name!r} must have its table on the servers, "
                f"{feature.table!r}. They have no such table. Give the "
                "embedding_config.yml of the training."
            ) from exc


def _wait(attempt: Callable[[], None], ending: threading.Event) -> bool:
    """Try until it succeeds, or until the process is to end: then return False.

    Raises:
        ConfigError: it cannot succeed.
        ServerError: it has not succeeded in time.
        WireError: the same.
    """
    deadline = time.monotonic() + _SERVERS_TIMEOUT_S
    said = ""
    while not ending.is_set():
        try:
            attempt()
        except ConfigError:
            raise
        except PersiaError as exc:
            if time.monotonic() >= deadline:
                raise
            if type(exc).__name__ != said:
                said = type(exc).__name__
                logger.info("waiting for the embedding servers: %s", exc)
            ending.wait(_RETRY_S)
        else:
            return True
    return False


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
