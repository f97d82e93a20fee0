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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client import push_to_gateway
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from persia_torchrec import env
from persia_torchrec.config import MetricsSettings
from persia_torchrec.errors import PersiaError
from persia_torchrec.metrics import Reading
from persia_torchrec.wire.ports import local_address

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 5.0
"""What one push may wait for the gateway."""

LAST_PUSH_TIMEOUT_S = 2.0
"""The same, at the end of the role."""

CLOSE_TIMEOUT_S = 3.0
"""What the end of a role may wait for the last push, and one under way."""

_WARNING_S = 60.0
"""Seconds between two warnings."""

Read = Callable[[], Sequence[Reading]]
"""Returns the current metrics; the pushing thread calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where metrics go, and under which labels."""

    host: str
    """Of the gateway: a name, or an address without brackets."""

    port: int
    """Of the gateway."""

    job: str
    """The label ``job``."""

    instance: str
    """The label ``instance``."""

    role: str
    """The label ``role``."""

    @property
    def gateway(self) -> str:
        """Host and port as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def is_pushed(settings: MetricsSettings) -> bool:
    """Return whether metrics are enabled, and the environment names a gateway.

    Raises:
        ConfigError: the variable does not name a gateway.
    """
    return env.metrics_gateway() is not None and settings.enable_metrics


def push_metrics(
    role: str, index: int, settings: MetricsSettings, read: Read
) -> "Pushes | None":
    """Start to push metrics, if they are enabled and the environment names a gateway.

    Args:
        role: as PERSIA's launcher calls it.
        index: which replica of the role this is.
        settings: of the global config.
        read: see ``Read``.

    Returns:
        Pushes metrics until it is closed; None where none are pushed.

    Raises:
        ConfigError: the variable does not name a gateway.
    """
    gateway = env.metrics_gateway()
    if gateway is None or not settings.enable_metrics:
        logger.info(
            "metrics are not pushed gateway=%s enable_metrics=%s",
            *(gateway, settings.enable_metrics),
        )
        return None
    destination = Destination(
        host=gateway[0],
        port=gateway[1],
        job=settings.job_name,
        instance=f"rep_{index}",
        role=role,
    )
    return Pushes(destination, settings.push_interval_seconds, read)


class Pushes:
    """Pushes metrics until it is closed. Any thread may close it.

    Args:
        destination: see :class:`Destination`.
        interval_s: seconds from one push to the next.
        read: see ``Read``; an error that it raises is logged like a failed push.
    """

    def __init__(self, destination: Destination, interval_s: float, read: Read) -> None:
        self._to = destination
        self._interval_s = interval_s
        self._read = read
        self._closing = threading.Event()
        self._num_failed = 0  # in a row; owned by the thread
        self._warned_s = float("-inf")  # owned by the thread
        self._thread = threading.Thread(
            target=self._run, name="metrics pushes", daemon=True
        )
        self._thread.start()
        logger.info("metrics are pushed %s interval_s=%g", destination, interval_s)

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
            readings = self._read()
            push_to_gateway(
                self._to.gateway,
                self._to.job,
                _Collected(readings),
                {
                    "instance": self._to.instance,
                    "ip_addr": local_address(self._to.host),  # it may change
                    "role": self._to.role,
                },
                timeout_s,
                _sender,
            )
        except (OSError, http.client.HTTPException, PersiaError) as exc:
            self._warn(exc, has_traceback=False)
        except Exception as exc:  # noqa: BLE001  # the role continues without metrics
            self._warn(exc, has_traceback=True)
        else:
            if self._num_failed:
                logger.info("metrics reach %s again", self._to.gateway)
            self._num_failed = 0

    def _warn(self, exc: Exception, *, has_traceback: bool) -> None:
        self._num_failed += 1
        if time.monotonic() - self._warned_s < _WARNING_S:
            return
        self._warned_s = time.monotonic()
        logger.warning(
            "no metrics reach %s, failed pushes in a row: %d (%s)",
            *(self._to.gateway, self._num_failed, exc),
            exc_info=has_traceback,
        )


def _sender(
    url: str,
    method: str,
    timeout: float | None,
    headers: list[tuple[str, str]],
    data: bytes,
) -> Callable[[], None]:
    """Return a function that sends a request, without a proxy, unlike the library's.

    The gateway is in the network of the job, as servers and workers are.
    """

    def send() -> None:
        request = Request(url, data, dict(headers), method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=timeout):
            pass

    return send


class _Collected(Collector):
    """Readings as the library expects them: those of one name together."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for reading in self._readings:
            family = families.get(reading.name)
            if family is None:
                kind = "unknown" if reading.kind == "untyped" else reading.kind
                family = Metric(reading.name, reading.help, kind)
                families[reading.name] = family
            ending = "_total" if reading.kind == "counter" else ""
            labels = {} if reading.feature is None else {"feat": reading.feature}
            family.add_sample(reading.name + ending, labels, reading.value)
        yield from families.values()
