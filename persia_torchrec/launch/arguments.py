"""Arguments of components, as torchx reads them: of signatures and docstrings.

torchx merges a command line and ``.torchxconfig`` before it calls a component. What
several components take are fields of one dataclass, to which :func:`component` has each
component's ``**shared`` stand for. Previous names of settings are taken with a warning.
"""

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.schedulers import ComponentError
from persia_torchrec.parsing.command_line import field_docs
from persia_torchrec.parsing.settings import SETTINGS, present_name

Component = TypeVar("Component", bound=Callable[..., Any])

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=", re.ASCII)
_PREVIOUS = {"recover": "restarts", "nn_workers": "trainers"}  # that say it otherwise


def component(
    kind: type, *names: str, **previous: str
) -> Callable[[Component], Component]:
    """Have the ``**shared`` of a torchx component stand for fields of a dataclass.

    Signature and docstring get the fields, with types, defaults and docs; a field whose
    default is None must be given. They get the previous names of all arguments, too,
    those of ``SETTINGS`` and ``previous``. Variables of processes, ``NAME=value,
    NAME=value``, may have ``=`` in their values. A ConfigError is one that torchx shows
    in a line.
    """
    kinds, docs = get_type_hints(kind), field_docs(kind)
    default_of = {field.name: field.default for field in fields(kind)}

    def parameter(name: str) -> inspect.Parameter:
        annotation, default = kinds[name], default_of[name]
        if get_origin(annotation) is dict:
            annotation, default = str, ""
        elif default is None:  # torchx does not know ``str | None``
            annotation, default = get_args(annotation)[0], inspect.Parameter.empty
        elif default is MISSING:
            default = inspect.Parameter.empty
        return _by_name(name, annotation, default)

    def extend(function: Component) -> Component:
        signature = inspect.signature(function)
        own = [
            _by_name(one.name, one.annotation, one.default)
            for one in [*signature.parameters.values()][:-1]
        ]
        shared = [parameter(name) for name in names]
        known = {one.name for one in (*own, *shared)}
        present_of = {**_previous_names(known), **previous}
        pairs = {name for name in names if get_origin(kinds[name]) is dict}

        @functools.wraps(function)
        def call(**given: Any) -> Any:
            try:
                return function(**_parsed(given, present_of, pairs))
            except ConfigError as exc:
                raise ComponentError(str(exc)) from exc

        before = [_by_name(old, str, "") for old in present_of]
        described: Any = call  # to mypy, not every callable has a signature
        described.__signature__ = signature.replace(parameters=[*own, *shared, *before])
        lines = [f"    {name}: {docs[name]}" for name in names]
        lines += [f"    {old}: previous name of {n}" for old, n in present_of.items()]
        described.__doc__ = "\n".join([inspect.getdoc(function) or "", *lines])
        extended: Component = described
        return extended

    return extend


def _parsed(
    given: dict[str, Any], present_of: Mapping[str, str], pairs: set[str]
) -> dict[str, Any]:
    """Return arguments by their present names; those that are pairs as mappings."""
    for old in present_of.keys() & given.keys():
        _rename(given, old, present_of[old])
    for name in pairs & given.keys():
        if isinstance(given[name], str):
            given[name] = parse_pairs(name, given[name])
    return given


def _previous_names(known: set[str]) -> dict[str, str]:
    """Return the present names of arguments by their previous ones."""
    return {
        **{old: now for old, now in _PREVIOUS.items() if now in known},
        **{
            old: now
            for now in sorted(known & SETTINGS.keys())
            for old in SETTINGS[now].previous
            if not old.startswith("num_")  # of programs, not of components
        },
    }


def _by_name(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a parameter that may stand in any order."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _rename(given: dict[str, Any], old: str, now: str) -> None:
    """Have the present argument be what its previous name says, if that is given."""
    value = given.pop(old)
    if value in ("", None):
        return
    present_name(f"--{old}", f"--{now}")
    if old == "recover":
        if str(value).lower() in ("false", "0"):
            given[now] = 0
            given |= {"max_retries": 0} if "max_retries" in given else {}
        return
    kind = SETTINGS[now].kind
    try:
        given[now] = kind(value) if kind in (int, float) else value
    except ValueError as exc:
        raise ConfigError(f"{now} must be a number. Received: {value!r}.") from exc
    if old in ("nn_workers", "replicas") and now == "trainers":  # of machines
        given[now] *= int(given.get("nproc_per_node", 1))


def parse_pairs(name: str, text: str) -> dict[str, str]:
    """Parse ``NAME=value,NAME=value``; a comma is of a value where no name follows."""
    pairs: dict[str, str] = {}
    last = ""
    for delimiter, piece in re.findall(r"(^|[,;])([^,;]*)", text.strip()):
        if match := _NAME.match(piece):
            last = match[1]
            pairs[last] = piece[match.end() :].strip()
        elif last and "=" not in piece:
            pairs[last] += delimiter + piece.rstrip()
        elif text.strip():
            raise ConfigError(
                f"{name} must be NAME=value,NAME=value, of names with letters, digits "
                f"and _. Received: {piece!r} in {text!r}. A value that has such words "
                f"after a comma stands in the roles file, under all.{name}."
            )
    return {one: "" if v in ("''", '""') else v for one, v in pairs.items()}


def split_words(name: str, kind: str, text: str) -> list[str]:
    """Split the text of a setting into words, as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(
            f"{name} must be {kind}, as in a shell. Received: {text!r} ({exc})."
        ) from exc
