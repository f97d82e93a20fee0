"""The global config: settings of jobs, for training and for inference."""

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.global_config import (
    GlobalSettings,
    inference_settings,
    reject_inference,
)
from persia_torchrec.server.config import ServerConfig
from tests.support.yaml_configs import GLOBAL, infer


def test_an_empty_global_config_gives_persias_defaults(global_config):
    settings = global_config("")
    assert settings == GlobalSettings()
    assert settings.common.job_type == "Train"
    assert settings.common.infer is None
    assert settings.common.metrics.enable_metrics
    assert settings.common.metrics.job_name == "persia_default_jobname"
    assert settings.common.metrics.push_interval_seconds == 10
    assert settings.common.checkpointing.num_workers == 4
    assert settings.embedding_worker.forward_buffer_size == 1000
    assert settings.embedding_worker.buffered_data_expired_sec == 1000
    assert settings.embedding_parameter_server.capacity == 1_000_000_000
    assert settings.embedding_parameter_server.optimizer_engine == "compiled"
    assert global_config("common_config:\n") == settings


def test_a_whole_global_config_is_read(global_config):
    settings = global_config(GLOBAL)
    assert not settings.common.metrics.enable_metrics
    assert settings.common.metrics.job_name == "adult"
    assert settings.common.metrics.push_interval_seconds == 5
    assert settings.common.checkpointing.num_workers == 8
    assert settings.embedding_worker.forward_buffer_size == 100
    assert settings.embedding_worker.buffered_data_expired_sec == 60
    server = settings.embedding_parameter_server
    assert server.capacity == 1_000_000
    assert server.num_hashmap_internal_shards == 1
    assert server.incremental_buffer_size == 5
    assert server.incremental_dir == "/tmp/increments"
    assert server.incremental_channel_capacity == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "embedding_parameter_server_config: {capacity: 0}",
            "global_config.yml: embedding_parameter_server_config.capacity "
            "must be >= 1. Received: 0",
        ),
        (
            "embedding_parameter_server_config: {capacity: 1e9}",
            "capacity must be an integer. Received: '1e9'",
        ),
        (
            "embedding_parameter_server_config: {optimizer_engine: gpu}",
            "optimizer_engine must be one of compiled, fbgemm. Received: 'gpu'",
        ),
        (
            "embedding_worker_config: {forward_buffer_size: 0}",
            "forward_buffer_size must be >= 1",
        ),
        (
            "embedding_worker_config: {buffered_data_expired_sec: -1}",
            "buffered_data_expired_sec must be >= 1",
        ),
        (
            "common_config: {metrics_config: {push_interval: 10}}",
            "common_config.metrics_config.push_interval is unknown. "
            r"Did you mean 'push_interval_seconds'\?",
        ),
        (
            "common_config: {metrics_config: {push_interval_seconds: 0}}",
            "push_interval_seconds must be >= 1",
        ),
        (
            "common_config: {metrics_config: {job_name: 3}}",
            "job_name must be a string. Received: 3",
        ),
        (
            "common_config: {metrics_config: {job_name: ''}}",
            "job_name must be of length >= 1. Received: ''",
        ),
        *(
            (
                f"embedding_parameter_server_config: {{capacity: {capacity}}}",
                f"server_config.capacity must be <= 4294967294. Received: {capacity}",
            )
            for capacity in (2**32 - 1, 10**13, 10**20 - 1)
        ),
        (
            "embedding_parameter_server_config: {incremental_dir: ''}",
            "_server_config.incremental_dir must be of length >= 1. Received: ''",
        ),
        (
            "common_config: {checkpointing_config: {num_workers: 0}}",
            "num_workers must be >= 1",
        ),
        (
            "common_config: {zzz: 1}",
            "common_config.zzz is unknown. Known: metrics_config, job_type",
        ),
        ("common_config: {job_type: train}", "job_type must be one of Train, Eval"),
        ("common_config: {infer_config: {}}", "must have the key 'servers'"),
        (
            "common_config: {infer_config: {servers: a, embedding_checkpoint: b}}",
            "infer_config.servers must be a list. Received: 'a'",
        ),
        (
            "common_config: {job_type: Infer}",
            "job_type: Infer must come with an infer_config",
        ),
        (
            infer("servers: ['a:1'], embedding_checkpoint: b").replace(
                "Infer", "Train"
            ),
            "infer_config must come with job_type: Infer. Rec.*: job_type: Train, and",
        ),
        (
            infer("servers: [], embedding_checkpoint: b"),
            r"infer_config.servers must be of length >= 1. Received: \[\]",
        ),
        (
            infer("servers: ['a:1', 'a'], embedding_checkpoint: b"),
            "servers must list addresses as host:port, .*Received: 'a'",
        ),
        (
            infer("servers: ['a:65536'], embedding_checkpoint: b"),
            r"a port in \[1, 65535\]. Received: 'a:65536'",
        ),
        (
            infer("servers: ['a:1', 'a:1'], embedding_checkpoint: b"),
            "servers must list each embedding server once",
        ),
        (
            infer("servers: ['a:1'], embedding_checkpoint: ''"),
            "embedding_checkpoint must be of length >= 1. Received: ''",
        ),
    ],
)
def test_global_settings_that_cannot_work_are_rejected(global_config, text, message):
    with pytest.raises(ConfigError, match=message):
        global_config(text)


