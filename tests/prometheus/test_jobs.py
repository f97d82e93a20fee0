"""Debian's Prometheus beside running jobs: every metric, panel and alert rule.

Two jobs train, one of PERSIA's scripts and one of a TorchRec script; a server of
inference follows the first, and a predictor answers requests.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.request

import pytest
import yaml

from persia_torchrec.sharding.trainer_metrics import TrainerCounts
from tests.support.forked_jobs import ForkedJob
from tests.support.persia_scripts import GLOBAL_CONFIG, TRAIN, Scripts
from tests.support.ports import draw_port, draw_ports
from tests.support.processes import Processes, wait_until
from tests.support.prometheus import FILES, Prometheus, require_prometheus
from tests.support.repository import ROOT
from tests.support.served_model import EVALUATION, trained  # noqa: F401  # a fixture
from tests.support.servers import DEADLINE_S
from tests.support.serving_process import Serving, predict_all

pytestmark = pytest.mark.multiprocess

TORCHREC = """
import time, torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from persia_torchrec import Adagrad, EmbeddingClient, recoverable, remote_sharders

dist.init_process_group("gloo")
client = EmbeddingClient.of_job()
sharders = remote_sharders(client, Adagrad(lr=0.1))
tables = [EmbeddingBagConfig(1000, 4, "item", feature_names=["item"])]
model = EmbeddingBagCollection(tables=tables, device="meta")
model = DistributedModelParallel(model, sharders=sharders)
ids = torch.tensor([7, 7, 7, 8, 9, 10])
with recoverable(None, {"model": model}, client, sharders, save_steps=50) as run:
    for _ in run.skip(range(10**9)):
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.full((3,), 2))
        loss = (model(features).values() - 1).square().mean()
        loss.backward()
        run.step(loss=loss)
        time.sleep(0.05)
"""
INCREMENTS = """
  enable_incremental_update: true
  incremental_dir: {folder}
