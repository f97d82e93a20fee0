"""A small model with a planted signal, trained with one way of rounding.

Dimension key:
    B: samples
    F: features
    U: unique ids of a batch
    D: embedding dim
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from persia_torchrec.bench.precision_arms import Arm
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.initializer import Uniform
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.table import TableSpec

_TABLE = "precision"
_HIDDEN = 32
_ID_BYTES = 16
"""An id goes to the server twice: to look its row up, and to update it."""

_OVERHEAD = 1.05
"""What headers and acknowledgements may add to the bytes of rows and ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSettings:
    """What is trained.

    Raises:
        ConfigError: a setting is out of its range.
    """

    dim: int = 16
    num_features: int = 8
    num_ids: int = 20_000
    """Of each feature."""

    batch_size: int = 2048
    steps: int = 400
    test_batches: int = 30
    seeds: tuple[int, ...] = (1, 2, 3)
    floats: int = 20_480 * 64
    """Numbers that are converted at once, where conversions are timed."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_ids", "batch_size", "steps", "test_batches", "floats"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ConfigError(f"{name} must be >= 1. Received: {value}.")
        if not self.seeds:
            raise ConfigError("There must be a seed. Received: none.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training came to.

    Attributes:
        auc: of the test batches.
        loss: mean of the last tenth of the training batches.
        bytes_a_row: on the wire, of a lookup and an update, ids included.
    """

    auc: float
    loss: float
    bytes_a_row: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Unique ids uint64 ``(U,)``, which of them int64 ``(B, F)``, labels ``(B,)``."""

    ids: npt.NDArray[np.uint64]
    inverse: torch.Tensor
    labels: torch.Tensor


def train_arm(
    client: EmbeddingClient, arm: Arm, settings: PrecisionSettings, seed: int
) -> Outcome:
    """Train from the beginning, and test.

    Args:
        client: of a server with room for all ids; its rows are dropped.
        arm: the way of rounding.
        settings: what is trained.
        seed: of the batches, and of the dense model.

    Raises:
        ServerError: the server failed.
        StoreError: rows take other bytes on the wire than their precision says.
    """
    client.clear()
    client.add_tables([_table(settings)])
    batches = _Batches(settings, seed)
    torch.manual_seed(seed)
    width = settings.num_features * settings.dim
    model = nn.Sequential(
        nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    losses = []
    num_rows, stream = 0, BatchNumber.new_stream()
    before = _bytes_on_the_wire(client)
    for step in range(settings.steps):
        batch = batches.draw()
        num_rows += len(batch.ids)
        optimizer.zero_grad()
        number = BatchNumber(stream, step + 1)
        losses.append(_train_step(client, arm, model, batch, number))
        optimizer.step()
    measured = (_bytes_on_the_wire(client) - before) / num_rows
    auc = _test(client, model, [batches.draw() for _ in range(settings.test_batches)])
    last = losses[-max(settings.steps // 10, 1) :]
    if arm.bytes_of is not None:
        measured = _ID_BYTES + 2 * arm.bytes_of(settings.dim)
    _require_bytes(arm, measured, settings)
    return Outcome(auc, sum(last) / len(last), measured)


def auc_of(
    scores_B: npt.NDArray[np.float64], labels_B: npt.NDArray[np.float64]
) -> float:
    """Return the area under the ROC curve, by the ranks of the positives.

    Args:
        scores_B: any numbers; equal ones share their ranks.
        labels_B: 0 or 1, both of them there.

    Example:
        >>> auc_of(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.0, 0.0, 1.0, 1.0]))
        0.875
    """
    _, inverse, counts = np.unique(scores_B, return_inverse=True, return_counts=True)
    ranks_B = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    num_positive = labels_B.sum()
    num_negative = len(labels_B) - num_positive
    least = num_positive * (num_positive + 1) / 2
    return float((ranks_B[labels_B == 1].sum() - least) / (num_positive * num_negative))


class _Batches:
    """Draws samples: Zipf ids of each feature, and labels by their hidden effects."""

    def __init__(self, settings: PrecisionSettings, seed: int) -> None:
        self._settings = settings
        self._rng = np.random.default_rng(seed)
        shape = (settings.num_features, settings.num_ids)
        self._effects = self._rng.standard_normal(shape)
        ranks = np.arange(1, settings.num_ids + 1, dtype=np.float64)
        self._shares = np.cumsum(1 / ranks) / (1 / ranks).sum()

    def draw(self) -> _Batch:
        """Return the next batch."""
        settings = self._settings
        shape = (settings.batch_size, settings.num_features)
        places_BF = np.searchsorted(self._shares, self._rng.random(shape))
        places_BF = places_BF.clip(max=settings.num_ids - 1)
        features_F = np.arange(settings.num_features)
        score_B = self._effects[features_F, places_BF].sum(1) / np.sqrt(
            settings.num_features / 4
        )
        labels_B = self._rng.random(settings.batch_size) < 1 / (1 + np.exp(-score_B))
        ids_BF = (places_BF + features_F * settings.num_ids).astype(np.uint64)
        ids_U, inverse = np.unique(ids_BF, return_inverse=True)
        return _Batch(
            ids_U,
            torch.from_numpy(inverse.reshape(shape)),
            torch.from_numpy(labels_B.astype(np.float32)),
        )


def _table(settings: PrecisionSettings) -> TableSpec:
    return TableSpec(
        name=_TABLE,
        dim=settings.dim,
        optimizer=Adagrad(0.1, vectorwise_shared=True),
        initializer=Uniform(-0.01, 0.01),
    )


def _train_step(
    client: EmbeddingClient,
    arm: Arm,
    model: nn.Module,
    batch: _Batch,
    number: BatchNumber,
) -> float:
    split = client.split(batch.ids)
    tables = [(_TABLE, split)]
    (rows,) = client.pull(tables, batch=number, precision=arm.precision)
    rows_UD = torch.from_numpy(np.array(arm.round_rows(rows[split.place])))
    rows_UD.requires_grad_()
    loss = _loss(model, rows_UD, batch)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    assert rows_UD.grad is not None
    grads_UD = arm.round_gradients(rows_UD.grad.numpy())
    replies = client.push(
        tables, [split.grouped(grads_UD)], number, precision=arm.precision
    )
    client.missed(replies)
    return loss.item()


def _loss(model: nn.Module, rows_UD: torch.Tensor, batch: _Batch) -> torch.Tensor:
    logits_B = model(rows_UD[batch.inverse].flatten(1))
    return nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)


@torch.no_grad()
def _test(client: EmbeddingClient, model: nn.Module, batches: list[_Batch]) -> float:
    scores, labels = [], []
    for batch in batches:
        split = client.split(batch.ids)
        (rows,) = client.pull([(_TABLE, split)])
        rows_UD = torch.from_numpy(rows[split.place])
        scores.append(model(rows_UD[batch.inverse].flatten(1)).double().numpy())
        labels.append(batch.labels.double().numpy())
    return auc_of(np.concatenate(scores), np.concatenate(labels))


def _bytes_on_the_wire(client: EmbeddingClient) -> int:
    (counters,) = client.counters()
    return counters["bytes_received"] + counters["bytes_sent"]


def _require_bytes(arm: Arm, measured: float, settings: PrecisionSettings) -> None:
    """Refuse a run whose messages were larger or smaller than they should be."""
    size = {"fp32": 4}.get(arm.name, 2) * settings.dim
    least = _ID_BYTES + 2 * size
    is_small = settings.batch_size * settings.num_features < 4096
    if arm.bytes_of is not None or is_small:
        return
    if not least <= measured <= least * _OVERHEAD:
        raise StoreError(
            f"{arm.name}: a row must take {least} bytes on the wire, and little more. "
            f"Received: {measured:.1f}."
        )
