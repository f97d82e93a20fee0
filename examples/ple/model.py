"""Two tasks on one set of embeddings: PLE, MMoE, or one network for both.

    features --collections--> (B, W) --body--> (B, 64) a task --tower--> a logit a task

PLE is progressive layered extraction (Tang et al., "Progressive Layered Extraction: A
Novel Multi-Task Learning Model for Personalized Recommendations", RecSys 2020), with
the layers of DeepRec's example: three levels, in each two experts of every task and one
that all share. MMoE is multi-gate mixture-of-experts (Ma et al., KDD 2018).

What DeepRec's example does otherwise than the papers is the default here. ``corrected``
changes it: a task's gate has a softmax, batch norm follows its moving averages and
forgets sooner, initial weights of the tables are smaller, and there is dropout.

Dimension key:
    B: samples
    W: width of all pooled columns, 16 a column
    H: width of what an expert gives, 64
    E: experts that a gate weighs
    T: tasks, 2
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType

from persia_torchrec.device.batches import TorchRecBatch

DIM = 16
"""Of the rows of every table."""

NUM_TASKS = 2
LEVELS = 3
EXPERTS_PER_TASK = 2
HIDDEN = (256, 128, 64)
"""Layers of an expert, of a gate before its last one, and of a tower."""

EPS = 1e-3
INITIAL_STD, CORRECTED_STD = 0.25, 0.01
"""Of the tables' truncated normal; TensorFlow's default is ``1 / sqrt(16)``."""

MOMENTUM, CORRECTED_MOMENTUM = 0.01, 0.1
"""Weight of a batch in the moving averages: 1 less TensorFlow's momentum."""

DROPOUT = 0.2
"""Of the pooled columns, if corrected."""

Kind = Literal["ple", "mmoe", "shared"]
Columns = Sequence[tuple[str, int]]
"""Names of columns, and rows of their tables where these have a length."""

MakeCollection = Callable[[list[EmbeddingBagConfig]], nn.Module]


