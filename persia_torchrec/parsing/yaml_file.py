"""Read a YAML file into ``msgspec.Struct`` classes.

The keys of a section are the names of the fields, a field without default is required,
an empty section has all defaults. Unlike PERSIA, this package rejects unknown and
duplicate keys; ``differences.toml`` lists the exceptions. Every error names the file
and the key path.
"""

import difflib
import logging
import tomllib
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml

from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.decoding import KeyPath, convert

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OtherKey(NamedTuple):
    """A key of PERSIA's files or pages that does not do here what it says."""

    kind: str  # ``renamed``, ``ignored``, ``no_effect`` or ``zero``
    key_path: str  # keys from the top, with a dot between; ``*`` is any key
    right_key: str  # key path of what was meant; empty: there is no such setting here
    reason: str  # origin of the key; without a right key, what it would have done


_TABLES = tomllib.loads(Path(__file__).with_name("differences.toml").read_text())
DIFFERENCES = {
    file: [
        OtherKey(kind, key_path, right_key, group["reason"])
        for kind, groups in kinds.items()
        for group in groups
        for key_path, right_key in group["keys"].items()
    ]
    for file, kinds in _TABLES.items()
}
"""By file, ``embedding_config`` or ``global_config``, in the order of application."""


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
    documents = _parse(text, path, _StrictLoader)
    if len(documents) > 1:
        raise ConfigError(
            f"{path} must be one document. Received: {len(documents)}, after lines ---."
        )
    return documents[0] if documents else None


def parse_documents(text: str, path: str | Path) -> list[object]:
    """Parse the documents of a YAML file; lines of ``---`` are between them.

    It may be one of Kubernetes, where ``0400`` is octal.
    """
    return _parse(text, path, _Loader)


def _parse(text: str, path: str | Path, loader: type["_Loader"]) -> list[object]:
    try:
        return list(yaml.load_all(text, Loader=loader))
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: an impossible date
        raise ConfigError(f"{path} must be YAML. Received: {exc}.") from exc


def parse_file(kind: type[T], text: str, top: KeyPath, file: str, *, warns: bool) -> T:
    """Parse a file, one of ``DIFFERENCES``, into a struct; None is an empty section."""
    content = parse_yaml(text, top.source)
    for row in DIFFERENCES[file]:
        found = list(_find(content, row.key_path.split("."), top))
        for section, key, at in found:
            if key in section:  # else it is a YAML alias, and was changed already
                _apply(row, section, key, at)
        if found and warns and row.kind != "zero":
            _warn(top.source, row)
    return read_section(kind, content, top)


def read_section(kind: type[T], content: object, at: KeyPath) -> T:
    """Check plain values, strictly, and make them a struct; None is an empty section.

    An unknown key is a ConfigError with the nearest known one.
    """
    return convert(_check_keys(content, kind, at), kind, at, ConfigError)


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


class _StrictLoader(_Loader):
    """Rejects numbers of which YAML 1.1 makes others: ``010`` is 8, ``1:30`` is 90."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).lstrip("+-")
        if ":" in text or (text[0] == "0" and text[1:2].isdecimal()):
            raise yaml.constructor.ConstructorError(
                problem=f"{node.value}: a number must have no zero before it, and no "
                "colon in it; a text stands in quotes",
                problem_mark=node.start_mark,
            )
        number: int = super().construct_yaml_int(node)
        return number


_INT = "tag:yaml.org,2002:int"
_StrictLoader.add_constructor(_INT, _StrictLoader.construct_yaml_int)


def _find(
    content: object, pattern: list[str], at: KeyPath
) -> Iterator[tuple[dict[str, object], str, KeyPath]]:
    """Yield section, key and path of each key that a pattern matches."""
    if not isinstance(content, dict):
        return
    first, *rest = pattern
    for key in content if first == "*" else content.keys() & {first}:
        if rest:
            yield from _find(content[key], rest, at.under(key))
        else:
            yield content, key, at.under(key)


def _apply(row: OtherKey, section: dict[str, object], key: str, at: KeyPath) -> None:
    """Rename or remove a key of a section."""
    if row.kind == "no_effect":
        return
    value = section.pop(key)
    if row.kind == "zero" and (type(value) is not int or value != 0):
        raise ConfigError(f"{at} must be 0. Received: {value!r}. {row.reason}")
    if row.kind == "renamed":
        name = row.right_key.rpartition(".")[2]
        if name in section:
            raise ConfigError(
                f"{at} must not be set together with {name}, its alias. "
                "Leave one of them out."
            )
        section[name] = value


@lru_cache(maxsize=1024)
def _warn(file: str, row: OtherKey) -> None:
    """Log a warning, once per file and key: a process reads its files repeatedly."""
    message = "%s: %s is ignored. %s%s"
    if row.right_key:
        does = "read as" if row.kind == "renamed" else "ignored; the key is"
        message = f"%s: %s is {does} %s. %s"
    logger.warning(message, file, row.key_path, row.right_key, row.reason)


def _check_keys(content: object, kind: Any, at: KeyPath) -> object:
    """Return a section with its keys checked, and ``{}`` for each empty one in it."""
    if get_origin(kind) is dict:  # msgspec would not name the entry with a mistake
        entry = get_args(kind)[1]
        return {
            name: read_section(entry, value, at.under(name))
            for name, value in _require_mapping(content, at).items()
        }
    if get_origin(kind) in (list, tuple):
        if not isinstance(content, list):
            return content  # as msgspec will say
        entry = get_args(kind)[0]
        places = [KeyPath(at.source, f"{at.path}[{n}]") for n in range(len(content))]
        pairs = zip(content, places, strict=True)
        return [_check_keys(one, entry, place) for one, place in pairs]
    structs = [k for k in (kind, *get_args(kind)) if hasattr(k, "__struct_fields__")]
    if not structs or (content is None and kind is not structs[0]):  # X | None
        return content
    known = {f.encode_name: f.type for f in msgspec.structs.fields(structs[0])}
    checked = {}
    for key, value in _require_mapping(content, at).items():
        if key not in known:
            raise ConfigError(f"{at.under(key)} is unknown. {nearest(key, known)}")
        checked[key] = _check_keys(value, known[key], at.under(key))
    return checked


def _require_mapping(content: object, at: KeyPath) -> dict[str, object]:
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
