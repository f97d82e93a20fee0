"""Which batch a request belongs to."""

import secrets
from dataclasses import dataclass

from persia_torchrec.wire.messages import Header, Share


@dataclass(frozen=True, slots=True)
class BatchNumber:
    """Which batch a request belongs to: a stream, and a number within it.

    Attributes:
        share: of which joint step its update is a share; None when it is applied by
            itself, whatever other trainers do.
    """

    stream: int
    batch: int
    share: Share | None = None

    def stamp(self, header: Header, flags: int = 0) -> Header:
        """Return a header of a request that belongs to this batch."""
        return header._replace(stream=self.stream, batch=self.batch, flags=flags)

    @staticmethod
    def new_stream() -> int:
        """Return a number for a stream of batches that no other process will choose."""
        return secrets.randbits(63)
