"""What a trainer tells a metrics gateway, and what it does where that is not there."""

import math
import socket
import time

import pytest

from persia_torchrec.data import DataLoader
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.sharding.trainer_metrics import TrainerMetrics
from tests.support.gateway import Gateway
from tests.support.local_job import Batches, SumOfEmbeddings, batch_of
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

BATCHES = [batch_of([1, 2], [number]) for number in range(20)]
LABELS = {"role": "nn_worker", "job": "adult", "instance": "rep_0"}
CONFIG = "common_config: {{metrics_config: {{job_name: adult, {settings}}}}}"


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Write the global config, and name a gateway."""

    def configure(gateway, settings="push_interval_seconds: 1"):
        path = tmp_path / "global_config.yml"
        path.write_text(CONFIG.format(settings=settings))
        monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(path))
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway)

    return configure


@pytest.fixture
def gateway(configure):
    with Gateway() as gateway:
        configure(gateway.address)
        yield gateway


def train(ctx, batches=BATCHES, slowly_s=0.0):
    """Take a step with each batch; it comes no faster than that."""

    def slow():
        for batch in batches:
            time.sleep(slowly_s)
            yield batch

    losses = []
    for batch in DataLoader(Batches(slow), embedding_staleness=1):
        output, _ = ctx.forward(batch)
        losses.append(ctx.backward(output.square().sum()).item())
    return losses


def test_the_times_of_a_training_are_pushed(job, gateway):
    with job.train_ctx() as ctx:
        train(ctx, slowly_s=0.01)
    last = gateway.wait(**LABELS)[-1]
    assert last.labels["ip_addr"] == "127.0.0.1"
    assert 0 < last.values["forward_client_time_cost_sec"] < DEADLINE_S
    assert 0 < last.values["backward_client_time_cost_sec"] < DEADLINE_S
    waits = last.values["get_train_batch_time_cost_more_than_1ms_sec"]
    assert 0.001 < waits < DEADLINE_S
    assert last.values["forward_error"] == 0
    assert last.values["persia_gradients_missed_total"] == 0
    assert last.values["persia_gradients_refused_total"] == 0
    assert last.values["persia_lookups_total"] == len(BATCHES)
    # Its tables are those of no TorchRec loop, whose pushes would replace these.
    assert all("forward_error" in push.values for push in gateway.pushes(**LABELS))
    assert TrainerMetrics._stop is None


def test_rejected_gradients_are_pushed_as_a_metric(job, gateway):
    class Diverges(SumOfEmbeddings):
        def forward(self, non_id_tensors, embeddings):
            return super().forward(non_id_tensors, embeddings) * math.nan

    with job.train_ctx(Diverges()) as ctx:
        train(ctx, [batch_of([1, 2])])
    last = gateway.wait(**LABELS)[-1]
    assert last.values["persia_gradients_refused_total"] == 2
    assert last.values["persia_gradients_refused_total"] == job.total(
        "gradients_refused"
    )


def test_lookups_that_fail_are_counted_and_the_failure_ends_no_push(job, gateway):
    ctx = job.train_ctx()
    for server in job.servers:
        server.stop()
    with pytest.raises(PersiaError), ctx:
        train(ctx)
    last = gateway.wait(**LABELS)[-1]
    assert last.values["forward_error"] >= 1


def test_an_evaluation_is_no_training_batch(job, gateway):
    with job.train_ctx() as ctx:
        evaluated = [batch_of([1], requires_grad=False)] * 3
        for batch in DataLoader(Batches(evaluated)):
            ctx.forward(batch)
    last = gateway.wait(**LABELS)[-1]
    assert "get_train_batch_time_cost_more_than_1ms_sec" not in last.values
    assert last.values["forward_client_time_cost_sec"] > 0


def losses_of(job):
    """Train a model from scratch; return the losses, and the time it took."""
    job.client.clear()
    began_s = time.monotonic()
    with job.train_ctx(SumOfEmbeddings(), lr=0.01) as ctx:
        losses = train(ctx)
    return losses, time.monotonic() - began_s


def test_metrics_change_no_loss(job, gateway, monkeypatch):
    pushed, _ = losses_of(job)
    assert gateway.pushes(**LABELS)
    monkeypatch.delenv("PERSIA_METRICS_GATEWAY_ADDR")
    assert losses_of(job)[0] == pushed


@pytest.mark.parametrize("hangs", [True, False])
def test_a_gateway_that_does_not_work_neither_ends_nor_slows_a_training(
    job, configure, monkeypatch, caplog, hangs
):
    reference, without_s = losses_of(job)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if hangs:
            server.listen()
        configure(f"127.0.0.1:{server.getsockname()[1]}")
        losses, with_s = losses_of(job)
        # The last push is not waited for until its time limit.
        wait_until(lambda: "pushing metrics to 127.0.0.1" in caplog.text, "it is said")
    assert losses == reference
    assert with_s < without_s + DEADLINE_S


def test_metrics_can_be_disabled(job, gateway, configure):
    configure(gateway.address, "enable_metrics: false")
    with job.train_ctx() as ctx:
        train(ctx)
    assert gateway.pushes() == []


def test_an_invalid_gateway_is_rejected_before_anything_begins(job, configure):
    configure("http://gateway:9091")
    with pytest.raises(ConfigError, match="PERSIA_METRICS_GATEWAY_ADDR must be"):
        job.train_ctx()
