"""A server that serves a checkpoint for inference."""

import json
import logging
import math
import re
import shutil
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec import Adam, AdmitFrequency, DynamicDim, Expiry
from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.load import Increment, ShardLoad
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import (
    CheckpointError,
    ConfigError,
    PersiaError,
    RemoteError,
)
from persia_torchrec.server import follower
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.follower import ServedCheckpoint
from persia_torchrec.table import TableSpec
from tests.server.clocks import SLICE_S, Clock
from tests.support.increments import Training
from tests.support.ports import draw_port
from tests.support.processes import wait_until
from tests.support.servers import (
    DEADLINE_S,
    RunningServer,
    ids_of,
    once_the_port_is_free,
)

pytestmark = pytest.mark.slow

ITEM = TableSpec(name="item", dim=4, optimizer=Adagrad(0.1))
NUMBER = BatchNumber(1, 0)
IDS = np.arange(40, dtype=np.uint64)


@pytest.fixture
def trained(servers, tmp_path):
    """Return the folder of a checkpoint of two servers, and the weights in it."""
    client = servers.client(servers.start(2))
    client.add_tables([ITEM])
    split = client.split(IDS)
    [rows] = client.pull([("item", split)], batch=NUMBER)
    client.outcome(client.push([("item", split)], [rows], NUMBER))
    client.checkpoints.dump(tmp_path / "run")
    return str(tmp_path / "run"), client.read("item", IDS)[:, :4]


def weights_of(client, ids=IDS):
    """Look ids up as inference does."""
    split = client.split(ids)
    [rows] = client.pull([("item", split)])
    return rows[split.inverse]


def is_ready(client):
    try:
        return bool(client.num_rows())
    except PersiaError:
        return False


def client_of(servers, running):
    """Connect to servers, and wait until they have loaded their checkpoint."""
    client = servers.client(running)
    wait_until(lambda: is_ready(client), "the servers are ready")
    client.learn_tables()
    return client


def serve(checkpoint, capacity_rows=100, **settings):
    """Return what serves a checkpoint, and the store of its rows."""
    given = {"checkpoint": checkpoint, "capacity_rows": capacity_rows, **settings}
    config = ServerConfig(**given)
    store = config.make_store()
    return ServedCheckpoint(config, store, Activity()), store


def finish(served):
    """Have a checkpoint loaded."""

    def loads():
        served.work(100)
        return not served.is_loading

    wait_until(loads, "the load ends")


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_any_number_of_servers_serves_what_was_trained(servers, trained, num_servers):
    folder, expected = trained
    client = client_of(servers, servers.start(num_servers, checkpoint=folder))
    assert weights_of(client).tobytes() == expected.tobytes()
    assert sum(client.num_rows()) == len(IDS)
    assert not weights_of(client, ids_of(1000)).any()
    assert sum(client.num_rows()) == len(IDS)


MANY = np.arange(5000, dtype=np.uint64)
ROOM = 3 * len(MANY)
COUNTED = AdmitFrequency(1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_dtype": "bf16"},
        {"optimizer": Adam(0.1)},
        {"optimizer": Adagrad(0.1, vectorwise_shared=True), "keeps_metadata": True},
        {"admission": COUNTED, "shared_rows": 3},
        {"dynamic": DynamicDim(2, period=1)},
    ],
)
def test_rows_take_no_optimizer_state(servers, tmp_path, settings):
    spec = replace(ITEM, dim=16, **settings)
    client = servers.client(servers.start(capacity_rows=ROOM))
    client.add_tables([spec])
    for step in range(3):
        number = BatchNumber(1, step)
        split = client.split(MANY[step * 500 :])
        [rows] = client.pull([("item", split)], batch=number)
        client.outcome(client.push([("item", split)], [rows], number))
    client.checkpoints.dump(tmp_path / "run")
    served, store = serve(str(tmp_path / "run"), capacity_rows=ROOM)
    finish(served)
    served.close()
    found = np.empty((len(MANY), 16), np.float32)
    store.lookup(0, MANY, found, training=False)
    assert found.tobytes() == weights_of(client, MANY).tobytes()
    assert found.any(axis=1).all()
    assert all(state.spec.optimizer.kind == "sgd" for state in store.states)
    alone = ServerConfig(capacity_rows=ROOM).make_store()
    alone.add_table(replace(spec, optimizer=SGD(0.1)))
    for _ in range(3):
        out = np.empty((len(MANY), 16), np.float32)
        alone.lookup(0, MANY, out, training=True)
    assert store.counters()["bytes"] <= alone.counters()["bytes"]
    least = 4 * (1 if "dynamic" in settings else spec.num_state_floats) * len(MANY)
    of_training = client.counters()[0]["bytes"]
    assert of_training - store.counters()["bytes"] >= least


