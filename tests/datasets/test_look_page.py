"""docs/data.md, from a folder to a trained model: its blocks run as they stand."""

import dataclasses
import re

import pytest
from click.testing import CliRunner

from persia_torchrec.command import main
from persia_torchrec.device.batches import TorchRecBatch
from tests.support.repository import ROOT

PAGE = (ROOT / "docs/data.md").read_text()


@pytest.mark.multiprocess
def test_the_blocks_lead_from_a_folder_to_a_trained_model(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make, train = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(make, "docs/data.md", "exec"), {})
    shown = CliRunner().invoke(main, ["data", "clicks"])
    assert shown.exit_code == 0, shown.output
    (columns,) = re.findall(r"^columns = \[\n.*?^\]\n", shown.output, re.M | re.S)
    assert columns.replace("'", '"') in train
    names = {}
    exec(compile(train, "docs/data.md", "exec"), names)
    losses = re.findall(
        r"epoch \d: loss (.*), missing {'age': \d\d}", capsys.readouterr().out
    )
    assert len(losses) == 3
    assert float(losses[-1]) < 0.6
    batch = names["batch"]
    num_rows = batch.id_features.stride()
    assert batch.id_features.keys() == ["user", "tags"]
    assert batch.label_names == ("click",)
    assert batch.labels[0].shape == (num_rows,)
    assert batch.dense_names == ("age",)
    assert batch.dense_features[0].shape == (num_rows, 1)


def test_the_fields_of_a_batch_exist():
    (table,) = re.findall(r"^\| field \|.*?\n\n", PAGE, re.M | re.S)
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    fields = {field.name for field in dataclasses.fields(TorchRecBatch)}
    assert {"id_features", "labels", "dense_features"} <= named <= fields
