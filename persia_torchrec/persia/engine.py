"""The engine of PERSIA's contexts: the user's model and its embeddings in DMP.

    HybridModel
      embeddings   EmbeddingBagCollection, from embedding_config.yml -> SlotsSharder
      dense        the user's model, replicated as data_parallel.py says

``DistributedModelParallel`` shards the one and replicates the other: the same path that
a TorchRec user's model takes. The engine belongs to one trainer process and is called
by its main thread; only :meth:`Engine.start_pull` may be called by another.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from persia_torchrec import env, timeouts
from persia_torchrec.arrays import Positions
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.device.transfer import Staging
from persia_torchrec.embedding import embedding_config
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.implicit_member import join_job
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.lookup.sharded_lookup import Outputs
from persia_torchrec.metrics.push import publish_metrics
from persia_torchrec.metrics.push_settings import metrics_settings
from persia_torchrec.metrics.values import Means, Reading
from persia_torchrec.persia import data_parallel, slots
from persia_torchrec.persia.batch import PersiaBatch, ReferencedBatch
from persia_torchrec.persia.distributed import DistributedBaseOption
from persia_torchrec.persia.loader import LookupSettings
from persia_torchrec.persia.slot_tensors import (
    Slots,
    StagedSlots,
    run_dense,
    slot_tensors,
)
from persia_torchrec.persia.worker.process import ask_for_slots
from persia_torchrec.persia.worker_client import WAIT, RemoteBatch, RemoteWorkers
from persia_torchrec.pipeline.pipeline import BatchPipeline, PrefetchedBatch
from persia_torchrec.sharding.all_sharders import RemoteSharders
from persia_torchrec.sharding.backward_pass import UnevenInputsHook
from persia_torchrec.sharding.collection import CollectionSpec, TableCollection
from persia_torchrec.sharding.on_device import Pooled, Tensors
from persia_torchrec.sharding.sharded_module import ShardedRemoteCollection
from persia_torchrec.sharding.sharder import CollectionSharder
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics, readings
from persia_torchrec.sharding.training_blocks import join
from persia_torchrec.table import TableSettings, TableSpec
from persia_torchrec.training.checkpoint import ContextCheckpoints, at_first

Pull = PrefetchedBatch[RemoteBatch]
SlotsPipeline = BatchPipeline[ReferencedBatch | Mapping[str, Bags], RemoteBatch]

_SHORT_WAIT_S = 1e-3
_GENERATION = "generation"  # note of how often the trainers were started


class HybridModel(nn.Module):
    """A user's dense model behind its embeddings.

    Attributes:
        slots: names of the slots of the last batch, in its order.
    """

    def __init__(self, embeddings: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense
        self.slots: tuple[str, ...] = ()
        self.register_load_state_dict_pre_hook(_without_never_used)

    def forward(self, non_id_tensors: list[torch.Tensor], pull: Pull) -> object:
        """Run the whole model on one batch."""
        slots: Slots = self.embeddings(pull)
        self.slots = tuple(slots)
        return run_dense(self.dense, non_id_tensors, slots)


def _without_never_used(
    _: nn.Module, state: dict[str, Any], prefix: str, *__: object
) -> None:
    """Drop a parameter that states of version 0.1.0 have."""
    state.pop(f"{prefix}never_used", None)


def make_collection(spec: CollectionSpec) -> EmbeddingBagCollection:
    """Return the slots as a collection on the meta device, one table per group."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.dim,
                num_embeddings=1,  # the servers' tables have no length
                feature_names=[f.name for f in spec.features if f.table == table.name],
            )
            for table in spec.tables
        ],
        device=torch.device("meta"),
    )


