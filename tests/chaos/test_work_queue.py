"""A job whose trainers share a queue, and whose processes are killed at random."""

import contextlib
import os
import sys

import numpy as np
import pytest

from persia_torchrec.job.registry import AddressBook
from tests.chaos.killing import SUPERVISOR, Killer
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import wait_until
from tests.support.queued_trainers import NUM_EPOCHS, write_files
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROLES = 2 * ["trainer", "coordinator"] + ["server", SUPERVISOR]


@pytest.mark.parametrize("saves", ["checkpoints", "deltas"])
def test_each_row_of_a_queue_counts_once(tmp_path, draw, kills, record_property, saves):
    (tmp_path / "rows").mkdir()
    num_rows = write_files(tmp_path / "rows", [150 + 7 * n for n in range(30)])
    job = ForkedJob(
        tmp_path,
        *("train_torchrec", "--servers", "2"),
        *("--script", f"{ROOT}/tests/chaos/queued_trainer.py"),
        *("--nproc_per_node", "2", "--python", sys.executable),
        *("--restarts", "1000"),
        *("--increments_dir", str(tmp_path / "increments")),
        variables={
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
            "PERSIA_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "OMP_NUM_THREADS": "1",
            "NUM_ROWS": str(num_rows),
            "SAVES": saves,
        },
    )

    def num_steps():
        path = tmp_path / "steps"
        return path.stat().st_size if path.exists() else 0

    with job, contextlib.closing(AddressBook.join("localhost", job.port)) as book:
        wait_until(lambda: num_steps() > 10, "it trains", details=job.output)
        killer = Killer(
            tmp_path, job, book, draw, num_steps, ROLES, server=2, trainer=2
        )
        killer.kill(kills(20), most_steps=10)
        record_property("measured", killer.summary())
        (tmp_path / "calm").touch()
        ended = job.wait()
    assert ended.status == 0, ended.output
    counts = np.load(tmp_path / "counts.npy")
    assert counts.tolist() == [[NUM_EPOCHS] * 4] * num_rows
    has_deltas = any((tmp_path / "checkpoints").rglob("delta.json"))
    assert has_deltas == (saves == "deltas")
