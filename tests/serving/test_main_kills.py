"""Parts of a serving job are killed under load; every request is counted."""

import os
import re
import shutil
import signal
import time
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from tests.support.faults import kill
from tests.support.inference_job import (
    InferenceJob,
    address_of,
    comes_back,
    kill_below,
)
from tests.support.load import NO_ANSWER, Load
from tests.support.local_job import Batches, LocalJob
from tests.support.ports import draw_port
from tests.support.processes import (
    DEADLINE_S,
    children_of,
    is_running,
    wait_until,
)
from tests.support.served_model import (
    CONFIG,
    EVALUATION,
    Dense,
    batch_of_numbers,
)
from tests.support.serving_process import Serving, ask

RATE, NUM_THREADS, ENOUGH = 300, 60, 300
STOPPED_S = 3.0  # three times what a lookup may take
ALLOWED = {
    ("server", signal.SIGSTOP): {200, 503},
    ("server", signal.SIGTERM): {200},  # it ends with the predictor only
    ("worker", signal.SIGSTOP): {200, 503},
    ("worker", signal.SIGTERM): {200},  # the other one answers
    ("predictor", signal.SIGSTOP): {200},  # later
    ("predictor", signal.SIGTERM): {200, NO_ANSWER},
}
"""What requests may be answered while a part of the job is stopped, or told to end."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def load(serving, trained):
    body, expected = EVALUATION[0].to_bytes(), trained.expected[0]
    return Load(serving.address, body, expected, rate=RATE, num_threads=NUM_THREADS)


def answers(sent):
    """Wait until many more requests are answered."""
    seen = sent.statuses[200]
    wait_until(lambda: sent.statuses[200] >= seen + ENOUGH, "it predicts")


def test_a_killed_server_or_worker_costs_no_request_while_they_are_waited_for(
    processes, trained
):
    job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
    server = job.supervised_server()
    workers = [job.supervised_worker(index) for index in range(2)]
    serving = Serving(
        processes,
        *("--checkpoint", str(trained.checkpoint), "--patience-s", str(DEADLINE_S)),
        *("--workers", *map(address_of, workers)),
    )
    with load(serving, trained) as sent:
        for killed in (*workers, server):
            answers(sent)
            kill_below(killed)
            comes_back(killed)
        answers(sent)
    assert sent.statuses == {200: sent.sent}
    assert sent.wrong == 0


def test_a_killed_predictor_answers_again_when_it_is_started_again(processes, trained):
    words = (
        *("--checkpoint", str(trained.checkpoint), "--port", str(draw_port())),
        *("--embedding-config", str(trained.embedding_config)),
        *("--num-servers", "2"),
    )
    serving = Serving(processes, *words)
    servers = children_of(serving.process.pid)
    assert len(servers) == 2
    with load(serving, trained) as sent:
        answers(sent)
        serving.process.send(signal.SIGKILL)
        wait_until(lambda: sent.statuses[NO_ANSWER], "requests have no answer")
        wait_until(lambda: not any(map(is_running, servers)), "its servers end with it")
        again = Serving(processes, *words, name="again")
        assert again.address == serving.address
        answers(sent)
    assert sent.statuses.total() == sent.sent
    assert set(sent.statuses) == {200, NO_ANSWER}
    assert sent.wrong == 0


def statuses_by_metrics(serving):
    """Return how many requests over HTTP the server has counted, by status."""
    with urllib.request.urlopen(serving.address + "/metrics", timeout=DEADLINE_S) as of:
        text = of.read().decode()
    line = r'^persia_serving_requests_total{protocol="http",status="(\d+)"} (\S+)$'
    return {int(s): float(n) for s, n in re.findall(line, text, re.MULTILINE)}


@pytest.mark.parametrize("part", ["server", "worker", "predictor"])
@pytest.mark.parametrize("signal_", [signal.SIGSTOP, signal.SIGTERM])
def test_client_and_metrics_count_alike_whatever_part_is_stopped_or_ended(
    processes, trained, part, signal_
):
    words = ["--checkpoint", str(trained.checkpoint), "--lookup-timeout-s", "1"]
    if part == "worker":
        job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
        job.supervised_server()
        workers = [job.supervised_worker(index) for index in range(2)]
        words += ["--workers", *map(address_of, workers)]
        (below,) = children_of(workers[0].pid)
        (pid,) = children_of(below)
    else:
        words += ["--embedding-config", str(trained.embedding_config)]
        words += ["--num-servers", "2"]
    serving = Serving(processes, *words)
    if part == "server":
        pid = children_of(serving.process.pid)[0]
    elif part == "predictor":
        pid = serving.process.pid
    body, expected = EVALUATION[0].to_bytes(), trained.expected[0]
    with Load(serving.address, body, expected, rate=100, num_threads=60) as sent:
        answers(sent)
        os.kill(pid, signal_)
        if signal_ == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        if (part, signal_) == ("predictor", signal.SIGTERM):
            wait_until(lambda: sent.statuses[NO_ANSWER], "it listens no more")
            assert serving.process.status() == 0
        else:
            answers(sent)
    assert sent.statuses.total() == sent.sent
    assert sent.wrong == 0
    assert set(sent.statuses) <= ALLOWED[part, signal_]
    if (part, signal_) != ("predictor", signal.SIGTERM):
        assert statuses_by_metrics(serving) == dict(sent.statuses)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Return a folder with two checkpoints, its config, and predictions of each."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    model, predictions = Dense(), []
    with pytest.MonkeyPatch.context() as patch:
        job = LocalJob(folder, patch, CONFIG)
        settings = {"embedding_config": EmbeddingConfig((-1, 1))}
        with job, job.train_ctx(model, Adagrad(0.5), **settings) as ctx:
            for first in (0, 10):
                training = [batch_of_numbers(seed) for seed in range(first, first + 10)]
                for batch in DataLoader(Batches(training), embedding_staleness=1):
                    output, labels = ctx.forward(batch)
                    ctx.backward(nn.functional.binary_cross_entropy(output, labels[0]))
                ctx.dump_checkpoint(str(folder / "run"), with_jit_model=True)
                model.eval()
                with eval_ctx() as evaluation, torch.no_grad():
                    (batch,) = DataLoader(Batches(EVALUATION[:1]))
                    predictions.append(evaluation.forward(batch)[0].flatten().tolist())
                model.train()
        assert not np.allclose(*predictions, atol=1e-3)
        yield folder / "run", job.config_path, predictions


ORDERS = {
    "kill, then a checkpoint": ["kill 1", "arrive"],
    "a checkpoint, then kill": ["arrive", "kill 1"],
    "kill of the one that loads": ["arrive", "kill 2"],
    "kill of both": ["arrive", "kill 2", "kill 1"],
    "kill of the one that answers": ["arrive", "switch", "kill 2"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_each_answer_is_of_one_checkpoint_in_any_order_of_events(
    processes, two_checkpoints, tmp_path, order
):
    run, config, predictions = two_checkpoints
    served = tmp_path / "served"
    shutil.copytree(run / "checkpoint-00000001", served / "checkpoint-00000001")
    shutil.copytree(run / "checkpoint-00000002", tmp_path / "later")
    words = (
        *("--checkpoint", str(served), "--embedding-config", str(config)),
        *("--num-servers", "2"),
    )
    serving = Serving(processes, *words, "--follow-model")
    pid = serving.process.pid
    first = set(children_of(pid))

    def later():
        return set(children_of(pid)) - first

    def happens(event):
        match event:
            case "kill 1":
                kill_all(first)
            case "arrive":
                (tmp_path / "later").rename(served / "checkpoint-00000002")
            case "kill 2":
                wait_until(later, "servers of the later one are started")
                kill_all(later())
            case "switch":
                wait_until(lambda: sent.found[1], "it predicts by the later one")

    body = EVALUATION[0].to_bytes()
    with Load(serving.address, body, *predictions) as sent:
        wait_until(lambda: sent.found[0], "it predicts")
        for event in ORDERS[order]:
            happens(event)
        seen = sent.found[1]
        wait_until(lambda: sent.found[1] > seen + 10, "it predicts by the later one")
        wait_until(lambda: versions(serving) == ["2"], "the previous one is unloaded")
    assert sent.wrong == 0
    assert sent.statuses.total() == sent.sent
    assert set(sent.statuses) <= {200, 503}


def kill_all(pids):
    """Kill processes; one of another kind, as a compiler, may be gone meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            kill(pid)


def versions(serving):
    return ask(serving.address, "/v2/models/model")[1]["versions"]
