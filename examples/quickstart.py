"""Train a small TorchRec model whose tables live on two embedding servers.

    python examples/quickstart.py [--device cpu]

Servers are child processes. Only the lines marked (*) differ from plain TorchRec.
"""

import argparse

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

import persia_torchrec as persia  # (*)


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
    parser, has_gpu = argparse.ArgumentParser(), torch.cuda.is_available()
    parser.add_argument("--device", default="cuda:0" if has_gpu else "cpu")
    device = torch.device(parser.parse_args().device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    batches = [make_batch() for _ in range(5)]
    with persia.EmbeddingCluster.local(servers=2) as cluster:  # (*)
        client = persia.EmbeddingClient.connect(cluster.addresses)  # (*)
        adagrad = persia.Adagrad(lr=0.1)  # (*)
        sharder = persia.RemoteEmbeddingBagCollectionSharder(client, adagrad)  # (*)
        model = DistributedModelParallel(Model(), device=device, sharders=[sharder])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(100):
            ids, labels = batches[step % 5]
            loss = torch.nn.BCEWithLogitsLoss()(model(ids), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 33 == 0:
                print(f"loss {loss.item():.4f}, rows on servers {client.num_rows()}")
    dist.destroy_process_group()
