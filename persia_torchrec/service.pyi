"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.utils import (
    get_embedding_worker_services as get_embedding_worker_services,
)
