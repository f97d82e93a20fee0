"""What PERSIA's files may say that this package does not act on as they say it.

PERSIA's parser ignores keys that it does not know. So its examples and pages have keys
that never did anything, and files of its earlier versions go on loading while half of
what they say is ignored. The tables here are the closed list of such keys: those of
PERSIA's examples, configuration structs and pages, of all its versions. A file that has
one loads, and each is one warning of a process::

    RENAMED     the older name of a key: it does what that key does
    IGNORED     ignored, as by PERSIA; the warning names the right key, if there is one
    NO_EFFECT   a key of PERSIA that tunes what is not here; its value is still checked
    ONE_VALUE   a key that would change the result: refused with any other value

Any other key is an error. To give a key a meaning, take it out of these tables.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from persia_torchrec.config.yaml_file import Place
from persia_torchrec.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OneValue:
    """A setting that has one value only."""

    key_path: str
    """Keys from the top of the file, with a dot between; ``*`` is any key."""

    value: object
    """What it must be where it is given."""

    instead: str
    """What gives the user what the setting was meant to."""


@dataclass(frozen=True, slots=True)
class OtherKey:
    """A key of PERSIA's files or pages that does not do here what it says."""

    key_path: str
    """Keys from the top of the file, with a dot between; ``*`` is any key. The keys
    above it have their present names."""

    right_key: str
    """Key path of what was meant, or nothing: there is no such setting here."""

    reason: str
    """Where the key comes from, and what it would have done if that is nothing."""


_SERVER = "embedding_parameter_server_config"
_METRICS = "common_config.metrics_config"
_INFER = "common_config.infer_config"
_SLOT = "slots_config.*"

_ONE_FILE = (
    "In PERSIA it is how many threads write and read a checkpoint. A server here "
    "writes and reads its one file in one thread."
)
_OLD_ONE_FILE = _ONE_FILE.replace("In PERSIA", "In PERSIA before November 2021")

RENAMED = (
    OtherKey(
        "middleware_config",
        "embedding_worker_config",
        "PERSIA before November 2021 calls the section so.",
    ),
    OtherKey(
        "embedding_server_config",
        _SERVER,
        "PERSIA before November 2021 calls the section so.",
    ),
    OtherKey(
        "shard_server_config",
        _SERVER,
        "PERSIA before September 2021 calls the section so.",
    ),
    OtherKey(
        "common_config.intent",
        "common_config.job_type",
        "PERSIA before September 2021 calls it so.",
    ),
    OtherKey(
        "slot_config",
        "slots_config",
        "PERSIA's documentation calls it so; PERSIA itself does not start with it.",
    ),
    OtherKey(
        "slot_configs",
        "slots_config",
        "PERSIA's examples and documentation of August 2021 call it so.",
    ),
    OtherKey(
        "feature_configs",
        "slots_config",
        "PERSIA's examples of November 2021 call it so.",
    ),
    OtherKey(
        f"{_SLOT}.variable_max_length",
        f"{_SLOT}.sample_fixed_size",
        "PERSIA calls it so under feature_configs.",
    ),
    OtherKey(
        f"{_SLOT}.sum_attention",
        f"{_SLOT}.embedding_summation",
        "PERSIA calls it so under feature_configs.",
    ),
)
"""Applied first and in this order, so that the other tables know present names only.
The right key stands at the same place."""

