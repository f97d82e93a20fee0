"""An embedding worker beside no job, as a process."""

import logging
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import ConfigError, WireError
from persia_torchrec.lookup.pooling import warm_up
from persia_torchrec.persia.worker.__main__ import main
from persia_torchrec.persia.worker.process import ready_client, require_dims
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.rpc.messages import Kind, decode_json, encode_json
from persia_torchrec.table import TableSpec
from tests.support.one_feature import bags_of
from tests.support.processes import Processes, wait_until
from tests.support.servers import DEADLINE_S, ids_of

ITEM = TableSpec(name="item", dim=4, optimizer=Adam(0.5))
CONFIG = "{feature_index_prefix_bit: 8, slots_config: {item: {dim: 4}}}"
SCHEMA = load_embedding_config("config", CONFIG)


def run_worker(*arguments):
    sys.argv = ["worker", *arguments]
    return main()


@pytest.mark.multiprocess
def test_a_worker_serves_lookups_of_servers_that_it_is_told(servers, tmp_path):
    warm_up()  # a process of its own would compile for longer than the test waits
    running = servers.start(2)
    client = servers.client(running)
    addresses = [server.address.removeprefix("tcp://") for server in running]
    (tmp_path / "embedding_config.yml").write_text(CONFIG)
    with Processes(tmp_path) as processes:
        worker = processes.start(
            "worker",
            run_worker,
            *("--servers", *addresses, "--embedding-config", "embedding_config.yml"),
        )
        client.add_tables([ITEM])  # it waits for them
        weights = np.arange(8, dtype=np.float32).reshape(2, 4)
        prefix = np.uint64(SCHEMA.slots["item"].index_prefix)
        client.write("item", ids_of(7, 8) + prefix, weights)
        worker.has_printed("ready tcp://127.0.0.1:")
        address = worker.output().partition("ready ")[2].split()[0]
        remote = RemoteWorkers([address], timeout_s=DEADLINE_S)
        assert sum(remote.hello().num_rows) == 2
        (pooled,), _ = remote.pull(bags_of([8], [7, 8], [9]), None)
        remote.close()
        worker.send(signal.SIGTERM)
        assert worker.status() == 0
    np.testing.assert_array_equal(pooled, [weights[1], weights.sum(axis=0), [0] * 4])
    assert sum(client.num_rows()) == 2


def test_a_worker_that_waits_for_tables_may_end(servers, caplog):
    addresses = [server.address for server in servers.start(1)]
    ending = threading.Event()
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        ready = pool.submit(ready_client, addresses, SCHEMA, ending, await_tables=True)
        waits = "waiting for the embedding servers: .*'item' must have its table on"
        wait_until(lambda: re.search(waits, caplog.text), "the worker waits")
        ending.set()
        assert ready.result(DEADLINE_S) is None


def test_a_worker_must_know_its_slots(monkeypatch, capfd):
    monkeypatch.delenv("PERSIA_EMBEDDING_CONFIG", raising=False)
    assert main(["--servers", "127.0.0.1:1"]) == 1
    message = "--embedding-config, or PERSIA_EMBEDDING_CONFIG, is needed"
    assert message in capfd.readouterr().err


def test_a_client_learns_the_tables_of_the_servers(servers):
    running = servers.start(2)
    teacher, client = servers.client(running), servers.client(running)
    other = TableSpec(name="user", dim=2, optimizer=Adam(0.5))
    teacher.add_tables([other, ITEM])
    teacher.write("item", ids_of(3), np.ones((1, 4), dtype=np.float32))
    client.learn_tables()
    assert client.table("item") == ITEM
    assert client.table("user") == other
    assert client.read("item", ids_of(3))[0, :4].tolist() == [1.0] * 4


def test_slots_must_have_the_dims_of_the_servers_tables():
    with pytest.raises(ConfigError, match=r"'item' must have the dim .* 5\. .*: 4 in"):
        require_dims(SimpleNamespace(table=lambda _: replace(ITEM, dim=5)), SCHEMA)
    require_dims(SimpleNamespace(table=lambda _: ITEM), SCHEMA)


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([[4], [5]], ConfigError, r"'item' must have one dim .* 5 of server 1"),
        ([[4], None], WireError, "must be a mapping. Received: None"),
    ],
)
def test_servers_must_agree_on_their_tables(answers, error, message):
    client = EmbeddingClient(Answering(answers))
    with pytest.raises(error, match=message):
        client.learn_tables()
    with pytest.raises(ConfigError, match=r"Known: \[\]"):
        client.table("item")


def test_tables_that_a_server_lacks_are_not_learnt():
    client = EmbeddingClient(Answering([[4], []]))
    assert client.learn_tables() == []
    with pytest.raises(ConfigError, match=r"Known: \[\]"):
        client.table("item")


class Answering:
    """Servers that tell of tables of these dims."""

    def __init__(self, dims):
        self.names = ["server 0", "server 1"]
        self.timeout_s, self.recovery_s = DEADLINE_S, 0.0
        self._dims = dims

    def __len__(self):
        return len(self.names)

    incarnations = 1, 1

    def set_renewal(self, renewal):
        """Servers that answer once start never again."""

    def repeat(self, request):
        return request()

    def require_same(self, starts):
        assert tuple(starts) == self.incarnations

    def ask(self, kind, value, what, answer):
        assert kind is Kind.HELLO
        told = [None if dims is None else self._tell(dims) for dims in self._dims]
        return [decode_json([b"", encode_json(one)], answer) for one in told]

    def _tell(self, dims):
        specs = [replace(ITEM, dim=dim).to_json() for dim in dims]
        tables = [{"number": 0, "wants_counts": False, "spec": spec} for spec in specs]
        hello = {"shard": 0, "num_shards": 2, "incarnation": 1, "max_request_ids": 9}
        return {**hello, "tables": tables}


def test_a_worker_beside_a_job_must_be_told_the_servers(monkeypatch, capfd):
    monkeypatch.delenv("PERSIA_STORE_PORT", raising=False)
    monkeypatch.setattr(sys, "argv", ["worker"])
    assert main() == 1
    assert "pass --servers" in capfd.readouterr().err