def test_a_checkpoint_without_tables_is_served(servers, tmp_path):
    servers.client(servers.start(2)).checkpoints.dump(tmp_path / "run")
    client = client_of(servers, servers.start(1, checkpoint=str(tmp_path / "run")))
    assert client.learn_tables() == []
    assert client.num_rows() == [0]


def test_nothing_that_belongs_to_a_training_is_answered(servers, trained, tmp_path):
    folder, expected = trained
    client = client_of(servers, servers.start(2, checkpoint=folder))
    split = client.split(IDS)
    of_training = {
        "training LOOKUP": lambda: client.pull([("item", split)], batch=NUMBER),
        "UPDATE": lambda: client.outcome(
            client.push([("item", split)], [np.ones((40, 4), np.float32)], NUMBER)
        ),
        "WRITE": lambda: client.write("item", IDS, np.ones((40, 4), np.float32)),
        "ADD_TABLES": lambda: client.add_tables([ITEM]),
        "CLEAR": client.clear,
        "CHECKPOINT": lambda: client.checkpoints.load(folder),
    }
    for what, request in of_training.items():
        with pytest.raises(PersiaError, match=f"serves inference.*Received: {what}"):
            request()
    assert weights_of(client).tobytes() == expected.tobytes()
    assert client.read("item", IDS)[:, :4].tobytes() == expected.tobytes()


def test_lookups_are_rejected_until_the_rows_are_loaded(trained):
    served, _ = serve(trained[0])
    assert served.is_loading
    assert re.search(r"loads .*run.*, 0% of it .*Wait until", str(served.not_loaded()))
    finish(served)
    assert not served.is_loading
    served.close()


def test_a_client_connects_before_the_rows_are_loaded(servers, trained, monkeypatch):
    may_load, check = threading.Event(), ShardLoad.check

    def wait_and_check(load):
        assert may_load.wait(DEADLINE_S)
        check(load)

    monkeypatch.setattr(ShardLoad, "check", wait_and_check)
    client = servers.client(servers.start(checkpoint=trained[0]))
    assert client.learn_tables() == []
    with pytest.raises(RemoteError, match=r"NotReadyError: It loads .*, 0% of it"):
        client.counters()
    may_load.set()
    wait_until(lambda: is_ready(client), "the server is ready")


def test_it_polls_often_while_it_loads_and_seldom_afterwards(trained):
    served, _ = serve(trained[0])
    assert served.work(100) < 100
    finish(served)
    assert served.work(100) == 100


def test_rows_that_do_not_fit_are_left_out_with_a_warning(trained, caplog):
    served, store = serve(trained[0], capacity_rows=30)
    with caplog.at_level(logging.WARNING):
        finish(served)
    assert store.counters()["rows"] == 30
    assert "10 of the 40 rows for this server were left out" in caplog.text
    kept = np.empty((40, 4), np.float32)
    store.lookup(0, IDS, kept, training=False)
    # Of one request, the first were used first, and leave first.
    assert kept.any(axis=1).sum() == 30


def test_rows_are_as_old_as_their_checkpoint_before_the_first_increment(
    trained, tmp_path
):
    path, an_hour_ago = Path(trained[0], "checkpoint-00000001/manifest.json"), 3600
    manifest = json.loads(path.read_text())
    created = datetime.fromisoformat(manifest["created"])
    manifest["created"] = (created - timedelta(seconds=an_hour_ago)).isoformat()
    path.write_text(json.dumps(manifest))
    served, _ = serve(trained[0], increments_dir=str(tmp_path / "increments"))
    finish(served)
    age_ms = served.counters()["increment_age_ms"]
    assert an_hour_ago <= age_ms / 1000 < an_hour_ago + DEADLINE_S
    assert served.counters()["increment_delay_ms"] == 0
    wait_until(
        lambda: served.counters()["increment_age_ms"] > age_ms, "the rows become older"
    )


def test_a_checkpoint_that_is_not_there_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="must be a checkpoint, or hold one"):
        serve(str(tmp_path))


