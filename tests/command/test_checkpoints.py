"""The verbs of checkpoints, of two that servers have written."""

import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.command import main
from persia_torchrec.command.restart import copy_alone
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import CheckpointError
from persia_torchrec.table import TableSpec
from tests.support.servers import Servers

IDS = np.array([1, 2, 2**63 + 5], np.uint64)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def run(request, tmp_path_factory):
    """Return the folder of two checkpoints; in the second one row has moved."""
    folder = tmp_path_factory.mktemp("run")
    spec = TableSpec(
        name="item", dim=2, optimizer=SGD(lr=1.0), weight_dtype=request.param
    )
    with Servers() as servers:
        client = servers.client(servers.start(2))
        client.add_tables([spec])
        for number in range(2):
            rows = np.array([[1, 2], [3, 4], [5, 6 + number]], np.float32)
            client.write("item", IDS, rows)
            client.checkpoints.dump(folder)
    return folder


def call(*words, status=0):
    """Return what the command prints on stdout."""
    result = CliRunner().invoke(main, ["checkpoint", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.stdout


def fails(*words):
    """Return the error of the command."""
    result = CliRunner().invoke(main, ["checkpoint", *map(str, words)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    return result.output


def told(*words, status=0):
    """Return the value that the command prints as JSON."""
    verb, *others = words
    return json.loads(call(verb, "--json", *others, status=status))


def test_ls_has_all_of_a_run_or_of_all_runs(run):
    lines = told("ls", run)
    assert [one["checkpoint"][-2:] for one in lines] == ["02", "01"]
    assert {(one["state"], one["rows"], one["servers"]) for one in lines} == {
        ("complete", 3, 2)
    }
    (run.parent / "notes.txt").write_text("a file among runs")
    names = {one["checkpoint"] for one in told("ls", run.parent)}
    assert {one["checkpoint"] for one in lines} <= names
    assert "complete" in call("ls", run)


def test_ls_has_a_dump_that_is_not_complete(run, tmp_path):
    (tmp_path / "checkpoint-00000001").mkdir()
    [line] = told("ls", tmp_path)
    assert line["state"] == "incomplete"


def test_info_has_the_tables(run):
    found = told("info", run)
    assert found["checkpoint"].endswith("checkpoint-00000002")
    [table] = found["tables"]
    assert (table["table"], table["dim"], table["optimizer"]) == ("item", 2, "SGD")
    assert "item" in call("info", run)


def test_rows_has_the_rows_of_ids(run):
    found = {one["id"]: one["weights"] for one in told("rows", run, "item")}
    assert found == {1: [1, 2], 2: [3, 4], 2**63 + 5: [5, 7]}
    as_int64 = 2**63 + 5 - 2**64
    [line] = told("rows", run, "item", "--", as_int64)
    assert line["weights"] == [5, 7]
    assert "must have a row of each id. Received: none of 17" in fails(
        "rows", run, "item", 17
    )
    assert "TABLE must be one of item. Received: user" in fails("rows", run, "user")


def test_diff_has_what_has_moved(run):
    first = run / "checkpoint-00000001"
    [line] = told("diff", first, run, status=1)
    assert (line["rows_a"], line["rows_b"], line["moved"]) == (3, 3, 1)
    assert (line["only_in_a"], line["only_in_b"]) == (0, 0)
    assert line["largest_move"] == 1
    [line] = told("diff", run, run)
    assert line["moved"] == 0


def test_verify_finds_a_byte_that_has_changed(run, tmp_path):
    assert "is whole: 3 rows" in call("verify", run)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for file in (copy / "checkpoint-00000002").glob("*.rows"):
        data = bytearray(file.read_bytes())
        data[-40] ^= 1
        file.write_bytes(data)
    assert "is damaged" in fails("verify", copy)
    call("verify", copy / "checkpoint-00000001")


def test_verify_reads_the_files_beside_the_rows(tmp_path):
    with Servers() as servers:
        client = servers.client(servers.start(1))
        files = {"model.pt": b"model"}
        client.checkpoints.start_dump(tmp_path, files=files).wait()
    assert "is whole" in call("verify", tmp_path)
    (tmp_path / "checkpoint-00000001/model.pt").write_bytes(b"moder")
    assert "model.pt must be the file of its manifest" in fails("verify", tmp_path)


def test_convert_writes_what_torch_loads(run, tmp_path):
    call("convert", run, tmp_path / "rows.pt")
    item = torch.load(tmp_path / "rows.pt", weights_only=True)["item"]
    assert item["ids"].tolist() == IDS.view(np.int64).tolist()
    assert item["weights"].tolist() == [[1, 2], [3, 4], [5, 7]]


def test_what_torch_has_saved_becomes_a_checkpoint_that_servers_load(tmp_path):
    weight = torch.arange(6.0).reshape(3, 2)
    torch.save({"model.item.weight": weight, "dense": weight[0]}, tmp_path / "state.pt")
    call("convert", tmp_path / "state.pt", tmp_path / "made")
    call("verify", tmp_path / "made")
    with Servers() as servers:
        client = servers.client(servers.start(2))
        client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(lr=1.0))])
        rules = catalog.LoadRules(on_change="reset state")
        client.checkpoints.load(tmp_path / "made", rules=rules)
        ids = np.arange(3, dtype=np.uint64)
        assert client.read("item", ids).tolist() == weight.tolist()
    torch.save([1], tmp_path / "list.pt")
    assert "must hold tables" in fails("convert", tmp_path / "list.pt", tmp_path / "a")


def test_a_pinned_checkpoint_is_deleted_by_no_process(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    first = copy / "checkpoint-00000001"
    call("pin", first)
    assert told("ls", copy)[1]["pinned"]
    catalog.delete_older(Folder(str(copy)), 1)
    assert first.exists()
    assert "is pinned" in fails("rm", "--yes", first)
    call("pin", "--undo", first)
    call("rm", "--yes", first)
    assert not first.exists()
    assert "must be the folder of one checkpoint" in fails("rm", "--yes", copy)


def test_a_rollback_has_the_checkpoint_alone_in_a_new_folder(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for number in (1, 2):
        folder = copy_alone(tmp_path / "run/checkpoint-00000001")
        assert folder == tmp_path / f"run-back-{number}"
        again = copy_alone(folder / "checkpoints/checkpoint-00000001")
        assert again == tmp_path / f"run-back-{number}-back-1"
        assert [one["checkpoint"][-2:] for one in told("ls", folder)] == ["01"]
        call("verify", folder)
    with pytest.raises(CheckpointError, match="is not complete, or does not exist"):
        copy_alone(tmp_path / "run")


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    for verb in ("info", "verify", "pin"):
        assert "must be a checkpoint, or hold one" in fails(verb, tmp_path)
    assert call("ls", tmp_path).startswith("no checkpoint in ")
    assert "RUN must be a folder, with checkpoints" in fails("ls", tmp_path / "rnus")