class ShardedSlots(ShardedRemoteCollection):
    """PERSIA's slots on the servers; gives float32 tensors in the batch's order."""

    unsharded_module_type = EmbeddingBagCollection
    tells_of_evaluation = False  # contexts say which batches train, as PERSIA's do

    def compute_and_output_dist(self, ctx: object, input: Any) -> Any:
        """Return the output itself: no pipeline asks for it before it is used."""
        (batch,) = input
        return self.compute(ctx, batch)

    def make_output(self, batch: PrefetchedBatch[Any]) -> Slots:
        """Wait for the embeddings of each slot; see ``persia/slot_tensors.py``."""
        tensors, handle = self.pulled(batch), batch.handle
        of_config = [
            slots.Slot(name=feature.name, dim=dim, num_places=feature.num_places)
            for feature, dim in zip(self.spec.features, self._dims, strict=True)
        ]
        return slot_tensors(of_config, handle.slots, tensors, batch.outputs.places())


class PulledSlots:
    """The embeddings of a batch, which a worker has pooled, for a trainer's device.

    Attributes:
        staged: these on their way to a device, where that pays.
    """

    def __init__(
        self, outputs: Outputs, places: Sequence[Positions], staging: Staging | None
    ) -> None:
        self._outputs, self._places = outputs, places
        self.staged: StagedSlots | None = None
        if staging is not None:
            self.staged = StagedSlots(staging, outputs, places)

    def places(self) -> Sequence[Any]:
        """Return the places of raw ids, where the embeddings are."""
        return self._places if self.staged is None else self.staged.places()

    def pool(self, _: torch.Tensor | None) -> Pooled:
        """Return the embeddings."""
        if self.staged is not None:
            return Pooled(self.staged.embeddings())
        return Pooled(tuple(map(torch.from_numpy, self._outputs)))

    def gradients(self, _: Pooled, grads: Sequence[torch.Tensor]) -> Tensors:
        """Return copies: who owns the gradients may write them afterwards."""
        return tuple([grad.detach().to(torch.float32, copy=True) for grad in grads])


class StagingWorkers:
    """Embedding workers whose batches go to a device in the thread that pulls them."""

    def __init__(self, workers: RemoteWorkers, device: torch.device) -> None:
        self._staging = Staging(device) if device.type in Staging.DEVICES else None
        self._pull = workers.pull
        self.push, self.again = workers.push, workers.again
        self.abandon, self.change_tables = workers.abandon, workers.change_tables

    def pull(
        self,
        source: ReferencedBatch | Mapping[str, Bags],
        number: BatchNumber | None,
    ) -> tuple[Any, RemoteBatch]:
        """Have a batch pulled, and begin to copy it."""
        outputs, handle = self._pull(source, number)
        try:
            return PulledSlots(outputs, handle.places, self._staging), handle
        except BaseException:  # such as a GPU without memory
            if number is not None:
                self.abandon(handle)  # the worker awaits its gradients
            raise


class SlotsSharder(CollectionSharder):
    """Put PERSIA's slots on the servers, through the embedding workers of the job.

    ``spec`` has what a collection cannot say, such as prefixes. As in PERSIA, embedding
    gradients add up over trainers, while the dense ones are averaged. ``client`` is
    that of the servers, which counts lost rows and batches.
    """

    module_type = EmbeddingBagCollection
    sharded_type = ShardedSlots

    def __init__(
        self, workers: RemoteWorkers, spec: CollectionSpec, client: EmbeddingClient
    ) -> None:
        super().__init__(gradient_division=False)
        self.remote_tables.lost = client.lost
        self.remote_tables.recovery_s = workers.recovery_s
        self._workers, self._batches = workers, client.batches
        self._spec = spec

    def describe(
        self, module: TableCollection, env: ShardingEnv, path: str
    ) -> CollectionSpec:
        """Return the slots; a batch has any of them, in an order of its own."""
        return self._spec

    def make_pipeline(
        self, spec: CollectionSpec, env: ShardingEnv, device: torch.device
    ) -> SlotsPipeline:
        """Return the pipeline, its tables known to workers and servers."""
        self._workers.add_tables(spec.tables)
        timeout_s = timeouts.TRAINING_REQUEST_S + self._workers.recovery_s
        lookup = StagingWorkers(self._workers, device)
        pipeline: SlotsPipeline
        pipeline = BatchPipeline(lookup, staleness=1, timeout_s=timeout_s)
        pipeline.set_count(env.rank, self._batches)
        return pipeline


