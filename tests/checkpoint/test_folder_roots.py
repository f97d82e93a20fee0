"""Paths that clients name: only those in the server's own folders."""

import os

import numpy as np
import pytest

from persia_torchrec.checkpoint.catalog import Manifest, SavedShard
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Base, Log, find_lines
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError, ConfigError, RemoteError
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of

TABLE = TableSpec(name="item", dim=2, optimizer=SGD(1.0))
REJECTED = "must be in one of the server's folders"


@pytest.fixture
def allowed(tmp_path):
    """Return a folder that clients may name; beside it is one that they may not."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "allowed" / "run").mkdir(parents=True)
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "beside")
    (tmp_path / "allowed" / "in").symlink_to(tmp_path / "allowed" / "run")
    return tmp_path / "allowed"


@pytest.mark.parametrize(
    "path",
    ["{}", "{}/run", "{}/run/new", "{}/in/x", "{}/./run/../run", "file://{}/run"],
)
def test_a_folder_in_a_root_may_be_named(allowed, path):
    Folder(path.format(allowed), [str(allowed)])


@pytest.mark.parametrize(
    "path",
    [
        *("{}/..", "{}/../beside", "{}/out", "{}/out/x", "{}beside", "/", "", "~"),
        *("file://{}/out", "local://{}/..", "file:/etc", "simplecache::file://{}/run"),
        *("s3://bucket/run", "memory://{}", "data:x", "zip://x::file://{}/run"),
        *("s3://runs/other", "s3://runs/7/../8", "s3://runs/70", "s3a://runs/7"),
    ],
)
def test_no_other_path_may_be_named(allowed, path, monkeypatch):
    monkeypatch.chdir(allowed.parent)
    with pytest.raises(CheckpointError, match=REJECTED):
        Folder(path.format(allowed), [str(allowed), "s3://runs/7"])


def test_a_url_in_a_root_may_be_named():
    Folder("memory://runs/7/checkpoint-1", ["memory://runs/7/"])
    with pytest.raises(CheckpointError, match=REJECTED):
        Folder("memory://other/7", ["memory://runs"])


def test_a_file_that_leads_elsewhere_is_not_read(allowed):
    (allowed.parent / "secret").write_text("secret")
    (allowed / "run" / "file").symlink_to(allowed.parent / "secret")
    with pytest.raises(CheckpointError, match=REJECTED):
        Folder(allowed / "run", [str(allowed)]).read("file")


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(CheckpointError, match="must be a file"):
        Folder(tmp_path).read("file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="Received: a folder; name a file in it"):
        Folder(tmp_path).read("folder")
    with pytest.raises(ConfigError, match="without NUL"):
        Folder(f"{tmp_path}\0")


def test_the_files_of_a_checkpoint_are_in_it(tmp_path):
    with pytest.raises(ValueError, match=r"file must be a plain name, not '\.\./x'"):
        SavedShard("../x", 1, 1, 1, 1, {})
    name = "shard-00000-of-00001-0123456789ab"
    (tmp_path / name).mkdir()
    log = Log("../../x", 0, 1, "", Base("empty"))
    Folder(tmp_path / name).write_json("log.json", log)
    with pytest.raises(CheckpointError, match=r"must describe log shard-00000-of"):
        find_lines(Folder(tmp_path), {})
    (tmp_path / "manifest.json").write_text("{}")
    os.truncate(tmp_path / "manifest.json", 2**29)
    with pytest.raises(CheckpointError, match="must have at most"):
        Manifest.read(Folder(tmp_path))


def test_a_server_on_loopback_takes_any_path_and_others_their_own(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERSIA_CKPT_DIR", "/ckpt")
    monkeypatch.setenv("PERSIA_CHECKPOINT_DIR", "/auto")
    config = ServerConfig(run_dir="/resume", increments_dir="s3://b/inc")
    named = "/resume", "s3://b/inc"
    assert config.roots("tcp://127.0.0.1:7000") is None
    assert config.roots("tcp://[::1]:7000") is None
    for address in ("tcp://0.0.0.0:7000", "tcp://10.0.0.1:1", "tcp://[::]:7000"):
        assert config.roots(address) == (str(tmp_path), "/ckpt", "/auto", *named)
    config = ServerConfig(checkpoint_root=("/a", "/b"))
    assert config.roots("tcp://127.0.0.1:7000") == ("/a", "/b")


def test_a_request_for_another_path_is_rejected(servers, allowed):
    [running] = servers.start(checkpoint_root=(str(allowed),))
    client = servers.client([running])
    client.add_tables([TABLE])
    client.write("item", ids_of(1, 2), np.ones((2, 2), dtype=np.float32))
    saved = client.checkpoints.dump(allowed / "run")
    client.checkpoints.load(saved.path)
    beside = allowed.parent / "beside"
    for path in (beside, allowed / "out"):
        with pytest.raises(RemoteError, match=REJECTED):
            client.checkpoints.dump(path)
    other = allowed.parent / "other"
    (allowed / "run").rename(other)
    with pytest.raises(RemoteError, match=REJECTED):
        client.checkpoints.load(other)
    with pytest.raises(RemoteError, match=REJECTED):
        client.checkpoints.load(other, increments=other)
    assert client.read("item", ids_of(1)).tolist() == [[1, 1]]
