"""Read a YAML file into ``msgspec.Struct`` classes.

The keys of a section are the names of the fields, a field without default is required,
an empty section has all defaults. Every error names the file and the key path.
"""

import difflib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import yaml
from msgspec import structs

from persia_torchrec.decoding import KeyPath, convert
from persia_torchrec.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def read_text(path: str | Path) -> str:
    """Read a file of UTF-8 text, or raise ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} must be a text file that can be read. Received: {exc}."
        ) from exc


def parse_yaml(text: str, path: str | Path) -> object:
    """Parse YAML into plain values, or raise ConfigError, as for a duplicate key."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: an impossible date
        raise ConfigError(f"{path} must be YAML. Received: {exc}.") from exc


def read_section(kind: type[T], content: object, at: KeyPath) -> T:
    """Build a struct from a mapping of a file; None is an empty one."""
    return convert(_check_keys(content, kind, at), kind, at, ConfigError)


def require_mapping(content: object, at: KeyPath) -> dict[str, object]:
    """Return a mapping whose keys are names; ``{}`` for None."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{at} must be a mapping. Received: {content!r}.")
    for key in content:
        if not isinstance(key, str) or not key:
            raise ConfigError(
                f"{at} must have names as keys. Received: {key!r}. "
                "Put it into quotes if it is meant as a name."
            )
    return content


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name that is nearest, or with all of them."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {found[0]!r}?" if found else f"Known: {', '.join(known)}."


class _Loader(yaml.SafeLoader):
    """Rejects a duplicate key, of which PyYAML would take the last."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key_node.value!r} for the second time",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _check_keys(content: object, kind: Any, at: KeyPath) -> object:
    """Return a section with its keys checked, and ``{}`` for each empty one in it."""
    kinds = [each for each in (kind, *get_args(kind)) if _is_struct(each)]
    if not kinds or (content is None and kind is not kinds[0]):  # X | None
        return content
    known = {field.encode_name: field.type for field in structs.fields(kinds[0])}
    checked = {}
    for key, value in require_mapping(content, at).items():
        if key not in known:
            raise ConfigError(f"{at.under(key)} is unknown. {nearest(key, known)}")
        checked[key] = _check_keys(value, known[key], at.under(key))
    return checked


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
