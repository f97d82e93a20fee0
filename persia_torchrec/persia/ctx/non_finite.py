"""Which step had the first output or loss that is not finite; nothing waits for it."""

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from persia_torchrec.datasets.transfer import ToHost

logger = logging.getLogger(__name__)

_MAX_PENDING = 256
"""Copies that may be on their way; what comes when there are more is not looked at."""


class NonFiniteWatch:
    """Warns of outputs and losses that are not finite, once per run of such steps.

    The sum of zero times each number is NaN if one is not finite, and 0 if all are. It
    is computed where the numbers are. From a GPU it comes by itself, and is read by a
    later call; on the CPU it is there at once. The thread that trains calls it.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, str, ToHost]] = deque()
        self._last = -1  # step that was not finite

    def note(self, step: int, what: Literal["output", "loss"], value: Any) -> None:
        """Look at the floating tensors in a value, in tuples, lists and dicts too."""
        self.tell()
        sums: dict[torch.device, torch.Tensor] = {}
        for tensor in _tensors_in(value):
            of_tensor = (tensor.detach() * 0).sum()
            known = sums.get(tensor.device)
            sums[tensor.device] = of_tensor if known is None else known + of_tensor
        for of_device in sums.values():
            if len(self._pending) < _MAX_PENDING:
                copy = ToHost(of_device.float(), until_then=0.0)
                self._pending.append((step, what, copy))
        self.tell()

    def tell(self, *, is_over: bool = False) -> None:
        """Warn of what has come; at the end of a training, of what is there then."""
        while self._pending and (is_over or self._pending[0][2].is_here()):
            step, what, copy = self._pending.popleft()
            if np.isfinite(copy.read()):
                continue
            if step > self._last + 1 or self._last < 0:
                logger.warning(
                    "the %s of step %d is not finite; steps in a row are named once. "
                    "Look for features that are not scaled (float16 under autocast "
                    "ends at 65,504), and for a learning rate that is too high",
                    *(what, step),
                )
            self._last = step


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and not value.is_nested
        if value.is_floating_point() and is_plain:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors_in(one)
