"""TorchRec's train pipelines over tables on the servers, on the CPU.

At staleness 0 and 1 every one of them trains as a plain loop over local tables does.
"""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    utils,
)
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TorchCompileConfig,
    TrainPipelineFusedSparseDist,
    TrainPipelinePT2,
    TrainPipelineSparseDistLite,
)
from torchrec.pt2.utils import kjt_for_pt2_tracing

from persia_torchrec import (
    SGD,
    RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder,
)
from tests.support.pipelined import (
    LR,
    NUM_IDS,
    TABLES,
    Remote,
    Staged,
    make_batches,
    plain_loop,
    run,
    staged_with_prefetch,
    start_model,
    train_locally,
    with_a_stream,
)
from tests.support.remote_job import CPU, META, RemoteJob

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

# What it changes in torch, and does not change back.
SET_BY_PT2 = {
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,
    "skip_torchrec": False,
}

PIPELINES = [
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
    pytest.param(
        with_a_stream(TrainPipelineFusedSparseDist),
        marks=pytest.mark.skipif(
            "record_event" in inspect.getsource(utils),
            reason="this TorchRec orders streams by events, which the CPU lacks",
        ),
    ),
    with_a_stream(PrefetchTrainPipelineSparseDist),
    Staged,
    staged_with_prefetch,
]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_without_staleness_a_pipeline_trains_as_local_tables_do(
    job, pipeline, staleness
):
    batches = make_batches(12)
    expected, local = train_locally(batches)
    remote = Remote(job, staleness)
    losses = run(pipeline(remote.model, remote.dense, CPU), batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)
    assert job.total("open_batches") == 0
    assert {c["open_batches_max"] for c in job.client.counters()} == {1}
    assert remote.module.pipeline.summary().mean_staleness == 0


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_with_staleness_a_pipeline_trains_each_batch_once_within_the_bound(
    job, pipeline
):
    remote = Remote(job, staleness=3)
    losses = run(pipeline(remote.model, remote.dense, CPU), make_batches(20))
    remote.module.pipeline.flush()
    assert len(losses) == 20
    # To both servers; a staged pipeline pulls its first batch twice, and drops one.
    assert job.total("requests_update") in {2 * 20, 2 * 21}
    assert max(c["open_batches_max"] for c in job.client.counters()) <= 3
    assert job.total("open_batches") == 0
    summary = remote.module.pipeline.summary()
    assert summary.mean_staleness <= summary.max_lacking == 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_pipeline_that_compiles_the_model_trains_as_local_tables_do(job, staleness):
    torch.compiler.reset()
    compiled = []

    def recorded(graph, inputs):
        compiled.append(str(graph.graph))
        return graph.forward

    def traceable(batch):  # as TrainPipelinePT2 does with batches that it knows
        return replace(batch, first=kjt_for_pt2_tracing(batch.first))

    batches = make_batches(8)
    expected, local = train_locally(batches)
    remote = Remote(job, staleness)
    settings = TorchCompileConfig(backend=recorded, compile_on_iter=2)
    with torch._dynamo.config.patch(SET_BY_PT2):
        pipeline = TrainPipelinePT2(
            remote.model, remote.dense, CPU, settings, input_transformer=traceable
        )
        losses = run(pipeline, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)
    assert any("linear" in graph for graph in compiled)
    assert job.total("open_batches") == 0


class BagsAndSequences(nn.Module):
    """Two collections, one of them not pooled."""

    def __init__(self):
        super().__init__()
        sequence = EmbeddingConfig(NUM_IDS, 4, name="seen", feature_names=["user"])
        self.bags = EmbeddingBagCollection(tables=TABLES, device=META)
        self.sequences = EmbeddingCollection(tables=[sequence], device=META)
        self.over = nn.Linear(12 + 4, 1)

    def forward(self, batch):
        pooled = self.bags(batch.first).values()
        seen = self.sequences(batch.second)["user"].values().mean(dim=0)
        inputs = torch.cat([pooled, seen.expand(pooled.shape[0], 4)], dim=1)
        loss = (self.over(inputs).squeeze(1) - batch.labels).square().mean()
        return loss, loss.detach()


def two_kinds(job, staleness):
    """Return a model of bags and sequences, its dense optimizer, and its sharders."""
    torch.manual_seed(0)
    kinds = RemoteEmbeddingBagCollectionSharder, RemoteEmbeddingCollectionSharder
    sharders = [kind(job.client, SGD(LR), staleness=staleness) for kind in kinds]
    model = job.shard(BagsAndSequences(), sharders)
    dense = torch.optim.SGD(model.module.over.parameters(), lr=LR)
    return model, dense, sharders


