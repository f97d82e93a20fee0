"""The script of the README's job of a TorchRec model, with the flags given there."""

import re

import pytest

from tests.support.local_job import LocalJob
from tests.support.ports import draw_port
from tests.support.processes import run_script
from tests.support.repository import ROOT


@pytest.mark.multiprocess
def test_the_script_of_the_front_page_trains_as_it_stands_and_saves(
    processes, tmp_path, monkeypatch
):
    (script,) = re.findall(
        r"^persia-torchrec run --servers 2 (examples/.*)$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    path, *flags = script.split()
    runs = tmp_path / "runs"
    at = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(draw_port())}
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with LocalJob(tmp_path, monkeypatch, num_servers=2):
        running = processes.start(
            *("train", run_script, ROOT / path, *flags),
            env=at | one | {"PERSIA_RUN_DIR": str(runs)},
        )
        assert running.status() == 0, running.output()
    losses = re.findall(
        r"^epoch (\d): loss (\d\.\d+), rows on servers \[\d+, \d+\]$",
        running.output(),
        re.MULTILINE,
    )
    assert [epoch for epoch, _ in losses] == ["0", "1"]
    assert float(losses[1][1]) < float(losses[0][1])
    assert (runs / "checkpoints/checkpoint-00000001/manifest.json").is_file()
