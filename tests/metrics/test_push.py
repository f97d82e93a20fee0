"""Pushes to a metrics gateway: what they say, when, and what happens without one."""

import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.metrics import push as gateway_module
from persia_torchrec.metrics.push import is_pushed, push_metrics
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import Means, Observations, Reading
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S
from tests.support.threads import all_at_once

EVERY_SECOND = MetricsSettings(job_name="adult", push_interval_seconds=1)
OFTEN = MetricsSettings(job_name="adult", push_interval_seconds=0.1)
LOGGER = "persia_torchrec.metrics.push"


def three(_=None):
    return [
        Reading("persia_hits", 7, "ids found", "counter"),
        Reading("index_miss_count", 3, "ids missed", "untyped"),
        Reading("nan_count", 1, "not finite", "untyped", feature='a "b"\n'),
        Reading("persia_rows", 5, "rows"),
        Reading("nan_count", 2, "not finite", "untyped", feature="c"),
    ]


@pytest.fixture
def hanging(monkeypatch):
    """A gateway that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", f"127.0.0.1:{port}")
        yield


@pytest.fixture
def rejecting(monkeypatch):
    """A port without a listener, as its owner does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", f"127.0.0.1:{port}")
        yield


def push(settings=EVERY_SECOND, read=three):
    return push_metrics("nn_worker", 3, settings, read)


def test_metrics_are_pushed_with_their_types_and_labels(gateway):
    push()()
    (came,) = gateway.wait()
    assert came.labels == {
        "job": "adult",
        "instance": "rep_3",
        "ip_addr": "127.0.0.1",
        "role": "nn_worker",
    }
    assert came.values == {
        "persia_hits_total": 7,
        "index_miss_count": 3,
        "persia_rows": 5,
    }
    assert came.features == {"nan_count": {'a "b"\n': 1, "c": 2}}
    assert came.kinds == {
        "persia_hits": "counter",
        "index_miss_count": "unknown",
        "persia_rows": "gauge",
        "nan_count": "unknown",
    }


