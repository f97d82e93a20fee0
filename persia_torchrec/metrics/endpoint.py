"""The metrics of a process over HTTP, for Prometheus: whether it lives, and is ready.

    GET /metrics   all that the process measures, in Prometheus' text format
    GET /healthz   200 while the process answers
    GET /readyz    200, or 503 with what it waits for

A process of a job has one where ``PERSIA_METRICS_PORT`` is set, from its registration
to its end; without the variable this module is not loaded. The port is that one, or the
next that is free, as several processes share a host; the coordinator's is exactly that
one, and it tells where the others are (``job/status_page.py``). With
``PERSIA_HTTP_TOKEN`` all but the two probes ask for it, as a bearer token or, for
browsers, as the password of basic authentication; without it, on the loopback, they
answer pages of this host alone, as ``rpc/browsers.py`` says.

Sources are called when a client asks, one at a time; between requests nothing runs.
It is Python's own server: to import Starlette and uvicorn, which answer predictions,
takes 0.15 s and 13 MB of each server and trainer, where this takes 0.06 s and 7 MB.
"""

import contextlib
import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.metrics.values import BIN_ENDS_S, Means, Reading
from persia_torchrec.rpc.addresses import join_address, open_listening
from persia_torchrec.rpc.browsers import AllowedHosts
from persia_torchrec.rpc.http_tokens import HttpTokens

logger = logging.getLogger(__name__)

Read = Callable[[Means], Sequence[Reading]]
"""Returns the current metrics; a thread of the reader calls it. An error that it raises
is logged like a failed push, and answered to a scrape."""

ROLES = {
    "coordinator": "coordinator",
    "server": "embedding_parameter_server",
    "worker": "embedding_worker",
    "loader": "data_loader",
    "trainer": "nn_worker",
    "predictor": "predictor",
}
"""What the label ``role`` says of a role of a job: names of PERSIA's launcher."""

_NUM_PORTS = 1000  # from the given one on, of which a process takes the first free one
_MAX_CONNECTIONS = 64  # for a further one the oldest that has sent no head is closed
_MAX_REQUESTS = 16  # in progress, beside probes; further ones are answered 503
_PROBES = "/healthz", "/readyz"
_TEXT = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What is answered to a request."""

    body: bytes
    content_type: str = _TEXT
    status: int = 200


Route = Callable[[str], Answer]
"""Answers a request; it is given the host by which the client has reached it."""


@dataclass
class Readings(Collector):
    """Readings as ``prometheus_client`` expects them: those of one name together."""

    readings: Sequence[Reading]

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each name."""
        families: dict[str, Metric] = {}
        for reading in self.readings:
            name = reading.name
            kind = "unknown" if reading.kind == "untyped" else reading.kind
            family = families.setdefault(name, Metric(name, reading.help, kind))
            if kind == "histogram":
                _add_histogram(family, reading)
                continue
            ending = "_total" if kind == "counter" else ""
            labels = {} if reading.feature is None else {"feat": reading.feature}
            family.add_sample(name + ending, labels, reading.value)
        yield from families.values()


def _add_histogram(family: Metric, reading: Reading) -> None:
    so_far = 0
    for end_s, num in zip(BIN_ENDS_S, reading.bins, strict=True):
        so_far += num
        end = "+Inf" if end_s == BIN_ENDS_S[-1] else f"{end_s:g}"
        family.add_sample(f"{family.name}_bucket", {"le": end}, so_far)
    family.add_sample(f"{family.name}_count", {}, so_far)
    family.add_sample(f"{family.name}_sum", {}, reading.value)


@dataclass
class _Labelled(Collector):
    """Families of several collectors, each sample with the labels of the process."""

    collectors: Sequence[Collector]
    labels: Mapping[str, str]

    def collect(self) -> Iterator[Metric]:
        for collector in self.collectors:
            for family in collector.collect():
                family.samples = [
                    one._replace(labels={**self.labels, **one.labels})
                    for one in family.samples
                ]
                yield family


