"""A YAML file into dataclasses: keys, types and defaults come from the fields.

A mapping of the file becomes a dataclass. Its keys are the names of the fields, with
``_config`` behind the name of a field that holds further dataclasses; a field without
default is required. A field's type is bool, int or str, a tuple of str, a dataclass,
a dict of any of these by name, or one of them or None. The reader checks keys and
types; what else a value must be is checked by the dataclass, in ``__post_init__``.
Every error names the file and the key path.
"""

import difflib
import types
from collections.abc import Hashable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from persia_torchrec.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_TYPE_NAMES = {bool: "true or false", int: "an integer", str: "a string"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where in which file a value stands; prints as ``file: key.path``."""

    path: Path
    key_path: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.key_path}" if self.key_path else str(self.path)

    def under(self, key: str) -> "Place":
        """Return the place of one key's value."""
        return Place(self.path, f"{self.key_path}.{key}".removeprefix("."))


def read_text(path: str | Path) -> str:
    """Read a file of UTF-8 text.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} must be a text file that can be read. Received: {exc}."
        ) from exc


def read_yaml(path: str | Path) -> object:
    """Read a YAML file into plain values.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or gives a key twice.
    """
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: str | Path) -> object:
    """Read the text of a YAML file into plain values.

    Args:
        text: of the file.
        path: of the file, for messages.

    Raises:
        ConfigError: it is no YAML, or gives a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a date that is none
        raise ConfigError(f"{path} must be YAML. Received: {exc}.") from exc


def read_section(cls: type[T], content: object, place: Place) -> T:
    """Build a dataclass from a mapping of a file.

    Args:
        cls: see the head of this file for what its fields may be.
        content: the mapping; None, as YAML gives for a key without value, is empty.
        place: where the mapping stands, for messages.

    Raises:
        ConfigError: a key is unknown or missing, a value is of another type, or the
            dataclass refuses it.
    """
    mapping = _read_mapping(content, place)
    kinds = get_type_hints(cls)
    names = {_key_of(name, kind): name for name, kind in kinds.items()}
    arguments: dict[str, Any] = {}  # as their fields say: checked right here
    for key, value in mapping.items():
        if key not in names:
            raise ConfigError(f"{place.under(key)} is unknown. {hint(key, names)}")
        arguments[names[key]] = _read_value(kinds[names[key]], value, place.under(key))
    for field in fields(cls):
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in arguments:
            key = _key_of(field.name, kinds[field.name])
            raise ConfigError(f"{place} must have the key {key!r}.")
    try:
        return cls(**arguments)
    except ConfigError as exc:
        raise ConfigError(f"{place}: {exc}") from exc


def hint(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known name nearest to this one, or with them all."""
    known = list(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(known)}."


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, where PyYAML would take the last."""

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


def _read_value(kind: object, value: object, place: Place) -> object:
    if isinstance(kind, types.UnionType):
        return None if value is None else _read_value(get_args(kind)[0], value, place)
    if isinstance(kind, type) and is_dataclass(kind):
        return read_section(kind, value, place)
    if get_origin(kind) is dict:
        kind_of_each = get_args(kind)[1]
        return {
            key: _read_value(kind_of_each, each, place.under(key))
            for key, each in _read_mapping(value, place).items()
        }
    if get_origin(kind) is tuple:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigError(
                f"{place} must be a list of strings. Received: {value!r}."
            )
        return tuple(value)
    assert isinstance(kind, type), f"{place} has a field of type {kind}"
    if type(value) is not kind:  # not isinstance: true is no integer
        raise ConfigError(f"{place} must be {_TYPE_NAMES[kind]}. Received: {value!r}.")
    return value


def _read_mapping(content: object, place: Place) -> dict[str, object]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{place} must be a mapping. Received: {content!r}.")
    for key in content:
        if not isinstance(key, str) or not key:
            raise ConfigError(
                f"{place} must have names as keys. Received: {key!r}. "
                "Put it into quotes if it is meant as a name."
            )
    return content


def _key_of(field_name: str, kind: object) -> str:
    """Return the key of a field: ``NAME_config`` when it holds dataclasses."""
    held = (kind, *get_args(kind))
    return f"{field_name}_config" if any(map(is_dataclass, held)) else field_name
