"""Every command of the README is run: here, in another test, or by `make test`."""

import re

import pytest

from tests.processes import Processes, run_script
from tests.support.repository import ROOT

README = (ROOT / "README.md").read_text()

# What runs a command that does not run in this file.
RUN_BY = {
    "make install": "make test",
    "make test": ".ci/run",
    "make train": "tests/integration/test_main_job.py",
    "torchx run components/job.py:train": "tests/integration/test_main_job.py",
    "torchx run components/torchrec_job.py:train": (
        "tests/integration/test_torchrec_job.py"
    ),
    "python -m persia_torchrec.bench": "tests/bench/test_benchmarks.py",
    "python -m persia_torchrec.serving": "tests/serving/test_serving.py",
    "persia-launcher embedding-parameter-server": "tests/serving/test_inference_job.py",
    "persia-launcher embedding-worker": "tests/serving/test_inference_job.py",
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(script, folder):
    """Run a script from the root of the repository; return its output."""
    with Processes(folder) as processes:
        running = processes.start("script", run_script, script, cwd=ROOT)
        assert running.status() == 0, running.output()
    return running.output()


def run_block(block, folder):
    """Run an example of the README; return its output."""
    script = folder / "block.py"
    script.write_text(block)
    return run(script, folder)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_first_example_runs_as_it_stands(tmp_path):
    output = run_block(blocks("python")[0], tmp_path)
    numbers = re.search(r"\[(\d+), (\d+)\] rows on the servers", output)
    assert numbers is not None
    assert sum(map(int, numbers.groups())) == 8


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_example_of_settings_runs_as_it_stands(tmp_path):
    _, block = blocks("python")
    # Their rows were made at the third sight, and updated then and twice more.
    assert "frequency [5 5] last step [5 5]" in run_block(block, tmp_path)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    output = run(ROOT / "examples/quickstart.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+),", output)]
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


def test_the_files_that_the_other_pages_name_exist():
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py")]
    for page in (ROOT / "persia_torchrec").rglob("*.md"):
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            assert any(file.endswith(f"/{name}") for file in files), (page.name, name)
