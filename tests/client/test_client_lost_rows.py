"""A client continues with a server that was started again without its rows."""

import re
from contextlib import closing, contextmanager

import numpy as np
import pytest

from persia_torchrec import RemoteEmbeddingBagCollectionSharder
from persia_torchrec.client.bulk import Blocks, RowBlock
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import RemoteError, RestartedError
from persia_torchrec.rpc.messages import Kind, Share
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.ports import draw_port
from tests.support.servers import (
    DEADLINE_S,
    RunningServer,
    ids_of,
    once_the_port_is_free,
)

ITEM = TableSpec(name="item", dim=2, optimizer=SGD(1.0))
OTHER = TableSpec(name="other", dim=3, optimizer=SGD(1.0))
IDS = ids_of(1, 2, 3)


class Lossy:
    """A server that is started again with what a checkpoint has."""

    def __init__(self, run):
        self._run = run
        self._config = ServerConfig(port=draw_port(), capacity_rows=100)
        self._running = RunningServer(self._config)
        self.num_starts = 1

    def connect(self):
        client = EmbeddingClient.connect(
            [self._running.address], timeout_s=DEADLINE_S, recovery_s=DEADLINE_S
        )
        client.add_tables([OTHER, ITEM])
        return client

    def stop(self):
        self._running.stop()

    def start(self):
        def start():
            return RunningServer(self._config, before=lambda s: s.restore(self._run))

        self._running = once_the_port_is_free(start)
        self.num_starts += 1

    def restart(self):
        self.stop()
        self.start()


@pytest.fixture
def server(servers, tmp_path):
    """A server whose checkpoint has its tables in another order."""
    source = servers.client(servers.start())
    source.add_tables([ITEM, OTHER])
    source.write("item", IDS, np.full((3, 2), 7, np.float32))
    source.checkpoints.dump(tmp_path)
    server = Lossy(str(tmp_path))
    yield server
    server.stop()


def pull(client, number):
    [rows] = client.pull([("item", client.split(IDS))], batch=BatchNumber(1, number))
    return rows


def push(client, number, share=None):
    batch, grads = BatchNumber(1, number, share), np.ones((3, 2), np.float32)
    return client.push([("item", client.split(IDS))], [grads], batch)


def test_updates_in_doubt_are_lost_and_the_training_continues(server, caplog):
    with closing(server.connect()) as client:
        client.write("item", IDS, np.zeros((3, 2), np.float32))
        client.outcome(push(client, 0))
        assert (pull(client, 1) == -1).all()
        server.stop()
        replies = push(client, 1)
        server.start()
        assert client.outcome(replies).num_lost == 1
        assert (pull(client, 2) == 7).all()
        assert re.search(r"rows that it had: lost_\S+. Training continues", caplog.text)
        outcome = client.outcome(push(client, 2))
        assert (outcome.num_lost, outcome.num_gradients) == (0, 3)
        assert (pull(client, 3) == 6).all()
        assert client.counters()[0]["restored_rows"] == 3


def test_a_server_lost_while_settings_change_has_them_too(server, monkeypatch):
    with closing(server.connect()) as client:
        ask, running = client._servers.ask, []

        def ask_and_lose(kind, *given, **more):
            answers = ask(kind, *given, **more)
            if kind is Kind.ADD_TABLES and not running:
                running.append(server.restart())
                client.num_rows()  # as another thread, which renews the server
            return answers

        monkeypatch.setattr(client._servers, "ask", ask_and_lose)
        client.set_learning_rate(2.0)
        client.outcome(push(client, 0))
        assert (client.read("item", IDS) == 5).all()
        assert client.step("item") == 1


SHARES = [Share(5, 1, rank, 2, 60_000) for rank in range(2)]


@contextmanager
def two_trainers(server):
    """Yield clients of two trainers that update jointly."""
    with closing(server.connect()) as first, closing(server.connect()) as second:
        for client, share in zip((first, second), SHARES, strict=True):
            client.join(share, "a trainer")
        yield first, second


def test_a_joint_step_does_not_wait_for_a_share_that_was_lost(server):
    with two_trainers(server) as (first, second):
        pull(first, 0)
        server.stop()
        replies = push(first, 0, SHARES[0])
        server.start()
        assert first.outcome(replies).num_lost == 1
        for client in (first, second):
            assert (pull(client, 0) == 7).all()
        outcome = second.outcome(push(second, 0, SHARES[1]))
        assert outcome.num_gradients == 3
        later = [share._replace(step=2) for share in SHARES]
        both = push(first, 1, later[0]), push(second, 1, later[1])
        for client, replies in zip((first, second), both, strict=True):
            assert client.outcome(replies).num_gradients == 3
        assert (pull(first, 2) == 7 - 3).all()