def test_an_inference_job_knows_its_servers_and_its_checkpoint(global_config):
    servers = "servers: ['10.0.0.1:8888', 'tcp://ps-1.svc:81'], embedding_checkpoint: r"
    settings = global_config(infer(servers)).common.infer
    assert settings.embedding_checkpoint == "r"
    assert [settings.port_of(shard) for shard in range(2)] == [8888, 81]
    assert settings.listen_host == "*"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "tcp://127.0.1.1"])
def test_an_inference_job_of_this_machine_listens_for_it_only(global_config, host):
    text = infer(f"servers: ['{host}:1', 'localhost:2'], embedding_checkpoint: r")
    assert global_config(text).common.infer.listen_host == "127.0.0.1"


def test_an_evaluation_job_is_accepted(global_config):
    settings = global_config("common_config: {job_type: Eval}")
    assert settings.common.job_type == "Eval"
    assert settings.common.infer is None


INFER = infer("servers: ['a:1'], embedding_checkpoint: b")


@pytest.mark.parametrize("in_job", [False, True])
def test_only_a_file_for_inference_has_its_settings(monkeypatch, tmp_path, in_job):
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400" if in_job else "")
    path = tmp_path / "global_config.yml"
    assert inference_settings(None) is None
    for text in ("", "common_config: {job_type: Eval}"):
        path.write_text(text)
        assert inference_settings(path) is None
    path.write_text(INFER)
    assert inference_settings(path).servers == ("a:1",)


def test_a_member_of_a_job_reads_a_bad_file_when_it_has_joined(monkeypatch, tmp_path):
    path = tmp_path / "global_config.yml"
    path.write_text("zzz: 1")
    monkeypatch.setenv("PERSIA_STORE_PORT", "29400")
    assert inference_settings(path) is None
    monkeypatch.delenv("PERSIA_STORE_PORT")
    with pytest.raises(ConfigError, match="zzz is unknown"):
        inference_settings(path)


def test_a_role_that_only_trains_is_rejected_for_inference(tmp_path):
    path = tmp_path / "global_config.yml"
    reject_inference("data loader", None)
    reject_inference("data loader", path)  # it reads nothing else from the file
    path.write_text("")
    reject_inference("data loader", path)
    path.write_text(INFER)
    with pytest.raises(ConfigError, match=r"data loader must .* job_type: Infer"):
        reject_inference("data loader", path)


@pytest.mark.parametrize(
    ("job_type", "is_on", "expected"),
    [
        ("Train", "true", "/tmp/increments"),
        ("Train", "false", None),
        ("Eval", "true", None),
    ],
)
def test_servers_write_increments_where_the_file_reports_it(
    global_config, job_type, is_on, expected
):
    text = GLOBAL.replace("job_type: Train", f"job_type: {job_type}")
    text = text.replace("update: false", f"update: {is_on}")
    text += "  incremental_interval_seconds: 3\n  optimizer_engine: fbgemm\n"
    config = ServerConfig(**global_config(text).server_arguments())
    assert config.increments_dir == expected
    assert config.optimizer_engine == "fbgemm"
    assert config.capacity_rows == 1_000_000
    assert config.increments_buffer_rows == 5
    assert config.increments_queue == 7
    assert config.increments_interval_s == 3.0
