"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.launcher import (
    cli as cli,
)
