"""Which objects a loop reads its batches from, however they are wrapped.

A ``DataLoader``, ``tqdm``, a generator expression, ``zip`` or a class with
``__iter__`` holds what it reads: as an attribute, in a frame, in a closure, or as a
global variable that its code names. The search follows these, as the garbage
collector does.
"""

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch

from persia_torchrec.client.client import EmbeddingClient

_MAX_OBJECTS = 20_000  # that are looked at
_MAX_ITEMS = 1_000  # of a list or a dictionary that is followed: others hold samples
_OPAQUE = (
    *(str, bytes, bytearray, int, float, complex, type, ModuleType, FrameType),
    *(CodeType, torch.Tensor, np.ndarray, torch.nn.Module, torch.optim.Optimizer),
    EmbeddingClient,
)


def reachable(root: object, hidden: Iterable[object] = ()) -> Iterator[object]:
    """Yield an object, and what it holds, the nearest first.

    Args:
        root: where the search begins.
        hidden: objects that are not looked into.
    """
    seen, found = {id(one) for one in hidden}, deque([root])
    held: list[object] = []  # so that no id is given a second time
    while found and len(held) < _MAX_OBJECTS:
        one = found.popleft()
        if one is None or id(one) in seen or isinstance(one, _OPAQUE):
            continue
        seen.add(id(one))
        held.append(one)
        yield one
        found.extend(_held_by(one))


def _held_by(one: object) -> Iterator[object]:
    if isinstance(one, FunctionType):
        yield from (one.__closure__ or (), one.__defaults__ or ())
        yield from _globals_of(one.__code__, one.__globals__)
        return
    if isinstance(one, list | tuple | dict | set | frozenset | deque) and (
        len(one) > _MAX_ITEMS
    ):
        return
    yield from gc.get_referents(one)
    if isinstance(one, GeneratorType) and one.gi_frame is not None:
        yield from _globals_of(one.gi_code, one.gi_frame.f_globals)
    for name in ("__iter__", "__next__", "__getitem__"):
        method = getattr(type(one), name, None)
        if isinstance(method, FunctionType) and not _is_of_library(method):
            yield method


def _globals_of(code: CodeType, names: dict[str, Any]) -> Iterator[object]:
    """Yield the global variables that a script's code names."""
    for name in code.co_names:
        value = names.get(name)
        if not isinstance(value, FunctionType) or not _is_of_library(value):
            yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner, names)


def _is_of_library(function: FunctionType) -> bool:
    """Return whether a function is of an installed package."""
    return "site-packages" in function.__code__.co_filename
