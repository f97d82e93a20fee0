"""What a client of HTTP or gRPC may ask, by the token that it sends.

    PERSIA_HTTP_TOKEN         reads and predicts: metrics, status, metadata, statistics
    PERSIA_HTTP_ADMIN_TOKEN   does that, and loads and unloads versions of models

Without either all may do all. A token comes as ``Authorization: Bearer TOKEN`` or, as
browsers ask their user for it, as the password of basic authentication.
"""

import base64
import binascii
import contextlib
import hmac
from typing import NamedTuple

from persia_torchrec import env


class Rejection(NamedTuple):
    """Why a client may not ask, and the status of HTTP that says so."""

    status: int
    text: str


class HttpTokens:
    """The tokens of a process, each None if unset. Any thread may ask."""

    def __init__(self, reader: str | None, admin: str | None) -> None:
        self._reader, self._admin = reader, admin

    @classmethod
    def of_environment(cls) -> "HttpTokens":
        """Return those of the variables of this process."""
        return cls(env.http_token(), env.http_admin_token())

    def why_rejected(
        self, authorization: str, *, changes: bool = False
    ) -> Rejection | None:
        """Return why a request is rejected, by its header; None: it is not."""
        if self._reader is None and (self._admin is None or not changes):
            return None
        given = _token_of(authorization)
        if _are_same(given, self._admin):
            return None
        if _are_same(given, self._reader):
            return self._of_changes() if changes else None
        name = "PERSIA_HTTP_ADMIN_TOKEN" if changes else "PERSIA_HTTP_TOKEN"
        return Rejection(
            401, f"'Authorization: Bearer TOKEN' must have the server's {name}."
        )

    def _of_changes(self) -> Rejection:
        """Return what a client is told whose token predicts and reads."""
        what = (
            "PERSIA_HTTP_ADMIN_TOKEN must be sent to load or unload a model. Received"
        )
        if self._admin is None:
            return Rejection(
                403,
                f"{what}: PERSIA_HTTP_TOKEN, and the server has no other. Set "
                "PERSIA_HTTP_ADMIN_TOKEN_FILE, or PERSIA_HTTP_ADMIN_TOKEN, at the "
                "server.",
            )
        return Rejection(403, f"{what}: PERSIA_HTTP_TOKEN, which predicts and reads.")


def _token_of(authorization: str) -> str:
    """Return what a header has as token or password; "": none."""
    scheme, _, given = authorization.partition(" ")
    if scheme == "Basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(given).decode().partition(":")[2]
    return given if scheme == "Bearer" else ""


def _are_same(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())