class Endpoint:
    """Answers from its constructor to :meth:`close`. Any thread may call any method.

    Args:
        host: address to listen on; "" is all of this machine.
        port: TCP port.
        labels: of all samples.
        num_ports: how many ports to try, from ``port`` on.

    Attributes:
        current: that of this process, if it has one.
        address: ``host:port``.
        hosts: by which it may be asked.
        why_not_ready: returns what the process waits for before it is ready, or "".

    Raises:
        ConfigError: no port is free, or the token is that of the job.
    """

    current: "ClassVar[Endpoint | None]" = None

    def __init__(
        self, host: str, port: int, labels: Mapping[str, str], *, num_ports: int = 1
    ) -> None:
        self.labels = labels
        self.why_not_ready: Callable[[], str] = lambda: ""
        self._tokens = HttpTokens.of_environment()
        self.hosts = AllowedHosts(host, is_any=env.http_token() is not None)
        self._reading = threading.Lock()  # one scrape at a time
        self._means = Means()  # guarded by _reading
        self._reads: list[Read] = []  # replaced, never changed
        self._collectors: list[Collector] = [ProcessCollector(registry=None)]
        self._routes: dict[str, Route] = {
            "/metrics": self._scrape,
            "/healthz": lambda _: Answer(b"ok\n"),
            "/readyz": self._probe,
        }
        listening = _listen(host, port, num_ports)
        self._server = _Server(listening, self)
        self.port = int(listening.getsockname()[1])
        self.address = join_address(host, self.port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics http", daemon=True
        )
        self._thread.start()

    def add(self, read: Read) -> Callable[[], None]:
        """Answer what is read, too; return a function that ends it."""
        self._reads = [*self._reads, read]

        def end() -> None:
            self._reads = [one for one in self._reads if one is not read]

        return end

    def add_collector(self, collector: Collector) -> None:
        """Answer the metrics of a collector of ``prometheus_client``, too."""
        self._collectors = [*self._collectors, collector]

    def add_route(self, path: str, route: Route) -> None:
        """Answer requests for one more path."""
        self._routes[path] = route

    def close(self) -> None:
        """Stop to answer. May be called twice."""
        if Endpoint.current is self:
            Endpoint.current = None
        self._server.shutdown()
        self._thread.join(timeouts.METRICS_HTTP_S)
        self._server.server_close()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format; raises what a source does."""
        with self._reading:
            readings = [one for read in self._reads for one in read(self._means)]
        collectors = [Readings(readings), *self._collectors]
        registry: Any = _Labelled(collectors, self.labels)  # it is only collected
        return generate_latest(registry)

    def answer(self, path: str, header: Callable[[str], str | None]) -> Answer:
        """Return the answer to a GET of a path."""
        route = self._routes.get(path)
        is_probe = path in _PROBES
        given = header("Authorization") or ""
        if not is_probe and (rejected := self._tokens.why_rejected(given)):
            return Answer(f"{rejected.text}\n".encode(), _TEXT, rejected.status)
        if not is_probe and (why := self.hosts.why_rejected("GET", header)):
            return Answer(f"{why}\n".encode(), _TEXT, 403)
        if route is None:
            known = ", ".join(self._routes)
            return Answer(f"The path must be one of {known}.\n".encode(), _TEXT, 404)
        try:
            return route(header("Host") or "")
        except Exception as exc:  # noqa: BLE001  # who asks is told
            logger.warning("%s could not be answered: %r", path, exc)
            return Answer(f"{exc}\n".encode(), _TEXT, 500)

    def _scrape(self, _: str) -> Answer:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Answer(self.exposition(), kind)

    def _probe(self, _: str) -> Answer:
        why = self.why_not_ready()
        return Answer(f"{why or 'ok'}\n".encode(), _TEXT, 503 if why else 200)


def begin(role: str, index: int, job_id: str, host: str) -> Endpoint:
    """Serve the metrics of this process from now on.

    At ``PERSIA_METRICS_PORT``, which must be set. ``role`` is one of ``ROLES``;
    ``host`` the address to listen on.
    """
    port = env.metrics_port()
    assert port is not None, "PERSIA_METRICS_PORT"
    num_ports = 1 if role == "coordinator" else _NUM_PORTS
    name = env.text("PERSIA_METRICS_JOB_NAME") or job_id
    labels = labels_of(role, index, job_id, name)
    endpoint = Endpoint(host, port, labels, num_ports=num_ports)
    Endpoint.current = endpoint
    logger.info("metrics are served at http://%s/metrics", endpoint.address)
    return endpoint


def labels_of(role: str, index: int, job_id: str, name: str = "") -> dict[str, str]:
    """Return the labels of a process: those of a push, without its address."""
    labels = {"job": name or job_id or "persia", "role": ROLES[role]}
    labels["instance"] = f"rep_{index}"
    return labels | ({"job_id": job_id} if job_id else {})


def _listen(host: str, port: int, num_ports: int) -> socket.socket:
    last = min(port + num_ports - 1, env.MAX_PORT)
    for number in range(port, last + 1):
        try:
            return open_listening(host, number)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or number == last:
                others = f", or one of those up to {last}" if last > port else ""
                raise ConfigError(
                    f"PERSIA_METRICS_PORT (--metrics-port) must be a port{others} that "
                    f"is free at {host or 'this machine'}. Received: {number}, {exc}."
                ) from exc
    raise AssertionError("unreachable")


class _Server(ThreadingHTTPServer):
    """A thread a connection, each with a deadline, and at most so many at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, endpoint: Endpoint) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # until when, oldest first. guarded by _lock
        self._asked: set[Any] = set()  # those whose head is there. guarded by _lock
        self._num_answered = 0  # now, beside probes. guarded by _lock

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = None
            if len(self._open) >= _MAX_CONNECTIONS:
                silent = (one for one in self._open if one not in self._asked)
                oldest = next(silent, request)
                self._open.pop(oldest, None)
            if oldest is not request:
                self._open[request] = time.monotonic() + timeouts.METRICS_HTTP_S
        if oldest is request:
            self.shutdown_request(request)
            return
        if oldest is not None:
            _end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._asked.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End requests that take too long; called twice a second."""
        with self._lock:
            now_s, begun = time.monotonic(), list(self._open.items())
        for request, until_s in begun:
            if now_s > until_s:
                _end(request)

    def have_asked(self, request: Any) -> None:
        """Keep a connection whose head is there."""
        with self._lock:
            self._asked.add(request)

    @contextlib.contextmanager
    def answering(self) -> Iterator[bool]:
        """Tell whether one more request may be answered, during a block."""
        with self._lock:
            may = self._num_answered < _MAX_REQUESTS
            self._num_answered += may
        try:
            yield may
        finally:
            with self._lock:
                self._num_answered -= may

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of %s broke: %r", client_address, sys.exception())


def _end(request: Any) -> None:
    """Have the thread of a connection see its end."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request a connection."""

    server: _Server
    timeout = timeouts.METRICS_HTTP_S
    server_version, sys_version = "persia", ""

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        self.server.have_asked(self.connection)
        return is_valid

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in _PROBES:
            self._send(self.server.endpoint.answer(path, self.headers.get))
            return
        with self.server.answering() as may:
            if may:
                self._send(self.server.endpoint.answer(path, self.headers.get))
        if not may:
            text = f"{_MAX_REQUESTS} requests are in progress.\n"
            self._send(Answer(text.encode(), _TEXT, 503))

    def _send(self, answer: Answer) -> None:
        body, content_type, status = answer
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Bearer, Basic realm="persia"')
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
