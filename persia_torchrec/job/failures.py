"""Failure reporting: the text of a job's failure, and its recipients.

The reason of a failed job begins with the member that has failed, or with the
coordinator, which names the member: ``coordinator: trainer 0 (process 7) was killed``.
"""

import contextlib
import json
import re
import socket
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    DataError,
    PersiaError,
    RemoteError,
    RequestTimeoutError,
    ServerError,
    without_secrets,
)

_ROLES = "coordinator", "server", "worker", "loader", "trainer", "predictor"

_PACKAGE = str(Path(env.__file__).parent)
_LIBRARIES = (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_OF_DISTRIBUTED = str(Path("torch", "distributed"))

# What the script of a process causes, of what others may cause as well.
_OF_SCRIPT = (BatchError, ConfigError, DataError)
_OF_FILES = (
    *(FileNotFoundError, FileExistsError, PermissionError),
    *(IsADirectoryError, NotADirectoryError),
)
TOLD = "it was told to end"
"""With this begins why a job has ended that was told to, from outside."""
AT_ONCE = ", twice", ", without a save"
"""How such a reason ends where no last save was wanted."""

_PASSING_KINDS = re.compile("connect|timeout|network|unavailable", re.IGNORECASE)
_PASSING_TEXTS = re.compile(
    r"\b(gloo|nccl|timed out|time-out|socket|broken pipe|rendezvous|killed by signal|"
    r"out of memory|allocate memory|terminated abruptly)\b|connection|closed by peer",
    re.IGNORECASE,
)


def describe(exc: BaseException) -> str | None:
    """Return what went wrong, or None if nothing did."""
    if isinstance(exc, KeyboardInterrupt) and exc.args:
        return str(exc)
    if not isinstance(exc, SystemExit):
        what = f"{type(exc).__name__}: {exc}".removesuffix(": ")
        return without_secrets("; ".join([what, *getattr(exc, "__notes__", ())]))
    if exc.code is None or exc.code == 0:
        return None
    if isinstance(exc.code, int):
        return f"exit status {exc.code}"
    return without_secrets(str(exc.code))


def is_of_connection(exc: BaseException) -> bool:
    """Return whether a lost connection may have raised an exception.

    It may be one of a collective; gloo raises RuntimeError.
    """
    distributed = sys.modules.get("torch.distributed")
    is_error = distributed is not None and isinstance(exc, distributed.DistError)
    kind = exc.kind if isinstance(exc, RemoteError) else type(exc).__name__
    is_lost = kind in (ServerError.__name__, RequestTimeoutError.__name__)
    return is_error or is_lost or type(exc) is RuntimeError


def may_be_consequence(exc: BaseException | None) -> bool:
    """Return whether the failure of another process may be why one ends like this."""
    of_job = PersiaError | ConnectionError | SystemExit | KeyboardInterrupt
    return exc is None or isinstance(exc, of_job) or is_of_connection(exc)


def find_place(exc: BaseException | None) -> str | None:
    """Return type and line of what a script has raised; None: it may pass by itself.

    That are errors of servers, the network, collectives and memory, and what ends a
    process from outside. The line is the innermost one of no library.
    """
    if not isinstance(exc, Exception) or any(map(_may_pass, with_causes(exc))):
        return None
    frames = traceback.extract_tb(exc.__traceback__)
    if not frames or _OF_DISTRIBUTED in str(Path(frames[-1].filename).parent):
        return None
    own = [f for f in frames if not f.filename.startswith(("<", *_LIBRARIES))]
    place = (own or frames)[-1]
    return f"{type(exc).__name__} at {place.filename}:{place.lineno}"


def with_causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from, or while handling."""
    current: BaseException | None = exc
    while current is not None:
        yield current
        hidden = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or hidden


def _may_pass(exc: BaseException) -> bool:
    """Return whether an exception may not come again, though nothing is mended."""
    if isinstance(exc, PersiaError):
        return not isinstance(exc, _OF_SCRIPT)
    if isinstance(exc, OSError):
        return not isinstance(exc, _OF_FILES)
    torch = sys.modules.get("torch")
    is_of_memory = torch is not None and isinstance(exc, torch.OutOfMemoryError)
    if isinstance(exc, MemoryError) or is_of_memory or not isinstance(exc, Exception):
        return True
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(exc, distributed.DistError):
        return True
    is_known = isinstance(exc, RuntimeError) and _PASSING_TEXTS.search(str(exc))
    return bool(is_known or _PASSING_KINDS.search(type(exc).__name__))


def find_member(reason: str) -> str | None:
    """Return the member that the reason of a failed job names first, if it does."""
    found = re.search(rf"\b({'|'.join(_ROLES)}) \d+\b", reason)
    return found and found[0]


def was_told(reason: str) -> bool:
    """Return whether a job has ended because it was told to, from outside."""
    return _without_teller(reason).startswith(TOLD)


def was_told_alone(reason: str) -> bool:
    """Return whether that is all that has happened."""
    return re.fullmatch(rf"{TOLD} \(\w+\)", _without_teller(reason)) is not None


def _without_teller(reason: str) -> str:
    return reason.removeprefix("coordinator: ").removeprefix("persia-torchrec: ")


def find_own_log() -> str:
    """Return the file that this process's stderr is, or else an empty text."""
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:
        return ""
    if not path.is_absolute():  # "pipe:[N]"
        return ""
    both = path.with_name("combined.log")  # torchx's, of stdout and stderr
    return next((str(p) for p in (both, path) if p.is_file()), "")


def find_log(who: str, place: str | None) -> str:
    """Say where the log of a member is; empty: it is not known.

    ``place`` is its host and its log, as it has told; None: it has not joined.
    """
    if place is None:
        place = find_log_beside(f"{socket.gethostname()} {find_own_log()}", who)
        if not place:
            return ""
    host, _, log = place.partition(" ")
    if log and host == socket.gethostname():
        return f"its log: {log}"
    return f"its log: {log} on host {host}" if log else f"its log is on host {host}"


def find_log_beside(place: str, who: str) -> str:
    """Return host and log of a member, from those of another one; "": it has none.

    torchx has a folder for each, also for one that has not joined.
    """
    host, _, log = place.partition(" ")
    path = Path(log)
    if len(path.parents) < 3:
        return ""
    own = path.parents[2] / who.replace(" ", "/") / path.name
    return f"{host} {own}" if own.is_file() else ""


def tell_launcher(cause: str) -> None:
    """Write why this process has failed to where torchx, or torchrun, reads it.

    They print it last. Does nothing in a process that neither has started.
    """
    path = env.error_file()
    if path is not None:
        now_s = str(int(datetime.now(UTC).timestamp()))
        reply = {"message": {"message": cause, "extraInfo": {"timestamp": now_s}}}
        with contextlib.suppress(OSError):  # the log has it too
            Path(path).write_text(json.dumps(reply))
