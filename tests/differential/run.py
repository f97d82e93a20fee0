"""Random models on servers against plain TorchRec, or against formulas.

    python -m tests.differential.run [--models N] [--seed N] [--plant gradient]

Model ``n`` has the seed ``--seed + n``. ``results.md`` gets the table of a whole run.
"""

import argparse
import collections
import logging
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.differential.drawing import HALVES, PLANTS, Drawn, draw
from tests.differential.training import (
    Outcome,
    train_by_formulas,
    train_in_plain,
    train_on_servers,
)
from tests.support.remote_job import Servers

RESULTS = Path(__file__).with_name("results.md")
MOST = 1e-5
"""How far numbers may be apart, in units of the largest of them."""
LEAST_SCALE, LEAST_OF_STATE = 0.1, 1e-3
"""That unit at least; weights begin at about 0.1 or more."""
MOST_OF_HALVES = {"FP16": 1e-3, "BF16": 1e-2}
"""The same of models with tables in 16 bits: one unit in the last place."""
NUM_MODELS, SEED = 300, 20261128
LIMIT_S = 120.0
COLUMNS = """\
| models with | plain | formulas | largest difference | of models with 16 bits |
|---|---|---|---|---|
"""
NUM_JOBS = 2


@dataclass(frozen=True)
class Result:
    """How far a model is apart, and in what."""

    drawn: Drawn
    apart: float
    where: str
    error: str = ""

    @property
    def is_equal(self) -> bool:
        most = max([MOST_OF_HALVES.get(d, MOST) for d in self.drawn.dtypes])
        return not self.error and self.apart <= most

    def __str__(self) -> str:
        said = self.error or f"{self.apart:.1e} {self.where}"
        return f"{self.drawn.seed}: {said} ({self.drawn})"


def compare(ours: Iterable[Outcome], expected: Iterable[Outcome]) -> tuple[float, str]:
    """Return the largest difference of what has one name, and that name."""
    mine, theirs = _merged(ours), _merged(expected)
    return max((_apart(mine.get(n), theirs.get(n), n), n) for n in mine | theirs)


def _merged(outcomes: Iterable[Outcome]) -> dict[str, np.ndarray]:
    merged: dict[str, np.ndarray] = {}
    for outcome in outcomes:
        merged = outcome.numbers | merged
    return merged


def _apart(mine: np.ndarray | None, theirs: np.ndarray | None, name: str) -> float:
    if mine is None or theirs is None:
        return float("inf")
    if mine.shape != theirs.shape or not np.isfinite(mine).all():
        return float("inf")
    least = LEAST_OF_STATE if ":" in name else LEAST_SCALE
    scale = np.abs(theirs).max(initial=least)
    return float(np.abs(mine - theirs).max(initial=0.0) / scale)


def train(drawn: Drawn, rank: int, addresses: list[str]) -> tuple[Outcome, Outcome]:
    """Be a trainer of a model, in a process group; return what was learnt, twice."""
    start: dict[str, np.ndarray] = {}
    ours = train_on_servers(drawn, rank, addresses, start)
    if drawn.runs_in_plain:
        return ours, train_in_plain(drawn, rank, start)
    return ours, Outcome() if rank else train_by_formulas(drawn, start)


def run_alone(drawn: Drawn) -> Result:
    """Train a model of one trainer in this process, which has a process group."""
    with Servers(drawn.num_servers) as servers:
        ours, expected = train(drawn, 0, servers.addresses)
    return Result(drawn, *compare([ours], [expected]))


def _be_trainer(drawn: Drawn, rank: int, store: str, results: Connection) -> None:
    """Be a process of a job; the first trainer's has the servers."""
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            size, limit = len(drawn.num_steps), timedelta(seconds=LIMIT_S)
            file = dist.FileStore(store, size)
            dist.init_process_group(
                "gloo", rank=rank, world_size=size, store=file, timeout=limit
            )
            addresses: list[Any] = [None]
            if rank == 0:
                servers = stack.enter_context(Servers(drawn.num_servers))
                addresses = [servers.addresses]
            dist.broadcast_object_list(addresses)
            outcomes = train(drawn, rank, addresses[0])
            dist.barrier()
            results.send([outcome.numbers for outcome in outcomes])
            dist.destroy_process_group()
    except Exception:  # noqa: BLE001  the parent reports it
        results.send(traceback.format_exc())


