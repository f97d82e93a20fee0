"""Sharded modules whose rows live on the embedding servers.

TorchRec drives every sharded module by three calls:

    input_dist    begins to pull the batch in the background and returns at once
    compute       waits for the embeddings and puts them into the autograd graph
    output_dist   names them: a KeyedTensor, or JaggedTensors

The last two are put off until the first use of the output, an awaitable. So what a
model does between call and use hides the latency of the pull as well; and a pipeline
that calls a module for a later batch, before the backward pass of this one, never waits
for a pull that waits for this backward pass. The backward pass pushes the gradients.

Dimension key:
    B: samples
    L: ids of one feature in a batch
    T: sum of the dims of all features
    D: embedding dim
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
    ShardedModule,
)
from torchrec.distributed.utils import init_parameters
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from persia_torchrec.data.torchrec import JaggedBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.pipeline.pipeline import BatchPipeline, PrefetchedBatch
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.sharding.on_device import DeviceBatch, Tensors, pool_rows
from persia_torchrec.sharding.remote_tables import RemoteTables
from persia_torchrec.sharding.state import add_entries, take_entries
from persia_torchrec.sharding.torchrec_api import feature_processors

Out = TypeVar("Out", bound=Multistreamable)
Function = TypeVar("Function", bound=Callable[..., object])

Sequences = dict[str, JaggedTensor]


def not_traced(function: Function) -> Function:
    """Leave a function, and all that it calls, out of what torch.compile traces."""
    return torch.compiler.disable(function)


class LazyOutput(LazyAwaitable[Out]):
    """An output to come; made once, with the gradient mode of the call."""

    def __init__(self, make: Callable[[], Out]) -> None:
        super().__init__()
        self._make: Callable[[], Out] | None = make
        self._has_grad = torch.is_grad_enabled()
        self._output: Out | None = None

    def _wait_impl(self) -> Out:
        # TorchRec remembers what it waited for by itself, but not what wait() returned.
        if self._make is not None:
            with torch.set_grad_enabled(self._has_grad):
                self._output = self._make()
            self._make = None
        assert self._output is not None
        return self._output


def lazy_output(make: Callable[[], Out]) -> LazyAwaitable[Out]:
    """Return an output to come, or the output where torch.compile traces the call.

    Dynamo cannot break a graph at the first use of an awaitable: it would leave the
    function that uses it, with its dense layers, to Python.
    """
    if torch.compiler.is_dynamo_compiling():
        return LazyNoWait(make())
    return LazyOutput(make)


class RemoteContext(Multistreamable):
    """What TorchRec passes along with one batch; empty."""

    def record_stream(self, stream: torch.Stream) -> None:
        """No tensor of this context lives on a device."""


class _Embeddings(torch.autograd.Function):
    """What was pulled for a batch; its gradients are pushed when they come."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        batch: PrefetchedBatch[Any],
        module: "ShardedRemoteCollection",
    ) -> Tensors:
        ctx.batch = batch
        ctx.module = module
        return module.on_device(batch)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.module.push(ctx.batch, grads)  # autograd gives zeros for those unused
        return None, None, None


