"""Folders on the disk and behind URLs, and the checkpoints that they hold."""

import json
import uuid
from dataclasses import replace

import msgspec
import pytest

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.catalog import (
    DenseEntries,
    LogPosition,
    Manifest,
    SavedShard,
    SavedTable,
    begin_checkpoint,
    complete_checkpoints,
    delete_older,
    discarding,
    find_checkpoint,
    merge_tables,
    saved_states,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.embedding.optim import SGD, Adam
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.table import TableSpec

A = TableSpec(name="a", dim=2, optimizer=SGD(0.5))
B = TableSpec(name="b", dim=2, optimizer=Adam(0.5))


TABLE = {"spec": A.to_json(), "num_updates": 1, "has_metadata": False}


@pytest.fixture(params=["local", "memory"])
def path(request, tmp_path):
    """A path that nothing is at yet."""
    if request.param == "local":
        return str(tmp_path / "run")
    return f"memory://{uuid.uuid4()}/run"


def saved(spec, num_updates):
    return SavedTable(json.loads(json.dumps(spec.to_json())), num_updates, False)


def manifest_of(folder, name="rows", size_bytes=4):
    folder.write(name, b"1234")
    log = LogPosition("log", 3)
    shard = SavedShard(name, 1, size_bytes, 77, 5, {"capacity_rows": 9}, log)
    return Manifest((saved(B, 3),), (shard,), "now", 12, DenseEntries(("optimizer",)))


def test_a_file_that_is_written_can_be_read(path):
    folder = Folder(path)
    assert folder.make()
    assert not folder.make()
    assert folder.file_size("x") is None
    folder.write("x", b"one")
    folder.write("x", b"three")
    assert folder.read("x") == b"three"
    assert folder.file_size("x") == 5
    assert folder.names() == ["x"]
    assert Folder(folder.url).read("x") == b"three"


def test_a_file_whose_writing_fails_is_not_there(tmp_path):
    folder = Folder(tmp_path)
    folder.write("x", b"before")

    def fail():
        with folder.created("x") as file:
            file.write(b"half")
            assert folder.read("x") == b"before"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert folder.names() == ["x"]
    assert folder.read("x") == b"before"


def test_a_folder_that_is_missing_is_empty(path):
    assert Folder(path).names() == []
    with pytest.raises(CheckpointError, match=r"Could not read .*run/x: "):
        Folder(path).read("x")


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path):
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"run"):
        begin_checkpoint(tmp_path / "run")


def test_an_unknown_url_is_rejected():
    with pytest.raises(ConfigError, match=r"fsspec knows. Received: 'what://x/y'"):
        Folder("what://x/y")


def test_each_checkpoint_gets_a_new_folder_and_the_latest_complete_one_is_found(path):
    with pytest.raises(CheckpointError, match=r"Received: (an empty|no such) folder"):
        find_checkpoint(path)
    folders = [begin_checkpoint(path) for _ in range(3)]
    assert [folder.url[-19:] for folder in folders] == [
        f"checkpoint-0000000{number}" for number in (1, 2, 3)
    ]
    with pytest.raises(CheckpointError, match="one that is complete"):
        find_checkpoint(path)
    for folder in folders[:2]:
        manifest_of(folder).write(folder)
        assert find_checkpoint(path).url == folder.url
    assert find_checkpoint(folders[0].url).url == folders[0].url
    [itself] = complete_checkpoints(folders[0])
    assert itself.url == folders[0].url
    assert begin_checkpoint(path).url.endswith("checkpoint-00000004")


def test_a_run_has_its_checkpoints_in_a_folder_or_in_itself(path):
    run = Folder(path)
    run.make()
    within = catalog.checkpoints_of_run(run)
    assert within.url == run.child("checkpoints").url
    assert list(complete_checkpoints(run)) == []
    first = begin_checkpoint(within.url)
    manifest_of(first).write(first)
    assert find_checkpoint(path).url == find_checkpoint(within.url).url == first.url
    earlier = begin_checkpoint(path)  # of an earlier version
    assert catalog.checkpoints_of_run(run).url == run.url
    manifest_of(earlier).write(earlier)
    assert [one.url for one in complete_checkpoints(run)] == [earlier.url]