class Engine:
    """One trainer's connections, and its model inside DMP.

    ``model`` is the user's dense model, on ``device``; the other arguments are those of
    ``TrainCtx``, which also sets the attributes that are named as its arguments.

    Attributes:
        loader_wait_s: seconds that the caller waited for the batch it trains on next.
        weights: averages them after steps, if the trainers do not average gradients.
        job_id: of the job.
        resumed_from: path of the checkpoint that training resumes from, until its
            first batch.
        takes_ids: whether data loaders send the ids to this process itself.
    """

    backward_buffer_size = 10
    lookup_emb_directly = True
    takes_ids = False
    sharder: SlotsSharder | RemoteSharders
    _workers: RemoteWorkers | None
    loader_wait_s = 0.0
    resumed_from: str | None = None

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        distributed: DistributedBaseOption,
        optimizer: Optimizer,
        config: EmbeddingConfig,
        tables: Mapping[str, TableSettings],
    ) -> None:
        self.device = device
        self._tables = tables
        self._settings: LookupSettings | None = None
        store = env.require_job_store("A training context")
        join_job("trainer", env.get_rank(), env.get_world_size(), store)
        metrics = metrics_settings()
        self._connect(optimizer, config)
        data_parallel.init_process_group(distributed, device, self.client.recovery_s)
        self.job_id, generation = self._begin_generation(store)
        self.weights: data_parallel.AveragedWeights | None = None
        if distributed.period is not None:
            self.weights = data_parallel.AveragedWeights(model, distributed.period)
        replication = self.weights or data_parallel.ReducedGradients(distributed)
        self.collections = self._shard(model, optimizer, replication)
        # Trainers that average weights have each a loss scale of its own.
        agreement = self.sharder.remote_tables.agreement
        self._agreement = None if self.weights else agreement
        self.pipelines = [collection.pipeline for collection in self.collections]
        self.pipeline = self.pipelines[0]
        for pipeline in self.pipelines:
            pipeline.set_generation(generation)
        self.checkpoints = ContextCheckpoints(self.client, self.flush)
        TrainerMetrics.watch(self.sharder.remote_tables.counts)
        self._stop_pushes = publish_metrics(
            "nn_worker", env.get_rank(), metrics, self._read
        )

    def _connect(self, optimizer: Optimizer, config: EmbeddingConfig) -> None:
        """Connect to servers and embedding workers, and learn the slots."""
        schema = _slots()
        self._spec = CollectionSpec(
            slots.build_tables(schema, config, optimizer, self._tables),
            slots.build_features(schema),
        )
        self.client, self._workers = connect_to_job()

    def _shard(
        self, model: nn.Module, optimizer: Optimizer, replication: DataParallelWrapper
    ) -> list[ShardedRemoteCollection]:
        """Put the model into DMP, its slots before it; return what is on the servers.

        ``optimizer`` is of tables that :meth:`_connect` has not described.
        """
        assert self._workers is not None
        slots_sharder = SlotsSharder(self._workers, self._spec, self.client)
        self.sharder = slots_sharder
        slots_sharder.remote_tables.pushes_metrics = False  # this engine does
        self.hybrid = hybrid = HybridModel(make_collection(self._spec), model)
        self.dmp = DistributedModelParallel(
            hybrid,
            device=self.device,
            plan=self._plan(hybrid.embeddings, slots_sharder),
            sharders=[slots_sharder],
            data_parallel_wrapper=replication,
        )
        assert isinstance(hybrid.embeddings, ShardedSlots)
        self._sharded = hybrid.embeddings
        return [self._sharded]

    def bound(self, *, held: int, sent: int) -> None:
        """Bound the updates that are in memory, and those that are sent."""
        for pipeline in self.pipelines:
            pipeline.bound(held=held, sent=sent)

    @contextlib.contextmanager
    def in_step(
        self,
        scaler: torch.amp.GradScaler | None = None,
        clock: UnevenInputsHook | None = None,
    ) -> Iterator[None]:
        """Keep trainers in step whose data do not end at the same batch.

        At the end of the block a trainer answers the collectives of the others, until
        all are there; then all have one dense model, and one loss scale where their
        dense gradients were averaged. An exception ends the block at once. ``clock`` is
        that of automatic checkpoints, asked when dense gradients or weights were
        averaged.
        """
        if self._agreement is not None:
            self._agreement.scaler = scaler
        averages: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.weights is None:
            self.sharder.remote_tables.clock = clock
        else:
            averages = Join([self.weights, *filter(None, [clock])])
        with averages, join(self.dmp):
            yield

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool,
        settings: LookupSettings | None = None,
    ) -> Pull:
        """Begin to pull a batch; one of training makes rows and awaits its gradient.

        The pull is put off: the arrays of the batch must not change meanwhile.
        """
        self._begin_pull(batch, is_training=is_training)
        source: ReferencedBatch | dict[str, Bags]
        if isinstance(batch, PersiaBatch) or batch.id_type_features:
            source = {
                feature.name: Bags(feature.ids, feature.lengths)
                for feature in batch.id_type_features
            }
            slots.require_slots([*source], [f.name for f in self._spec.features])
        else:
            source = batch
        if settings is not None:
            self._apply(settings, is_training=is_training)
        return self._sharded.start(source, is_training=is_training)

    def _begin_pull(
        self, batch: PersiaBatch | ReferencedBatch, *, is_training: bool
    ) -> None:
        if is_training:
            self.resumed_from = None
        if isinstance(batch, PersiaBatch) and not self.lookup_emb_directly:
            raise ConfigError(
                "lookup_emb_directly must be True to look up a batch of this "
                "process. Received: False, with which batches come from data "
                "loaders by a StreamingDataset."
            )

    def run(self, non_id_tensors: list[torch.Tensor], pull: Pull) -> object:
        """Run the whole model; its backward pass updates both halves."""
        self._wait_for(pull)
        return self.dmp(non_id_tensors, pull)

    def evaluate(
        self, model: nn.Module, non_id_tensors: list[torch.Tensor], pull: Pull
    ) -> object:
        """Run a model on a batch that is not for training."""
        return run_dense(model, non_id_tensors, self.embed(pull))

    def embed(self, pull: Pull) -> Slots:
        """Wait for a batch's embeddings, a tensor per slot; see ``slot_tensors.py``."""
        self._wait_for(pull)
        slots: Slots = self._sharded(pull)
        return slots

    def backward(self, scaled_loss: torch.Tensor, scale: torch.Tensor) -> bool:
        """Run the backward pass of a loss times ``scale``; gradients leave unscaled.

        Those that are not finite are left out. Returns whether some were, on any
        trainer that averages dense gradients: these call it together. ``scale`` is
        float32 on the device of the loss; it may be 0, which leaves no gradient finite.
        """
        for collection in self.collections:
            collection.gradient_scale = scale.reciprocal()
            collection.skip_non_finite = True
        num_skipped = self._num_skipped()
        scaled_loss.backward()
        has_skipped = self._num_skipped() > num_skipped
        if self._agreement is not None:
            has_skipped = self._agreement.any(has_skipped)
        self.sharder.remote_tables.count_skipped(is_skipped=has_skipped)
        return has_skipped

    def _num_skipped(self) -> int:
        return sum(collection.num_skipped for collection in self.collections)

    def mark_skipped(self, scaler: torch.amp.GradScaler) -> None:
        """Let a scaler know, before its update, that gradients were left out."""
        self.sharder.remote_tables.mark(are_finite=False)
        scaler.unscale_(self.sharder.optimizer)
        self.sharder.optimizer.zero_grad()

    def configure(self, config: EmbeddingConfig) -> None:
        """Change how rows start and weights are bounded, but as ``tables`` has it."""

        def change(spec: TableSpec) -> TableSpec:
            own = self._tables.get(spec.name, TableSettings())
            own = replace(own, optimizer=None)  # its rate may have moved
            return own.apply_to(reconfigure(spec, config))

        timeout_s = 2 * timeouts.TRAINING_REQUEST_S + timeouts.ADD_TABLES_S
        for done in self.sharder.remote_tables.change(change):
            done.result(timeout_s)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until workers and servers answer and have their tables."""
        assert self._workers is not None
        slots.wait_until_ready(self._workers.hello, timeout_s)

    def flush(self) -> None:
        """Wait until every update so far is applied; raise the error of one."""
        for pipeline in self.pipelines:
            pipeline.flush()

    def close(self) -> None:
        """Push metrics once more, and close all connections. May be called twice."""
        self.checkpoints.close()
        for pipeline in self.pipelines:
            pipeline.close()
        self._stop_pushes()
        if self._workers is not None:
            self._workers.close()
        self.client.close()

    def _begin_generation(self, store: env.JobStore) -> tuple[str, int]:
        """Return the job's id, and the generation; earlier ones are rejected."""
        find = partial(_find_generation, store, self.client)
        job_id, generation = at_first(find, tuple[str, int])
        self.client.begin_generation(generation)
        if self._workers is not None:
            self._workers.generation = generation
        return job_id, generation

    def _plan(self, collection: nn.Module, sharder: SlotsSharder) -> ShardingPlan:
        """Return the only plan that there is, for which a planner is not needed."""
        plan = construct_module_sharding_plan(
            collection,
            {table.name: row_wise() for table in self._spec.tables},
            sharder=sharder,
            local_size=1,  # places nothing
            device_type=self.device.type,
        )
        return ShardingPlan({"embeddings": plan})

    def _wait_for(self, pull: Pull) -> None:
        began_s = time.perf_counter()
        is_training = pull.wait().is_training
        waited_s = self.loader_wait_s + time.perf_counter() - began_s
        self.loader_wait_s = 0.0
        if is_training and waited_s > _SHORT_WAIT_S and self._workers is not None:
            self._workers.observed.observe(WAIT, waited_s)

    def _read(self, means: Means) -> list[Reading]:
        """Return all metrics of this trainer; a thread of their reader calls it."""
        observed = [] if self._workers is None else self._workers.observed.read(means)
        counts = self.sharder.remote_tables.counts
        return [*observed, *readings([counts], TrainerMetrics.loss)]

    def _apply(self, settings: LookupSettings, *, is_training: bool) -> None:
        if not is_training:
            for pipeline in self.pipelines:
                pipeline.evaluation.set_num_threads(settings.num_workers)
        elif settings != self._settings:
            staleness = settings.embedding_staleness
            if staleness is None:
                staleness = settings.forward_buffer_size + self.backward_buffer_size
            late = settings.pulls_late
            for pipeline in self.pipelines:
                pipeline.set_staleness(staleness, pulls_late=late)
                pipeline.training.set_num_threads(settings.num_workers)
            self._settings = settings