class BatchNorm(nn.BatchNorm1d):
    """Batch norm that may be evaluated by the statistics of the batch it is given.

    Those of training go into the moving averages in any case; evaluation changes none.
    """

    def __init__(self, width: int, *, corrected: bool) -> None:
        momentum = CORRECTED_MOMENTUM if corrected else MOMENTUM
        super().__init__(width, eps=EPS, momentum=momentum)
        self._by_averages = corrected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(B, width)`` of the same; B is at least 2 where no average helps."""
        if self.training or self._by_averages:
            return super().forward(x)
        return functional.batch_norm(
            x, None, None, self.weight, self.bias, training=True, eps=self.eps
        )


class MLP(nn.Sequential):
    """Dense layers of 256, 128 and 64, each followed by ReLU and then batch norm."""

    def __init__(self, width: int, *, corrected: bool) -> None:
        layers: list[nn.Module] = []
        for num_in, num_out in zip((width, *HIDDEN), HIDDEN, strict=False):
            layers += [dense(num_in, num_out), nn.ReLU()]
            layers.append(BatchNorm(num_out, corrected=corrected))
        super().__init__(*layers)


def dense(num_in: int, num_out: int, *, bias: bool = True) -> nn.Linear:
    """Return a layer that begins as Glorot and Bengio's uniform, with biases of 0."""
    layer = nn.Linear(num_in, num_out, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class Gate(nn.Module):
    """Weighs experts by what is known of the sample: an MLP, then a dense layer."""

    def __init__(
        self, width: int, num_experts: int, *, is_shared: bool, corrected: bool
    ) -> None:
        super().__init__()
        self.mlp = MLP(width, corrected=corrected)
        self.weigh = dense(HIDDEN[-1], num_experts, bias=not is_shared)
        self._has_softmax = is_shared or corrected

    def forward(self, x: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
        """Return ``(B, H)``, the experts' sum by the weights that ``(B, W)`` gives."""
        weights_BE = self.weigh(self.mlp(x))
        if self._has_softmax:
            weights_BE = weights_BE.softmax(dim=1)
        return mix(weights_BE, experts)


def mix(weights_BE: torch.Tensor, experts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of what experts give, ``(B, H)`` each, times their weights."""
    return (weights_BE.unsqueeze(2) * torch.stack(experts, dim=1)).sum(dim=1)


class Level(nn.Module):
    """One level of PLE: experts of each task, shared ones, and a gate for each.

    The last level has no gate of what is shared, as no level follows that needs it.
    """

    def __init__(self, width: int, *, is_last: bool, corrected: bool) -> None:
        super().__init__()
        make = partial(MLP, width, corrected=corrected)
        self.of_tasks = nn.ModuleList(
            nn.ModuleList(make() for _ in range(EXPERTS_PER_TASK))
            for _ in range(NUM_TASKS)
        )
        self.shared = make()
        gate = partial(Gate, width, corrected=corrected)
        self.gates = nn.ModuleList(
            gate(EXPERTS_PER_TASK + 1, is_shared=False) for _ in range(NUM_TASKS)
        )
        num_experts = NUM_TASKS * EXPERTS_PER_TASK + 1
        self.shared_gate = None if is_last else gate(num_experts, is_shared=True)

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``(B, H)`` for each task, and for what is shared unless it is last.

        The inputs, ``(B, W)`` each, are in the same order, with the shared one.
        """
        *of_tasks, of_shared = inputs
        shared = self.shared(of_shared)
        experts = [
            [expert(x) for expert in own]
            for x, own in zip(of_tasks, self.of_tasks, strict=True)
        ]
        outputs = [
            gate(x, [*own, shared])
            for x, gate, own in zip(of_tasks, self.gates, experts, strict=True)
        ]
        if self.shared_gate is not None:
            everyone = [output for own in experts for output in own]
            outputs.append(self.shared_gate(of_shared, [*everyone, shared]))
        return outputs


class PLE(nn.Module):
    """Levels one after the other; gives ``(B, H)`` for each task of ``(B, W)``."""

    def __init__(self, width: int, *, corrected: bool) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            Level(
                HIDDEN[-1] if level else width,
                is_last=level == LEVELS - 1,
                corrected=corrected,
            )
            for level in range(LEVELS)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Give all branches of the first level the same input."""
        outputs = [x] * (NUM_TASKS + 1)
        for level in self.levels:
            outputs = level(outputs)
        return outputs


class MMoE(nn.Module):
    """Five experts for both tasks; a task's gate is one dense layer with a softmax."""

    def __init__(self, width: int, *, corrected: bool) -> None:
        super().__init__()
        num_experts = NUM_TASKS * EXPERTS_PER_TASK + 1
        self.experts = nn.ModuleList(
            MLP(width, corrected=corrected) for _ in range(num_experts)
        )
        self.gates = nn.ModuleList(
            dense(width, num_experts, bias=False) for _ in range(NUM_TASKS)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return ``(B, H)`` for each task of ``(B, W)``."""
        outputs = [expert(x) for expert in self.experts]
        return [mix(gate(x).softmax(dim=1), outputs) for gate in self.gates]


class Shared(nn.Module):
    """One MLP, whose output both tasks get."""

    def __init__(self, width: int, *, corrected: bool) -> None:
        super().__init__()
        self.mlp = MLP(width, corrected=corrected)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return ``(B, H)`` for each task of ``(B, W)``."""
        return [self.mlp(x)] * NUM_TASKS


BODIES: dict[Kind, type[nn.Module]] = {"ple": PLE, "mmoe": MMoE, "shared": Shared}


class DenseModel(nn.Module):
    """All dense layers: a body, and a tower for each task.

    ``width`` is that of the input.
    """

    def __init__(self, kind: Kind, width: int, *, corrected: bool) -> None:
        super().__init__()
        self.width = width
        self.dropout = nn.Dropout(DROPOUT if corrected else 0.0)
        self.body = BODIES[kind](width, corrected=corrected)
        self.towers = nn.ModuleList(
            nn.Sequential(MLP(HIDDEN[-1], corrected=corrected), dense(HIDDEN[-1], 1))
            for _ in range(NUM_TASKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, T)`` of pooled columns ``(B, W)``."""
        outputs = self.body(self.dropout(x))
        logits = [tower(out) for tower, out in zip(self.towers, outputs, strict=True)]
        return torch.cat(logits, dim=1)


class Losses(nn.Module):
    """The dense model, and the loss of both tasks.

    Args:
        dense_model: whose kernels ``l2`` is of.
        bf16: whether dense layers compute in bfloat16; weights and loss are float32.
        l2: ``l2 / 2`` times the sum of the squares of all dense kernels is in the loss.

    Attributes:
        compiled_batch: samples of the batches that the dense model is compiled for;
            others run as they are written. None: it is not compiled.
    """

    def __init__(
        self,
        dense_model: DenseModel,
        *,
        bf16: bool = False,
        l2: float = 0.0,
    ) -> None:
        super().__init__()
        self.dense_model = dense_model
        self.compiled_batch: int | None = None
        self._bf16, self._l2 = bf16, l2

    def forward(
        self, x: torch.Tensor, labels: Sequence[torch.Tensor], fraction: float = 1.0
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the loss; and losses ``(T,)``, logits, labels ``(B, T)``, detached.

        Pooled columns are ``(B, W)``, labels float32 ``(B,)`` of each task. The loss
        and the losses are scaled by the fraction of its step's samples that a batch
        has, so that those of the parts of a step add up to those of the step.
        """
        logits, truth = self.logits(x), torch.stack(tuple(labels), dim=1)
        losses = functional.binary_cross_entropy_with_logits(
            logits, truth, reduction="none"
        ).mean(dim=0)
        loss = losses.mean()
        if self._l2:
            loss = loss + self._l2 / 2 * self.squared_kernels()
        of_step = (fraction * losses).detach()
        return fraction * loss, (of_step, logits.detach(), truth)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 ``(B, T)`` of the pooled columns, ``(B, W)``."""
        is_compiled = self.training and len(x) == self.compiled_batch
        run = self.dense_model if is_compiled else self.dense_model.forward
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            logits = run(x)
        return logits.float()

    def squared_kernels(self) -> torch.Tensor:
        """Return the sum of the squares of all dense kernels; no bias is one."""
        layers = (m for m in self.dense_model.modules() if isinstance(m, nn.Linear))
        return torch.stack([layer.weight.square().sum() for layer in layers]).sum()


class MultiTaskModel(nn.Module):
    """Collections that give the pooled columns, in their order, and what follows.

    It is as TorchRec's train pipelines trace it: they go into ``forward`` here, and not
    into that of ``losses``.
    """

    def __init__(self, collections: Sequence[nn.Module], losses: Losses) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.losses = losses

    def forward(
        self, batch: TorchRecBatch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return what ``losses`` gives for a batch."""
        pooled = [collection(batch.id_features) for collection in self.collections]
        x = torch.cat([one.values() for one in pooled], dim=1)
        return self.losses(x, batch.labels, batch.fraction)


def make_tables(columns: Columns, *, corrected: bool) -> list[EmbeddingBagConfig]:
    """Return a table of 16 a column, whose values are averaged."""
    std = CORRECTED_STD if corrected else INITIAL_STD
    init = partial(nn.init.trunc_normal_, std=std, a=-2 * std, b=2 * std)
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=num_rows,
            embedding_dim=DIM,
            feature_names=[name],
            pooling=PoolingType.MEAN,
            init_fn=init,
        )
        for name, num_rows in columns
    ]


def make_collections(
    columns: Columns,
    *,
    corrected: bool = False,
    is_fused: bool = True,
    make: MakeCollection | None = None,
) -> list[nn.Module]:
    """Return what looks the columns up: one collection, or one a column.

    ``make`` makes one of tables; by default TorchRec's without memory, to be sharded.
    """
    tables = make_tables(columns, corrected=corrected)
    make = make or partial(EmbeddingBagCollection, device=torch.device("meta"))
    groups = [tables] if is_fused else [[table] for table in tables]
    return [make(group) for group in groups]
