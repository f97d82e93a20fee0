"""The version of this package, which ``pyproject.toml`` reads, and those beside it."""

import re
import shutil
from importlib import import_module, metadata
from importlib.util import find_spec

__version__ = "0.2.0"

OLDEST_TORCH = 11
"""Of torch 2.X, the least X; the greatest is in ``pyproject.toml``."""

TORCH = 13
"""That of the extras ``cpu`` and ``cuda``, which is installed where there is none."""

NEEDS = "tensordict 'torchmetrics==1.0.3' pyre-extensions tqdm"
"""What TorchRec needs besides, but for fbgemm: its metadata names the CUDA build."""


def require_set_that_fits() -> None:
    """Reject torch, TorchRec and fbgemm that do not fit each other, or are missing.

    fbgemm 1.X loads with torch 2.(X + 5) alone, and TorchRec 1.X is made for both.

    Raises:
        ImportError: what is installed, what fits, and the commands that install it.
    """
    found = {}
    for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    numbers = {name: re.match(r"(\d+)\.(\d+)", text) for name, text in found.items()}
    minors = {name: int(number[2]) for name, number in numbers.items() if number}
    torch = minors.pop("torch", None)
    if torch is None:
        _require_all(found)
        return
    twin = max(torch, OLDEST_TORCH) - 5
    builds = [name for name in minors if name != "torchrec"]
    fits = torch >= OLDEST_TORCH and all(minor == twin for minor in minors.values())
    is_cpu = "+cpu" in found["torch"] and "fbgemm-gpu" in builds
    if fits and len(builds) < 2 and not is_cpu:
        _require_all(found)
        return
    build = "fbgemm-gpu-cpu" if is_cpu or not builds else builds[0]
    raise ImportError(
        "torch must be 2.X, X at least "
        f"{OLDEST_TORCH}, and torchrec and one build of fbgemm 1.(X - 5), for the CPU "
        f"alone where torch is. Received: {_listed(found)}. With torch 2.{twin + 5} "
        f"install torchrec==1.{twin}.* and {build}==1.{twin}.*, as `make install "
        f"TORCH=2.{twin + 5}` does: pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip "
        f"install '{build}==1.{twin}.*' && pip install --no-deps 'torchrec==1.{twin}.*'"
    )


def _require_all(found: dict[str, str]) -> None:
    """Raise ImportError, with what installs it, if one is missing or does not load."""
    modules = ("torch", "torchrec", "fbgemm_gpu")
    missing = [name for name in modules if not _is_there(name)]
    if "fbgemm_gpu" not in missing and "torch" not in missing:
        try:
            import_module("fbgemm_gpu")
        except (ImportError, OSError) as exc:
            raise ImportError(
                "fbgemm_gpu must load, as that of the torch beside it does. Received: "
                f"{_listed(found)}, and {exc}. Run: pip uninstall -y fbgemm-gpu "
                f"fbgemm-gpu-cpu && {_commands(found, ['fbgemm_gpu'])}"
            ) from exc
    if missing:
        beside = f" beside torch {found['torch']}" if "torch" not in missing else ""
        raise ImportError(
            f"{', '.join(modules[:-1])} and {modules[-1]} must be installed{beside}. "
            f"Received: no {' and no '.join(missing)}. Run: "
            f"{_commands(found, missing)}"
        )


def _commands(found: dict[str, str], missing: list[str]) -> str:
    """Return what installs modules, for the torch that is there, or the extras'."""
    torch = found.get("torch", f"2.{TORCH}") if "torch" not in missing else f"2.{TORCH}"
    minor = int(torch.split(".")[1])
    twin = minor - 5
    has_cuda = "+cu" in torch
    if "torch" in missing:
        has_cuda = shutil.which("nvidia-smi") is not None
    packages, commands = [], []
    if "torch" in missing:
        packages.append(f"'torch==2.{minor}.*'")
    if "fbgemm_gpu" in missing:
        build = "fbgemm-gpu" if has_cuda else "fbgemm-gpu-cpu"
        packages.append(f"'{build}==1.{twin}.*'")
    if "torchrec" in missing:
        packages.append(f"{NEEDS} iopath" if minor <= OLDEST_TORCH + 1 else NEEDS)
        commands.append(f"pip install --no-deps 'torchrec==1.{twin}.*'")
    return " && ".join([f"pip install {' '.join(packages)}", *commands])


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in found.items())


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # as where something hides it
        return False
