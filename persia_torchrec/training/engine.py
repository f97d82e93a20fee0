"""What PERSIA's contexts run on: the user's model and its embeddings, inside DMP.

    HybridModel
      embeddings   EmbeddingBagCollection, from embedding_config.yml -> SlotsSharder
      dense        the user's model, replicated as data_parallel.py says

``DistributedModelParallel`` shards the one and replicates the other: the same path that
a TorchRec user's model takes. The engine belongs to one trainer process and is called
by its main thread; only :meth:`Engine.start_pull` may be called by another.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from persia_torchrec import env, timeouts
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.config import EmbeddingSchema
from persia_torchrec.data.loader import LookupSettings
from persia_torchrec.distributed import DistributedBaseOption
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.embedding.data import PersiaBatch, ReferencedBatch
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.lookup.slots import require_slots, wait_until_ready
from persia_torchrec.pipeline.pipeline import PrefetchedBatch
from persia_torchrec.pipeline.worker_client import RemoteBatch, RemoteWorkers
from persia_torchrec.sharding.whole_model import join
from persia_torchrec.table import TableSettings, TableSpec
from persia_torchrec.training.checkpoint import ContextCheckpoints
from persia_torchrec.training.data_parallel import build_replication, init_process_group
from persia_torchrec.training.measured import (
    MeasuredWorkers,
    Measures,
    metrics_settings,
)
from persia_torchrec.training.slots import ShardedSlots, SlotsSharder, make_collection
from persia_torchrec.wire.discovery import AddressBook

Pull = PrefetchedBatch[RemoteBatch]
Workers = TypeVar("Workers", bound=RemoteWorkers)


class HybridModel(nn.Module):
    """A user's dense model with its embeddings before it.

    Args:
        embeddings: one table per feature group, on the meta device.
        dense: takes a list of dense tensors and a list of embedding tensors, these in
            the order of the batch.
    """

    def __init__(self, embeddings: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense

    def forward(self, non_id_tensors: list[torch.Tensor], pull: Pull) -> object:
        """Run the whole model on one batch."""
        return self.dense(non_id_tensors, self.embed(pull))

    def embed(self, pull: Pull) -> list[torch.Tensor]:
        """Wait for a batch's embeddings, a tensor per slot; see ``slot_tensors.py``."""
        return list(self.embeddings(pull).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of one trainer's engine.

    Attributes:
        schema: the slots.
        optimizer: of the tables that ``tables`` gives no other.
        embedding_config: how rows start, and how far weights may go.
        device: of the dense model.
        distributed: how the trainers keep their dense models alike.
        backward_buffer_size: updates that may wait when there is no staleness bound.
        tables: settings of single tables, by feature group.
        backward_workers_size: updates that may be sent and not acknowledged.
        grad_update_buffer_size: updates whose gradients may be in memory: those that
            wait, and those sent.
        lookup_emb_directly: whether batches of this process are looked up, or only
            those of data loaders.
    """

    schema: EmbeddingSchema
    optimizer: Optimizer
    embedding_config: EmbeddingConfig
    device: torch.device
    distributed: DistributedBaseOption
    backward_buffer_size: int
    tables: Mapping[str, TableSettings] = field(default_factory=dict)
    backward_workers_size: int = 8
    grad_update_buffer_size: int = 60
    lookup_emb_directly: bool = True


class Engine:
    """One trainer's connections, and its model inside DMP.

    Args:
        model: the user's dense model, on ``config.device``.
        config: see :class:`EngineConfig`.

    Raises:
        ConfigError: this process belongs to no job.
        DiscoveryError: workers or servers did not register in time.
        ServerError: a worker or a server refuses the tables.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self._config = config
        self._settings: LookupSettings | None = None
        settings = metrics_settings()
        self._measures = Measures()
        self.client, self._workers = connect_to_job(MeasuredWorkers)
        self._workers.observed = self._measures.observed
        init_process_group(config.distributed, config.device)
        self.sharder = SlotsSharder(
            self._workers,
            config.schema,
            config.embedding_config,
            config.optimizer,
            config.tables,
            timeout_s=timeouts.TRAINING_REQUEST_S,
        )
        hybrid = HybridModel(make_collection(config.schema), model)
        self._replication = build_replication(config.distributed, model)
        self.dmp = DistributedModelParallel(
            hybrid,
            device=config.device,
            sharders=[self.sharder],
            data_parallel_wrapper=self._replication,
        )
        self._hybrid = hybrid
        # Trainers that average weights have each a loss scale of its own.
        self._agreement = (
            self.sharder.agreement if self._replication.averages_gradients else None
        )
        sharded = hybrid.embeddings
        assert isinstance(sharded, ShardedSlots)
        self._sharded = sharded
        sharded.pipeline.bound(
            held=config.grad_update_buffer_size, sent=config.backward_workers_size
        )
        self.checkpoints = ContextCheckpoints(self.client, self.flush)
        self._pushes = self._measures.push(settings, self._totals)

    @property
    def device(self) -> torch.device:
        """Of the dense model."""
        return self._config.device

    @contextlib.contextmanager
    def in_step(self, scaler: torch.amp.GradScaler | None = None) -> Iterator[None]:
        """Keep trainers in step whose data do not end at the same batch.

        A trainer that comes to the end of the block answers the collectives of those
        that continue, until all are there; then all have the same dense model, and the
        same loss scale where their dense gradients were. An exception ends the block
        at once.
        """
        if self._agreement is not None:
            self._agreement.scaler = scaler
        with self._replication.in_step(), join(self.dmp):
            yield

    def after_step(self) -> None:
        """Do what has to follow a step of the dense optimizer, on all trainers."""
        self._replication.after_step()

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool,
        settings: LookupSettings | None = None,
    ) -> Pull:
        """Begin to pull a batch; returns at once.

        Args:
            batch: with its ids, or with the reference to where they wait.
            is_training: make missing rows, and expect a backward pass.
            settings: of the loader that the batch comes from.

        Raises:
            BatchError: an ID feature of the batch is not a slot.
            ConfigError: other settings than before while batches are under way, or a
                batch of this process where only those of data loaders are looked up.
            PersiaError: an earlier push failed.
        """
        if isinstance(batch, PersiaBatch) and not self._config.lookup_emb_directly:
            raise ConfigError(
                "lookup_emb_directly must be True to look up a batch of this process, "
                "of an IterableDataset or by get_embedding_from_data. Received: False, "
                "with which batches come from data loaders by a StreamingDataset."
            )
        if settings is not None:
            self._apply(settings, is_training=is_training)
        if isinstance(batch, PersiaBatch):
            names = [feature.name for feature in batch.id_type_features]
            require_slots(names, list(self._config.schema.slots))
            # Copied: the pull is put off, and the user's arrays may change meanwhile.
            bags = {
                feature.name: Bags(feature.ids.copy(), feature.lengths.copy())
                for feature in batch.id_type_features
            }
            return self._sharded.start(bags, is_training=is_training)
        return self._sharded.start(batch, is_training=is_training)

    def run(self, non_id_tensors: list[torch.Tensor], pull: Pull) -> object:
        """Run the whole model; its backward pass updates both halves."""
        self._measures.wait_for(pull.wait)
        return self.dmp(non_id_tensors, pull)

    def embed(self, pull: Pull) -> list[torch.Tensor]:
        """Wait for a batch's embeddings, a tensor per slot; see ``slot_tensors.py``."""
        self._measures.wait_for(pull.wait)
        return self._hybrid.embed(pull)

    def note_wait(self, seconds: float) -> None:
        """Note how long the loader made the trainer wait for its next batch."""
        self._measures.note_wait(seconds)

    def set_loss_scale(self, scale: float) -> None:
        """Divide the gradients that go to the servers by the scale of the loss.

        Under a scale other than 1 a gradient that is not finite is left out.
        """
        self._sharded.gradient_scale = 1 / scale
        self._sharded.skip_non_finite = scale != 1

    def has_skipped(self, since: int) -> bool:
        """Return whether any trainer's gradients were not finite; all call it together.

        ``since`` is ``num_skipped`` before the backward pass.
        """
        has_skipped = self.num_skipped > since
        if self._agreement is None:
            return has_skipped
        return self._agreement.any(has_skipped)

    @property
    def num_skipped(self) -> int:
        """Batches so far whose gradients were not finite."""
        return self._sharded.num_skipped

    def configure(self, config: EmbeddingConfig) -> None:
        """Change how rows start and how far weights may go; waits for the servers.

        What a single table was given by ``EngineConfig.tables`` stays.
        """

        def change(spec: TableSpec) -> TableSpec:
            own = self._config.tables.get(spec.name, TableSettings())
            return replace(own, optimizer=None).apply_to(  # its rate may have moved
                replace(
                    spec,
                    initializer=config.initializer,
                    admission=config.admission,
                    weight_bound=config.weight_bound,
                )
            )

        self.sharder.change_tables(change)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until workers and servers answer and have their tables.

        Raises:
            RequestTimeoutError: they did not in time; the message says what is missing.
        """
        wait_until_ready(self._workers.hello, timeout_s)

    def flush(self) -> None:
        """Wait until every update so far is applied.

        Raises:
            PersiaError: one of them failed.
        """
        self._sharded.pipeline.flush()

    def close(self) -> None:
        """Push metrics once more, and close all connections. May be called twice."""
        self.checkpoints.close()
        self._sharded.pipeline.close()
        if self._pushes is not None:
            self._pushes.close()
        self._workers.close()
        self.client.close()

    def _totals(self) -> dict[str, int]:
        pipeline = self._sharded.pipeline
        return {
            "gradients_missed": pipeline.tally.total.num_missed,
            "gradients_refused": pipeline.tally.total.num_refused,
            "batches_skipped": self.num_skipped,
        }

    def _apply(self, settings: LookupSettings, *, is_training: bool) -> None:
        if not is_training:
            self._sharded.pipeline.set_num_pullers(evaluation=settings.num_workers)
            return
        if settings == self._settings:
            return
        staleness = settings.embedding_staleness
        if staleness is None:
            staleness = settings.forward_buffer_size + self._config.backward_buffer_size
        self._sharded.pipeline.set_staleness(staleness)
        self._sharded.pipeline.set_num_pullers(training=settings.num_workers)
        self._settings = settings


def connect_to_job(
    make_workers: Callable[..., Workers],
) -> tuple[EmbeddingClient, Workers]:
    """Connect to the embedding servers and the embedding workers of this job.

    Args:
        make_workers: ``RemoteWorkers``, or a subclass.

    Raises:
        ConfigError: this process belongs to no job.
        DiscoveryError: workers or servers did not register in time.
        JobMismatchError: another job has the port.
    """
    book = AddressBook.join(*env.require_job_store("A context"))
    with contextlib.closing(book):
        servers = book.addresses("server", timeout_s=timeouts.DISCOVERY_S)
        workers = book.addresses("worker", timeout_s=timeouts.DISCOVERY_S)
    settings: dict[str, Any] = {
        "timeout_s": timeouts.TRAINING_REQUEST_S,
        "greeting": book.greeting,
    }
    client = EmbeddingClient.connect(servers, **settings)
    return client, make_workers(workers, **settings)
