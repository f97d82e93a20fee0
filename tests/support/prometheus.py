"""Debian's Prometheus, with the files of ``examples/metrics``, on the loopback."""

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from tests.support.ports import draw_port
from tests.support.processes import wait_until
from tests.support.repository import ROOT
from tests.support.servers import DEADLINE_S

FILES = ROOT / "examples/metrics"


def require_prometheus() -> None:
    """Skip a test where Prometheus is not installed."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("needs prometheus and promtool: make system, or apt-get install")


class Prometheus:
    """One Prometheus that scrapes every second; a block ends it.

    Args:
        folder: for its configuration and its data.
        jobs: URLs of ``/targets``.
        targets: further endpoints, as ``host:port``.
    """

    def __init__(
        self, folder: Path, jobs: Sequence[str], targets: Sequence[str] = ()
    ) -> None:
        require_prometheus()
        self._url = f"http://127.0.0.1:{draw_port()}"
        settings = yaml.safe_load((FILES / "prometheus.yml").read_text())
        of_jobs, _ = settings["scrape_configs"]
        (found,) = of_jobs["http_sd_configs"]
        every = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        of_jobs |= every
        of_jobs["http_sd_configs"] = [
            {**found, "url": url, "refresh_interval": "1s"} for url in jobs
        ]
        static = {"job_name": "static", "honor_labels": True, **every}
        static["static_configs"] = [{"targets": [*targets]}]
        settings["scrape_configs"] = [of_jobs, static]
        settings["global"] = {"evaluation_interval": "1s"}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        shutil.copy(FILES / "alerts.yml", folder)
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                *("prometheus", "--config.file", folder / "prometheus.yml"),
                *("--storage.tsdb.path", folder / "data"),
                *("--web.listen-address", self._url.removeprefix("http://")),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        wait_until(self._is_ready, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression, each with ``metric`` and ``value``."""
        found = self._get("query", query=expression)["result"]
        return [{**one, "value": float(one["value"][1])} for one in found]

    def names(self) -> set[str]:
        """Return the names of all metrics."""
        return set(self._get("label/__name__/values"))

    def rules(self) -> list[dict[str, Any]]:
        """Return all alert rules, each with ``name``, ``health`` and ``state``."""
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, path: str, **query: str) -> Any:
        words = urllib.parse.urlencode(query)
        url = f"{self._url}/api/v1/{path}?{words}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{query or path}: {exc.read().decode()}") from exc

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        with contextlib.suppress(OSError):
            url = f"{self._url}/-/ready"
            return bool(urllib.request.urlopen(url, timeout=DEADLINE_S).status == 200)
        return False