def test_a_checkpoint_whose_names_are_all_taken_is_rejected(tmp_path, monkeypatch):
    for number in range(1, 101):
        (tmp_path / f"checkpoint-{number:08d}").mkdir()
    # Other processes made them after this one had listed the folder.
    monkeypatch.setattr(Folder, "names", lambda folder: [])
    with pytest.raises(CheckpointError, match=r"new folder must .*Received: 100 names"):
        begin_checkpoint(tmp_path)


def test_other_files_of_the_folder_do_not_disturb(path):
    run = Folder(path)
    run.make()
    run.write("checkpoint-last", b"")
    run.write("notes.txt", b"")
    folder = begin_checkpoint(path)
    assert folder.url.endswith("checkpoint-00000001")
    assert run.read("notes.txt") == b""


def test_a_manifest_is_read_as_it_was_written(path):
    folder = begin_checkpoint(path)
    manifest = manifest_of(folder)
    manifest.write(folder)
    assert Manifest.read(folder) == manifest
    assert (manifest.num_rows, manifest.size_bytes) == (1, 4)


@pytest.mark.parametrize("size_bytes", [3, 5])
def test_no_manifest_is_written_if_a_file_has_another_length(path, size_bytes):
    folder = begin_checkpoint(path)
    manifest = manifest_of(folder, size_bytes=size_bytes)
    with pytest.raises(CheckpointError, match=rf"must have the {size_bytes} bytes"):
        manifest.write(folder)
    with pytest.raises(CheckpointError, match="is missing: its checkpoint is not"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"version: .*2"),
        ({"format": "x"}, r"format: .*x"),
        ({"tables": [{"spec": {}}]}, r"tables\[0\] must have the key 'num_updates'"),
        ({"tables": [{**TABLE, "spec": {}}]}, "Not a table: .* 'optimizer'"),
        (
            {"tables": [{**TABLE, "num_updates": -1}]},
            r"num_updates must be >= 0. Received: -1",
        ),
        ({"tables": 1}, "tables must be a list. Received: 1"),
        ({"shards": [{"file": "x"}]}, r"shards\[0\] must have the key 'num_rows'"),
        ({"dense": 3}, "dense must be a mapping. Received: 3"),
        ({"step": "x"}, "step must be an integer"),
    ],
)
def test_a_manifest_of_something_else_is_rejected(tmp_path, change, message):
    folder = Folder(tmp_path)
    manifest_of(folder).write(folder)
    value = json.loads(folder.read("manifest.json"))
    folder.write("manifest.json", json.dumps({**value, **change}).encode())
    with pytest.raises(CheckpointError, match=rf"manifest\.json.*{message}"):
        Manifest.read(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"null"])
def test_a_manifest_that_is_not_json_is_rejected(tmp_path, data):
    folder = Folder(tmp_path)
    folder.write("manifest.json", data)
    with pytest.raises(CheckpointError, match=r"manifest\.json must be "):
        Manifest.read(folder)


def test_a_table_has_the_step_of_the_server_that_has_counted_most():
    servers = [[saved(A, 3), saved(B, 7)], [saved(A, 4)], [saved(B, 6), saved(A, 2)]]
    assert merge_tables(servers) == (saved(A, 4), saved(B, 7))


def test_older_checkpoints_are_deleted_once_the_newer_ones_are_complete(path):
    run = Folder(path)
    folders = [begin_checkpoint(path) for _ in range(5)]
    for number in (0, 1, 3):  # the third was given up, the fifth is not complete yet
        manifest_of(folders[number]).write(folders[number])
    folders[2].write("rows", b"half")
    folders[4].write("rows", b"half")
    delete_older(run, 4)
    assert len(list(complete_checkpoints(run))) == 3
    delete_older(run, 2)
    assert [f.url for f in complete_checkpoints(run)] == [
        folders[number].url for number in (3, 1)
    ]
    assert folders[0].names() == []
    assert folders[2].names() == ["rows"]
    delete_older(run, 1)
    assert folders[2].names() == []
    assert folders[4].names() == ["rows"]


