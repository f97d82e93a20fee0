"""Versions of a model, and servers that are killed, while requests come."""

import gc
import json
import shutil
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError, ServerError
from persia_torchrec.persia.predict_requests import features_of
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.serving.models import ServedModel, Version, following_checkpoints
from persia_torchrec.serving.predictor import DenseModel, Predictor
from persia_torchrec.serving.statistics import Statistics
from persia_torchrec.table import TableSpec
from tests.support.faults import kill
from tests.support.item_model import Sum, version_of
from tests.support.load import Load
from tests.support.local_job import batch_of
from tests.support.one_feature import FEATURE
from tests.support.processes import DEADLINE_S, Processes, wait_until
from tests.support.served_model import EVALUATION
from tests.support.servers import ids_of
from tests.support.serving_process import Serving, ask

pytestmark = pytest.mark.slow

BODY = EVALUATION[0].to_bytes()


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    """Return a folder with two checkpoints of one number of rows, the second copied."""
    folder = tmp_path_factory.mktemp("run")
    first = folder / "checkpoint-00000001"
    (source,) = trained.checkpoint.glob("checkpoint-*")
    shutil.copytree(source, first)
    shutil.copy(trained.checkpoint / "jit_dense.pt", first)
    return folder


@pytest.fixture(scope="module")
def serving(run, trained, tmp_path_factory, request):
    """Return a server of two models, the second from the checkpoint of the training.

    The parameter is how many embedding servers each has; by default the rows are in
    the process itself.
    """
    shutil.copy(trained.embedding_config, run / "embedding_config.yml")
    models = "--models", f"adult={run}", f"other={trained.checkpoint}"
    config = (
        *("--embedding-config", str(trained.embedding_config)),
        *("--num-servers", str(getattr(request, "param", 1))),
    )
    with Processes(tmp_path_factory.mktemp("serving")) as processes:
        serving = Serving(processes, *models, *config)
        yield serving
        serving.process.send(signal.SIGTERM)
        assert serving.process.status() == 0


def load(serving, trained, model="adult", **how):
    """Return requests to a model of the server."""
    path = f"/predict/{model}"
    return Load(serving.address, BODY, trained.expected[0], path=path, **how)


def servers_of(pid, checkpoint=""):
    """Return the embedding servers of a process, which any of its threads started.

    With ``checkpoint`` those alone that serve one below it.
    """
    files = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for file in files for child in file.read_text().split()]
    commands = {p: Path(f"/proc/{p}/cmdline").read_bytes() for p in pids}
    words = b"persia_torchrec.server", str(checkpoint).encode()
    return [p for p in pids if all(word in commands[p] for word in words)]


def ask_status(serving, path):
    """Return the status of a probe."""
    try:
        with urllib.request.urlopen(serving.address + path, timeout=DEADLINE_S) as it:
            return it.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def versions(serving):
    return ask(serving.address, "/v2/models/adult")[1]["versions"]


def change(serving, what, version=None):
    parameters = {} if version is None else {"version": version}
    path = f"/v2/repository/models/adult/{what}"
    return ask(serving.address, path, json.dumps({"parameters": parameters}).encode())


@pytest.mark.multiprocess
def test_a_version_is_loaded_and_unloaded_without_a_failed_request(
    serving, run, trained
):
    assert versions(serving) == ["1"]
    shutil.copytree(run / "checkpoint-00000001", run / "checkpoint-00000002")
    with load(serving, trained) as sent:
        assert change(serving, "load") == (200, {"version": "2"})
        assert versions(serving) == ["1", "2"]
        assert change(serving, "unload", "1")[0] == 200
        assert versions(serving) == ["2"]
        assert change(serving, "load", "1") == (200, {"version": "1"})  # roll back
        assert change(serving, "unload", "2")[0] == 200
    assert sent.statuses == {200: sent.sent}
    assert sent.wrong == 0
    status, answer = change(serving, "load", "7")
    assert status == 404
    assert "complete checkpoint of this number" in answer["error"]
    assert change(serving, "unload", "7")[0] == 404
    assert versions(serving) == ["1"]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("serving", [2], indirect=True)
