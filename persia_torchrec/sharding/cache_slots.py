"""Slots of rows that fbgemm trains where they lie: its table-batched embedding (TBE).

Dimensions: C slots of a pool, D embedding dim, S state floats a row, W = D + S, N rows,
L ids of a batch.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from persia_torchrec.arrays import Counts, Floats, Positions
from persia_torchrec.cache.slot_map import Moves, SlotMap
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.backward_pass import saved_as_itself
from persia_torchrec.table import TableSpec

_DIM_STEP = 4  # what fbgemm's dims are multiples of


def why_not_cached(spec: TableSpec) -> str:
    """Return why fbgemm cannot train the rows of a table here, or ""."""
    arguments = spec.optimizer.fbgemm_cpu_arguments()
    reasons = {
        "it has a dynamic dim": spec.dynamic.is_on,
        "its ids share rows": bool(spec.shared_rows),
        "it is frozen": spec.is_frozen,
        f"fbgemm's dims are multiples of {_DIM_STEP}": bool(spec.dim % _DIM_STEP),
        str(arguments): isinstance(arguments, str),
        "its weights are bounded": bool(spec.weight_bound),
        "its weights are rounded to 16 bits": spec.weight_dtype != "fp32",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Pool:
    """The slots of the rows of some tables of one dim and optimizer.

    Attributes:
        map: which row is in which slot.
        stepping: held while rows in slots change, or trained ones are read.
        rate: what the optimizer steps with.
        loading: slots whose rows are on their way, by the array that has them.
        steps: how many updates each table has had; empty: the servers know them.
        batches: that had slots; the largest had ``most_rows``.
    """

    def __init__(
        self, specs: Sequence[TableSpec], num_slots: int, num_servers: int
    ) -> None:
        self.spec = spec = specs[0]
        self.tables = tuple(spec.name for spec in specs)
        self.dim, self.rate = spec.dim, spec.optimizer.lr
        self.stepping = threading.Lock()
        self.loading: dict[int, Positions] = {}
        self.steps: dict[str, int] = {}
        self.batches = self.most_rows = 0
        self._make(num_slots, num_servers)

    def resize(self, num_slots: int) -> None:
        """Have another number of slots, without a row; no batch may have one."""
        with self.stepping:
            del self._tbe, self._columns, self.weights  # the memory of these is reused
            self._make(num_slots, self.map.num_servers)

    @torch.inference_mode(mode=False)  # in which the first batch may come
    def _make(self, num_slots: int, num_servers: int) -> None:
        self.num_slots = num_slots
        self.map = SlotMap(num_slots, self.tables, num_servers)
        self._frequencies = np.zeros(num_slots, dtype=np.uint32)  # told by the servers
        optimizer: Any = self.spec.optimizer
        given = {"eps": optimizer.eps} if hasattr(optimizer, "eps") else {}
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_slots, self.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType[f"EXACT_{optimizer.fbgemm_name.upper()}"],
            learning_rate=self.rate,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            **given,
        )
        (weights,) = self._tbe.split_embedding_weights()
        states = self._tbe.split_optimizer_states()
        # ``.data`` shares no version counter: autograd would take each row that comes
        # for a change of what it saved.
        self._columns = [t.data for t in (weights, *(states[0] if states else ()))]
        self._widths = [c[0].numel() for c in self._columns]
        self.width = sum(self._widths)
        self.weights = self._columns[0]

    def gather(self, slots_N: Positions) -> Floats:
        """Return weights and state of slots, float32 ``(N, W)``."""
        index = torch.from_numpy(slots_N).long()
        parts = [
            column.index_select(0, index).view(-1, width)
            for column, width in zip(self._columns, self._widths, strict=True)
        ]
        rows: Floats = torch.cat(parts, dim=1).numpy()
        return rows

    def scatter(
        self, slots_N: Positions, rows_NW: Floats, frequencies_N: Counts
    ) -> None:
        """Set weights and state of slots, and how often their rows were seen."""
        self._frequencies[slots_N] = frequencies_N
        index = torch.from_numpy(slots_N).long()
        rows = torch.from_numpy(np.array(rows_NW))  # which may be read-only, and go
        for column, part in zip(
            self._columns, rows.split(self._widths, dim=1), strict=True
        ):
            column.index_copy_(0, index, part.reshape(-1, *column.shape[1:]))

    def frequencies(self, moves: Moves) -> Counts:
        """Return how often rows had been seen, before what their counts say."""
        slots_N, before_N = moves.slots, self._frequencies[moves.slots]
        most = np.iinfo(np.uint32).max
        self._frequencies[slots_N] += np.minimum(moves.counts, most - before_N)
        return before_N

    def follow(self, specs: Mapping[str, TableSpec]) -> bool:
        """Take the learning rate of tables; return whether they are frozen."""
        found = {(specs[t].optimizer.lr, specs[t].is_frozen) for t in self.tables}
        if len(found) > 1:
            raise ConfigError(
                f"The tables {self.tables} share slots of the cache, and must have one "
                "learning rate, and be frozen together. Received: "
                f"{sorted(found)} as pairs of both. Set the same for all of them, or "
                "give them optimizers with different settings."
            )
        [(self.rate, is_frozen)] = found
        return is_frozen

    def pool_bags(
        self, slots_L: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Sum the rows of bags, float32 ``(N, D)``, in a graph that steps by ``rate``.

        Slots, and where bags begin and the last one ends, are int64. The graph keeps
        what it needs: a checkpoint of activations does not make it again.
        """
        self._tbe.set_learning_rate(self.rate)
        with torch.enable_grad(), saved_as_itself():
            bags: torch.Tensor = self._tbe(slots_L, offsets, weights)
        return bags

    def step(
        self, bags: torch.Tensor, grad_ND: torch.Tensor, slots_U: Positions
    ) -> None:
        """Apply the optimizer to the rows of bags, whose gradient is given."""
        with self.stepping:
            self.map.mark_dirty(slots_U)  # first: an interrupt may come behind a step
            torch.autograd.backward([bags], [grad_ND], retain_graph=True)
            for table in self.steps:
                self.steps[table] += 1
