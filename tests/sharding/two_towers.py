"""A model with a collection in each of two towers."""

import torch
from torch import nn
from torchrec import EmbeddingBagConfig, PoolingType

from tests.support.models import Tower
from tests.support.remote_job import kjt_of

TABLES = [
    EmbeddingBagConfig(100, 8, name="term", feature_names=["ad", "query"]),
    EmbeddingBagConfig(
        10, 4, name="user", feature_names=["user"], pooling=PoolingType.MEAN
    ),
]
IDS = {"ad": [[1, 2], []], "query": [[2], [3]], "user": [[-1], [7, 7]]}


class TwoTowers(nn.Module):
    """Two collections, each with its own tables."""

    def __init__(self):
        super().__init__()
        self.left = Tower(TABLES[:1])
        self.right = Tower(TABLES[1:])

    def forward(self, ids):
        return self.left(ids) + self.right(ids)


def train(model, num_steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        loss = (model(kjt_of(IDS)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