class Job:
    """The processes of one model."""

    def __init__(self, drawn: Drawn, folder: str) -> None:
        self.drawn = drawn
        self._deadline_s = time.monotonic() + LIMIT_S
        context = multiprocessing.get_context("fork")
        store = f"{folder}/{drawn.seed}"
        self._processes, self._results = [], []
        for rank in range(len(drawn.num_steps)):
            mine, other = context.Pipe(duplex=False)
            given = drawn, rank, store, other
            self._processes.append(context.Process(target=_be_trainer, args=given))
            self._processes[-1].start()
            other.close()
            self._results.append(mine)
        self.waits = list(self._results)
        self._received: dict[Connection, Any] = {}

    def take(self, connection: Connection) -> None:
        """Take what a trainer sent."""
        try:
            self._received[connection] = connection.recv()
        except EOFError:
            self._received[connection] = "a trainer ended"
        self.waits.remove(connection)

    def result(self) -> Result | None:
        """Return the result, when all are at their end, or one failed."""
        values = list(self._received.values())
        errors = [value for value in values if isinstance(value, str)]
        if time.monotonic() > self._deadline_s:
            errors.append("not within its time")
        if not errors and self.waits:
            return None
        for process in self._processes:
            if errors:
                process.kill()
            process.join()
        if errors:
            return Result(self.drawn, 0.0, "", errors[0].strip()[-3000:])
        both = [[Outcome(numbers) for numbers in value] for value in values]
        ours, expected = zip(*both, strict=True)
        return Result(self.drawn, *compare(ours, expected))


def run_all(models: list[Drawn]) -> Iterable[Result]:
    """Yield the results of models, some of which run at once."""
    waiting, running = collections.deque(models), []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < NUM_JOBS:
                running.append(Job(waiting.popleft(), folder))
            waits = {c: job for job in running for c in job.waits}
            for connection in multiprocessing.connection.wait(
                [*waits], timeout=LIMIT_S
            ):
                waits[connection].take(connection)
            for job in list(running):
                if (result := job.result()) is not None:
                    running.remove(job)
                    yield result


def write(results: list[Result], seed: int, took_s: float) -> None:
    """Write the table behind the head of the page."""
    head = RESULTS.read_text().partition("The last run:")[0]
    by_kind: dict[str, list[Result]] = {}
    for result in results:
        for kind in result.drawn.kinds:
            by_kind.setdefault(kind, []).append(result)
    num_plain = sum(result.drawn.runs_in_plain for result in results)
    num_apart = sum(not result.is_equal for result in results)
    told = (
        f"The last run: {len(results)} models from seed {seed} on, {took_s:.0f} s, "
        f"{num_plain} against plain TorchRec and {len(results) - num_plain} against "
        f"formulas, {num_apart} apart.\n\n"
        f"{COLUMNS}"
    )
    RESULTS.write_text(head + told + "".join(map(_row, sorted(by_kind.items()))))


def _row(of_kind: tuple[str, list[Result]]) -> str:
    kind, results = of_kind
    num_plain = sum(result.drawn.runs_in_plain for result in results)
    row = [kind, str(num_plain), str(len(results) - num_plain)]
    for has_halves in (False, True):
        given = [r for r in results if has_halves == bool({*HALVES} & r.drawn.dtypes)]
        row.append(f"{max(r.apart for r in given):.1e}" if given else "")
    return f"| {' | '.join(row)} |\n"


def main() -> int:
    """Run models; return 1 if some are apart, or a planted fault is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=NUM_MODELS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--plant", choices=PLANTS, help="a fault in each model")
    args = parser.parse_args()
    import tests.support.preloaded  # noqa: F401  loads compiled loops

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    seeds = range(args.seed, args.seed + args.models)
    began_s, results, num_wrong = time.monotonic(), [], 0
    for result in run_all([draw(seed, plant=args.plant) for seed in seeds]):
        results.append(result)
        is_right = not result.error and result.is_equal != bool(args.plant)
        num_wrong += not is_right
        print("as expected" if is_right else "WRONG", result, flush=True)
    took_s = time.monotonic() - began_s
    found = "faults found" if args.plant else "models equal"
    print(f"{len(results) - num_wrong} of {len(results)} {found}, {took_s:.0f} s")
    if args.models >= NUM_MODELS and not args.plant:
        write(results, args.seed, took_s)
    return num_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
