"""What a trainer of a TorchRec model tells a metrics gateway."""

import math

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding.trainer_metrics import LatestLoss, TrainerMetrics
from tests.support.remote_job import META, kjt_of

LABELS = {"role": "nn_worker", "instance": "rep_2", "job": "seven", "job_id": "seven"}


@pytest.fixture
def in_job(monkeypatch):
    """This process is rank 2 of a job with a gateway."""
    TrainerMetrics.end()  # forgets the models of tests before
    variables = {"PERSIA_STORE_PORT": "1", "PERSIA_JOB_ID": "seven", "RANK": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TrainerMetrics, "loss", LatestLoss())
    monkeypatch.setattr(TrainerMetrics, "last_step", None)  # of a run of tests before
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
    kinds = {n: kind for n, kind in push.kinds.items() if kind != "counter"}
    assert kinds == {"persia_step": "gauge", "persia_step_seconds": "histogram"}
    assert summary.num_lookups == 3
    assert push.values["persia_lookups_total"] == 3 + summary.num_lookups
    assert push.values["persia_gradients_total"] == 3 * 3 + summary.num_gradients == 18
    assert push.values["persia_gradients_refused_total"] == 3
    assert push.values["persia_gradients_missed_total"] == 0


def test_steps_samples_waits_and_a_loss_that_was_told_are_read(job, gateway, in_job):
    model, _ = model_of(job, "first")
    train(model, 3)
    model(kjt_of({"x": [[1], [2, 3]]})).values().sum().backward()
    TrainerMetrics.loss.tell(torch.tensor([0.25], requires_grad=True))
    TrainerMetrics.end()
    values = gateway.pushes()[-1].values
    assert values["persia_step"] == 4
    assert values["persia_step_seconds_count"] == 3
    assert values["persia_samples_total"] == 4 * 2
    assert values["persia_row_wait_seconds_total"] > 0
    assert values["persia_loss"] == 0.25


def test_each_trainer_counts_a_batch_of_two_collections_once(job, gateway, in_job):
    first, _ = model_of(job, "first")
    second, _ = model_of(job, "second")
    train(first, 3)
    train(second, 2)
    TrainerMetrics.end()
    values = gateway.pushes()[-1].values
    assert (values["persia_step"], values["persia_samples_total"]) == (3, 6)
    assert values["persia_lookups_total"] == 5


def test_a_loss_has_one_element():
    loss = LatestLoss()
    assert loss.read() is None
    loss.tell(3)
    assert loss.read() == 3.0
    loss.tell(torch.tensor(0.5, dtype=torch.bfloat16))
    assert loss.read() == 0.5
    loss.tell(torch.tensor([[math.nan]]))
    assert math.isnan(loss.read())
    with pytest.raises(ConfigError, match=r"one element. Received: the shape \(2,\)"):
        loss.tell(torch.zeros(2))


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


def test_the_last_step_follows_from_the_length_of_a_pass(monkeypatch):
    monkeypatch.setattr(TrainerMetrics, "last_step", 3)
    TrainerMetrics.expect(range(100), 250, 30)  # 30 of this pass are trained
    assert TrainerMetrics.last_step == 320
    for unknown in (iter(range(9)), torch.utils.data.DataLoader(_Stream())):
        TrainerMetrics.expect(unknown, 250, 30)
        assert TrainerMetrics.last_step is None


class _Stream(torch.utils.data.IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return iter(())


def test_a_status_has_the_ids_of_each_feature_and_the_last_step(
    job, in_job, monkeypatch
):
    monkeypatch.setattr(TrainerMetrics, "last_step", 40)
    model, _ = model_of(job, "item")
    train(model, 2)
    model.eval()(kjt_of({"x": [[1]]})).values()
    status = TrainerMetrics._figures()
    assert status["batches_evaluated"] == 1
    assert status["ids/item/x"] == 6
    assert status["last_step"] == 40
    read = {(one.name, one.feature): one.value for one in TrainerMetrics._read()}
    assert read["persia_feature_ids", "x"] == 6
