"""The adult-income example as a whole job: what a newcomer runs first."""

import os
from pathlib import Path

import pytest

from tests.integration.torchx_jobs import TorchxJob

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
needs_data = pytest.mark.skipif(
    "PERSIA_DATA_DIR" not in os.environ,
    reason="PERSIA_DATA_DIR names no folder with adult.data and adult.test",
)

LEAST_AUC = 0.892
NUM_STEPS = 255
DEADLINE_S = 120.0
EXAMPLE = "examples/adult_income"

# What the README says; without arguments, .torchxconfig says the same.
WRITTEN_OUT = [
    "components/job.py:train",
    *("--nn_worker", f"{EXAMPLE}/train.py"),
    *("--data_loader", f"{EXAMPLE}/data_loader.py"),
    *("--embedding_config", f"{EXAMPLE}/embedding_config.yml"),
    *("--global_config", f"{EXAMPLE}/global_config.yml"),
    *("--embedding_servers", "2", "--embedding_workers", "1"),
    *("--data_loaders", "1", "--nn_workers", "1"),
]


def run(folder: Path, *arguments, **variables):
    """Run the example; return the job and the file of its losses."""
    folder.mkdir()
    losses = folder / "losses"
    variables["ADULT_LOSS_FILE"] = str(losses)
    with TorchxJob(folder, *arguments, variables=variables) as job:
        ended = job.wait(DEADLINE_S)
    assert ended.status == 0, ended.output
    assert len(losses.read_text().splitlines()) == NUM_STEPS
    return ended, losses.read_bytes()


def auc_of(ended):
    return float(ended.line(r"test AUC (0\.\d+)"))


@needs_data
def test_two_reproducible_runs_are_equal_to_the_last_bit(tmp_path):
    data = {"PERSIA_DATA_DIR": os.environ["PERSIA_DATA_DIR"]}
    exactly = {"REPRODUCIBLE": "1", "EMBEDDING_STALENESS": "1", **data}
    first, losses = run(tmp_path / "first", *WRITTEN_OUT, **exactly)
    second, again = run(tmp_path / "second", **exactly)
    assert auc_of(first) >= LEAST_AUC
    assert auc_of(second) == auc_of(first)
    assert again == losses


@needs_data
def test_a_run_with_stale_rows_is_as_good(tmp_path):
    data = {"PERSIA_DATA_DIR": os.environ["PERSIA_DATA_DIR"]}
    ended, _ = run(tmp_path / "job", **data)
    assert auc_of(ended) >= LEAST_AUC


def test_without_data_and_network_the_rows_are_made_up_and_it_says_so(tmp_path):
    nowhere = "http://127.0.0.1:9"
    ended, _ = run(tmp_path / "job", HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere)
    assert auc_of(ended) > 0.85
    for log in (ended.logs["trainer 0"], ended.logs["loader 0"]):
        (line,) = [line for line in log.splitlines() if "data: " in line]
        assert "WARNING" in line
        assert "made-up rows" in line
        assert "no network" in line
