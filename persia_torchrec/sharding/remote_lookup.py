"""A sharded module whose rows live on the embedding servers.

TorchRec drives every sharded module by three calls, and so it drives this one:

    input_dist    begins to pull the batch in the background and returns at once
    compute       waits for the embeddings and puts them into the autograd graph
    output_dist   names them: a KeyedTensor

The last two are put off until the output is used.

In the backward pass the gradients of the embeddings leave through the same place; what
the servers do with them does not concern autograd. The module has no parameters: rows
and optimizer state stay on the servers, as its state dict says in their place.

Dimension key:
    B: samples
    T: sum of the dims of all features
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tensordict import TensorDict
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    NoWait,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from persia_torchrec.data.kjt import JaggedBatch
from persia_torchrec.errors import BatchError, ConfigError, PersiaError, StalenessError
from persia_torchrec.sharding.agreement import Agreement
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.sharding.on_device import DeviceBatch, Tensors, pool_rows
from persia_torchrec.sharding.state import add_entries, take_entries
from persia_torchrec.sharding.when_used import Here, WhenUsedModule, not_traced
from persia_torchrec.table import TableSpec
from persia_torchrec.worker.bags import Bags
from persia_torchrec.worker.pipeline import BatchPipeline, PulledBatch

Handle = TypeVar("Handle")
CompOut = TypeVar("CompOut")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called on the way of each batch, by the thread that brings it.

    Attributes:
        before_pull: when a batch comes.
        before_push: in the backward pass, before the gradient leaves.
        loss_scale: in the backward pass; returns what the loss was multiplied by, or
            None where nothing scales it.
        after_check: in the backward pass under ``loss_scale``; is told whether the
            gradients were finite.
    """

    before_pull: Callable[[], None] = lambda: None
    before_push: Callable[[], None] = lambda: None
    loss_scale: Callable[[], float | None] = lambda: None
    after_check: Callable[[bool], None] = lambda is_finite: None


_NO_HOOKS = Hooks()


class RemoteContext(Multistreamable):
    """What TorchRec passes along with one batch; nothing needs to be remembered."""

    def record_stream(self, stream: torch.Stream) -> None:
        """No tensor of this context lives on a device."""


class StartedPull(Multistreamable, Generic[Handle]):
    """A batch whose pull has begun: hand it to the model in place of its ids.

    Args:
        future: the batch, when it is here.
        timeout_s: seconds that it may take.
        source: the batch as torch has it, if it came so.
    """

    def __init__(
        self,
        future: Future[PulledBatch[Handle]],
        timeout_s: float,
        source: JaggedBatch | None = None,
    ) -> None:
        self._future = future
        self._timeout_s = timeout_s
        self._source = source

    @property
    def source(self) -> JaggedBatch:
        """The batch as torch has it.

        Raises:
            BatchError: its pull began otherwise, as by a reference to its ids.
        """
        if self._source is None:
            raise BatchError(
                "A collection that uses weights, or returns indices, must be given a "
                "KeyedJaggedTensor. Received: a batch whose pull began without one."
            )
        return self._source

    def record_stream(self, stream: torch.Stream) -> None:
        """What the wait returns records its streams; the ids are the batch's own."""

    def wait(self) -> PulledBatch[Handle]:
        """Wait for the batch.

        Raises:
            PersiaError: what went wrong, as ServerError or StalenessError.
        """
        try:
            return self._future.result(self._timeout_s)
        except PersiaError:
            raise
        except TimeoutError:
            raise StalenessError(
                f"The rows of a batch must come within {self._timeout_s:g} s. "
                "Does every training batch before it get its backward pass?"
            ) from None


