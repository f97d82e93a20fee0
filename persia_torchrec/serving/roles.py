"""What clients of an inference server may ask, by the token that they send.

    PERSIA_HTTP_TOKEN         predicts and reads: metadata, statistics, index, metrics
    PERSIA_HTTP_ADMIN_TOKEN   does that, and loads and unloads versions

Without either all may do all. HTTP and gRPC share these rules.
"""

import hmac
from typing import NamedTuple

from persia_torchrec import env


class Rejection(NamedTuple):
    """Why a client may not ask, and the status of HTTP that says so."""

    status: int
    text: str


class Roles:
    """The tokens of an inference server, each None if unset. Any thread may ask."""

    def __init__(self, client: str | None, admin: str | None) -> None:
        self._client = None if client is None else f"Bearer {client}".encode()
        self._admin = None if admin is None else f"Bearer {admin}".encode()

    @classmethod
    def of_environment(cls) -> "Roles":
        """Return those of the variables of this process."""
        return cls(env.http_token(), env.http_admin_token())

    def why_rejected(self, authorization: str, *, changes: bool) -> Rejection | None:
        """Return why a request is rejected, by its header; None: it is not."""
        if self._client is None and (self._admin is None or not changes):
            return None
        given = authorization.encode()
        if self._client is not None and hmac.compare_digest(given, self._client):
            return self._of_changes() if changes else None
        if self._admin is not None and hmac.compare_digest(given, self._admin):
            return None
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
