"""Sharded modules whose rows live on the embedding servers.

TorchRec drives every sharded module by three calls:

    input_dist    begins to pull the batch in the background and returns at once
    compute       waits for the embeddings, puts them into the autograd graph, and
                  names them: a KeyedTensor, or JaggedTensors
    output_dist   has nothing left to do

``compute`` is put off until the first use of the output, an awaitable: so a pipeline
that calls a module for a later batch, before the backward pass of this one, never waits
for a pull that waits for this backward pass. The backward pass pushes the gradients.

Dimensions: B samples, L ids of one feature, T sum of all dims, D embedding dim.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
import torchrec
from tensordict import TensorDict
from torch import nn
from torch.nn import functional
from torchrec.distributed import types
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.utils import init_parameters
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from persia_torchrec.data.torchrec import JaggedBatch
from persia_torchrec.errors import ConfigError
from persia_torchrec.pipeline.pipeline import BatchPipeline, PrefetchedBatch
from persia_torchrec.sharding import state, torchrec_api
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.sharding.on_device import DeviceBatch, Tensors, pool_rows
from persia_torchrec.sharding.remote_tables import RemoteTables


class LazyOutput(types.LazyAwaitable[Any]):
    """An output to come; made once, with the gradient mode of the call.

    Not where torch.compile traces the call: Dynamo cannot break a graph at the first
    use of an awaitable, and would leave the dense layers after it to Python.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make: Callable[[], Any] | None = make
        self._has_grad = torch.is_grad_enabled()
        self._output: Any = None

    def _wait_impl(self) -> Any:
        # TorchRec remembers what it waited for by itself, but not what wait() returned.
        if self._make is not None:
            with torch.set_grad_enabled(self._has_grad):
                self._output = self._make()
            self._make = None
        return self._output


