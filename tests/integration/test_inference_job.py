"""``job_type: Infer``: servers and workers that serve a checkpoint, as processes."""

import re
import signal
import sys

import numpy as np
import pytest
import torch

from persia_torchrec.ctx import InferCtx
from persia_torchrec.persia import launcher
from persia_torchrec.persia.worker import __main__ as worker
from persia_torchrec.server import __main__ as server
from persia_torchrec.serving.__main__ import main
from tests.support.inference_job import (
    InferenceJob,
    address_of,
    comes_back,
    kill_below,
)
from tests.support.load import Load
from tests.support.repository import ROOT
from tests.support.served_model import EVALUATION, are_close
from tests.support.servers import DEADLINE_S
from tests.support.serving_process import Serving, ask, predict, predict_all

pytestmark = pytest.mark.multiprocess


def embeddings_of(infer):
    """Return the embeddings of the evaluation, as they come in a served batch."""
    found = []
    for batch in EVALUATION:
        looked_up = infer.get_embedding_from_bytes(batch.to_bytes())
        found += infer.prepare_features(looked_up)[1]
    return found


@pytest.mark.parametrize("num_servers", [1, 3])
def test_embeddings_equal_those_of_the_evaluation_in_the_job(
    processes, trained, num_servers
):
    with InferCtx(trained.workers) as of_job:
        expected = embeddings_of(of_job)
    job = InferenceJob(
        processes,
        trained.checkpoint,
        trained.embedding_config,
        num_servers=num_servers,
    )
    worker = job.worker()  # it waits for its servers
    servers = [job.server(shard) for shard in range(num_servers)]
    for running, port in zip(servers, job.ports, strict=True):
        assert address_of(running) == f"tcp://127.0.0.1:{port}"
    with InferCtx([address_of(worker)]) as infer:
        infer.wait_for_serving(DEADLINE_S)
        assert sum(infer.get_embedding_size()) == trained.num_rows
        found = embeddings_of(infer)
    for tensor, of_evaluation in zip(found, expected, strict=True):
        assert torch.equal(tensor, of_evaluation)
    assert any(tensor.any() for tensor in found)
    for running in (worker, *servers):
        running.send(signal.SIGTERM)
        assert running.status() == 0


def test_persias_commands_start_it_without_a_coordinator(processes, trained):
    job = InferenceJob(
        processes, trained.checkpoint, trained.embedding_config, num_servers=2
    )
    env = {
        "PERSIA_EMBEDDING_CONFIG": str(trained.embedding_config),
        "PERSIA_GLOBAL_CONFIG": str(job.path),
        "PYTHONPATH": str(ROOT),
    }
    for shard, port in enumerate(job.ports):
        number = ["--replica-index", str(shard), "--replica-size", "2"]
        command = ["embedding-parameter-server", "--port", str(port), *number]
        processes.start(f"server-{shard}", launcher.main, command, env=env)
    command = ["embedding-worker", "--port", "0"]
    worker = processes.start("worker", launcher.main, command, env=env)
    with InferCtx([address_of(worker)]) as infer, InferCtx(trained.workers) as of_job:
        assert sum(infer.get_embedding_size()) == trained.num_rows
        for tensor, expected in zip(
            embeddings_of(infer), embeddings_of(of_job), strict=True
        ):
            assert torch.equal(tensor, expected)


def test_predictions_over_http_equal_those_of_the_evaluation(
    processes, trained, monkeypatch, capfd
):
    job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
    job.server(0)
    worker = address_of(job.worker())
    arguments = ["--checkpoint", str(trained.checkpoint), "--workers", worker]
    serving = Serving(processes, *arguments)
    for batch, expected in zip(EVALUATION, trained.expected, strict=True):
        predictions = predict(serving.address, batch.to_bytes())
        np.testing.assert_allclose(predictions, expected, atol=1e-6)
    command = ["serving", *arguments, "--follow-model"]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 1  # rows that stay would be joined to a later dense model
    assert "servers must follow the training" in capfd.readouterr().err