def test_a_damaged_checkpoint_ends_the_server(trained, tmp_path):
    (file,) = (tmp_path / "run").rglob("shard-00000-*.rows")
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    served, store = serve(trained[0])
    with pytest.raises(CheckpointError):
        finish(served)
    assert store.counters()["rows"] == 0


def test_a_server_that_restarts_is_the_same_to_its_clients(servers, trained):
    folder, expected = trained
    config = ServerConfig(checkpoint=folder, capacity_rows=100, port=draw_port())
    running = RunningServer(config)
    client = client_of(servers, [running])
    running.stop()
    running = once_the_port_is_free(lambda: RunningServer(config))
    try:
        wait_until(lambda: is_ready(client), "the server is back")
        assert weights_of(client).tobytes() == expected.tobytes()
    finally:
        running.stop()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_rows_of_two_checkpoints_are_never_joined(servers, trained, num_servers):
    run = Path(trained[0])
    config = ServerConfig(
        checkpoint=str(run),
        capacity_rows=100,
        num_shards=num_servers,
        shard=num_servers - 1,
        port=draw_port(),
    )
    others = []
    if num_servers == 2:
        settings = {"checkpoint": str(run), "num_shards": 2, "capacity_rows": 100}
        others = [RunningServer(ServerConfig(shard=0, **settings))]
    running = RunningServer(config)
    try:
        client = client_of(servers, [*others, running])
        running.stop()
        copy_with_date(run, DATE)
        running = once_the_port_is_free(lambda: RunningServer(config))
        wait_until(lambda: is_restarted(client), "the server is back")
        if others:
            with pytest.raises(ConfigError, match=f"must serve one .*{DATE} by"):
                servers.client([*others, running])
    finally:
        for server in (*others, running):
            server.stop()


DATE = "2020-01-01T00:00:00"


def copy_with_date(run, created):
    """Put a later checkpoint with the rows of the first one into a folder."""
    later = run / "checkpoint-00000002"
    shutil.copytree(run / "checkpoint-00000001", later)
    manifest = json.loads((later / "manifest.json").read_text())
    manifest["created"] = created
    (later / "manifest.json").write_text(json.dumps(manifest))


def is_restarted(client):
    """Whether lookups end with the error of a server that serves other rows."""
    with pytest.raises(PersiaError) as caught:
        weights_of(client)
    return re.search(f"it restarted .*serves .*{DATE}", str(caught.value))


def test_a_server_may_be_stopped_before_it_is_ready(trained):
    running = RunningServer(ServerConfig(checkpoint=trained[0], capacity_rows=100))
    running.stop()
    assert not running.is_running()


def test_a_row_of_a_served_checkpoint_does_not_expire(servers, tmp_path):
    spec = TableSpec(
        name="item",
        dim=4,
        optimizer=Adagrad(0.1),
        expiry=Expiry(min_l2_norm=1000.0, spared_steps=1),
    )
    client = servers.client(servers.start())
    client.add_tables([spec])
    client.write("item", IDS, np.ones((40, 4), np.float32))
    client.checkpoints.dump(tmp_path)
    (manifest,) = tmp_path.rglob("manifest.json")
    grown_old = json.loads(manifest.read_text())
    grown_old["tables"][0]["num_updates"] = 1000
    manifest.write_text(json.dumps(grown_old))
    serving = client_of(servers, servers.start(checkpoint=str(tmp_path)))
    client.checkpoints.load(tmp_path)
    wait_until(lambda: client.num_rows() == [0], "the rows of a training expire")
    for _ in range(64):  # a busy server takes out expired rows every 16 requests
        assert serving.num_rows() == [40]


def test_a_file_that_is_not_the_one_of_its_manifest_ends_the_server(trained, tmp_path):
    (manifest,) = (tmp_path / "run").rglob("manifest.json")
    other = json.loads(manifest.read_text())
    other["shards"][1]["checksum"] ^= 1
    manifest.write_text(json.dumps(other))
    served, store = serve(trained[0])
    with pytest.raises(
        CheckpointError, match=r"must be the file of its manifest, .*Rec"
    ):
        finish(served)
    assert store.counters()["rows"] == 0


