"""Metrics of a server, and what it pushes to a gateway."""

import re
import threading

import numpy as np
import pytest

from persia_torchrec import SGD
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.metrics.values import GAUGES, ServerReadings, Snapshots, Stages
from persia_torchrec.persia.config.global_config import MetricsSettings
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.table import TableSpec
from tests.support.gateway import Gateway
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
    moves_on = re.compile(r".*_us|bytes_.*")
    steady = {name for name in counters if not moves_on.fullmatch(name)}
    assert {n: pushed[n] for n in steady} == {n: counters[n] for n in steady}
    assert all(pushed[name] >= counters[name] for name in counters.keys() - steady)
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
    readings = ServerReadings(lambda _: counters)
    first = values_of(readings.read())
    assert first["index_miss_ratio"] == 0.25
    assert first["lookup_hashmap_time_cost_sec"] == 2.0
    assert "lookup_inference_batch_time_cost_sec" in first
    assert "set_embedding_time_cost_sec" not in first
    counters["hits"] += 4
    second = values_of(readings.read())
    assert second["index_miss_ratio"] == 0.0
    assert second["lookup_hashmap_time_cost_sec"] == 2.0  # nothing came since
    assert second["index_miss_count"] == 2


def test_a_server_that_does_not_serve_yet_has_no_readings():
    assert ServerReadings(lambda _: None).read() == []


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
