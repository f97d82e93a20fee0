"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.helper import (
    Config as Config,
    PersiaServiceCtx as PersiaServiceCtx,
    ensure_persia_service as ensure_persia_service,
)
