"""Keys of PERSIA's files that do not do here what they say.

PERSIA's parser ignores keys that it does not know. So its examples and pages have keys
without effect, and files of its earlier versions load although half of their keys are
ignored. The tables here are the closed list of such keys: those of PERSIA's examples,
configuration structs and pages, of all its versions. A file that has one loads, and
each is logged once per process::

    RENAMED     the older name of a key: it does what that key does
    IGNORED     ignored, as by PERSIA; the warning names the right key, if there is one
    NO_EFFECT   a key of PERSIA that tunes what is not here; its value is still checked
    ONE_VALUE   a key that would change the result: any other value is an error

Any other key is an error. To give a key a meaning, remove it from these tables.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from persia_torchrec.decoding import Place
from persia_torchrec.errors import ConfigError

logger = logging.getLogger(__name__)


class OtherKey(NamedTuple):
    """A key of PERSIA's files or pages that does not do here what it says."""

    key_path: str
    """Keys from the top of the file, with a dot between; ``*`` is any key. The keys
    above it have their present names."""

    right_key: str
    """Key path of what was meant; empty: there is no such setting here."""

    reason: str
    """Where the key comes from; without a right key, what it would have done."""


_COMMON, _SLOT = "common_config", "slots_config.*"
_SERVER = "embedding_parameter_server_config"
_METRICS, _INFER = f"{_COMMON}.metrics_config", f"{_COMMON}.infer_config"

_NOVEMBER = "In PERSIA before November 2021 it"
_THREADS = (
    "is how many threads write and read a checkpoint. A server here writes and reads "
    "its one file in one thread."
)


def _because(reason: str, *keys: tuple[str, str]) -> tuple[OtherKey, ...]:
    return tuple(OtherKey(key_path, right_key, reason) for key_path, right_key in keys)


RENAMED = (
    *_because(
        "PERSIA before November 2021 calls the section so.",
        ("middleware_config", "embedding_worker_config"),
        ("embedding_server_config", _SERVER),
    ),
    *_because(
        "PERSIA before September 2021 calls it so.",
        ("shard_server_config", _SERVER),
        (f"{_COMMON}.intent", f"{_COMMON}.job_type"),
    ),
    *_because(
        "PERSIA's documentation calls it so; PERSIA itself does not start with it.",
        ("slot_config", "slots_config"),
    ),
    *_because(
        "PERSIA's examples of 2021 call it so.",
        ("slot_configs", "slots_config"),
        ("feature_configs", "slots_config"),
    ),
    *_because(
        "PERSIA calls it so under feature_configs.",
        (f"{_SLOT}.variable_max_length", f"{_SLOT}.sample_fixed_size"),
        (f"{_SLOT}.sum_attention", f"{_SLOT}.embedding_summation"),
    ),
)
"""Applied first and in this order, so that the other tables know present names only.
The right key is in the same section."""

IGNORED = (
    *_because(
        "PERSIA's examples or pages have it, and PERSIA ignores it.",
        (f"{_METRICS}.push_interval_sec", f"{_METRICS}.push_interval_seconds"),
        (f"{_COMMON}.initial_sparse_checkpoint", f"{_INFER}.embedding_checkpoint"),
        (f"{_COMMON}.embedding_checkpoint", f"{_INFER}.embedding_checkpoint"),
        (f"{_COMMON}.servers", f"{_INFER}.servers"),
        ("PersiaMetricsConfig", _METRICS),
        ("PersiaInferConfig", _INFER),
        ("PersiaEmbeddingServerConfig", _SERVER),
        ("PersiaShardedServerConfig", _SERVER),
    ),
    *_because(
        "PERSIA's first embedding configs have it. It belongs to global_config.yml.",
        ("forward_buffer_size", "embedding_worker_config.forward_buffer_size"),
    ),
    *_because(
        f"{_NOVEMBER} {_THREADS}",
        (f"{_COMMON}.num_embedding_io_workers", ""),
        (f"{_SERVER}.num_embedding_io_workers", ""),
        (f"{_SERVER}.num_persistence_workers", ""),
    ),
    *_because(
        f"{_NOVEMBER} is how many rows a file of a checkpoint holds. A server here "
        "writes one file.",
        (f"{_SERVER}.num_signs_per_file", ""),
    ),
    *_because(
        f"{_NOVEMBER} says where checkpoints go, Ceph or Hdfs. Here the URL of a "
        "checkpoint says it.",
        (f"{_SERVER}.storage", ""),
    ),
    *_because(
        f"{_NOVEMBER} is the folder that holds the files of a checkpoint before they "
        "are uploaded. Here they are written to their destination.",
        (f"{_SERVER}.local_buffer_dir", ""),
    ),
    *_because(
        f"{_NOVEMBER} is the queue of a second list of all rows, for dumps. There is "
        "no such list here.",
        (f"{_SERVER}.full_amount_manager_buffer_size", ""),
    ),
    *_because(
        f"{_NOVEMBER} is how many evicted rows keep their memory for new ones. Here "
        "the memory of every evicted row is used again.",
        (f"{_SERVER}.embedding_recycle_pool_capacity", ""),
    ),
    *_because(
        "In PERSIA's first embedding configs it says which labels are made of the "
        "features. Here, as in PERSIA now, labels come with the batch.",
        ("target_config", ""),
    ),
    *_because(
        "In a branch of PERSIA that was not released it is how many rows a server "
        f"keeps for the slot. Here {_SERVER}.capacity is of all slots together.",
        (f"{_SLOT}.capacity", ""),
    ),
    *_because(
        "In PERSIA's first embedding configs it marks the feature with the id of the "
        "user or the item. Here, as in PERSIA now, all features are treated alike.",
        (f"{_SLOT}.is_uid", ""),
        (f"{_SLOT}.is_pid", ""),
    ),
)
"""Removed from the file, whatever their values."""

