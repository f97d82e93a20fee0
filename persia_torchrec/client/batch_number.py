"""Which batch a request belongs to."""

import secrets
from dataclasses import dataclass

from persia_torchrec.wire.messages import Header


@dataclass(frozen=True, slots=True)
class BatchNumber:
    """Which batch a request belongs to: a stream, and a number within it."""

    stream: int
    batch: int

    @staticmethod
    def new_stream() -> int:
        """Return a number for a stream of batches that no other process will choose."""
        return secrets.randbits(63)

    def mark(self, header: Header) -> Header:
        """Return a request's header that names this batch."""
        return header._replace(stream=self.stream, batch=self.batch)
