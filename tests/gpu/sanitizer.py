"""A plugin of pytest: torch's CUDA sanitizer in every thread, not in the first alone.

With ``TORCH_CUDA_SANITIZER=1`` torch follows which stream reads and writes which
tensor, and raises where one does not wait for another. It sees operators by a dispatch
mode, which is of one thread; here the threads that pull and push enter it too. Tests of
time and of memory are left out.
"""

import os
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LEFT_OUT = ("1000", "sleeps", "waits_for_nothing")


def pytest_configure(config: pytest.Config) -> None:
    """Let each thread that starts from now on enter the mode of the main one."""
    if not (torch.cuda.is_available() and os.environ.get("TORCH_CUDA_SANITIZER")):
        return
    from torch.cuda import _sanitizer  # it is there in processes that asked for it

    run, main = threading.Thread.run, _sanitizer.cuda_sanitizer.dispatch

    class OfThread(TorchDispatchMode):
        event_handler = main.event_handler
        __torch_dispatch__ = type(main).__torch_dispatch__

    def watched(thread: threading.Thread) -> None:
        with OfThread():
            run(thread)

    threading.Thread.run = watched


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what the sanitizer would change the meaning of."""
    left_out = [item for item in items if any(part in item.name for part in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
