"""Validated JSON: what comes from the network or a disk is checked before it is used.

A JSON text is decoded into a declared type: a dataclass, a ``msgspec.Struct``, or a
plain annotation. A value of another type anywhere in it is an error that names the
path, so that no code behind it meets a string where a number belongs:

    b'{"a": "x"}'  --parse_json(Request)-->  Expected `int`, got `str` - at `$.a`

``msgspec`` does the work. It also calls ``__post_init__``, and takes a ``ValueError``
raised there (a ``ConfigError``, too) as a value out of its range.
"""

from collections.abc import Callable
from typing import Any

import msgspec


def parse_json(
    data: bytes | memoryview, type_: Any, error: Callable[[str], Exception]
) -> Any:
    """Decode a JSON text, and check that it has a type.

    Args:
        data: the text, in UTF-8.
        type_: what the value must be. Types are not converted: ``1`` is not a ``bool``.
        error: given what is wrong and where, returns the error to raise.

    Returns:
        A value of ``type_``.

    Raises:
        Exception: ``error``'s, if this is not JSON, or a value of another type.

    Example:
        >>> parse_json(b"[1, 2]", list[int], ValueError)
        [1, 2]
        >>> parse_json(b"[1, true]", list[int], ValueError)
        Traceback (most recent call last):
        ...
        ValueError: Expected `int`, got `bool` - at `$[1]`
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise error(str(exc)) from exc
