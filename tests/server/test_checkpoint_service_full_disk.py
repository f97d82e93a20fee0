"""A disk that is full, and files that are deleted while they are read or written.

A limit on the size of files that a process may write stands for a full disk.
"""

import resource
import shutil
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.catalog import find_checkpoint
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError, RemoteError
from persia_torchrec.server.__main__ import main
from persia_torchrec.server.checkpoint_service import (
    CheckpointRequest,
    CheckpointService,
)
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.follower import ServedCheckpoint
from persia_torchrec.table import TableSpec
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S

ITEM = TableSpec(name="item", dim=16, optimizer=SGD(1.0))
IDS = np.arange(2000, dtype=np.uint64)
SMALL = 20_000  # bytes: a checkpoint of these rows has more


def train(client, number):
    """Train a batch; return the weights before it."""
    batch, tables = BatchNumber(1, number), [("item", client.split(IDS))]
    [rows] = client.pull(tables, batch=batch)
    client.outcome(client.push(tables, [np.ones_like(rows)], batch))
    return rows


def limit(server, num_bytes):
    """Limit the size of files that a process writes."""
    hard = resource.RLIM_INFINITY
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


@pytest.mark.multiprocess
def test_a_full_disk_keeps_the_previous_checkpoint_and_the_training_continues(tmp_path):
    run, logs = tmp_path / "run", str(tmp_path / "increments")
    with Processes(tmp_path) as processes:
        flags = "--standalone", "--capacity", "5000", "--increments-dir", logs
        flags = *flags, "--increments-interval-s", "0.05"
        server = processes.start("server", main, flags)
        server.has_printed("ready ")
        address = server.output().partition("ready ")[2].split()[0]
        client = EmbeddingClient.connect([address], timeout_s=DEADLINE_S)
        with closing(client):
            client.add_tables([ITEM])
            before = train(client, 0)
            good = client.checkpoints.dump(run).path
            limit(server, SMALL)
            with pytest.raises(RemoteError, match=r"Could not write .*too large"):
                client.checkpoints.dump(run)
            assert find_checkpoint(run).url == good
            assert [path.name for path in run.iterdir()] == ["checkpoint-00000001"]
            train(client, 1)
            wait_until(
                lambda: client.counters()[0]["increment_logs_failed"] == 1,
                "the log of increments fails",
            )
            assert "Training continues" in server.output()
            after = train(client, 2)
            np.testing.assert_allclose(after, before - 2, atol=1e-5)
            limit(server, resource.RLIM_INFINITY)
            assert client.checkpoints.dump(run).path.endswith("checkpoint-00000002")


@pytest.mark.parametrize("tmpfs", ["size=8m"], indirect=True)
def test_full_shared_memory_fails_the_request_and_no_more(servers, tmpfs):
    running = servers.start(memory_file=tmpfs, capacity_rows=10**6)
    client = servers.client(running)
    client.add_tables([replace(ITEM, dim=64)])
    before = train(client, 0)
    many = [("item", client.split(np.arange(10**5, dtype=np.uint64)))]
    with pytest.raises(
        RemoteError, match=r"No space left .*docker's --shm-size, in Ku"
    ):
        client.pull(many, batch=BatchNumber(1, 1))
    np.testing.assert_allclose(train(client, 2), before - 1, atol=1e-5)


def handle(checkpoints, **request):
    return checkpoints.handle(CheckpointRequest(task=1, **request)).phase


def reach(checkpoints, phase):
    """Do what is due until a task is as far as told."""

    def is_there():
        checkpoints.work(0)
        return checkpoints.handle(CheckpointRequest(task=1)).phase == phase

    wait_until(is_there, phase)


@pytest.fixture
def checkpoint(servers, tmp_path):
    """Return the path of a checkpoint of 2000 rows."""
    client = servers.client(servers.start(capacity_rows=5000))
    client.add_tables([ITEM])
    train(client, 0)
    return client.checkpoints.dump(tmp_path / "run").path


def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_loaded(checkpoint):
    config = ServerConfig(capacity_rows=5000)
    store = config.make_store()
    checkpoints = CheckpointService(config, store, Activity())
    handle(checkpoints, do="check", folder=checkpoint)
    reach(checkpoints, "checked")
    shutil.rmtree(checkpoint)
    handle(checkpoints, do="load", folder=checkpoint)
    reach(checkpoints, "loaded")
    assert store.num_rows == len(IDS)
    checkpoints.close()


def test_a_dump_whose_folder_is_deleted_fails_and_leaves_the_rows(checkpoint, tmp_path):
    config = ServerConfig(capacity_rows=5000)
    store = config.make_store()
    store.add_tables([ITEM])
    rows = np.empty((len(IDS), ITEM.dim), np.float32)
    store.lookup(0, IDS, rows, training=True)
    checkpoints = CheckpointService(config, store, Activity())
    folder = tmp_path / "dump"
    folder.mkdir()
    handle(checkpoints, do="dump", folder=str(folder))
    folder.rename(tmp_path / "moved")  # at once: files are being written into it
    reach(checkpoints, "failed")
    assert store.num_rows == len(IDS)
    checkpoints.close()


def test_a_server_of_inference_reads_the_next_checkpoint_if_its_own_is_deleted(
    servers, checkpoint, tmp_path
):
    config = ServerConfig(capacity_rows=5000, checkpoint=str(tmp_path / "run"))
    store = config.make_store()
    served = ServedCheckpoint(config, store, Activity())
    source = servers.client(servers.start(capacity_rows=5000))
    source.checkpoints.load(checkpoint)
    source.checkpoints.dump(tmp_path / "run")
    shutil.rmtree(checkpoint)

    def is_loaded():
        served.work(0)
        return not served.is_loading

    wait_until(is_loaded, "the next checkpoint is loaded")
    assert store.num_rows == len(IDS)
    served.close()


def test_a_checkpoint_that_cannot_be_read_in_the_end_is_an_error(checkpoint, tmp_path):
    config = ServerConfig(capacity_rows=5000, checkpoint=checkpoint)
    served = ServedCheckpoint(config, config.make_store(), Activity())
    shutil.rmtree(checkpoint)

    def work():
        while True:
            served.work(0)

    with pytest.raises(CheckpointError, match="must be a checkpoint, or hold one"):
        work()
