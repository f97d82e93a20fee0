"""A loop that stops at a step, and continues by itself when it is started again."""

from collections import deque
from itertools import islice

import torch
from torch.utils.data import IterableDataset

from persia_torchrec.training.recoverable import recoverable

NUM_SAMPLES = 24
BATCH_SIZE = 4
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE
NUM_PASSES = 3


class Numbers(IterableDataset):
    """Sample numbers, with a position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        first, self.position = self.position, 0
        for number in range(first, NUM_SAMPLES):
            self.position = number + 1
            yield number
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StoppedError(Exception):
    """The loop has done as many steps as it should."""


def ids_of(batch):
    """Return the sample numbers of a batch of any form."""
    if isinstance(batch, tuple):
        (batch,) = batch
    if hasattr(batch, "id_features"):
        return batch.id_features.values().tolist()
    if isinstance(batch, dict):
        batch = batch["x"]
    return torch.as_tensor(batch).reshape(-1).tolist()


def ahead_of(batches, num):
    """Yield batches, of which others were taken before, as by a train pipeline."""
    taken = deque(islice(batches, 1 + num))
    while taken:
        yield taken.popleft()
        taken += islice(batches, 1)


def train(client, folder, make, *, stop, num_ahead=0, trained=None, **settings):
    """Train all passes, or stop behind a step; return the samples of each pass.

    Args:
        client: of servers.
        folder: of checkpoints.
        make: returns what is in ``state``, and what makes a pass's batches.
        stop: the step of the training behind which it is saved and stops; 0: none.
        num_ahead: batches that are taken before they are trained.
        trained: of an earlier part, to be continued.
        settings: of ``recoverable``.
    """
    settings = {"interval_s": 0} | settings
    trained = trained or [[] for _ in range(NUM_PASSES)]
    torch.manual_seed(7)
    state, batches_of = make()
    try:
        with recoverable(folder, state, client, (), **settings) as run:
            for number in range(NUM_PASSES):
                for batch in ahead_of(run.skip(batches_of(number)), num_ahead):
                    trained[number] += ids_of(batch)
                    run.step()
                    if run.num_steps == stop:
                        run.save()
                        raise StoppedError
    except StoppedError:
        pass
    return trained


def train_in_parts(client, folder, make, stops, **given):
    """Train all passes in parts, each from the checkpoint of the one before."""
    trained = None
    for stop in (*stops, 0):
        trained = train(client, folder, make, stop=stop, trained=trained, **given)
    return trained


def once_each():
    """Return what each pass has, if each sample was trained once."""
    return [[*range(NUM_SAMPLES)]] * NUM_PASSES
