"""Rows of a checkpoint in this process are those that servers of it give."""

import gc
import threading
import time
import weakref
from contextlib import ExitStack, closing
from functools import partial

import pytest
from torch import nn

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.catalog import find_checkpoint
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.persia.batch import IDTypeFeature, PersiaBatch
from persia_torchrec.persia.predict_requests import DECODERS, features_of
from persia_torchrec.persia.slots_reader import open_slots
from persia_torchrec.routing.route import IdGroup, unique_ids
from persia_torchrec.serving.batching import Inputs
from persia_torchrec.serving.embeddings import host_checkpoint
from persia_torchrec.serving.http_server import HttpConfig, PredictionServer
from persia_torchrec.serving.local_rows import LocalRows
from persia_torchrec.serving.models import Models, Version
from persia_torchrec.serving.predictor import DenseModel, Predictor
from tests.support.processes import wait_until
from tests.support.served_model import EVALUATION, batch_of_numbers
from tests.support.servers import ids_of
from tests.support.serving_process import ask


def embeddings_of(reader, batches):
    """Return the embeddings of batches, as bytes."""
    pulled = [
        reader.look_up_ids(Inputs.of(features_of(batch)).ids) for batch in batches
    ]
    tensors = [tensor for one in pulled for tensor in reader.to_tensors(one).values()]
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.multiprocess
def test_embeddings_are_bit_for_bit_those_of_servers(trained):
    schema = load_embedding_config(trained.embedding_config)
    opened = partial(open_slots, schema=schema)
    unknown = [IDTypeFeature(name, [ids_of(998, 999)]) for name in ("item", "last")]
    batches = [*EVALUATION, PersiaBatch(unknown, requires_grad=False)]
    batches += [batch_of_numbers(seed, 40) for seed in range(20, 24)]
    found = []
    for num_servers in (1, 2):  # in this process, and on servers
        hosting = host_checkpoint(trained.checkpoint, opened, num_servers=num_servers)
        with hosting as reader:
            state = reader.hello()
            embeddings = embeddings_of(reader, batches)
            misses = reader.hello().misses
        assert len(state.num_rows) == num_servers
        assert state.is_fixed
        assert misses > 0
        found.append((embeddings, sum(state.num_rows), misses))
    assert found[0] == found[1]


def test_the_rows_are_read_only_and_leave_with_a_close(trained):
    rows = LocalRows(find_checkpoint(trained.checkpoint))
    [table] = [spec for spec in rows.learn_tables() if spec.name == "item"]
    asked = [IdGroup.of("item", unique_ids(ids_of(1, 2, 3)))]
    [[found]] = rows.begin_pull(asked, None).pieces()
    assert found.shape == (3, table.dim)
    assert rows.counters()[0]["misses"] == 3  # ids of slots have a prefix
    with pytest.raises(ConfigError, match="in this process cannot be trained"):
        rows.begin_pull(asked, BatchNumber(1, 1))
    store = weakref.ref(rows._store)
    gc.disable()
    try:
        rows.close()
        assert store() is None  # its memory is free at once
    finally:
        gc.enable()
    rows.close()
    assert rows.counters()[0]["rows"] == 0
    with pytest.raises(ConfigError, match="Table 'item' is unknown"):
        rows.begin_pull(asked, None)


def test_a_damaged_checkpoint_is_an_error(trained, tmp_path):
    (source,) = trained.checkpoint.glob("checkpoint-*")
    damaged = tmp_path / source.name
    damaged.mkdir()
    for file in source.iterdir():
        data = file.read_bytes()
        (damaged / file.name).write_bytes(data[:-1] if "shard" in file.name else data)
    assert any("shard" in file.name for file in damaged.iterdir())
    with pytest.raises(CheckpointError):
        LocalRows(find_checkpoint(tmp_path))


class Noting(nn.Module):
    """Notes in which thread it predicts, and takes processor time."""

    def __init__(self, seconds) -> None:
        super().__init__()
        self.seconds, self.threads = seconds, []

    def forward(self, non_id_tensors, embeddings):
        self.threads.append(threading.current_thread().name)
        end_s = time.thread_time() + self.seconds
        while time.thread_time() < end_s:
            pass
        return embeddings[0].sum(1, keepdim=True)


@pytest.mark.parametrize("seconds", [0.0, 2 * timeouts.MODEL_QUICK_S])
def test_what_is_quick_is_predicted_between_other_requests(trained, seconds):
    schema, noting = load_embedding_config(trained.embedding_config), Noting(seconds)
    with ExitStack() as stack:
        rows = stack.enter_context(
            closing(LocalRows(find_checkpoint(trained.checkpoint)))
        )
        predictor = Predictor(open_slots(rows, schema), DenseModel(noting, "model"))
        models = stack.enter_context(closing(Models()))
        models.add("model").add(Version(predictor))
        server = PredictionServer(models, HttpConfig(), DECODERS)
        stack.enter_context(closing(server))

        def in_pool():
            status, _ = ask(server.address, "/predict", EVALUATION[0].to_bytes())
            assert status == 200
            return noting.threads[-1].startswith("predict")

        assert in_pool()  # how long it takes is not known yet
        if seconds:
            assert all(in_pool() for _ in range(3))
        else:  # the first ones may take longer, as they compile
            wait_until(lambda: not in_pool(), "it is predicted in the event loop")
