"""PERSIA's hybrid training for TorchRec.

The public names are those of ``__init__.pyi``. Each is imported on first use, so that
``python -m persia_torchrec.server`` starts without torch and TorchRec.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'persia_torchrec' has no attribute {name!r}")
    if module == __name__:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
