"""Tables whose rows a trainer caches: who may change them, and for how long."""

import os
from contextlib import closing

import numpy as np
import pytest

from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import RemoteError
from persia_torchrec.server.owners import TableOwner, TableOwners
from persia_torchrec.table import TableSpec
from tests.support.servers import DEADLINE_S, RunningServer, ServerConfig, ids_of

ITEM = TableSpec(name="item", dim=2, optimizer=SGD(1.0))
OTHER = TableSpec(name="other", dim=2, optimizer=SGD(1.0))
IDS = ids_of(1, 2, 3)
ONES = np.ones((3, 2), dtype=np.float32)


@pytest.fixture
def connect(servers):
    running = servers.start(2)

    def connect():
        client = servers.client(running)
        client.add_tables([ITEM, OTHER])
        return client

    return connect


def write(client, value, table="item"):
    for reply in client.write_rows([(table, client.split(IDS))], [value * ONES]):
        reply.frames()


def rejects(kind, match):
    return pytest.raises(RemoteError, match=rf"{kind}: {match}")


def test_only_its_owner_changes_a_table(connect, tmp_path):
    owner, other = connect(), connect()
    other.write("item", IDS, ONES)
    other.checkpoints.dump(str(tmp_path))
    owner.own(["item"], 3)
    tables, batch = [("item", other.split(IDS))], BatchNumber(1, 1)
    whose = rf"Received: .*their owners are rank 3 \(process {os.getpid()} on "
    for change in (
        lambda: other.pull(tables, batch=batch),
        lambda: other.outcome(other.push(tables, [ONES], batch)),
        lambda: other.write("item", IDS, ONES),
        lambda: write(other, 5),
        lambda: other.step("item", 9),
        other.clear,
        lambda: other.checkpoints.load(str(tmp_path)),
        lambda: other.drop_table("item"),
    ):
        with pytest.raises(RemoteError, match=whose):
            change()
    assert (other.read("item", IDS) == 1).all()
    assert other.step("item") == 0
    for client in (owner, other):
        client.pull(tables, batch=batch, with_state=True)
        assert (client.pull(tables)[0] == 1).all()
    write(other, 4, "other")
    write(owner, 7)
    assert (other.read("item", IDS) == 7).all()
    owner.disown(["item"])
    write(other, 8)
    write(owner, 9)
    owner.clear()


def test_a_successor_ends_the_owner_of_its_rank(connect):
    first, second, third = connect(), connect(), connect()
    first.own(["item", "other"], 0)
    third.own(["item"], 1)  # each of its own rows
    write(first, 2)
    write(third, 3)
    second.own(["item"], 0)
    for change in (lambda: write(first, 1), lambda: first.own(["item"], 0)):
        with rejects(
            "FencedError", "A trainer must not write rows .* End this process"
        ):
            change()
    write(second, 4)
    second.disown(["item"])
    third.disown(["item"])
    with rejects("FencedError", "A trainer must not write"):
        write(first, 1)  # also when no one owns it
    assert (second.read("item", IDS) == 4).all()


def test_the_lease_of_a_trainer_that_died_can_be_ended(connect):
    dead, operator = connect(), connect()
    dead.own(["item"], 0)
    with rejects("ConfigError", "Tables must not .* call disown of a client"):
        operator.clear()
    operator.disown(["item"])
    operator.clear()
    with rejects("FencedError", "A trainer must not write"):
        write(dead, 1)


def test_a_lease_outlives_its_server_with_its_memory(path):
    config = ServerConfig(capacity_rows=100, memory_file=path)
    running = RunningServer(config)

    def connect():
        client = EmbeddingClient.connect([running.address], timeout_s=DEADLINE_S)
        client.add_tables([ITEM])
        return closing(client)

    with connect() as first, connect() as second:
        first.own(["item"], 0)
        second.own(["item"], 0)
        fenced = first._servers._stream
    running.stop()
    running = RunningServer(config)
    with connect() as other:
        with rejects("ConfigError", "Tables must not"):
            write(other, 1)
        other._servers._stream = fenced  # as the first one that continues
        with rejects("FencedError", "A trainer must not"):
            write(other, 1)
    running.stop()


def test_a_newer_generation_of_trainers_has_leases_of_its_own(connect):
    previous, trainer = connect(), connect()
    previous.begin_generation(1)
    previous.own(["item"], 0)
    trainer.begin_generation(2)
    trainer.clear()  # no lease is left
    trainer.own(["item"], 0)
    trainer.begin_generation(3)
    write(trainer, 1)
    with rejects("ConfigError", "Tables must not"):
        write(connect(), 1)


def test_owners_are_joined_and_ended():
    owners = TableOwners()
    owners.own(TableOwner(0, 5, "a", {1, 2}))
    owners.own(TableOwner(0, 6, "b", {3}))  # of other tables
    owners.own(TableOwner(0, 5, "a", {4}))
    assert [one.tables for one in owners.owners] == [{3}, {1, 2, 4}]
    owners.disown([1, 3], 5)
    assert owners.ended == []
    owners.disown([3], 5)
    assert owners.ended == [6]
    assert [one.tables for one in owners.owners] == [{2, 4}]
    owners.drop(lambda stream: stream == 5)
    owners.require(None, 7, "a clear")
