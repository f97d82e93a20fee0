"""What pages in a browser may ask of a listener over HTTP that asks for no token.

A page of any site reaches the loopback of the host whose browser shows it. It may send
a POST there, and once its own name resolves to 127.0.0.1 (DNS rebinding) it may read
what is answered. The browser names the site in the headers Host, Origin and
Sec-Fetch-Site; other clients send no Origin, and as Host the address they connect to.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from persia_torchrec.env import is_loopback

_READING = "GET", "HEAD"


class AllowedHosts:
    """The hosts by which a listener may be asked. Any thread may ask.

    Args:
        address: on which it listens; if it is not of the loopback, by any host.
        more: hosts that a proxy passes on, without ports.
        is_any: a request may name any host, as where clients have a token.
    """

    def __init__(
        self, address: str, more: Iterable[str] = (), *, is_any: bool = False
    ) -> None:
        self._is_any = is_any or not is_loopback(address)
        self._names = {_plain(name) for name in (address, *more)}
        self._is_own = lru_cache(256)(self._is_allowed)

    def add(self, names: Iterable[str]) -> None:
        """Allow more hosts, before the first request."""
        self._names |= set(map(_plain, names))

    def why_rejected(self, method: str, header: Callable[[str], str | None]) -> str:
        """Return why a request is rejected, by a header of a name; "": it is not."""
        if self._is_any:
            return ""
        host = header("Host")
        if host is not None and not self._is_own(host):
            return _rejected("Host", host)
        if method in _READING:
            return ""
        origin = header("Origin")
        if origin is not None and not self._is_own(origin.partition("://")[2]):
            return _rejected("Origin", origin)
        site = header("Sec-Fetch-Site")
        return _rejected("Sec-Fetch-Site", site) if site == "cross-site" else ""

    def _is_allowed(self, host: str) -> bool:
        name = _plain(host)
        return is_loopback(name) or name in self._names


def _plain(host: str) -> str:
    """Return the name of ``host:port`` in lower case, without brackets; "": invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:  # brackets that are not of IPv6
        return ""


def _rejected(header: str, given: str) -> str:
    return (
        f"The header {header} must be of this host's loopback, or of the address that "
        "the server listens on: without a token, pages of other sites that a browser "
        f"here shows are not answered. Received: {given!r:.100}. Ask by "
        "http://127.0.0.1, or set PERSIA_HTTP_TOKEN. A server of predictions takes "
        "what a proxy passes on by --allowed-hosts."
    )
