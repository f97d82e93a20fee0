"""The dashboard shows what the roles push, and the pages name it."""

import json
import re

import numpy as np
import pytest
import yaml

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import Means, ServerReadings
from persia_torchrec.persia import worker_client as trainer
from persia_torchrec.persia.worker.process import (
    IdBuffer,
    WorkerProcess,
    make_lookup,
    pushing_metrics,
)
from persia_torchrec.table import TableSpec
from tests.support.gateway import Gateway
from tests.support.one_feature import bags_of
from tests.support.repository import ROOT
from tests.support.servers import DEADLINE_S

FOLDER = ROOT / "examples/metrics"
DASHBOARD = json.loads((FOLDER / "persia_dashboard.json").read_text())
PERSIA_PAGE = (ROOT / "docs/persia.md").read_text()
SCHEMA = load_embedding_config(
    "config", "{feature_index_prefix_bit: 8, slots_config: {item: {dim: 2}}}"
)

PERSIAS = {
    "server": [
        "index_miss_count",
        "index_miss_ratio",
        "set_embedding_time_cost_sec",
        "decode_indices_time_cost_sec",
        "encode_embedding_time_cost_sec",
        "lookup_inference_batch_time_cost_sec",
        "lookup_hashmap_time_cost_sec",
        "gradient_id_miss_count",
        "inc_update_delay_sec",
    ],
    "worker": [
        "batch_unique_indices_rate",
        "num_pending_batches",
        "staleness",
        "nan_count",
        "nan_grad_skipped",
        "lookup_preprocess_time_cost_sec",
        "lookup_rpc_time_cost_sec",
        "lookup_postprocess_time_cost_sec",
        "lookup_total_time_cost_sec",
        "update_gradient_time_cost_sec",
        "estimated_distinct_id",
    ],
    "trainer": [
        "forward_client_to_gpu_time_cost_sec",
        "forward_client_time_cost_sec",
        "forward_error",
        "backward_client_time_cost_sec",
        "get_train_batch_time_cost_more_than_1ms_sec",
        "update_gradient_batched_time_cost_more_than_1ms_sec",
    ],
}
MISSING = {
    "forward_client_to_gpu_time_cost_sec",
    "update_gradient_batched_time_cost_more_than_1ms_sec",
}


@pytest.fixture
def pushed(servers, monkeypatch):
    """Return the names that a server and a worker push that have done everything."""
    (running,) = servers.start()
    client = servers.client([running])
    with Gateway() as gateway:
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", gateway.address)
        lookup = make_lookup(client, SCHEMA, MetricsSettings())
        lookup.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(1.0))])
        process = WorkerProcess(lookup, IdBuffer(10, expires_s=60))
        with pushing_metrics(process, 0, MetricsSettings()):
            outputs, batch = lookup.pull(bags_of([1]), BatchNumber(1, 1))
            lookup.update(batch, outputs)
            lookup.pull(bags_of([1]), None)
            client.write("item", batch.groups[0].ids, np.ones((1, 2), np.float32))
        (of_worker,) = gateway.wait()
    of_server = ServerReadings(lambda _: running.server.snapshots.ask(DEADLINE_S))
    of_follower = ServerReadings(lambda _: {"increment_delay_ms": 7})
    readings = [*of_server.read(Means()), *of_follower.read(Means())]
    return of_worker.names() | {reading.name for reading in readings}


def test_every_panel_queries_what_is_pushed(pushed):
    queried = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
    assert len(queried) == 12
    names = {re.fullmatch(r'(\w+)\{job=~"\$job"\}', expr)[1] for expr in queried}
    assert len(names) == 12
    assert names <= pushed
    job = DASHBOARD["templating"]["list"][1]
    assert re.search(r"\w+(?=,)", job["definition"])[0] in pushed


def test_every_panel_has_its_own_position_and_title():
    panels = DASHBOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) == 12
    assert len({panel["id"] for panel in panels}) == 12
    positions = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(positions) == 12


def test_every_metric_of_persia_is_pushed_or_documented_as_missing(pushed):
    in_trainers = {n for n in trainer._HELPS if not n.startswith("persia_")}
    assert {*PERSIAS["server"], *PERSIAS["worker"]} - pushed - MISSING == set()
    assert set(PERSIAS["trainer"]) - MISSING == in_trainers
    assert MISSING & (pushed | in_trainers) == set()


def test_the_migration_page_lists_every_metric_of_persia():
    section = PERSIA_PAGE.partition("### Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.M)
    here = {name: cell for names, cell in rows for name in re.findall(r"`(\w+)", names)}
    assert here.keys() == {name for names in PERSIAS.values() for name in names}
    assert {name for name, cell in here.items() if cell.startswith("none")} == MISSING


def test_prometheus_keeps_the_labels_of_processes():
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert [job["honor_labels"] for job in jobs] == [True, True]


def test_the_page_shows_the_defaults():
    text = (FOLDER / "README.md").read_text()
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    defaults = MetricsSettings()
    assert shown["common_config"]["metrics_config"] == {
        name: getattr(defaults, name) for name in MetricsSettings.__struct_fields__
    }