NO_EFFECT = (
    *_because(
        f"In PERSIA it {_THREADS}", (f"{_COMMON}.checkpointing_config.num_workers", "")
    ),
    *_because(
        "In PERSIA it is into how many parts, each with a lock, a server divides its "
        "rows. A server here has one index and no lock.",
        (f"{_SERVER}.num_hashmap_internal_shards", ""),
    ),
)
"""Accepted with the values that PERSIA accepts."""

ONE_VALUE = {
    f"{_SLOT}.index_prefix": (0, "Leave it out: it follows from feature_groups."),
}
"""Key path -> the value that it must have, and what to do instead."""

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


def apply_differences(
    content: object, place: Place, *, is_embedding_config: bool, warns: bool
) -> object:
    """Rename and remove the keys of the tables in a file's content, in place.

    Args:
        content: what the file says.
        place: the file, for messages.
        is_embedding_config: the file is ``embedding_config.yml``, not
            ``global_config.yml``. Keys of the other file stay.
        warns: whether each is logged.

    Returns:
        ``content``.

    Raises:
        ConfigError: the file has a key together with its older name, or a key of
            ``ONE_VALUE`` with another value.
    """
    for row in (*RENAMED, *IGNORED, *NO_EFFECT):
        if is_of_embedding_config(row.key_path) != is_embedding_config:
            continue
        found = list(_find(content, row.key_path.split("."), place))
        if row not in NO_EFFECT:
            for section, key, at in found:
                _rename(section, key, row.right_key if row in RENAMED else "", at)
        if found and warns:
            _warn(place.source, row)
    for key_path, (only, instead) in ONE_VALUE.items():
        for section, key, at in list(_find(content, key_path.split("."), place)):
            value = section.pop(key, only)
            if type(value) is not type(only) or value != only:
                raise ConfigError(
                    f"{at} must be {only!r}. Received: {value!r}. {instead}"
                )
    return content


def _rename(section: dict[str, object], key: str, right_key: str, at: Place) -> None:
    """Rename a key to the last name of a key path, or remove it if that is empty."""
    if key not in section:  # a YAML alias: the section was changed already
        return
    value = section.pop(key)
    name = right_key.rpartition(".")[2]
    if name in section:
        raise ConfigError(
            f"{at} must not stand beside {name}, of which it is another name. Leave "
            "one of them out."
        )
    if name:
        section[name] = value


@lru_cache(maxsize=1024)
def _warn(file: str, row: OtherKey) -> None:
    """Log a warning, once per file and key: a process reads its files repeatedly."""
    if row in RENAMED:
        message = "%s: %s is read as %s. %s"
    elif row.right_key:
        message = "%s: %s is ignored; the key is %s. %s"
    else:
        message = "%s: %s is ignored. %s%s"
    logger.warning(message, file, row.key_path, row.right_key, row.reason)


def _find(
    content: object, pattern: list[str], place: Place
) -> Iterator[tuple[dict[str, object], str, Place]]:
    """Yield section, key and place of each key that a pattern matches."""
    if not isinstance(content, dict):
        return
    first, *rest = pattern
    for key in content if first == "*" else content.keys() & {first}:
        if rest:
            yield from _find(content[key], rest, place.under(key))
        else:
            yield content, key, place.under(key)
