"""Does a model train as fast on the servers as with its tables in this process?

    python -m persia_torchrec.bench training --json training.json

TorchRec's DLRM trains on the same batches in plain TorchRec, whose tables are in this
process, and on server processes. All of it shares the cores of this machine: the
servers, the threads that pull and push, and torch's own. The models take turns, some
steps each, so that the same moments of the machine are compared.

The servers begin with plain TorchRec's rows. Before anything is timed, the losses of
the first steps must agree at staleness 0; in the end no gradient may have missed its
row.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from persia_torchrec.bench.machine import cores
from persia_torchrec.bench.report import Cell, Table
from persia_torchrec.bench.run_report import RunReport, exit_status_of
from persia_torchrec.bench.training_batches import draw_batches, ids_by_table
from persia_torchrec.bench.training_settings import (
    DENSE_LAYERS,
    NUM_DENSE,
    NUM_TABLES,
    OVER_LAYERS,
    ZIPF_EXPONENT,
    TrainingSettings,
)
from persia_torchrec.bench.training_turns import measure_dim

_NORMAL = TrainingSettings()
_TINY = TrainingSettings(
    dims=(4,),
    rows=(2048, 4096),
    table_rows=100,
    batch_size=32,
    batches=3,
    steps=4,
    repeats=2,
    checked_steps=3,
)
_COLUMNS = {
    "dim": "D",
    "model": "model",
    "rows": "rows on the server",
    "median": "samples/s, median",
    "slowest": "slowest",
    "fastest": "fastest",
    "relative": "of plain TorchRec's",
    "step_ms": "ms a step, median",
    "trainer_ms": "processor ms a step: trainer",
    "server_ms": "server",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the process's exit status.

    Args:
        argv: the command line, behind the benchmark's name.
    """
    arguments = _parser().parse_args(argv)
    return exit_status_of(lambda: _run(arguments, argv))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    settings = _settings(arguments)
    report = RunReport(["training", *argv])
    with _one_process_group():
        tables = measure_training(settings)
    used = f"{len(cores()) or 'all'}, shared by everything"
    report.add("training", tables, used, asdict(settings))
    report.finish(arguments.json)


def measure_training(settings: TrainingSettings) -> list[Table]:
    """Train on plain TorchRec and on servers, in turn.

    A process group must be there, of this process alone.

    Raises:
        StoreError: a model on the servers computes something else than plain TorchRec.
        ServerError: a server does not start, fails, or does not answer.
    """
    batches = draw_batches(settings)
    rows: list[dict[str, Cell]] = []
    for dim in settings.dims:
        rows += measure_dim(settings, dim, batches)
    num_unique = sum(map(len, ids_by_table(batches[:1])))
    layers = "-".join(map(str, DENSE_LAYERS))
    question = (
        f"DLRM, {NUM_DENSE} dense features, MLPs {layers}-D and "
        f"{'-'.join(map(str, OVER_LAYERS))}, batch {settings.batch_size}, {NUM_TABLES} "
        f"tables, Zipf {ZIPF_EXPONENT} over {settings.table_rows} ids each (about "
        f"{num_unique} unique a batch), rowwise Adagrad."
    )
    notes = [
        f"plain TorchRec: in this process, {settings.table_rows} rows a table, "
        "fbgemm's fused rowwise Adagrad.",
        "on the server: one server process, on the same cores. With a staleness of 2 "
        "or more, TrainPipelineSparseDist begins the lookup of a batch a step ahead.",
        f"Turns of {settings.steps} steps, {settings.repeats} of each model, to the "
        f"acknowledgement of the last update; torch with {torch.get_num_threads()} "
        "threads. processor ms: of all threads of the process.",
    ]
    return [Table("training", question, _COLUMNS, rows, notes)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.bench training",
        description="Train DLRM in plain TorchRec and on servers, in turn.",
    )
    add = parser.add_argument
    base = _NORMAL
    add("--dims", type=int, nargs="+", help=f"embedding dims {list(base.dims)}")
    rows = f"rows on the servers, all of them with the first dim {list(base.rows)}"
    add("--rows", type=int, nargs="+", help=rows)
    staleness = f"bounds; the last with more rows {list(base.staleness)}"
    add("--staleness", type=int, nargs="+", help=staleness)
    add("--table-rows", type=int, help=f"rows a table [{base.table_rows}]")
    add("--batch-size", type=int, help=f"samples a batch [{base.batch_size}]")
    add("--steps", type=int, help=f"steps timed together [{base.steps}]")
    add("--repeats", type=int, help=f"the median counts [{base.repeats}]")
    add("--json", type=Path, help="file for all figures")
    add("--tiny", action="store_true", help="small numbers, to see that it works")
    return parser


def _settings(arguments: argparse.Namespace) -> TrainingSettings:
    many = ("dims", "rows", "staleness")
    one = ("table_rows", "batch_size", "steps", "repeats")
    given = {name: getattr(arguments, name) for name in (*many, *one)}
    given = {k: tuple(v) if k in many and v else v for k, v in given.items()}
    base = _TINY if arguments.tiny else _NORMAL
    return replace(base, **{k: v for k, v in given.items() if v is not None})


@contextmanager
def _one_process_group() -> Iterator[None]:
    """Be the only trainer, as ``DistributedModelParallel`` wants to know."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not in __all__
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
