import json
import math
import subprocess
import sys

import numpy as np
import pytest

from persia_torchrec.bench.__main__ import main
from persia_torchrec.bench.machine import cores
from persia_torchrec.bench.store import STORE_FIGURES
from persia_torchrec.bench.wire import WIRE_FIGURES

TABLES = {
    ("store", "rates"): {"rates": 7},
    ("store", "limits"): {"limits": 3, "memory": 3},
    ("store", "eviction"): {"eviction": 10, "insert": 1},
    ("store", "stages"): {"stages": 9},
    ("store", "sizes"): {"sizes": 4},
    ("store", "overhead"): {"overhead": 3},
    ("store", "startup"): {"startup": 2},
    ("wire", "rates"): {"rates": 11},
    ("wire", "stages"): {"stages": None},  # as many as the system can tell
}
"""How many rows the tables of each figure have, tiny."""


def test_every_figure_is_run_here_or_in_the_comparison_with_redis():
    known = {("store", f) for f in STORE_FIGURES} | {("wire", f) for f in WIRE_FIGURES}
    assert set(TABLES) == known - {("wire", "redis")}


@pytest.mark.multiprocess
@pytest.mark.timeout(180)  # the first compiles the store's loops, once for a machine
@pytest.mark.parametrize(("name", "figure"), TABLES)
def test_a_figure_answers_its_question(name, figure, tmp_path, capsys):
    cores_before = cores()
    path = tmp_path / "figures.json"
    argv = [name, "--tiny", "--figures", figure, "--json", str(path)]
    assert main(argv) == 0
    report = json.loads(path.read_text())
    printed = capsys.readouterr().out
    command = f"python -m persia_torchrec.bench {' '.join(argv)}"
    assert report["command"] == command
    assert command in printed
    tables = report["results"][name]["tables"]
    assert set(tables) == set(TABLES[name, figure])
    for title, table in tables.items():
        assert f"## {title}\n\n{table['question']}" in printed
        assert len(table["rows"]) == TABLES[name, figure][title] or figure == "stages"
        for row in table["rows"]:
            assert set(row) == set(table["columns"])
            numbers = [cell for cell in row.values() if isinstance(cell, float)]
            assert numbers
            assert all(math.isfinite(number) for number in numbers)
    assert cores() == cores_before


def test_the_machine_and_the_versions_stand_beside_the_figures(tmp_path):
    path = tmp_path / "figures.json"
    argv = ["store", "--tiny", "--figures", "sizes", "--optimizer", "sgd"]
    assert main([*argv, "--sizes", "600", "700", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_gb"] >= 1
    assert report["cores_used_by_others"] is None or report["cores_used_by_others"] >= 0
    assert report["versions"]["numpy"] == np.__version__
    store = report["results"]["store"]
    assert store["settings"]["optimizer"] == "sgd"
    assert store["settings"]["sizes"] == [600, 700]
    assert {row["rows"] for row in store["tables"]["sizes"]["rows"]} == {600, 700}


@pytest.mark.multiprocess
def test_the_command_prints_a_table():
    command = [sys.executable, "-m", "persia_torchrec.bench", "wire", "--tiny"]
    command += ["--figures", "rates", "--dims", "8", "--optimizer", "adam"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "| 8 | uniform | update, until applied |" in done.stdout
    assert "\nMachine: cpu " in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["store", "--rows", "10", "--ids", "6"], "rows must be >= 72 (6 ids)"),
        (["store", "--figures", "redis"], "figures of store must be among"),
        (["wire", "--figures", "sizes"], "figures of wire must be among"),
        (["wire", "--figures", "redis"], "needs --redis PROGRAM"),
        (["wire", "--sizes", "100"], "--sizes is for the figure 'sizes'"),
        (["store", "--redis", "redis-server"], "--redis is for the figure 'redis'"),
        (
            ["store", "--figures", "rates", "--capacities", "5"],
            "--capacities is for the figure 'startup'",
        ),
    ],
)
def test_what_cannot_be_measured_ends_with_an_error(argv, message, tmp_path, caplog):
    path = tmp_path / "never.json"
    assert main([*argv, "--json", str(path)]) == 1
    assert message in caplog.text
    assert "Received: " in caplog.text or "needs" in message
    assert not path.exists()


@pytest.mark.parametrize(
    "argv", [["stores"], ["--figures", "all"], ["--optimizer", "adadelta"]]
)
def test_words_that_are_unknown_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert "invalid choice" in capsys.readouterr().err
