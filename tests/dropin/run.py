"""Programs of others with tables on the servers, and as they are: ``make dropin``.

    python -m tests.dropin.run [--checkouts FOLDER] [--steps 20] [--only dlrm ...]
        [--cache ROWS]

A program that is not in FOLDER is cloned there at its pinned commit, outside of this
repository: FOLDER is a temporary one by default. Each run begins from the same weights
and must have the same losses, at staleness 0, in float32. A program with checkpoints of
its own then continues from them crosswise: the plain one from those of the servers, and
the one with servers, fresh ones, from those of the plain one. With ``--cache`` programs
that call ``remote_sharders`` cache as many rows.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from persia_torchrec import EmbeddingCluster
from tests.dropin.driver import CACHED_ROWS
from tests.dropin.programs import PROGRAMS, Program

ROOT = Path(__file__).parents[2]
MOST = 1e-5
"""How far a loss may be from that of the plain program."""
KINDS = ("plain", "servers")
OWN_TESTS = "torchrec"
TORCHREC = "a48cef79ebc333da92af1311c04b041ee21a8e75"
"""A commit of TorchRec that has the tests which its package lacks."""


@dataclass(frozen=True)
class Outcome:
    """What one run gave: the loss of each step, the tables at the end, metrics."""

    losses: list[float]
    tables: dict[str, torch.Tensor]
    metrics: list[tuple[str, float]]
    checkpoint: Path


def fetch(program: Program, checkouts: Path) -> Path:
    """Return the program's folder; clone, build and get packages if it is not there."""
    root = program.root(checkouts)
    if not root.exists():
        _clone(
            program.repository, program.commit, program.folder, program.top(checkouts)
        )
    packages = _packages(program, checkouts)
    if program.packages and not packages.exists():
        install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps"]
        made = packages.with_suffix(".part")
        subprocess.run([*install, "--target", made, *program.packages], check=True)
        made.rename(packages)
    if program.build:
        matches = [sorted(root.glob(arg)) for arg in program.build]
        command = [
            str(text)
            for argument, found in zip(program.build, matches, strict=True)
            for text in ([f.relative_to(root) for f in found] or [argument])
        ]
        environment = {**os.environ, "PYTHONPATH": str(packages)}
        given = [sys.executable, *command]
        subprocess.run(given, cwd=root, env=environment, check=True)
    return root


def _clone(repository: str, commit: str, folder: str, target: Path) -> None:
    url = f"https://github.com/{repository}"
    subprocess.run(["git", "clone", "-q", "--no-checkout", url, target], check=True)
    checkout = ["git", "-C", target, "checkout", "-q", commit, "--", folder]
    subprocess.run(checkout, check=True)


def _run_own_tests(checkouts: Path) -> bool:
    """Run TorchRec's own tests; return whether all ended as is known."""
    if not (checkouts / "torchrec").exists():
        _clone("pytorch/torchrec", TORCHREC, "torchrec", checkouts / "torchrec")
    given = {**os.environ, "TORCHREC": str(checkouts / "torchrec")}
    command = [sys.executable, "-m", "tests.dropin.own_tests"]
    return not subprocess.run(command, cwd=ROOT, env=given, check=False).returncode


def _packages(program: Program, checkouts: Path) -> Path:
    return checkouts / f"packages-{program.driver}"


