"""Metrics of a server, and what it pushes to a gateway."""

import re
import threading

import numpy as np
import pytest

from persia_torchrec import SGD, timeouts
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import (
    BIN_ENDS_S,
    GAUGES,
    HISTOGRAMS,
    Durations,
    Means,
    ServerReadings,
    Snapshots,
    Stages,
    bins_of,
    quantile_us,
)
from persia_torchrec.server.__main__ import _Figures
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.gateway import Gateway
from tests.support.processes import wait_until
from tests.support.repository import ROOT
from tests.support.servers import DEADLINE_S, ids_of

PAGE = ROOT / "docs/metrics.md"
ITEM = TableSpec(name="item", dim=2, optimizer=SGD(1.0))


def values_of(readings):
    return {reading.name: reading.value for reading in readings}


def train(client, batch, *numbers):
    number, split = BatchNumber(1, batch), client.split(ids_of(*numbers))
    client.pull([("item", split)], batch=number)
    grads = np.ones((len(numbers), 2), dtype=np.float32)
    client.outcome(client.push([("item", split)], [grads], number))


def test_a_server_pushes_what_a_client_is_told(servers, monkeypatch):
    with Gateway() as gateway:
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)
        metrics = MetricsSettings(job_name="a/job", push_interval_seconds=1)
        server = EmbeddingServer(ServerConfig(metrics=metrics))
        serving = threading.Thread(
            target=server.serve_and_push, args=(print,), daemon=True
        )
        serving.start()
        client = servers.client([server])
        client.add_tables([ITEM])
        train(client, 1, 1, 2, 3)
        train(client, 2, 1, 4)
        client.pull([("item", client.split(ids_of(9)))], batch=None)
        client.write("item", ids_of(5), np.ones((1, 2), dtype=np.float32))
        (counters,) = client.counters()
        server.stop()
        serving.join(DEADLINE_S)
        assert not serving.is_alive()
        *_, push = gateway.wait()
    assert push.labels == {
        "job": "a/job",
        "instance": "rep_0",
        "ip_addr": "127.0.0.1",
        "role": "embedding_parameter_server",
    }
    assert push.values["index_miss_count"] == counters["misses"] == 6
    assert push.values["gradient_id_miss_count"] == 0
    pushed = {
        name: push.values.get(f"persia_{name}", push.values.get(f"persia_{name}_total"))
        for name in counters
    }
    moves_on = re.compile(r".*_us|.*_us_.*|bytes_.*|shared_memory_.*")
    steady = {name for name in counters if not moves_on.fullmatch(name)}
    assert {n: pushed[n] for n in steady} == {n: counters[n] for n in steady}
    grows = {name for name in counters.keys() - steady if "_us_" not in name}
    assert all(pushed[name] >= counters[name] for name in grows)
    assert push.values["persia_lookup_seconds_count"] == 3
    assert push.kinds["persia_lookup_seconds"] == "histogram"
    for stage in ("lookup", "inference", "write"):
        assert counters[f"{stage}_us"] > 0
    for name in (
        "lookup_hashmap_time_cost_sec",
        "lookup_inference_batch_time_cost_sec",
        "set_embedding_time_cost_sec",
        "decode_indices_time_cost_sec",
        "encode_embedding_time_cost_sec",
    ):
        assert 0 < push.values[name] < DEADLINE_S


