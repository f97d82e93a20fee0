"""Metrics over HTTP: what a scrape is answered, who may ask, and where it listens."""

import base64
import contextlib
import http.client
import math
import socket
import threading

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.metrics.endpoint import Answer, Endpoint, begin, labels_of
from persia_torchrec.metrics.push import is_published, publish_metrics
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import Durations, Means, Reading
from persia_torchrec.rpc.addresses import raise_descriptor_limit
from tests.support.ports import draw_ports
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S

pytestmark = pytest.mark.slow

LABELS = labels_of("trainer", 2, "seven")
TOKEN = "t" * 32


def ask(endpoint, path="/metrics", *, method="GET", **headers):
    """Return status, text and headers of the answer to a request."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", endpoint.port, timeout=DEADLINE_S
    )
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)


def samples(text):
    """Return by name and by further labels the values of a text of Prometheus'."""
    return {
        (one.name, *(f"{k}={v}" for k, v in one.labels.items() if k not in LABELS)): one
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@pytest.fixture
def served():
    endpoint = Endpoint("127.0.0.1", 0, LABELS)
    yield endpoint
    endpoint.close()
    endpoint.close()


def test_a_scrape_has_all_readings_with_the_labels_of_the_process(served):
    durations = Durations()
    for ns in (1000, 20_000, 20_000, 10**12):
        durations.add(ns)
    bins, total_s = durations.bins, durations.total_ns / 1e9
    served.add(
        lambda _: [
            Reading("persia_hits", 7, "ids found", "counter"),
            Reading("persia_rows", 5, "rows"),
            Reading("nan_count", 2, "not finite", "untyped", feature='a "b"\n'),
            Reading("persia_lookup_seconds", total_s, "h", "histogram", bins=bins),
        ]
    )
    status, text, headers = ask(served)
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = samples(text)
    assert all(LABELS.items() <= one.labels.items() for one in found.values())
    assert found["persia_hits_total",].value == 7
    assert found["persia_rows",].value == 5
    assert found["nan_count", 'feat=a "b"\n'].value == 2
    buckets = {
        one.labels["le"]: one.value
        for one in found.values()
        if one.name == "persia_lookup_seconds_bucket"
    }
    assert len(buckets) == 23
    assert (buckets["1.6e-05"], buckets["3.2e-05"]) == (1, 3)
    assert (buckets["33.5544"], buckets["+Inf"]) == (3, 4)
    assert found["persia_lookup_seconds_count",].value == 4
    assert found["persia_lookup_seconds_sum",].value == pytest.approx(1000.000041)
    assert found["process_resident_memory_bytes",].value > 10**6


def test_a_source_that_ends_is_read_no_more(served):
    end = served.add(lambda _: [Reading("persia_rows", 5, "rows")])
    assert "persia_rows" in ask(served)[1]
    end()
    end()
    assert "persia_rows" not in ask(served)[1]


def test_the_metrics_of_a_registry_are_answered_too(served):
    registry = CollectorRegistry()
    Counter("asked", "how often", ["status"], registry=registry).labels("200").inc(3)
    served.add_collector(registry)
    found = samples(ask(served)[1])["asked_total", "status=200"]
    assert found.value == 3
    assert LABELS.items() <= found.labels.items()


def test_a_loss_that_is_not_finite_is_shown_as_that(served):
    served.add(lambda _: [Reading("persia_loss", math.nan, "loss")])
    assert math.isnan(samples(ask(served)[1])["persia_loss",].value)


def test_a_source_that_raises_is_an_error_of_the_scrape_alone(served):
    def read(_):
        raise OSError("no counters")

    end = served.add(read)
    status, text, _ = ask(served)
    assert (status, text) == (500, "no counters\n")
    assert ask(served, "/healthz")[0] == 200
    end()
    assert ask(served)[0] == 200


def test_a_probe_says_what_the_process_waits_for(served):
    assert ask(served, "/healthz")[:2] == (200, "ok\n")
    assert ask(served, "/readyz")[:2] == (200, "ok\n")
    served.why_not_ready = lambda: "its rows are loaded"
    assert ask(served, "/readyz")[:2] == (503, "its rows are loaded\n")
    assert ask(served, "/healthz")[0] == 200


def test_another_path_learns_which_there_are(served):
    served.add_route("/more", lambda host: Answer(host.encode(), "text/html"))
    status, text, _ = ask(served, "/other")
    assert status == 404
    assert "/metrics, /healthz, /readyz, /more" in text
    status, text, headers = ask(served, "/more?a=b")
    assert (status, text) == (200, f"127.0.0.1:{served.port}")
    assert headers["Content-Type"] == "text/html"
    assert ask(served, "/more", method="POST")[0] == 501


def test_a_client_needs_the_token_but_a_probe_does_not(monkeypatch):
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", TOKEN)
    endpoint = Endpoint("127.0.0.1", 0, LABELS)
    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    try:
        for given in ({}, {"Authorization": f"Bearer {TOKEN[1:]}"}):
            status, text, headers = ask(endpoint, **given)
            assert status == 401
            assert "PERSIA_HTTP_TOKEN" in text
            assert "Basic" in headers["WWW-Authenticate"]
            assert ask(endpoint, "/other", **given)[0] == 401
        for wrong in ("Basic ?", "Basic /w==", f"Basic {basic[:-4]}", "Bearer é"):
            assert ask(endpoint, Authorization=wrong.encode())[0] == 401
        for given in (f"Bearer {TOKEN}", f"Basic {basic}"):
            assert ask(endpoint, Authorization=given)[0] == 200
        assert ask(endpoint, "/healthz")[0] == ask(endpoint, "/readyz")[0] == 200
    finally:
        endpoint.close()


def test_a_page_of_another_site_reads_no_metrics(served, monkeypatch):
    served.add_route("/status.json", lambda _: Answer(b"{}"))
    for path in ("/metrics", "/status.json", "/other"):
        status, text, _ = ask(served, path, Host=f"evil.example:{served.port}")
        assert status == 403
        assert "The header Host must be of this host's loopback" in text
        assert ask(served, path, Host="localhost")[0] in (200, 404)
    for probe in ("/healthz", "/readyz"):
        assert ask(served, probe, Host="evil.example")[0] == 200
    served.hosts.add(["proxy.example"])
    assert ask(served, Host="proxy.example:80")[0] == 200
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", TOKEN)
    endpoint = Endpoint("127.0.0.1", 0, LABELS)
    try:
        headers = {"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}
        assert ask(endpoint, **headers)[0] == 200
    finally:
        endpoint.close()


def test_the_token_of_the_job_is_none_of_http(monkeypatch):
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", TOKEN)
    monkeypatch.delenv("PERSIA_JOB_TOKEN_FILE", raising=False)
    monkeypatch.setenv("PERSIA_JOB_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="PERSIA_HTTP_TOKEN must be another token"):
        Endpoint("127.0.0.1", 0, LABELS)


def test_a_process_takes_the_next_free_port_and_a_coordinator_its_own(monkeypatch):
    port, _, _ = draw_ports(3)
    monkeypatch.setenv("PERSIA_METRICS_PORT", str(port))
    first = begin("coordinator", 0, "seven", "127.0.0.1")
    second = begin("server", 0, "seven", "127.0.0.1")
    try:
        assert (first.port, second.port) == (port, port + 1)
        assert Endpoint.current is second
        with pytest.raises(ConfigError, match=rf"--metrics-port.*Received: {port}"):
            begin("coordinator", 0, "seven", "127.0.0.1")
    finally:
        first.close()
        second.close()
    assert Endpoint.current is None


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_a_port_that_is_none_is_rejected(monkeypatch, port):
    monkeypatch.setenv("PERSIA_METRICS_PORT", port)
    with pytest.raises(ConfigError, match="PERSIA_METRICS_PORT"):
        begin("server", 0, "", "127.0.0.1")


def test_a_request_that_does_not_arrive_is_closed(served, monkeypatch):
    monkeypatch.setattr(timeouts, "METRICS_HTTP_S", 0.3)
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.settimeout(DEADLINE_S)
        slow.sendall(b"GET /metrics HT")
        assert slow.recv(1) == b""
    assert ask(served, "/healthz")[0] == 200


@contextlib.contextmanager
def connected(endpoint, num, sent=b""):
    """Return connections over which these bytes were sent, during a block."""
    raise_descriptor_limit()
    place = ("127.0.0.1", endpoint.port)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(place, DEADLINE_S))
            for _ in range(num)
        ]
        for one in opened:
            with contextlib.suppress(OSError):  # it is closed already
                one.sendall(sent)
        yield opened


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: a"])
def test_a_thousand_connections_without_a_head_keep_no_client_waiting(served, sent):
    with connected(served, 1000, sent) as idle:
        for path in ("/healthz", "/readyz", "/metrics", "/healthz"):
            assert ask(served, path)[0] == 200
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # the oldest have been closed
        assert threading.active_count() < 200


def test_probes_are_answered_beside_as_many_requests_as_may_be_in_progress(served):
    begun, may_end = threading.Semaphore(0), threading.Event()

    def wait(_):
        begun.release()
        assert may_end.wait(DEADLINE_S)
        return Answer(b"waited")

    served.add_route("/wait", wait)
    asked = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(served, 16, asked) as waiting:
        for _ in waiting:
            assert begun.acquire(timeout=DEADLINE_S)
        with connected(served, 100):
            assert ask(served)[:2] == (503, "16 requests are in progress.\n")
            assert ask(served, "/healthz")[0] == ask(served, "/readyz")[0] == 200
        may_end.set()
        for one in waiting:
            assert b" 200 OK" in one.recv(100)
    wait_until(lambda: ask(served)[0] == 200, "metrics are answered again")


def test_a_push_and_a_scrape_have_means_of_their_own(gateway, monkeypatch):
    monkeypatch.setenv("PERSIA_METRICS_PORT", str(draw_ports(1)[0]))
    settings = MetricsSettings(push_interval_seconds=3600)
    assert is_published(settings)
    endpoint = begin("trainer", 2, "seven", "127.0.0.1")
    totals = [10.0, 2]

    def read(means: Means):
        return [Reading("time", means.since_last("time", *totals) or 0.0, "s")]

    end = publish_metrics("nn_worker", 2, settings, read)
    try:
        assert samples(ask(endpoint)[1])["time",].value == 5.0
        totals[:] = [40.0, 4]
        assert samples(ask(endpoint)[1])["time",].value == 15.0
        end()
        assert gateway.pushes()[-1].values["time"] == 10.0
        assert "time" not in {name for name, *_ in samples(ask(endpoint)[1])}
    finally:
        endpoint.close()
    monkeypatch.delenv("PERSIA_METRICS_GATEWAY_ADDR")
    assert not is_published(settings)
