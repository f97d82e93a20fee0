"""The alert rules fire when they must, and Prometheus finds the processes of a job."""

import json
import subprocess

import pytest
import yaml

from persia_torchrec.job import job_list
from persia_torchrec.job.process_identity import METRICS_AT, ProcessIdentity
from persia_torchrec.job.progress import Progress
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import Register
from persia_torchrec.job.status_page import StatusPage
from persia_torchrec.metrics.endpoint import Endpoint, labels_of
from tests.support.ports import draw_port
from tests.support.processes import wait_until
from tests.support.prometheus import FILES, Prometheus, require_prometheus

ALERTS = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
OF_JOB = 'job_id="a", instance="rep_0"'

FIRING = {  # by alert: series of a job that is not well
    "PersiaTargetDown": {"up": "0x60"},
    "PersiaJobFailed": {"persia_job_failed": "1x60"},
    "PersiaProblem": {
        'persia_problem_seconds{kind="lost", member="server 0"}': "20+60x60"
    },
    "PersiaProcessMissing": {'persia_members{state="absent"}': "1x60"},
    "PersiaRestarts": {'persia_restarts_total{member="server 0"}': "0+1x60"},
    "PersiaCheckpointOld": {
        "persia_checkpoint_time_seconds": "-9000x60",
        "persia_job_running": "1x60",
    },
    "PersiaNoProgress": {
        "persia_samples_total": "9x60",
        "persia_job_running": "1x60",
    },
    "PersiaLossNotFinite": {"persia_loss": " ".join(["NaN"] * 60)},
    "PersiaGradientsNotFinite": {
        'persia_gradients_refused_total{role="nn_worker"}': "0+1x60"
    },
    "PersiaGradientsEvicted": {
        "persia_gradients_evicted_total": "0+2x60",
        "persia_gradients_total": "0+100x60",
    },
    "PersiaBatchesDropped": {"persia_batches_dropped_total": "0+1x60"},
    "PersiaServerThrashes": {
        "persia_evictions_total": "0+30x60",
        "persia_hits_total": "0+50x60",
        "persia_misses_total": "0+50x60",
    },
    "PersiaServerBusy": {"persia_idle_us_total": "0+600000x60"},
    "PersiaUpdatesQueue": {"persia_updates_queued": "64x60"},
    "PersiaLookupsSlow": {
        'persia_lookup_seconds_bucket{le="0.1"}': "0+1x60",
        'persia_lookup_seconds_bucket{le="1"}': "0+9x60",
        'persia_lookup_seconds_bucket{le="+Inf"}': "0+9x60",
    },
    "PersiaRowsLost": {"persia_lost_updates_total": "3x60"},
    "PersiaIncrementsLate": {"persia_unwritten_ms": "40000x60"},
    "PersiaRowsOld": {"persia_increment_age_ms": "400000x60"},
    "PersiaPredictionsFail": {
        'persia_serving_requests_total{status="503"}': "0+2x60",
        'persia_serving_requests_total{status="200"}': "0+98x60",
    },
    "PersiaPredictionsSlow": {
        'persia_serving_predict_seconds_bucket{le="0.2"}': "0+1x60",
        'persia_serving_predict_seconds_bucket{le="1"}': "0+9x60",
        'persia_serving_predict_seconds_bucket{le="+Inf"}': "0+9x60",
    },
    "PersiaPredictionsDegraded": {"persia_serving_degraded_samples_total": "0+1x60"},
}
WELL = {  # series of a job that is well, on which no alert fires
    "up": "1x60",
    "persia_job_failed": "0x60",
    "persia_job_running": "1x60",
    'persia_members{state="running"}': "4x60",
    'persia_members{state="absent"}': "0x60",
    'persia_restarts_total{member="server 0"}': "1x60",
    "persia_checkpoint_time_seconds": "0+60x60",
    "persia_samples_total": "0+900x60",
    "persia_loss": "0.5x60",
    'persia_gradients_refused_total{role="nn_worker"}': "0x60",
    "persia_gradients_evicted_total": "0+1x60",
    "persia_gradients_total": "0+1000x60",
    "persia_batches_dropped_total": "3x60",
    "persia_evictions_total": "0+5x60",
    "persia_hits_total": "0+50x60",
    "persia_misses_total": "0+50x60",
    "persia_idle_us_total": "0+30000000x60",
    "persia_updates_queued": "3x60",
    'persia_lookup_seconds_bucket{le="0.1"}': "0+9x60",
    'persia_lookup_seconds_bucket{le="+Inf"}': "0+9x60",
    "persia_lost_updates_total": "0x60",
    "persia_unwritten_ms": "2000x60",
    "persia_increment_age_ms": "2000x60",
    'persia_serving_requests_total{status="200"}': "0+98x60",
    'persia_serving_requests_total{status="503"}': "0x60",
    'persia_serving_predict_seconds_bucket{le="0.2"}': "0+9x60",
    'persia_serving_predict_seconds_bucket{le="+Inf"}': "0+9x60",
    "persia_serving_degraded_samples_total": "3x60",
}