def test_gauges_are_those_that_the_page_calls_so():
    rows = re.findall(r"^\| (\*`.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"\*`(\w+)`\*", row)}
    assert {name for name in names if not name.endswith("_max")} == GAUGES


def test_ratios_and_times_are_those_since_the_last_reading():
    counters = {"hits": 6, "misses": 2, "lookup_us": 4_000_000, "requests_lookup": 4}
    counters["requests_lookup_inference"] = 2
    readings, means = ServerReadings(lambda _: counters), Means()
    first = values_of(readings.read(means))
    assert first["index_miss_ratio"] == 0.25
    assert first["lookup_hashmap_time_cost_sec"] == 2.0
    assert "lookup_inference_batch_time_cost_sec" in first
    assert "set_embedding_time_cost_sec" not in first
    counters["hits"] += 4
    second = values_of(readings.read(means))
    assert second["index_miss_ratio"] == 0.0
    assert second["lookup_hashmap_time_cost_sec"] == 2.0  # nothing came since
    assert second["index_miss_count"] == 2


def test_a_server_that_does_not_serve_yet_has_no_readings():
    assert ServerReadings(lambda _: None).read(Means()) == []


def test_all_time_is_attributed_to_stages():
    now_ns = 5_000_000
    stages = Stages(lambda: now_ns)
    for stage, ns in (("lookup", 3000), ("send", 500), ("lookup", 2000)):
        now_ns += ns
        stages.lap(stage)
    times = {name: us for name, us in stages.counters().items() if us}
    assert times == {"lookup_us": 5}
    now_ns += 600
    stages.lap("send")
    assert stages.counters()["send_us"] == 1


def test_a_duration_is_counted_below_the_end_of_its_bin_and_not_below_the_one_before():
    for us in (0, 1, 15, 16, 31, 32, 1000, 10**6, 33_554_431, 33_554_432, 10**9):
        durations = Durations()
        durations.add(us * 1000)
        index = durations.bins.index(1)
        assert sum(durations.bins) == 1
        assert us / 1e6 < BIN_ENDS_S[index]
        assert index == 0 or us / 1e6 >= BIN_ENDS_S[index - 1]
        assert durations.total_ns == us * 1000


def test_a_histogram_among_counters_is_read_back():
    durations = Durations()
    for us in (3, 20, 20, 10**9):
        durations.add(us * 1000)
    counters = durations.counters("lookup")
    assert counters == {
        "lookup_us_sum": 1_000_000_043,
        "lookup_us_16": 1,
        "lookup_us_32": 2,
        "lookup_us_inf": 1,
    }
    assert bins_of(counters, "lookup") == durations.bins
    readings = ServerReadings(lambda _: counters).read(Means())
    by_name = {reading.name: reading for reading in readings}
    assert by_name["persia_lookup_seconds"].bins == durations.bins
    assert by_name["persia_lookup_seconds"].value == 1000.000043
    assert by_name["persia_queue_seconds"].bins == [0] * 23
    assert not [name for name in by_name if "_us_" in name]


def test_a_quantile_is_within_the_bin_that_has_it():
    durations = Durations()
    assert quantile_us(durations.bins, 0.99) is None
    for us in [20] * 98 + [1000] * 2:
        durations.add(us * 1000)
    assert 16 < quantile_us(durations.bins, 0.5) < 32
    assert 512 < quantile_us(durations.bins, 0.99) < 1024
    durations.add(10**15)
    assert quantile_us(durations.bins, 1.0) == BIN_ENDS_S[-2] * 1e6


def test_a_server_counts_how_long_lookups_and_updates_take_and_wait(servers):
    (running,) = servers.start()
    client = servers.client([running])
    client.add_tables([ITEM])
    for batch in (1, 2, 3):
        train(client, batch, 1, 2)
    client.pull([("item", client.split(ids_of(9)))], batch=None)
    (counters,) = client.counters()
    nums = {name: sum(bins_of(counters, name)) for name in HISTOGRAMS}
    assert nums == {"lookup": 4, "update": 3, "queue": 3}
    assert min(counters[f"{name}_us_sum"] for name in HISTOGRAMS) > 0


class TestSnapshots:
    def test_the_caller_waits_for_the_thread_that_counts(self):
        snapshots, answers = Snapshots(), []
        asking = threading.Thread(
            target=lambda: answers.append(snapshots.ask(DEADLINE_S))
        )
        asking.start()
        while not snapshots.is_wanted:
            pass
        snapshots.give({"rows": 3})
        asking.join(DEADLINE_S)
        assert answers == [{"rows": 3}]
        assert not snapshots.is_wanted

    def test_without_an_answer_the_last_one_stands(self):
        snapshots = Snapshots()
        assert snapshots.ask(0.01) is None
        snapshots.give({"rows": 3})
        assert snapshots.ask(0.01) == {"rows": 3}

    def test_after_the_end_ask_returns_at_once(self):
        snapshots = Snapshots()
        snapshots.give({"rows": 5}, is_last=True)
        assert snapshots.ask(3600.0) == {"rows": 5}

    @pytest.mark.parametrize("num", [1, 3])
    def test_a_server_makes_snapshots_only_when_it_is_asked(self, servers, num):
        (running,) = servers.start()
        client = servers.client([running])
        asked = [running.server.snapshots.ask(DEADLINE_S) for _ in range(num)]
        assert all(asked)
        assert not running.server.snapshots.is_wanted
        assert client.counters()[0]["rows"] == 0


def test_figures_of_a_server_that_does_not_answer_stay_as_they_are(monkeypatch):
    server = EmbeddingServer(ServerConfig())
    figures = _Figures(server)
    assert figures() == {}  # it does not serve yet
    serving = threading.Thread(target=server.serve)
    serving.start()
    wait_until(figures, "it answers")
    server.stop()
    serving.join(DEADLINE_S)
    monkeypatch.setattr(timeouts, "STATUS_S", 0.0)
    last = figures()
    assert last["rows"] == 0
    assert figures() is last
