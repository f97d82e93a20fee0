"""A whole job of processes pushes the metrics of all its roles."""

import pytest

from tests.support.gateway import Gateway
from tests.support.persia_scripts import GLOBAL_CONFIG, Scripts

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
]
METRICS = """
  metrics_config:
    job_name: photos
    push_interval_seconds: 1
"""
SLOTS = {"user_id", "photo_id", "liked_photo_id"}


def test_every_role_of_a_job_pushes_metrics_until_its_end(tmp_path):
    scripts = Scripts(tmp_path)
    config = GLOBAL_CONFIG.replace("  job_type: Train\n", f"  job_type: Train{METRICS}")
    scripts.write("global_config.yml", config)
    with Gateway() as gateway:
        variables = f"PERSIA_METRICS_GATEWAY_ADDR={gateway.address}"
        with scripts.start(
            *("--servers", "2", "--embedding_workers", "1"),
            *("--data_loaders", "1", "--trainers", "1", "--env", variables),
            num_batches=40,
        ) as job:
            ended = job.wait()
        assert ended.status == 0, ended.output
        last = {}
        for push in gateway.pushes(job="photos"):
            assert push.labels["ip_addr"] == "127.0.0.1"
            last[push.labels["role"], push.labels["instance"]] = push
    assert last.keys() == {
        ("embedding_parameter_server", "rep_0"),
        ("embedding_parameter_server", "rep_1"),
        ("embedding_worker", "rep_0"),
        ("nn_worker", "rep_0"),
    }
    servers = [last["embedding_parameter_server", f"rep_{i}"] for i in range(2)]
    trainer = last["nn_worker", "rep_0"]
    (worker,) = gateway.pushes(job="photos", role="embedding_worker")[-1:]
    num_rows = sum(server.values["persia_rows"] for server in servers)
    assert num_rows == 40 + 60  # every user, every photo
    misses = sum(server.values["index_miss_count"] for server in servers)
    # What an evaluation misses has no row; all others got one.
    inserted = sum(server.values["persia_inserted_total"] for server in servers)
    assert misses >= inserted == num_rows
    assert servers[0].values["persia_requests_update_total"] == 40
    assert trainer.values["persia_gradients_missed_total"] == 0
    assert trainer.values["backward_client_time_cost_sec"] > 0
    assert worker.values["staleness"] == 0
    assert worker.values["num_pending_batches"] == 0
    # Of the trainer and the loader: three a batch, but for the first ones.
    assert worker.values["persia_shared_memory_requests_total"] > 40
    assert worker.features["batch_unique_indices_rate"].keys() == SLOTS
    distinct = worker.features["estimated_distinct_id"]
    assert distinct["user_id"] == pytest.approx(40, abs=1)
