"""A job of ``uneven_script.py``: how it starts and ends, and what it must leave."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from persia_torchrec.job.registry import AddressBook
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import wait_until
from tests.support.repository import ROOT
from tests.support.uneven_script import num_steps_of
from tests.support.uneven_trainers import expected_dense, expected_trainings

LAST_PASSES = 3  # from when a trainer reads the end, which all then know


@contextlib.contextmanager
def uneven_job(
    folder: Path, most_steps: int, **variables: str
) -> Iterator[tuple[ForkedJob, AddressBook]]:
    """Run a job of two servers and two trainers that recovers; give it, and its book.

    ``most_steps`` are those of a trainer in a pass; ``variables`` are of the script.
    """
    job = ForkedJob(
        folder,
        *("train_torchrec", "--servers", "2"),
        *("--script", f"{ROOT}/tests/support/uneven_script.py"),
        *("--nproc_per_node", "2", "--python", sys.executable),
        *("--restarts", "1000"),
        variables={
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
            "PERSIA_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "OMP_NUM_THREADS": "1",
            "MOST_STEPS": str(most_steps),
            **variables,
        },
    )
    with job, contextlib.closing(AddressBook.join("localhost", job.port)) as book:
        yield job, book


def num_steps(folder: Path) -> int:
    """Return how many steps all trainers have counted, those repeated included."""
    path = folder / "steps"
    return path.stat().st_size if path.exists() else 0


def wait_for_steps(folder: Path, job: ForkedJob, num: int = 5) -> None:
    """Wait until the trainers have counted so many more steps."""
    least = num_steps(folder) + num
    wait_until(lambda: num_steps(folder) >= least, "it trains", details=job.output)


def end_job(folder: Path, job: ForkedJob, most_steps: int) -> list[tuple[int, ...]]:
    """Let the job end soon; return its passes, each step of which counts once."""
    begun = [int((folder / f"pass {rank}").read_text()) for rank in range(2)]
    end = max(begun) + LAST_PASSES
    (folder / "some").write_text(str(end))
    (folder / "some").rename(folder / "end")
    ended = job.wait()
    assert ended.status == 0, ended.output
    passes = [
        tuple(num_steps_of(rank, number, most_steps) for rank in range(2))
        for number in range(end)
    ]
    counts = np.load(folder / "counts.npy").reshape(2, -1)
    assert (counts == expected_trainings(passes)).all()
    dense = [np.load(folder / f"dense {rank}.npy") for rank in range(2)]
    assert (dense[0] == dense[1]).all()
    np.testing.assert_allclose(dense[0], expected_dense(passes), rtol=1e-3, atol=1e-6)
    return passes
