"""Paths that clients, members of a job and files name: of which protocols."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from persia_torchrec.checkpoint.catalog import RUNS_FILE
from persia_torchrec.checkpoint.folder import Folder, require_received
from persia_torchrec.checkpoint.increment_log import Log, Retention
from persia_torchrec.errors import CheckpointError, RemoteError
from persia_torchrec.job.progress import look_at
from persia_torchrec.job.registry import SERVED_CHECKPOINT
from persia_torchrec.rpc.messages import Kind
from persia_torchrec.server.__main__ import choose_served
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.serving.__main__ import ServingFlags, find_dense

REJECTED = "A path that a client or a file names must be"


class Runs(MemoryFileSystem):
    """A file system that runs something when it is opened, as some of fsspec do."""

    protocol = "runs"
    cachable = False
    opened = 0

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        Runs.opened += 1


@pytest.fixture(autouse=True)
def runs():
    fsspec.register_implementation("runs", Runs, clobber=True)
    Runs.opened = 0
    return Runs


@pytest.mark.parametrize(
    "path",
    [
        *("reference::file:///refs.json", "reference://x", "REFERENCE://x"),
        *("zip://a::file:///b", "simplecache::s3://a/b", "filecache::http://a"),
        *("memory://a", "github://a:b@c/d", "data:text,x", "runs://x", "::", "file::"),
        *("python://x", "jupyter://x", "ssh://host/x", "s3://a::b"),
    ],
)
def test_chains_and_other_protocols_are_rejected(path, runs):
    with pytest.raises(CheckpointError, match=REJECTED):
        require_received(path)
    assert runs.opened == 0


@pytest.mark.parametrize(
    "path",
    [
        *("/a", "a/b", "C:/a", "file:///a", "s3://a/b", "s3a://a", "gs://a", "oss://a"),
        *("abfs://c@a/b", "az://a", "hdfs://h:1/a", "webhdfs://h/a", "https://h/a"),
    ],
)
def test_files_and_the_usual_stores_are_taken(path):
    assert require_received(path) == path


def test_what_the_user_names_extends_the_list(monkeypatch):
    assert require_received("runs://x", ["runs://y"])
    monkeypatch.setenv("PERSIA_CHECKPOINT_DIR", "runs://z")
    assert require_received("runs://x")
    with pytest.raises(CheckpointError, match=REJECTED):
        require_received("reference::runs://x", ["runs://y"])


@pytest.mark.parametrize("do", ["dump", "check", "load"])
def test_a_server_opens_no_path_of_a_client_with_another_protocol(servers, runs, do):
    client = servers.client(servers.start(1))
    for given in ({"folder": "runs://x"}, {"folder": "/x", "increments": "runs://x"}):
        if do == "dump" and "increments" in given:
            continue
        asked = {"do": do, "task": 7, **given}
        with pytest.raises(RemoteError, match=REJECTED):
            client.checkpoints._ask(Kind.CHECKPOINT, asked, do)
    assert runs.opened == 0


def test_a_folder_that_a_server_is_told_to_restore_from_is_looked_at(servers, runs):
    server = servers.start(1)[0].server
    with pytest.raises(CheckpointError, match=REJECTED):
        server.restore("runs://x", None, begins=False)
    assert runs.opened == 0


def test_runs_that_a_log_names_are_looked_at(tmp_path, runs, caplog):
    logs = Folder(tmp_path)
    log = Log("log-a", 0, 1, "2026-01-01T00:00:00+00:00", 1, 1)
    logs.child(log.name).make()
    logs.child(log.name).write_json(RUNS_FILE, ["runs://x"])
    retention = Retention(logs, log)
    retention._known[log.name] = log
    retention.apply(counts_begun=True)
    assert REJECTED in caplog.text
    assert runs.opened == 0


def test_notes_of_a_job_are_looked_at(tmp_path, runs):
    class Book:
        def claim_note(self, name, value):
            assert name == SERVED_CHECKPOINT
            return "runs://x"

    (tmp_path / "manifest.json").touch()
    with pytest.raises(CheckpointError, match=REJECTED):
        choose_served(Book(), str(tmp_path))
    with pytest.raises(CheckpointError, match=REJECTED):
        find_dense(ServingFlags(checkpoint=str(tmp_path)), "runs://x")
    assert REJECTED in look_at("runs://x").why
    assert runs.opened == 0


def test_a_server_is_told_more_protocols():
    config = ServerConfig(checkpoint_protocols=("runs",))
    assert require_received("runs://x", config.own_urls)
