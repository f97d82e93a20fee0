"""All sharders of a model: ours for what goes to the servers, TorchRec's for the rest.

``DistributedModelParallel(model, sharders=[...])`` replaces TorchRec's list of default
sharders. What this list has instead:

    EmbeddingBagCollection                    on the servers
    EmbeddingCollection                       on the servers
    FeatureProcessedEmbeddingBagCollection    its bags on the servers
    FusedEmbeddingBagCollection               on the servers, with its own optimizer
    quantised and managed-collision modules   as TorchRec shards them by default
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.client.transfer import IdsOfRows
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.sharding.bag_sharder import TableControl
from persia_torchrec.sharding.feature_processed import (
    RemoteFeatureProcessedEmbeddingBagCollectionSharder,
)
from persia_torchrec.sharding.sequence_sharder import RemoteEmbeddingCollectionSharder
from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder
from persia_torchrec.sharding.through_bags import (
    RemoteFusedEmbeddingBagCollectionSharder,
)
from persia_torchrec.sharding.warm_start import OptimizerState
from persia_torchrec.table import TableSettings


def remote_sharders(
    client: EmbeddingClient,
    optimizer: Optimizer | None = None,
    staleness: int = 0,
    wire_dtype: torch.dtype = torch.float32,
    *,
    tables: Mapping[str, TableSettings] | None = None,
    gradient_division: bool = True,
    update: Literal["joint", "each"] = "joint",
    joint_timeout_s: float = 600.0,
) -> "RemoteSharders":
    """Return the sharders that put every collection of a model on the servers.

    The arguments, and what is raised, are those of
    :class:`persia_torchrec.RemoteSharder`; ``tables`` may name tables of collections of
    any kind.

    Returns:
        A list, for ``DistributedModelParallel`` and for planners. Its ``flush``,
        ``optimizer``, ``load_weights`` and the like are for all tables of the model.

    Example:
        ``sharders = remote_sharders(client, Adagrad(lr=0.02), staleness=1)`` and
        ``DistributedModelParallel(model, sharders=sharders)``
    """
    bags = RemoteEmbeddingBagCollectionSharder(
        *(client, optimizer, staleness, wire_dtype),
        tables=tables,
        gradient_division=gradient_division,
        update=update,
        joint_timeout_s=joint_timeout_s,
    )
    sequences = RemoteEmbeddingCollectionSharder(
        *(client, optimizer, staleness, wire_dtype),
        tables=tables,
        gradient_division=gradient_division,
        update=update,
        joint_timeout_s=joint_timeout_s,
    )
    sequences.share_tables(bags)
    ours: list[ModuleSharder[Any]] = [
        bags,
        sequences,
        RemoteFeatureProcessedEmbeddingBagCollectionSharder(bags),
        RemoteFusedEmbeddingBagCollectionSharder(bags),
    ]
    taken = {sharder.module_type for sharder in ours}
    others = [s for s in get_default_sharders() if s.module_type not in taken]
    return RemoteSharders(bags, [*ours, *others])


class RemoteSharders(TableControl, list[ModuleSharder[nn.Module]]):
    """A list of sharders, and what they do together; see :func:`remote_sharders`.

    Args:
        first: the sharder that has all tables of all others.
        sharders: all of them.
    """

    def __init__(
        self,
        first: RemoteEmbeddingBagCollectionSharder,
        sharders: Iterable[ModuleSharder[Any]],
    ) -> None:
        list.__init__(self, sharders)
        TableControl.__init__(self, first._tables, first._timeout_s)
        self._first = first

    def load_weights(
        self,
        state_dict: Mapping[str, torch.Tensor],
        *,
        optimizer_state: OptimizerState | None = None,
        ids: Mapping[str, IdsOfRows] | None = None,
        step: int | None = None,
    ) -> dict[str, int]:
        """Fill all tables that are sharded so far from an ordinary checkpoint.

        The arguments, what is returned and what is raised are those of
        ``RemoteSharder.load_weights``.
        """
        return self._first.load_weights(
            state_dict, optimizer_state=optimizer_state, ids=ids, step=step
        )
