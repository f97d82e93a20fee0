"""A TorchRec loop that data loader processes feed continues behind what it trained."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel

from persia_torchrec import SGD, recoverable, remote_sharders
from persia_torchrec.data import DataLoader, StreamingDataset
from persia_torchrec.persia import feed, loader
from tests.support.local_job import LocalJob, Sending, batch_of
from tests.support.processes import wait_until
from tests.support.threads import InThread

NUM_BATCHES, SAVE_STEPS, NUM_AHEAD = 20, 3, 4


def batches(index, num):
    return [batch_of([number]) for number in range(index, NUM_BATCHES, num)]


def train(job, path, num_steps, num_loaders):
    """Train some steps, with batches taken ahead; return which, and their senders."""
    sharders = remote_sharders(job.client, SGD(1.0), embedding_config=job.config_path)
    tables = [EmbeddingBagConfig(1, 4, "item", feature_names=["item"])]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DistributedModelParallel(torch.nn.Sequential(bags), sharders=sharders)
    sending, trained = Sending(), []
    data = DataLoader(StreamingDataset(50), reproducible=True, as_torchrec=True)
    saves = {"interval_s": 0, "save_steps": SAVE_STEPS}
    with recoverable(path, {"model": model}, job.client, sharders, **saves) as run:
        taken = run.skip(data)
        ahead, contexts = take_first(taken, job, sending, num_loaders)
        while ahead and len(trained) < num_steps:
            ahead += itertools.islice(taken, NUM_AHEAD - len(ahead))
            batch = ahead.pop(0)
            model(batch.sparse_features).values().sum().backward()
            trained.append(batch.batch_id)
            run.step()
    sharders.close()
    return trained, contexts


def take_first(taken, job, sending, num_loaders):
    """Start the loaders when the trainer listens, as it takes its first batch."""
    previous = job.book.address("trainer", 0)
    contexts = []

    def start():
        wait_until(
            lambda: job.book.address("trainer", 0) != previous, "a new trainer listens"
        )
        for index in range(num_loaders):
            contexts.append(job.data_ctx(index, num_loaders))
            sending.start(contexts[-1], batches(index, num_loaders))

    starting = InThread(start)
    ahead = [next(taken)]
    starting.result()
    sending.join()
    return ahead, contexts


@pytest.mark.slow
@pytest.mark.parametrize("num_loaders", [1, 2])
def test_batches_of_data_loaders_are_trained_once_along_the_history(
    tmp_path, monkeypatch, num_loaders
):
    with LocalJob(tmp_path, monkeypatch, num_workers=0) as job:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        path = tmp_path / "run"
        first, _ = train(job, path, 8, num_loaders)
        assert first == [*range(8)]
        loader.streams.clear()  # as in other processes
        feed._feeds.clear()
        # It was saved at its end; the loaders leave out what was trained by then.
        second, contexts = train(job, path, NUM_BATCHES, num_loaders)
        assert second == [*range(8, NUM_BATCHES)]
        assert sum(context._feed._num_skipped for context in contexts) == 8
        rows = job.read("item", *range(NUM_BATCHES))
        assert ((rows > -1.1) & (rows < -0.9)).all()  # each by one step