def _find_generation(store: env.JobStore, client: EmbeddingClient) -> tuple[str, int]:
    """Return the id of the job, and the generation of its trainers, and note this."""
    with contextlib.closing(AddressBook.join(*store)) as book:
        generation = max(client.generation, int(book.note(_GENERATION) or 0))
        generation += env.num_group_restarts() > 0
        book.tell(_GENERATION, str(generation))
        return book.greeting.job_id, generation


def reconfigure(spec: TableSpec, config: EmbeddingConfig) -> TableSpec:
    """Return a table with the initializer, admission and weight bound of ``config``."""
    return replace(
        spec,
        initializer=config.initializer,
        admission=config.admission,
        weight_bound=config.weight_bound,
    )


def connect_to_job() -> tuple[EmbeddingClient, RemoteWorkers]:
    """Connect to the embedding servers and the embedding workers of this job."""
    book = AddressBook.join(*env.require_job_store("A context"))
    with contextlib.closing(book):
        servers, workers = book.addresses("server"), book.addresses("worker")
    settings: dict[str, Any] = {
        "timeout_s": timeouts.TRAINING_REQUEST_S,
        "greeting": book.greeting,
    }
    settings["recovery_s"] = book.recovery_s
    client = EmbeddingClient.connect(servers, **settings)
    return client, RemoteWorkers(workers, **settings)


def _slots() -> embedding_config.EmbeddingSchema:
    """Return the slots: of this process's file, or else of the embedding workers'."""
    if path := env.embedding_config_path():
        return embedding_config.load_embedding_config(path, warns=False)
    store = env.require_job_store("A training context")
    return ask_for_slots(store)
