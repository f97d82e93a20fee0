"""A script of a trainer that trains, and saves every 10 steps, until it is ended."""

SCRIPT = """
import time, torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from persia_torchrec import Adagrad, EmbeddingClient, TableSettings
from persia_torchrec import recoverable, remote_sharders

dist.init_process_group("gloo")
client = EmbeddingClient.of_job()
settings = {"item": TableSettings(keeps_metadata=True)}
sharders = remote_sharders(client, Adagrad(lr=0.1), tables=settings)
tables = [EmbeddingBagConfig(1000, 4, "item", feature_names=["item"])]
model = EmbeddingBagCollection(tables=tables, device="meta")
model = DistributedModelParallel(model, sharders=sharders)
ids = torch.tensor([7, 7, 7, 8, 9, 10])
with recoverable(None, {"model": model}, client, sharders, save_steps=10) as run:
    for _ in run.skip(range(10**9)):
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.full((3,), 2))
        (model(features).values() - 1).square().mean().backward()
        run.step()
        time.sleep(0.05)
"""
