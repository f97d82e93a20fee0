"""One model twice: its tables on the servers, and in plain TorchRec.

Both begin with the same rows and the same dense weights. Then each step on the same
batch must have the same loss.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints

from persia_torchrec.client.client import BatchNumber
from tests.support.places import move
from tests.support.remote_job import CPU, RemoteJob, ids_of, shard

FUSED = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])


class WithLoss(nn.Module):
    """A model as TorchRec's pipelines want it: a batch in, loss and result out.

    Batches have ``dense``, ``ids`` and ``labels``.
    """

    def __init__(
        self, model, loss_fn=nn.functional.binary_cross_entropy_with_logits
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch):
        output = self.model(batch.dense, batch.ids)
        loss = self.loss_fn(output.view(-1), batch.labels)
        return loss, loss.detach()


class Twins:
    """A model on the servers, and the same model in plain TorchRec.

    Args:
        job: holds the servers.
        make_model: makes the model with its loss, its tables on the meta device.
        sharders: put the tables on the servers.
        plain_sharder: keeps them here, with fbgemm's fused kernels.
        dims: of the tables, by name.
        num_ids: of each table.
        device: of the model on the servers; the other is on the CPU.

    Attributes:
        remote: the model on the servers.
        plain: the other.
        start: what the rows of each table are at first.
    """

    def __init__(
        self,
        job: RemoteJob,
        make_model: Callable[[], nn.Module],
        sharders: list,
        plain_sharder: object,
        *,
        dims: Mapping[str, int],
        num_ids: int,
        device: torch.device = CPU,
    ) -> None:
        self._job = job
        self._dims = dims
        self._ids = range(num_ids)
        torch.manual_seed(0)
        model = make_model()
        dense = {k: v.clone() for k, v in model.state_dict().items() if not v.is_meta}
        self.remote = job.shard(move(model, device), sharders, device=device)
        plain = make_model()
        plain.load_state_dict(dense, strict=False)
        self.plain = shard_plain(plain, plain_sharder, dims)
        self.start = {}
        for table in dims:
            self.start[table] = make_rows(job.client, table, num_ids)
            plain_rows(self.plain, table).copy_(self.start[table])

    def remote_rows(self, table: str) -> torch.Tensor:
        rows = self._job.read(table, self._ids)
        return torch.from_numpy(rows[:, : self._dims[table]].copy())

    def train(self, model, batches, *, lr=0.1) -> np.ndarray:
        """Return the loss of each step; the dense half is trained by plain SGD."""
        return train(model, batches, self.dense_optimizer(model, lr))

    def dense_optimizer(self, model, lr=0.1) -> torch.optim.Optimizer:
        return dense_optimizer(model, self._dims, lr)

    def require_equal_rows(self, *, rtol=1e-4, atol=1e-5, moved=0.05) -> None:
        """Check the rows of both, and that some row of each table has moved so far."""
        for table in self._dims:
            plain = plain_rows(self.plain, table)
            np.testing.assert_allclose(
                self.remote_rows(table), plain, rtol=rtol, atol=atol, err_msg=table
            )
            assert (plain - self.start[table]).abs().max() > moved, table


def shard_plain(model, sharder, tables: Iterable[str]):
    """Shard a model in this process, each of its tables whole."""
    return shard(model, sharder, constraints=dict.fromkeys(tables, FUSED))


def plain_rows(model, table: str) -> torch.Tensor:
    """Return the rows of a table that is in this process, as they are in memory."""
    (weight,) = (
        value
        for name, value in model.state_dict().items()
        if name.endswith(_names_of_weights(table))
    )
    (piece,) = weight.local_shards()
    return piece.tensor


def make_rows(client, table: str, num_ids: int) -> torch.Tensor:
    """Make the rows of the first ids on the servers; return their weights."""
    split = client.split(ids_of(range(num_ids)))
    number = BatchNumber(BatchNumber.new_stream(), 1)
    (rows,) = client.pull([(table, split)], batch=number)
    return torch.from_numpy(rows[split.inverse])


def dense_optimizer(model, tables: Iterable[str], lr: float) -> torch.optim.Optimizer:
    """Return plain SGD of all weights that are not a table's."""
    names = tuple(name for table in tables for name in _names_of_weights(table))
    dense = [p for name, p in model.named_parameters() if not name.endswith(names)]
    return torch.optim.SGD(dense, lr=lr)


def train(model, batches, optimizer) -> np.ndarray:
    """Return the loss of each step."""
    losses = []
    for batch in batches:
        loss, detached = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(detached.item())
    return np.array(losses)


def _names_of_weights(table: str) -> tuple[str, ...]:
    """Return how the name of a table's weights ends, of bags and of sequences."""
    return f"embedding_bags.{table}.weight", f"embeddings.{table}.weight"
