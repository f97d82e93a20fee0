"""What is particular to HDFS, whose libraries no test needs."""

import os
import sys
import tempfile
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from persia_torchrec.checkpoint.catalog import begin_checkpoint, find_checkpoint
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.serving.predictor import load_model


class LikeHdfs(MemoryFileSystem, ArrowFSWrapper):
    """In memory, as fsspec has HDFS: a path has no host, and a folder may be there."""

    protocol = "like-hdfs"
    mv = AbstractFileSystem.mv
    rm_file = AbstractFileSystem.rm_file

    def __init__(self, **settings):
        super().__init__(SimpleNamespace(type_name="hdfs"), **settings)

    @classmethod
    def _strip_protocol(cls, path):
        within = path.partition("://")[2].partition("/")[2] if "://" in path else path
        return "/" + within.strip("/")

    def makedirs(self, path, exist_ok=False):
        super().makedirs(path, exist_ok=True)


@pytest.fixture
def run(request):
    fsspec.register_implementation("like-hdfs", LikeHdfs, clobber=True)
    return f"like-hdfs://namenode:8020/{request.node.name}"


@pytest.mark.parametrize(
    "use",
    [Folder, begin_checkpoint, find_checkpoint, lambda path: load_model(path, "m.pt")],
)
def test_without_its_extra_hdfs_is_rejected_with_its_name(monkeypatch, use):
    for name in ("pyarrow", "pyarrow.fs"):  # which other tests import
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=r"'hdfs://nn:8020/r'.*persia-torchrec\[hdfs\]"
    ):
        use("hdfs://nn:8020/r")


def test_folders_within_keep_the_host(run):
    assert Folder(run).child("a").child("b").url == f"{run}/a/b"


def test_a_file_has_its_name_when_it_is_complete(run):
    folder = Folder(run)
    folder.write("dense.pt", b"first")
    with folder.created("dense.pt") as file:
        file.write(b"sec")
        assert folder.read("dense.pt") == b"first"
        file.write(b"ond")
    assert folder.read("dense.pt") == b"second"
    assert folder.names() == ["dense.pt"]


def write_half(folder):
    with folder.created("dense.pt") as file:
        file.write(b"sec")
        raise CheckpointError("interrupted")


@pytest.mark.parametrize("num_bytes", [2**20 - 1, 2**20, 2**21 + 3])
@pytest.mark.parametrize("folder", ["/dev/shm", None])
def test_a_large_file_is_written_whole(tmp_path, folder, num_bytes):
    data = memoryview(os.urandom(num_bytes))
    with tempfile.TemporaryDirectory(dir=folder or tmp_path) as path:
        with Folder(path).created("file") as file:
            left = data
            while left:
                left = left[file.write(left[:400_001]) :]
        assert Folder(path).read("file") == data
        Folder(path).write("at once", bytes(data))
        assert Folder(path).read("at once") == data


def test_a_file_that_is_not_completed_is_gone(run):
    folder = Folder(run)
    folder.write("dense.pt", b"first")
    with pytest.raises(CheckpointError, match="interrupted"):
        write_half(folder)
    assert folder.read("dense.pt") == b"first"
    assert folder.names() == ["dense.pt"]


def test_each_checkpoint_takes_the_next_folder(run):
    urls = [begin_checkpoint(run).url for _ in range(2)]
    assert urls == [f"{run}/checkpoint-{number:08d}" for number in (1, 2)]
    assert not Folder(urls[0]).make()
