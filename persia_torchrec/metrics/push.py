"""Metrics of a process: pushed to a Prometheus pushgateway, served at its endpoint.

Where it has an endpoint (``metrics/endpoint.py``), that asks for them. Where the
environment names a gateway, a thread reads them at intervals and sends them by HTTP,
under PERSIA's labels and two more:

    job          PERSIA_METRICS_JOB_NAME, or job_name of the metrics_config; where both
                 are not set, the job's id
    instance     rep_<index of the replica, or rank>
    ip_addr      of the interface that routes to the gateway
    role         embedding_parameter_server, embedding_worker or nn_worker
    job_id       the job's id, where this process belongs to a job

Role and id are labels because a gateway keeps only the last push under equal labels:
roles that share a host share its address, and jobs may have been given one name. Only
the last push, when the role ends, may delay it. One that fails is logged, at most once
a minute; it loses no data, since metrics are cumulative counters or current gauges.
"""

import http.client
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client import push_to_gateway

from persia_torchrec import env, timeouts
from persia_torchrec.errors import PersiaError
from persia_torchrec.job.member import JobMember
from persia_torchrec.metrics.endpoint import Endpoint, Read, Readings
from persia_torchrec.metrics.push_settings import MetricsSettings
from persia_torchrec.metrics.values import Means
from persia_torchrec.rpc.addresses import local_address

logger = logging.getLogger(__name__)


_WARNING_S = 60.0  # seconds between two warnings
_EXPECTED = (OSError, http.client.HTTPException, PersiaError)  # without a traceback


def is_pushed(settings: MetricsSettings) -> bool:
    """Return whether metrics are enabled, and the environment names a gateway."""
    return env.metrics_gateway() is not None and settings.enable_metrics


def is_published(settings: MetricsSettings) -> bool:
    """Return whether a gateway or an endpoint reads metrics."""
    return Endpoint.current is not None or is_pushed(settings)


def publish_metrics(
    role: str, index: int, settings: MetricsSettings, read: Read
) -> Callable[[], None]:
    """Serve metrics at the endpoint, if there is one, and :func:`push_metrics`.

    Returns a function that ends both.
    """
    ending = ExitStack()
    if Endpoint.current is not None:
        ending.callback(Endpoint.current.add(read))
    ending.callback(push_metrics(role, index, settings, read))
    return ending.close


def push_metrics(
    role: str, index: int, settings: MetricsSettings, read: Read
) -> Callable[[], None]:
    """Start to push metrics, if :func:`is_pushed`; return a function that ends it.

    That pushes once more, and waits for ``timeouts.PUSH_CLOSE_S`` at most. ``role`` is
    as PERSIA's launcher calls it, ``index`` that of the replica.
    """
    gateway, enabled = env.metrics_gateway(), settings.enable_metrics
    if gateway is None or not enabled:
        level = logging.DEBUG if gateway is None else logging.INFO
        not_pushed = "metrics are not pushed gateway=%s enable=%s"
        logger.log(level, not_pushed, gateway, enabled)
        return lambda: None
    host, port = gateway
    url = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    interval_s, member = settings.push_interval_seconds, JobMember.current
    job_id = env.job_id() if member is None else member.greeting.job_id
    is_named = settings.job_name != MetricsSettings().job_name
    named = settings.job_name if is_named or not job_id else job_id
    job = env.text("PERSIA_METRICS_JOB_NAME") or named
    labels = {"instance": f"rep_{index}", "role": role}
    labels |= {"job_id": job_id} if job_id else {}
    means = Means()

    def push(timeout_s: float) -> None:
        grouping = {**labels, "ip_addr": local_address(host)}  # which may change
        push_to_gateway(url, job, Readings(read(means)), grouping, timeout_s, _send)

    closing = threading.Event()
    thread = threading.Thread(
        target=_push_until,
        args=(closing, push, interval_s, url),
        name="metrics pushes",
        daemon=True,
    )
    thread.start()
    said = "metrics are pushed gateway=%s job=%s %s interval_s=%g"
    logger.info(said, url, job, labels, interval_s)

    def close() -> None:
        closing.set()
        thread.join(timeouts.PUSH_CLOSE_S)

    return close


def _push_until(
    closing: threading.Event, push: Callable[[float], None], interval_s: float, url: str
) -> None:
    num_failed, warned_s, is_last = 0, float("-inf"), False
    due_s = time.monotonic() + interval_s
    while not is_last:
        is_last = closing.wait(max(due_s - time.monotonic(), 0.0))
        try:
            push(timeouts.LAST_PUSH_S if is_last else timeouts.PUSH_S)
        except Exception as exc:  # the role continues without metrics
            num_failed += 1
            if time.monotonic() - warned_s >= _WARNING_S:
                warned_s = time.monotonic()
                logger.warning(
                    "pushing metrics to %s failed %d times in a row: %s",
                    url,
                    num_failed,
                    exc,
                    exc_info=not isinstance(exc, _EXPECTED),
                )
        else:
            if num_failed:
                logger.info("pushing metrics to %s succeeds again", url)
            num_failed = 0
        # From the last due time, so that the time of a push is not added; missed
        # pushes are skipped.
        due_s = max(due_s + interval_s, time.monotonic())


def _send(
    url: str, method: str, timeout: float | None, headers: Any, data: bytes
) -> Callable[[], None]:
    """Return a function that sends a request, without a proxy, unlike the library's."""

    def send() -> None:
        request = Request(url, data, dict(headers), method=method)
        build_opener(ProxyHandler({})).open(request, timeout=timeout).close()

    return send
