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

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet, ref

import numpy as np
import torch
import torchrec
from tensordict import TensorDict
from torch import nn
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torchrec.distributed import types
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.utils import init_parameters
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer

from persia_torchrec.client.codec import PushOutcome
from persia_torchrec.device.batches import (
    JaggedBatch,
    PulledKeyedJaggedTensor,
    require_batch,
)
from persia_torchrec.device.transfer import to_device
from persia_torchrec.errors import BatchError, ConfigError
from persia_torchrec.pipeline.pipeline import (
    BatchPipeline,
    PrefetchedBatch,
    PullOrder,
)
from persia_torchrec.sharding import state_dict, torchrec_api
from persia_torchrec.sharding.backward_pass import looked_up, saved_as_itself
from persia_torchrec.sharding.cached_rows import CachedBatch, Steps
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.sharding.on_device import (
    GradientCopy,
    PulledBatch,
    Tensors,
    by_feature,
)
from persia_torchrec.sharding.planned import Placeholder
from persia_torchrec.sharding.table_control import (
    WAIT_FOR_PUSH,
    WAIT_FOR_ROWS,
    TrainerTables,
    loss_scale,
)

logger = logging.getLogger(__name__)

EMBEDDING_BAG_KEY = "ids"
"""How the one feature of an ``nn.EmbeddingBag`` is called."""


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
    """What was pulled for a batch; its gradients are pushed when they come.

    ``graphs`` is an attribute of ``token``: those of rows that are trained here, which
    end with what autograd saves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        token: Any,
        weights: torch.Tensor | None,
        batch: Any,
        module: Any,
    ) -> Tensors:
        pulled: PulledBatch = batch.outputs
        ctx.batch, ctx.module, ctx.pulled = batch, module, pulled
        pooled = pulled.pool(weights)
        ctx.pooled = pooled._replace(outputs=(), graphs=())
        if token is not None:
            token.graphs = pooled.graphs
        ctx.save_for_backward(token, weights)
        return pooled.outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_weights, (token, weights) = None, ctx.saved_tensors
        # Autograd gives zeros for outputs that are not used.
        given = ctx.pulled.gradients(ctx.pooled, grads)
        if ctx.needs_input_grad[2]:
            of_weights = ctx.pulled.weights_gradient(ctx.pooled, grads, weights)
        ctx.module.push(ctx.batch, given, () if token is None else token.graphs)
        return None, None, of_weights, None, None


class ShardedRemoteCollection(
    ShardedEmbeddingModule[Any, Any, Any, Any], FusedOptimizerModule
):
    """A collection on the embedding servers; what all kinds of it share.

    In training mode, with gradients enabled, rows are made on first sight and the
    gradients are pushed, times ``gradient_scale``; otherwise the servers are only read,
    and an unknown id reads what ``ids_without_row`` of its table says. The module does
    not close ``pipeline``.
    """

    weights_in: ClassVar[str] = "embedding_bags"  # as in embedding_bags.NAME.weight
    unsharded_module_type: ClassVar[type[nn.Module]]
    # Replaced by one with the tables' learning rates.
    fused_optimizer: KeyedOptimizer = EmptyFusedOptimizer()
    before_first_pull: Callable[[], None] | None = None
    # The rows, for state dicts; without it, these say that the rows are elsewhere.
    collection_state: state_dict.CollectionState | None = None
    module_sharding_plan: types.EmbeddingModuleShardingPlan  # which it was made by
    replaced: "ref[nn.Module] | None" = None  # the collection in whose place it is
    pulls_ahead = False  # whether the caller begins pulls before it calls the model
    create_context = types.NullShardedModuleContext
    qconfig = torchrec_api.QConfig()
    tells_of_evaluation: ClassVar[bool] = True  # if a backward pass reaches such rows

    def __init__(
        self,
        pipeline: BatchPipeline[Any, Any],
        spec: CollectionSpec,
        tables: TrainerTables,
        *,
        device: torch.device,
        gradient_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.remote_tables = tables
        self.pipeline = pipeline
        self.gradient_scale: float | torch.Tensor = gradient_scale
        self.skip_non_finite = False
        self.num_skipped = 0
        self.spec = spec
        self._is_weighted = spec.is_weighted  # TorchRec's name
        self._keys = list(dict.fromkeys(feature.key for feature in spec.features))
        self._names = [feature.name for feature in spec.features]
        dim_of = {table.name: table.dim for table in spec.tables}
        self._dims = [dim_of[feature.table] for feature in spec.features]
        self._clips = [spec.max_gradients.get(f.table, 0.0) for f in spec.features]
        # What the gradients of the columns of pooled features are clamped to.
        self._column_bounds: torch.Tensor | None = None
        # The tables' names, by the keys that TorchRec gives their weights.
        own = [spec.own_name(name) for name in dim_of]
        keys = (f"{self.weights_in}.{n}.weight" for n in own)
        keys = keys if self.weights_in else ("weight" for _ in dim_of)  # it is the one
        self.tables_by_key = dict(zip(keys, dim_of, strict=True))
        self._device = device
        # By which gradients leave. What comes has another: both copy at a time.
        self._leaving = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._column_order: torch.Tensor | None = None  # where dims alternate
        # Autograd calls a function's backward only if an input wants a gradient.
        self._anchor = torch.zeros(0, device="cpu", requires_grad=True)
        # Begun, as by a train pipeline that pulls ahead, and not used yet.
        self._pull_order = PullOrder(partial(self._pull, is_training=True))
        self.register_state_dict_post_hook(state_dict.add_entries)
        self.register_load_state_dict_pre_hook(state_dict.take_entries)

    @torch.compiler.disable(reason=torchrec_api.NOT_IN_GRAPHS)
    def start(
        self, batch: object, *, is_training: bool, is_input: bool = False
    ) -> PrefetchedBatch[Any]:
        """Begin to pull a KeyedJaggedTensor, TensorDict, or what the pipeline takes.

        With ``is_input``, batches may be used in another order than they begin.
        """
        of_jit, of_export, modes, modes_before = torchrec_api.TRACES
        if of_jit() or of_export() or modes() or modes_before():
            torchrec_api.require_no_trace()
        if self.before_first_pull is not None:
            self.before_first_pull()
            self.before_first_pull = None
        if not isinstance(batch, torchrec.KeyedJaggedTensor | TensorDict):
            return self.pipeline.start(batch, training=is_training)
        given = JaggedBatch(batch, self._keys)
        started = self._pull(given, is_training=is_training)
        if is_input and is_training:
            self._pull_order.started(started)
        return started

    def _pull(self, given: JaggedBatch, *, is_training: bool) -> PrefetchedBatch[Any]:
        ids: Any = partial(given.take, pins_weights=True)
        if self._leaving is None:  # without a GPU the ids are here
            ids = given.take()
        return self.pipeline.start(ids, training=is_training, given=given)

    @property
    def shardings(self) -> dict[str, Any]:
        """Those of TorchRec's: none."""
        return {}

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Look up, as every sharded module does; torch.fx traces it as a leaf."""
        for given in (*input, *kwargs.values()):
            if isinstance(given, torch.fx.Proxy):
                return torchrec_api.traced_call(self, given, input, kwargs)
        return super().forward(*input, **kwargs)

    def input_dist(
        self, ctx: object, *input: Any, **kwargs: Any
    ) -> KJTListSplitsAwaitable:
        """Begin to pull; a batch whose pull has begun is passed on."""
        batch = require_batch([*input, *kwargs.values()], PrefetchedBatch)
        if isinstance(batch, PulledKeyedJaggedTensor):
            batch = batch.take(self)
        elif not isinstance(batch, PrefetchedBatch):
            is_training = self.training and torch.is_grad_enabled()
            if is_training and self.pulls_ahead:
                raise ConfigError(
                    "A collection in a TrainCtx must be called with the "
                    "KeyedJaggedTensor that forward is given, for which its rows are "
                    "pulled ahead. Received: another one. Train such a model by a "
                    "TorchRec loop: DataLoader(..., as_torchrec=True)."
                )
            batch = self.start(batch, is_training=is_training, is_input=True)
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

    @torch.compiler.disable(reason=torchrec_api.NOT_IN_GRAPHS)
    def compute(self, ctx: object, batch: PrefetchedBatch[Any]) -> Any:
        """Return the output of a batch, outside of what torch.compile traces."""
        most = self.pipeline.max_in_flight
        return self.make_output(self._pull_order.consumed(batch, most))

    def output_dist(self, ctx: object, output: Any) -> types.LazyAwaitable[Any]:
        """Return the output: it is there."""
        return types.LazyNoWait(output)

    @abstractmethod
    def make_output(self, batch: PrefetchedBatch[Any]) -> Any:
        """Wait for the embeddings of a batch, and name them."""

    def pulled(
        self, batch: PrefetchedBatch[Any], weights: torch.Tensor | None = None
    ) -> Tensors:
        """Wait for the rows of a batch, and pool them in its autograd graph.

        ``weights`` are of all ids of the batch, if any. The wait is a span of
        ``torch.profiler``.
        """
        with record_function(WAIT_FOR_ROWS):
            batch.wait()
        if self._leaving is not None:
            # Not every caller does: a MixedSharder's module is no part of a pipeline's
            # context, and ids and weights were copied on another stream.
            batch.record_stream(torch.cuda.current_stream(self._device))
        if weights is not None:
            weights = weights.to(self._device, torch.float32, non_blocking=True)
        if batch.is_training and torch.is_grad_enabled():
            if not isinstance(batch.outputs, CachedBatch):
                return _Embeddings.apply(self._anchor, None, weights, batch, self)
            self.remote_tables.send_rates()
            batch.outputs.follow(self.remote_tables.specs)
            token = torch.empty(1, device="cpu")
            with saved_as_itself(token):
                return _Embeddings.apply(self._anchor, token, weights, batch, self)
        pulled: PulledBatch = batch.outputs
        tensors = pulled.pool(weights).outputs
        if not (self.tells_of_evaluation and torch.is_grad_enabled()):
            return tensors
        return looked_up(tensors, self._anchor, self.remote_tables.tell_of_evaluation)

    def clip(self, output: torch.Tensor, most: "torch.Tensor | float") -> None:
        """Clamp the gradient of an output element by element, before it goes to rows.

        ``most`` is the bound, or those of its columns. It holds for gradients as they
        are pushed: divided by the number of trainers, and by the loss scale, under
        which those that are not finite stay so.
        """
        tables = self.remote_tables

        def clamped(grad: torch.Tensor) -> torch.Tensor:
            scaler, factor = tables.grad_scaler, self.gradient_scale
            is_scaled = scaler is not None and scaler.is_enabled()
            if scaler is not None and is_scaled:
                factor = factor / loss_scale(scaler, self._device)
            bound = torch.as_tensor(most, device=grad.device) / factor
            within = grad.clamp(-bound, bound)
            if is_scaled or self.skip_non_finite:
                return torch.where(grad.isfinite(), within, grad)
            return within

        if output.requires_grad:
            output.register_hook(clamped)

    def push(
        self,
        batch: PrefetchedBatch[Any],
        grads: Sequence[torch.Tensor],
        graphs: Sequence[torch.Tensor] = (),
    ) -> None:
        """Push gradients, scaled, that are finite under a loss scale.

        On a GPU nothing waits here, in the midst of a backward pass, but at its end. On
        the CPU this waits for servers at staleness 0: an error of theirs, which names a
        trainer that is lost, comes before that of a collective, which does not.
        ``graphs`` are of rows that are trained here.
        """
        tables, scaler = self.remote_tables, self.remote_tables.grad_scaler
        is_scaled = scaler is not None and scaler.is_enabled()
        factor: Any = self.gradient_scale
        if scaler is not None and is_scaled:
            factor = factor / loss_scale(scaler, self._device)
        if isinstance(factor, torch.Tensor) or factor != 1:
            grads = [grad.mul_(factor) for grad in grads]  # made for this push alone
        is_checked = self.skip_non_finite or is_scaled
        tables.send_rates()
        steps: Steps | None = None
        if isinstance(batch.outputs, CachedBatch):
            grads, steps = batch.outputs.take_steps(graphs, grads, tables.specs)
        leaving = GradientCopy(grads, self._leaving, check=is_checked, of=batch.outputs)
        if is_checked:
            backward = tables.current_backward(agrees=is_scaled)
            push = partial(self._push_if_finite, batch, leaving, steps)
            backward.checks.append(push)
        elif self._leaving is not None:
            tables.current_backward().waits.append(batch.send(leaving.wait))
        else:
            if steps is not None:
                self._take(steps)
            with record_function(WAIT_FOR_PUSH):
                batch.send(leaving.wait)()

    def _take(self, steps: Steps) -> None:
        if num_refused := steps.take():
            self.pipeline.tally.applied(PushOutcome(0, num_refused, 0, 0))

    def _push_if_finite(
        self,
        batch: PrefetchedBatch[Any],
        leaving: GradientCopy,
        steps: Steps | None,
    ) -> Callable[[], None] | None:
        if leaving.is_finite() and (steps is None or steps.are_finite()):
            if steps is not None:
                self._take(steps)
            return batch.send(leaving.wait)
        self.num_skipped += 1
        batch.give_up()  # the graph, and with it the batch, may live on
        return None

    def add_placeholders(self, num_embeddings: Mapping[str, int]) -> None:
        """Register the modules and parameters of the tables, which hold no rows.

        They are where TorchRec has those of its own tables. Gradients never reach them.
        ``num_embeddings`` are by the collection's own names.
        """
        dims = {table.name: table.dim for table in self.spec.tables}
        for key, full_name in self.tables_by_key.items():
            table = self.spec.own_name(full_name)
            dim = dims[full_name]
            weight = Placeholder(torch.empty(0, dim, device=self._device))
            weight.table, weight.declared = full_name, (num_embeddings[table], dim)
            weight.told = partial(self.remote_tables.tell_of_frozen, full_name)
            torchrec_api.mark_in_backward(weight)
            owner: nn.Module = self
            path = key.removesuffix(f"{table}.weight").split(".")[:-1]
            for name in [*path, table] if path else ():
                if name not in dict(owner.named_children()):
                    is_list = name == path[-1]
                    owner.add_module(name, nn.ModuleDict() if is_list else nn.Module())
                owner = owner.get_submodule(name)
            owner.register_parameter("weight", weight)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the placeholders, which no trainer may replicate."""
        names = dict(self.named_parameters())
        yield from (
            f"{prefix}.{k}" if prefix else k for k in self.tables_by_key if k in names
        )

    def reset_parameters(self) -> None:
        """Give all rows that there are their initial weights; all trainers call it."""
        if self.collection_state is not None:
            self.collection_state.reset(self.tables_by_key.values())

    def update_shards(self, *_: object, **__: object) -> NoReturn:
        """Reject: the servers share the rows by their ids."""
        raise ConfigError(
            "Tables on the embedding servers cannot be resharded: every server holds "
            "the ids that hash to it. Received: a new plan for some. Start more "
            "servers, and load a checkpoint into them."
        )

    def copy(self, _: object) -> NoReturn:
        """Reject, by whichever way: a copy would push the same batches twice."""
        raise ConfigError(
            "A collection with tables on the embedding servers cannot be copied, nor "
            "moved to another device: it would be the same rows. Received: a copy, "
            "for example by copy.deepcopy. Build a second DistributedModelParallel, "
            "whose sharders have a namespace=, and load model.state_dict() into it."
        )

    __deepcopy__ = copy  # DistributedModelParallel.copy begins with it


