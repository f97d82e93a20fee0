"""Every command of the README is run: here, in another test, or by `make test`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

# What runs a command that does not run in this file.
RUN_BY = {
    "make install": "make test",
    "make test": ".ci/run",
    "make train": "tests/integration/test_main_job.py",
    "torchx run components/job.py:train": "tests/integration/test_main_job.py",
    "python -m persia_torchrec.bench": "tests/bench/test_benchmarks.py",
    "python -m persia_torchrec.serving": "tests/serving/test_serving.py",
    "persia-launcher embedding-parameter-server": "tests/serving/test_inference_job.py",
    "persia-launcher embedding-worker": "tests/serving/test_inference_job.py",
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=100,
    )


def run_block(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block)
    return run(str(script))


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_first_example_runs_as_it_stands(tmp_path):
    result = run_block(blocks("python")[0], tmp_path)
    assert result.returncode == 0, result.stderr
    numbers = re.search(r"\[(\d+), (\d+)\] rows on the servers", result.stdout)
    assert numbers is not None
    assert sum(map(int, numbers.groups())) == 8


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_of_settings_runs_as_it_stands(tmp_path):
    _, block = blocks("python")
    result = run_block(block, tmp_path)
    assert result.returncode == 0, result.stderr
    # Their rows were made at the third sight, and updated then and twice more.
    assert "frequency [3 3] last step [5 5]" in result.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_quickstart_learns():
    result = run("examples/quickstart.py")
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+),", result.stdout)]
    assert losses[-1] < 0.2 < 0.6 < losses[0]


def test_the_quickstart_is_short():
    assert len((ROOT / "examples/quickstart.py").read_text().splitlines()) < 60


def test_every_shell_command_is_run_somewhere():
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) >= len(RUN_BY)
    for command in commands:
        if command != "python examples/quickstart.py":
            assert any(command.startswith(known) for known in RUN_BY), command


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_files_to_read_exist():
    for path in re.findall(r"`(persia_torchrec/[\w/]+\.py)`", README):
        assert (ROOT / path).exists(), path
