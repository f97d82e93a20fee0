"""Whether and how a process pushes, as its global_config.yml has it."""

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.metrics.push_settings import MetricsSettings, metrics_settings


@pytest.fixture
def configure(tmp_path, monkeypatch):
    def configure(text):
        path = tmp_path / "global_config.yml"
        path.write_text(text)
        monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(path))
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", "localhost:9091")

    return configure


def test_the_section_is_read_and_no_other_one(configure):
    configure(
        "common_config: {metrics_config: {job_name: ads, push_interval_seconds: 3}}\n"
        "embedding_worker_config: {unknown: 1}\n"
    )
    found = metrics_settings()
    assert (found.job_name, found.push_interval_seconds) == ("ads", 3)
    assert found.enable_metrics


def test_without_a_gateway_or_a_section_they_are_the_defaults(configure, monkeypatch):
    configure("common_config: {}\n")
    assert metrics_settings() == MetricsSettings()
    configure("common_config: {metrics_config: {job_name: 7}}\n")
    monkeypatch.delenv("PERSIA_METRICS_GATEWAY_ADDR")
    assert metrics_settings() == MetricsSettings()


def test_a_setting_that_is_wrong_is_named_with_its_path(configure):
    configure("common_config: {metrics_config: {push_interval_seconds: 0}}\n")
    with pytest.raises(ConfigError, match=r"metrics_config\.push_interval_seconds"):
        metrics_settings()
