"""Embeddings for serving in this process's own servers, loaded from a checkpoint."""

import contextlib
import os
from collections.abc import Iterator

import torch

from persia_torchrec.checkpoint.manifest import Manifest
from persia_torchrec.checkpoint.series import find_checkpoint
from persia_torchrec.client.client import EmbeddingClient
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
) -> Iterator[SlotsReader]:
    """Hold the rows of a checkpoint in servers of this machine, within a block.

    Args:
        path: of a checkpoint's folder, or of one with several, for its latest.
        schema: the slots.
        device: where tensors are wanted.
        num_servers: processes to hold the rows, which share them.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: its tables are not those of the slots.
        ServerError: a server does not start.
    """
    folder = find_checkpoint(path)
    # Ids are spread by a hash: no server is sure to have just its part of the rows.
    capacity = max(Manifest.read(folder).num_rows, 1)
    with EmbeddingCluster.local(num_servers, capacity) as cluster:
        client = EmbeddingClient.connect(
            cluster.addresses, timeout_s=_REQUEST_TIMEOUT_S
        )
        try:
            warm_up()
            client.checkpoints.load(folder.url)
            client.learn_tables()
            lookup = SlotsLookup(client, features_of(schema))
            reader = SlotsReader(lookup, device)
            require_dims(reader.hello().slots, schema)
            yield reader
        finally:
            client.close()
