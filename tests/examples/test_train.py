"""The script of the README's job of a TorchRec model, with the flags given there."""

import re

import pytest

from tests.support.local_job import LocalJob
from tests.support.ports import draw_port
from tests.support.processes import run_script
from tests.support.repository import ROOT


@pytest.mark.multiprocess
def test_the_script_of_the_front_page_trains_as_it_stands(
    processes, tmp_path, monkeypatch
):
    (script,) = re.findall(
        r"--script \"(examples/\S+) (.*?)\"", (ROOT / "README.md").read_text()
    )
    path, *flags = script[0], *script[1].split()
    at = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(draw_port())}
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with LocalJob(tmp_path, monkeypatch, num_servers=2):
        running = processes.start(
            "train", run_script, ROOT / path, *flags, env=at | one
        )
        assert running.status() == 0, running.output()
    losses = re.findall(r"^epoch (\d): loss (\d\.\d+)$", running.output(), re.MULTILINE)
    assert [epoch for epoch, _ in losses] == ["0", "1"]
    assert float(losses[1][1]) < float(losses[0][1])
    assert re.search(r"^160 rows on the servers$", running.output(), re.MULTILINE)


@pytest.mark.multiprocess
def test_the_script_of_the_tutorials_saves_when_it_ends(
    processes, tmp_path, monkeypatch
):
    at = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(draw_port())}
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    runs = tmp_path / "runs"
    with LocalJob(tmp_path, monkeypatch, num_servers=2):
        running = processes.start(
            *("long", run_script, ROOT / "examples/long.py", "--steps", "500"),
            env=at | one | {"PERSIA_RUN_DIR": str(runs)},
        )
        assert running.status() == 0, running.output()
    assert re.search(r"^step 500: loss 0\.\d+, \d+ rows$", running.output(), re.M)
    assert (runs / "checkpoints/checkpoint-00000001/manifest.json").is_file()
