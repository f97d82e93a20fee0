"""The NN worker of a job that counts; the first leaves all rows in ``rows.npy``.

Each update adds 1 to the weights of its ids. An NN worker notes the batches that it is
about to push, and those whose updates were acknowledged. When there is a file
``exception``, it raises. With ``LEARNS`` it learns instead, batches in their order:
that is how many may be between lookup and update.
"""

import contextlib
import itertools
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from persia_torchrec.ctx import TrainCtx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.env import embedding_config_path, get_rank
from persia_torchrec.persia.engine import connect_to_job
from tests.chaos.counting import all_ids
from tests.support.processes import DEADLINE_S

LEARNS = int(os.environ.get("LEARNS", "0"))
FLUSH_STEPS = 1 if LEARNS else 16
PAUSE_S = 0.02  # so that the kills do not take too many batches
BLOCK = 20_000


class Sum(nn.Module):
    """Sums up; its gradients are those of the output."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors, embeddings):
        return self.bias + embeddings[0].sum(dim=1, keepdim=True)


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, non_id_tensors, embeddings):
        return self.linear(embeddings[0])


def make_ctx():
    """Return a context that counts, or learns."""
    torch.manual_seed(0)
    model = Logistic() if LEARNS else Sum()
    bounds = (-0.1, 0.1) if LEARNS else (0, 0)
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(0.1) if LEARNS else SGD(1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), 0.1 if LEARNS else 0.0),
        mixed_precision=False,
        embedding_config=EmbeddingConfig(bounds, weight_bound=0),
    )


def train(ctx, loader, sent, acknowledged):
    numbers = []
    for batch in in_step(loader) if LEARNS > 1 else loader:
        output, labels = ctx.forward(batch)
        loss = -output.sum()
        if LEARNS:
            loss = nn.functional.binary_cross_entropy_with_logits(output, labels[0])
        numbers.append(f"{batch.batch_id}\n")
        sent.write(numbers[-1].encode())
        ctx.backward(loss)
        if len(numbers) == FLUSH_STEPS:
            ctx.embeddings.flush()
            acknowledged.write("".join(numbers).encode())
            numbers.clear()
        with contextlib.suppress(FileNotFoundError):
            Path("exception").unlink()
            raise ValueError("there was a file")
        time.sleep(PAUSE_S)


def in_step(batches):
    """Yield a batch once the next one has its rows, which lack the update of this one.

    Such updates are waited for. So each batch lacks the one before, and none else.
    """
    for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
        assert following is None or following.pull.arrived.wait(DEADLINE_S)
        yield batch


def leave_rows():
    """Write the rows of all ids, when all trainers have left their contexts."""
    prefix = load_embedding_config(embedding_config_path()).slots["item"].index_prefix
    ids = all_ids(int(Path("end").read_text())).astype(np.uint64) + np.uint64(prefix)
    client, workers = connect_to_job()
    with contextlib.closing(client), contextlib.closing(workers):
        client.learn_tables()
        blocks = [
            client.read("item", ids[at : at + BLOCK])
            for at in range(0, len(ids), BLOCK)
        ]
    np.save("some rows.npy", np.concatenate(blocks))
    Path("some rows.npy").rename("rows.npy")


def main():
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(Path(f"{name} {get_rank()}").open("ab", buffering=0))
            for name in ("sent", "acknowledged")
        ]
        with make_ctx() as ctx:
            loader = DataLoader(
                StreamingDataset(8),
                reproducible=LEARNS > 0,
                embedding_staleness=LEARNS or 8,
            )
            train(ctx, loader, *files)
    if get_rank() == 0:
        leave_rows()


if __name__ == "__main__":
    main()
