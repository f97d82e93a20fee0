"""The environment of a process: the only module that reads and sets variables.

Nothing is cached. Blanks around a value are not part of it: env files have some. An
empty variable counts as unset, for launchers that write out every variable.

    RANK, LOCAL_RANK, WORLD_SIZE               one NN worker among all (torchrun)
    MASTER_ADDR, MASTER_PORT                   where the NN workers meet (torchrun)
    REPLICA_INDEX, REPLICA_SIZE                one copy of any other role
    PERSIA_STORE_PORT                          port of the job's address book
    PERSIA_STORE_HOST                          its host, or else
    PERSIA_STORE_HOST_ENV                      the name of a variable that holds it
    PERSIA_JOB_ID                              the job's id; drawn when unset
    PERSIA_JOB_TOKEN_FILE, PERSIA_JOB_TOKEN    what proves that a process is one of the
                                               job: the path of a file, or the token
    PERSIA_HTTP_TOKEN_FILE, PERSIA_HTTP_TOKEN  the same of clients of HTTP, another one
    PERSIA_HTTP_ADMIN_TOKEN_FILE, PERSIA_HTTP_ADMIN_TOKEN
                                               the same of those clients of an inference
                                               server who load and unload models
    PERSIA_ENCRYPT                             1: all connections of the job are
                                               encrypted
    PERSIA_TRANSPORT                           tcp or shm: never, or with a warning
                                               where it cannot be, share memory with
                                               servers, workers and trainers of the
                                               same host; auto
    TORCHX_JOB_ID                              scheduler and id of the job (torchx)
    PERSIA_JOIN_TIMEOUT_S                      seconds for each wait of a start; 600
    PERSIA_CHECKPOINT_INTERVAL_S               seconds between automatic checkpoints
    PERSIA_CHECKPOINT_DIR                      folder with one for each job, for these
                                               in its folder checkpoints; ./runs
    PERSIA_RUN_DIR, PERSIA_RESUME_DIR          that of a job, and of those that
                                               continue it; one for each in the former.
                                               The second is the previous name
    PERSIA_TAKE_OVER                           1: write in folders of another job
    PERSIA_RESUME                              what a restart goes back to: exact
    TORCHELASTIC_RESTART_COUNT                 how often it started the NN workers
                                               before (torchrun)
    TORCHELASTIC_MAX_RESTARTS                  how often it may at most (torchrun)
    PERSIA_MEMBER                              member that this process is, or works for
    PERSIA_SUPERVISOR                          process that starts this one again
    PERSIA_SUPERVISOR_PARENT                   process that has started the supervisor
    PERSIA_AGENT                               process that has started this NN worker
    PERSIA_RESTARTS                            how often it started this one before
    PERSIA_LISTEN_FD, PERSIA_MEMORY_FD         descriptors of a socket that listens
                                               and of memory; the supervisor has both
    PERSIA_PARENT_FD                           descriptor at whose end, or first byte, a
                                               process ends that another one has started
    PERSIA_EMBEDDING_CONFIG, PERSIA_GLOBAL_CONFIG, PERSIA_DATA_DIR      paths
    PERSIA_NN_WORKER_ENTRY, PERSIA_DATALOADER_ENTRY                     scripts
    EMBEDDING_WORKER_SERVICE                   addresses of embedding workers
    PERSIA_REPORT_DIR                          in which each job leaves the folder of
                                               its report; unset: beside the logs, where
                                               torchx runs it on this machine
    XDG_STATE_HOME                             of the list of jobs; ~/.local/state
    PERSIA_LAUNCHER_VERBOSE                    1: persia-launcher shows what it starts
    PERSIA_METRICS_GATEWAY_ADDR                host:port that metrics are pushed to
    PERSIA_METRICS_JOB_NAME                    their label job; by default the job's id
    PERSIA_METRICS_PORT                        port from which on they are served; unset
                                               or 0: they are not
    LOG_LEVEL                                  DEBUG, INFO, WARNING, ERROR, CRITICAL;
                                               PERSIA's TRACE is DEBUG, its OFF CRITICAL
    TORCHELASTIC_ERROR_FILE                    where torchx and torchrun look for the
                                               cause of a failure
"""

