"""Predictions follow a training: its rows by increments, its model by checkpoints."""

import contextlib
import re
import urllib.request
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.ctx import InferCtx, eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.persia.predict_requests import DECODERS
from persia_torchrec.persia.slots_reader import open_slots
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.serving.app import describe_answer
from persia_torchrec.serving.embeddings import host_checkpoint
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.models import Models, Prediction, Version
from persia_torchrec.serving.predictor import Predictor, following_model, load_model
from tests.support.inference_job import InferenceJob, address_of
from tests.support.local_job import Batches, LocalJob
from tests.support.processes import DEADLINE_S, wait_until
from tests.support.served_model import (
    CONFIG,
    EVALUATION,
    Dense,
    are_close,
    batch_of_numbers,
)
from tests.support.serving_process import ask, predict_all


def train(ctx, seeds):
    training = [batch_of_numbers(seed) for seed in seeds]
    for batch in DataLoader(Batches(training), embedding_staleness=1):
        output, labels = ctx.forward(batch)
        ctx.backward(nn.functional.binary_cross_entropy(output, labels[0]))


def evaluate(model):
    model.eval()
    with eval_ctx() as evaluation, torch.no_grad():
        outputs = [
            evaluation.forward(batch)[0].flatten().tolist()
            for batch in DataLoader(Batches(EVALUATION))
        ]
    model.train()
    return outputs


@pytest.mark.multiprocess
def test_an_inference_job_follows_a_training_by_its_global_config(
    processes, tmp_path, monkeypatch
):
    torch.manual_seed(0)
    logs, run = tmp_path / "increments", tmp_path / "run"
    writing = {"increments_dir": str(logs), "increments_interval_s": 0.05}
    training = LocalJob(tmp_path, monkeypatch, CONFIG, **writing)
    settings = {"embedding_config": EmbeddingConfig((-1, 1))}
    with training, training.train_ctx(Dense(), Adagrad(0.5), **settings) as ctx:
        train(ctx, range(3))
        ctx.dump_embedding(str(run))
        job = InferenceJob(
            *(processes, run, training.config_path),
            num_servers=3,
            capacity=1000,
            increments_dir=logs,
        )
        for shard in range(3):
            job.server(shard)
        worker = job.worker()
        train(ctx, range(3, 8))
        of_job = InferCtx([worker.address for worker in training.workers])
        with of_job, InferCtx([address_of(worker)]) as infer:
            infer.wait_for_serving(DEADLINE_S)
            wait_until(
                lambda: embeddings_of(infer) == embeddings_of(of_job),
                "the embeddings are those of the training",
            )
            with contextlib.closing(RemoteWorkers([address_of(worker)])) as workers:
                following = workers.hello().following  # what /health has of it
            assert following.increments > 0
            assert 0 <= following.delay_s < DEADLINE_S
            assert not following.lost
            rows, of_training = infer.get_embedding_size(), of_job.get_embedding_size()
            assert (len(rows), sum(rows)) == (3, sum(of_training))


def embeddings_of(infer):
    """Return the embeddings of the evaluation, as bytes."""
    found = []
    for batch in EVALUATION:
        looked_up = infer.get_embedding_from_bytes(batch.to_bytes())
        tensors = infer.prepare_features(looked_up)[1]
        found += [tensor.numpy().tobytes() for tensor in tensors]
    return found


@pytest.mark.multiprocess
def test_predictions_follow_a_training(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Dense()
    logs, run = str(tmp_path / "increments"), str(tmp_path / "run")
    writing = {"increments_dir": logs, "increments_interval_s": 0.05}
    job = LocalJob(tmp_path, monkeypatch, CONFIG, **writing)
    settings = {"embedding_config": EmbeddingConfig((-1, 1))}
    with job, job.train_ctx(model, Adagrad(0.5), **settings) as ctx:
        train(ctx, range(5))
        ctx.dump_checkpoint(run, with_jit_model=True)
        first = evaluate(model)
        schema = load_embedding_config(job.config_path)
        opened = partial(open_slots, schema=schema)
        hosting = host_checkpoint(run, opened, num_servers=2, increments_dir=logs)
        with hosting as reader, contextlib.ExitStack() as stack:
            predictor = Predictor(reader, load_model(run, "jit_dense.pt"))
            stack.enter_context(following_model(predictor, run, "jit_dense.pt", 0.1))
            models = Models()
            stack.callback(models.close)
            served = models.add("model")
            served.add(Version(predictor))
            server = PredictionServer(models, HttpConfig(), DECODERS)
            stack.callback(server.close)
            assert are_close(predict_all(server.address, EVALUATION), first)

            with torch.no_grad():  # only the rows train
                state = {k: v.clone() for k, v in model.state_dict().items()}
            train(ctx, range(5, 10))
            model.load_state_dict(state)
            second = evaluate(model)
            assert not are_close(first, second)
            wait_until(
                lambda: are_close(predict_all(server.address, EVALUATION), second),
                "the rows are those of the training",
            )
            wait_until(  # it is as it was a moment ago
                lambda: ask(server.address, "/health")[1]["following"]["increments"],
                "the increments are in the health",
            )
            following = ask(server.address, "/health")[1]["following"]
            assert not following["lost"]
            assert 0 <= following["delay_s"] < DEADLINE_S

            def delay_s():
                return ask(server.address, "/health")[1]["following"]["delay_s"]

            with served.using() as version:
                said = describe_answer(
                    served, version, Prediction(np.zeros(1, np.float32))
                )
            assert 0 <= said["rows_age_s"] < DEADLINE_S

            later_s = delay_s() + 0.2
            wait_until(lambda: delay_s() > later_s, "the rows become older")
            with urllib.request.urlopen(f"{server.address}/metrics") as answer:
                metrics = answer.read().decode()
            (num,) = re.findall(
                r"rows_age_seconds_count{model=\"model\"} (\S+)", metrics
            )
            assert float(num) >= 1

            train(ctx, range(10, 15))
            ctx.dump_checkpoint(run, with_jit_model=True)
            third = evaluate(model)
            assert not are_close(second, third)
            wait_until(
                lambda: are_close(predict_all(server.address, EVALUATION), third),
                "the model is that of the latest checkpoint",
            )
            assert predictor.model.path.endswith("checkpoint-00000002/jit_dense.pt")