class _Embeddings(torch.autograd.Function):
    """What was pulled for a batch; its gradients are pushed when they come."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, batch: Any, module: Any) -> Tensors:
        ctx.batch, ctx.module = batch, module
        tensors: Tensors = module.on_device(batch)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.module.push(ctx.batch, grads)  # autograd gives zeros for those unused
        return None, None, None


class ShardedRemoteCollection(
    types.ShardedModule[Any, Any, Any, Any], FusedOptimizerModule
):
    """A collection on the embedding servers; what all kinds of it share.

    In training mode, with gradients enabled, rows are made on first sight and the
    gradients are pushed, times ``gradient_scale``; otherwise the servers are only read,
    and an unknown id reads zeros. The module does not close ``pipeline``.
    """

    weights_in: ClassVar[str] = "embedding_bags"  # as in embedding_bags.NAME.weight
    unsharded_module_type: ClassVar[type[nn.Module]]
    # Replaced by one with the tables' learning rates.
    fused_optimizer: KeyedOptimizer = EmptyFusedOptimizer()
    before_first_pull: Callable[[], None] | None = None
    create_context = types.NullShardedModuleContext

    def __init__(
        self,
        pipeline: BatchPipeline[Any, Any],
        spec: CollectionSpec,
        tables: RemoteTables,
        *,
        device: torch.device,
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.remote_tables = tables
        self.pipeline = pipeline
        self.gradient_scale = gradient_scale
        self.skip_non_finite = False
        self.num_skipped = 0
        self.spec = spec
        self._keys = list(dict.fromkeys(feature.key for feature in spec.features))
        self._names = [feature.name for feature in spec.features]
        dim_of = {table.name: table.dim for table in spec.tables}
        self._dims = [dim_of[feature.table] for feature in spec.features]
        # The tables' names, by the keys that TorchRec gives their weights.
        self.tables_by_key = {f"{self.weights_in}.{n}.weight": n for n in dim_of}
        self._device = device
        # Autograd calls a function's backward only if an input wants a gradient.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.register_state_dict_post_hook(state.add_entries)
        self.register_load_state_dict_pre_hook(state.take_entries)

    @torch.compiler.disable
    def start(self, batch: object, *, is_training: bool) -> PrefetchedBatch[Any]:
        """Begin to pull a KeyedJaggedTensor, TensorDict, or what the pipeline takes."""
        if self.before_first_pull is not None:
            self.before_first_pull()
            self.before_first_pull = None
        if not isinstance(batch, torchrec.KeyedJaggedTensor | TensorDict):
            return self.pipeline.start(batch, training=is_training)
        given = JaggedBatch.of(batch, self._keys)
        return self.pipeline.start(given.features, training=is_training, given=given)

    def input_dist(
        self, ctx: object, *input: Any, **kwargs: Any
    ) -> KJTListSplitsAwaitable:
        """Begin to pull; a batch whose pull has begun is passed on."""
        (batch,) = (*input, *kwargs.values())
        if not isinstance(batch, PrefetchedBatch):
            is_training = self.training and torch.is_grad_enabled()
            batch = self.start(batch, is_training=is_training)
        # A list of one batch, for pipelines that fuse the inputs of modules.
        return KJTListSplitsAwaitable([types.NoWait(types.NoWait(batch))], ctx)

    def compute_and_output_dist(
        self, ctx: object, input: Any
    ) -> types.LazyAwaitable[Any]:
        """Return the output before it is there, of a list of one prefetched batch."""
        (batch,) = input
        if torch.compiler.is_dynamo_compiling():  # see LazyOutput
            return types.LazyNoWait(self.compute(ctx, batch))
        return LazyOutput(partial(self.compute, ctx, batch))

    @torch.compiler.disable
    def compute(self, ctx: object, batch: PrefetchedBatch[Any]) -> Any:
        """Return the output of a batch, outside of what torch.compile traces."""
        return self.make_output(batch)

    def output_dist(self, ctx: object, output: Any) -> types.LazyAwaitable[Any]:
        """Return the output: it is there."""
        return types.LazyNoWait(output)

    @abstractmethod
    def make_output(self, batch: PrefetchedBatch[Any]) -> Any:
        """Wait for the embeddings of a batch, and name them."""

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
            [
                torch.from_numpy(output).to(self._device, non_blocking=True)
                for output in batch.outputs
            ]
        )

    def push(self, batch: PrefetchedBatch[Any], grads: Sequence[torch.Tensor]) -> None:
        """Push gradients, scaled, that are finite under a loss scale."""
        scaler = self.remote_tables.grad_scaler
        scale = scaler.get_scale() if scaler and scaler.is_enabled() else None
        factor = self.gradient_scale / (scale or 1)
        # Another thread may read the gradients themselves after the backward pass:
        # autograd reuses the memory of one, as a parameter's ``grad``, only if no other
        # reference to the tensor is held, as an array made of it without ``detach`` is.
        if factor != 1 or any(grad.requires_grad for grad in grads):
            grads = [grad.detach().to(torch.float32) * factor for grad in grads]
        if self.skip_non_finite or scale is not None:
            is_finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
            if scale is not None:
                self.remote_tables.after_check(is_finite)
            if not is_finite:
                self.num_skipped += 1
                batch.give_up()  # the graph, and with it the batch, may live on
                return
        self.remote_tables.send_rates()
        if isinstance(batch.handle, DeviceBatch):
            batch.push(batch.handle.to_host(grads))
            return
        on_cpu = [grad.to("cpu", torch.float32) for grad in grads]
        batch.push(tuple([grad.contiguous().numpy() for grad in on_cpu]))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """There are none: the rows are on the servers."""
        return iter(())

    def copy(self, _: object) -> NoReturn:
        """Refuse, by whichever way: a copy would push the same batches twice."""
        raise ConfigError(
            "A collection with tables on the embedding servers cannot be copied to "
            "another device. Build a second DistributedModelParallel there."
        )

    __deepcopy__ = copy  # DistributedModelParallel.copy begins with it


class ShardedRemoteEmbeddingBagCollection(ShardedRemoteCollection):
    """An ``EmbeddingBagCollection``; its bags come pooled, or are pooled here."""

    unsharded_module_type = torchrec.EmbeddingBagCollection

    def make_output(
        self, batch: PrefetchedBatch[Any], weights: torch.Tensor | None = None
    ) -> torchrec.KeyedTensor:
        """Wait for the embeddings, float32 ``(B, T)``; by default with own weights."""
        if weights is None and self.spec.is_weighted:
            weights = batch.source.weights()
        tensors, handle = self.embeddings(batch.wait()), batch.handle
        if weights is not None:
            weights = weights.to(self._device, torch.float32, non_blocking=True)
        if isinstance(handle, DeviceBatch):
            rows, pooled = tensors, []
            for f, feature in enumerate(self.spec.features):
                weights_L = weights
                if weights is not None:
                    weights_L = batch.source.of_feature(feature.key, weights)
                rows_UD = rows[handle.batch.features.table_of[f]]
                pooled.append(pool_rows(rows_UD, weights_L, handle, f, feature.pooling))
            tensors = (torch.cat(pooled, dim=1),)
        return torchrec.KeyedTensor(self._names, self._dims, *tensors)


class ShardedRemoteFeatureProcessedEmbeddingBagCollection(
    ShardedRemoteEmbeddingBagCollection
):
    """Feature processors here, and the bags that they weight on the servers.

    The processors run when the embeddings are wanted, not when the pull begins, so that
    a pipeline that pulls ahead uses their parameters of this step.
    """

    # TorchRec's names, here and below, so that a state dict has the same keys.
    weights_in: ClassVar[str] = "_embedding_bag_collection.embedding_bags"
    unsharded_module_type = FeatureProcessedEmbeddingBagCollection

    def use_processors(self, module: FeatureProcessedEmbeddingBagCollection) -> None:
        """Take a collection's processors, initialised on the device of this module."""
        self._feature_processors = torchrec_api.feature_processors(module)
        # Its wrapper for one module per feature works for both kinds.
        self._processors = (module.split()[0],)  # a tuple: not registered a second time
        init_parameters(self._feature_processors, self._device)

    def make_output(
        self, batch: PrefetchedBatch[Any], weights: torch.Tensor | None = None
    ) -> torchrec.KeyedTensor:
        """Pool with the weights of the processors."""
        (processors,) = self._processors
        return super().make_output(batch, processors(batch.source.kjt).weights())