def test_a_worker_reconnects_to_a_restarted_server(processes, trained):
    job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
    killed = job.server(0)
    with InferCtx([address_of(job.worker())]) as infer:
        expected = embeddings_of(infer)
        killed.send(signal.SIGKILL)
        killed.process.join(DEADLINE_S)
        job.server(0)
        infer.wait_for_serving(DEADLINE_S)
        found = embeddings_of(infer)
    for tensor, before in zip(found, expected, strict=True):
        assert torch.equal(tensor, before)


def test_sigterm_ends_a_worker_that_waits_for_servers(processes, trained):
    job = InferenceJob(
        processes, trained.checkpoint, trained.embedding_config, num_servers=2
    )
    running, worker = job.server(0), job.worker()
    address_of(running)
    worker.has_printed("waiting for the embedding servers: ")
    worker.send(signal.SIGTERM)
    assert worker.status() == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "{slots_config: {item: {dim: 5}, last: {dim: 3}}}",
            "'item' must have the dim",
        ),
        pytest.param(
            "{slots_config: {other: {dim: 4}}}",
            "'other' must have its table on the ser",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_worker_with_other_slots_ends_with_the_reason(
    processes, trained, tmp_path, config, message
):
    job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
    job.server(0)
    (tmp_path / "other.yml").write_text(config)
    worker = job.worker(config=tmp_path / "other.yml")
    assert worker.status() == 1
    assert message in worker.output()


def test_a_worker_with_too_few_servers_ends_with_the_reason(processes, trained):
    job = InferenceJob(
        processes, trained.checkpoint, trained.embedding_config, num_servers=2
    )
    servers = [job.server(shard) for shard in range(2)]
    for running in servers:
        address_of(running)
    one = [f"127.0.0.1:{job.ports[0]}"]
    job.path.write_text(job.text(one, trained.checkpoint))
    worker = job.worker()
    assert worker.status() == 1
    assert re.search("must be shard 0 of 1.*shard 0 of 2", worker.output())


@pytest.mark.parametrize(
    ("servers", "arguments", "message"),
    [
        (["127.0.0.1:1"], ["--num-shards", "2"], "1 addresses, and 2 servers"),
        (["127.0.0.1:1"], [], "must be a checkpoint, or hold one that is complete"),
        (
            ["127.0.0.1:1"],
            ["--checkpoint", "run"],
            "--checkpoint cannot be combined with",
        ),
    ],
)
def test_a_server_with_invalid_settings_ends_with_the_reason(
    tmp_path, monkeypatch, capfd, servers, arguments, message
):
    path = tmp_path / "global_config.yml"
    path.write_text(InferenceJob.text(servers, tmp_path / "absent"))
    command = ["server", "--shard", "0", "--global-config", str(path), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    assert server.main() == 1
    assert message in capfd.readouterr().err


def test_a_worker_with_contradictory_settings_ends_with_the_reason(
    tmp_path, monkeypatch, capfd
):
    path = tmp_path / "global_config.yml"
    path.write_text(InferenceJob.text(["127.0.0.1:1"], tmp_path))
    command = ["worker", "--global-config", str(path), "--learn-tables"]
    monkeypatch.setattr(sys, "argv", command)
    assert worker.main() == 1
    assert "--learn-tables cannot be combined with" in capfd.readouterr().err


@pytest.mark.long
def test_the_others_answer_while_a_role_is_killed_and_started_again(processes, trained):
    job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
    server = job.supervised_server()
    workers = [job.supervised_worker(index) for index in range(2)]
    serving = Serving(
        processes,
        *("--checkpoint", str(trained.checkpoint), "--patience-s", str(DEADLINE_S)),
        *("--workers", *map(address_of, workers)),
    )

    def answers():
        return are_close(predict_all(serving.address, EVALUATION), trained.expected)

    load = Load(serving.address, EVALUATION[0].to_bytes(), trained.expected[0])
    with load:
        for killed in (*workers, server):  # each worker alone, when the other is back
            assert answers()
            kill_below(killed)
            assert answers()
            assert ask(serving.address, "/health")[1]["ready"]
            comes_back(killed)
        assert answers()
    assert load.statuses == {200: load.sent}
    assert load.wrong == 0