"""

PAGE = (ROOT / "docs/metrics.md").read_text()
OF_SERVERS, _, _REST = PAGE.partition("## Trainer metrics")
OVER_HTTP = _REST.partition("## Over HTTP")[2].partition("## At a metrics")[0]
PERSIA = (ROOT / "docs/persia.md").read_text().partition("### Metrics")[2]

ONLY_WHEN_IT_HAPPENS = {
    *("following_stopped", "increment_delay_ms_max"),
    *("restored_rows", "restored_increments", "lost_ms", "lost_updates", "lost_rows"),
    "set_embedding_time_cost_sec",  # rows that a client writes
    "persia_problem_seconds",
    "persia_serving_rows_age_seconds",  # of a predictor that follows a training
}


def names_in(text):
    """Return the names in the first column of the tables of a text."""
    cells = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def documented():
    """Return by name in the pages the names in Prometheus, of which one must exist."""
    counted = {*names_in(OF_SERVERS), *TrainerCounts().read()}
    over_http = {name for name in names_in(OVER_HTTP) if "_" in name}
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", PERSIA.partition("\n## ")[0], re.M)
    named = [n for n, cell in rows if not cell.startswith("none")]
    persias = {name for names in named for name in re.findall(r"`(\w+)", names)}
    return {
        **{name: {f"persia_{name}", f"persia_{name}_total"} for name in counted},
        **{name: {name, f"{name}_count"} for name in over_http | persias},
    }


@pytest.fixture(scope="module")
def persia_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("persia")
    scripts = Scripts(folder)
    more = INCREMENTS.format(folder=folder / "increments")
    scripts.write("global_config.yml", GLOBAL_CONFIG.rstrip() + more)
    slower = "for (batch_idx, data) in enumerate(train_dataloader):\n"
    paced = slower + "            __import__('time').sleep(0.05)\n"
    scripts.write("train.py", TRAIN.replace(slower, paced))
    port = draw_ports(9)[0]
    variables = {"PERSIA_CHECKPOINT_INTERVAL_S": "3"}
    variables["PERSIA_CHECKPOINT_DIR"] = str(folder / "checkpoints")
    given = ("--metrics_port", str(port), "--servers", "2")
    with scripts.start(*given, num_batches=10**6, **variables) as job:
        job.metrics_port, job.folder = port, folder
        job.has_printed("automatic checkpoint")
        yield job


@pytest.fixture(scope="module")
def torchrec_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrec")
    (folder / "train.py").write_text(TORCHREC)
    port = draw_ports(5)[0]
    variables = {"PERSIA_CHECKPOINT_DIR": str(folder / "checkpoints")}
    given = ("--metrics_port", str(port), "--script", "train.py")
    with ForkedJob(folder, "train_torchrec", *given, variables=variables) as job:
        job.metrics_port = port
        job.has_printed("automatic checkpoint")
        yield job


@pytest.fixture(scope="module")
def follower(persia_job):
    """Return where a server of inference, which follows the job, has its metrics."""
    folder, port, metrics_port = persia_job.folder, draw_port(), draw_port()
    run = f"{folder}/checkpoints/{persia_job.job_id}"
    settings = yaml.safe_load((folder / "global_config.yml").read_text())
    settings["common_config"] = {
        "job_type": "Infer",
        "infer_config": {"servers": [f"127.0.0.1:{port}"], "embedding_checkpoint": run},
    }
    path = folder / "infer.yml"
    path.write_text(yaml.safe_dump(settings))
    flags = ["--shard", "0", "--num-shards", "1", "--global-config", path]
    command = [sys.executable, "-m", "persia_torchrec.server", *flags]
    process = subprocess.Popen(
        [*command, "--metrics-port", str(metrics_port)], cwd=ROOT
    )
    yield f"127.0.0.1:{metrics_port}"
    process.terminate()
    process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def predictor(trained, tmp_path_factory):  # noqa: F811
    """Return where a predictor, which answers requests, has its metrics."""
    port, closing = draw_port(), threading.Event()
    config = ("--embedding-config", str(trained.embedding_config))
    with Processes(tmp_path_factory.mktemp("serving")) as processes:
        where = ("--checkpoint", str(trained.checkpoint), *config)
        serving = Serving(processes, *where, "--metrics-port", str(port))

        def ask():
            while not closing.wait(0.2):
                predict_all(serving.address, EVALUATION)

        asking = threading.Thread(target=ask)
        asking.start()
        yield f"127.0.0.1:{port}"
        closing.set()
        asking.join(DEADLINE_S)


@pytest.fixture(scope="module")
def prometheus(persia_job, torchrec_job, follower, predictor, tmp_path_factory):
    require_prometheus()
    jobs = persia_job, torchrec_job
    urls = [f"http://127.0.0.1:{job.metrics_port}/targets" for job in jobs]
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(folder, urls, [follower, predictor]) as prometheus:
        wait_until(
            lambda: len(prometheus.query("persia_step > 20")) == 2, "both jobs train"
        )
        yield prometheus


def test_every_process_is_scraped_and_no_two_jobs_share_a_series(
    prometheus, persia_job, torchrec_job
):
    jobs = {persia_job.job_id: 6, torchrec_job.job_id: 3}  # processes

    def scraped():
        found = prometheus.query('count by (job_id) (up{job_id!=""} == 1)')
        return {one["metric"]["job_id"]: one["value"] for one in found}

    wait_until(lambda: scraped() == jobs, "all processes are scraped", details=scraped)
    follower = 'persia_rows{job="persia"}'
    wait_until(lambda: prometheus.query(follower), "the follower is scraped")
    found = prometheus.query('{__name__=~"persia_.*", role!="predictor"}')
    labels = [one["metric"] for one in found]
    of_jobs = [one for one in labels if one["job"] in jobs]
    assert all(one["job"] == one["job_id"] for one in of_jobs)
    assert {one["job"] for one in labels} == {*jobs, "persia"}  # the follower
    assert not [one for one in labels if "exported_job" in one]


def test_every_documented_metric_is_found(prometheus):
    def missing():
        names = prometheus.names()
        names |= {name.removesuffix("_bucket") for name in names}
        pages = documented()
        lacking = {name for name, any_of in pages.items() if not any_of & names}
        return sorted(lacking - ONLY_WHEN_IT_HAPPENS)

    assert len(documented()) > 120
    wait_until(lambda: missing() == [], "every metric is found", details=missing)


@pytest.mark.parametrize("dashboard", ["job_dashboard", "persia_dashboard"])
def test_every_panel_returns_data(prometheus, dashboard):
    content = json.loads((FILES / f"{dashboard}.json").read_text())
    queries = [t["expr"] for p in content["panels"] for t in p.get("targets", ())]

    def empty():
        asked = [
            expr.replace("$__rate_interval", "30s").replace("$job", ".*")
            for expr in queries
        ]
        return [expr for expr in asked if not prometheus.query(expr)]

    assert len(queries) >= 12
    wait_until(lambda: empty() == [], "every panel has data", details=empty)


def test_every_alert_rule_is_evaluated_without_an_error(prometheus):
    def unknown():
        return [one for one in prometheus.rules() if one["health"] == "unknown"]

    wait_until(lambda: not unknown(), "all rules are evaluated")
    rules = prometheus.rules()
    assert len(rules) == 21
    assert [
        (one["name"], one["lastError"]) for one in rules if "lastError" in one
    ] == []
    assert {one["health"] for one in rules} == {"ok"}
    loud = {one["name"] for one in rules if one["state"] == "firing"}
    assert loud <= {"PersiaCheckpointOld", "PersiaRowsOld"}


@pytest.mark.parametrize("name", ["persia_job", "torchrec_job"])
def test_the_page_of_a_job_shows_its_training(name, prometheus, request):
    job = request.getfixturevalue(name)
    address = f"http://127.0.0.1:{job.metrics_port}"

    def get(path):
        with urllib.request.urlopen(address + path, timeout=DEADLINE_S) as answer:
            return answer.read().decode()

    def is_whole():
        status = json.loads(get("/status.json"))
        servers = [one for one in status["members"] if one["role"] == "server"]
        with contextlib.suppress(TypeError):  # of None
            return (
                status["job"] == job.job_id
                and status["step"] > 20
                and status["samples_a_second"] > 0
                and status["loss"] > 0
                and status["checkpoint_is_whole"]
                and all(one["p99_us"] > 0 and one["rows"] > 0 for one in servers)
                and len(status["curves"]["loss"]) > 2
            )
        return False

    wait_until(is_whole, "the page shows it", details=lambda: get("/status.json"))
    assert "status.json" in get("/")