import contextlib
import ipaddress
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from persia_torchrec import timeouts
from persia_torchrec.errors import ConfigError

Transport = Literal["auto", "tcp", "shm"]

MAX_PORT = 65_535
RUN_DIR = "PERSIA_RUN_DIR", "PERSIA_RESUME_DIR"  # the latter until the next release
RUNS, LOGS = "runs", "logs"
"""Folder of jobs, and that of logs in a job's."""

_REPLICA = "REPLICA_INDEX", "REPLICA_SIZE"
_LEVELS_OF_PERSIA = {"TRACE": "DEBUG", "OFF": "CRITICAL"}
_OTHER_RANKS = "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"
_HANDED = {
    *("PERSIA_LISTEN_FD", "PERSIA_MEMORY_FD", "PERSIA_PARENT_FD", "PERSIA_RESTARTS"),
    *("PERSIA_SUPERVISOR", "PERSIA_SUPERVISOR_PARENT", "PERSIA_AGENT"),
}


class JobStore(NamedTuple):
    """Where a job's address book is, and which job it must be."""

    host: str
    port: int
    job_id: str


# Variables of PERSIA that persia-launcher rejects: the value that asks for nothing, as
# PERSIA's default; and why another is rejected, and what to do instead.
REJECTED: Mapping[str, tuple[str, str]] = {
    "PERSIA_SOCKET_IFNAME": (
        "",
        "A role registers the address of the interface that leads to the coordinator. "
        "Set PERSIA_STORE_HOST to the coordinator's address in the network to be used.",
    ),
    "PERSIA_SCHEDULED_THREAD_POOL_SIZE": (
        "1",
        "It sizes a thread pool of PERSIA that has no counterpart here.",
    ),
    "PERSIA_DEADLOCK_DETECTION": (
        "0",
        "Nothing looks for deadlocks: every wait has a deadline of its own.",
    ),
    "PERSIA_SKIP_CHECK_DATA": (
        "0",
        "A batch is checked when it is made; the servers rely on it.",
    ),
}


def text(name: str) -> str | None:
    """Return a variable without blanks around it; None when it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def integer(name: str, minimum: int) -> int:
    """Return a variable that is a number, its minimum when unset."""
    value = text(name)
    if value is None:
        return minimum
    try:
        number = int(value)
    except ValueError as exc:
        raise ConfigError(f"{name} must be an integer. Received: {value!r}.") from exc
    if number < minimum:
        raise ConfigError(f"{name} must be >= {minimum}. Received: {number}.")
    return number


# Under PERSIA's names: this NN worker's rank among all, its rank on its machine, how
# many there are; which copy of its role this process is, how many there are.
get_rank = partial(integer, "RANK", 0)
get_local_rank = partial(integer, "LOCAL_RANK", 0)
get_world_size = partial(integer, "WORLD_SIZE", 1)
get_replica_index = partial(integer, "REPLICA_INDEX", 0)
get_replica_size = partial(integer, "REPLICA_SIZE", 1)

# Under PERSIA's names, too: whether persia-launcher and run_command() show what they
# start, when this module was imported; and that no check of a batch is left out.
PERSIA_LAUNCHER_VERBOSE = text("PERSIA_LAUNCHER_VERBOSE") not in (None, "0")
PERSIA_SKIP_CHECK_DATA = False

# What a supervisor tells the process that it starts: see job/supervisor.py.
num_restarts = partial(integer, "PERSIA_RESTARTS", 0)

# Paths, each None when unset.
embedding_config_path = partial(text, "PERSIA_EMBEDDING_CONFIG")
global_config_path = partial(text, "PERSIA_GLOBAL_CONFIG")
data_dir = partial(text, "PERSIA_DATA_DIR")
error_file = partial(text, "TORCHELASTIC_ERROR_FILE")

# "exact" or "rows_ahead", and a path; None when unset.
resume = partial(text, "PERSIA_RESUME")


def run_dir() -> str | None:
    """Return the folder of the job's automatic checkpoints; None when unset."""
    return next((found for name in RUN_DIR if (found := text(name))), None)


