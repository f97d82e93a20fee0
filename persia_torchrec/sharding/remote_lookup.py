"""A sharded module whose rows live on the embedding servers.

TorchRec drives every sharded module by three calls, and so it drives this one:

    input_dist    begins to pull the batch in the background and returns at once
    compute       waits for the pooled embeddings and puts them into the autograd graph
    output_dist   names their columns: a KeyedTensor

In the backward pass the gradient of the pooled embeddings leaves through the same
place; what the servers do with it does not concern autograd. The module has no
parameters: rows and optimizer state stay on the servers.

Dimension key:
    B: samples
    T: sum of the dims of all features
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    NoWait,
    ShardedModule,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from persia_torchrec.data.kjt import to_jagged_ids
from persia_torchrec.errors import ConfigError, PersiaError, StalenessError
from persia_torchrec.sharding.collection import CollectionSpec
from persia_torchrec.worker.bags import Bags
from persia_torchrec.worker.pipeline import BatchPipeline, PulledBatch

Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called on the way of each batch, by the thread that brings it.

    Attributes:
        before_pull: when a batch comes.
        before_push: in the backward pass, before the gradient leaves.
    """

    before_pull: Callable[[], None] = lambda: None
    before_push: Callable[[], None] = lambda: None


_NO_HOOKS = Hooks()


class RemoteContext(Multistreamable):
    """What TorchRec passes along with one batch; nothing needs to be remembered."""

    def record_stream(self, stream: torch.Stream) -> None:
        """No tensor of this context lives on a device."""


class StartedPull(Generic[Handle]):
    """A batch whose pull has begun: hand it to the model in place of its ids."""

    def __init__(self, future: Future[PulledBatch[Handle]], timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s

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


class _Rows(torch.autograd.Function):
    """Pooled embeddings that push their gradient when it comes."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        pulled: PulledBatch[Any],
        module: "ShardedRemoteEmbeddingBagCollection",
    ) -> torch.Tensor:
        ctx.pulled = pulled
        ctx.module = module
        return module.on_device(pulled)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None]:
        (grad_BT,) = grads
        ctx.module.push(ctx.pulled, grad_BT)
        return None, None, None


class ShardedRemoteEmbeddingBagCollection(
    ShardedModule[Any, torch.Tensor, KeyedTensor, RemoteContext]
):
    """An ``EmbeddingBagCollection`` on the embedding servers.

    In training mode, with gradients enabled, rows are made on first sight and the
    gradients are pushed; otherwise the servers are only read, and an unknown id reads
    zeros.

    Args:
        pipeline: pulls and pushes; the module does not close it.
        spec: the collection's tables and features.
        device: where the embeddings are wanted.
        timeout_s: seconds that a pull may take.
        gradient_scale: multiplied into every gradient before it is pushed.
        hooks: what to call before pulls and pushes.
    """

    def __init__(
        self,
        pipeline: BatchPipeline[Any, Any],
        spec: CollectionSpec,
        *,
        device: torch.device,
        timeout_s: float,
        gradient_scale: float = 1.0,
        hooks: Hooks = _NO_HOOKS,
    ) -> None:
        super().__init__()
        self._hooks = hooks
        self.pipeline = pipeline
        self.gradient_scale = gradient_scale
        self.skip_non_finite = False
        self.num_skipped = 0
        self.spec = spec
        self._keys = spec.keys()
        self._names = spec.names()
        self._dims = spec.dims()
        self._device = device
        self._timeout_s = timeout_s
        # Autograd only calls a function's backward if an input wants a gradient.
        self._anchor = torch.zeros(0, requires_grad=True)

    def start(self, batch: object, *, is_training: bool) -> StartedPull[Any]:
        """Begin to pull a batch; returns at once.

        Args:
            batch: a KeyedJaggedTensor, or what this collection's pipeline takes.
            is_training: make missing rows, and expect a backward pass.

        Raises:
            BatchError: features are missing, or ids are not int64.
            PersiaError: an earlier push failed.
        """
        self._hooks.before_pull()
        if isinstance(batch, KeyedJaggedTensor):
            jagged = to_jagged_ids(batch, self._keys)
            batch = {key: Bags(*feature) for key, feature in jagged.items()}
        future = self.pipeline.start(batch, training=is_training)
        # A pull ends in time by itself; before it may come a wait for a permit, until
        # earlier pushes are acknowledged, which end in time as well.
        return StartedPull(future, 2 * self._timeout_s + 5)

    def input_dist(
        self, ctx: RemoteContext, *input: Any, **kwargs: Any
    ) -> Awaitable[Awaitable[StartedPull[Any]]]:
        """Begin to pull; a batch whose pull has begun is passed on."""
        (batch,) = (*input, *kwargs.values())
        if not isinstance(batch, StartedPull):
            is_training = self.training and torch.is_grad_enabled()
            batch = self.start(batch, is_training=is_training)
        return NoWait(NoWait(batch))

    def compute(self, ctx: RemoteContext, dist_input: StartedPull[Any]) -> torch.Tensor:
        """Wait for the pooled embeddings; float32 ``(B, T)`` on the device."""
        pulled = dist_input.wait()
        if not (pulled.is_training and torch.is_grad_enabled()):
            return self.on_device(pulled)
        embeddings: torch.Tensor = _Rows.apply(self._anchor, pulled, self)
        return embeddings

    def output_dist(
        self, ctx: RemoteContext, output: torch.Tensor
    ) -> LazyAwaitable[KeyedTensor]:
        """Name the columns."""
        return _NamedColumns(KeyedTensor(self._names, self._dims, output))

    def create_context(self) -> RemoteContext:
        """Return an empty context."""
        return RemoteContext()

    def on_device(self, pulled: PulledBatch[Any]) -> torch.Tensor:
        """Return the pooled embeddings as a tensor on the module's device."""
        return torch.from_numpy(pulled.pooled).to(self._device, non_blocking=True)

    def push(self, pulled: PulledBatch[Any], grad_BT: torch.Tensor) -> None:
        """Push a gradient, scaled; the backward pass calls this.

        A gradient that is not finite is not pushed when ``skip_non_finite`` is set,
        as it happens under a loss scale that is too large.
        """
        scaled_BT = grad_BT.detach() * self.gradient_scale
        if self.skip_non_finite and not bool(torch.isfinite(scaled_BT).all()):
            self.num_skipped += 1
            pulled.give_up()  # the graph, and with it the batch, may live on
            return
        self._hooks.before_push()
        pulled.push(scaled_BT.to("cpu", torch.float32).contiguous().numpy())

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """There are none: the rows are on the servers."""
        return iter(())

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """What this module was before it was sharded."""
        return EmbeddingBagCollection

    def copy(self, device: torch.device) -> "ShardedRemoteEmbeddingBagCollection":
        """Refuse: a copy would push the same batches twice."""
        raise ConfigError(
            "A collection on the embedding servers cannot be copied to another device. "
            "Build a second DistributedModelParallel there."
        )


class _NamedColumns(LazyAwaitable[KeyedTensor]):
    """An output that is already there."""

    def __init__(self, output: KeyedTensor) -> None:
        super().__init__()
        self._output = output

    def _wait_impl(self) -> KeyedTensor:
        return self._output