def test_a_server_that_is_killed_under_load_is_started_again(serving, run, trained):
    server, _ = servers_of(serving.process.pid, run)
    with (
        load(serving, trained, rate=300, num_threads=30) as sent,
        load(serving, trained, "other") as others,
    ):
        wait_until(lambda: sent.statuses[200] > 0, "it predicts")
        kill(server)
        wait_until(lambda: sent.statuses[503] > 0, "a 503")
        seen = sent.statuses[200]
        wait_until(lambda: sent.statuses[200] > seen, "it predicts again")
        assert ask_status(serving, "/healthz") == 200
    assert sent.statuses.total() == sent.sent  # each request has an answer
    assert set(sent.statuses) == {200, 503}
    assert sent.wrong == others.wrong == 0
    assert others.statuses == {200: others.sent}  # its rows are on another server
    wait_until(lambda: ask_status(serving, "/readyz") == 200, "it is ready")
    assert serving.process.output().count("starting it again") == 1


class Bias(nn.Module):
    """Predicts a number for each sample."""

    def __init__(self, bias) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, non_id_tensors, embeddings):
        return embeddings[0].sum(1, keepdim=True) + self.bias


def test_a_later_checkpoint_is_loaded_with_its_rows_and_the_previous_one_leaves(
    servers, caplog
):
    closed, newest = [], ["1"]

    def open_version(number):
        number = number or "1"
        if number == "3":
            raise CheckpointError("checkpoint 3 cannot be read")
        client = servers.client(servers.start(1))
        client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
        client.write("item", ids_of(7), np.full((1, 2), float(number), np.float32))
        reader = SlotsReader(SlotsLookup(client, [FEATURE]))
        model = DenseModel(Bias(10 * int(number)), f"run/checkpoint-{number}/m.pt")
        return Version(Predictor(reader, model), lambda: closed.append(number))

    models = ServedModel("adult", open_version)
    models.load()

    def predicted():
        with models.using() as version:
            batch = features_of(batch_of([7], requires_grad=False))
            return models.predict(version, batch).output.item()

    assert predicted() == 12.0  # rows and dense model of checkpoint 1
    with following_checkpoints(models, lambda: newest[-1], poll_s=0.01):
        newest.append("2")
        wait_until(lambda: closed == ["1"], "the previous version is closed")
        assert models.versions() == ["2"]
        assert predicted() == 24.0
        newest.append("3")
        wait_until(
            lambda: "keeping the previous version" in caplog.text, "it is logged"
        )
        assert predicted() == 24.0
    models.close()
    assert closed == ["1", "2"]
    assert not models.health()["ready"]


def test_what_a_request_has_loaded_stays_until_a_later_checkpoint(servers):
    asked, newest = [0], ["2"]
    client = servers.client(servers.start(1))
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])

    def open_version(number):
        reader = SlotsReader(SlotsLookup(client, [FEATURE]))
        return Version(Predictor(reader, DenseModel(Bias(1), path_of(number))))

    def path_of(number):
        return f"run/checkpoint-{number or newest[-1]}/m.pt"

    def ask_newest():
        asked.append(asked[-1] + 1)
        return newest[-1]

    def have_asked_twice():
        num = asked[-1]
        wait_until(lambda: asked[-1] > num + 1, "it looks for later checkpoints")

    model = ServedModel("adult", open_version)
    model.load()
    with following_checkpoints(model, ask_newest, poll_s=0.01):
        model.load("1")
        model.unload("2")
        have_asked_twice()
        assert model.versions() == ["1"]
        newest.append("3")
        wait_until(lambda: model.versions() == ["3"], "the later one is loaded")
        model.unload()
        newest.append("4")
        have_asked_twice()
        assert model.versions() == []


