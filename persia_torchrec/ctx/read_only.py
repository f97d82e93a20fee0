"""A job's embeddings, for a process of the job that does not train them.

    embedding workers   lookups for evaluation; new settings of the tables
    embedding servers   sizes, clearing, checkpoints

It has connections of its own and sends no gradients; so it may be a trainer's process
before or after its training, a data loader's, or one more that the job's environment
was given to.
"""

from dataclasses import replace

import torch

from persia_torchrec import timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.data.stream import ReferencedBatch
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import PersiaBatch
from persia_torchrec.errors import ConfigError, RemoteError
from persia_torchrec.lookup.slots import LookupHello, wait_until_ready
from persia_torchrec.pipeline.worker_client import RemoteWorkers
from persia_torchrec.serving.embeddings import (
    ConcurrentLookups,
    LookedUp,
    SlotsReader,
)
from persia_torchrec.training.checkpoint import ContextCheckpoints
from persia_torchrec.training.engine import connect_to_job

_NO_TABLES = (
    "Received: servers without any. They come with the first TrainCtx of the job, or "
    "with load_checkpoint or load_embedding."
)


class ReadOnlyEmbeddings(ConcurrentLookups):
    """Reads the embeddings of a job. Its lookups may come from any thread.

    Args:
        device: where tensors are wanted.

    Attributes:
        client: of the servers.
        checkpoints: dumps and loads of what they hold.

    Raises:
        ConfigError: this process belongs to no job.
        DiscoveryError: workers or servers did not register in time.
    """

    def __init__(self, device: torch.device) -> None:
        self.client, self._workers = connect_to_job(RemoteWorkers)
        self._job_reader = _JobReader(self._workers, self.client, device)
        super().__init__(self._job_reader, timeout_s=2 * timeouts.TRAINING_REQUEST_S)
        self.checkpoints = ContextCheckpoints(self.client, self.flush)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the servers answer, and the workers too once there are tables.

        Raises:
            RequestTimeoutError: they did not in time; the message says what is missing.
        """
        wait_until_ready(self._ask, timeout_s)

    def _ask(self) -> LookupHello:
        if self.client.learn_tables():
            return self._job_reader.hello()
        return LookupHello((), tuple(self.client.num_rows()))

    def configure(self, config: EmbeddingConfig) -> None:
        """Change how rows start and how far weights may go; waits for the servers."""
        specs = self.client.learn_tables()
        if not specs:
            raise ConfigError(
                f"An embedding config must be of tables. {_NO_TABLES} "
                "Call configure_embedding_parameter_servers when they are there."
            )
        changed = [
            replace(
                spec,
                initializer=config.initializer,
                admission=config.admission,
                weight_bound=config.weight_bound,
            )
            for spec in specs
        ]
        if changed != specs:
            self._workers.add_tables(changed)

    def flush(self) -> None:
        """Do nothing: no update is sent from here."""

    def close(self) -> None:
        """Close all connections. May be called twice."""
        super().close()
        self.checkpoints.close()
        self._workers.close()
        self.client.close()


class _JobReader(SlotsReader):
    """Looks batches of a job up, also those whose ids a data loader has sent."""

    def __init__(
        self, workers: RemoteWorkers, client: EmbeddingClient, device: torch.device
    ) -> None:
        super().__init__(workers, device)
        self._workers = workers
        self._client = client

    def hello(self) -> LookupHello:
        try:
            return super().hello()
        except RemoteError as exc:
            if self._client.learn_tables():
                raise
            raise ConfigError(
                f"A lookup needs the tables of the slots. {_NO_TABLES}"
            ) from exc

    def look_up(self, batch: PersiaBatch | ReferencedBatch) -> LookedUp:
        """Look a batch up: by its ids, or by the reference to where they wait."""
        if isinstance(batch, PersiaBatch):
            return super().look_up(batch)
        slots = self.slots()
        outputs, handle = self._workers.pull(batch, None)
        return LookedUp(slots, handle.slots, outputs, handle.places)
