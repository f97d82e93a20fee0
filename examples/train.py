"""Train a model in a job, which continues where it was, however the job has ended.

torchx run -s local_cwd persia.train_torchrec --script "examples/train.py --epochs 2"
    --servers 2 --run_dir runs/7
"""

import argparse
import time

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import Adagrad, EmbeddingClient, recoverable, remote_sharders


class Batches(list[int]):
    """Batches that follow from their numbers, so that a pass can be read again."""

    def __iter__(self):
        for number in super().__iter__():
            draws = torch.Generator().manual_seed(number)
            ids = torch.randint(1_000, (512,), generator=draws)
            lengths = torch.ones(512, dtype=torch.int32)
            yield KeyedJaggedTensor(["item"], ids, lengths=lengths), (ids % 2).float()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(1_000, 16, "item", feature_names=["item"])
        self.embeddings = EmbeddingBagCollection(tables=[table], device="meta")
        self.over = torch.nn.Linear(16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.embeddings(ids).values()).squeeze(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    client = EmbeddingClient.of_job()
    sharders = remote_sharders(client, Adagrad(lr=0.1), staleness=1)
    model = DistributedModelParallel(Model(), sharders=sharders)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state, loss = {"model": model, "optimizer": optimizer}, torch.nan
    with recoverable(None, state, client, sharders) as run:
        for epoch in run.epochs(args.epochs):
            for ids, labels in run.skip(Batches(range(args.steps))):
                loss = torch.nn.BCEWithLogitsLoss()(model(ids), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
                time.sleep(args.pause)
            print(
                f"epoch {epoch}: loss {loss:.4f}, rows on servers {client.num_rows()}"
            )
    dist.destroy_process_group()
