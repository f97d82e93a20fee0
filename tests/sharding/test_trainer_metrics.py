"""What a trainer of a TorchRec model tells a metrics gateway."""

import math

import pytest
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from tests.support.remote_job import META, kjt_of

LABELS = {"role": "nn_worker", "instance": "rep_2", "job": "seven", "job_id": "seven"}


@pytest.fixture
def in_job(monkeypatch):
    """This process is rank 2 of a job with a gateway."""
    variables = {"PERSIA_STORE_PORT": "1", "PERSIA_JOB_ID": "seven", "RANK": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield
    TrainerMetrics.end()


def model_of(job, name):
    """Shard a model of one table, with a sharder of its own."""
    config = EmbeddingBagConfig(50, 4, name, feature_names=["x"])
    bags = EmbeddingBagCollection(tables=[config], device=META)
    sharder = RemoteEmbeddingBagCollectionSharder(job.client, SGD(0.5))
    return job.shard(bags, [sharder]), sharder


def train(model, num, factor=1.0):
    for _ in range(num):
        output = model(kjt_of({"x": [[1], [2, 3]]})).values()
        (output.sum() * factor).backward()


def test_all_models_of_a_trainer_are_pushed_together(job, gateway, in_job):
    first, _ = model_of(job, "first")
    second, sharder = model_of(job, "second")
    train(first, 3)
    train(second, 2)
    train(second, 1, math.nan)
    summary = sharder.summary()
    TrainerMetrics.end()
    (push,) = gateway.pushes()
    assert push.labels == {**LABELS, "ip_addr": "127.0.0.1"}
    assert set(push.kinds.values()) == {"counter"}
    assert summary.num_lookups == 3
    assert push.values["persia_lookups_total"] == 3 + summary.num_lookups
    assert push.values["persia_gradients_total"] == 3 * 3 + summary.num_gradients == 18
    assert push.values["persia_gradients_refused_total"] == 3
    assert push.values["persia_gradients_missed_total"] == 0


def test_counters_do_not_fall_when_a_model_is_dropped(job, gateway, in_job):
    model, sharder = model_of(job, "first")
    train(model, 3)
    sharder.flush()
    model.module.pipeline.close()
    del model, sharder
    job._models.clear()
    train(model_of(job, "second")[0], 1)
    TrainerMetrics.end()
    assert gateway.pushes(**LABELS)[-1].values["persia_lookups_total"] == 4


def test_batches_that_a_loss_scale_skipped_are_pushed(job, gateway, in_job):
    _, sharder = model_of(job, "first")
    _, other = model_of(job, "second")
    sharder.remote_tables.count_skipped(is_skipped=True)
    sharder.remote_tables.count_skipped(is_skipped=False)
    other.remote_tables.count_skipped(is_skipped=True)
    TrainerMetrics.end()
    assert gateway.pushes()[-1].values["persia_batches_skipped_total"] == 2


@pytest.mark.parametrize("lacks", ["PERSIA_STORE_PORT", "PERSIA_METRICS_GATEWAY_ADDR"])
def test_nothing_is_pushed_outside_of_a_job_or_without_a_gateway(
    job, gateway, in_job, monkeypatch, lacks
):
    monkeypatch.delenv(lacks)
    train(model_of(job, "first")[0], 1)
    TrainerMetrics.end()
    assert gateway.pushes() == []


def test_the_settings_equal_those_of_the_global_config(
    job, gateway, in_job, monkeypatch, tmp_path
):
    path = tmp_path / "global_config.yml"
    path.write_text("common_config: {metrics_config: {job_name: mine}}")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(path))
    model_of(job, "first")
    TrainerMetrics.end()
    labels = gateway.pushes()[-1].labels
    assert (labels["job"], labels["job_id"]) == ("mine", "seven")
    path.write_text("common_config: {metrics_config: {enable_metrics: false}}")
    model_of(job, "second")
    TrainerMetrics.end()
    assert len(gateway.pushes()) == 1
