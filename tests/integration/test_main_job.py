"""The adult-income example as a whole job: what a newcomer runs first."""

import pytest
import torch

from tests.support.adult_income import DATA, LEAST_AUC, LEAST_STALE_AUC, NUM_WARNINGS
from tests.support.forked_jobs import ForkedJob
from tests.support.ports import draw_port
from tests.support.repository import ROOT
from tests.support.torchx_jobs import TorchxJob

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

NUM_STEPS = 255
EXAMPLE = "examples/adult_income"

# What docs/install.md says; without arguments, .torchxconfig says the same.
ARGUMENTS = [
    *("--nn_worker", f"{EXAMPLE}/train.py"),
    *("--data_loader", f"{EXAMPLE}/data_loader.py"),
    *("--embedding_config", f"{EXAMPLE}/embedding_config.yml"),
    *("--global_config", f"{EXAMPLE}/global_config.yml"),
    *("--servers", "2", "--embedding_workers", "1"),
    *("--data_loaders", "1", "--trainers", "1"),
]


def run(folder, start, *arguments, **variables):
    """Run the example; return the job, and its file of losses."""
    folder.mkdir()
    losses = folder / "losses"
    variables["ADULT_LOSS_FILE"] = str(losses)
    with start(folder, *arguments, variables=variables, cwd=ROOT) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    assert len(losses.read_text().splitlines()) == NUM_STEPS
    return ended, losses.read_bytes()


def read_auc(ended):
    return float(ended.line(r"test AUC (0\.\d+)"))


REPRODUCIBLE = {"REPRODUCIBLE": "1", "EMBEDDING_STALENESS": "1", **DATA}


def run_plainly(folder):
    port = ["--", "--port", str(draw_port())]
    return run(folder, TorchxJob, *port, **REPRODUCIBLE)


def test_plain_torchx_run_learns_and_nothing_warns(tmp_path):
    ended, _ = run_plainly(tmp_path / "job")
    assert read_auc(ended) >= LEAST_AUC
    # Neither TorchRec nor torch warns of how this package calls them.
    lines = "\n".join(ended.logs.values()).splitlines()
    noise = [x for x in lines if "warning" in x.lower() or "[rank0]" in x]
    # On a busy machine a role may be waited for, which is said.
    noise = [x for x in noise if "waiting for" not in x]
    if torch.__version__ >= (2, 13):  # before, TorchRec and fbgemm warn of each other
        assert len(noise) == NUM_WARNINGS, noise
    for detail in ("new tables on all servers", "optimizer engine: compiled"):
        assert sum(log.count(detail) for log in ended.logs.values()) == 1


@pytest.mark.long
def test_a_second_run_is_equal_to_the_last_bit(tmp_path):
    first, losses = run_plainly(tmp_path / "first")
    command = ["train", *ARGUMENTS]
    second, again = run(tmp_path / "second", ForkedJob, *command, **REPRODUCIBLE)
    assert read_auc(second) == read_auc(first)
    assert again == losses


@pytest.mark.long
def test_a_run_with_stale_rows_reaches_the_same_auc(tmp_path):
    command = ["train", *ARGUMENTS]
    ended, _ = run(tmp_path / "job", ForkedJob, *command, **DATA)
    assert read_auc(ended) >= LEAST_STALE_AUC
