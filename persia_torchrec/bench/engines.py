"""Which engine updates rows faster: the fused loop, or fbgemm's kernels?

    python -m persia_torchrec.bench engines --json engine_measurements.json

Two stores with the same rows, one an engine, get the same requests in turn: ids drawn
uniformly and without repeats, hints from their lookup, all gradients finite. Timed is
the whole update, with fbgemm also the copies to and from its table. That the rows are
equal at the end is checked. The file is what ``optimizer_engine="auto"`` goes by, once
it has been put beside ``store/engine_choice.py``.

Dimension key:
    N: ids of one request
    D: embedding dim
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np

from persia_torchrec.bench.machine import (
    OtherWork,
    cores,
    describe_machine,
    describe_versions,
    pinned,
)
from persia_torchrec.bench.run_report import exit_status_of
from persia_torchrec.bench.workload import ids_of, weights_of
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.engine_choice import Measured, kernel_name
from persia_torchrec.table import TableSpec, WeightDtype

_OPTIMIZERS = (SGD(0.05), Adagrad(0.05), Adagrad(0.05, vectorwise_shared=True))
_FILL = 65_536
_SEED = 20_234
_TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""For 16-bit weights a step or two of theirs: sums in another order may be rounded to
the other side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What to measure.

    Raises:
        ConfigError: a setting is out of its range.
    """

    dims: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Embedding dims, multiples of 4."""

    rows: int = 200_000
    """Rows a store."""

    ids: int = 20_480
    """Unique ids a request, at most ``rows``."""

    repeats: int = 15
    """Updates timed by each engine, in turn; the median counts."""

    def __post_init__(self) -> None:
        for name, least in (("ids", 1), ("rows", self.ids), ("repeats", 1)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise ConfigError(f"{name} must be >= {least}. Received: {value}.")
        if not self.dims or any(dim < 4 or dim % 4 for dim in self.dims):
            raise ConfigError(
                f"dims must be positive multiples of 4. Received: {self.dims}."
            )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the process's exit status.

    Args:
        argv: the command line, behind the benchmark's name.
    """
    arguments = _parser().parse_args(argv)
    return exit_status_of(lambda: _run(arguments, argv))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    base = {"ids": 64, "rows": 256, "repeats": 2} if arguments.tiny else {}
    names = ("rows", "ids", "repeats")
    given = {name: getattr(arguments, name) for name in names}
    given["dims"] = tuple(arguments.dims) if arguments.dims else None
    given = {name: value for name, value in given.items() if value is not None}
    other_work = OtherWork()
    settings = EngineSettings(**{**base, **given})
    allowed = cores()
    with pinned(allowed[-1] if allowed else None):
        measured = measure_engines(settings)
    _report(settings, measured, other_work, argv, arguments.json)


def measure_engines(settings: EngineSettings) -> list[Measured]:
    """Measure both engines with each optimizer, weight dtype and dim.

    Raises:
        ConfigError: fbgemm is not installed.
        StoreError: the engines' rows differ.
    """
    return [
        _measure(
            TableSpec(name="t", dim=dim, optimizer=optimizer, weight_dtype=dtype),
            settings,
        )
        for optimizer in _OPTIMIZERS
        for dtype in get_args(WeightDtype)
        for dim in settings.dims
    ]


def _measure(spec: TableSpec, settings: EngineSettings) -> Measured:
    stores = {
        "fused": EmbeddingStore(settings.rows, optimizer_engine="fused"),
        "fbgemm": EmbeddingStore(settings.rows, optimizer_engine="fbgemm"),
    }
    for store in stores.values():
        store.add_table(spec)
        for start in range(0, settings.rows, _FILL):
            ids = ids_of(np.arange(start, min(start + _FILL, settings.rows)))
            store.write(0, ids, weights_of(ids, spec.dim))
    rng = np.random.default_rng(_SEED)
    seconds: dict[str, list[float]] = {name: [] for name in stores}
    for _ in range(settings.repeats + 1):
        numbers_N = rng.choice(settings.rows, settings.ids, replace=False)
        ids_N = ids_of(numbers_N)
        grads_ND = rng.standard_normal((settings.ids, spec.dim), dtype=np.float32)
        for name, store in stores.items():
            out_ND = np.empty_like(grads_ND)
            hints_N = store.lookup(0, ids_N, out_ND, training=True)
            begin = time.process_time()
            store.update(0, ids_N, grads_ND, hints_N)
            seconds[name].append(time.process_time() - begin)
    require_equal_rows(spec, stores, settings.rows)
    # The first update touches new memory, and may compile.
    ns = {n: median(s[1:]) / settings.ids * 1e9 for n, s in seconds.items()}
    name = kernel_name(spec.optimizer)
    return Measured(name, spec.weight_dtype, spec.dim, ns["fused"], ns["fbgemm"])


def require_equal_rows(
    spec: TableSpec, stores: dict[str, EmbeddingStore], num_rows: int
) -> None:
    """Compare weights and state of the first ids of both stores.

    Args:
        spec: their table.
        stores: by engine.
        num_rows: how many rows they have.

    Raises:
        StoreError: they differ.
    """
    ids = ids_of(np.arange(min(num_rows, _FILL)))
    tolerance = _TOLERANCES[spec.weight_dtype]
    rows = {name: store.read(0, ids) for name, store in stores.items()}
    is_equal = np.isclose(rows["fused"], rows["fbgemm"], rtol=tolerance, atol=tolerance)
    differ = ~is_equal.all(axis=1)
    if differ.any():
        raise StoreError(
            "Both engines must leave the same rows. Received: other rows for "
            f"{differ.sum()} of {len(ids)} ids, with {spec}."
        )


def _fbgemm_version() -> str:
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "unknown"  # built here, without a package


def _parser() -> argparse.ArgumentParser:
    normal = EngineSettings()
    parser = argparse.ArgumentParser(
        prog="python -m persia_torchrec.bench engines",
        description="Measure updates by the fused loop and by fbgemm's kernels.",
    )
    add = parser.add_argument
    add("--dims", type=int, nargs="+", help=f"embedding dims {list(normal.dims)}")
    add("--rows", type=int, help=f"rows a store [{normal.rows}]")
    add("--ids", type=int, help=f"unique ids a request [{normal.ids}]")
    add("--repeats", type=int, help=f"the median counts [{normal.repeats}]")
    add("--json", type=Path, help="file for all figures")
    add("--tiny", action="store_true", help="small numbers, to see that it works")
    return parser


def _report(
    settings: EngineSettings,
    measured: list[Measured],
    other_work: OtherWork,
    argv: Sequence[str],
    json_file: Path | None,
) -> None:
    report = {
        "command": shlex.join(
            ["python", "-m", "persia_torchrec.bench", "engines", *argv]
        ),
        "machine": describe_machine(),
        "cores_used_by_others": other_work.cores_used(),
        "versions": {**describe_versions(), "fbgemm": _fbgemm_version()},
        "settings": asdict(settings),
        "measured": [asdict(m) for m in measured],
    }
    lines = [
        "Nanoseconds of processor time a row of an update, medians of "
        f"{settings.repeats}, on one core: "
        f"{settings.rows} rows, {settings.ids} ids a request.",
        "",
        "| optimizer | weights | D | fused | fbgemm |",
        "|---|---|---|---|---|",
        *(
            f"| {m.optimizer} | {m.weight_dtype} | {m.dim} | {m.fused_ns:.0f} "
            f"| {m.fbgemm_ns:.0f} |"
            for m in measured
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
