"""A TorchRec script of a job: it finds the servers, trains, and prints what came out.

With ``--dies`` its first process is killed in the middle, and before it a server.
"""

import sys

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import Adam, EmbeddingClient, recoverable, remote_sharders
from persia_torchrec.env import num_group_restarts
from persia_torchrec.job.member import JobMember
from persia_torchrec.job.member_record import MemberRecord
from tests.support.faults import kill, kill_self

NUM_STEPS, SAVE_STEPS, SERVER_DIES_AT, TRAINER_DIES_AT = 200, 80, 60, 150


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(1000, 8, "item", feature_names=["item"])]
        self.items = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.dense = torch.nn.Linear(8, 1)

    def forward(self, ids):
        return self.dense(self.items(ids).values())


def batches():
    generator = torch.Generator().manual_seed(7)
    for _ in range(NUM_STEPS):
        ids = torch.randint(2**62, 2**62 + 300, (64,), generator=generator)
        lengths = torch.full((32,), 2, dtype=torch.int32)
        label = torch.rand(32, 1, generator=generator)
        yield KeyedJaggedTensor(["item"], ids, lengths=lengths), label


def train(client, path, dies=False):
    """Train all batches; return the sum of the losses, and of the rows."""
    torch.manual_seed(3)
    sharders = remote_sharders(client, Adam(0.01), staleness=1)
    model = DistributedModelParallel(Model(), sharders=sharders)
    optimizer = torch.optim.Adam(model.module.dense.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer, "total": torch.zeros(())}
    saves = {"interval_s": 0, "save_steps": SAVE_STEPS, "keep": 1}
    with recoverable(path, state, client, sharders, **saves) as run:
        print(f"resumed from {run.resumed_from}")
        for step, (ids, label) in enumerate(run.skip(list(batches()))):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(ids), label)
            loss.backward()
            optimizer.step()
            state["total"] = state["total"] + loss.detach()
            run.step()
            if dies:
                die(step)
        assert run.num_steps == NUM_STEPS
        run.save()
    sharders.flush()
    rows = sum(float(block.weights.sum()) for block in client.export("item"))
    return float(state["total"]), rows


def die(step):
    """Kill the first server, and later this process."""
    if step == SERVER_DIES_AT:
        server = MemberRecord(JobMember.current.book, "server", 0).process()
        kill(server.pid)
    if step == TRAINER_DIES_AT:
        kill_self()


def main():
    dist.init_process_group("gloo")
    client = EmbeddingClient.of_job()
    dies = "--dies" in sys.argv and num_group_restarts() == 0
    total, rows = train(client, None, dies)
    print(f"of {client.num_servers} servers: losses {total:.6f}, rows {rows:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