def test_two_jobs_never_replace_each_others_metrics(gateway, monkeypatch):
    def labels(settings, **variables):
        for name in ("PERSIA_JOB_ID", "PERSIA_METRICS_JOB_NAME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        push(settings)()
        last = gateway.pushes()[-1].labels
        return last["job"], last.get("job_id")

    unnamed = MetricsSettings(push_interval_seconds=3600)
    assert labels(unnamed) == ("persia_default_jobname", None)
    assert labels(unnamed, PERSIA_JOB_ID="one") == ("one", "one")
    assert labels(unnamed, PERSIA_JOB_ID="two") == ("two", "two")
    assert labels(EVERY_SECOND, PERSIA_JOB_ID="one") == ("adult", "one")
    assert labels(EVERY_SECOND, PERSIA_JOB_ID="two") == ("adult", "two")
    named = {"PERSIA_JOB_ID": "two", "PERSIA_METRICS_JOB_NAME": "mine"}
    assert labels(unnamed, **named) == ("mine", "two")
    assert labels(EVERY_SECOND, **named) == ("mine", "two")


def test_the_name_in_a_job_is_that_which_its_coordinator_has_drawn(
    gateway, monkeypatch
):
    drawn = SimpleNamespace(greeting=SimpleNamespace(job_id="drawn"))
    monkeypatch.setattr(gateway_module.JobMember, "current", drawn)
    push(MetricsSettings(push_interval_seconds=3600))()
    assert gateway.pushes()[-1].labels["job"] == "drawn"


def test_metrics_are_pushed_at_the_interval_and_once_at_the_end(gateway):
    began_s = time.monotonic()
    stop = push()
    first, second, *_ = gateway.wait(2)
    assert first.came_s - began_s >= 0.99
    assert second.came_s - began_s >= 1.99
    num = len(gateway.pushes())
    stop()
    after = len(gateway.pushes())
    assert after >= num + 1
    stop()
    assert len(gateway.pushes()) == after


def test_the_end_does_not_wait_for_the_interval(gateway):
    began_s = time.monotonic()
    push(MetricsSettings(push_interval_seconds=3600))()
    assert len(gateway.pushes()) == 1
    assert gateway.pushes()[0].labels["job"] == "persia_default_jobname"
    assert time.monotonic() - began_s < DEADLINE_S


def test_nothing_is_pushed_without_a_gateway_or_when_disabled(monkeypatch, gateway):
    disabled = MetricsSettings(enable_metrics=False)
    assert is_pushed(EVERY_SECOND)
    assert not is_pushed(disabled)
    push_metrics("nn_worker", 0, disabled, three)()
    monkeypatch.delenv("PERSIA_METRICS_GATEWAY_ADDR")
    assert not is_pushed(EVERY_SECOND)
    push_metrics("nn_worker", 0, EVERY_SECOND, three)()
    assert gateway.pushes() == []


def test_a_variable_that_does_not_name_a_gateway_is_rejected(monkeypatch):
    monkeypatch.setenv("PERSIA_METRICS_GATEWAY_ADDR", "http://gateway:9091")
    with pytest.raises(ConfigError, match="PERSIA_METRICS_GATEWAY_ADDR must be host"):
        push_metrics("nn_worker", 0, EVERY_SECOND, three)


def test_a_proxy_is_not_used(gateway, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    push()()
    assert len(gateway.pushes()) == 1


def warnings_of(caplog):
    return [r for r in caplog.records if r.levelno == logging.WARNING]


def test_a_gateway_that_rejects_is_logged_at_most_once_per_minute(rejecting, caplog):
    num_read = 0

    def read(_):
        nonlocal num_read
        num_read += 1
        return three()

    stop = push(OFTEN, read)
    wait_until(lambda: num_read >= 3, "three pushes")
    stop()
    assert len(warnings_of(caplog)) == 1
    assert "Connection refused" in warnings_of(caplog)[0].getMessage()


def test_a_gateway_that_answers_with_an_error_is_logged(gateway, caplog):
    gateway.status = 400
    push()()
    assert "HTTP Error 400" in warnings_of(caplog)[0].getMessage()


def test_pushes_resume_when_the_gateway_is_back(gateway, caplog):
    gateway.status = 503
    with caplog.at_level(logging.INFO, LOGGER):
        stop = push(OFTEN)
        gateway.wait(1)
        gateway.status = 200
        gateway.wait(2)
        stop()
    assert any(
        "pushing metrics" in r.getMessage() and "again" in r.getMessage()
        for r in caplog.records
    )


def test_an_error_while_reading_metrics_does_not_end_the_pushes(gateway, caplog):
    num_read = 0

    def read(_):
        nonlocal num_read
        num_read += 1
        if num_read == 1:
            raise KeyError("rows")
        return three()

    stop = push(OFTEN, read)
    gateway.wait(1)
    stop()
    assert "KeyError" in caplog.text


def test_a_gateway_that_hangs_delays_no_caller(hanging, monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "PUSH_S", 0.2)
    monkeypatch.setattr(timeouts, "LAST_PUSH_S", 0.2)
    stop = push(OFTEN)
    wait_until(lambda: warnings_of(caplog), "a warning")
    assert "timed out" in caplog.text
    stop()
    names = [thread.name for thread in threading.enumerate()]
    assert "metrics pushes" not in names


def test_the_end_of_a_role_waits_for_a_push_under_way_with_a_timeout(
    hanging, monkeypatch
):
    monkeypatch.setattr(timeouts, "PUSH_CLOSE_S", 0.3)
    monkeypatch.setattr(timeouts, "LAST_PUSH_S", DEADLINE_S)
    stop = push()
    began_s = time.monotonic()
    stop()  # its last push hangs for longer
    assert 0.2 < time.monotonic() - began_s < DEADLINE_S / 2


def test_a_mean_covers_the_observations_since_the_last_reading():
    means = Means()
    assert means.since_last("a", 0.0, 0) is None
    assert means.since_last("a", 6.0, 3) == 2.0
    assert means.since_last("a", 6.0, 3) == 2.0
    assert means.since_last("a", 7.0, 4) == 1.0
    assert means.since_last("b", 5.0, 1) == 5.0


def test_observations_of_several_threads_are_all_counted():
    observed = Observations({"time": "seconds", "errors": "how many"})

    def note(_):
        for _ in range(500):
            observed.observe("time", 0.5, "a")
            observed.count("errors", 2)

    all_at_once(note, range(4))
    assert observed.read(Means()) == [
        Reading("errors", 4000, "how many", "untyped"),
        Reading("time", 0.5, "seconds", "gauge", "a"),
    ]


def test_each_reader_of_observations_has_means_since_its_own_last_reading():
    observed, first, second = Observations({"time": "seconds"}), Means(), Means()

    def mean(means):
        (reading,) = observed.read(means)
        return reading.value

    observed.observe("time", 2.0)
    assert mean(first) == 2.0
    observed.observe("time", 4.0)
    assert (mean(first), mean(second)) == (4.0, 3.0)
    assert (mean(first), mean(second)) == (4.0, 3.0)


def test_a_block_that_raises_is_not_timed():
    observed = Observations({"time": "seconds"})
    with pytest.raises(KeyError), observed.timed("time"):
        raise KeyError
    assert observed.read(Means()) == []
