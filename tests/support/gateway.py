"""A metrics gateway for tests: takes pushes by HTTP and keeps them."""

import threading
import time
from base64 import urlsafe_b64decode
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote

from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import DEADLINE_S


@dataclass(frozen=True)
class Push:
    """What one push said.

    Attributes:
        labels: of its group.
        values: name -> value, of metrics without a label.
        features: name -> feature -> value, of the others.
        kinds: name of a family -> type.
        came_s: when it came.
    """

    labels: dict[str, str]
    values: dict[str, float]
    features: dict[str, dict[str, float]]
    kinds: dict[str, str]
    came_s: float

    def names(self) -> set[str]:
        return self.values.keys() | self.features.keys()


class Gateway:
    """Listens on loopback; any thread may look at what has come.

    Args:
        status: what pushes are answered with.
    """

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self._changed = threading.Condition()
        self._pushes: list[Push] = []  # guarded by _changed
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="gateway", args=(0.02,)
        )
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(DEADLINE_S)
        self._server.server_close()

    def pushes(self, **labels: str) -> list[Push]:
        """Return the pushes with these labels, in their order."""
        with self._changed:
            return self._of(labels)

    def wait(self, num: int = 1, **labels: str) -> list[Push]:
        """Wait until there are so many pushes with these labels; return them."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self._of(labels)) >= num, DEADLINE_S
            )
            assert came, f"{len(self._of(labels))} of {num} pushes with {labels}"
            return self._of(labels)

    def next(self, **labels: str) -> Push:
        """Wait for the second push from now on: all it says was read after this."""
        return self.wait(len(self.pushes(**labels)) + 2, **labels)[-1]

    def _of(self, labels: dict[str, str]) -> list[Push]:
        return [p for p in self._pushes if labels.items() <= p.labels.items()]

    def _take(self, method: str, path: str, text: str) -> None:
        assert method == "PUT"
        first, *parts = path.strip("/").split("/")
        assert first == "metrics"
        labels = dict(map(_label, parts[::2], parts[1::2]))
        values, features, kinds = {}, {}, {}
        for family in text_string_to_metric_families(text):
            kinds[family.name] = family.type
            for sample in family.samples:
                feature = sample.labels.get("feat")
                if feature is None:
                    values[sample.name] = sample.value
                else:
                    features.setdefault(sample.name, {})[feature] = sample.value
        with self._changed:
            now_s = time.monotonic()
            self._pushes.append(Push(labels, values, features, kinds, now_s))
            self._changed.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                length = int(self.headers["Content-Length"])
                text = self.rfile.read(length).decode()
                status = gateway.status  # read before a test hears of the push
                gateway._take(self.command, self.path, text)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _label(name: str, value: str) -> tuple[str, str]:
    """Return a label as it stands in a URL."""
    plain = name.removesuffix("@base64")
    if plain == name:
        return name, unquote(value)
    return plain, urlsafe_b64decode(value).decode()
