"""The package as users get it: an sdist of the tree, and a wheel of the sdist."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.repository import ROOT

PARTS = ("persia_torchrec", "components", "examples")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
SDIST = "from setuptools import build_meta as b; import sys; b.build_sdist(sys.argv[1])"


class Built(NamedTuple):
    """What was built."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build both in a folder, without a network; the tree stays as it is."""
    source, dist = folder / "source", folder / "dist"
    for part in PARTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, source / part, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    run([sys.executable, "-c", SDIST, str(dist)], cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run([*pip, "--wheel-dir", str(dist), str(sdist)], cwd=folder)
    (wheel,) = dist.glob("*.whl")
    return Built(sdist, wheel)


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """Run a command outside of the checkout; return what it prints."""
    own = {"PATH": os.defpath, "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={**own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