class ShardedRemoteEmbeddingBagCollection(ShardedRemoteCollection):
    """An ``EmbeddingBagCollection``, whose bags are pooled here."""

    unsharded_module_type = torchrec.EmbeddingBagCollection
    _has_told_weights = False

    def make_output(
        self, batch: PrefetchedBatch[Any], weights: torch.Tensor | None = None
    ) -> torchrec.KeyedTensor:
        """Wait for the embeddings, float32 ``(B, T)``; by default with own weights."""
        if weights is None and self._is_weighted:
            weights = batch.source.weights()
        elif weights is None and batch.source.kjt.weights_or_none() is not None:
            self._tell_ignored_weights()
        tensors = self.pulled(batch, weights)
        values = tensors[0]
        if len(tensors) > 1:  # one of each dim
            plan = batch.outputs.batch.plan
            values = torch.cat(tensors, dim=1)
            if list(plan.group_of) != sorted(plan.group_of):
                values = values.index_select(1, self._columns(plan.group_of))
        if any(self._clips):
            self.clip(values, self._bounds())
        return torchrec.KeyedTensor(self._names, self._dims, values)

    def _tell_ignored_weights(self) -> None:
        """Warn once that weights of a batch change nothing, as in plain TorchRec."""
        if not self._has_told_weights:
            self._has_told_weights = True
            logger.warning(
                "The collection of the tables %s ignores the weights of its batches. "
                "Build it with is_weighted=True if its bags are weighted sums.",
                ", ".join(repr(table.name) for table in self.spec.tables),
            )

    def _bounds(self) -> torch.Tensor:
        """Return what the gradient of each column is clamped to, float32 ``(T,)``."""
        if self._column_bounds is None:
            each = [most or torch.inf for most in self._clips]
            bounds = np.repeat(np.array(each, np.float32), self._dims)
            self._column_bounds = torch.from_numpy(bounds).to(self._device)
        return self._column_bounds

    def _columns(self, group_of: Sequence[int]) -> torch.Tensor:
        """Return the columns of the features in their order; they stand by group."""
        if self._column_order is None:
            dims = np.array(self._dims)
            order = np.argsort(group_of, kind="stable")
            starts = np.empty(len(dims), dtype=np.int64)
            starts[order] = np.cumsum(dims[order]) - dims[order]
            each = [np.arange(s, s + d) for s, d in zip(starts, dims, strict=True)]
            columns = torch.from_numpy(np.concatenate(each))
            self._column_order = columns.to(self._device)
        return self._column_order


