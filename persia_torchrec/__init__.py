"""PERSIA's hybrid training for TorchRec.

Names are imported on first use, so that ``python -m persia_torchrec.server`` starts
without torch and TorchRec.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia_torchrec.client.client import (
        EmbeddingClient,
    )
    from persia_torchrec.client.transfer import (
        RowBlock,
        blocks_of,
    )
    from persia_torchrec.embedding.admission import (
        AdmitAll,
        AdmitBloom,
        AdmitFrequency,
        AdmitProbability,
    )
    from persia_torchrec.embedding.eviction import (
        Expiry,
    )
    from persia_torchrec.embedding.initializer import (
        Constant,
        Gamma,
        InverseSqrtDim,
        Normal,
        Poisson,
        TruncatedNormal,
        Uniform,
    )
    from persia_torchrec.embedding.optim import (
        FTRL,
        LAMB,
        LARS,
        SGD,
        Adagrad,
        AdagradDecay,
        Adam,
        AdamAsync,
        AdamW,
        RowwiseAdam,
        RowwiseLAMB,
    )
    from persia_torchrec.errors import (
        PersiaError,
    )
    from persia_torchrec.server.cluster import (
        EmbeddingCluster,
    )
    from persia_torchrec.sharding.mixed import (
        MixedSharder,
    )
    from persia_torchrec.sharding.placement import (
        Placement,
    )
    from persia_torchrec.sharding.sharder import (
        RemoteEmbeddingBagCollectionSharder,
        RemoteEmbeddingCollectionSharder,
        RemoteFeatureProcessedEmbeddingBagCollectionSharder,
        RemoteFusedEmbeddingBagCollectionSharder,
        RemoteSharder,
        remote_sharders,
    )
    from persia_torchrec.sharding.state import (
        load_tables,
        plain_state_dict,
        read_table,
    )
    from persia_torchrec.sharding.whole_model import (
        describe_placement,
        join,
    )
    from persia_torchrec.table import (
        TableSettings,
    )
    from persia_torchrec.training.checkpoint import (
        load_checkpoint,
        save_checkpoint,
    )

_HOME = {
    "EmbeddingClient": "client.client",
    "RowBlock": "client.transfer",
    "blocks_of": "client.transfer",
    "AdmitAll": "embedding.admission",
    "AdmitBloom": "embedding.admission",
    "AdmitFrequency": "embedding.admission",
    "AdmitProbability": "embedding.admission",
    "Expiry": "embedding.eviction",
    "Constant": "embedding.initializer",
    "Gamma": "embedding.initializer",
    "InverseSqrtDim": "embedding.initializer",
    "Normal": "embedding.initializer",
    "Poisson": "embedding.initializer",
    "TruncatedNormal": "embedding.initializer",
    "Uniform": "embedding.initializer",
    "FTRL": "embedding.optim",
    "LAMB": "embedding.optim",
    "LARS": "embedding.optim",
    "SGD": "embedding.optim",
    "Adagrad": "embedding.optim",
    "AdagradDecay": "embedding.optim",
    "Adam": "embedding.optim",
    "AdamAsync": "embedding.optim",
    "AdamW": "embedding.optim",
    "RowwiseAdam": "embedding.optim",
    "RowwiseLAMB": "embedding.optim",
    "PersiaError": "errors",
    "EmbeddingCluster": "server.cluster",
    "RemoteFeatureProcessedEmbeddingBagCollectionSharder": ("sharding.sharder"),
    "MixedSharder": "sharding.mixed",
    "describe_placement": "sharding.whole_model",
    "Placement": "sharding.placement",
    "RemoteEmbeddingCollectionSharder": "sharding.sharder",
    "RemoteEmbeddingBagCollectionSharder": "sharding.sharder",
    "RemoteSharder": "sharding.sharder",
    "remote_sharders": "sharding.sharder",
    "RemoteFusedEmbeddingBagCollectionSharder": "sharding.sharder",
    "join": "sharding.whole_model",
    "plain_state_dict": "sharding.state",
    "read_table": "sharding.state",
    "load_tables": "sharding.state",
    "TableSettings": "table",
    "load_checkpoint": "training.checkpoint",
    "save_checkpoint": "training.checkpoint",
}

__all__ = [
    "FTRL",
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "AdagradDecay",
    "Adam",
    "AdamAsync",
    "AdamW",
    "AdmitAll",
    "AdmitBloom",
    "AdmitFrequency",
    "AdmitProbability",
    "Constant",
    "EmbeddingClient",
    "EmbeddingCluster",
    "Expiry",
    "Gamma",
    "InverseSqrtDim",
    "MixedSharder",
    "Normal",
    "PersiaError",
    "Placement",
    "Poisson",
    "RemoteEmbeddingBagCollectionSharder",
    "RemoteEmbeddingCollectionSharder",
    "RemoteFeatureProcessedEmbeddingBagCollectionSharder",
    "RemoteFusedEmbeddingBagCollectionSharder",
    "RemoteSharder",
    "RowBlock",
    "RowwiseAdam",
    "RowwiseLAMB",
    "TableSettings",
    "TruncatedNormal",
    "Uniform",
    "blocks_of",
    "describe_placement",
    "join",
    "load_checkpoint",
    "load_tables",
    "plain_state_dict",
    "read_table",
    "remote_sharders",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'persia_torchrec' has no attribute {name!r}")
    return getattr(import_module(f"persia_torchrec.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
