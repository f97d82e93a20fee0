"""A server process that holds the rows of plain TorchRec's tables, and many more."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from persia_torchrec.bench.filled_store import FILL
from persia_torchrec.bench.training_batches import TABLES
from persia_torchrec.bench.training_models import Trainer, table_weights
from persia_torchrec.bench.workload import Numbers
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.server.cluster import EmbeddingCluster

_SEED = 20_237


@dataclass(frozen=True, slots=True)
class TrainingServer:
    """A server process, and a client of it.

    Attributes:
        client: connected to it.
        pid: of the process.
        num_rows: how many rows it has room for.
    """

    client: EmbeddingClient
    pid: int
    num_rows: int


@contextmanager
def training_server(num_rows: int) -> Iterator[TrainingServer]:
    """Start a server process, and end it after use.

    Raises:
        ServerError: the server does not start.
    """
    with EmbeddingCluster.local(num_servers=1, capacity=num_rows) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        try:
            yield TrainingServer(client, cluster.processes[0].pid, num_rows)
        finally:
            client.close()


def fill(
    server: TrainingServer, plain: Trainer, ids: Sequence[Numbers], table_rows: int
) -> None:
    """Write plain TorchRec's rows, and others until the server is full.

    Args:
        server: empty, its tables known.
        plain: where the rows of ``ids`` are read.
        ids: of each table, in no more rows than the server has room for.
        table_rows: the other rows get the ids above it.

    Raises:
        ServerError: the server failed.
    """
    rng = np.random.default_rng(_SEED)
    num_others = server.num_rows - sum(map(len, ids))
    shares = np.diff(np.linspace(0, num_others, len(TABLES) + 1).astype(np.int64))
    for table, (name, ids_N, share) in enumerate(zip(TABLES, ids, shares, strict=True)):
        weights = table_weights(plain, table).numpy()
        others_N = np.arange(table_rows, table_rows + share)
        # Mixed, so that the rows of the batches lie among all others.
        all_N = rng.permutation(np.concatenate([ids_N, others_N]))
        for start in range(0, len(all_N), FILL):
            part_N = all_N[start : start + FILL]
            rows_ND = weights[np.minimum(part_N, table_rows - 1)]
            server.client.write(name, part_N.view(np.uint64), rows_ND)
