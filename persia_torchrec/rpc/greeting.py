"""The identity of a process towards the other processes of its job.

A client that greets with the id of another job is rejected, and the job that it met
continues. A process that belongs to no job (a notebook, an inference server) has the
empty id; it is let in everywhere and lets every client in. The greeting is the routing
id that ZeroMQ exchanges in the handshake of a connection:

    offset  size  field
    0       1     version of the greeting, 1; ZeroMQ's own routing ids begin with 0
    1       1     J, length of the id, at most 128
    2       J     id of the job, ASCII
    2 + J   16    nonce, drawn by each socket, so that routing ids are unique
"""

import re
import secrets
from dataclasses import dataclass, replace

from persia_torchrec.errors import ConfigError, FrameError, JobMismatchError

VERSION = 1
MAX_JOB_ID = 128  # characters
_NONCE_BYTES = 16
_JOB_ID = re.compile(rf"[A-Za-z0-9._:-]{{0,{MAX_JOB_ID}}}")
_LAYOUT = re.compile(rb"\x01(.)([A-Za-z0-9._:-]{0,128}).{16}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The job of a process, as its connections tell it; an empty id: it has none.

    ``who`` is what a listener is, or whom a client means: a role, and a number if that
    is known, as ``"embedding server 3"``. An empty one is any.
    """

    job_id: str = ""
    who: str = ""

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

    def of(self, who: str) -> "Greeting":
        """Return the greeting of a listener of the same job, or to one."""
        return replace(self, who=who)

    def mismatch(self, meant: "Greeting") -> str:
        """Return why this listener is not the one that a client means, or ""."""
        jobs, whos = {self.job_id, meant.job_id}, (self.who, meant.who)
        (role, number), (meant_role, meant_number) = map(_role_and_number, whos)
        if (
            ("" in jobs or len(jobs) == 1)
            and ("" in whos or role == meant_role)
            and (not (number and meant_number) or number == meant_number)
        ):
            return ""
        return f"its proof is for {meant.name()}, and this is {self.name()}"

    def name(self) -> str:
        """Return the listener in words."""
        job = f" of job {self.job_id!r}" if self.job_id else ""
        return f"{self.who or 'any process'}{job}"

    def encode(self) -> bytes:
        """Return a new routing id, of at most 146 bytes."""
        text = self.job_id.encode("ascii")
        return bytes([VERSION, len(text)]) + text + secrets.token_bytes(_NONCE_BYTES)

    @classmethod
    def decode(cls, name: bytes) -> "Greeting":
        """Read the routing id of a peer; raise FrameError if it is not a greeting."""
        found = _LAYOUT.fullmatch(name)
        if found is None or found[1] != bytes([len(found[2])]):
            raise FrameError(
                f"A client must greet in version {VERSION} of the greeting. "
                f"Received: {name[:8]!r}, of {len(name)} bytes. Do both ends have the "
                "same version of persia_torchrec?"
            )
        return cls(found[2].decode("ascii"))

    def admit(self, name: bytes, address: str) -> None:
        """Raise JobMismatchError if a routing id is another job's than a listener's."""
        if not self.job_id:
            return
        client = Greeting.decode(name)
        if client.job_id not in ("", self.job_id):
            raise JobMismatchError(
                f"A client of {address} must belong to job {self.job_id!r}. "
                f"Received: job {client.job_id!r}. Two jobs use this address: restart "
                "one at another port (--port, or PERSIA_STORE_PORT)."
            )


def _role_and_number(who: str) -> tuple[str, str]:
    role, _, number = who.rpartition(" ")
    return (role, number) if number.isdigit() else (who, "")


NO_JOB = Greeting()
