"""Train a small TorchRec model in a job, whose servers it finds by itself.

torchx run -s local_cwd persia.train_torchrec --script "examples/train.py --epochs 2"
"""

import argparse

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import Adagrad, EmbeddingClient, remote_sharders

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    epochs = parser.parse_args().epochs
    dist.init_process_group("gloo")
    client = EmbeddingClient.of_job()
    sharders = remote_sharders(client, Adagrad(lr=0.1), staleness=1)
    tables = [EmbeddingBagConfig(1000, 16, "item", feature_names=["item"])]
    model = EmbeddingBagCollection(tables=tables, device="meta")
    model = DistributedModelParallel(model, sharders=sharders)
    torch.manual_seed(dist.get_rank())
    batches = torch.randint(2**62, (20, 8))  # any 64-bit ids
    lengths = torch.full((4,), 2)
    for epoch in range(epochs):
        for ids in batches:
            pooled = model(KeyedJaggedTensor(["item"], ids, lengths=lengths)).values()
            loss = (pooled - 1).square().mean()
            loss.backward()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    sharders.flush()
    print(f"{sum(client.num_rows())} rows on the servers")
    dist.destroy_process_group()
