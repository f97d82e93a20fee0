"""``make wheel``: install by the commands of the page, then train, in a bare folder.

What is installed comes from a package index: gigabytes where torch has CUDA. Prints how
long each step takes.
"""

import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from tests.support import wheel
from tests.support.repository import ROOT

PYTHON = os.environ.get("PYTHON", sys.executable)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the folder of an environment with the wheel, and say how long it took."""
    folder = tmp_path_factory.mktemp("fresh")
    built = wheel.build(folder)
    wheel.run([PYTHON, "-m", "venv", "venv"], cwd=folder)
    page = (ROOT / "docs/install.md").read_text()
    (block,) = re.findall(r"```bash\n(pip install 'persia.*?)```", page, re.DOTALL)
    started = time.monotonic()
    for line in block.splitlines():
        words = shlex.split(line.replace(built.wheel.name, f"{built.wheel}"))
        wheel.run([str(folder / "venv/bin/pip"), *words[1:]], cwd=folder)
    print(f"installed in {time.monotonic() - started:.0f} s")
    return folder


def python(environment: Path, *words: str) -> str:
    started = time.monotonic()
    command = [str(environment / "venv/bin" / words[0]), *words[1:]]
    shown = wheel.run(command, cwd=environment)
    print(f"{shlex.join(words)}: {time.monotonic() - started:.0f} s\n{shown}")
    return shown


def test_the_first_example_trains_and_reports_that_it_compiles(environment):
    page = (ROOT / "README.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (environment / "first.py").write_text(block)
    shown = python(environment, "python", "first.py")
    assert "compil" in shown
    assert "rows on the servers" in shown


def test_a_job_trains_from_any_folder_though_the_environment_is_not_active(environment):
    python(environment, "persia-torchrec", "examples")
    script = ("--script", "examples/train.py --epochs 1")
    here = ("-s", "local_cwd", "persia.train_torchrec")
    shown = python(environment, "torchx", "run", *here, *script)
    assert "SUCCEEDED" in shown
    words = ("run", "--servers", "2", "examples/train.py", "--epochs", "1")
    assert "the job is finished" in python(environment, "persia-torchrec", *words)
    logs = environment.glob("runs/*/logs/trainer/0/combined.log")
    assert len([*logs]) == 2


def test_what_is_missing_is_one_error_with_the_commands(environment):
    python(environment, "pip", "uninstall", "--yes", "torchrec")
    code = (
        "try:\n    from persia_torchrec import remote_sharders\n"
        "except ImportError as exc:\n    print(exc)"
    )
    shown = python(environment, "python", "-c", code)
    assert "Run: pip install" in shown
    assert "--no-deps 'torchrec==1.8.*'" in shown