class ShardedRemoteEmbeddingBag(ShardedRemoteEmbeddingBagCollection):
    """A ``torch.nn.EmbeddingBag``: ids and offsets in, float32 ``(B, D)`` out.

    Offsets end with the number of ids, or with the last bag's. Which of both is not
    asked of a device: they get one more bag, which is dropped if it came out empty.
    """

    weights_in: ClassVar[str] = ""  # its weight is the module's own
    unsharded_module_type = nn.EmbeddingBag

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._with_one_more: WeakSet[JaggedBatch] = WeakSet()

    def input_dist(
        self,
        ctx: object,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> KJTListSplitsAwaitable:
        """Begin to pull flat ids with the offsets of their bags, or a bag per line."""
        if isinstance(input, PrefetchedBatch):
            return super().input_dist(ctx, input)
        shape = tuple(input.shape) if isinstance(input, torch.Tensor) else ()
        has_lines = len(shape) == 2 and offsets is None
        if has_lines:
            starts = torch.arange(len(input) + 1, device=input.device)
            offsets = starts * input.shape[1]
        if not 0 < len(shape) < 3 or offsets is None:
            raise BatchError(
                "An EmbeddingBag must be given ids (L,) with offsets, or (B, L). "
                f"Received: {type(input).__name__} {shape}, offsets: {offsets}."
            )
        input, offsets = input.reshape(-1), to_device(offsets, input.device)
        if not has_lines:
            offsets = torch.cat([offsets, offsets.new_full((1,), len(input))])
        weights = per_sample_weights
        if self.spec.is_weighted:
            ones = torch.ones_like(input, dtype=torch.float32)
            weights = ones if weights is None else weights.reshape(-1)
        kjt = torchrec.KeyedJaggedTensor(
            [EMBEDDING_BAG_KEY], input, weights=weights, offsets=offsets
        )
        return super().input_dist(ctx, self._begin(kjt, has_one_more=not has_lines))

    @torch.compiler.disable(reason=torchrec_api.NOT_IN_GRAPHS)
    def _begin(
        self, kjt: torchrec.KeyedJaggedTensor, *, has_one_more: bool
    ) -> PrefetchedBatch[Any]:
        is_training = self.training and torch.is_grad_enabled()
        batch = self.start(kjt, is_training=is_training, is_input=True)
        if has_one_more:
            self._with_one_more.add(batch.given)
        return batch

    @torch.compiler.disable(reason=torchrec_api.NOT_IN_GRAPHS)
    def compute(self, ctx: object, batch: PrefetchedBatch[Any]) -> torch.Tensor:
        """Return the pooled rows alone."""
        pooled: torch.Tensor = super().compute(ctx, batch).values()
        if batch.given not in self._with_one_more:
            return pooled
        lengths_B = batch.source.take()[EMBEDDING_BAG_KEY].lengths  # on the host by now
        return pooled if lengths_B[-1:].all() else pooled[:-1]


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
        given = batch.source.on(self._device)
        return super().make_output(batch, processors(given).weights())


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
        tensors = self.pulled(batch)
        values, lengths, offsets = by_feature(batch.outputs, tensors)
        sequences: dict[str, torchrec.JaggedTensor] = {}
        for f, feature in enumerate(self.spec.features):
            rows_LD = values[f]
            if self._clips[f]:
                self.clip(rows_LD, self._clips[f])
            if feature.name in sequences:
                previous = sequences[feature.name].values()
                rows_LD = torch.cat([previous, rows_LD], dim=1)
            ids = batch.source.ids(feature.key) if self.spec.needs_ids else None
            sequences[feature.name] = torchrec.JaggedTensor(
                values=rows_LD,
                lengths=lengths[f],
                offsets=offsets[f],
                weights=ids if ids is None else to_device(ids, self._device),
            )
        return sequences