class ShardedRemoteCollection(
    ShardedModule[Any, Any, Any, RemoteContext], FusedOptimizerModule
):
    """A collection on the embedding servers; what all kinds of it share.

    In training mode, with gradients enabled, rows are made on first sight and the
    gradients are pushed; otherwise the servers are only read, and an unknown id reads
    zeros.

    Args:
        pipeline: pulls and pushes; the module does not close it.
        spec: the collection's tables and features.
        tables: of all collections of the sharder.
        device: where the embeddings are wanted.
        gradient_scale: multiplied into every gradient before it is pushed.
        optimizer: of the tables, for schedules; None is an empty one.
    """

    weights_in: ClassVar[str] = "embedding_bags"
    """What TorchRec calls weights in it, as in ``embedding_bags.NAME.weight``."""

    unsharded_module_type: ClassVar[type[nn.Module]]
    """What this module was before it was sharded."""

    before_first_pull: Callable[[], None] | None = None
    """What to call when the first batch comes."""

    def __init__(
        self,
        pipeline: BatchPipeline[Any, Any],
        spec: CollectionSpec,
        tables: RemoteTables,
        *,
        device: torch.device,
        gradient_scale: float = 1.0,
        optimizer: KeyedOptimizer | None = None,
    ) -> None:
        super().__init__()
        self._optimizer = EmptyFusedOptimizer() if optimizer is None else optimizer
        self.remote_tables = tables
        self.pipeline = pipeline
        self.gradient_scale = gradient_scale
        self.skip_non_finite = False
        self.num_skipped = 0
        self.spec = spec
        self._keys, self._names, self._dims = spec.keys(), spec.names(), spec.dims()
        self._device = device
        # Autograd calls a function's backward only if an input wants a gradient.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.register_state_dict_post_hook(add_entries)
        self.register_load_state_dict_pre_hook(take_entries)

    @not_traced
    def start(self, batch: object, *, is_training: bool) -> PrefetchedBatch[Any]:
        """Begin to pull a batch; returns at once.

        It is a KeyedJaggedTensor, a TensorDict, or what the pipeline takes.
        """
        if self.before_first_pull is not None:
            self.before_first_pull()
            self.before_first_pull = None
        if not isinstance(batch, KeyedJaggedTensor | TensorDict):
            return self.pipeline.start(batch, training=is_training)
        given = JaggedBatch.of(batch, self._keys)
        return self.pipeline.start(given.features, training=is_training, given=given)

    def input_dist(
        self, ctx: RemoteContext, *input: Any, **kwargs: Any
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to pull; a batch whose pull has begun is passed on.

        The list of this one batch is for pipelines that fuse the inputs of modules.
        """
        (batch,) = (*input, *kwargs.values())
        if not isinstance(batch, PrefetchedBatch):
            is_training = self.training and torch.is_grad_enabled()
            batch = self.start(batch, is_training=is_training)
        return KJTListSplitsAwaitable([NoWait(NoWait(batch))], ctx)

    def create_context(self) -> RemoteContext:
        """Return an empty context."""
        return RemoteContext()

    def compute_and_output_dist(
        self, ctx: RemoteContext, input: KJTList
    ) -> LazyAwaitable[Any]:
        """Return the output before it is there, of a list of one prefetched batch."""
        (batch,) = input
        if torch.compiler.is_dynamo_compiling():  # see lazy_output
            return LazyNoWait(self._make_output(ctx, batch))
        return LazyOutput(partial(self._make_output, ctx, batch))

    def output_dist(self, ctx: RemoteContext, output: Any) -> LazyAwaitable[Any]:
        """Return the output: it is there."""
        return LazyNoWait(output)

    @not_traced
    def _make_output(self, ctx: RemoteContext, batch: Any) -> Any:
        return self.output_dist(ctx, self.compute(ctx, batch)).wait()

    def embeddings(self, batch: PrefetchedBatch[Any]) -> Tensors:
        """Return what was pulled, in the autograd graph of a training batch."""
        if not (batch.is_training and torch.is_grad_enabled()):
            return self.on_device(batch)
        tensors: Tensors = _Embeddings.apply(self._anchor, batch, self)
        return tensors

    def on_device(self, batch: PrefetchedBatch[Any]) -> Tensors:
        """Return what was pulled as tensors on the module's device."""
        if isinstance(batch.handle, DeviceBatch):
            return batch.handle.wait()
        return tuple(
            torch.from_numpy(output).to(self._device, non_blocking=True)
            for output in batch.outputs
        )

    def push(self, batch: PrefetchedBatch[Any], grads: Sequence[torch.Tensor]) -> None:
        """Push gradients, scaled; the backward pass calls this.

        Those that are not finite are not pushed, under a loss scale that was too large.
        """
        scale = self.remote_tables.loss_scale()
        factor = self.gradient_scale / (scale or 1)
        scaled = [_scaled(grad, factor) for grad in grads]
        if self.skip_non_finite or scale is not None:
            is_finite = all(bool(torch.isfinite(grad).all()) for grad in scaled)
            if scale is not None:
                self.remote_tables.after_check(is_finite)
            if not is_finite:
                self.num_skipped += 1
                batch.give_up()  # the graph, and with it the batch, may live on
                return
        self.remote_tables.before_push()
        if isinstance(batch.handle, DeviceBatch):
            batch.push(batch.handle.to_host(scaled))
            return
        on_cpu = [grad.to("cpu", torch.float32) for grad in scaled]
        batch.push(tuple([grad.contiguous().numpy() for grad in on_cpu]))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """There are none: the rows are on the servers."""
        return iter(())

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' learning rates; DistributedModelParallel asks for it."""
        return self._optimizer

    def tables_by_key(self) -> dict[str, str]:
        """Return the tables' names, by the keys that TorchRec gives their weights."""
        names = [table.name for table in self.spec.tables]
        return {f"{self.weights_in}.{name}.weight": name for name in names}

    def copy(self, device: torch.device) -> NoReturn:
        """Refuse: a copy would push the same batches twice."""
        raise ConfigError(
            "A collection with tables on the embedding servers cannot be copied to "
            "another device. Build a second DistributedModelParallel there."
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse, as ``DistributedModelParallel.copy`` begins with it."""
        self.copy(self._device)


class ShardedRemoteEmbeddingBagCollection(ShardedRemoteCollection):
    """An ``EmbeddingBagCollection``; its bags come pooled, or are pooled here."""

    unsharded_module_type = EmbeddingBagCollection

    def compute(
        self, ctx: RemoteContext, dist_input: PrefetchedBatch[Any]
    ) -> torch.Tensor:
        """Wait for the embeddings; float32 ``(B, T)`` on the device."""
        if self.spec.is_weighted:
            return self.pooled(dist_input, dist_input.source.weights())
        batch = dist_input.wait()
        if isinstance(batch.handle, DeviceBatch):
            return self.pooled(batch, None)
        (pooled_BT,) = self.embeddings(batch)
        return pooled_BT

    def pooled(
        self, batch: PrefetchedBatch[Any], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Wait for a batch's rows, and pool them with a weight per id, if any."""
        tensors = self.embeddings(batch.wait())
        if weights is not None:
            weights = weights.to(self._device, torch.float32, non_blocking=True)
        pooled = []
        for f, feature in enumerate(self.spec.features):
            rows_UD, weights_L = tensors[batch.handle.table_of[f]], None
            if weights is not None:
                weights_L = batch.source.of_feature(feature.key, weights)
            bags = batch.handle, f, feature.pooling
            pooled.append(pool_rows(rows_UD, weights_L, *bags))
        return torch.cat(pooled, dim=1)

    def output_dist(
        self, ctx: RemoteContext, output: torch.Tensor
    ) -> LazyAwaitable[KeyedTensor]:
        """Name the columns."""
        return LazyNoWait(KeyedTensor(self._names, self._dims, output))


class ShardedRemoteFeatureProcessedEmbeddingBagCollection(
    ShardedRemoteEmbeddingBagCollection
):
    """Feature processors here, and the bags that they weight on the servers.

    The processors are ordinary dense parameters of the model. They run when the
    embeddings are wanted, not when the pull begins, so that a pipeline that pulls ahead
    uses their parameters of this step.
    """

    # TorchRec's names, here and below, so that a state dict has the same keys.
    weights_in: ClassVar[str] = "_embedding_bag_collection.embedding_bags"
    unsharded_module_type = FeatureProcessedEmbeddingBagCollection

    def use_processors(self, module: FeatureProcessedEmbeddingBagCollection) -> None:
        """Take a collection's processors, initialised on the device of this module."""
        self._feature_processors = feature_processors(module)
        # Its wrapper for one module per feature works for both kinds.
        self._processors = (module.split()[0],)  # a tuple: not registered a second time
        init_parameters(self._feature_processors, self._device)

    def compute(
        self, ctx: RemoteContext, dist_input: PrefetchedBatch[Any]
    ) -> torch.Tensor:
        """Wait for the rows, and pool them with the weights of the processors."""
        (processors,) = self._processors
        processed = processors(dist_input.source.kjt)
        return self.pooled(dist_input, processed.weights())


class ShardedRemoteEmbeddingCollection(ShardedRemoteCollection):
    """An ``EmbeddingCollection`` on the embedding servers: a row for each id.

    Its output is a ``JaggedTensor`` per feature: values float32 ``(L, D)`` in the order
    of the batch's ids, lengths int32 ``(B,)`` and, where the collection needs indices,
    the ids as weights, ``(L,)``. A feature that a table names twice has its rows twice,
    one after the other, ``(L, 2 * D)``, as in TorchRec's sharded module.
    """

    weights_in: ClassVar[str] = "embeddings"
    unsharded_module_type = EmbeddingCollection

    def compute(
        self, ctx: RemoteContext, dist_input: PrefetchedBatch[Any]
    ) -> Sequences:
        """Wait for the embeddings of each feature."""
        batch = dist_input.wait()
        handle, embeddings = batch.handle, self.embeddings(batch)
        if isinstance(handle, DeviceBatch):
            lengths = [offsets.diff() for offsets in handle.offsets]
            rows_of = zip(handle.table_of, handle.inverses, strict=True)
            embeddings = tuple(
                functional.embedding(inverse_L, embeddings[table])
                for table, inverse_L in rows_of
            )
        else:
            lengths = [torch.from_numpy(n) for n in handle.lengths]
        features = self.spec.features
        same_name: dict[str, list[int]] = {}
        for f, feature in enumerate(features):
            same_name.setdefault(feature.name, []).append(f)
        sequences = {}
        for name, (f, *others) in same_name.items():
            blocks = [embeddings[i] for i in (f, *others)]
            ids = batch.source.ids(features[f].key) if self.spec.needs_ids else None
            sequences[name] = JaggedTensor(
                values=torch.cat(blocks, dim=1) if others else blocks[0],
                lengths=lengths[f].to(self._device, non_blocking=True),
                weights=ids if ids is None else ids.to(self._device, non_blocking=True),
            )
        return sequences


def _scaled(grad: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a gradient times a number; the gradient itself if that changes nothing.

    Another thread may then read it after the backward pass. Autograd reuses the memory
    of a gradient, as a parameter's ``grad``, only if no other reference to the tensor
    is held; an array made of it, without ``detach``, is one.
    """
    if scale == 1 and not grad.requires_grad:
        return grad
    return grad.detach().to(torch.float32) * scale
