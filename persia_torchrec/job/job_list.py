"""The jobs of a user, for ``persia-torchrec``: a file for each in the state folder.

    ~/.local/state/persia_torchrec/jobs/JOB.json

A coordinator writes it when its address book is open, and once more at its end, with
what others ask the book for while the job runs. A job runs without it where the folder
cannot be written to.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import structs

from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.job import failures
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.requests import Outcome
from persia_torchrec.job.saves import Saves, verdict
from persia_torchrec.parsing.decoding import decoder_of
from persia_torchrec.rpc.addresses import LOOPBACK

logger = logging.getLogger(__name__)

_LAUNCHERS = "torchx", "torchx.cli.main", "persia_torchrec.launch.local_run"
_MAX_JOBS = 200  # of which a user has files; the oldest that have ended leave


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as another process of its user finds it."""

    job_id: str
    host: str
    port: int
    """Of the address book."""
    coordinator: ProcessIdentity
    began: str
    """ISO 8601."""
    folder: str
    """In which it was started."""
    command: list[str] = []
    """That of torchx, or of ``persia-torchrec``; empty: something else started it."""
    token_file: str = ""
    encrypts: bool = False
    ended: str = ""
    outcome: Outcome = "running"
    reason: str = ""
    checkpoint: str = ""
    """The last one that it has completed, or began from."""
    saves: Saves | None = None
    """How its saves went; None: it saves nothing, or runs."""
    told: str = ""
    """By which signal it was told to end, and who got that."""
    metrics_port: int = 0
    """Of its page, the first of those of its processes; 0: it serves no metrics."""
    report: str = ""
    """Folder of the curves; empty: none are kept."""
    logs: dict[str, str] = {}
    """By member, as ``server 0``: host and file, as far as they are known."""

    @property
    def state(self) -> str:
        """``running``, ``finished``, ``stopped``, ``failed``, or ``lost``.

        It is lost if its coordinator has ended untold, and stopped if it was told to
        end, and lost no step by that.
        """
        if self.outcome == "running" and (self.ended or self.coordinator.has_ended()):
            return "lost"
        return verdict(self.outcome, self.reason, self.saves)

    def write(self) -> None:
        """Write the file, if that is possible."""
        folder = jobs_folder()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _require_own(folder)
            path = folder / f"{self.job_id}.json"
            begun = path.with_suffix(f".{os.getpid()}")
            try:
                begun.touch(mode=0o600)
                begun.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
                begun.replace(path)
            finally:
                begun.unlink(missing_ok=True)
            ended = [one for one in find_jobs() if one.state != "running"]
            for old in ended[_MAX_JOBS:]:
                (folder / f"{old.job_id}.json").unlink(missing_ok=True)
        except (OSError, ConfigError) as exc:
            logger.info("persia-torchrec ps does not find this job: %s", exc)


def record_of(job_id: str, port: int) -> JobRecord:
    """Return the record of a job whose coordinator is this process."""
    host = LOOPBACK if env.is_local_job() else socket.gethostname()
    return JobRecord(
        job_id=job_id,
        host=host,
        port=port,
        coordinator=ProcessIdentity.of_this_process(),
        began=now(),
        folder=str(Path.cwd()),
        command=_launch_command(),
        token_file=env.text("PERSIA_JOB_TOKEN_FILE") or "",
        encrypts=env.encrypts(),
        metrics_port=env.metrics_port() or 0,
        logs={"coordinator 0": f"{socket.gethostname()} {failures.find_own_log()}"},
    )


def _launch_command() -> list[str]:
    """Return the command line that has started the job on this machine, to repeat it.

    Empty: it is none of torchx, nor of ``persia-torchrec``.
    """
    if not env.is_one_local_app():
        return []
    parent = env.supervisor_parent() or os.getppid()
    try:
        line = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return []
    words = [os.fsdecode(word) for word in line.split(b"\0")[:-1]]
    is_known = any(Path(word).name in _LAUNCHERS for word in words[:3])
    return words if is_known else []


@contextlib.contextmanager
def listed(record: JobRecord) -> Iterator[dict[str, object]]:
    """Have a job listed; at the end of the block with what is in the dictionary."""
    record.write()
    changes: dict[str, object] = {}
    try:
        yield changes
    finally:
        structs.replace(record, ended=now(), **changes).write()


def holder_of(metrics_port: int) -> JobRecord | None:
    """Return the running job of this user and host that may have a port for metrics.

    Its own is that one, or the nearest below it, from which its processes take theirs.
    """
    here = (LOOPBACK, socket.gethostname())
    found: list[JobRecord] = []
    with contextlib.suppress(ConfigError):
        found = [one for one in find_jobs() if 0 < one.metrics_port <= metrics_port]
    running = [one for one in found if one.state == "running" and one.host in here]
    return max(running, key=lambda one: one.metrics_port, default=None)


def holder_of_book(port: int) -> JobRecord | None:
    """Return the running job of this user and host whose address book has a port."""
    here, found = (LOOPBACK, socket.gethostname()), list[JobRecord]()
    with contextlib.suppress(ConfigError):
        found = [one for one in find_jobs() if one.port == port and one.host in here]
    return next((one for one in found if one.state == "running"), None)


def find_jobs() -> list[JobRecord]:
    """Return all jobs that are known, the latest first.

    Raises:
        ConfigError: others may write to the folder, or to a file in it, whose commands
            would be run.
    """
    folder, found = jobs_folder(), []
    if folder is None or not folder.is_dir():
        return []
    _require_own(folder)
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # of another version
            _require_own(path)
            found.append(decoder_of(JobRecord).decode(path.read_bytes()))
    return sorted(found, key=lambda one: one.began, reverse=True)


def _require_own(path: Path) -> None:
    if why := env.writers_of(path):
        raise ConfigError(
            "The list of jobs, whose commands are run, must be of this user, and no "
            f"other one may write to it. Received: {why}. Change or delete it, or set "
            "XDG_STATE_HOME to another folder."
        )


def jobs_folder() -> Path | None:
    """Return the folder; None for a user without a home."""
    try:
        state = env.text("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    except RuntimeError:
        return None
    return Path(state) / "persia_torchrec" / "jobs"


def now() -> str:
    """Return the time, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
