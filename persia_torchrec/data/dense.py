"""Dense features and labels as tensors."""

from typing import Any

import numpy.typing as npt
import torch


def dense_tensor(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device.

    Args:
        array: of any shape; on the CPU the tensor shares its memory, unless that
            cannot be written to, as that of a batch made of bytes.
        device: where the tensor is wanted.
    """
    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writable).to(device, non_blocking=True)