IGNORED = (
    OtherKey(
        f"{_METRICS}.push_interval_sec",
        f"{_METRICS}.push_interval_seconds",
        "PERSIA's own examples have it, and PERSIA ignores it.",
    ),
    OtherKey(
        "common_config.initial_sparse_checkpoint",
        f"{_INFER}.embedding_checkpoint",
        "PERSIA's documentation has it, and PERSIA ignores it.",
    ),
    OtherKey(
        "common_config.embedding_checkpoint",
        f"{_INFER}.embedding_checkpoint",
        "PERSIA's examples of 2021 have it here, where PERSIA ignores it.",
    ),
    OtherKey(
        "common_config.servers",
        f"{_INFER}.servers",
        "PERSIA's documentation has it here, where PERSIA ignores it.",
    ),
    OtherKey(
        "PersiaMetricsConfig",
        _METRICS,
        "PERSIA's documentation has it, and PERSIA ignores it.",
    ),
    OtherKey(
        "PersiaInferConfig",
        _INFER,
        "PERSIA's documentation of 2021 has it, and PERSIA ignores it.",
    ),
    OtherKey(
        "PersiaEmbeddingServerConfig",
        _SERVER,
        "An example in PERSIA's source has it, and PERSIA ignores it.",
    ),
    OtherKey(
        "PersiaShardedServerConfig",
        _SERVER,
        "An example in PERSIA's source has it, and PERSIA ignores it.",
    ),
    OtherKey(
        "forward_buffer_size",
        "embedding_worker_config.forward_buffer_size",
        "PERSIA's first embedding configs have it. Its place is in global_config.yml.",
    ),
    OtherKey("common_config.num_embedding_io_workers", "", _OLD_ONE_FILE),
    OtherKey(f"{_SERVER}.num_embedding_io_workers", "", _OLD_ONE_FILE),
    OtherKey(f"{_SERVER}.num_persistence_workers", "", _OLD_ONE_FILE),
    OtherKey(
        f"{_SERVER}.num_signs_per_file",
        "",
        "In PERSIA before November 2021 it is how many rows a file of a checkpoint "
        "holds. A server here writes one file.",
    ),
    OtherKey(
        f"{_SERVER}.storage",
        "",
        "In PERSIA before November 2021 it says where checkpoints go, Ceph or Hdfs. "
        "Here the URL of a checkpoint says it.",
    ),
    OtherKey(
        f"{_SERVER}.local_buffer_dir",
        "",
        "In PERSIA before November 2021 it is the folder that holds the files of a "
        "checkpoint before they are uploaded. Here they are written where they go.",
    ),
    OtherKey(
        f"{_SERVER}.full_amount_manager_buffer_size",
        "",
        "PERSIA's documentation has it; in PERSIA before November 2021 it is the queue "
        "of a second list of all rows, for dumps. There is no such list here.",
    ),
    OtherKey(
        f"{_SERVER}.embedding_recycle_pool_capacity",
        "",
        "In PERSIA before November 2021 it is how many evicted rows keep their memory "
        "for new ones. Here the memory of every evicted row is used again.",
    ),
    OtherKey(
        "target_config",
        "",
        "In PERSIA's first embedding configs it says which labels are made of the "
        "features. Here, as in PERSIA now, labels come with the batch.",
    ),
    OtherKey(
        f"{_SLOT}.capacity",
        "",
        "In a branch of PERSIA that was not released it is how many rows a server "
        f"keeps for the slot. Here {_SERVER}.capacity is of all slots together.",
    ),
    OtherKey(
        f"{_SLOT}.is_uid",
        "",
        "In PERSIA's first embedding configs it marks the feature with the user's id. "
        "Here, as in PERSIA now, no feature is treated in another way.",
    ),
    OtherKey(
        f"{_SLOT}.is_pid",
        "",
        "In PERSIA's first embedding configs it marks the feature with the item's id. "
        "Here, as in PERSIA now, no feature is treated in another way.",
    ),
)
"""Taken out of the file, whatever their values."""

NO_EFFECT = (
    OtherKey("common_config.checkpointing_config.num_workers", "", _ONE_FILE),
    OtherKey(
        f"{_SERVER}.num_hashmap_internal_shards",
        "",
        "In PERSIA it is into how many parts, each with a lock, a server divides its "
        "rows. A server here has one index and no lock.",
    ),
)
"""Accepted with the values that PERSIA accepts."""