def takes_over() -> bool:
    """Return whether folders are taken over from a job that may still write there."""
    return text("PERSIA_TAKE_OVER") not in (None, "0")


def number(name: str) -> int | None:
    """Return a variable that is a number, or None when it is unset."""
    return None if text(name) is None else integer(name, 0)


# Processes and descriptors of a supervised process, each None when unset.
supervisor = partial(number, "PERSIA_SUPERVISOR")
supervisor_parent = partial(number, "PERSIA_SUPERVISOR_PARENT")
agent = partial(number, "PERSIA_AGENT")
listen_fd = partial(number, "PERSIA_LISTEN_FD")
memory_fd = partial(number, "PERSIA_MEMORY_FD")
parent_fd = partial(number, "PERSIA_PARENT_FD")


def master() -> tuple[str | None, int | None]:
    """Return host and port at which the NN workers meet, each None when unset."""
    return text("MASTER_ADDR"), integer("MASTER_PORT", 0) or None


def rank_hint(role: str) -> str:
    """Return what to say where another launcher than ours has numbered processes."""
    ours = ("RANK", "WORLD_SIZE") if role == "trainer" else _REPLICA
    theirs = [name for name in _OTHER_RANKS if text(name) is not None]
    if not theirs or text(ours[0]) is not None:
        return ""
    return f"{theirs[0]} is set, but this role goes by {' and '.join(ours)}: set them. "


def set_variable(name: str, value: str | int) -> None:
    """Set a variable for this process and those that it starts from now on."""
    os.environ[name] = str(value)


def job_token() -> str | None:
    """Return what proves that a process is one of this one's job; None when unset."""
    return _secret("PERSIA_JOB_TOKEN")


def http_token() -> str | None:
    """Return what proves that a client of HTTP may ask; None when unset.

    Raises:
        ConfigError: it is the job's.
    """
    token = _secret("PERSIA_HTTP_TOKEN")
    if token is not None and token == job_token():
        raise ConfigError(
            "PERSIA_HTTP_TOKEN must be another token than PERSIA_JOB_TOKEN, which "
            "allows more. Received: the same."
        )
    return token


def http_admin_token() -> str | None:
    """Return what proves that a client may load and unload models; None when unset.

    Raises:
        ConfigError: it is that of other clients, or the job's.
    """
    token = _secret("PERSIA_HTTP_ADMIN_TOKEN")
    if token is not None and token in (http_token(), job_token()):
        raise ConfigError(
            "PERSIA_HTTP_ADMIN_TOKEN must be another token than PERSIA_HTTP_TOKEN and "
            "PERSIA_JOB_TOKEN. Received: the same."
        )
    return token


def token_file(name: str) -> str | None:
    """Return the path of the file with a token of the jobs that this user starts.

    It is what ``NAME_FILE`` says, or one in the user's home, which is made if there is
    none. None: ``NAME`` has the token, which processes inherit.
    """
    path = token_path(name)
    if path is not None and text(f"{name}_FILE") is None:
        _make_secret(Path(path))
    return path


def token_path(name: str) -> str | None:
    """Return what :func:`token_file` does, and make no file."""
    path = text(f"{name}_FILE")
    if path is None and text(name) is None:
        file = name.removeprefix("PERSIA_").lower()  # as job_token
        try:
            path = str(Path("~/.persia_torchrec", file).expanduser())
        except RuntimeError as exc:
            raise ConfigError(
                f"{name}_FILE must be set where a user has no home: the path of a file "
                "for the token of the user's jobs, which is made. Received: none."
            ) from exc
    return None if path is None else str(Path(path).absolute())


