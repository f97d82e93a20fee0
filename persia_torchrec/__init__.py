"""PERSIA's hybrid training for TorchRec.

The public names are those of ``__init__.pyi``. Each is imported on first use, so that
``python -m persia_torchrec.server`` starts without torch and TorchRec.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_on_use(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package, of its stub."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = list(modules)

    def load(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            # Python imports a module of this name next, if there is one.
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module == package:
            return import_module(f"{package}.{name}")
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] in (
                "torch",
                "torchrec",
                "fbgemm_gpu",
            ):
                try:
                    import_module(f"{__name__}.version").require_set_that_fits()
                except ImportError as misfit:
                    raise misfit from None  # one error, with what to do
            raise

    return load, lambda: names, names


__getattr__, __dir__, __all__ = names_on_use(__name__, __file__)
