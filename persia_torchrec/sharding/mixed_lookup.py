"""A sharded collection of which some tables lie on the servers.

It is TorchRec's own sharded module of the local tables, with all that belongs to it:
parameters, state dict, fused optimizer, data parallel wrappers. The remote module of
the other tables hangs on it, and goes through the same three calls:

                   local                                   remote
    input_dist     ids go to the trainers with their rows  pull begins
    compute        look up                                 wait for the pull
    output_dist    embeddings go where the ids came from   name the columns
                   `------ joined in the order of the unsharded collection ------'

What the remote half has to remember of a batch travels in TorchRec's own context of
that batch, so that its pipelines see nothing but an awaitable of their own.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ShardedModule,
    ShardingEnv,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.part import Collection, columns_of
from persia_torchrec.sharding.remote_lookup import ShardedRemoteCollection
from persia_torchrec.sharding.when_used import when_used

_HALF = "remote."


@dataclass(frozen=True, slots=True)
class Column:
    """Where an output of the whole collection comes from.

    Attributes:
        name: in the output of the whole collection.
        is_remote: which half has it.
        name_in_half: there a feature may be shared by fewer tables.
    """

    name: str
    is_remote: bool
    name_in_half: str


def columns_of_halves(
    whole: Collection, local: Collection, remote: Collection
) -> list[Column]:
    """Return the columns of a collection, in its order."""
    of_local, of_remote = columns_of(local), columns_of(remote)
    return [
        Column(name, place in of_remote, (of_remote | of_local)[place])
        for place, name in columns_of(whole).items()
    ]


def join_pooled(
    columns: Sequence[Column], local: KeyedTensor, remote: KeyedTensor
) -> KeyedTensor:
    """Put the columns of two halves into the order of the whole.

    Args:
        columns: of the whole.
        local: ``(B, T)`` of the local tables, in any order.
        remote: ``(B, T)`` of the remote tables, in any order.
    """
    halves = {False: local.to_dict(), True: remote.to_dict()}
    blocks = [halves[column.is_remote][column.name_in_half] for column in columns]
    return KeyedTensor(
        keys=[column.name for column in columns],
        length_per_key=[block.shape[1] for block in blocks],
        values=torch.cat(blocks, dim=1),
    )


def join_sequences(
    columns: Sequence[Column],
    local: Mapping[str, JaggedTensor],
    remote: Mapping[str, JaggedTensor],
) -> dict[str, JaggedTensor]:
    """Put the sequences of two halves into the order of the whole."""
    halves = {False: local, True: remote}
    return {
        column.name: halves[column.is_remote][column.name_in_half] for column in columns
    }


@dataclass
class _RemotePart:
    """What the remote half remembers of a batch."""

    remote_context: Any = None
    remote_input: Awaitable[Awaitable[Any]] | None = None


@dataclass
class MixedBagContext(EmbeddingBagCollectionContext, _RemotePart):
    """TorchRec's context of a batch, and the remote half's."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that a stream uses the tensors of both halves."""
        super().record_stream(stream)
        self.remote_context.record_stream(stream)


@dataclass
class MixedSequenceContext(EmbeddingCollectionContext, _RemotePart):
    """TorchRec's context of a batch, and the remote half's."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that a stream uses the tensors of both halves."""
        super().record_stream(stream)
        self.remote_context.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Halves:
    """The two halves of a collection.

    Attributes:
        local: the tables under TorchRec, not sharded yet.
        remote: the tables on the servers, sharded.
        columns: of the whole, in its order.
    """

    local: Collection
    remote: ShardedRemoteCollection[Any, Any]
    columns: Sequence[Column]


