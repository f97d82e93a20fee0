"""What does half of the bytes on the wire cost in quality?

A small model with a planted signal trains against a server over loopback, on the same
batches whatever precision rows and gradients travel in; the test AUC tells precisions
apart. Rounding that the wire does not have is done here, and travels in float32.
Beside it: how long conversions take on one core.

Dimension key:
    B: samples
    F: features
    U: unique ids of a batch
    D: embedding dim
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import mean
from typing import Annotated, Any, NamedTuple

import fbgemm_gpu  # noqa: F401  # makes torch.ops.fbgemm known
import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from benchmarks.harness import Benchmark, Settings, Table, pinned, timed
from persia_torchrec.arrays import Floats, Ids
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.initializer import Uniform
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import StoreError
from persia_torchrec.rpc.float_codec import decode_floats, encode_floats
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.table import TableSpec

_TABLE, _FP32, _HIDDEN = "precision", Precision.FP32, 32
_REPEATS, _LARGEST_HALF = 15, 65504
_ID_BYTES, _OVERHEAD = 16, 1.05
"""An id goes to the server twice; headers and acknowledgements add less than 5 %."""


def plain_halves(rows_UD: Floats) -> Floats:
    """Round to halves without a scale; what is too large becomes the largest."""
    clipped_UD = rows_UD.clip(-_LARGEST_HALF, _LARGEST_HALF)
    return clipped_UD.astype(np.float16).astype(np.float32)


def stochastic_bf16(rows_UD: Floats) -> Floats:
    """Round to bfloat16, up or down with the probability that keeps the mean right."""
    rng = np.random.default_rng(20_238)
    bits_UD = np.ascontiguousarray(rows_UD).view(np.uint32)
    random_UD = rng.integers(0, 2**16, rows_UD.shape, dtype=np.uint32)
    kept_UD = (bits_UD + random_UD) & np.uint32(0xFFFF0000)
    return kept_UD.view(np.float32)


def eight_bits(rows_UD: Floats) -> Floats:
    """Round as fbgemm's quantizer of rows: 8 bits between the row's extremes."""
    ops = torch.ops.fbgemm
    bytes_ = ops.FloatToFused8BitRowwiseQuantized(torch.from_numpy(np.array(rows_UD)))
    return np.asarray(ops.Fused8BitRowwiseQuantizedToFloat(bytes_))


class Arm(NamedTuple):
    """A way of rounding: on the wire, or here, where it would take some bits."""

    name: str
    precision: Precision = Precision.FP32
    round_rows: Callable[[Floats], Floats] = np.array
    round_gradients: Callable[[Floats], Floats] = np.array
    bytes_of: Callable[[int], int] | None = None


ARMS = (
    Arm("fp32"),
    Arm("fp16", Precision.FP16),
    Arm("bf16", Precision.BF16),
    Arm("fp16 without a scale", _FP32, plain_halves, plain_halves, lambda dim: 2 * dim),
    Arm("bf16, stochastic", _FP32, np.array, stochastic_bf16, lambda dim: 2 * dim),
    Arm("8 bits, rowwise", _FP32, eight_bits, eight_bits, lambda dim: dim + 8),
)


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(Settings):
    """What is trained, and converted."""

    dim: Annotated[int, "embedding dim"] = 16
    num_features: Annotated[int, "ids per sample"] = 8
    num_ids: Annotated[int, "ids of each feature"] = 20_000
    batch_size: Annotated[int, "samples per batch"] = 2048
    steps: Annotated[int, "training batches"] = 400
    test_batches: Annotated[int, "batches of the test"] = 30
    seeds: Annotated[tuple[int, ...], "of the batches and the model"] = (1, 2, 3)
    rows: Annotated[int, "gradients of 64 numbers converted at once"] = 20_480


class Outcome(NamedTuple):
    """Test AUC, loss of the last tenth of the steps, and bytes per row on the wire."""

    auc: float
    loss: float
    bytes_per_row: float


class _Batch(NamedTuple):
    """Unique ids ``(U,)``, which of them int64 ``(B, F)``, labels ``(B,)``."""

    ids: Ids
    inverse: torch.Tensor
    labels: torch.Tensor


def draw_batches(settings: PrecisionSettings, seed: int) -> Iterator[_Batch]:
    """Draw Zipf ids of each feature, and labels by their hidden effects."""
    rng, num_ids = np.random.default_rng(seed), settings.num_ids
    effects = rng.standard_normal((settings.num_features, num_ids))
    ranks = np.arange(1, num_ids + 1, dtype=np.float64)
    cumulative = np.cumsum(1 / ranks) / (1 / ranks).sum()
    features_F = np.arange(settings.num_features)
    shape = (settings.batch_size, settings.num_features)
    while True:
        ranks_BF = np.searchsorted(cumulative, rng.random(shape)).clip(max=num_ids - 1)
        score_B = effects[features_F, ranks_BF].sum(1) / np.sqrt(len(features_F) / 4)
        labels_B = rng.random(settings.batch_size) < 1 / (1 + np.exp(-score_B))
        ids_BF = (ranks_BF + features_F * num_ids).astype(np.uint64)
        ids_U, inverse = np.unique(ids_BF, return_inverse=True)
        labels = torch.from_numpy(labels_B.astype(np.float32))
        yield _Batch(ids_U, torch.from_numpy(inverse.reshape(shape)), labels)


def train_arm(
    client: EmbeddingClient, arm: Arm, settings: PrecisionSettings, seed: int
) -> Outcome:
    """Train from the beginning on a server, and test; check the bytes it takes."""
    client.clear()
    adagrad, init = Adagrad(0.1, vectorwise_shared=True), Uniform(-0.01, 0.01)
    spec = TableSpec(name=_TABLE, dim=settings.dim, optimizer=adagrad, initializer=init)
    client.add_tables([spec])
    torch.manual_seed(seed)
    bottom = nn.Linear(settings.num_features * settings.dim, _HIDDEN)
    model = nn.Sequential(bottom, nn.ReLU(), nn.Linear(_HIDDEN, 1), nn.Flatten(0))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    batches, losses = draw_batches(settings, seed), []
    num_rows, stream, before = 0, BatchNumber.new_stream(), _wire_bytes(client)
    for step in range(1, settings.steps + 1):
        batch, number = next(batches), BatchNumber(stream, step)
        tables = [(_TABLE, client.split(batch.ids))]  # one server keeps their order
        [rows] = client.pull(tables, batch=number, precision=arm.precision)
        rows_UD = torch.from_numpy(np.array(arm.round_rows(rows))).requires_grad_()
        optimizer.zero_grad()
        logits_B = model(rows_UD[batch.inverse].flatten(1))
        loss = binary_cross_entropy_with_logits(logits_B, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert rows_UD.grad is not None
        grads_UD = arm.round_gradients(rows_UD.grad.numpy())
        client.outcome(client.push(tables, [grads_UD], number, precision=arm.precision))
        losses.append(loss.item())
        num_rows += len(batch.ids)
    measured = (_wire_bytes(client) - before) / num_rows
    least = _ID_BYTES + 2 * settings.dim * (4 if arm.precision is _FP32 else 2)
    is_small = settings.batch_size * settings.num_features < 4096  # headers count
    if not is_small and not least <= measured <= least * _OVERHEAD:
        text = f"A row must take {least} bytes on the wire, and little more."
        raise StoreError(f"{arm.name}: {text} Received: {measured:.1f}.")
    if arm.bytes_of is not None:
        measured = _ID_BYTES + 2 * arm.bytes_of(settings.dim)
    auc = _test(client, model, list(islice(batches, settings.test_batches)))
    return Outcome(auc, mean(losses[-max(settings.steps // 10, 1) :]), measured)


@torch.no_grad()
def _test(client: EmbeddingClient, model: nn.Module, batches: list[_Batch]) -> float:
    scores = []
    for batch in batches:
        [rows] = client.pull([(_TABLE, client.split(batch.ids))])
        rows_UD = torch.from_numpy(np.array(rows))
        scores.append(model(rows_UD[batch.inverse].flatten(1)).sigmoid())
    labels = torch.cat([batch.labels for batch in batches])
    return float(binary_auroc(torch.cat(scores), labels.int()))


def _wire_bytes(client: EmbeddingClient) -> int:
    return sum(client.counters()[0][f"bytes_{way}"] for way in ("received", "sent"))


def _measure_quality(settings: PrecisionSettings) -> list[Table]:
    outcomes: dict[str, list[Outcome]] = {}
    capacity = settings.num_ids * settings.num_features
    with (
        EmbeddingCluster.local(servers=1, capacity=capacity) as cluster,
        closing(EmbeddingClient.connect(cluster.addresses)) as client,
    ):
        for arm in ARMS:
            runs = [train_arm(client, arm, settings, seed) for seed in settings.seeds]
            outcomes[arm.name] = runs
    rows = []
    exact = outcomes[ARMS[0].name]
    for name, runs in outcomes.items():
        auc, loss, size = (mean(values) for values in zip(*runs, strict=True))
        aucs = [auc, min(run.auc for run in runs), max(run.auc for run in runs)]
        lost = auc - mean(run.auc for run in exact)
        texts = [f"{value:.5f}" for value in aucs]
        saved = 1 - size / exact[0].bytes_per_row
        rows.append([name, *texts, f"{-lost:+.5f}", f"{loss:.5f}", size, saved])
    question = "Zipf ids, rowwise Adagrad; for each seed, the same batches for all."
    header = "rows and gradients | test AUC, mean | lowest | highest | AUC lost, mean"
    header += " | last tenth's loss | bytes per row, both ways | saved"
    return [Table("quality", question, header, rows)]


def _measure_conversions(settings: PrecisionSettings) -> list[Table]:
    """Time each conversion of the same gradients to fewer bits, and back."""
    rng = np.random.default_rng(20_239)
    floats = rng.standard_normal((settings.rows, 64), np.float32) * np.float32(1e-4)
    tensor = torch.from_numpy(floats)
    ops, num = torch.ops.fbgemm, floats.size
    brain = ops.FloatToBfloat16Quantized, ops.Bfloat16QuantizedToFloat
    eight = ops.FloatToFused8BitRowwiseQuantized, ops.Fused8BitRowwiseQuantizedToFloat
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "torch, float16": (tensor.half, torch.Tensor.float),
        "torch, bfloat16": (tensor.bfloat16, torch.Tensor.float),
        "fbgemm, FloatToBfloat16Quantized": (partial(brain[0], tensor), brain[1]),
        "fbgemm, 8 bits rowwise": (partial(eight[0], tensor), eight[1]),
    }
    for precision in (Precision.FP16, Precision.BF16):
        encode = partial(encode_floats, floats, precision)
        decode = partial(decode_floats, shapes=[floats.shape], precision=precision)
        calls[f"ours, {precision.name.lower()}"] = encode, decode
    threads, rows = torch.get_num_threads(), []
    torch.set_num_threads(1)
    with pinned(-1):
        for name, (there, back) in calls.items():
            both = there, partial(back, there())
            best = [min(timed(call)[0] for _ in range(_REPEATS)) for call in both]
            rows.append([name, *(seconds / num * 1e9 for seconds in best)])
    torch.set_num_threads(threads)
    question = f"Nanoseconds per number, the fastest of {_REPEATS}, on one core."
    return [Table("conversions", question, "conversion | to it | back", rows)]


BENCHMARK = Benchmark(
    name="precision",
    normal=PrecisionSettings(),
    tiny=PrecisionSettings(
        num_ids=200, batch_size=64, steps=3, test_batches=2, seeds=(1,), rows=64
    ),
    figures={"quality": _measure_quality, "conversions": _measure_conversions},
)
