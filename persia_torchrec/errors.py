"""Every error this package raises.

Catch ``PersiaError`` to catch them all. ``assert`` is kept for what only a bug in
this package can break.
"""

import re

_USERINFO = re.compile(
    r"([a-z][a-z0-9+.-]*://)[^/\s'\"\\]*:[^/\s'\"\\]*@|(https?://)[^/\s'\"\\]*@",
    re.IGNORECASE,
)
_TWO_STOPS = re.compile(r"(?<=[\w)\]}'\"])\.\.(?=\s|$)")
_QUERY = re.compile(
    r"(https?://[^\s'\"\\?]*)\?[^\s'\"\\]*[^\s'\"\\.,:;)]", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user and password, and those of HTTP no query.

    It may be JSON. A name of a user alone, as that of a container in abfs, stays where
    the protocol is not HTTP.
    """
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1", _USERINFO.sub(r"\1\2", text))


def _told(text: str) -> str:
    text = without_secrets(text)
    return _TWO_STOPS.sub(".", text) if ".." in text else text


def has_password(text: str) -> bool:
    """Return whether a URL in a text has a password, or for HTTP a user."""
    return _USERINFO.search(text) is not None


class PersiaError(Exception):
    """Base class of every error raised by persia_torchrec; no URL shows a secret.

    A message of a library that ends with a full stop gets no second one.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_told(one) if isinstance(one, str) else one for one in args))


class ConfigError(PersiaError, ValueError):
    """A setting, or two settings together, cannot work."""


class BatchError(PersiaError, ValueError, RuntimeError):
    """A batch has a shape, dtype or length that is invalid; PERSIA has RuntimeError."""


class TooLargeError(BatchError):
    """A batch, or what a client of an inference server sends, is above a limit."""


class DataError(PersiaError, ValueError):
    """A file of training data is missing, malformed, or of other columns."""


class StoreError(PersiaError):
    """The embedding store cannot do what was asked of it."""


class CheckpointError(PersiaError):
    """A checkpoint cannot be written, or its files are missing, damaged or unfit."""


class BusyError(CheckpointError):
    """Another dump or load is running on a server."""


class WireError(PersiaError):
    """The bytes on the wire are not what both sides agreed on."""


class FrameError(WireError):
    """The bytes are not a message of this protocol version."""


class ServerError(PersiaError):
    """A server, or an embedding worker, did not do what was asked."""

    def __init__(self, message: str, *, server: str) -> None:
        super().__init__(f"{server}: {message}" if server else message)
        # As ``embedding server 1 at tcp://127.0.0.1:7000``, or empty: this process
        self.server = server


class RequestTimeoutError(ServerError, TimeoutError):
    """No reply came within the deadline."""


class TokenError(ServerError, PermissionError):
    """The other side does not accept this process as one of its job."""


class NotReadyError(ServerError):
    """The server compiles its loops, or restores its rows, and answers afterwards."""


class RestartedError(ServerError):
    """The server was started again without its rows, or with older ones."""


class FencedError(PersiaError):
    """A stream belongs to trainers whose group was started again since."""


class RemoteError(ServerError):
    """The other side raised; its own message follows."""

    def __init__(self, message: str, *, server: str, kind: str) -> None:
        super().__init__(f"{kind}: {message}", server=server)
        self.kind = kind  # the error class on the other side, as ``ConfigError``


class StalenessError(PersiaError, TimeoutError):
    """No permit of the staleness bound became free within the deadline."""


class DataflowError(PersiaError):
    """A batch did not get from the data loader to the trainer."""


class LostBatchError(DataflowError):
    """An embedding worker lacks what it had of a batch, as one that has restarted."""


class JobMismatchError(PersiaError):
    """The address belongs to another job, which continues, or the index is taken."""


class JobError(PersiaError):
    """Another part of the job failed, or the job ended."""


class DiscoveryError(JobError, TimeoutError):
    """A role of the job did not register within the deadline."""
