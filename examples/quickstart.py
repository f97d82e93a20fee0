"""Train a small TorchRec model whose tables live on two embedding servers.

    python examples/quickstart.py

Everything runs on this machine; the servers are child processes and end with the
``with`` block. Only the lines marked (*) differ from plain TorchRec.
"""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import (  # (*)
    Adagrad,
    EmbeddingClient,
    EmbeddingCluster,
    RemoteEmbeddingBagCollectionSharder,
)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("user", "item")
        tables = [EmbeddingBagConfig(1000, 16, n, feature_names=[n]) for n in names]
        self.embeddings = EmbeddingBagCollection(tables=tables, device="meta")
        self.over = torch.nn.Linear(32, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.embeddings(ids).values()).squeeze(1)


def make_batch(size: int = 512) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    ids = torch.randint(2**62, (2, 50))[:, torch.randint(50, (size,))]  # any 64 bits
    one_each = torch.ones(2 * size, dtype=torch.int32)
    kjt = KeyedJaggedTensor(["user", "item"], ids.flatten(), lengths=one_each)
    return kjt, (ids.sum(0) % 2).float()


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    batches = [make_batch() for _ in range(5)]
    with EmbeddingCluster.local(num_servers=2) as cluster:  # (*)
        client = EmbeddingClient.connect(cluster.addresses)  # (*)
        sharder = RemoteEmbeddingBagCollectionSharder(client, Adagrad(lr=0.1))  # (*)
        model = DistributedModelParallel(Model(), sharders=[sharder])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loss_fn = torch.nn.BCEWithLogitsLoss()
        for step in range(100):
            ids, labels = batches[step % 5]
            loss = loss_fn(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 33 == 0:
                print(f"loss {loss.item():.4f}, rows on servers {client.num_rows()}")
    dist.destroy_process_group()
