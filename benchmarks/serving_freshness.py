"""How fresh are predictions over HTTP, and what does that cost the training?

A server that trains writes increments at an interval, and an inference server follows
them. Cost: Zipf batches, several in flight, to a server that is never idle and to one
that writes nothing, in turn. Freshness: batches come one after the other; from time to
time one row more is updated, and the inference server is asked for a prediction from
that row, after each batch, until it is the one to be had.

The training server is on the first core, all else on the other.
"""

import http.client
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.filled import FilledServer
from benchmarks.harness import (
    Table,
    Timings,
    cpu_seconds,
    main_thread_cpu_seconds,
    pinned,
)
from benchmarks.increments import (
    IncrementSettings,
    draw_turns,
    filled,
    wait_until_written,
)
from benchmarks.reference import Numbers, ids_of
from persia_torchrec.arrays import Ids
from persia_torchrec.checkpoint.signature import EXTRA_FILE, ModelSignature
from persia_torchrec.errors import StoreError

Address = tuple[str, int]

_DEADLINE_S = 120.0
_PREFIX = np.uint64(1 << 63)  # of the only group of features, where it has one bit
_PATH = "/v2/models/model/infer"


class Delays(NamedTuple):
    """Seconds from an acknowledged update to an answer, and of what they are made."""

    seconds: Sequence[float]
    num_rows: int


class RowSum(nn.Module):
    """Predicts the sum of the weights of a row."""

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the sum of each sample, ``(B, 1)``."""
        return embeddings[0].sum(1, keepdim=True)


def measure_cost(settings: IncrementSettings, intervals_s: Sequence[float]) -> Table:
    """Measure the throughput at each interval, next to that without increments."""
    turns, num_rows = draw_turns(settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows: list[list[object]] = []
        for interval_s in intervals_s:
            timings, name = Timings(), f"{interval_s:g}"
            cpu_s = {"nothing": np.zeros(2), name: np.zeros(2)}
            given = replace(settings, interval_s=interval_s)
            with ExitStack() as both:
                of_log = given, num_rows, "increments", folder / name
                writing = both.enter_context(filled(*of_log))
                alone = both.enter_context(filled(settings, num_rows, "nothing", None))
                servers = {"nothing": alone, name: writing}
                for turn, requests in enumerate(turns):
                    for which in sorted(servers, reverse=bool(turn % 2)):
                        num, server = sum(map(len, requests)), servers[which]
                        before = _cpu_seconds(server.pid)
                        timings.add(which, num, server.stream(requests))
                        wait_until_written(server)
                        cpu_s[which] += _cpu_seconds(server.pid) - before
            rates = timings.rate("nothing").median, timings.rate(name).median
            ratio = timings.paired_ratio(name, "nothing")
            rows.append([interval_s, *rates, ratio, *cpu_s[name] / cpu_s["nothing"]])
    question = "What do increments cost a server that trains, and is never idle?"
    header = (
        "interval, s | M rows/s without | M rows/s with | of without | processor time "
        "of the training thread, of without | of the process"
    )
    return Table("cost", question, header, rows)


def _cpu_seconds(pid: int) -> npt.NDArray[np.float64]:
    """Return the processor time of the thread that trains, and of all threads."""
    return np.array([main_thread_cpu_seconds(pid), cpu_seconds(pid)])


def measure_delays(
    settings: IncrementSettings, interval_s: float, num: int, serve: Any
) -> Delays:
    """Return the delays of updates, while batches are trained."""
    settings = replace(settings, interval_s=interval_s, repeats=1)
    (batches,), num_rows = draw_turns(settings)
    probes = _draw_probes(num_rows, num)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs, run = folder / "logs", folder / "run"
        last = int(probes[-1]) + 1
        training = stack.enter_context(filled(settings, last, "increments", logs))
        training.client.checkpoints.dump(run)
        _write_model(folder, run, training.spec.name, training.spec.dim)
        served = stack.enter_context(serve(folder, ("--increments-dir", str(logs))))
        stack.enter_context(pinned(-1))
        work = cycle(batches)
        asked = stack.enter_context(
            closing(http.client.HTTPConnection(*served.address))
        )
        found = [_delay(training, asked, probes[i : i + 1], work) for i in range(num)]
    return Delays(found, sum(map(len, batches)) // len(batches))


def _draw_probes(num_rows: int, num: int) -> Numbers:
    """Return numbers beyond those of batches, whose ids have the group's prefix."""
    numbers = np.arange(num_rows, num_rows + 4 * num + 64)
    probes: Numbers = numbers[(ids_of(numbers) & _PREFIX) != 0][:num]
    return probes


def _write_model(folder: Path, run: Path, name: str, dim: int) -> None:
    """Write the dense half of a checkpoint, and the file of its features."""
    slots = f"slots_config:\n  {name}: {{dim: {dim}}}\n"
    config = f"feature_index_prefix_bit: 1\n{slots}"
    (folder / "embedding_config.yml").write_text(config)
    (checkpoint,) = run.glob("checkpoint-*")
    extra = {EXTRA_FILE: ModelSignature((name,), (), (1,)).encode()}
    save: Any = torch.jit.save  # torch leaves it untyped
    script = torch.jit.script(RowSum())
    save(script, str(checkpoint / "jit_dense.pt"), _extra_files=extra)


def _delay(
    training: FilledServer,
    asked: http.client.HTTPConnection,
    probe: Numbers,
    work: "cycle[Numbers]",
) -> float:
    """Update a row; return the seconds until a prediction is made from it."""
    name, dim, id_ = training.spec.name, training.spec.dim, ids_of(probe)
    before = _ask(asked, name, id_)
    training.run(next(work))
    start, due = monotonic(), before
    while abs(due - before) < 1e-3:  # steps of several weights may add up to nothing
        training.run(probe)
        start = monotonic()
        due = float(training.expected.floats(probe)[0, :dim].sum())
    while abs(_ask(asked, name, id_) - due) > 1e-4:
        if monotonic() - start > _DEADLINE_S:
            raise StoreError(f"An update must be served within {_DEADLINE_S} s.")
        training.run(next(work))
    return monotonic() - start


def _ask(asked: http.client.HTTPConnection, name: str, id_: Ids) -> float:
    """Return what is predicted from a row."""
    number = int(id_[0] & ~_PREFIX)
    item = {"name": name, "datatype": "UINT64", "shape": [1], "data": [number]}
    asked.request("POST", _PATH, json.dumps({"inputs": [item]}))
    answer = asked.getresponse()
    value = json.loads(answer.read())
    if answer.status != 200:
        raise StoreError(f"An answer must have status 200. Received: {value}.")
    return float(value["outputs"][0]["data"][0])
