"""Base of all contexts: the current context, and the shared settings."""

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, Self

from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.decoding import require_at_least_1
from persia_torchrec.persia import loader


class BaseCtx:
    """The base of all contexts; by itself it can only be entered.

    Args:
        threadpool_worker_size: how many lookups of this context may be under way at
            once, at least 1; a ``DataLoader`` may allow fewer by its ``num_workers``.
        device_id: CUDA device of tensors, which becomes torch's current one; None is
            the CPU.
    """

    def __init__(
        self, threadpool_worker_size: int = 10, device_id: int | None = None
    ) -> None:
        require_at_least_1(threadpool_worker_size=threadpool_worker_size)
        self.threadpool_worker_size = threadpool_worker_size
        self.device_id = device_id
        if device_id is not None:
            import torch  # for a device only: a data loader starts without it

            num_devices = torch.cuda.device_count()
            if not isinstance(device_id, int) or not 0 <= device_id < num_devices:
                raise ConfigError(
                    "device_id must be the index of a CUDA device that this process "
                    f"sees, in [0, {num_devices}), or None for the CPU: no other "
                    f"device is supported. Received: {device_id!r}. Where "
                    "CUDA_VISIBLE_DEVICES gives each process its own GPU, that is 0: "
                    "take LOCAL_RANK % torch.cuda.device_count()."
                )
            torch.cuda.set_device(device_id)

    def __enter__(self) -> Self:
        """Make this the current context; see :func:`cnt_ctx`."""
        self._entered = self._block()
        self._entered.__enter__()
        loader.entered.append(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Return to the context around this one; an exception propagates."""
        loader.leave_context(self)
        self._entered.__exit__(*exc_info)

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        """Prepare the user's block and clean up after it; it may raise."""
        yield


def cnt_ctx() -> BaseCtx | None:
    """Return the context that was entered last and not left, or None."""
    return loader.entered[-1] if loader.entered else None


class PreprocessMode(enum.Enum):
    """What a context makes of a batch."""

    TRAIN = 1
    """Embeddings want a gradient. It goes to the servers by ``TrainCtx.backward``, if
    the batch is a ``DataLoader``'s and ``requires_grad``; else it stays here."""

    EVAL = 2
    """They do not, and the servers are only read."""

    INFERENCE = 3
    """As EVAL, and labels are not looked at."""