def read_token(path: str, name: str) -> str:
    """Return the token of a file that ``NAME_FILE`` names, or would.

    Raises:
        ConfigError: there is none, others may read it, or it is no token.
    """
    return _require_token(_read_secret(Path(path), f"{name}_FILE"), name)


def writers_of(path: Path) -> str:
    """Return why others than this user, or root, may write to a path; "": none may."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} has mode {stat.S_IMODE(found.st_mode):o}; chmod go-w would do"
    return ""


def encrypts() -> bool:
    """Return whether all connections of the job are encrypted."""
    value = text("PERSIA_ENCRYPT") or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"PERSIA_ENCRYPT must be 0 or 1. Received: {value!r}.")
    if value == "1" and job_token() is None:
        raise ConfigError(
            "PERSIA_ENCRYPT=1 needs the job's token, from which keys are made. Received"
            ": none. Set PERSIA_JOB_TOKEN_FILE, or PERSIA_JOB_TOKEN."
        )
    return value == "1"


def transport(given: str | None = None) -> Transport:
    """Return how clients reach the servers of their own host, or what is given."""
    name = "PERSIA_TRANSPORT" if given is None else "transport"
    value = (text("PERSIA_TRANSPORT") or "auto") if given is None else given
    for known in get_args(Transport):
        if value == known:
            return cast("Transport", known)
    raise ConfigError(f"{name} must be auto, tcp or shm. Received: {value!r}.")


def draw_token() -> None:
    """Give this process, and those that it starts, a token unless it has one."""
    if job_token() is None:
        set_variable("PERSIA_JOB_TOKEN", secrets.token_hex(32))


def of_child(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process to start, with other variables.

    What a supervisor has handed to this process is not for its children.
    """
    return {n: v for n, v in os.environ.items() if n not in _HANDED} | dict(variables)


def set_env(
    replica_size: int | None = None,
    replica_index: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
) -> None:
    """Set all five variables for this process; None unsets one."""
    numbers = {
        "REPLICA_SIZE": replica_size,
        "REPLICA_INDEX": replica_index,
        "WORLD_SIZE": world_size,
        "RANK": rank,
        "LOCAL_RANK": local_rank,
    }
    for name, number in numbers.items():
        os.environ.pop(name, None)
        if number is not None:
            set_variable(name, number)


def reload_env() -> None:
    """Do nothing, as every call reads the environment."""


