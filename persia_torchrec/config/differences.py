"""Apply ``differences.toml``: keys of PERSIA's files that do not do what they say."""

import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from persia_torchrec.decoding import KeyPath
from persia_torchrec.errors import ConfigError

logger = logging.getLogger(__name__)


class OtherKey(NamedTuple):
    """A key of PERSIA's files or pages that does not do here what it says."""

    key_path: str
    """Keys from the top of the file, with a dot between; ``*`` is any key."""

    right_key: str
    """Key path of what was meant; empty: there is no such setting here."""

    reason: str
    """Where the key comes from; without a right key, what it would have done."""


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    reason: str
    keys: dict[str, str]

    def rows(self) -> list[OtherKey]:
        return [OtherKey(key, right, self.reason) for key, right in self.keys.items()]


class _OneValue(msgspec.Struct, forbid_unknown_fields=True):
    value: int
    instead: str


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    renamed: list[_Group]
    ignored: list[_Group]
    no_effect: list[_Group]
    one_value: dict[str, _OneValue]


_TABLES = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=_Tables
)
RENAMED = tuple(row for group in _TABLES.renamed for row in group.rows())
IGNORED = tuple(row for group in _TABLES.ignored for row in group.rows())
NO_EFFECT = tuple(row for group in _TABLES.no_effect for row in group.rows())
ONE_VALUE = _TABLES.one_value

_TOP_OF_EMBEDDING_CONFIG = {"forward_buffer_size", "target_config", "slots_config"} | {
    row.key_path for row in RENAMED if row.right_key == "slots_config"
}


def is_of_embedding_config(key_path: str) -> bool:
    """Return whether a key is of ``embedding_config.yml``, not of the other file."""
    return key_path.partition(".")[0] in _TOP_OF_EMBEDDING_CONFIG


def apply_differences(
    content: object, file: KeyPath, *, is_embedding_config: bool, warns: bool
) -> object:
    """Rename and remove the keys of the tables in a file's content; return it.

    The keys of the other file stay: those of ``global_config.yml``, for instance, if
    this is ``embedding_config.yml``.
    """
    for row in (*RENAMED, *IGNORED, *NO_EFFECT):
        if is_of_embedding_config(row.key_path) != is_embedding_config:
            continue
        found = list(_find(content, row.key_path.split("."), file))
        if row not in NO_EFFECT:
            for section, key, at in found:
                _rename(section, key, row.right_key if row in RENAMED else "", at)
        if found and warns:
            _warn(file.source, row)
    for key_path, only in ONE_VALUE.items():
        for section, key, at in list(_find(content, key_path.split("."), file)):
            value = section.pop(key, only.value)
            if type(value) is not int or value != only.value:
                raise ConfigError(
                    f"{at} must be {only.value}. Received: {value!r}. {only.instead}"
                )
    return content


def _rename(section: dict[str, object], key: str, right_key: str, at: KeyPath) -> None:
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
    content: object, pattern: list[str], file: KeyPath
) -> Iterator[tuple[dict[str, object], str, KeyPath]]:
    """Yield section, key and path of each key that a pattern matches."""
    if not isinstance(content, dict):
        return
    first, *rest = pattern
    for key in content if first == "*" else content.keys() & {first}:
        if rest:
            yield from _find(content[key], rest, file.under(key))
        else:
            yield content, key, file.under(key)
