"""What each of two trainers does that resume a run of one, in its own process."""

from pathlib import Path

import numpy as np
import torch

from persia_torchrec.errors import CheckpointError
from persia_torchrec.training.checkpoint import load_checkpoint, save_checkpoint
from tests.support.groups import trainer_of_group
from tests.support.two_trainers import ADAM, Model, Trainer, batches, loss_of

NUM_STEPS = 6


class Resuming(Trainer):
    """A trainer with a dense optimizer whose state matters."""

    def __init__(self, addresses):
        super().__init__(addresses, Model, ADAM)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, seed, ranks):
        """Train on the batches of some ranks together; the loss is the mean."""
        data = [list(batches(rank, NUM_STEPS, seed)) for rank in ranks]
        for step in range(NUM_STEPS):
            loss = loss_of(self.model, [of_rank[step] for of_rank in data])
            self.optimizer.zero_grad()
            (loss / len(data)).backward()
            self.optimizer.step()

    def save(self, path, *flushing):
        sharders = [self.sharder, *flushing]
        return save_checkpoint(path, self.state, self.client, sharders)

    def load(self, path):
        return load_checkpoint(path, self.state, self.client)


class Broken:
    """What cannot send its updates."""

    def flush(self):
        raise OSError("the wire is cut")


def run_trainer(rank, addresses, folder: Path) -> None:
    """Be one of two trainers; leave what was learnt in the folder."""
    group = trainer_of_group(rank, 2, folder / "process group")
    with group, Resuming(addresses) as trainer:
        trainer.load(folder / "of one")
        trainer.train(1, [rank])
        error = "none"
        try:
            trainer.save(folder / "of two", *([Broken()] if rank else []))
        except CheckpointError as exc:
            error = str(exc)
        saved = trainer.save(folder / "of two")
        learnt = trainer.learnt()
    np.savez(folder / f"{rank}.npz", error=error, path=saved.path, **learnt)
