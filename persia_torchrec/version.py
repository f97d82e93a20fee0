"""The version of this package, which ``pyproject.toml`` reads, and those beside it."""

import re
from importlib import metadata

__version__ = "0.1.0"

OLDEST_TORCH = 11
"""Of torch 2.X, the least X; the greatest is in ``pyproject.toml``."""


def require_set_that_fits() -> None:
    """Refuse torch, TorchRec and fbgemm of versions that do not fit each other.

    fbgemm 1.X loads with torch 2.(X + 5) alone, and TorchRec 1.X is made for both. One
    that is not installed is not looked at: its import says so.

    Raises:
        ImportError: what is installed, and what fits.
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
        return
    builds = [name for name in minors if name != "torchrec"] or ["fbgemm-gpu-cpu"]
    raise ImportError(
        "torch must be 2.X, X at least "
        f"{OLDEST_TORCH}, and torchrec and fbgemm 1.(X - 5). Received: "
        f"{', '.join(f'{name} {text}' for name, text in found.items())}. With torch "
        f"2.{twin + 5} install torchrec==1.{twin}.* and {builds[0]}==1.{twin}.*, as "
        f"`make install TORCH=2.{twin + 5}` does."
    )
