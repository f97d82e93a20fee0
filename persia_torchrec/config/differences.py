"""What PERSIA's files may say that this package does not act on.

PERSIA ignores keys that it does not know, so that its own documentation and examples
have some which never did anything. They are refused with what they were meant to be.

A setting that would change the result is refused unless it has the one value whose
meaning holds here. A setting that only tunes PERSIA's machinery is accepted, so that
its files load as they are, and named in the log. To give a setting a meaning, take
it out of these tables.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
class Mistaken:
    """A key that PERSIA's documentation or examples have, and PERSIA ignores."""

    key_path: str
    """Keys from the top of the file, with a dot between; ``*`` is any key."""

    instead: str
    """What was meant."""


MISTAKEN = (
    Mistaken(
        "common_config.metrics_config.push_interval_sec",
        "PERSIA's own examples have it, and PERSIA ignores it. The key is "
        "push_interval_seconds.",
    ),
    Mistaken(
        "common_config.initial_sparse_checkpoint",
        "PERSIA's documentation has it, and PERSIA ignores it. The key is "
        "embedding_checkpoint, under common_config.infer_config.",
    ),
    Mistaken(
        "common_config.servers",
        "PERSIA's documentation has it here, where PERSIA ignores it. Its place is "
        "under common_config.infer_config.",
    ),
    Mistaken(
        "embedding_parameter_server_config.full_amount_manager_buffer_size",
        "PERSIA's documentation has it, and PERSIA ignores it. Leave it out.",
    ),
    Mistaken(
        "slot_config",
        "PERSIA's documentation has it, and PERSIA ignores it. The key is "
        "slots_config.",
    ),
    Mistaken(
        "PersiaMetricsConfig",
        "PERSIA's documentation has it, and PERSIA ignores it. Its keys stand under "
        "common_config.metrics_config.",
    ),
)
"""Each is refused, whatever its value."""

ONE_VALUE = (
    OneValue(
        "slots_config.*.index_prefix",
        0,
        "Leave it out: it follows from feature_groups.",
    ),
)

NO_EFFECT = (
    "common_config.checkpointing_config.num_workers",
    "embedding_parameter_server_config.num_hashmap_internal_shards",
)
"""Key paths that are accepted with any value of the right type."""


def refuse_mistaken_keys(path: Path, content: object) -> None:
    """Refuse a key of ``MISTAKEN``, and say what was meant.

    Args:
        path: the file, for messages.
        content: what it says.

    Raises:
        ConfigError: the file has one.
    """
    for row in MISTAKEN:
        for key_path, _ in _find(content, row.key_path.split("."), ""):
            raise ConfigError(f"{path}: {key_path} is unknown. {row.instead}")


def check_differences(path: Path, content: object) -> None:
    """Refuse or log each setting of a file that is in the tables.

    Args:
        path: the file, for messages.
        content: what it says, its types checked.

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
    for pattern in NO_EFFECT:
        for key_path, _ in _find(content, pattern.split("."), ""):
            logger.info("%s: %s has no effect here", path, key_path)


def _find(content: object, pattern: list[str], at: str) -> Iterator[tuple[str, object]]:
    """Yield key path and value of all that a pattern fits."""
    if not pattern:
        yield at.removeprefix("."), content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            if pattern[0] in ("*", key):
                yield from _find(value, pattern[1:], f"{at}.{key}")