@contextlib.contextmanager
def set_within(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables within a block; restore the previous values afterwards."""
    previous = {n: os.environ[n] for n in variables if n in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(previous)


def job_id() -> str:
    """Return the id of this process's job, ``PERSIA_JOB_ID``; empty: any job."""
    return text("PERSIA_JOB_ID") or ""


def join_timeout_s() -> float:
    """Return how long each wait of a start may take: until all are there and joined."""
    return _seconds(
        "PERSIA_JOIN_TIMEOUT_S", timeouts.JOIN_TIMEOUT_S, " (--join-timeout-s)"
    )


def num_group_restarts() -> int:
    """Return how often the trainers of this job were started before."""
    return max(integer("TORCHELASTIC_RESTART_COUNT", 0), num_restarts())


def group_restarts_left() -> int:
    """Return how often torchrun starts the trainers of this job again at most."""
    most = integer("TORCHELASTIC_MAX_RESTARTS", 0)
    left = most - integer("TORCHELASTIC_RESTART_COUNT", 0)
    return max(left, 0) if is_under_torchrun() else 0


def checkpoint_interval_s(default: float | None = None) -> float:
    """Return the seconds between automatic checkpoints; 0: there are none.

    Without a default there are none where nothing starts a trainer again.
    """
    if default is None:
        recovers = integer("TORCHELASTIC_MAX_RESTARTS", 0) or text("PERSIA_SUPERVISOR")
        default = timeouts.CHECKPOINT_INTERVAL_S if recovers else 0.0
    return _seconds("PERSIA_CHECKPOINT_INTERVAL_S", default, or_0=True)


def checkpoint_dir() -> str:
    """Return the folder that has one of each job, with its automatic checkpoints."""
    return text("PERSIA_CHECKPOINT_DIR") or str(Path.cwd() / RUNS)


def job_store() -> JobStore | None:
    """Return where the job's address book is; None: there is no job.

    A scheduler that knows the host only when the job runs writes it to a variable of
    its own, whose name ``PERSIA_STORE_HOST_ENV`` gives, but maybe not on the first
    machine. Of several hosts, as in Slurm's ``node[03-07],node12``, it is the first.
    """
    if text("PERSIA_STORE_PORT") is None:
        return None
    port = integer("PERSIA_STORE_PORT", 1)
    if port > MAX_PORT:
        raise ConfigError(f"PERSIA_STORE_PORT must be <= {MAX_PORT}. Received: {port}.")
    host = text("PERSIA_STORE_HOST")
    if host is None:
        hosts = text(text("PERSIA_STORE_HOST_ENV") or "") or "localhost"
        firsts = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts)  # node[03-07]: node03
        host = firsts.partition(",")[0].strip()
    return JobStore(host.strip("[]"), port, job_id())  # of an IPv6 address


def require_job_store(role: str, instead: str = "") -> JobStore:
    """Return :func:`job_store`, or raise ConfigError: start ``role`` in a job."""
    store = job_store()
    if store is None:
        raise ConfigError(
            f"{role} must belong to a job: PERSIA_STORE_PORT is not set. Start it with "
            "persia-torchrec run, with torchx run -s local_cwd persia.train, or with "
            f"persia-launcher after `persia-launcher coordinator`{instead}."
        )
    return store


def host_of(address: str) -> str:
    """Return the host of ``tcp://host:port``, without the brackets of IPv6."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether a host, by address or as ``localhost``, is this machine itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def is_local_job() -> bool:
    """Return whether all of the job runs on this machine."""
    return _is_local_torchx() or is_loopback(text("PERSIA_STORE_HOST") or "")


def is_one_local_app() -> bool:
    """Return whether torchx has started all of the job on this machine, as one app.

    The address book is then where its first role runs (``PERSIA_STORE_HOST_ENV``).
    """
    has_host_env = text("PERSIA_STORE_HOST_ENV") is not None
    return _is_local_torchx() and has_host_env and not text("PERSIA_STORE_HOST")


def is_under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return text("TORCHELASTIC_RUN_ID") is not None


def slurm_log(role: str) -> str:
    """Return the file to which Slurm writes what this process of a role logs, or "".

    torchx names it. The process sees a pipe, to the machine on which the job began.
    """
    scheduler, _, job = (text("TORCHX_JOB_ID") or "").partition("://")
    name = f"slurm-{job.rpartition('/')[2]}-{role}-{get_replica_index()}.err"
    path = Path.cwd() / name
    return str(path) if scheduler == "slurm" and path.is_file() else ""


def agent_has_store() -> bool:
    """Return whether torchrun's agent hosts the store at ``MASTER_PORT``."""
    return text("TORCHELASTIC_USE_AGENT_STORE") == "True"


def metrics_gateway() -> tuple[str, int] | None:
    """Return host (IPv6 without brackets) and port of the pushgateway; None: unset."""
    address = text("PERSIA_METRICS_GATEWAY_ADDR")
    if address is None:
        return None
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^][:/@\s]+):(\d{1,5})", address)
    if match is None or not 1 <= int(match[2]) <= MAX_PORT:
        raise ConfigError(
            "PERSIA_METRICS_GATEWAY_ADDR must be host:port, with a port in "
            f"[1, {MAX_PORT}] and no scheme or path. Received: {address!r}."
        )
    return match[1].strip("[]"), int(match[2])