@pytest.fixture
def behind(servers, tmp_path, caplog, monkeypatch):
    """Return what follows a training of another table than it has loaded, unread."""
    monkeypatch.setattr(follower, "POLL_S", 0.02)
    caplog.set_level(logging.INFO)
    run, logs = str(tmp_path / "run"), str(tmp_path / "increments")
    client = servers.client(servers.start())
    client.add_tables([replace(ITEM, name="other")])
    client.checkpoints.dump(run)
    config = ServerConfig(checkpoint=run, increments_dir=logs)
    served = ServedCheckpoint(config, config.make_store(), Activity())
    assert served.work(100) < 100
    wait_until(lambda: "num_rows=0" in caplog.text, "the checkpoint is read")
    training = servers.client(servers.start(increments_dir=logs))
    training.add_tables([ITEM])
    training.write("item", ids_of(1), np.ones((1, 4), np.float32))
    yield served, training, lambda: training.checkpoints.dump(run)
    served.close()


def reloads(served):
    served.work(100)
    return served.counters()["following_reloads"] == 1


def test_a_follower_continues_from_a_checkpoint_without_a_table_that_it_has(behind):
    served, *_, dump_next = behind
    finish(served)
    dump_next()
    wait_until(lambda: reloads(served), "the next checkpoint is read")


def test_a_next_checkpoint_changes_no_numbers_of_tables_that_are_not_served_yet(
    behind, monkeypatch
):
    served, _, dump_next = behind
    begins, make_store = threading.Event(), ServerConfig.make_store

    def note_and_make(config):
        begins.set()
        return make_store(config)

    monkeypatch.setattr(ServerConfig, "make_store", note_and_make)
    dump_next()
    assert begins.wait(DEADLINE_S)
    wait_until(lambda: reloads(served), "the next checkpoint is read")
    wait_until(lambda: len(served._store.states) == 2 or served.work(0), "it is served")
    assert [spec.name for spec in served._store.tables] == ["other", "item"]
    assert "following_stopped" not in served.counters()


def test_a_follower_stops_at_a_table_whose_rows_differ(behind, caplog):
    served, training, dump_next = behind
    dump_next()
    wait_until(lambda: reloads(served), "the next checkpoint is read")
    training.add_tables([replace(ITEM, name="other", dim=6)])
    training.write("other", ids_of(1), np.ones((1, 6), np.float32))

    def has_stopped():
        served.work(100)
        return served.counters().get("following_stopped") == 1

    wait_until(has_stopped, "the follower stops")
    assert not served.is_active
    assert re.search(
        r"table 'other' must have dim 4.* Received: dim 6.* "
        r"Lookups read the previous rows: restart the server\.",
        caplog.text,
    )


def test_a_follower_ends_while_it_reads_a_checkpoint(behind, caplog, monkeypatch):
    served, _, dump_next = behind
    finish(served)
    is_read, check = threading.Event(), ShardLoad.check

    def checks_once_cancelled(load):
        is_read.set()
        assert load.cancelled.wait(DEADLINE_S)
        check(load)

    monkeypatch.setattr(ShardLoad, "check", checks_once_cancelled)
    dump_next()
    assert is_read.wait(DEADLINE_S)
    num_errors = served.counters()["following_errors"]
    served.close()
    assert served.counters()["following_errors"] == num_errors
    assert "continuing from" not in caplog.text


def test_a_follower_that_is_behind_takes_more_of_a_busy_processor(
    servers, tmp_path, monkeypatch
):
    num_increments, num_read, read = 12, 0, Increment.read

    def count(*args):
        nonlocal num_read
        increment = read(*args)
        num_read += 1
        return increment

    training = Training(servers, tmp_path, num_servers=1)
    training.dump()
    for i in range(num_increments):
        training.write(i)
    monkeypatch.setattr(Increment, "read", count)
    clock = Clock()
    activity = Activity(clock.monotonic, clock.thread_time, last_s=math.inf)
    config = ServerConfig(checkpoint=training.run, increments_dir=training.logs)
    store = config.make_store()
    served = ServedCheckpoint(config, store, activity)

    def is_loaded():
        served.work(100)
        return store.states

    wait_until(is_loaded, "the checkpoint is loaded")
    clock.num_calls = num_applied = num_steps = 0
    while num_applied + 3 <= num_increments:
        least = num_applied + 3  # at most one of them is not handed over yet
        wait_until(lambda least=least: num_read >= least, "increments wait")
        clock.now_s += SLICE_S
        served.work(100)
        num_applied = served.counters()["increments_put_in"]
        num_steps += 1
    served.close()
    num_slices = clock.num_calls / 2
    assert num_steps < 2.5 * num_slices  # 5 at the share of a server that keeps up
