"""The version of this package, which ``pyproject.toml`` reads, and those beside it."""

import re
from importlib import metadata
from importlib.util import find_spec

__version__ = "0.1.0"

OLDEST_TORCH = 11
"""Of torch 2.X, the least X; the greatest is in ``pyproject.toml``."""


NEEDS = "tensordict 'torchmetrics==1.0.3' pyre-extensions tqdm"
"""What TorchRec needs besides, but for fbgemm: its metadata names the CUDA build."""


def require_set_that_fits() -> None:
    """Refuse torch, TorchRec and fbgemm that do not fit each other, or are missing.

    fbgemm 1.X loads with torch 2.(X + 5) alone, and TorchRec 1.X is made for both.
    Without torch nothing is looked at: its import says so.

    Raises:
        ImportError: what is installed, what fits, and how to install it.
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
        return
    twin = max(torch, OLDEST_TORCH) - 5
    if torch >= OLDEST_TORCH and all(minor == twin for minor in minors.values()):
        _require_all(found["torch"], torch, twin)
        return
    builds = [name for name in minors if name != "torchrec"] or ["fbgemm-gpu-cpu"]
    raise ImportError(
        "torch must be 2.X, X at least "
        f"{OLDEST_TORCH}, and torchrec and fbgemm 1.(X - 5). Received: "
        f"{', '.join(f'{name} {text}' for name, text in found.items())}. With torch "
        f"2.{twin + 5} install torchrec==1.{twin}.* and {builds[0]}==1.{twin}.*, as "
        f"`make install TORCH=2.{twin + 5}` does."
    )


def _require_all(torch: str, minor: int, twin: int) -> None:
    """Raise ImportError, with what installs them, if TorchRec or fbgemm is missing."""
    missing = [name for name in ("torchrec", "fbgemm_gpu") if not _is_there(name)]
    if not missing:
        return
    commands = []
    if "fbgemm_gpu" in missing:
        build = "fbgemm-gpu" if "+cu" in torch else "fbgemm-gpu-cpu"
        commands.append(f"pip install '{build}==1.{twin}.*'")
    if "torchrec" in missing:
        needs = f"{NEEDS} iopath" if minor <= OLDEST_TORCH + 1 else NEEDS
        commands.append(f"pip install {needs}")
        commands.append(f"pip install --no-deps 'torchrec==1.{twin}.*'")
    raise ImportError(
        f"torchrec and fbgemm_gpu must be installed beside torch {torch}. Received: no "
        f"{' and no '.join(missing)}. Run: {' && '.join(commands)}"
    )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # as where something hides it
        return False