@pytest.mark.slow
def test_while_embeddings_are_away_each_sample_gets_the_default_answer(servers, caplog):
    running = servers.start(1)
    client = servers.client(running)
    client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
    reader = SlotsReader(SlotsLookup(client, [FEATURE]))
    reader.set_lookup_timeout(0.2)
    models = ServedModel("adult", default_answer=0.25)
    for name in (b"degraded_samples", b"short_circuited_requests"):
        zero = b'persia_serving_%b_total{model="adult"} 0.0' % name
        assert zero in models.statistics.exposition()
    models.add(Version(Predictor(reader, DenseModel(Bias(1), "m.pt"))))

    def predicted():
        with models.using() as version:
            batch = features_of(batch_of([7], [], requires_grad=False))
            return models.predict(version, batch)

    answer = predicted()
    assert (answer.output.tolist(), answer.is_degraded) == ([[1.0], [1.0]], False)
    missed = b'persia_serving_ids_without_row{model="adult"} 1.0'  # 7 was never trained
    wait_until(lambda: missed in models.statistics.exposition(), "it is counted")
    running[0].stop()
    for _ in range(2):
        answer = predicted()
        assert (answer.output.tolist(), answer.is_degraded) == ([[0.25]] * 2, True)
    assert caplog.text.count("model adult answers 0.25") == 1
    assert (
        b'persia_serving_degraded_samples_total{model="adult"} 4.0'
        in models.statistics.exposition()
    )
    wait_until(lambda: not models.health()["ready"], "it is not ready")
    models.default_answer = None
    with pytest.raises(ServerError):
        predicted()
    models.close()


def test_a_hundred_loads_and_unloads_leave_nothing(servers):
    def open_version(number):
        client = servers.client(running)
        version = version_of(client, 1.5, f"run/checkpoint-{number}/m.pt")
        version.close = client.close
        return version

    def load_and_unload(number):
        model.load(str(number))
        with model.using() as version:
            batch = features_of(batch_of([7], requires_grad=False))
            assert model.predict(version, batch).output.item() == 3.0
        model.unload()

    def left():
        files = len(list(Path("/proc/self/fd").iterdir()))
        num_series = sum(len(one.samples) for one in statistics.registry.collect())
        return files, threading.active_count(), num_series

    running, statistics = servers.start(1), Statistics()
    model = ServedModel("adult", open_version, statistics)
    gc.collect()
    gc.disable()  # what it would free stays until then, and may be much
    try:
        load_and_unload(1)
        before = left()
        for number in range(2, 102):
            load_and_unload(number)

        def is_closed():
            return all(now <= then for now, then in zip(left(), before, strict=True))

        wait_until(is_closed, "all are closed", details=lambda: f"{before}: {left()}")
    finally:
        gc.enable()
    model.close()


class Unable(nn.Module):
    """Predicts for several samples only."""

    def forward(self, non_id_tensors, embeddings):
        if len(embeddings[0]) == 1:
            raise RuntimeError("several samples are needed")
        return embeddings[0].sum(1, keepdim=True)


def test_a_version_predicts_for_made_up_samples_before_it_is_current(servers, caplog):
    closed, misses, modules = [], {}, {"1": Unable(), "2": Sum(), "3": Unable()}

    def open_version(number):
        client = servers.client(servers.start(1))
        version = version_of(client, 1.5)
        misses[number] = client.counters()[0]["misses"]
        signature = version.predictor.model.signature
        path = f"run/checkpoint-{number}/m.pt"
        version.predictor.use(DenseModel(modules[number], path, signature))
        version.close = lambda: closed.append(number)
        return version

    model = ServedModel("adult", open_version)
    model.load("1")  # no other can answer
    assert "several samples are needed" in caplog.text
    assert model.versions() == ["1"]
    model.load("2")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-3/m\.pt must predict for ma"
    ):
        model.load("3")
    assert (model.versions(), closed) == (["1", "2"], ["3"])
    assert model.health()["version"] == "2"
    assert model.health()["ids_without_row"] == misses["2"]
    metrics = model.statistics.exposition()
    assert b"persia_serving_samples_total{" not in metrics
    assert b"persia_serving_predict_seconds_count{" not in metrics
    model.close()
