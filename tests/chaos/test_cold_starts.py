"""Cold starts in two jobs of one user, beside a load: no process is killed unasked.

README's block starts servers of its own, and a data loader looks for a coordinator that
is not there. In the first rounds no loop is compiled: the package is a copy without
caches.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.ports import draw_port
from tests.support.processes import DEADLINE_S
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NUM_ROUNDS, NUM_COMPILING = 20, 2
COMPILING_S = 1200.0  # a minute of a core, of which there are fewer than are busy
BLOCK = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
LOADER = """
from persia_torchrec.ctx import DataCtx
with DataCtx() as ctx:
    pass
"""
LOAD = "while True: pass"
KILLED = -signal.SIGKILL, 128 + signal.SIGKILL


def copy_package(folder):
    """Copy the package without what is compiled."""
    ignored = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    shutil.copytree(
        ROOT / "persia_torchrec", folder / "persia_torchrec", ignore=ignored
    )


def begin(folder, words, **variables):
    """Start a job of the user whose home is a folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    return subprocess.Popen(
        words,
        cwd=folder,
        env={"HOME": str(folder), "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_cold_starts_beside_a_load_end_as_they_should(tmp_path, record_property):
    (tmp_path / "block.py").write_text(BLOCK)
    (tmp_path / "loader.py").write_text(LOADER)
    ended = Counter[str]()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", LOAD]))
            stack.callback(busy.kill)
        for number in range(NUM_ROUNDS):
            package = tmp_path / f"round-{number}"
            package.mkdir()
            if number < NUM_COMPILING:
                copy_package(package)
            more = {"PYTHONPATH": str(package if number < NUM_COMPILING else ROOT)}
            loads = ["persia-launcher", "data-loader", "loader.py"]
            alone = {"PERSIA_STORE_PORT": str(draw_port())}
            alone["PERSIA_JOIN_TIMEOUT_S"] = "3"
            jobs = {
                "README": begin(tmp_path, [sys.executable, "block.py"], **more),
                "loader": begin(tmp_path, loads, **more, **alone),
            }
            deadline_s = COMPILING_S if number < NUM_COMPILING else DEADLINE_S
            for job in jobs.values():
                stack.callback(job.kill)
            for name, job in jobs.items():
                output, _ = job.communicate(timeout=deadline_s)
                assert job.returncode not in KILLED, (name, number, output)
                assert "SIGKILL" not in output, (name, number, output)
                assert job.returncode == int(name == "loader"), (name, number, output)
                ended[name] += 1
    record_property("measured", f"{ended.total()} starts, none killed")
