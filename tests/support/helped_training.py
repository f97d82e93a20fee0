"""What the trainers of the helper's tests do."""

import time
from pathlib import Path

import torch

from persia_torchrec.ctx import TrainCtx
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.embedding.optim import SGD


class Sum(torch.nn.Module):
    """Sums up everything."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, non_id_tensors, embeddings):
        return self.bias + embeddings[0].sum(dim=1, keepdim=True)


def train(after_each=lambda: None):
    """Train on all batches; return how many there were, and the rows of the servers."""
    model = Sum()
    num = 0
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mixed_precision=False,
    ) as ctx:
        for batch in DataLoader(StreamingDataset(4), embedding_staleness=1):
            output, _ = ctx.forward(batch)
            ctx.backward(output.sum())
            num += 1
            after_each()
        return num, ctx.get_embedding_size()


def train_and_tell(after_each=lambda: None):
    """Train, and leave what was trained in the folder that is the working one."""
    num, rows = train(after_each)
    Path("trained.txt").write_text(f"{num} {sum(rows)} {len(rows)}")


def train_while_others_come():
    """Train, and wait after the first batch until there is a file ``go``."""

    def wait():
        Path("training").touch()
        while not Path("go").exists():
            time.sleep(0.02)

    train_and_tell(wait)
