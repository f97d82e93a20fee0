"""Where a model and its ids are: on the CPU, on a GPU, or the ids left on the host."""

import pytest
import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU_PLACES = [
    pytest.param(CUDA, CPU, marks=ON_GPU, id="on a GPU, ids on the host"),
    pytest.param(CUDA, CUDA, marks=ON_GPU, id="on a GPU, ids too"),
]
"""Of a model, and of its ``KeyedJaggedTensor``: a test on a GPU is for both."""

PLACES = [pytest.param(CPU, CPU, id="on the CPU"), *GPU_PLACES]


def move(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model whose tables are on the meta device; these stay there."""
    return model._apply(lambda one: one if one.is_meta else one.to(device))


def require_kernels(device: torch.device, operator: str = "offsets_range") -> None:
    """Skip what TorchRec does on a device by an operator of fbgemm that lacks it."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    key = device.type.upper()
    if not has_kernel(f"fbgemm::{operator}", key):
        pytest.skip(f"fbgemm::{operator} has no kernel for {key} in this wheel")
