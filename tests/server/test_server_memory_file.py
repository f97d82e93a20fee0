"""A server that is killed, and another one that is started with its memory file."""

import contextlib
import re
import resource
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from persia_torchrec.checkpoint import increment_log
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.server.__main__ import main
from persia_torchrec.server.config import ServerConfig
from tests.support.memory_files import IDS, SPEC, train
from tests.support.processes import wait_until
from tests.support.servers import ids_of


def start(processes, name, path, *more):
    """Start a server of a memory file; return it and its address."""
    flags = "--standalone", "--capacity", "1000", "--memory-file", path
    server = processes.start(name, main, (*flags, *more))
    server.has_printed("ready ")
    return server, server.output().partition("ready ")[2].split()[0]


def test_a_server_that_was_killed_continues_with_its_rows(processes, path, servers):
    undisturbed = servers.client(servers.start())
    undisturbed.add_tables([SPEC])
    for number in range(4):
        if number % 2 == 0:
            server, address = start(processes, f"server {number}", path)
            client = EmbeddingClient.connect([address])
            if number:  # the tables are there before any client adds them
                assert client.learn_tables() == [SPEC]
                assert client.step("item") == number
            client.add_tables([SPEC])
        assert train(client, number) == train(undisturbed, number)
        if number % 2:
            with closing(client):
                server.kill()
    _, address = start(processes, "last", path)
    with closing(EmbeddingClient.connect([address])) as client:
        client.add_tables([SPEC])
        assert np.array_equal(client.read("item", IDS), undisturbed.read("item", IDS))
        assert (client.metadata("item", IDS).frequency == 4).all()


def test_a_server_that_ends_leaves_memory_that_was_closed(servers, path):
    [first] = servers.start(memory_file=path)
    client = servers.client([first])
    client.add_tables([SPEC])
    rows = train(client, 0)
    first.stop()
    [second] = servers.start(memory_file=path)
    client = servers.client([second])
    assert client.num_rows() == [len(IDS)]
    client.add_tables([SPEC])
    assert train(client, 1) != rows


def test_a_server_of_inference_keeps_no_memory_file():
    with pytest.raises(ConfigError, match="memory_file is for servers that train"):
        ServerConfig(memory_file="memory", checkpoint="checkpoint")


def test_a_checkpoint_is_loaded_into_the_file_and_dumped_from_it(
    servers, path, tmp_path
):
    source = servers.client(servers.start())
    source.add_tables([SPEC])
    train(source, 0)
    source.checkpoints.dump(str(tmp_path / "first"))
    [first] = servers.start(memory_file=path)
    assert servers.client([first]).checkpoints.load(str(tmp_path / "first")).num_rows
    first.stop()
    [second] = servers.start(memory_file=path)
    client = servers.client([second])
    client.learn_tables()
    client.checkpoints.dump(str(tmp_path / "second"))
    copy = servers.client(servers.start())
    copy.checkpoints.load(str(tmp_path / "second"))
    copy.add_tables([SPEC])
    for number in (1, 2):
        assert train(client, number) == train(source, number) == train(copy, number)


def test_increments_continue_with_the_next_process_of_the_file(servers, path, tmp_path):
    folder = tmp_path / "increments"
    # What a process without increments changes is in no log: none continues behind it.
    for kind in ("empty", "log", "log", None, "unknown", "log"):
        own = {} if kind is None else {"increments_dir": str(folder)}
        [server] = servers.start(memory_file=path, **own)
        client = servers.client([server])
        client.add_tables([SPEC])
        train(client, 0)
        server.stop()
        newest = increment_log.find_lines(Folder(str(folder)), {})[-1].logs[0]
        assert kind in (None, newest.base.kind)


def test_changes_that_no_increment_had_come_with_the_next_process(
    processes, servers, path, tmp_path
):
    logs, run = str(tmp_path / "increments"), str(tmp_path / "run")
    writing = "--capacity", "300", "--increments-dir", logs, "--increments-interval-s"
    server, address = start(processes, "first", path, *writing, "1000")
    with closing(EmbeddingClient.connect([address])) as client:
        client.add_tables([SPEC])
        train(client, 0)
        client.checkpoints.dump(run)
        [following] = servers.start(checkpoint=run, increments_dir=logs)
        follower = servers.client([following])
        train(client, 1)
        others = ids_of(*range(10_000, 10_050))  # others leave for these
        client.write("item", others, np.ones((50, SPEC.dim), np.float32))
        expected = client.read("item", IDS)[:, : SPEC.dim]
        assert client.num_rows() == [300]
        server.kill()
    start(processes, "second", path, *writing, "0.02")

    def has_caught_up():
        with contextlib.suppress(PersiaError):  # it loads
            follower.learn_tables()
            split = follower.split(IDS)
            [rows] = follower.pull([("item", split)])
            is_equal = np.array_equal(rows[split.inverse], expected)
            return is_equal and follower.num_rows() == [300]
        return False

    wait_until(has_caught_up, "the follower has caught up")
    assert follower.counters()[0]["following_reloads"] == 0


def main_within_4_gib(flags):
    """Be a server whose address space may grow by so much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**32
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return main(flags)


def test_a_limit_of_the_address_space_has_a_way_round(processes, path):
    flags = ["--standalone", "--capacity", "1000"]
    private = processes.start("private", main_within_4_gib, flags)
    in_file = processes.start(
        "file", main_within_4_gib, [*flags, "--memory-file", path]
    )
    private.has_printed("ready ")
    address = private.output().partition("ready ")[2].split()[0]
    with closing(EmbeddingClient.connect([address])) as client:
        client.add_tables([SPEC])
        train(client, 0)
        assert client.num_rows() == [len(IDS)]
    assert in_file.status() != 0
    assert re.search(
        r'ulimit -v.*memory_dir="private".*no --memory-file', in_file.output()
    )
