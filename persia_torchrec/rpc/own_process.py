"""What only the process may use that made it."""

import os
from typing import NoReturn, Self

from persia_torchrec.errors import ConfigError


class OwnProcess:
    """What has threads and connections, which only the process has that made it.

    To pickle or copy it is a ConfigError.
    """

    _pid: int

    def __new__(cls, *_: object, **__: object) -> Self:
        """Note which process makes it."""
        made = super().__new__(cls)
        made._pid = os.getpid()
        return made

    def require_own_process(self) -> None:
        """Reject a call in a forked child, which would wait for threads it lacks."""
        if self._pid != os.getpid():
            raise ConfigError(
                f"Threads and connections to the servers belong to process {self._pid},"
                f" which made them. Received: a call in process {os.getpid()}, a fork "
                "of it. Call EmbeddingClient.connect, and shard the model, in each "
                "process."
            )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "Threads and connections to the servers cannot be pickled or copied. "
            f"Received: a {type(self).__name__}, to be given to another process or "
            "copied. Hand the servers' addresses over, and call "
            "EmbeddingClient.connect there; save_checkpoint saves rows."
        )