def set_metrics_port(port: int | None) -> None:
    """Have a flag, where it is given, say what ``PERSIA_METRICS_PORT`` does."""
    if port is not None:
        set_variable("PERSIA_METRICS_PORT", port)


def metrics_port() -> int | None:
    """Return the first port at which metrics may be served; None: they are not."""
    port = number("PERSIA_METRICS_PORT") or None
    if port is not None and port > MAX_PORT:
        raise ConfigError(
            f"PERSIA_METRICS_PORT (--metrics-port) must be in [0, {MAX_PORT}], where 0 "
            f"serves no metrics. Received: {port}."
        )
    return port


def log_level(default: str = "INFO") -> str:
    """Return ``LOG_LEVEL`` in capitals, as :mod:`logging` knows it."""
    known = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")
    level = (text("LOG_LEVEL") or default).upper()
    level = _LEVELS_OF_PERSIA.get(level, level)
    if level not in known:
        must = f"LOG_LEVEL must be one of {', '.join((*known, *_LEVELS_OF_PERSIA))}."
        raise ConfigError(f"{must} Received: {level!r}.")
    return level


def _seconds(name: str, default: float, flag: str = "", *, or_0: bool = False) -> float:
    """Return a variable that is a number of seconds; the default when unset."""
    value = text(name)
    if value is None:
        return default
    with contextlib.suppress(ValueError):
        seconds = float(value)
        if 0 < seconds < math.inf or (or_0 and seconds == 0):
            return seconds
    must = ">= 0" if or_0 else "> 0"
    raise ConfigError(
        f"{name}{flag} must be a number of seconds {must}. Received: {value!r}."
    )


def _is_local_torchx() -> bool:
    return (text("TORCHX_JOB_ID") or "").startswith("local_cwd:")


def _secret(name: str) -> str | None:
    """Return the content of the file that ``NAME_FILE`` names, or else a variable."""
    path, token = text(f"{name}_FILE"), text(name)
    if path is not None:
        return read_token(path, name)
    return None if token is None else _require_token(token, name)


def _require_token(token: str, name: str) -> str:
    if not re.fullmatch(r"[!-~]{16,255}", token):
        raise ConfigError(
            f"{name} must be 16 to 255 ASCII characters without blanks, for example "
            f"from `openssl rand -hex 32`. Received: {len(token)} characters."
        )
    return token


def _read_secret(path: Path, name: str) -> str:
    try:
        status = path.stat()
        # That of another user, as of a Secret, is not this one's to change.
        mode = status.st_mode & (0o077 if status.st_uid == os.getuid() else 0o007)
        if mode:
            raise ConfigError(
                f"{name} must name a file that others cannot read: chmod 600 (in a "
                f"Secret's volume, defaultMode: 0400). Received: {path}, of mode "
                f"{status.st_mode & 0o777:o}."
            )
        return path.read_text("ascii").strip()
    except (OSError, UnicodeError) as exc:
        raise ConfigError(
            f"{name} must name a file with a token. Received: {path} ({exc})."
        ) from exc


def _make_secret(path: Path) -> None:
    """Make a file with a new token, of mode 600, unless it is there."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            draft.touch(0o600, exist_ok=False)
            try:
                draft.write_text(secrets.token_hex(32) + "\n")
                with contextlib.suppress(FileExistsError):  # of another launcher
                    os.link(draft, path)
            finally:
                draft.unlink()
    except OSError as exc:
        raise ConfigError(
            f"The file for the token must be one that can be created. Received: "
            f"{path} ({exc}). Make one"
            " yourself, and name it by PERSIA_JOB_TOKEN_FILE."
        ) from exc
