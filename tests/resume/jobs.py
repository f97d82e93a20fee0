"""A job that signals stop at a step, and that is started again."""

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from tests.resume.loaders import SPAWNED, WORK_QUEUE, Given, has_state
from tests.resume.training import LOOPS, told
from tests.support.forked_jobs import ForkedJob
from tests.support.processes import children_of, wait_until
from tests.support.repository import ROOT

NUM_SAMPLES, NUM_PASSES = 400, 2  # 200 steps of each trainer
SAVE_STEPS = 20
ENDS = "kill -9", "Ctrl-C", "SIGTERM to the job", "SIGTERM to each process"
STEPS = 1, 150
ALONE = (
    "DataLoader, 2 workers",
    SPAWNED,
    "DataLoader, persistent",
    "StatefulDataLoader, 2 workers",
    "ParquetDataset",
    "DataLoader, 2 workers, of ParquetDataset",
)
TOGETHER = (
    *ALONE,
    WORK_QUEUE,
    "torchdata.nodes",
    "DataLoader",
    "batches of a class",
)


@dataclass(frozen=True)
class Cell:
    """A job, and how it is stopped.

    Attributes:
        stop: the step at which signals come; 0: it is not stopped.
    """

    loader: str
    is_shuffled: bool
    in_state: bool
    loop: str
    num_trainers: int
    end: str
    stop: int
    seed: int

    def __str__(self) -> str:
        order = "shuffled" if self.is_shuffled else "in order"
        where = "in state" if self.in_state else "not"
        how = f"{self.loader} | {order} | {where} | {self.loop}"
        return f"| {how} | {self.num_trainers} | {self.end} | {self.stop} |"


def cells_of_one(seed: int) -> list[Cell]:
    """Return the jobs of one trainer: each loader, loop, end and step."""
    kinds = itertools.product(ALONE, LOOPS, ENDS, STEPS)
    found = []
    for number, (loader, loop, end, stop) in enumerate(kinds):
        given = number % 3 == 0, has_state(loader), loop, 1, end, stop
        found.append(Cell(loader, *given, seed))
    return found


def cells_of_two(seed: int, num: int = 40) -> list[Cell]:
    """Return jobs of two trainers that have each pair of values, as far as exist."""
    values = TOGETHER, (False, True), (False, True), LOOPS, ENDS, STEPS
    every = [
        cell
        for cell in itertools.product(*values)
        if (has_state(cell[0]) or not cell[2]) and (cell[0] != WORK_QUEUE or cell[2])
    ]
    draw = random.Random(seed)
    draw.shuffle(every)
    left = {pair for cell in every for pair in _pairs(cell)}
    chosen: list[tuple] = []
    while left:
        best = max(every, key=lambda cell: len(left.intersection(_pairs(cell))))
        chosen.append(best)
        left.difference_update(_pairs(best))
    assert len(chosen) <= num
    chosen += [cell for cell in every if cell not in chosen][: num - len(chosen)]
    return [
        Cell(loader, shuffled, in_state, loop, 2, end, stop, seed)
        for loader, shuffled, in_state, loop, end, stop in sorted(chosen)
    ]


def _pairs(values: Iterable[object]) -> set[tuple]:
    return set(itertools.combinations(enumerate(values), 2))


def result_of(cell: Cell) -> str:
    """Stop a job and start it again; return what became of its samples."""
    if cell.num_trainers == 1 and cell.loop == "plain":
        whole = _whole(replace(cell, end="", stop=0))
    else:
        whole = None
    try:
        with tempfile.TemporaryDirectory() as path:
            return _stopped_and_resumed(Path(path), cell, whole)
    except AssertionError as exc:  # a wait that was too long, with the job's output
        sys.stderr.write(f"{cell}\n{exc}\n")
        return "WRONG: it did not end"


def _stopped_and_resumed(folder: Path, cell: Cell, whole: np.ndarray | None) -> str:
    _start(folder, cell, stops=True)
    if (folder / "counts.npy").exists():
        return "WRONG: it was not stopped"
    found, weights = _start(folder, cell, stops=False)
    is_same = whole is None or weights is None or (weights == whole).all()
    return found if is_same else f"WRONG: {found}, other weights"


@cache
def _whole(cell: Cell) -> np.ndarray:
    """Return the weights of a job that is not stopped."""
    with tempfile.TemporaryDirectory() as path:
        found, weights = _start(Path(path), cell, stops=False)
    assert found == "once", found
    assert weights is not None
    return weights


def _start(folder: Path, cell: Cell, *, stops: bool) -> tuple[str, np.ndarray | None]:
    """Start a job, and wait for its end."""
    # But for a queue, loops are not in ``join``: trainers get as many batches each.
    row_group_size = 23 if cell.num_trainers == 1 else 20
    given = Given(folder, NUM_SAMPLES, False, 1, 0, cell.num_trainers)
    given.write_rows(row_group_size)
    with _job(folder, cell, stops=stops) as job:
        if stops:
            path = folder / "steps 0"
            wait_until(
                lambda: path.exists() and path.stat().st_size >= cell.stop,
                "it trains",
                details=job.output,
            )
            _stop(job, cell)
        ended = job.wait()
    if stops:
        return "", None
    if ended.status:
        if "must get the batches of its pass again" in ended.output:
            return "error: other batches", None
        sys.stderr.write(f"{cell}\n{ended.output}")
        return f"WRONG: it ended with {ended.status}", None
    counts = np.load(folder / "counts.npy")
    if cell.loader != WORK_QUEUE:
        return told(counts), np.load(folder / "weights.npy")
    num_samples = NUM_SAMPLES * cell.num_trainers
    return told(counts[:num_samples], NUM_PASSES), None


@contextlib.contextmanager
def _job(folder: Path, cell: Cell, *, stops: bool) -> Iterator[ForkedJob]:
    given = asdict(cell) | {"num_samples": NUM_SAMPLES, "num_passes": NUM_PASSES}
    given |= {"save_steps": SAVE_STEPS, "stop": cell.stop if stops else 0}
    job = ForkedJob(
        folder,
        *("train_torchrec", "--servers", "1"),
        *("--script", f"{ROOT}/tests/resume/job_script.py"),
        *("--trainers", str(cell.num_trainers), "--python", sys.executable),
        *("--run_dir", str(folder / "run"), "--grace_s", "30"),
        variables={
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CELL": json.dumps(given),
        },
    )
    with job:
        yield job


def _stop(job: ForkedJob, cell: Cell) -> None:
    trainers = [f"trainer {rank}" for rank in range(cell.num_trainers)]
    members = [*map(job.pid, [*trainers, "server 0", "coordinator 0"])]
    draw = random.Random(str(cell))
    if cell.end == "kill -9":
        os.kill(job.pid(draw.choice(trainers)), signal.SIGKILL)
        return
    pids = members
    if cell.end != "SIGTERM to the job":  # that its roles get, and not their workers
        pids = [one for member in members for one in _tree_of(member)]
    draw.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT if cell.end == "Ctrl-C" else signal.SIGTERM)


def _tree_of(pid: int) -> list[int]:
    return [pid, *(one for child in children_of(pid) for one in _tree_of(child))]
