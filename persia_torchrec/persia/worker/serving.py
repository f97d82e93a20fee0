"""What an embedding worker serves: a lookup over servers, in a job or alongside none.

PERSIA gives ``embedding_config.yml`` to embedding workers and servers only. A trainer
needs it here too, since its embeddings are a TorchRec collection; so the workers leave
the text of the file in the job's address book. All of them must have the same slots.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from persia_torchrec import timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError, PersiaError, ServerError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.metrics.push import is_pushed, push_metrics
from persia_torchrec.metrics.values import Reading
from persia_torchrec.parsing.yaml_file import read_text
from persia_torchrec.persia.config.embedding_config import (
    EmbeddingSchema,
    load_embedding_config,
)
from persia_torchrec.persia.config.global_config import MetricsSettings
from persia_torchrec.persia.measures import LookupMeasures
from persia_torchrec.persia.slots import SlotsLookup, build_features
from persia_torchrec.persia.worker.process import WorkerProcess
from persia_torchrec.rpc.addresses import tcp_address
from persia_torchrec.rpc.auth import NO_JOB, Greeting

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_NOTE = "embedding_config"

_PENDING_HELP = "batches of data loaders that no trainer has asked for yet"
_STALENESS_HELP = "training batches looked up and not yet updated"


def tell_slots(book: AddressBook, path: Path, *, warns: bool = True) -> EmbeddingSchema:
    """Read the file, and leave it in the address book; each embedding worker does."""
    text = read_text(path)
    schema = load_embedding_config(path, text, warns=warns)  # before others read it
    known = load_embedding_config(
        "that of another embedding worker", book.claim_note(_NOTE, text), warns=False
    )
    if known != schema:
        raise ConfigError(
            "All embedding workers of a job must have the same slots. Received: "
            f"{path}, which differs from that of another worker. Give all of them the "
            "same embedding_config.yml."
        )
    return schema


def ask_for_slots(
    store: tuple[str, int, str], *, timeout_s: float | None = None
) -> EmbeddingSchema:
    """Return the slots that the embedding workers of a job have told."""
    with closing(AddressBook.join(*store)) as book:
        (text,) = book.ask([_NOTE], timeout_s=timeout_s)
    return load_embedding_config("embedding_config.yml of the job", text, warns=False)


def make_lookup(
    client: EmbeddingClient, schema: EmbeddingSchema, settings: MetricsSettings
) -> SlotsLookup:
    """Return the lookup of an embedding worker: measured, if metrics are pushed."""
    features = build_features(schema)
    measures = LookupMeasures(features) if is_pushed(settings) else None
    return SlotsLookup(client, features, measures)


def pushing_metrics(
    process: WorkerProcess, index: int, settings: MetricsSettings
) -> ExitStack:
    """Push the metrics of an embedding worker while a block runs, and at its end."""
    measures = process.lookup.measures

    def read() -> list[Reading]:
        return [
            Reading("num_pending_batches", len(process.buffer), _PENDING_HELP),
            Reading("staleness", len(process.open), _STALENESS_HELP),
            *(measures.read() if measures else ()),
        ]

    stack = ExitStack()
    stack.callback(push_metrics("embedding_worker", index, settings, read))
    return stack


def ready_client(
    servers: Sequence[str],
    schema: EmbeddingSchema,
    ending: threading.Event,
    *,
    await_tables: bool,
    greeting: Greeting = NO_JOB,
) -> EmbeddingClient | None:
    """Wait until all servers have the tables of the slots; return a client of them.

    The result is None when ``ending`` is set, as the process is to end. With
    ``await_tables``, missing tables may still come, from a job that trains.
    """
    addresses = [tcp_address(server) for server in servers]

    def connect(timeout_s: float) -> EmbeddingClient:
        return EmbeddingClient.connect(
            addresses, timeout_s=timeout_s, greeting=greeting
        )

    if not _wait(lambda: connect(timeouts.WORKER_CONNECT_S).close(), ending):
        return None
    client = connect(timeouts.REQUEST_S)

    def learn() -> None:
        client.num_rows()  # refused until the tables are all there
        known = {spec.name for spec in client.learn_tables()}
        missing = [slot for slot in schema.slots.values() if slot.group not in known]
        if missing:
            message = (
                f"Slot {missing[0].name!r} must have its table on the servers, "
                f"{missing[0].group!r}. They have no such table. Give the "
                "embedding_config.yml of the training."
            )
            if not await_tables:
                raise ConfigError(message)
            raise ServerError(message, server="embedding servers")

    if not _wait(learn, ending):
        client.close()
        return None
    require_dims(client, schema)
    return client


def _wait(attempt: Callable[[], None], ending: threading.Event) -> bool:
    """Try until it succeeds, or until the process is to end: then return False.

    A ConfigError, which no waiting mends, is raised at once.
    """
    deadline, logged, line = time.monotonic() + timeouts.READY_S, "", ""
    with timeouts.saying(logger, lambda: line):
        while not ending.is_set():
            try:
                attempt()
                return True
            except PersiaError as exc:
                if isinstance(exc, ConfigError) or time.monotonic() >= deadline:
                    raise
                line = f"waiting for the embedding servers: {exc}"
                if type(exc).__name__ != logged:
                    logged = type(exc).__name__
                    logger.info("%s", line)
            ending.wait(_RETRY_S)
        return False


def require_dims(client: EmbeddingClient, schema: EmbeddingSchema) -> None:
    """Check that slots have the dims of their tables on the servers."""
    for slot in schema.slots.values():
        dim = client.table(slot.group).dim
        if slot.dim != dim:
            raise ConfigError(
                f"Slot {slot.name!r} must have the dim of its table on the servers, "
                f"{dim}. Received: {slot.dim} in the embedding config. Give the "
                "embedding_config.yml of the training."
            )
