"""Metrics of a process, pushed to a Prometheus pushgateway.

A thread reads the metrics of its role at intervals and sends them by HTTP, under
PERSIA's labels and one more:

    job          job_name of the metrics_config
    instance     rep_<index of the replica, or rank>
    ip_addr      of the interface that routes to the gateway
    role         embedding_parameter_server, embedding_worker or nn_worker

The role is a label because a gateway keeps only the last push under equal labels, and
roles that share a host share its address.

No role waits for a gateway. A push that fails is logged, at most once a minute. Pushes
are idempotent: metrics are cumulative counters or current gauges, so a lost push loses
no data. The last push is made when the role ends; it alone may delay the process.
"""

import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client import push_to_gateway
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from persia_torchrec import env
from persia_torchrec.config.global_config import MetricsSettings
from persia_torchrec.errors import PersiaError
from persia_torchrec.metrics import Reading
from persia_torchrec.wire.ports import local_address

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 5.0
"""What one push may wait for the gateway."""

LAST_PUSH_TIMEOUT_S = 2.0
"""What the push at the end of the role may wait."""

CLOSE_TIMEOUT_S = 3.0
"""What the end of a role may wait for the last push, and one under way."""

_WARNING_S = 60.0
"""Seconds between two warnings."""

_EXPECTED = (OSError, http.client.HTTPException, PersiaError)
"""Errors of a push that are logged without a traceback."""

Read = Callable[[], Sequence[Reading]]
"""Returns the current metrics; the pushing thread calls it. An error that it raises is
logged like a failed push."""


def is_pushed(settings: MetricsSettings) -> bool:
    """Return whether metrics are enabled, and the environment names a gateway."""
    return env.metrics_gateway() is not None and settings.enable_metrics


def push_metrics(
    role: str, index: int, settings: MetricsSettings, read: Read
) -> "Pushes | None":
    """Start to push metrics until closed; return None if :func:`is_pushed` is false.

    ``role`` is as PERSIA's launcher calls it, ``index`` that of the replica.
    """
    gateway, enabled = env.metrics_gateway(), settings.enable_metrics
    if gateway is None or not enabled:
        logger.info("metrics are not pushed gateway=%s enable=%s", gateway, enabled)
        return None
    labels = {"job": settings.job_name, "instance": f"rep_{index}", "role": role}
    return Pushes(gateway, labels, settings.push_interval_seconds, read)


class Pushes:
    """Pushes metrics until it is closed. Any thread may close it."""

    def __init__(
        self,
        gateway: tuple[str, int],
        labels: dict[str, str],
        interval_s: float,
        read: Read,
    ) -> None:
        self._host, port = gateway
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = url = f"{host}:{port}"
        self._labels = labels
        self._interval_s = interval_s
        self._read = read
        self._closing = threading.Event()
        self._num_failed = 0  # in a row; owned by the thread
        self._warned_s = float("-inf")  # owned by the thread
        self._thread = threading.Thread(
            target=self._run, name="metrics pushes", daemon=True
        )
        self._thread.start()
        said = "metrics are pushed gateway=%s %s interval_s=%g"
        logger.info(said, url, labels, interval_s)

    def close(self) -> None:
        """Push once more, and stop. Waits for ``CLOSE_TIMEOUT_S`` at most."""
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due_s = time.monotonic() + self._interval_s
        while not self._closing.wait(max(due_s - time.monotonic(), 0.0)):
            self._push(PUSH_TIMEOUT_S)
            # From the last due time, so that the time of a push is not added; missed
            # pushes are skipped.
            due_s = max(due_s + self._interval_s, time.monotonic())
        self._push(LAST_PUSH_TIMEOUT_S)

    def _push(self, timeout_s: float) -> None:
        try:
            labels = {
                **self._labels,
                "ip_addr": local_address(self._host),
            }  # may change
            job, readings = labels.pop("job"), _Readings(self._read())
            push_to_gateway(self._url, job, readings, labels, timeout_s, _send)
        except Exception as exc:  # the role continues without metrics
            self._num_failed += 1
            if time.monotonic() - self._warned_s >= _WARNING_S:
                self._warned_s = time.monotonic()
                logger.warning(
                    "no metrics reach %s, failed pushes in a row: %d (%s)",
                    self._url,
                    self._num_failed,
                    exc,
                    exc_info=not isinstance(exc, _EXPECTED),
                )
        else:
            if self._num_failed:
                logger.info("metrics reach %s again", self._url)
            self._num_failed = 0


def _send(
    url: str, method: str, timeout: float | None, headers: Any, data: bytes
) -> Callable[[], None]:
    """Return a function that sends a request, without a proxy, unlike the library's.

    The gateway is in the network of the job, as servers and workers are.
    """

    def send() -> None:
        request = Request(url, data, dict(headers), method=method)
        build_opener(ProxyHandler({})).open(request, timeout=timeout).close()

    return send


@dataclass
class _Readings(Collector):
    """Readings as the library expects them: those of one name together."""

    readings: Sequence[Reading]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for reading in self.readings:
            name = reading.name
            kind = "unknown" if reading.kind == "untyped" else reading.kind
            family = families.setdefault(name, Metric(name, reading.help, kind))
            ending = "_total" if kind == "counter" else ""
            labels = {} if reading.feature is None else {"feat": reading.feature}
            family.add_sample(name + ending, labels, reading.value)
        yield from families.values()
