"""JSON and YAML into the types that the code declares, checked strictly by msgspec.

``true``, ``8.0`` and ``"8"`` are not integers. Errors name the file or message, the
path of the value within it, what it must be and what it is.
"""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from persia_torchrec.errors import ConfigError

T = TypeVar("T")
Error = Callable[[str], Exception]

_LONGEST = 2000
"""Characters of a message: keys and values may have any number."""

_MISFIT = re.compile(r"(?s)(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>.*)`)?")
_EXPECTED = re.compile(r"Expected `(?P<type>.+?)`(?: (?P<bound>.+?))?(?:, got `.*`)?")
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "object": "a mapping",
    "array": "a list",
}


@dataclass(frozen=True, slots=True)
class KeyPath:
    """The path of a value in a file or message; prints as ``file: key.path``."""

    source: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source

    def under(self, key: str) -> "KeyPath":
        """Return the path of one key's value."""
        return KeyPath(self.source, f"{self.path}.{key}".removeprefix("."))


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = threading.Lock()


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return what decodes JSON to a type, in any thread.

    msgspec notes what it finds out of a class on that class, and reads notes that are
    half written: two threads that decode to it first, at once, would end the process.
    """
    if (decoder := _decoders.get(kind)) is None:
        with _building:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder


def parse_json(
    data: bytes | memoryview | str, kind: Any, source: str, error: Error
) -> Any:
    """Decode JSON to any type that msgspec knows, or raise ``error`` with ``source``.

    As ``ValueError: a.json: [1] must be an integer. Received: True.``
    """
    try:
        try:
            return (_decoders.get(kind) or decoder_of(kind)).decode(data)
        except msgspec.ValidationError as exc:
            content = msgspec.json.decode(data)
            raise error(_describe(exc, content, KeyPath(source))[:_LONGEST]) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise error(f"{source} must be JSON in UTF-8. Received: {exc}.") from exc


def convert(content: object, kind: type[T], at: KeyPath, error: Error) -> T:
    """Check the type of plain values, as of a YAML file; see :func:`parse_json`."""
    decoder_of(kind)
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as exc:
        raise error(_describe(exc, content, at)[:_LONGEST]) from exc


def _describe(exc: msgspec.ValidationError, content: Any, at: KeyPath) -> str:
    """Say in this package's words what msgspec says: ``WHAT - at `$PATH```."""
    match = _MISFIT.fullmatch(str(exc))
    assert match is not None
    path = match["path"] or ""
    at = KeyPath(at.source, f"{at.path}{path}".removeprefix("."))
    if missing := re.fullmatch(r"Object missing required field `(.*)`", match["what"]):
        return f"{at} must have the key {missing[1]!r}."
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", match["what"]):
        return f"{at.under(unknown[1])} is unknown."
    expected = _EXPECTED.fullmatch(match["what"])
    if expected is None:  # raised by __post_init__
        return f"{at}: {match['what']}"
    names = [name for name in expected["type"].split(" | ") if name != "null"]
    kinds = " or ".join(_NAMES.get(name, name) for name in names)
    must = expected["bound"] or kinds
    subject = f"each key of {at}" if match["key"] else str(at)
    if match["key"] or "[...]" in path:  # msgspec does not tell which entry of a dict
        return f"{subject} must be {must}."
    try:
        for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
            content = content[int(index)] if index else content[key]
    except (IndexError, KeyError, TypeError):  # of a key that is there twice
        return f"{subject} must be {must}."
    return f"{subject} must be {must}. Received: {shown(content)}."


def shown(value: object, most: int = 100) -> str:
    """Return the first characters of a value's ``repr``; what follows is not made."""
    text = ""
    for part in _parts(value, most):
        text += part
        if len(text) >= most:
            break
    return text[:most]


def _parts(value: object, most: int) -> Iterator[str]:
    """Yield the ``repr`` of a value of JSON, a piece at a time."""
    match value:
        case list():
            yield "["
            for n, one in enumerate(value):
                yield ", " if n else ""
                yield from _parts(one, most)
            yield "]"
        case dict():
            yield "{"
            for n, (key, one) in enumerate(value.items()):
                yield ", " if n else ""
                yield from _parts(key, most)
                yield ": "
                yield from _parts(one, most)
            yield "}"
        case str():
            yield repr(value[:most])
        case _:
            yield repr(value)


def require_at_least_1(**numbers: int | None) -> None:
    """Reject a number below 1; the message names it."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be >= 1. Received: {number}.")