def test_idempotent_requests_are_resent(server):
    with closing(server.connect()) as client:
        for ask in (
            client.counters,
            client.learn_tables,
            lambda: client.read("item", IDS),
            lambda: client.set_learning_rate(0.5),
            lambda: client.write("item", IDS, np.ones((3, 2), np.float32)),
            lambda: client.step("item"),
        ):
            server.restart()
            ask()
        assert (client.read("item", IDS)[:, 0] == 7).all()
        assert [spec.optimizer.lr for spec in client.learn_tables()] == [0.5, 0.5]
        server.restart()
        client.clear()
        assert client.num_rows() == [0]


def test_settings_that_a_client_has_only_learned_are_not_set_again(server):
    with closing(server.connect()) as tool:
        tool.tables.clear()
        with closing(server.connect()) as trainer:
            trainer.set_learning_rate(0.5)
        tool.learn_tables()
        server.restart()
        tool.read("item", IDS)
        assert [spec.optimizer.lr for spec in tool.learn_tables()] == [1.0, 1.0]


def test_a_trainer_that_has_left_reports_it_without_a_request(server):
    with two_trainers(server) as (first, second):
        first.leave(SHARES[0])
        server.restart()
        pull(second, 0)
        assert second.outcome(push(second, 0, SHARES[1])).num_gradients == 3
        later = [share._replace(group=6) for share in SHARES]
        second.leave(SHARES[1]._replace(step=2))
        both = push(first, 1, later[0]), push(second, 1, later[1])
        for client, replies in zip((first, second), both, strict=True):
            assert client.outcome(replies).num_gradients == 3


MANY = ids_of(*range(1, 21))


def blocks_of_many(server, value):
    """Yield the rows of many ids; the server is started again in between, once."""
    for number, ids in enumerate(np.split(MANY, 5)):
        if number == 3 and server.num_starts == 1:
            server.restart()
        yield RowBlock(ids, np.full((len(ids), 2), value, np.float32))


def test_a_table_is_filled_again(server):
    with closing(server.connect()) as client:
        blocks = Blocks(lambda: blocks_of_many(server, 5.0))
        assert client.fill("item", blocks) == len(MANY)
        assert server.num_starts == 2
        assert (client.read("item", MANY) == 5).all()


def test_blocks_that_can_be_taken_only_once_are_not_written_in_part(server):
    with closing(server.connect()) as client, pytest.raises(RestartedError):
        client.fill("item", blocks_of_many(server, 5.0))


def test_an_export_has_the_rows_that_a_server_came_back_with(server):
    with closing(server.connect()) as client:
        client.write("item", MANY, np.ones((len(MANY), 2), np.float32))
        found = {}
        for block in client.export("item", block_rows=4):
            if server.num_starts == 1:
                server.restart()
            found |= dict(zip(block.ids.tolist(), block.weights[:, 0], strict=True))
        expected = client.read("item", IDS)[:, 0].tolist()
        assert [found[id_] for id_ in IDS.tolist()] == expected == [7, 7, 7]


def test_lost_updates_are_in_the_summary_of_a_trainer(server):
    with closing(server.connect()) as client:
        sharder = RemoteEmbeddingBagCollectionSharder(client)
        client.lost.update(lost_updates=2, lost_rows=6)
        client.lost.update(lost_updates=1, lost_rows=3)
        summary = sharder.summary()
        assert (summary.num_lost_updates, summary.num_lost_rows) == (3, 9)
        assert summary.num_lost == 0


def test_the_next_start_of_a_server_knows_who_owns_its_tables(server):
    with closing(server.connect()) as owner:
        owner.own(["item"], 0)
        server.restart()
        tables, batch = [("item", owner.split(IDS))], BatchNumber(1, 1)
        owner.pull(tables, batch=batch, with_state=True)  # waits until it is prepared
        ones = np.ones((3, 2), np.float32)
        with closing(server.connect()) as other:
            with pytest.raises(RemoteError, match="their owners are rank 0"):
                other.write("item", IDS, ones)
            owner.write("item", IDS, ones)
            assert (other.read("item", IDS) == 1).all()
