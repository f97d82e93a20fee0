"""Finds operators for which the trainer's thread would wait for a GPU, on the CPU."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = {
    *("_local_scalar_dense", "is_nonzero", "item", "equal", "allclose"),
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount"),
    *(
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
    ),
}
"""Operators whose result, or its shape, the host has to read on the device."""

_MASKS = (torch.bool, torch.uint8)


class Spy(TorchDispatchMode):
    """Notes synchronising operators of this thread; its backward passes are of it too.

    On the CPU they wait for nothing, but the way to them is the same: so it finds them
    in what a collection does on a GPU, where the tests choose that way on the CPU. What
    it cannot find are reads without an operator, as ``tolist`` and ``numpy``: of these
    the package has those of memory of the host.

    Args:
        is_allowed: by a stack of ``file:function``, the innermost last.
    """

    def __init__(
        self, is_allowed: Callable[[list[str]], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self._is_allowed = is_allowed
        self.found: list[str] = []
        self.num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.num_operators += 1
        if _synchronises(func, args, kwargs):
            frames = traceback.extract_stack()[:-1]
            stack = [f"{f.filename.rpartition('/')[2]}:{f.name}" for f in frames]
            if not (self._is_allowed(stack) or _is_of_replicas(args, stack)):
                self.found.append(f"{func} by {' > '.join(stack[-6:])}")
        return func(*args, **kwargs)


def _synchronises(func: Any, args: Any, kwargs: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name in _ALWAYS:
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("_to_copy", "copy_"):
        return _is_waited_for(name, args, kwargs)
    return False


def _is_of_replicas(args: Any, stack: list[str]) -> bool:
    """Whether DistributedDataParallel notes, on the host, what was used."""
    is_backward = "graph.py:_engine_run_backward" in stack
    return is_backward and args[0].dtype == torch.int32 and args[0].dim() == 0


def _is_waited_for(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a copy comes from a device, or from pageable memory to one."""
    if name == "_to_copy":
        source, waits = args[0], not kwargs.get("non_blocking")
        target = torch.device(kwargs.get("device") or source.device)
    else:
        target, source, *rest = args[0].device, *args[1:]
        waits = not (rest and rest[0])
    if source.device.type == "cpu":
        return target.type != "cpu" and not source.is_pinned()
    return waits and target.type == "cpu"
