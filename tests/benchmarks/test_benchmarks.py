"""Every benchmark runs with small numbers, and fails if a value in it is wrong."""

import json
import math
import shutil

import numpy as np
import pytest

from benchmarks import cache, limits, wire
from benchmarks.__main__ import NAMES, SUMMARY, main
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.errors import StoreError
from persia_torchrec.rpc.messages import Precision
from persia_torchrec.sharding.on_device import DeviceGradients
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.fbgemm_engine import FbgemmEngine

pytestmark = [pytest.mark.multiprocess]

TABLES = {
    "store": "rates 7 limits 3 memory 3 eviction 10 stages 9 sizes 4 files 4"
    " overhead 4 startup 2 periods 6",
    # As many stages as took any time.
    "wire": "rates 11 stages 0 restarts 3 survival 2 encryption 4 transports 18"
    " precisions 9 tables 4",
    "engines": "engines 18",
    "training": "training 4",
    "precision": "quality 6 conversions 6",
    "increments": "cost 4 freshness 1",
    "data": "files 2 parquet 1 lines 3 memory 2",
    "dlrm": "dlrm 3",
    "servers": "servers 1",
    "trainer": "trainer 1",
    "serving": "latency 2 cost 1 freshness 1",
    "members": "members 1",
    "quality": "dlrm 2",
    "cache": "gate 4 map 6 hits 6",
}
"""The tables of each benchmark, and how many rows they have."""

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None,
    reason="no redis-server; Debian's package redis-server has it",
)


LONG = set(TABLES) - {"members"}
"""Those that take long; ``WRONG`` runs parts of store, wire and increments, too."""

CASES = [
    pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
    for name in TABLES
]


