"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.embedding import (
    data as data,
    optim as optim,
)
from persia_torchrec.embedding.table_defaults import (
    EmbeddingConfig as EmbeddingConfig,
    get_default_embedding_config as get_default_embedding_config,
)
