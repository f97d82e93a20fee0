"""Train a model that continues where it was, however its job has ended.

torchx run -s local_cwd persia.train_torchrec --script "examples/long.py --steps 3000"
    --servers 2 --run_dir runs/long
"""

import argparse
import time

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import Adagrad, EmbeddingClient, recoverable, remote_sharders


class Batches:
    """Batches that follow from their number, with the place in them."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __iter__(self):
        for number in range(self.num):
            draws = torch.Generator().manual_seed(number)
            ids = torch.randint(100_000, (512,), generator=draws)
            lengths = torch.ones(512, dtype=torch.int32)
            yield KeyedJaggedTensor(["item"], ids, lengths=lengths), (ids % 2).float()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(100_000, 16, "item", feature_names=["item"])
        self.embeddings = EmbeddingBagCollection(tables=[table], device="meta")
        self.over = torch.nn.Linear(16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.embeddings(ids).values()).squeeze(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    client = EmbeddingClient.of_job()
    sharders = remote_sharders(client, Adagrad(lr=0.1), staleness=1)
    model = DistributedModelParallel(Model(), sharders=sharders)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with recoverable(None, state, client, sharders) as run:
        for _ in run.epochs(args.epochs):
            for ids, labels in run.skip(Batches(args.steps)):
                loss = torch.nn.BCEWithLogitsLoss()(model(ids), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
                if run.num_steps % 500 == 0:
                    rows = sum(client.num_rows())
                    print(f"step {run.num_steps}: loss {loss.item():.4f}, {rows} rows")
                time.sleep(args.pause)
    dist.destroy_process_group()
