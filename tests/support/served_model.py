"""A small model, trained, with its checkpoint and what an evaluation gives."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from tests.support.local_job import Batches, LocalJob
from tests.support.servers import ids_of

CONFIG = """
feature_index_prefix_bit: 8
slots_config:
  item: {dim: 4, sqrt_scaling: true}
  last: {dim: 3, sample_fixed_size: 2, embedding_summation: false}
"""


class Dense(nn.Module):
    """A tower over all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(14)
        self.top = nn.Linear(14, 1)

    def forward(
        self, non_id_tensors: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        item, last = embeddings[0], embeddings[1]
        everything = [non_id_tensors[0], item, last.flatten(start_dim=1)]
        return torch.sigmoid(self.top(self.norm(torch.cat(everything, dim=1))))


def batch_of_numbers(seed: int, num: int = 5, **settings: object) -> PersiaBatch:
    """Return a batch, the same for the same seed."""
    random = np.random.default_rng(seed)

    def samples():
        sizes = random.integers(0, 4, num)
        return [ids_of(*random.integers(0, 20, size)) for size in sizes]

    dense = random.standard_normal((num, 2), dtype=np.float32)
    return PersiaBatch(
        [IDTypeFeature("item", samples()), IDTypeFeature("last", samples())],
        non_id_type_features=[NonIDTypeFeature(dense)],
        labels=[Label((dense[:, :1] > 0).astype(np.float32))],
        **settings,
    )


EVALUATION = [batch_of_numbers(seed, requires_grad=False) for seed in (100, 101)]


@dataclass
class Trained:
    """What was trained, and what an evaluation in the job gave for ``EVALUATION``."""

    checkpoint: Path
    embedding_config: Path
    expected: list[list[float]]
    num_rows: int
    workers: list[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = Dense()
    with pytest.MonkeyPatch.context() as patch:
        job = LocalJob(folder, patch, CONFIG)
        settings = {"embedding_config": EmbeddingConfig((-1, 1))}
        with job, job.train_ctx(model, Adagrad(0.5), **settings) as ctx:
            training = [batch_of_numbers(seed) for seed in range(10)]
            for batch in DataLoader(Batches(training), embedding_staleness=1):
                output, labels = ctx.forward(batch)
                ctx.backward(nn.functional.binary_cross_entropy(output, labels[0]))
            model.eval()
            with eval_ctx() as evaluation, torch.no_grad():
                expected = [
                    evaluation.forward(batch)[0].flatten().tolist()
                    for batch in DataLoader(Batches(EVALUATION))
                ]
            job.client.checkpoints.dump(folder / "run")
            run = str(folder / "run")
            ctx.dump_torch_state_dict(model, run, "jit_dense.pt", is_jit=True)
            yield Trained(
                folder / "run",
                folder / "embedding_config.yml",
                expected,
                job.num_rows(),
                [worker.address for worker in job.workers],
            )


def are_close(predicted, expected):
    return all(
        mine == pytest.approx(other, abs=1e-6)
        for mine, other in zip(predicted, expected, strict=True)
    )
