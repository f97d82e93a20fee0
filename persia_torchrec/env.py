"""What the environment says: the only place that reads it.

Launchers describe a process by variables: which copy of its role it is, where the
job's address book stands, where its files lie. Everything else takes these values as
arguments. Nothing is remembered: each call reads the variable as it is now. A variable
that is set to nothing counts as unset, for launchers that write out every variable.

    RANK, LOCAL_RANK, WORLD_SIZE               one NN worker among all (torchrun)
    MASTER_ADDR, MASTER_PORT                   where the NN workers meet (torchrun)
    REPLICA_INDEX, REPLICA_SIZE                one copy of any other role
    PERSIA_STORE_PORT                          port of the job's address book
    PERSIA_STORE_HOST                          its host, or else
    PERSIA_STORE_HOST_ENV                      the name of a variable that holds it
    TORCHX_JOB_ID                              scheduler and id of the job (torchx)
    PERSIA_EMBEDDING_CONFIG, PERSIA_GLOBAL_CONFIG, PERSIA_DATA_DIR      paths
    LOG_LEVEL                                  DEBUG, INFO, WARNING, ERROR, CRITICAL
"""

import os
import re

from persia_torchrec.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")
"""What ``LOG_LEVEL`` may say, in capitals or not."""

MAX_PORT = 65_535


def get_rank() -> int:
    """Return this NN worker's rank among all, ``RANK``; 0 when unset."""
    return _integer("RANK", default=0, minimum=0)


def get_local_rank() -> int:
    """Return this NN worker's rank on its machine, ``LOCAL_RANK``; 0 when unset."""
    return _integer("LOCAL_RANK", default=0, minimum=0)


def get_world_size() -> int:
    """Return how many NN workers there are, ``WORLD_SIZE``; 1 when unset."""
    return _integer("WORLD_SIZE", default=1, minimum=1)


def get_replica_index() -> int:
    """Return which copy of its role this is, ``REPLICA_INDEX``; 0 when unset."""
    return _integer("REPLICA_INDEX", default=0, minimum=0)


def get_replica_size() -> int:
    """Return how many copies the role has, ``REPLICA_SIZE``; 1 when unset."""
    return _integer("REPLICA_SIZE", default=1, minimum=1)


def master() -> tuple[str | None, int | None]:
    """Return host and port at which the NN workers meet, each None when unset."""
    port = _integer("MASTER_PORT", default=0, minimum=0)
    return _text("MASTER_ADDR"), port or None


def set_env(name: str, value: str | int) -> None:
    """Set a variable for this process and those that it starts from now on."""
    os.environ[name] = str(value)


def job_store() -> tuple[str, int] | None:
    """Return host and port of the job's address book.

    A scheduler that knows the host only when the job runs writes it to a variable of
    its own, whose name ``PERSIA_STORE_HOST_ENV`` gives; while that variable is unset,
    as it may be on the first machine itself, the host is ``localhost``. Of several
    hosts, as in Slurm's ``node[03-07],node12``, it is the first.

    Returns:
        Host and port, or None when ``PERSIA_STORE_PORT`` is unset: the process
        belongs to no job.

    Raises:
        ConfigError: the port is not in ``[1, 65535]``.
    """
    if _text("PERSIA_STORE_PORT") is None:
        return None
    port = _integer("PERSIA_STORE_PORT", default=0, minimum=1)
    if port > MAX_PORT:
        raise ConfigError(f"PERSIA_STORE_PORT must be <= {MAX_PORT}. Received: {port}.")
    return _store_host(), port


def is_local_job() -> bool:
    """Return whether all of the job runs on this machine, by ``TORCHX_JOB_ID``."""
    return (_text("TORCHX_JOB_ID") or "").startswith("local_cwd:")


def embedding_config_path() -> str | None:
    """Return the path of ``embedding_config.yml``, ``PERSIA_EMBEDDING_CONFIG``."""
    return _text("PERSIA_EMBEDDING_CONFIG")


def global_config_path() -> str | None:
    """Return the path of ``global_config.yml``, ``PERSIA_GLOBAL_CONFIG``."""
    return _text("PERSIA_GLOBAL_CONFIG")


def data_dir() -> str | None:
    """Return where the training data lie, ``PERSIA_DATA_DIR``."""
    return _text("PERSIA_DATA_DIR")


def log_level(default: str = "INFO") -> str:
    """Return ``LOG_LEVEL`` in capitals, as :mod:`logging` knows it.

    Args:
        default: the level when it is unset.

    Raises:
        ConfigError: it is none of ``LOG_LEVELS``.
    """
    level = (_text("LOG_LEVEL") or default).upper()
    if level not in LOG_LEVELS:
        raise ConfigError(
            f"LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}. Received: {level!r}."
        )
    return level


def _store_host() -> str:
    host = _text("PERSIA_STORE_HOST")
    if host is not None:
        return host
    variable = _text("PERSIA_STORE_HOST_ENV")
    hosts = _text(variable) if variable is not None else None
    return _first_host(hosts) if hosts is not None else "localhost"


def _first_host(hosts: str) -> str:
    """Return the first of ``a,b`` or of Slurm's ``node[03-07,09]``: ``node03``."""
    each_range_by_its_first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts)
    return each_range_by_its_first.partition(",")[0].strip()


def _integer(name: str, *, default: int, minimum: int) -> int:
    text = _text(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError as exc:
        raise ConfigError(f"{name} must be an integer. Received: {text!r}.") from exc
    if value < minimum:
        raise ConfigError(f"{name} must be >= {minimum}. Received: {value}.")
    return value


def _text(name: str) -> str | None:
    return os.environ.get(name) or None