@dataclass(frozen=True)
class Runner:
    """Runs a program in processes of their own, plain and patched."""

    program: Program
    folders: dict[str, Path]
    packages: Path
    output: Path

    def run(
        self, kind: str, arguments: list[str], steps: int, loaded: Path | None = None
    ) -> Outcome:
        """Run it once, with servers that begin without rows."""
        output = Path(tempfile.mkdtemp(dir=self.output))
        with EmbeddingCluster.local(2) as cluster:
            os.environ["SERVERS"] = ",".join(cluster.addresses)
            self._run(kind, output, [str(steps), str(loaded or ""), *arguments])
        losses, metrics = json.loads((output / "losses.json").read_text())
        tables = torch.load(output / "tables.pt")
        return Outcome(losses, tables, metrics, output / "checkpoint")

    def _run(self, kind: str, output: Path, rest: list[str]) -> None:
        driver = [sys.executable, "-m", "tests.dropin.driver", self.program.driver]
        command = [*driver, str(self.folders[kind]), str(output), kind, *rest]
        given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        given |= {"LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(self.packages)}
        with (output / "log").open("w") as log:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **given},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=1800,
                check=False,
            )
        if done.returncode:
            said = (output / "log").read_text()[-3000:]
            raise SystemExit(f"{' '.join(command)}\n{said}")


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart: by the largest difference of each kind.

    Metrics are compared as numbers of 6 digits.
    """

    num_steps: int
    losses: float
    tables: float
    num_metrics: int
    metrics: dict[str, float]  # those that are not equal

    @classmethod
    def of(cls, plain: Outcome, ours: Outcome) -> "Difference":
        """Compare two runs."""
        if len(plain.losses) != len(ours.losses) or not plain.losses:
            raise SystemExit(f"Steps: {len(plain.losses)} and {len(ours.losses)}.")
        names = [name for name, _ in plain.metrics]
        if names != [name for name, _ in ours.metrics]:
            raise SystemExit(f"Metrics: {plain.metrics} and {ours.metrics}.")
        pairs = zip(plain.metrics, ours.metrics, strict=True)
        apart = {name: abs(a - b) for (name, a), (_, b) in pairs if a != b}
        of_tables = max(
            float((plain.tables[key] - ours.tables[key]).abs().max())
            for key in plain.tables.keys() | ours.tables.keys()
        )
        return cls(
            len(ours.losses),
            float((torch.tensor(plain.losses) - torch.tensor(ours.losses)).abs().max()),
            of_tables,
            len(names),
            apart,
        )

    def is_within(self, most: float, most_of_metrics: float) -> bool:
        """Return whether losses are, and metrics, in half precision by the same bar."""
        of_metrics = max(self.metrics.values(), default=0.0)
        bar = most_of_metrics if most == MOST else most
        return self.losses <= most and of_metrics <= bar

    def __str__(self) -> str:
        apart = ", ".join(f"{name} {by:.0e}" for name, by in self.metrics.items())
        metrics = f"{self.num_metrics} {apart + ' apart' if apart else 'equal'}"
        metrics = metrics if self.num_metrics else ""
        return f"{self.num_steps} | {self.losses:.1e} | {self.tables:.1e} | {metrics}"


def compare(
    runner: Runner, title: str, arguments: list[str], steps: int
) -> Iterator[tuple[str, Difference]]:
    """Yield how far the kinds are apart; then continued from the other's checkpoint."""
    plain, ours = (runner.run(kind, arguments, steps) for kind in KINDS)
    yield title, Difference.of(plain, ours)
    if runner.program.saves_checkpoints:
        continued = (
            runner.run(kind, arguments, steps, other.checkpoint)
            for kind, other in zip(KINDS, (ours, plain), strict=True)
        )
        yield f"{title}, from the other's checkpoint", Difference.of(*continued)


def _patched(program: Program, folder: Path, target: Path) -> Path:
    """Return a copy of a program with its servers plugged in."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".git"))
    source = (folder / program.patched_file).read_text()
    (target / program.patched_file).write_text(program.patched(source))
    return target


def _run_program(
    name: str, checkouts: Path, temporary: Path, args: argparse.Namespace
) -> bool:
    """Write the rows of a program; return whether all are within their bars."""
    program, is_within = PROGRAMS[name], True
    folder = fetch(program, checkouts)
    copy = _patched(program, folder, temporary / name)
    folders = dict(zip(KINDS, (folder, copy), strict=True))
    runner = Runner(program, folders, _packages(program, checkouts), temporary)
    new, changed = program.num_lines()
    for title, arguments in program.runs.items():
        if args.runs and title not in args.runs:
            continue
        for row, difference in compare(runner, title, arguments, args.steps):
            most = program.most.get(title, MOST)
            is_within &= difference.is_within(most, program.most_of_metrics)
            lines = f"{new} new, {changed} changed"
            print(f"| {name}: {row} | {lines} | {difference} |", flush=True)
    return is_within


def main() -> None:
    """Run all programs; write a table; fail where losses differ."""
    every = [*PROGRAMS, OWN_TESTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=every, nargs="*", default=every)
    parser.add_argument("--cache", type=int, default=0, help="rows that are cached")
    parser.add_argument("--runs", nargs="*", help="titles; by default all")
    args = parser.parse_args()
    os.environ[CACHED_ROWS] = str(args.cache)
    with tempfile.TemporaryDirectory() as temporary:
        checkouts = (args.checkouts or Path(temporary, "checkouts")).resolve()
        checkouts.mkdir(parents=True, exist_ok=True)
        good = [
            _run_own_tests(checkouts)
            if name == OWN_TESTS
            else _run_program(name, checkouts, Path(temporary), args)
            for name in args.only
        ]
    if not all(good):
        raise SystemExit("Losses or metrics differ by more than their bars, or a test.")


if __name__ == "__main__":
    main()