@pytest.mark.parametrize("staleness", [0, 1])
def test_collections_of_two_kinds_share_a_pipeline(staleness):
    losses, rows = [], []
    for pipeline in (TrainPipelineBase, TrainPipelineSparseDist):
        with RemoteJob() as job:
            model, dense, sharders = two_kinds(job, staleness)
            losses.append(run(pipeline(model, dense, CPU), make_batches(12)))
            for sharder in sharders:
                sharder.flush()
            rows.append(job.read("seen", range(NUM_IDS)))
            assert job.total("open_batches") == 0
    assert losses[0] == losses[1]
    assert np.array_equal(*rows)
    assert losses[0][-1] != losses[0][0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_pipeline_looks_and_changes_nothing(job, staleness):
    batches = make_batches(10)
    _, local = train_locally(batches[:4])
    remote = Remote(job, staleness)
    plain_loop(remote, batches[:4])
    remote.assert_learnt_what(local)
    remote.model.eval()
    local.eval()
    num_updates = job.total("requests_update")
    losses = run(EvalPipelineSparseDist(remote.model, remote.dense, CPU), batches)
    with torch.no_grad():
        expected = [local(batch)[1].item() for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)
    assert job.total("requests_update") == num_updates


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_in_the_middle_of_a_pipeline_changes_nothing(job, staleness):
    batches = make_batches(12)
    expected, local = train_locally(batches)
    remote = Remote(job, staleness)
    pipeline = TrainPipelineSparseDist(remote.model, remote.dense, CPU)
    iterator = iter(batches)
    losses = [float(pipeline.progress(iterator)) for _ in range(5)]
    model = pipeline.detach()
    model.eval()
    with torch.no_grad():
        for batch in batches:  # the pull of the sixth is on its way all the while
            model(batch)
    model.train()
    pipeline.attach(model)
    losses += run(pipeline, iterator)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)


@pytest.mark.parametrize("pipeline", [TrainPipelineBase, TrainPipelineSparseDist])
def test_gradients_are_accumulated_as_with_fused_local_tables(job, pipeline):
    batches = make_batches(11)
    expected, local = train_locally(batches, num_accumulated=3)
    remote = Remote(job)
    accumulating = GradientAccumulationWrapper(
        pipeline(remote.model, remote.dense, CPU),
        remote.dense,
        remote.model,
        GradientAccumulationConfig(num_steps=3),
    )
    losses = run(accumulating, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_collection_may_be_called_twice_in_a_forward_pass(job, staleness):
    batches = make_batches(12)
    expected, local = train_locally(batches, num_lookups=2)
    remote = Remote(job, staleness, num_lookups=2)
    np.testing.assert_allclose(plain_loop(remote, batches), expected, rtol=1e-5)
    remote.assert_learnt_what(local)


def test_calls_of_a_step_may_exceed_the_bound_that_holds_between_steps(job):
    remote = Remote(job, staleness=3, num_lookups=2)
    assert len(plain_loop(remote, make_batches(12))) == 12
    remote.module.pipeline.flush()
    assert max(c["open_batches_max"] for c in job.client.counters()) <= 3
    assert job.total("requests_update") == 2 * 2 * 12


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_losses_of_several_batches_may_share_a_backward_pass(job, staleness):
    batches = make_batches(4)
    local, remote = start_model(), Remote(job, staleness)
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    for model, dense in ((local, optimizer), (remote.model, remote.dense)):
        losses = [model(batch)[0] for batch in batches]
        torch.stack(losses).sum().backward()
        dense.step()
    remote.assert_learnt_what(local)
    assert torch.allclose(remote.model.module.over.weight, local.over.weight)


def steps_outside(remote, pipeline, batches):
    """Train some batches between detach() and attach(); return their losses."""
    model = pipeline.detach()
    losses = []
    for batch in batches:
        remote.dense.zero_grad()
        loss, detached = model(batch)
        loss.backward()
        remote.dense.step()
        losses.append(detached.item())
    pipeline.attach(model)
    return losses


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        TrainPipelineSparseDist,
        TrainPipelineSparseDistLite,
        with_a_stream(PrefetchTrainPipelineSparseDist),
    ],
)
def test_steps_between_detach_and_attach_train_as_a_plain_loop(job, kind, staleness):
    batches = make_batches(12)
    expected, local = train_locally(batches)
    remote = Remote(job, staleness)
    pipeline = kind(remote.model, remote.dense, CPU)
    iterator = iter(batches[:2] + batches[4:6] + batches[7:])
    losses = [float(pipeline.progress(iterator)) for _ in range(2)]
    losses += steps_outside(remote, pipeline, batches[2:4])
    losses += [float(pipeline.progress(iterator)) for _ in range(2)]
    losses += steps_outside(remote, pipeline, batches[6:7])
    losses += run(pipeline, iterator)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    remote.assert_learnt_what(local)
    assert job.total("open_batches") == 0
    assert max(c["open_batches_max"] for c in job.client.counters()) == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_collections_of_two_kinds_share_steps_outside_of_a_pipeline(staleness):
    batches, losses = make_batches(8), []
    for num_outside in (0, 2):
        with RemoteJob() as job:
            model, dense, sharders = two_kinds(job, staleness)
            pipeline = TrainPipelineSparseDist(model, dense, CPU)
            outside = batches[3 : 3 + num_outside]
            iterator = iter(batches[:3] + batches[3 + num_outside :])
            losses.append([float(pipeline.progress(iterator)) for _ in range(3)])
            remote = SimpleNamespace(dense=dense)
            losses[-1] += steps_outside(remote, pipeline, outside)
            losses[-1] += run(pipeline, iterator)
            for sharder in sharders:
                sharder.flush()
            assert job.total("open_batches") == 0
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
