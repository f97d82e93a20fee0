"""The engine of a ``TrainCtx`` whose model is TorchRec's: ``forward(dense, ids)``.

The collections of the model go to the servers by the sharders that a TorchRec script
uses, with PERSIA's prefixes where there is an ``embedding_config.yml``. Ids come to
this process with their batch, and no embedding worker is needed:

    DataLoader -> ids -> the pull of each collection begins
                   `---> forward(dense, ids) -> each collection waits for its pull
"""

from typing import Any, get_args

import torch
from torch import nn
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DistributedModelParallel,
)

from persia_torchrec import env
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.device.batches import PulledKeyedJaggedTensor
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import Optimizer
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError
from persia_torchrec.persia import slots
from persia_torchrec.persia.batch import PersiaBatch, ReferencedBatch
from persia_torchrec.persia.engine import Engine
from persia_torchrec.persia.kjt import join_columns, to_kjt
from persia_torchrec.persia.loader import LookupSettings
from persia_torchrec.persia.slot_tensors import Slots
from persia_torchrec.sharding.all_sharders import remote_sharders
from persia_torchrec.sharding.checks import remote_collections
from persia_torchrec.sharding.collection import PersiaTables, TableCollection
from persia_torchrec.sharding.sharded_module import ShardedRemoteCollection


class TorchRecEngine(Engine):
    """One trainer's connections, and a TorchRec model inside DMP; see ``Engine``."""

    takes_ids = True
    _workers: None

    def _connect(self, optimizer: Optimizer, config: EmbeddingConfig) -> None:
        """Connect to the servers, and learn the slots, if there is a file of them."""
        self.client, self._workers = EmbeddingClient.of_job(), None
        path = env.embedding_config_path()
        schema = None if path is None else load_embedding_config(path, warns=False)
        self._persia = PersiaTables(schema, config)

    def _shard(
        self, model: nn.Module, optimizer: Optimizer, replication: DataParallelWrapper
    ) -> list[ShardedRemoteCollection]:
        self.sharder = sharders = remote_sharders(
            self.client,
            optimizer,
            staleness=1,
            tables=self._tables,
            gradient_division=False,
            update="each",
            state_dict_rows="none",  # the servers write them
            embedding_config=self._persia,
        )
        sharders.remote_tables.pushes_metrics = False  # this engine does
        self.dmp = DistributedModelParallel(
            model,
            device=self.device,
            sharders=sharders,
            data_parallel_wrapper=replication,
        )
        collections: list[ShardedRemoteCollection] = remote_collections(self.dmp)
        for collection in collections:
            collection.pulls_ahead = True
        return collections

    def start_pull(
        self,
        batch: PersiaBatch | ReferencedBatch,
        *,
        is_training: bool,
        settings: LookupSettings | None = None,
    ) -> Any:
        """Begin the pulls of all collections; return the ids, which have them."""
        self._begin_pull(batch, is_training=is_training)
        if settings is not None:
            self._apply(settings, is_training=is_training)
        ids = PulledKeyedJaggedTensor.of(to_kjt(batch))
        ids.pulls = {
            collection: collection.start(ids, is_training=is_training)
            for collection in self.collections
        }
        return ids

    def run(self, non_id_tensors: list[torch.Tensor], pull: Any) -> object:
        """Run the whole model; its backward pass updates both halves."""
        output = self.evaluate(self.dmp, non_id_tensors, pull)
        if unused := [collection.spec.tables for collection in pull.pulls]:
            names = [table.name for tables in unused for table in tables]
            raise ConfigError(
                "The model must call each of its collections with the "
                f"KeyedJaggedTensor that forward is given. Received: tables {names}, "
                "whose collection was not called. Train such a model by a TorchRec "
                "loop: DataLoader(..., as_torchrec=True) and remote_sharders."
            )
        return output

    def evaluate(
        self, model: nn.Module, non_id_tensors: list[torch.Tensor], pull: Any
    ) -> object:
        """Run a model on dense features, one tensor, and ids."""
        what = "dense features"
        return model(join_columns(non_id_tensors, pull.stride(), what), pull)

    def embed(self, pull: Any) -> Slots:
        """Reject: a TorchRec model looks its embeddings up itself."""
        raise ConfigError(
            "prepare_features() gives embeddings of slots to a model that takes lists. "
            "Received: a context whose model has collections of TorchRec's, which look "
            "their ids up. Call forward()."
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the servers answer."""

        def ask(timeout_s: float) -> slots.LookupHello:
            return slots.LookupHello(tuple(self.client.num_rows(timeout_s)))

        slots.wait_until_ready(ask, timeout_s)


def has_collections(model: nn.Module) -> bool:
    """Return whether a model is TorchRec's: it has collections of tables."""
    return any(isinstance(m, get_args(TableCollection)) for m in model.modules())
