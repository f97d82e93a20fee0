"""Import paths that pages named once: each still leads to its module, with a warning.

``python -m`` with one of them runs the module where it is now. A name that there never
was is an error with the one that is nearest.
"""

import difflib
import dis
import inspect
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

_PACKAGE = "persia_torchrec."

MOVED: dict[str, tuple[str, ...]] = {
    "checkpoint.from_persia": ("persia.convert",),
    "client.transfer": ("client.bulk",),
    "config": (),
    "config.embedding_config": ("persia.config.embedding_config",),
    "config.global_config": ("persia.config.global_config",),
    "ctx.base_ctx": ("persia.ctx.base_ctx",),
    "ctx.data_ctx": ("persia.ctx.data_ctx",),
    "ctx.embedding_ctx": ("persia.ctx.embedding_ctx",),
    "ctx.lookup_ctx": ("persia.ctx.lookup_ctx",),
    "ctx.train_ctx": ("persia.ctx.train_ctx",),
    "data.columns": ("datasets.columns",),
    "data.datasets": ("datasets.dataset",),
    "data.files": ("datasets.files",),
    "data.loader": ("persia.loader",),
    "data.stream": ("persia.stream",),
    "data.torchrec": ("datasets.batches", "persia.kjt"),
    "data.work_queue": ("datasets.work_queue",),
    "embedding.kernel": ("jit.kernel",),
    "intrinsics": ("jit.intrinsics",),
    "launch.coordinator": ("job.coordinator",),
    "launch.persia_launcher": ("persia.launcher",),
    "launch.script": ("job.script",),
    "launch.supervisor": ("job.supervisor",),
    "launch.torchrun": ("job.torchrun",),
    "sharding.remote_tables": ("sharding.table_control", "sharding.training_blocks"),
    "sharding.whole_model": ("sharding.checks", "sharding.training_blocks"),
    "wire": (),
    "wire.messages": ("rpc.messages",),
}
"""Previous module -> where its names are now, below ``persia_torchrec``; none: a folder
whose modules are listed."""


_MEANT = {"PersiaDataset": "IterableDataset"}
"""Names of PERSIA's pages that never were, and are not near to what they mean."""

_DOORS = (
    *("persia_torchrec", f"{_PACKAGE}ctx", f"{_PACKAGE}data", f"{_PACKAGE}embedding"),
    *(f"{_PACKAGE}embedding.data", f"{_PACKAGE}distributed"),
)
"""Where a name may be that another of them lacks."""

_NEAR = 0.8  # of names elsewhere; of names of the package itself it is 0.6


def unknown(package: str, name: str, names: list[str]) -> Exception:
    """Return the error for a name that a package lacks, with the nearest one it has.

    Within ``from package import name`` Python would replace an AttributeError by an
    ImportError of its own, without the hint: there it is an ImportError at once.
    """
    lacks = f"module {package!r} has no attribute {name!r}"
    meant = None
    if not name.startswith("_"):
        meant = _find_meant(_MEANT.get(name, name), names)
    if meant is None:
        return AttributeError(lacks)
    hint = f" Did you mean {meant!r}?"
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back  # behind names_on_use
    if caller is not None:
        instruction = caller.f_code.co_code[caller.f_lasti]
        if instruction == dis.opmap["IMPORT_FROM"]:
            text = f"cannot import name {name!r} from {package!r}."
            return ImportError(f"{text}{hint}", name=package)
    # Python itself adds the nearest one that the package has.
    return AttributeError(lacks if meant in names else f"{lacks}.{hint}")


def _find_meant(name: str, names: list[str]) -> str | None:
    """Return the name that is nearest: of a package, or with that of another."""
    doors = {door: import_module(door).__all__ for door in _DOORS}
    places = {other: f"{door}.{other}" for door in doors for other in doors[door]}
    if name in places and name not in names:
        return places[name]
    if near := difflib.get_close_matches(name, names, n=1):
        return near[0]
    near = difflib.get_close_matches(name, places, n=1, cutoff=_NEAR)
    return places[near[0]] if near else None


def find(fullname: str) -> ModuleSpec | None:
    """Return how to load a module that has moved, or None."""
    now = MOVED.get(fullname.removeprefix(_PACKAGE))
    if now is None:
        return None
    found = find_spec(_PACKAGE + now[0]) if now else None
    origin = found.origin if found is not None else None
    loader = cast("Loader", MovedModule(now))
    return ModuleSpec(fullname, loader, origin=origin, is_package=not now)


class MovedModule:
    """Loads a module by its previous path: it has the names of those that it is now."""

    def __init__(self, now: tuple[str, ...]) -> None:
        self._now = now

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        self._warn(module.__name__)

        def load(name: str) -> Any:
            for now in self._now:
                found = import_module(_PACKAGE + now)
                if hasattr(found, name):
                    return getattr(found, name)
            raise AttributeError(
                f"module {module.__name__!r} has no attribute {name!r}"
            )

        vars(module)["__getattr__"] = load

    def get_code(self, fullname: str) -> CodeType | None:
        """Return what ``python -m`` runs."""
        self._warn(fullname)
        found = find_spec(_PACKAGE + self._now[0])
        assert found is not None
        assert isinstance(found.loader, SourceFileLoader)
        return found.loader.get_code(found.name)

    def _warn(self, fullname: str) -> None:
        if self._now:
            names = " and ".join(_PACKAGE + now for now in self._now)
            warnings.warn(
                f"{fullname} has moved: import {names}.", FutureWarning, stacklevel=3
            )