class _Embeddings(torch.autograd.Function):
    """What was pulled for a batch; the gradients of it are pushed when they come."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        pulled: PulledBatch[Any],
        module: "ShardedRemoteCollection[Any, Any]",
    ) -> Tensors:
        ctx.pulled = pulled
        ctx.module = module
        return module.on_device(pulled)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.module.push(ctx.pulled, grads)  # autograd gives zeros for those unused
        return None, None, None


class ShardedRemoteCollection(
    WhenUsedModule[CompOut, Out, RemoteContext], FusedOptimizerModule
):
    """A collection on the embedding servers; what all kinds of it share.

    In training mode, with gradients enabled, rows are made on first sight and the
    gradients are pushed; otherwise the servers are only read, and an unknown id reads
    zeros.

    Args:
        pipeline: pulls and pushes; the module does not close it.
        spec: the collection's tables and features.
        device: where the embeddings are wanted.
        gradient_scale: multiplied into every gradient before it is pushed.
        hooks: what to call before pulls and pushes.
        optimizer: of the tables, for schedules; none where it is left out.

    Attributes:
        agreement: with other trainers, on whether gradients were finite, if there are.
    """

    weights_in: ClassVar[str] = "embedding_bags"
    """What TorchRec calls weights in it, as in ``embedding_bags.NAME.weight``."""

    agreement: Agreement | None = None

    def __init__(
        self,
        pipeline: BatchPipeline[Any, Any],
        spec: CollectionSpec,
        *,
        device: torch.device,
        gradient_scale: float = 1.0,
        hooks: Hooks = _NO_HOOKS,
        optimizer: KeyedOptimizer | None = None,
    ) -> None:
        super().__init__()
        self._optimizer = EmptyFusedOptimizer() if optimizer is None else optimizer
        self._hooks = hooks
        self.pipeline = pipeline
        self.gradient_scale = gradient_scale
        self.skip_non_finite = False
        self.num_skipped = 0
        self._spec = spec
        self._keys = spec.keys()
        self._device = device
        # Autograd calls a function's backward only if an input wants a gradient.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.register_state_dict_post_hook(add_entries)
        self.register_load_state_dict_pre_hook(take_entries)

    @not_traced
    def start(self, batch: object, *, is_training: bool) -> StartedPull[Any]:
        """Begin to pull a batch; returns at once.

        Args:
            batch: a KeyedJaggedTensor, a TensorDict of nested tensors, or what this
                collection's pipeline takes.
            is_training: make missing rows, and expect a backward pass.

        Raises:
            BatchError: features are missing or come twice, or ids are no integers.
            PersiaError: an earlier push failed.
        """
        self._hooks.before_pull()
        source = None
        if isinstance(batch, KeyedJaggedTensor | TensorDict):
            source = JaggedBatch.of(batch, self._keys)
            batch = {
                key: Bags(jagged.ids, jagged.lengths)
                for key, jagged in source.features.items()
            }
        future = self.pipeline.start(batch, training=is_training)
        # A pull ends in time by itself; before it may come a wait for a permit, until
        # earlier pushes are acknowledged, which end in time as well.
        return StartedPull(future, 2 * self.pipeline.timeout_s + 5, source)

    def input_dist(
        self, ctx: RemoteContext, *input: Any, **kwargs: Any
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to pull; a batch whose pull has begun is passed on.

        The list holds the one pull. It is what pipelines that join the inputs of
        several modules to one exchange expect.
        """
        (batch,) = (*input, *kwargs.values())
        if not isinstance(batch, StartedPull):
            is_training = self.training and torch.is_grad_enabled()
            batch = self.start(batch, is_training=is_training)
        return KJTListSplitsAwaitable([NoWait(NoWait(batch))], ctx)

    def create_context(self) -> RemoteContext:
        """Return an empty context."""
        return RemoteContext()

    def embeddings(self, pulled: PulledBatch[Any]) -> Tensors:
        """Return what was pulled, in the autograd graph of a training batch."""
        if not (pulled.is_training and torch.is_grad_enabled()):
            return self.on_device(pulled)
        tensors: Tensors = _Embeddings.apply(self._anchor, pulled, self)
        return tensors

    def on_device(self, pulled: PulledBatch[Any]) -> Tensors:
        """Return what was pulled as tensors on the module's device."""
        if isinstance(pulled.handle, DeviceBatch):
            return pulled.handle.wait()
        return tuple(
            torch.from_numpy(output).to(self._device, non_blocking=True)
            for output in pulled.outputs
        )

    def push(self, pulled: PulledBatch[Any], grads: Sequence[torch.Tensor]) -> None:
        """Push gradients, scaled; the backward pass calls this.

        Under a loss scale, or with ``skip_non_finite``, gradients that are not finite
        are not pushed: the scale was too large.
        """
        scale = self._hooks.loss_scale()
        factor = self.gradient_scale / (scale or 1)
        scaled = [_scaled(grad, factor) for grad in grads]
        if self.skip_non_finite or scale is not None:
            is_finite = all(map(_is_finite, scaled))
            if scale is not None:
                self._hooks.after_check(is_finite)
            if not is_finite:
                self.num_skipped += 1
                pulled.give_up()  # the graph, and with it the batch, may live on
                return
        self._hooks.before_push()
        if isinstance(pulled.handle, DeviceBatch):
            pulled.push(pulled.handle.to_host(scaled))
            return
        on_cpu = (grad.to("cpu", torch.float32) for grad in scaled)
        pulled.push(tuple(grad.contiguous().numpy() for grad in on_cpu))

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables, with the settings that they were sharded with."""
        return self._spec.tables

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """There are none: the rows are on the servers."""
        return iter(())

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The tables' learning rates; DistributedModelParallel asks for it."""
        return self._optimizer

    def tables_by_key(self) -> dict[str, str]:
        """Return the tables' names, by the keys that TorchRec gives their weights."""
        names = [table.name for table in self.tables]
        return {f"{self.weights_in}.{name}.weight": name for name in names}

    def copy(self, device: torch.device) -> "ShardedRemoteCollection[CompOut, Out]":
        """Refuse: a copy would push the same batches twice."""
        raise ConfigError(
            "A collection on the embedding servers cannot be copied to another device. "
            "Build a second DistributedModelParallel there."
        )

    def __deepcopy__(self, memo: object) -> "ShardedRemoteCollection[CompOut, Out]":
        """Refuse, as ``DistributedModelParallel.copy`` begins with it."""
        return self.copy(self._device)


