"""PERSIA's hybrid training for TorchRec.

Names are imported on first use, so that ``python -m persia_torchrec.server`` starts
without torch and TorchRec.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia_torchrec.client.client import EmbeddingClient
    from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
    from persia_torchrec.errors import PersiaError
    from persia_torchrec.server.cluster import EmbeddingCluster
    from persia_torchrec.sharding.sharder import RemoteEmbeddingBagCollectionSharder

_HOME = {
    "SGD": "embedding.optim",
    "Adagrad": "embedding.optim",
    "Adam": "embedding.optim",
    "EmbeddingClient": "client.client",
    "EmbeddingCluster": "server.cluster",
    "PersiaError": "errors",
    "RemoteEmbeddingBagCollectionSharder": "sharding.sharder",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingClient",
    "EmbeddingCluster",
    "PersiaError",
    "RemoteEmbeddingBagCollectionSharder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'persia_torchrec' has no attribute {name!r}")
    return getattr(import_module(f"persia_torchrec.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
