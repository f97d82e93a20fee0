"""What all contexts share: entering and leaving, and the settings of PERSIA's base."""

from types import TracebackType
from typing import Self

import torch

from persia_torchrec.data.loader import current_context, enter_context, leave_context
from persia_torchrec.errors import ConfigError


class BaseCtx:
    """The base of all contexts; by itself it can only be entered.

    Args:
        threadpool_worker_size: how many lookups of this context may be under way at
            once, at least 1; a ``DataLoader`` may allow fewer by its ``num_workers``.
        device_id: CUDA device of tensors, which becomes torch's current one; None is
            the CPU.

    Attributes:
        threadpool_worker_size: as given.
        device_id: as given.

    Raises:
        ConfigError: a number is out of its range, or there is no such device.
    """

    def __init__(
        self, threadpool_worker_size: int = 10, device_id: int | None = None
    ) -> None:
        require_at_least_1(threadpool_worker_size=threadpool_worker_size)
        self.threadpool_worker_size = threadpool_worker_size
        self.device_id = device_id
        self._device = torch.device("cpu")
        if device_id is not None:
            self._device = cuda_device(device_id)
            torch.cuda.set_device(device_id)

    def __enter__(self) -> Self:
        """Make this the current context; see :func:`cnt_ctx`."""
        self._begin()
        enter_context(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Return to the context around this one; an exception goes on."""
        leave_context(self)
        self._end(exc)

    def _begin(self) -> None:
        """Do what must be done before the block."""

    def _end(self, exc: BaseException | None) -> None:
        """Do what must be done after the block, which may have raised."""


def cnt_ctx() -> BaseCtx | None:
    """Return the context that was entered last and not left, or None."""
    context = current_context()
    return context if isinstance(context, BaseCtx) else None


def cuda_device(device_id: int) -> torch.device:
    """Return a CUDA device of this machine.

    Raises:
        ConfigError: there is no such device.
    """
    if not torch.cuda.is_available() or not 0 <= device_id < torch.cuda.device_count():
        raise ConfigError(
            f"device_id must be a CUDA device of this machine, in "
            f"[0, {torch.cuda.device_count()}). Received: {device_id}."
        )
    return torch.device("cuda", device_id)


def require_at_least_1(**numbers: int) -> None:
    """Check arguments that count something.

    Raises:
        ConfigError: one is below 1; the message names it.
    """
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name} must be >= 1. Received: {number}.")
