"""Which engine updates rows faster: the fused loop, or fbgemm's kernels?

Two stores with the same rows get the same uniform requests in turn. Timed is the whole
update, with fbgemm also the copies to and from its table.
"""

import time
from dataclasses import dataclass, replace
from typing import Annotated, get_args

import numpy as np

from benchmarks import harness, reference
from benchmarks.harness import Benchmark, Settings, Table, Timings
from benchmarks.reference import chunks, ids_of
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec, WeightDtype

# Of 16-bit weights a step or two: sums in another order round differently.
_TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """What to measure."""

    dims: Annotated[tuple[int, ...], "multiples of 4"] = (4, 8, 16, 32, 64, 128)
    rows: Annotated[int, "rows per store"] = 200_000
    ids: Annotated[int, "unique ids per request"] = 20_480
    repeats: Annotated[int, "updates by each engine; the median counts"] = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("dims", all(d % 4 == 0 for d in self.dims), "multiples of 4")
        self.require("rows", self.rows >= self.ids, f">= {self.ids}")


def measure(settings: EngineSettings) -> list[Table]:
    """Measure both engines with each optimizer, weight dtype and dim."""
    measured = [
        _measure(
            settings, replace(reference.table_of(dim, optimizer), weight_dtype=dtype)
        )
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad")
        for dtype in get_args(WeightDtype)
        for dim in settings.dims
    ]
    question = "Nanoseconds of processor time per row of an update, medians, one core."
    header = "optimizer | weight_dtype | dim | fused_ns | fbgemm_ns"
    return [Table("engines", question, header, measured)]


def _measure(settings: EngineSettings, spec: TableSpec) -> list[object]:
    fused = EmbeddingStore(settings.rows, optimizer_engine="compiled")
    fbgemm = EmbeddingStore(settings.rows, optimizer_engine="fbgemm")
    stores, rng = {"fused": fused, "fbgemm": fbgemm}, np.random.default_rng(20_234)
    for store in stores.values():
        store.add_table(spec)
        for numbers in chunks(settings.rows):
            store.write(
                0, ids_of(numbers), reference.weights_of(ids_of(numbers), spec.dim)
            )

    def turn(timings: Timings) -> None:
        ids = ids_of(rng.choice(settings.rows, settings.ids, replace=False))
        grads = rng.standard_normal((settings.ids, spec.dim), dtype=np.float32)
        for name, store in stores.items():
            hints = store.lookup(0, ids, np.empty_like(grads), training=True)
            begin = time.process_time()
            store.update(0, ids, grads, hints)
            timings.add(name, settings.ids, time.process_time() - begin)

    timings = harness.interleave(turn, settings.repeats)
    first = ids_of(next(chunks(settings.rows)))
    rows, expected = fbgemm.read(0, first), fused.read(0, first)
    allowed = _TOLERANCES[spec.weight_dtype] * (1 + np.abs(expected))
    same = int((np.abs(rows - expected) <= allowed).all(axis=1).sum())
    reference.require(f"same rows of {spec}", received=same, expected=len(first))
    times = [timings.ns_per_row(name).median for name in stores]
    return [spec.optimizer.fbgemm_name, spec.weight_dtype, spec.dim, *times]


BENCHMARK = Benchmark(
    name="engines",
    normal=EngineSettings(),
    tiny=EngineSettings(dims=(4, 8), rows=256, ids=64, repeats=2),
    figures={"engines": measure},
    core=-1,
)
