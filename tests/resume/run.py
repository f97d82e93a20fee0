"""Stop and resume a training with every loader: each sample is trained once a pass.

    python -m tests.resume.run [--part NAME] [--only TEXT] [--seed N]

``results.md`` gets the table of each part, unless ``--only`` chooses some of it.
"""

import argparse
import gc
import logging
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.resume import in_process, jobs

RESULTS = Path(__file__).with_name("results.md")
PARTS = "in a process", "one trainer", "two trainers"
HEADINGS = {
    PARTS[0]: "Stopped in a process",
    PARTS[1]: "Jobs of one trainer",
    PARTS[2]: "Jobs of two trainers",
}
NAMES = {
    PARTS[0]: ["loader", "order", "state", "loop", *in_process.STOPS],
    PARTS[1]: ["loader", "order", "state", "loop", "trainers", "end", "step", "result"],
}
NAMES[PARTS[2]] = NAMES[PARTS[1]]
Task = in_process.Line | jobs.Cell


def tasks_of(part: str, seed: int) -> list[Task]:
    """Return what a part of the table consists of."""
    if part == PARTS[0]:
        return [*in_process.lines(seed)]
    one = jobs.cells_of_one if part == PARTS[1] else jobs.cells_of_two
    return [*one(seed)]


def results_of(task: Task) -> list[str]:
    """Return the last columns of a line."""
    if isinstance(task, in_process.Line):
        return in_process.results_of(task)
    return [jobs.result_of(task)]


def be_quiet() -> None:
    """Set up a process that trains; Ctrl-C reaches it where a shell would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    gc.disable()  # in_process.py collects: a loader's end waits for its workers


def run(tasks: Iterable[Task]) -> list[list[str]]:
    """Run tasks in two processes; return the results of each."""
    tasks = [*tasks]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawned, initializer=be_quiet) as pool:
        results = []
        for task, found in zip(tasks, pool.map(results_of, tasks), strict=True):
            print(f"{task} {' | '.join(found)} |", flush=True)
            results.append(found)
    return results


def main() -> int:
    """Run the cells; return 1 if samples were trained twice or never."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="", choices=PARTS)
    parser.add_argument("--only", default="", help="text in the names of cells")
    parser.add_argument("--seed", type=int, default=20261128)
    args = parser.parse_args()
    every = []
    for part in [args.part] if args.part else PARTS:
        began_s = time.monotonic()
        tasks = [t for t in tasks_of(part, args.seed) if args.only in str(t)]
        results = run(tasks)
        every += [result for found in results for result in found]
        took_s = time.monotonic() - began_s
        if not args.only:
            write(part, table(part, tasks, results, args.seed, took_s))
    print(told(every))
    return any("WRONG" in result for result in every)


def told(results: list[str]) -> str:
    """Return how many cells there are of each kind."""
    num_once = sum(result == "once" for result in results)
    num_errors = sum(result.startswith("error") for result in results)
    num_wrong = len(results) - num_once - num_errors
    return (
        f"{len(results)} cells, {num_once} once, {num_errors} errors, {num_wrong} wrong"
    )


def table(
    part: str, tasks: list[Task], results: list[list[str]], seed: int, took_s: float
) -> str:
    """Return what the page says of a part, without its heading."""
    of_part = told([result for found in results for result in found])
    lines = [
        f"Seed {seed}: {of_part}, {took_s:.0f} s.",
        "",
        f"| {' | '.join(NAMES[part])} |",
        "|---" * len(NAMES[part]) + "|",
        *(
            f"{task} {' | '.join(found)} |"
            for task, found in zip(tasks, results, strict=True)
        ),
    ]
    return "\n".join(lines)


def write(part: str, text: str) -> None:
    """Replace what the page says of a part."""
    head, *parts = RESULTS.read_text().split("\n## ")
    sections = dict(one.split("\n\n", 1) for one in parts)
    sections[HEADINGS[part]] = text
    page = [f"{heading}\n\n{told.strip()}\n" for heading, told in sections.items()]
    RESULTS.write_text("\n## ".join([head, *page]))


if __name__ == "__main__":
    sys.exit(main())
