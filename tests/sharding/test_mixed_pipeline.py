"""TorchRec's train pipelines drive a mixed collection as they drive their own."""

from inspect import signature

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from persia_torchrec import MixedSharder, Placement, RemoteEmbeddingBagCollectionSharder
from tests.sharding.mixed_model import (
    ADAGRAD,
    EACH_ITS_TYPE,
    FUSED,
    LOCAL,
    CpuSharder,
    Model,
    batches,
    dense_optimizer,
)
from tests.support.models import Batch
from tests.support.remote_job import CPU, RemoteJob, shard

NUM_STEPS = 12


class WithLoss(nn.Module):
    """What a train pipeline drives: a batch in, loss and output out."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch: Batch):
        logits = self.model(batch.ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits


def losses_of(pipeline_type, **settings):
    """Train by a pipeline; return the losses, and the modules that it pipelined."""
    with RemoteJob() as job:
        remote = RemoteEmbeddingBagCollectionSharder(job.client, ADAGRAD)
        sharder = MixedSharder(remote, Placement(local=LOCAL), CpuSharder(FUSED))
        torch.manual_seed(0)
        model = shard(WithLoss(), sharder, constraints=EACH_ITS_TYPE)
        job.adopt(model)
        pipeline = pipeline_type(model, dense_optimizer(model), CPU, **settings)
        data = iter([Batch(*batch) for batch in batches(NUM_STEPS)])
        outputs = [pipeline.progress(data) for _ in range(NUM_STEPS)]
        with pytest.raises(StopIteration):
            pipeline.progress(data)
        remote.flush()
        assert job.total("open_batches") == 0
        pipelined = [
            type(m).__name__ for m in getattr(pipeline, "_pipelined_modules", [])
        ]
        return [logits.detach().numpy() for logits in outputs], pipelined


@pytest.mark.slow
def test_the_sparse_pipeline_trains_as_the_plain_loop_does():
    expected, _ = losses_of(TrainPipelineBase)
    logits, pipelined = losses_of(TrainPipelineSparseDist)
    assert pipelined == ["ShardedMixedEmbeddingBagCollection"]
    np.testing.assert_array_equal(np.array(logits), np.array(expected))
    assert not np.array_equal(expected[0], expected[-1])


@pytest.mark.slow
@pytest.mark.skipif(
    "free_features_storage_early" not in signature(TrainPipelineSparseDist).parameters,
    reason="this TorchRec frees no features early",
)
def test_features_that_a_pipeline_frees_early_have_been_read():
    expected, _ = losses_of(TrainPipelineBase)
    logits, _ = losses_of(TrainPipelineSparseDist, free_features_storage_early=True)
    np.testing.assert_array_equal(np.array(logits), np.array(expected))
