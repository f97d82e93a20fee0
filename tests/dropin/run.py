"""Programs of others with tables on the servers, and as they are: ``make dropin``.

    python -m tests.dropin.run [--checkouts FOLDER] [--steps 20] [--only dlrm]

A program that is not in FOLDER is cloned there at its pinned commit, outside of this
repository: FOLDER is a temporary one by default. Each run begins from the same weights
and must have the same losses, at staleness 0, in float32.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from persia_torchrec import EmbeddingCluster
from tests.dropin.programs import PROGRAMS, Program

ROOT = Path(__file__).parents[2]
MOST = 1e-5
"""How far a loss may be from that of the plain program."""


@dataclass(frozen=True)
class Outcome:
    """What one run gave: the loss of each step, and the tables at the end."""

    losses: list[float]
    tables: dict[str, torch.Tensor]
    metrics: list[float]  # AUROC


def fetch(program: Program, checkouts: Path) -> Path:
    """Return the program's folder; clone it if it is not there."""
    root = program.root(checkouts)
    if not root.exists():
        target = checkouts / program.repository.rpartition("/")[2]
        url = f"https://github.com/{program.repository}"
        subprocess.run(["git", "clone", "-q", "--no-checkout", url, target], check=True)
        checkout = ["git", "-C", target, "checkout", "-q", program.commit]
        subprocess.run([*checkout, "--", program.folder], check=True)
    return root


def run(folder: Path, program: Program, kind: str, arguments: list[str]) -> Outcome:
    """Run a program in a process of its own."""
    with tempfile.TemporaryDirectory() as output:
        driver = [sys.executable, "-m", "tests.dropin.driver", str(folder)]
        command = [*driver, program.main, output, kind, *arguments]
        given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **given, "LOCAL_WORLD_SIZE": "1"},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        losses, metrics = json.loads(Path(output, "losses.json").read_text())
        return Outcome(losses, torch.load(Path(output, "tables.pt")), metrics)


def compare(plain: Outcome, ours: Outcome) -> tuple[float, float, bool]:
    """Return the largest differences of losses and tables; if metrics are equal."""
    if len(plain.losses) != len(ours.losses) or not plain.losses:
        raise SystemExit(f"Steps: {len(plain.losses)} and {len(ours.losses)}.")
    pairs = zip(plain.losses, ours.losses, strict=True)
    of_losses = max(abs(a - b) for a, b in pairs)
    of_tables = max(
        float((plain.tables[key] - ours.tables[key]).abs().max())
        for key in plain.tables.keys() | ours.tables.keys()
    )
    are_equal = bool(plain.metrics) and plain.metrics == ours.metrics
    return of_losses, of_tables, are_equal


def main() -> None:
    """Run all programs; write a table; fail where losses differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=PROGRAMS)
    args = parser.parse_args()
    lines, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        checkouts = args.checkouts or Path(temporary, "checkouts")
        checkouts.mkdir(parents=True, exist_ok=True)
        for name, program in PROGRAMS.items():
            if args.only not in (None, name):
                continue
            folder = fetch(program, checkouts)
            patched = Path(temporary, name)
            shutil.copytree(folder, patched)
            source = (folder / program.main).read_text()
            (patched / program.main).write_text(program.patched(source))
            new, changed = program.num_lines()
            for title, arguments in program.runs.items():
                limits = [f"--limit_{kind}_batches=5" for kind in ("val", "test")]
                given = [*arguments, *limits, f"--limit_train_batches={args.steps}"]
                plain = run(folder, program, "plain", given)
                with EmbeddingCluster.local(2) as cluster:
                    os.environ["SERVERS"] = ",".join(cluster.addresses)
                    ours = run(patched, program, "servers", given)
                losses, tables, are_equal = compare(plain, ours)
                failed |= losses > MOST or not are_equal
                metrics = "equal" if are_equal else "differ"
                lines.append(
                    f"| {name}: {title} | {new} new, {changed} changed | "
                    f"{len(ours.losses)} | {losses:.1e} | {tables:.1e} | {metrics} |"
                )
                print(lines[-1], flush=True)
    if failed:
        raise SystemExit(f"Losses differ by more than {MOST}, or metrics do.")


if __name__ == "__main__":
    main()
