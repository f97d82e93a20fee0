"""A model that counts how often each sample is trained, and one that knows the order.

Of the table ``x`` servers count: SGD with a rate of 1 and a gradient of 1 for each
occurrence of an id, which tells a sample and its pass. Rows of ``y`` and the dense half
follow from all batches before, in their order.
"""

from typing import Any

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from persia_torchrec import (
    SGD,
    Constant,
    EmbeddingClient,
    TableSettings,
    remote_sharders,
)
from tests.support.resumed_loops import ids_of

LOOPS = "plain", "TrainPipelineSparseDist"
META = torch.device("meta")


class Net(torch.nn.Module):
    """Looks up the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(1000, 4, name, feature_names=[name])
                for name in ("x", "y")
            ],
            device=META,
        )
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.bags(batch)
        out = self.dense(found["y"]).tanh()
        return 0.1 * out.sum() - found["x"].sum(), out


class Training:
    """The model, and what trains it batch by batch."""

    def __init__(self, client: EmbeddingClient, loop: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._client = client
        self.sharders = remote_sharders(
            client,
            SGD(lr=1.0),
            staleness=int(loop != "plain"),
            gradient_division=False,  # each trainer counts its samples
            tables={"x": TableSettings(initializer=Constant(0.0))},
        )
        self.model = DistributedModelParallel(
            Net(),
            sharders=self.sharders,
            # Static graphs break where data end unevenly, as those of a queue do.
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
        )
        self.optimizer = torch.optim.SGD(self.model.module.dense.parameters(), 0.1)
        self._loop = loop

    def steps(self, batches: Any) -> Any:
        """Yield after each step."""
        if self._loop != "plain":
            pipeline = TrainPipelineSparseDist(
                self.model, self.optimizer, torch.device("cpu")
            )
            while True:
                try:
                    pipeline.progress(batches)
                except StopIteration:
                    return
                yield
        for batch in batches:
            self.optimizer.zero_grad()
            self.model(batch)[0].backward()
            self.optimizer.step()
            yield

    def counts(self, num_ids: int) -> np.ndarray:
        """Return how often each id was trained, by gradients that are applied."""
        ids = np.arange(num_ids, dtype=np.uint64)
        return self._client.read("x", ids)[:, 0].round().astype(int)

    def weights(self, num_samples: int) -> np.ndarray:
        """Return what follows from the order of batches, in one line."""
        rows = self._client.read("y", np.arange(num_samples, dtype=np.uint64))
        dense = [
            p.detach().numpy().ravel() for p in self.model.module.dense.parameters()
        ]
        return np.concatenate([rows.ravel(), *dense])


def to_batch(samples: Any, first_id: int) -> KeyedJaggedTensor:
    """Return a batch of some samples, with the id in ``x`` of sample 0."""
    numbers = torch.tensor(ids_of(samples))
    return KeyedJaggedTensor(
        ["x", "y"],
        torch.cat([numbers + first_id, numbers]),
        lengths=torch.ones(2 * len(numbers), dtype=torch.int32),
    )


def told(counts: np.ndarray, expected: int = 1) -> str:
    """Return what became of the samples, in the words of the table."""
    too_often, too_seldom = (counts > expected).sum(), (counts < expected).sum()
    if too_often or too_seldom:
        return f"WRONG: {too_often} twice, {too_seldom} never"
    return "once"