class ShardedRemoteEmbeddingBagCollection(
    ShardedRemoteCollection[torch.Tensor, KeyedTensor]
):
    """An ``EmbeddingBagCollection`` on the embedding servers.

    Its embeddings come pooled, or are pooled here from the rows of the batch; see
    :class:`ShardedRemoteCollection`.
    """

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> torch.Tensor:
        """Wait for the embeddings; float32 ``(B, T)`` on the device.

        Raises:
            BatchError: the collection is weighted, and the batch is not.
        """
        is_weighted = self._spec.is_weighted
        return self.pooled(
            dist_input, dist_input.source.weights() if is_weighted else None
        )

    def pooled(
        self, started: StartedPull[Any], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Wait for the embeddings of a batch, and pool them if they are not.

        Args:
            started: the batch.
            weights: of the ids of its KeyedJaggedTensor, one each, in their order; for
                a weighted collection.

        Returns:
            float32 ``(B, T)`` on the device.
        """
        pulled = started.wait()
        tensors = self.embeddings(pulled)
        if not isinstance(pulled.handle, DeviceBatch):
            (pooled_BT,) = tensors
            return pooled_BT
        if weights is not None:
            weights = weights.to(self._device, torch.float32, non_blocking=True)
        pooled = []
        for f, feature in enumerate(self._spec.features):
            rows_UD = tensors[pulled.handle.table_of[f]]
            weights_L = None
            if weights is not None:
                weights_L = started.source.features[feature.key].part_of(weights)
            bags = pulled.handle, f, feature.pooling
            pooled.append(pool_rows(rows_UD, weights_L, *bags))
        return torch.cat(pooled, dim=1)

    def output_dist(
        self, ctx: RemoteContext, output: torch.Tensor
    ) -> LazyAwaitable[KeyedTensor]:
        """Name the columns."""
        return Here(KeyedTensor(self._spec.names(), self._spec.dims(), output))

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """What this module was before it was sharded."""
        return EmbeddingBagCollection


def _scaled(grad: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a gradient times a number; the gradient itself if that changes nothing.

    It may be read by another thread after the backward pass then. Autograd gives the
    memory of a gradient to somebody else, as a parameter's ``grad``, only if nobody
    holds the same tensor; an array made of it, without ``detach``, does.
    """
    if scale == 1 and not grad.requires_grad:
        return grad
    return grad.detach().to(torch.float32) * scale


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