def series(values):
    """Return series as promtool takes them, with the labels of a process."""

    def named(name):
        bare, _, labels = name.partition("{")
        more = ", ".join(filter(None, [OF_JOB, labels.removesuffix("}")]))
        return f"{bare}{{{more}}}"

    return [{"series": named(n), "values": v} for n, v in values.items()]


def case(values, expression, samples):
    asked = {"expr": expression, "eval_time": "45m", "exp_samples": samples}
    found = {"interval": "1m", "input_series": series(values)}
    return {**found, "promql_expr_test": [asked]}


@pytest.mark.slow
def test_each_alert_fires_on_what_it_is_for_and_none_on_a_job_that_is_well(tmp_path):
    require_prometheus()
    names = [rule["alert"] for group in ALERTS for rule in group["rules"]]
    assert sorted(names) == sorted(FIRING)
    cases = [
        case(
            values,
            f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) > bool 0',
            [{"labels": "{}", "value": 1}],
        )
        for name, values in FIRING.items()
    ]
    cases.append(case(WELL, 'ALERTS{alertstate="firing"}', []))
    require_rules(tmp_path, "1m", cases)


def require_rules(folder, interval, cases):
    """Have promtool run cases, with so much time between two evaluations."""
    rules = {"rule_files": [str(FILES / "alerts.yml")], "evaluation_interval": interval}
    path = folder / "alerts_test.yml"
    path.write_text(yaml.safe_dump({**rules, "tests": cases}))
    told = subprocess.run(
        ["promtool", "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_a_process_that_hangs_fires_by_its_name_within_a_minute(tmp_path):
    require_prometheus()
    settings = yaml.safe_load((FILES / "prometheus.yml").read_text())
    interval = settings["global"]["evaluation_interval"]
    scraped = settings["scrape_configs"][0]["scrape_interval"]
    lost = 'persia_problem_seconds{kind="lost", member="server 0"}'
    values = {lost: "_x5 25+5x20"}  # silent for 20 s, until the next scrape
    labels = '{alertname="PersiaProblem", alertstate="firing", member="server 0"}'
    asked = {"expr": f"count(ALERTS{labels})", "eval_time": "55s"}
    asked["exp_samples"] = [{"labels": "{}", "value": 1}]
    hang = {"interval": scraped, "input_series": series(values)}
    require_rules(tmp_path, interval, [{**hang, "promql_expr_test": [asked]}])


@pytest.mark.long
@pytest.mark.slow
def test_prometheus_finds_the_processes_of_a_job_by_its_coordinator(
    tmp_path, monkeypatch
):
    require_prometheus()
    monkeypatch.setenv("PERSIA_METRICS_PORT", str(draw_port()))
    book = AddressBook.host(0, job_id="seven")
    record = job_list.record_of("seven", book.port)
    endpoint = Endpoint("127.0.0.1", 0, labels_of("server", 0, "seven"))
    try:
        with StatusPage(book, Progress(book), record, "127.0.0.1") as page:
            own = ProcessIdentity.of_this_process()
            book.call(Register("server", 0, own), str)
            book.tell(METRICS_AT + "server 0", endpoint.address)
            url = f"http://127.0.0.1:{page.endpoint.port}/targets"
            with Prometheus(tmp_path, [url]) as prometheus:
                up = 'up{job_id="seven", instance="rep_0"} == 1'
                wait_until(lambda: len(prometheus.query(up)) == 2, "both are scraped")
                wait_until(
                    lambda: prometheus.query('persia_job_running{job="seven"}'),
                    "the coordinator's metrics are there",
                )
                roles = {one["metric"]["role"] for one in prometheus.query(up)}
                assert roles == {"coordinator", "embedding_parameter_server"}
                (memory,) = prometheus.query(
                    'process_resident_memory_bytes{role="embedding_parameter_server"}'
                )
                assert memory["metric"]["job_id"] == "seven"
                assert "exported_job" not in memory["metric"]
    finally:
        endpoint.close()
        book.close()


def test_the_dashboard_of_jobs_has_a_position_and_a_title_for_each_panel():
    panels = json.loads((FILES / "job_dashboard.json").read_text())["panels"]
    titles = [panel["title"] for panel in panels]
    positions = {(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}
    assert len(set(titles)) == len(titles) - 1  # samples a second, twice
    assert len({panel["id"] for panel in panels}) == len(positions) == len(panels)
    drawn = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["description"] and panel["targets"] for panel in drawn)


@pytest.mark.parametrize("group", ALERTS, ids=lambda group: group["name"])
def test_each_alert_says_what_is_wrong_and_what_to_do(group):
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "action"} == rule["annotations"].keys()