@pytest.mark.parametrize("is_complete", [False, True])
def test_only_what_is_not_complete_is_deleted_where_a_save_fails(path, is_complete):
    folder = begin_checkpoint(path)

    @discarding(folder)
    def save():
        manifest = manifest_of(folder)
        if is_complete:
            manifest.write(folder)
        raise OSError("a full disk")

    with pytest.raises(OSError, match="a full disk"):
        save()
    assert bool(folder.names()) == is_complete


def write_of(path, job, *continues):
    """Write a checkpoint of a job; return its folder."""
    folder = begin_checkpoint(path)
    replace(manifest_of(folder), job=job, continues=continues).write(folder)
    return folder.url


def test_the_latest_checkpoint_needs_a_job_only_where_there_are_several(path):
    write_of(path, "")
    first = write_of(path, "a")
    assert find_checkpoint(path).url == first
    second = write_of(path, "b", "a")
    assert find_checkpoint(path).url == second
    assert [f.url for f in saved_states(path)][:2] == [second, first]
    third = write_of(path, "c")
    message = rf"several.*'no job'.*{third} of job 'c', {second} of job 'b'.*job="
    for find in (find_checkpoint, lambda run: list(saved_states(run))):
        with pytest.raises(CheckpointError, match=message):
            find(path)
    assert find_checkpoint(third).url == third
    assert find_checkpoint(path, job="a").url == second
    assert find_checkpoint(path, job="c").url == third
    assert find_checkpoint(path, own="b").url == second
    with pytest.raises(CheckpointError, match="'d', and there are"):
        find_checkpoint(path, job="d")
    local = write_of(path, "")
    assert find_checkpoint(path, own="b").url == local


def test_a_file_is_compared_with_its_checksum(tmp_path):
    folder = Folder(tmp_path / "checkpoint-00000001")
    dense = folder.child("dense")
    dense.make()
    folder.write("model (1).pt", b"model")
    dense.write(".metadata", b"list")
    folder.write("shard-00000-of-00001.rows", b"rows")
    files = catalog.sum_files(folder)
    assert files.keys() == {"model (1).pt", "dense/.metadata"}
    Manifest((), (), "now", files=files).write(folder)
    catalog.require_files(folder)
    assert catalog.read_file(folder, "model (1).pt") == b"model"
    folder.write("model (1).pt", b"moder")
    dense.write(".metadata", b"lists")
    for check in (
        lambda: catalog.read_file(folder, "model (1).pt"),
        lambda: catalog.require_files(folder),
        lambda: catalog.require_files(folder, "dense/"),
    ):
        with pytest.raises(CheckpointError, match="must be the file of its manifest"):
            check()
    catalog.note_replaced(folder, "model (1).pt")
    assert catalog.read_file(folder, "model (1).pt") == b"moder"
    (tmp_path / "checkpoint-00000001/dense/.metadata").unlink()
    with pytest.raises(CheckpointError, match="Could not read"):
        catalog.require_files(folder, "dense/")


def test_a_checkpoint_without_checksums_is_read_as_before(tmp_path):
    folder = Folder(tmp_path / "checkpoint-00000001")
    folder.make()
    Manifest((), (), "now").write(folder)
    text = json.loads((tmp_path / "checkpoint-00000001/manifest.json").read_text())
    del text["files"]
    folder.write_json("manifest.json", text)
    folder.write("dense.pt", b"any")
    assert catalog.read_file(folder, "dense.pt") == b"any"
    catalog.require_files(folder)
    catalog.note_replaced(folder, "dense.pt")
    assert "files" not in (tmp_path / "checkpoint-00000001/manifest.json").read_text()


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", "dense/../a", "dense/.."])
def test_a_manifest_names_files_of_its_own_folder(tmp_path, name):
    folder = Folder(tmp_path)
    text = json.loads(msgspec.json.encode(Manifest((), (), "now")))
    text["files"] = {name: {"size_bytes": 1, "checksum": 1}}
    folder.write_json("manifest.json", text)
    with pytest.raises(CheckpointError, match="plain names"):
        Manifest.read(folder)
