"""What does half of the bytes on the wire cost in quality?

    python -m persia_torchrec.bench precision --json precision.json

A small model with a planted signal trains against a server over loopback: a sample has
an id of each feature, each id a hidden effect, and the label is drawn by the sum of the
effects. The model gets embeddings of the ids, and the same batches whatever precision
rows and gradients travel in; its test AUC is what tells precisions apart. Rounding that
the wire does not have is done here instead, and travels in float32.

Beside it: how long a conversion takes, on one core, of ours and of torch and fbgemm.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from persia_torchrec.bench.machine import cores, pinned
from persia_torchrec.bench.precision_arms import ARMS
from persia_torchrec.bench.precision_speed import measure_conversions
from persia_torchrec.bench.precision_training import PrecisionSettings, train_arm
from persia_torchrec.bench.report import Cell, Table
from persia_torchrec.bench.run_report import RunReport, exit_status_of
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.server.cluster import EmbeddingCluster

_NORMAL = PrecisionSettings()
_TINY = PrecisionSettings(
    dim=8, num_ids=200, batch_size=64, steps=3, test_batches=2, seeds=(1,), floats=4096
)
_COLUMNS = {
    "name": "rows and gradients",
    "auc": "test AUC, mean",
    "lowest": "lowest",
    "highest": "highest",
    "auc_lost": "AUC lost, mean",
    "loss": "last tenth's loss",
    "bytes": "bytes a row, both ways",
    "bytes_saved": "saved",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the process's exit status.

    Args:
        argv: the command line, behind the benchmark's name.
    """
    arguments = _parser().parse_args(argv)
    return exit_status_of(lambda: _run(arguments, argv))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    names = ("dim", "steps")
    given = {name: getattr(arguments, name) for name in names}
    given["seeds"] = tuple(arguments.seeds) if arguments.seeds else None
    base = _TINY if arguments.tiny else _NORMAL
    settings = replace(base, **{k: v for k, v in given.items() if v is not None})
    report = RunReport(["precision", *argv])
    tables = [measure_quality(settings)]
    allowed = cores()
    with pinned(allowed[-1] if allowed else None):
        tables.append(measure_conversions(settings.floats))
    used = f"{len(allowed) or 'all'} for the training, 1 for the conversions"
    report.add("precision", tables, used, asdict(settings))
    report.finish(arguments.json)


def measure_quality(settings: PrecisionSettings) -> Table:
    """Train with every precision and seed.

    Raises:
        ServerError: the server does not start, or fails.
        StoreError: a precision takes other bytes than it should.
    """
    capacity = settings.num_ids * settings.num_features
    outcomes = {}
    with EmbeddingCluster.local(num_servers=1, capacity=capacity) as cluster:
        client = EmbeddingClient.connect(cluster.addresses)
        for arm in ARMS:
            outcomes[arm.name] = [
                train_arm(client, arm, settings, seed) for seed in settings.seeds
            ]
        client.close()
    exact = outcomes[ARMS[0].name]
    rows: list[dict[str, Cell]] = []
    for name, runs in outcomes.items():
        aucs = [run.auc for run in runs]
        lost = [one.auc - run.auc for one, run in zip(exact, runs, strict=True)]
        rows.append(
            {
                "name": name,
                "auc": f"{_mean(aucs):.5f}",
                "lowest": f"{min(aucs):.5f}",
                "highest": f"{max(aucs):.5f}",
                "auc_lost": f"{_mean(lost):+.5f}",
                "loss": f"{_mean([run.loss for run in runs]):.5f}",
                "bytes": _mean([run.bytes_a_row for run in runs]),
                "bytes_saved": 1 - runs[0].bytes_a_row / exact[0].bytes_a_row,
            }
        )
    question = (
        f"{settings.num_features} features of {settings.num_ids} ids, Zipf, D = "
        f"{settings.dim}, rowwise Adagrad; {settings.steps} batches of "
        f"{settings.batch_size}, tested on {settings.test_batches} more; "
        f"{len(settings.seeds)} seeds, the same batches for all."
    )
    notes = [
        "bytes a row: of lookup and update together, ids included. Measured, but for "
        "what is rounded here.",
        "fp16: halves at the scale of their frame, as the wire has it. AUC lost: "
        "against fp32, seed by seed; below zero, it was better.",
        *(f"{arm.name}: {arm.note}" for arm in ARMS if arm.note),
    ]
    return Table("quality", question, _COLUMNS, rows, notes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.bench precision",
        description="Train in float32, float16 and bfloat16 on the wire.",
    )
    add = parser.add_argument
    add("--dim", type=int, help=f"embedding dim [{_NORMAL.dim}]")
    add("--steps", type=int, help=f"training batches [{_NORMAL.steps}]")
    add("--seeds", type=int, nargs="+", help=f"of the batches {list(_NORMAL.seeds)}")
    add("--json", type=Path, help="file for all figures")
    add("--tiny", action="store_true", help="small numbers, to see that it works")
    return parser
