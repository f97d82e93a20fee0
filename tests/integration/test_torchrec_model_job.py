"""PERSIA's data loaders feed a TorchRec script, in a job without embedding workers."""

import pytest

from tests.support import adult_income
from tests.support.forked_jobs import ForkedJob
from tests.support.repository import ROOT

pytestmark = pytest.mark.multiprocess

EXAMPLE = "examples/adult_income"
NUM_ROWS, BATCH_SIZE = 900, 128


def run(folder, script, num_workers, data):
    """Run the example on few rows; return its file of losses, and the last line."""
    folder.mkdir()
    arguments = [
        *("--nn_worker", f"{EXAMPLE}/{script}"),
        *("--data_loader", f"{EXAMPLE}/data_loader.py"),
        *("--embedding_config", f"{EXAMPLE}/embedding_config.yml"),
        *("--global_config", f"{EXAMPLE}/global_config.yml"),
        *("--servers", "2", "--embedding_workers", str(num_workers)),
    ]
    variables = {
        "REPRODUCIBLE": "1",
        "EMBEDDING_STALENESS": "1",
        "PERSIA_DATA_DIR": str(data),
        "PERSIA_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "ADULT_LOSS_FILE": str(folder / "losses"),
    }
    command = ["train", *arguments]
    with ForkedJob(folder, *command, variables=variables, cwd=ROOT) as job:
        ended = job.wait()
    assert ended.status == 0, ended.output
    return (folder / "losses").read_text().splitlines(), ended.line(r"(test AUC .*)")


def test_a_torchrec_script_trains_what_a_persia_script_does_to_the_last_bit(tmp_path):
    rows = (adult_income.TRAIN * NUM_ROWS)[:NUM_ROWS]
    data = adult_income.write(tmp_path / "adult", train=rows)
    torchrec = run(tmp_path / "torchrec", "torchrec_model.py", 0, data)
    persia = run(tmp_path / "persia", "train.py", 1, data)
    assert len(torchrec[0]) == -(-NUM_ROWS // BATCH_SIZE)
    assert torchrec == persia
