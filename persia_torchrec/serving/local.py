"""Embeddings for serving in this process's own servers, loaded from a checkpoint."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import torch

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.compiled import telling_of_compilation
from persia_torchrec.config import EmbeddingSchema
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.serving.reader import SlotsReader
from persia_torchrec.worker.schema import features_of
from persia_torchrec.worker.slots import SlotsLookup
from persia_torchrec.worker.standalone import require_dims
from persia_torchrec.worker.warm_up import warm_up

_REQUEST_TIMEOUT_S = 60.0


@contextlib.contextmanager
def embeddings_of_checkpoint(
    path: str | os.PathLike[str],
    schema: EmbeddingSchema,
    device: torch.device,
    *,
    num_servers: int = 1,
    incremental_dir: str | None = None,
) -> Iterator[SlotsReader]:
    """Hold the rows of a checkpoint in servers of this machine, within a block.

    Args:
        path: of a checkpoint's folder, or of one with several, for its latest.
        schema: the slots.
        device: where tensors are wanted.
        num_servers: processes to hold the rows, which share them.
        incremental_dir: follow what a training writes there.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: its tables are not those of the slots.
        ServerError: a server does not start.
    """
    with EmbeddingCluster.of_checkpoint(
        os.fspath(path), num_servers, incremental_dir=incremental_dir
    ) as cluster:
        client = EmbeddingClient.connect(
            cluster.addresses, timeout_s=_REQUEST_TIMEOUT_S
        )
        try:
            with telling_of_compilation():
                warm_up()
            client.learn_tables()
            lookup = SlotsLookup(client, features_of(schema))
            follows = incremental_dir is not None
            status = (lambda: _following(client.counters())) if follows else dict
            reader = SlotsReader(lookup, device, status)
            require_dims(reader.hello().slots, schema)
            yield reader
        finally:
            client.close()


def _following(counters: Sequence[Mapping[str, int]]) -> dict[str, object]:
    """Say how far the servers are behind the training that they follow."""
    faults = ("following_lost", "following_stopped")
    lost = sum(c.get(fault, 0) for c in counters for fault in faults)
    delay_ms = max(c.get("increment_delay_ms", 0) for c in counters)
    return {
        "following": {
            "increments": sum(c.get("increments_put_in", 0) for c in counters),
            "delay_s": delay_ms / 1000,
            "lost": lost > 0,
        }
    }