class ShardedRemoteEmbeddingCollection(ShardedRemoteCollection):
    """An ``EmbeddingCollection`` on the embedding servers: a row for each id.

    Its output is a ``JaggedTensor`` per feature: values float32 ``(L, D)`` in the order
    of the batch's ids, lengths int32 ``(B,)`` and, where the collection needs indices,
    the ids as weights, ``(L,)``. A feature that a table names twice has its rows twice,
    one after the other, ``(L, 2 * D)``, as in TorchRec's sharded module.
    """

    weights_in: ClassVar[str] = "embeddings"
    unsharded_module_type = torchrec.EmbeddingCollection

    def make_output(
        self, batch: PrefetchedBatch[Any]
    ) -> dict[str, torchrec.JaggedTensor]:
        """Wait for the embeddings of each feature."""
        tensors, handle = self.embeddings(batch.wait()), batch.handle
        sequences: dict[str, torchrec.JaggedTensor] = {}
        for f, feature in enumerate(self.spec.features):
            if isinstance(handle, DeviceBatch):
                rows_UD = tensors[handle.batch.features.table_of[f]]
                rows_LD = functional.embedding(handle.inverses[f], rows_UD)
                lengths = handle.offsets[f].diff()
            else:
                rows_LD = tensors[f]
                lengths = torch.from_numpy(batch.source.features[feature.key].lengths)
            if feature.name in sequences:
                previous = sequences[feature.name].values()
                rows_LD = torch.cat([previous, rows_LD], dim=1)
            ids = batch.source.ids(feature.key) if self.spec.needs_ids else None
            sequences[feature.name] = torchrec.JaggedTensor(
                values=rows_LD,
                lengths=lengths.to(self._device, non_blocking=True),
                weights=ids if ids is None else ids.to(self._device, non_blocking=True),
            )
        return sequences