def _leave_half(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Give the state of the remote half the keys that an unsharded collection has."""
    half = f"{prefix}{_HALF}"
    for key in [key for key in state_dict if key.startswith(half)]:
        state_dict[prefix + key.removeprefix(half)] = state_dict.pop(key)


def _enter_half(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    """Give the state of the remote half the keys that the half expects."""
    assert isinstance(module, MixedCollection)
    for key in module.remote.tables_by_key():
        if prefix + key in state_dict:
            state_dict[f"{prefix}{_HALF}{key}"] = state_dict.pop(prefix + key)


class MixedCollection(ShardedModule[Any, Any, Any, Any], FusedOptimizerModule):
    """Adds the remote half to TorchRec's sharded module of the local one."""

    remote: ShardedRemoteCollection[Any, Any]
    _columns: Sequence[Column]

    def input_dist(self, ctx: Any, *input: Any, **kwargs: Any) -> Any:
        """Begin to distribute the ids, and to pull; returns TorchRec's awaitable."""
        awaitable = super().input_dist(ctx, *input, **kwargs)
        # TorchRec's half comes first: it refuses a batch before it has begun anything.
        ctx.remote_context = self.remote.create_context()
        ctx.remote_input = self.remote.input_dist(ctx.remote_context, *input, **kwargs)
        return awaitable

    def output_dist(self, ctx: Any, output: Any) -> LazyAwaitable[Any]:
        """Join the local half's output with the remote half's."""
        return self._joined(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> LazyAwaitable[Any]:
        """Look up in both halves, and join."""
        return self._joined(super().compute_and_output_dist(ctx, input), ctx)

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers of both halves; TorchRec and schedules ask for it."""
        halves = (super().fused_optimizer, self.remote.fused_optimizer)
        return CombinedOptimizer([("", half) for half in halves])

    def copy(self, device: torch.device) -> NoReturn:
        """Refuse, as the remote half does."""
        raise ConfigError(
            "A collection with tables on the embedding servers cannot be copied to "
            "another device. Build a second DistributedModelParallel there."
        )

    def _add_remote(self, halves: Halves) -> None:
        """Hang on the remote half, whose state stands beside the local one's."""
        self.remote = halves.remote
        self._columns = halves.columns
        self.register_state_dict_post_hook(_leave_half)
        self.register_load_state_dict_pre_hook(_enter_half)

    def _joined(self, local: Awaitable[Any], ctx: Any) -> LazyAwaitable[Any]:
        started = ctx.remote_input.wait().wait()
        remote = self.remote.compute_and_output_dist(ctx.remote_context, started)
        columns = self._columns
        return when_used(lambda: self.join(columns, local.wait(), remote.wait()))

    @staticmethod
    @abstractmethod
    def join(columns: Sequence[Column], local: Any, remote: Any) -> Any:
        """Put the output of two halves into the order of the whole."""


class ShardedMixedEmbeddingBagCollection(
    MixedCollection, ShardedEmbeddingBagCollection
):
    """An ``EmbeddingBagCollection``, some of its tables on the embedding servers.

    Args:
        halves: of the collection.
        plan: of the local tables.
        env: gives the trainers.
        sharder: how TorchRec shards the local tables.
        device: where the embeddings are wanted.
        module_fqn: the collection's path in the model.
    """

    def __init__(
        self,
        halves: Halves,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        sharder: EmbeddingBagCollectionSharder,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        ShardedEmbeddingBagCollection.__init__(
            self,
            halves.local,
            plan,
            env,
            fused_params=sharder.fused_params,
            device=device,
            qcomm_codecs_registry=sharder.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=sharder._sharded_module_order_overwrite,
        )
        self._add_remote(halves)

    join = staticmethod(join_pooled)

    def create_context(self) -> MixedBagContext:
        """Return an empty context."""
        return MixedBagContext()


class ShardedMixedEmbeddingCollection(MixedCollection, ShardedEmbeddingCollection):
    """An ``EmbeddingCollection``, some of its tables on the embedding servers.

    Args:
        halves: of the collection.
        plan: of the local tables.
        env: gives the trainers.
        sharder: how TorchRec shards the local tables.
        device: where the embeddings are wanted.
        module_fqn: the collection's path in the model.
    """

    def __init__(
        self,
        halves: Halves,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        sharder: EmbeddingCollectionSharder,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        ShardedEmbeddingCollection.__init__(
            self,
            halves.local,
            plan,
            env,
            fused_params=sharder.fused_params,
            device=device,
            qcomm_codecs_registry=sharder.qcomm_codecs_registry,
            use_index_dedup=sharder._use_index_dedup,
            module_fqn=module_fqn,
        )
        self._add_remote(halves)

    join = staticmethod(join_sequences)

    def create_context(self) -> MixedSequenceContext:
        """Return an empty context."""
        return MixedSequenceContext()
