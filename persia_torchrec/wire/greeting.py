"""Who a process is to the others of its job: the one place where that is decided.

Every process of a job has the job's id: from the environment (``PERSIA_JOB_ID``), or
else from the job's address book, where the coordinator has written it first of all.
Whoever comes to the address book, or connects to a socket of the job, greets with the
id that it has. Two ids that differ are two jobs at one port: the one that comes is
refused, and the one that is there goes on.

A process that belongs to no job (a notebook, a cluster of its own, a server for
inference) has the empty id, is let in everywhere, and lets everybody in.

On a socket the greeting is the name that ZeroMQ gives the other end in the handshake of
each connection, its routing id. A listener so reads it beside each message, and nothing
more travels with a request:

    offset  size  field
    0       1     version of the greeting, 1; ZeroMQ's own names begin with 0
    1       1     J, length of the id, at most 128
    2       J     id of the job, ASCII
    2 + J   16    nonce, drawn by each socket: no two have one name

A listener of a job refuses what is no greeting, so that all it serves has come by one.
"""

import re
import secrets
from dataclasses import dataclass

from persia_torchrec.errors import ConfigError, FrameError, JobMismatchError

VERSION = 1
MAX_JOB_ID = 128
"""Characters that a job's id may have."""

_NONCE_BYTES = 16
_HEAD = 2
_JOB_ID = re.compile(rf"[A-Za-z0-9._:-]{{0,{MAX_JOB_ID}}}")


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a process says of itself.

    Raises:
        ConfigError: the id has characters, or a length, that it must not have.

    Example:
        >>> ours, theirs = Greeting("ads-7"), Greeting("news-1")
        >>> Greeting.decode(ours.encode()) == ours
        True
        >>> ours.require_same_job(theirs, "port 29400", "Choose another.")
        Traceback (most recent call last):
        persia_torchrec.errors.JobMismatchError: Who comes to port 29400 must belong ...
    """

    job_id: str = ""
    """Of the job that the process belongs to; empty: of none."""

    def __post_init__(self) -> None:
        if not _JOB_ID.fullmatch(self.job_id):
            raise ConfigError(
                "A job's id (PERSIA_JOB_ID) must have 1 to "
                f"{MAX_JOB_ID} letters, digits, or characters of '._:-'. "
                f"Received: {self.job_id!r}."
            )

    @classmethod
    def draw(cls) -> "Greeting":
        """Return the greeting of a new job."""
        return cls(secrets.token_hex(8))

    def encode(self) -> bytes:
        """Return a name for one socket, of at most 146 bytes; no two are the same."""
        text = self.job_id.encode("ascii")
        return bytes([VERSION, len(text)]) + text + secrets.token_bytes(_NONCE_BYTES)

    @classmethod
    def decode(cls, name: bytes) -> "Greeting":
        """Read the name of a socket at the other end.

        Raises:
            FrameError: it is no greeting of this version.
        """
        length = name[1] if len(name) >= _HEAD else 0
        if name[:1] != bytes([VERSION]) or len(name) != _HEAD + length + _NONCE_BYTES:
            raise FrameError(
                f"Who connects must greet, in version {VERSION} of the greeting. "
                f"Received: {name[:8]!r}, of {len(name)} bytes. Do both ends have the "
                "same version of persia_torchrec?"
            )
        try:
            return cls(name[_HEAD : _HEAD + length].decode("ascii"))
        except ValueError as exc:  # not ASCII, or a ConfigError
            raise FrameError(f"A greeting must hold a job's id. {exc}") from exc

    def admit(self, name: bytes, address: str) -> None:
        """Let in who has connected to a listener of this job.

        Args:
            name: of the socket at the other end.
            address: of the listener, for the error.

        Raises:
            FrameError: the name is no greeting.
            JobMismatchError: the other end belongs to another job.
        """
        if self.job_id:
            self.require_same_job(
                Greeting.decode(name),
                address,
                "Another job listens at that address now. Restart the job that asks, "
                "at ports of its own.",
            )

    def require_same_job(self, comer: "Greeting", where: str, remedy: str) -> None:
        """Refuse who belongs to another job.

        Args:
            comer: who comes.
            where: what of this job it comes to, for the error.
            remedy: what to do, for the error.

        Raises:
            JobMismatchError: both belong to jobs, and to different ones.
        """
        if self.job_id and comer.job_id and self.job_id != comer.job_id:
            raise JobMismatchError(
                f"Who comes to {where} must belong to job {self.job_id!r}. "
                f"Received: job {comer.job_id!r}. {remedy}"
            )


NO_JOB = Greeting()
"""Of a process that belongs to no job."""