ONE_VALUE = (
    OneValue(
        "slots_config.*.index_prefix",
        0,
        "Leave it out: it follows from feature_groups.",
    ),
)

_TOP_OF_EMBEDDING_CONFIG = {
    "slots_config",
    "slot_config",
    "slot_configs",
    "feature_configs",
    "forward_buffer_size",
    "target_config",
}


def is_of_embedding_config(key_path: str) -> bool:
    """Return whether a key of the tables is one of ``embedding_config.yml``.

    All others are of ``global_config.yml``.
    """
    return key_path.partition(".")[0] in _TOP_OF_EMBEDDING_CONFIG


def with_present_keys(
    path: Path, content: object, *, is_embedding_config: bool, warns: bool
) -> object:
    """Return a file's content without the keys of ``RENAMED`` and ``IGNORED``.

    Args:
        path: the file, for messages.
        content: what it says; it is not changed.
        is_embedding_config: the file is ``embedding_config.yml``, not
            ``global_config.yml``. Keys of the other file stay where they are.
        warns: whether each is logged.

    Raises:
        ConfigError: the file has a renamed key beside the one that it stands for.
    """
    for row in (*RENAMED, *IGNORED):
        pattern = row.key_path.split(".")
        is_for_file = is_of_embedding_config(row.key_path) == is_embedding_config
        if not is_for_file or not _has(content, pattern):
            continue
        new_name = row.right_key.rpartition(".")[2] if row in RENAMED else ""
        content = _rewrite(content, pattern, new_name, Place(path))
        if warns:
            _warn(path, row)
    return content


def check_differences(path: Path, content: object, *, warns: bool) -> None:
    """Refuse or log each setting of a file that is in the other tables.

    Args:
        path: the file, for messages.
        content: what it says, its types checked.
        warns: whether each setting of ``NO_EFFECT`` is logged.

    Raises:
        ConfigError: a setting of ``ONE_VALUE`` has another value.
    """
    for row in ONE_VALUE:
        for key_path, value in _find(content, row.key_path.split("."), ""):
            if value != row.value:
                raise ConfigError(
                    f"{path}: {key_path} must be {row.value!r}. "
                    f"Received: {value!r}. {row.instead}"
                )
    for key in NO_EFFECT:
        if warns and _has(content, key.key_path.split(".")):
            _warn(path, key)


@lru_cache(maxsize=1024)
def _warn(path: Path, row: OtherKey) -> None:
    """Log a warning; the second call for a file and key does nothing.

    A process reads its files more than once.
    """
    if row in RENAMED:
        message = "%s: %s is read as %s. %s"
    elif row.right_key:
        message = "%s: %s is ignored; the key is %s. %s"
    else:
        message = "%s: %s is ignored. %s%s"
    logger.warning(message, path, row.key_path, row.right_key, row.reason)


def _has(content: object, pattern: list[str]) -> bool:
    return next(_find(content, pattern, ""), None) is not None


def _find(content: object, pattern: list[str], at: str) -> Iterator[tuple[str, object]]:
    """Yield key path and value of all that a pattern fits."""
    if not pattern:
        yield at.removeprefix("."), content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            if pattern[0] in ("*", key):
                yield from _find(value, pattern[1:], f"{at}.{key}")


def _rewrite(content: object, pattern: list[str], new_name: str, at: Place) -> object:
    """Return a copy in which what a pattern fits has another name, or is gone."""
    if not isinstance(content, Mapping):
        return content
    first, *rest = pattern
    rewritten = {}
    for key, value in content.items():
        if first not in ("*", key):
            rewritten[key] = value
        elif rest:
            rewritten[key] = _rewrite(value, rest, new_name, at.under(str(key)))
        elif new_name and new_name in content:
            raise ConfigError(
                f"{at.under(key)} must not stand beside {new_name}, whose other name "
                "it is. Leave one of them out."
            )
        elif new_name:
            rewritten[new_name] = value
    return rewritten