def run(path, *argv):
    """Run a benchmark; return the report in its file, by table."""
    assert main([*argv, "--tiny", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    words = f"{' '.join(argv)} --tiny --json {path}"
    assert report["command"].endswith(f"benchmarks {words}")
    return report, report["results"][argv[0]]["tables"]


def test_every_benchmark_is_run_here():
    assert set(TABLES) == set(NAMES)


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_has_its_figures(name, tmp_path, capsys):
    report, tables = run(tmp_path / "figures.json", name)
    printed = capsys.readouterr().out
    assert report["command"] in printed
    assert report["machine"]["cpu"]
    assert report["versions"]["numpy"] == np.__version__
    assert report["cores_used_by_others"] >= 0
    words = TABLES[name].split()
    expected = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert set(tables) == set(expected)
    for title, table in tables.items():
        assert f"## {title}\n\n{table['question']}" in printed
        assert len(table["rows"]) == expected[title] or not expected[title]
        for row in table["rows"]:
            assert list(row) == table["header"].split(" | ")
            numbers = [cell for cell in row.values() if isinstance(cell, float)]
            assert numbers
            assert all(math.isfinite(number) for number in numbers)


@pytest.mark.long
def test_without_a_name_there_is_a_summary(capsys):
    assert main(["--tiny"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("# ")] == [
        f"# {name}" for name in SUMMARY
    ]
    assert printed.count("## ") >= len(SUMMARY)
    assert '"cpu": ' in printed


@needs_redis
def test_redis_is_compared_with_the_same_rows(tmp_path):
    program = shutil.which("redis-server")
    argv = ["wire", "--redis", program, "--figures", "redis"]
    _, tables = run(tmp_path / "redis.json", *argv)
    rows = tables["redis"]["rows"]
    assert len(rows) == 8
    assert [row["of ours"] for row in rows].count(1) == 3


def lookup_with_a_wrong_weight(monkeypatch):
    lookup = EmbeddingStore.lookup

    def wrong(store, table, ids_N, out_ND, **options):
        slots_N = lookup(store, table, ids_N, out_ND, **options)
        out_ND[0, 0] += 0.01
        return slots_N

    monkeypatch.setattr(EmbeddingStore, "lookup", wrong)


def update_that_is_lost(monkeypatch):
    update = EmbeddingStore.update

    def wrong(store, table, ids_N, grads_ND, hints_N=None):
        return update(store, table, ids_N, np.zeros_like(grads_ND), hints_N)

    monkeypatch.setattr(EmbeddingStore, "update", wrong)


def pull_with_a_wrong_weight(monkeypatch):
    pull = EmbeddingClient.pull

    def wrong(client, *tables, **options):
        return [rows + np.float32(0.01) for rows in pull(client, *tables, **options)]

    monkeypatch.setattr(EmbeddingClient, "pull", wrong)


def push_that_is_lost(monkeypatch):
    push = EmbeddingClient.push

    def wrong(client, tables, grads, batch, **options):
        given = grads.arrays() if isinstance(grads, DeviceGradients) else grads
        zeros = [np.zeros_like(grads_UD) for grads_UD in given]
        return push(client, tables, zeros, batch, **options)

    monkeypatch.setattr(EmbeddingClient, "push", wrong)


def push_in_full_precision(monkeypatch):
    push = EmbeddingClient.push

    def wrong(client, *args, precision=None):
        return push(client, *args, precision=Precision.FP32)

    monkeypatch.setattr(EmbeddingClient, "push", wrong)


def gradients_that_missed(monkeypatch):
    counters = EmbeddingClient.counters

    def wrong(client):
        return [{**counted, "gradients_missed": 3} for counted in counters(client)]

    monkeypatch.setattr(EmbeddingClient, "counters", wrong)


def follower_with_other_rows(monkeypatch):
    read = EmbeddingClient.read

    def wrong(client, table, ids):
        rows = read(client, table, ids)
        is_follower = "increments_put_in" in client.counters()[0]
        return rows + np.float32(is_follower and len(ids) > 100)

    monkeypatch.setattr(EmbeddingClient, "read", wrong)


def fbgemm_that_does_nothing(monkeypatch):
    monkeypatch.setattr(FbgemmEngine, "build_update", lambda *_: lambda *_: (0, 0))


def plain_loops_that_do_nothing(monkeypatch):
    monkeypatch.setattr(limits, "_build_step", lambda _: lambda *_: None)


def rows_that_do_not_come(monkeypatch):
    monkeypatch.setattr(cache, "scatter", lambda *_: None)


WRONG = [
    *(
        ("store", figure, mutation, "rows must be what NumPy")
        for figure in ("rates", "limits", "eviction", "stages", "sizes")
        for mutation in (lookup_with_a_wrong_weight, update_that_is_lost)
    ),
    ("store", "limits", plain_loops_that_do_nothing, "rows must be what NumPy"),
    ("store", "startup", pull_with_a_wrong_weight, "rows must be what NumPy"),
    ("wire", "rates", pull_with_a_wrong_weight, "rows must be what NumPy"),
    ("wire", "rates", push_that_is_lost, "rows must be what NumPy"),
    ("wire", "stages", push_that_is_lost, "rows must be what NumPy"),
    ("engines", "engines", fbgemm_that_does_nothing, "same rows of TableSpec"),
    ("training", "training", push_that_is_lost, "Plain TorchRec's losses are"),
    ("training", "training", gradients_that_missed, "'gradients_missed': 3"),
    ("precision", "quality", push_in_full_precision, "must take 80 bytes on the wire"),
    ("increments", "freshness", follower_with_other_rows, "rows of the training"),
    ("cache", "gate", rows_that_do_not_come, "wrong rows of table0 must be 0"),
]
SETTINGS = {"precision": ["--batch-size", "512"], "training": ["--rows", "2048"]}
"""Where a check needs more than the tiny numbers, or fewer."""


def is_long(cases):
    """Return of each case whether it is slow, or not the first of its benchmark."""
    names = [name for name, *_ in cases]
    slow = "increments", "training"
    return [name in (*slow, *names[:k]) for k, name in enumerate(names)]


@pytest.mark.parametrize(
    ("name", "figure", "mutation", "message"),
    [
        pytest.param(*case, marks=[pytest.mark.long] if is_of_long else [])
        for case, is_of_long in zip(WRONG, is_long(WRONG), strict=True)
    ],
)
def test_a_wrong_value_stops_the_benchmark(
    name, figure, mutation, message, monkeypatch, caplog
):
    mutation(monkeypatch)
    more = SETTINGS.get(name, [])
    assert main([name, "--tiny", "--figures", figure, *more]) == 1
    assert message in caplog.text


def test_a_wrong_row_ends_the_filling_of_a_store(monkeypatch):
    lookup_with_a_wrong_weight(monkeypatch)
    with pytest.raises(StoreError, match="rows must be what NumPy"):
        limits.fill(4096, 4, "adagrad")


@needs_redis
def test_a_wrong_value_in_redis_stops_the_benchmark(monkeypatch, caplog):
    monkeypatch.setattr(wire.FilledRedis, "_stepped", lambda self, rows, grads: rows)
    argv = ["wire", "--tiny", "--redis", shutil.which("redis-server")]
    assert main([*argv, "--figures", "redis"]) == 1
    assert "rows must be what NumPy" in caplog.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["store", "--rows", "10", "--ids", "6"], "rows must be >= 12 (2 * ids)"),
        (["store", "--repeats", "0"], "repeats must be above 0. Received: 0."),
        (["store", "--sizes", "20480", "20479"], "sizes must be >= ids (20480)"),
        (["wire", "--figures", "redis"], "needs --redis PROGRAM"),
        (
            ["wire", "--redis", "x", "--figures", "redis", "--optimizer", "adam"],
            "the optimizer adagrad. Received: x and adam",
        ),
        (
            ["store", "--figures", "rates", "--capacities", "5"],
            "--capacities is for the figure 'startup', which is not measured",
        ),
        (["engines", "--dims", "5"], "dims must be multiples of 4. Received: (5,)."),
        (["training", "--staleness", "-1"], "staleness must be above 0. Received:"),
    ],
)
def test_invalid_settings_are_errors(argv, message, tmp_path, caplog):
    path = tmp_path / "never.json"
    assert main([*argv, "--json", str(path)]) == 1
    assert message in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(
    "argv", [["stores"], ["store", "--figures", "all"], ["store", "--optimizer", "x"]]
)
def test_unknown_arguments_are_rejected(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert "invalid choice" in capsys.readouterr().err
