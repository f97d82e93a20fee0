"""The HTTP server of predictions: ``app.py`` on uvicorn, in a thread of its own.

Connections are kept alive. One that does not send a request's head within the time
limit is closed, so that half-sent requests cost the other clients nothing. Without
``PERSIA_HTTP_TOKEN`` it listens on the loopback, or where ``--open`` says.
"""

import asyncio
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import uvicorn
from prometheus_client import Histogram
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from persia_torchrec import env, timeouts
from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import ConfigError
from persia_torchrec.rpc.addresses import open_listening, require_token
from persia_torchrec.rpc.browsers import AllowedHosts
from persia_torchrec.rpc.http_tokens import HttpTokens
from persia_torchrec.serving.app import BEGAN_S, WHEN_LOST, Application, Decode
from persia_torchrec.serving.http_requests import Limits
from persia_torchrec.serving.models import Models

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_MEASURE_S = 0.25  # between two measurements of the delay


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Settings of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    open_to: str | None = field(default=None, metadata={"flag": "--open"})
    """Address to listen on without a token, in place of ``--host``."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the header Host, beside those of the loopback, under which a server
    without a token is asked, as by a proxy that passes its own name on."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    grpc_port: int | None = None
    """Port of gRPC; 0 takes a free one [no gRPC]"""
    max_requests: int = 64
    """Requests that may be in progress; more are rejected with status 429."""
    max_body_bytes: int = 64 * 2**20
    """Bytes that a request may have; a larger one is rejected with status 413."""
    max_samples: int = 65535
    """Samples that a batch may have; a larger one is rejected with status 413."""
    receive_timeout_s: float = timeouts.HTTP_RECEIVE_S
    """Seconds within which a request must arrive."""
    tls_cert: str | None = None
    """File of the certificate, and those between it and the root, as PEM."""
    tls_key: str | None = None
    """File of the certificate's private key, as PEM."""
    access_log: bool = False
    """Log each request: client, path, status and milliseconds."""

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= MAX_PORT:
                raise ConfigError(
                    f"{name} must be in [0, {MAX_PORT}]. Received: {port}."
                )
        limits = "max_requests", "max_body_bytes", "max_samples", "receive_timeout_s"
        for name in limits:
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"{name} must be > 0. Received: {value}.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key must be given together.")

    def require_tls(self) -> None:
        """Raise ConfigError unless the files of TLS, if any, are a pair."""
        if self.tls_cert is None:
            return
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as exc:
            raise ConfigError(
                "tls_cert and tls_key must be PEM files of a certificate and its key. "
                f"Received: {self.tls_cert}, {self.tls_key} ({exc})."
            ) from exc

    @property
    def address(self) -> str:
        """The address to listen on."""
        return self.host if self.open_to is None else self.open_to

    @property
    def limits(self) -> Limits:
        """What a request may take."""
        return Limits(
            self.max_requests,
            self.max_body_bytes,
            self.max_samples,
            self.receive_timeout_s,
        )

    def tokens(self) -> HttpTokens:
        """Return the tokens of clients.

        Raises:
            ConfigError: two are the same, or there is none for a public address.
        """
        if self.open_to is None:
            require_token(self.host, env.http_token(), "PERSIA_HTTP_TOKEN")
        return HttpTokens.of_environment()

    def hosts(self) -> AllowedHosts:
        """Return the hosts that requests may name: any with a token or ``--open``."""
        is_any = self.open_to is not None or env.http_token() is not None
        return AllowedHosts(self.address, self.allowed_hosts, is_any=is_any)


class PredictionServer:
    """Answers requests from the constructor to :meth:`close`.

    Attributes:
        address: URL of the server.
        models: what it predicts with.

    Args:
        decoders: by Content-Type, what reads a request to ``/predict``; none: there is
            no such path.
    """

    def __init__(
        self,
        models: Models,
        config: HttpConfig,
        decoders: Mapping[str, Decode] = MappingProxyType({}),
    ) -> None:
        config.require_tls()
        self.models = models
        self._application = Application(
            models, config.limits, config.tokens(), config.hosts(), decoders
        )
        logging.getLogger(
            "persia_torchrec.serving.access"
        ).disabled = not config.access_log
        listening = _listen(config.address, config.port)
        settings: Any = uvicorn.Config(
            self._application,
            http=_protocol(config.receive_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=timeouts.HTTP_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(timeouts.HTTP_CLOSE_S),
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._server = _Server(settings, models.statistics.loop_delay)
        self._thread = threading.Thread(
            target=self._serve, name="http", args=(listening,)
        )
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if config.tls_cert is None else "https"
        self.address = f"{scheme}://{host}:{port}"
        self._thread.start()

    def _serve(self, listening: socket.socket) -> None:
        try:
            self._server.run(sockets=[listening])
        finally:
            listening.close()

    def close(self) -> None:
        """Finish the requests in progress, and accept no more. May be called twice."""
        self._server.should_exit = True
        self._thread.join()
        self._application.close()


class _Server(uvicorn.Server):
    """Measures by how much its event loop is late."""

    def __init__(self, config: uvicorn.Config, delay: Histogram) -> None:
        super().__init__(config)
        self._delay = delay

    async def main_loop(self) -> None:
        measuring = asyncio.create_task(self._measure())
        try:
            await super().main_loop()
        finally:
            measuring.cancel()

    async def _measure(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + _MEASURE_S
            await asyncio.sleep(_MEASURE_S)
            self._delay.observe(max(clock() - due_s, 0.0))


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise ConfigError."""
    try:
        return open_listening(host, port)
    except OSError as exc:
        raise ConfigError(
            f"The server must be able to listen on {host}:{port}. "
            f"Received: {exc}. Give another --host or --port."
        ) from exc


class _Protocol(HttpToolsProtocol):
    """Closes a connection whose request does not come, or whose answer is not read.

    A request's head must come within ``receive_timeout_s``. An answer must be read in
    the time that an idle connection stays open, so that no other is kept in memory.
    What is in ``when_lost`` is called when a connection is lost.
    """

    receive_timeout_s = timeouts.HTTP_RECEIVE_S
    when_lost: set[Callable[[], None]]
    head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.when_lost = set()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.head is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[BEGAN_S] = time.perf_counter()

    def on_headers_complete(self) -> None:
        self._drop_timer()
        scope: Any = self.scope
        scope[WHEN_LOST] = self.when_lost
        super().on_headers_complete()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            at_once = struct.pack("ii", 1, 0)  # not when the other side has read it
            opened = self.transport.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_timer()
        for call in self.when_lost:
            call()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self.head = self.loop.call_later(self.receive_timeout_s, self.transport.close)

    def _drop_timer(self) -> None:
        if self.head is not None:
            self.head.cancel()
            self.head = None


def _protocol(timeout_s: float) -> type[HttpToolsProtocol]:
    """Return the protocol with a time limit of a request's head."""
    return type("Protocol", (_Protocol,), {"receive_timeout_s": timeout_s})
