"""The one thing a TorchRec user adds: a sharder that puts tables on the servers.

DistributedModelParallel(model, sharders=[RemoteEmbeddingBagCollectionSharder(...)])
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.client.transfer import IdsOfRows
from persia_torchrec.embedding.optim import Adagrad, Optimizer
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.bag_sharder import (
    BagSharder,
    CollectionSharder,
    Module,
    Sharded,
)
from persia_torchrec.sharding.collection import CollectionSpec, describe_bags
from persia_torchrec.sharding.joining import Joint
from persia_torchrec.sharding.remote_lookup import ShardedRemoteEmbeddingBagCollection
from persia_torchrec.sharding.rows_on_device import RowsOnDevice
from persia_torchrec.sharding.warm_start import OptimizerState, load_tables
from persia_torchrec.sharding.whole_model import watch_models
from persia_torchrec.table import TableSettings, require_known_tables
from persia_torchrec.wire.messages import Precision
from persia_torchrec.worker.embedding_worker import EmbeddingWorker
from persia_torchrec.worker.pipeline import BatchPipeline, Lookup
from persia_torchrec.worker.pooled import PooledLookup
from persia_torchrec.worker.rows import RowsLookup

_PRECISIONS = {
    torch.float32: Precision.FP32,
    torch.float16: Precision.FP16,
    torch.bfloat16: Precision.BF16,
}


class RemoteSharder(CollectionSharder[Module, Sharded]):
    """Put every collection of one kind on the embedding servers.

    On the servers a table is its name: collections, and models, that name the same
    table share its rows.

    Args:
        client: of the servers; it must live as long as the model.
        optimizer: of all tables that have no other; applied by the servers. A table's
            own is what ``tables`` says, else what the model says of it, by
            ``apply_optimizer_in_backward`` or as a ``FusedEmbeddingBagCollection``.
        staleness: training batches of one trainer that may be between the pull of their
            rows and the acknowledgement of their update. 0 waits for the
            acknowledgement in the backward pass, which equals ordinary synchronous
            training; 1 waits for it before the next pull. From 2 on, TorchRec's train
            pipelines pull later batches while this one is trained.
        wire_dtype: how rows and gradients travel: float32, float16 or bfloat16.
        tables: settings of single tables, by name. They win over what the collection
            says (``data_type``, ``init_fn``).
        gradient_division: divide gradients by the number of trainers, as TorchRec
            does; otherwise they add up, as in PERSIA.
        update: what the servers do with the gradients of several trainers. "joint": the
            n-th batches of all trainers are one step, and the optimizer gets the sum of
            their gradients once, as in TorchRec. All must run as many training steps
            (see ``join`` where data end unevenly), and the acknowledgement that bounds
            the staleness is that of the joint update. "each": the gradients of each
            trainer are applied as they come, as in PERSIA; nobody waits for another.
        joint_timeout_s: seconds that a joint update may wait for the slowest trainer.

    Raises:
        ConfigError: ``wire_dtype`` is none of the three, ``staleness`` is negative,
            ``update`` is neither of the two, or ``joint_timeout_s`` is not positive.
            When the model is sharded, or at its first batch at the latest: ``tables``
            names a table that no collection has.
    """

    POOLS_ON: ClassVar[frozenset[str]] = frozenset({"cuda"})
    """Types of devices that get the unique rows and pool them, instead of the CPU."""

    host_lookup: ClassVar[type[EmbeddingWorker]]
    """What looks batches up elsewhere."""

    def __init__(
        self,
        client: EmbeddingClient,
        optimizer: Optimizer | None = None,
        staleness: int = 0,
        wire_dtype: torch.dtype = torch.float32,
        *,
        tables: Mapping[str, TableSettings] | None = None,
        gradient_division: bool = True,
        update: Literal["joint", "each"] = "joint",
        joint_timeout_s: float = 600.0,
    ) -> None:
        super().__init__(
            timeout_s=client.timeout_s,
            gradient_division=gradient_division,
            joint=Joint(client, joint_timeout_s) if update == "joint" else None,
        )
        if update not in ("joint", "each"):
            raise ConfigError(
                f'update must be "joint" or "each". Received: {update!r}.'
            )
        if wire_dtype not in _PRECISIONS:
            raise ConfigError(
                f"wire_dtype must be one of {list(_PRECISIONS)}. "
                f"Received: {wire_dtype}."
            )
        if staleness < 0:
            raise ConfigError(f"staleness must be >= 0. Received: {staleness}.")
        self._client = client
        self._optimizer = optimizer if optimizer is not None else Adagrad()
        self._staleness = staleness
        self._precision = _PRECISIONS[wire_dtype]
        self._settings = dict(tables or {})
        self._planned: set[str] = set()
        self._described: set[str] = set()
        watch_models()

    def share_tables(self, other: "RemoteSharder[Any, Any]") -> None:
        """Keep one account of the tables with another sharder of the same model.

        Flushes, rates, the loss scale and settings of either are then those of both.
        Call it before a model is planned.
        """
        self._tables = other._tables
        self._planned, self._described = other._planned, other._described

    @abstractmethod
    def spec_of(self, module: Module) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""

    def shardable_parameters(self, module: Module) -> dict[str, nn.Parameter]:
        """Return a stand-in of one row for each table; planners ask before sharding."""
        parameters = super().shardable_parameters(module)
        self._planned.update(parameters)
        return parameters

    def describe(self, module: Module) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms.

        Raises:
            ConfigError: a setting that the servers cannot honour, or settings of a
                table that a planner has not seen in any collection.
        """
        spec = self.spec_of(module)
        names = {table.name for table in spec.tables}
        self._described |= names
        if names <= self._planned:  # and so has the planner seen all collections
            require_known_tables(self._settings, self._planned)
        return spec

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
        ``warm_start.load_tables``.

        Raises:
            ConfigError: no model is sharded yet, and so there are no tables.
        """
        names = self._tables.names()
        if not names:
            raise ConfigError(
                "Weights can be loaded when the model is sharded, into its tables. "
                "Received: no table yet. Call load_weights after "
                "DistributedModelParallel(model, sharders=...)."
            )
        self.flush()
        return load_tables(
            *(self._client, state_dict, names),
            optimizer_state=optimizer_state,
            ids=ids,
            step=step,
        )

    def require_known_settings(self) -> None:
        """Refuse settings of unknown tables: all collections are sharded by now.

        Raises:
            ConfigError: ``tables`` names a table that no collection has.
        """
        require_known_tables(self._settings, self._planned | self._described)

    def make_pipeline(
        self, spec: CollectionSpec, device: torch.device
    ) -> BatchPipeline[Any, Any]:
        """Return the pipeline of a collection, its tables known to the servers."""
        is_pooled_here = spec.is_weighted or device.type in self.POOLS_ON
        kind = RowsLookup if is_pooled_here else self.host_lookup
        worker = kind(self._client, spec.features, precision=self._precision)
        worker.add_tables(spec.tables)
        lookup: Lookup[Any, Any] = worker
        if isinstance(worker, RowsLookup):
            lookup = RowsOnDevice(worker, device)
        return BatchPipeline(
            lookup, staleness=self._staleness, timeout_s=self._client.timeout_s
        )


class RemoteEmbeddingBagCollectionSharder(
    RemoteSharder[EmbeddingBagCollectionInterface, ShardedRemoteEmbeddingBagCollection],
    BagSharder,
):
    """Put every ``EmbeddingBagCollection`` of a model on the embedding servers.

    Args and errors are those of :class:`persia_torchrec.RemoteSharder`: ``client``,
    ``optimizer``, ``staleness``, ``wire_dtype``, ``tables``, ``gradient_division``,
    ``update``, ``joint_timeout_s``.

    Example:
        ``RemoteEmbeddingBagCollectionSharder(client, Adagrad(), tables={"user":
        TableSettings(optimizer=Adam(1e-3), admission=AdmitFrequency(3))})``
    """

    host_lookup: ClassVar[type[EmbeddingWorker]] = PooledLookup

    def spec_of(self, module: EmbeddingBagCollectionInterface) -> CollectionSpec:
        """Return the collection's tables and features in the servers' terms."""
        return describe_bags(module, self._optimizer, self._settings)
