"""Command lines out of dataclasses: each field is a flag.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Settings:
        \"\"\"Run it.\"\"\"                          description
        port: int                             --port PORT, required
        \"\"\"Port to listen on.\"\"\"                help
        servers: tuple[str, ...] = ()         --servers A B
        engine: Literal["a", "b"] = "a"       --engine {a,b}
        is_verbose: bool = False              --is-verbose
        host: str | None = None               --host HOST
        timings: Timings = Timings()          the flags of that dataclass

A field's metadata may change that: ``flag`` is another name of the flag, or None where
there is none; ``repeat`` has each value given by a flag of its own; with ``positional``
the value comes without a flag; ``previous`` are flags of the release before, and
without the field that it ``needs`` a flag is an error. A field may be one of the
settings that several commands take (``settings.py``): it has the name, the help and the
rest of that.
"""

import argparse
import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import pairwise
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from persia_torchrec.parsing.settings import (
    SETTINGS,
    declared,
    meaning,
    present_name,
    require_used,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportFlags:
    """The flag of processes to which users add settings of their own."""

    imports: tuple[str, ...] = declared(
        "imports",
        default=(),
        flag="--import",
        repeat=True,
        help="module to import at the start, which registers optimizers, initializers "
        "or admissions of its own; may be given several times",
    )


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, prog: str) -> T:
    """Parse a command line, ``sys.argv`` by default, into a dataclass."""
    given = given_flags(kind, argv, prog=prog)
    config = build(kind, given)
    require_used(config, given)
    return config


def given_flags(
    kind: type[T], argv: Sequence[str] | None = None, *, prog: str
) -> dict[str, Any]:
    """Parse a command line into the fields that it gives, without defaults."""
    about = (kind.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog, description=about)
    add_flags(parser, kind)
    words = present_flags(sys.argv[1:] if argv is None else argv, kind)
    given = vars(parser.parse_args(words))
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
    }


def present_flags(words: Sequence[str], kind: Any) -> list[str]:
    """Return words with the present names of flags, of which some are previous ones."""
    present_of = {
        f"--{old.replace('_', '-')}": flag
        for field, flag in _flags(kind)
        for old in (
            *field.metadata.get("previous", ()),
            *_declared(field, "previous", ()),
        )
    }
    present = []
    for word in words:
        flag, is_given, value = word.partition("=")
        if flag in present_of:
            flag = present_name(flag, present_of[flag])
        present.append(f"{flag}{is_given}{value}")
    return present


def _flags(kind: Any) -> Iterator[tuple[Field[Any], str]]:
    """Yield the fields of a dataclass that are flags, and these."""
    kinds = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            yield from _flags(kinds[field.name])
        elif (flag := _flag(field)) is not None:
            yield field, flag


def _flag(field: Field[Any]) -> str | None:
    name = field.metadata.get("declared", field.name)
    flag: str | None = field.metadata.get("flag", "--" + name.replace("_", "-"))
    return flag


def _declared(field: Field[Any], attribute: str, otherwise: Any) -> Any:
    name = field.metadata.get("declared")
    return otherwise if name is None else getattr(SETTINGS[name], attribute)


def build(kind: type[T], given: dict[str, Any]) -> T:
    """Build a dataclass of the fields that a command line gives."""
    kinds = get_type_hints(kind)
    arguments = {}
    for field in fields(cast("type[Any]", kind)):
        if is_dataclass(kinds[field.name]):
            arguments[field.name] = build(kinds[field.name], given)
        elif field.name in given:
            arguments[field.name] = given[field.name]
    return kind(**arguments)


def add_flags(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Add the flags of a dataclass; a flag that is not given leaves no attribute."""
    kinds, docs = get_type_hints(kind), field_docs(kind)
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            add_flags(parser, kinds[field.name])
            continue
        flag = _flag(field)
        if flag is None:
            continue
        options = _options(kinds[field.name], repeat="repeat" in field.metadata)
        options |= {"default": argparse.SUPPRESS, "help": _help(field, docs)}
        is_required = field.default is field.default_factory is MISSING
        if "positional" in field.metadata:
            nargs = None if is_required else "?"
            parser.add_argument(field.name, nargs=nargs, **options)
        else:
            parser.add_argument(flag, dest=field.name, required=is_required, **options)


def format_flags(**values: object) -> list[str]:
    """Return the words of a command line that give values to flags.

    None and False are left out, as their flags' defaults. A list or tuple gives each
    value by a flag of its own.
    """
    words = []
    for name, value in values.items():
        flag = "--" + name.rstrip("_").replace("_", "-")
        if isinstance(value, list | tuple):
            words += [word for one in value for word in (flag, str(one))]
        elif value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def _options(kind: Any, *, repeat: bool) -> dict[str, Any]:
    """Return what ``add_argument`` must know of a field's type."""
    if get_origin(kind) in (types.UnionType, Union):  # X | None
        kind = get_args(kind)[0]
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        options = {"action": "append"} if repeat else {"nargs": "+"}
        return {**_options(get_args(kind)[0], repeat=False), **options}
    return {"type": kind}


def _help(field: Field[Any], docs: dict[str, str]) -> str:
    text, default = docs.get(field.name, ""), field.default
    if default in (None, MISSING) and (variable := _declared(field, "variable", "")):
        text = f"{text} [{variable}]"
    is_shown = all(default is not none for none in (MISSING, None, False, ()))
    if is_shown and not text.endswith("]"):
        text = f"{text} [{default}]"
    return text.replace("%", "%%")


def field_docs(kind: type) -> dict[str, str]:
    """Return what the fields mean: the docstrings that follow them, or as declared."""
    docs = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, doc in pairwise(body.body):
            match field, doc:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.replace("``", "").split())
    declared = {field.name: meaning(field) for field in fields(cast("Any", kind))}
    return docs | {name: text for name, text in declared.items() if text is not None}
