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
the value comes without a flag. Of components of torchx the fields are arguments, by
:func:`offers`.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
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

T = TypeVar("T")
Component = TypeVar("Component", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportFlags:
    """The flag of processes to which users add settings of their own."""

    imports: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"flag": "--import", "repeat": True}
    )
    """Module to import at the start, which registers optimizers, initializers or
    admissions of its own; may be given several times."""


def parse_flags(kind: type[T], argv: Sequence[str] | None = None, *, prog: str) -> T:
    """Parse a command line, ``sys.argv`` by default, into a dataclass."""
    return build(kind, given_flags(kind, argv, prog=prog))


def given_flags(
    kind: type[T], argv: Sequence[str] | None = None, *, prog: str
) -> dict[str, Any]:
    """Parse a command line into the fields that it gives, without defaults."""
    about = (kind.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog, description=about)
    add_flags(parser, kind)
    given = vars(parser.parse_args(argv))
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
    }


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
    kinds, docs = get_type_hints(kind), _field_docs(kind)
    for field in fields(kind):
        if is_dataclass(kinds[field.name]):
            add_flags(parser, kinds[field.name])
            continue
        flag = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
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


def offers(kind: type, *names: str) -> Callable[[Component], Component]:
    """Have the ``**shared`` of a torchx component stand for fields of a dataclass.

    torchx reads a component's signature and docstring. Both get the fields, with types,
    defaults and docs; a field whose default is None must be given.
    """
    kinds, docs = get_type_hints(kind), _field_docs(kind)
    default_of = {field.name: field.default for field in fields(kind)}

    def parameter(name: str) -> inspect.Parameter:
        annotation, default = kinds[name], default_of[name]
        if default is None:  # torchx does not know ``str | None``
            annotation, default = get_args(annotation)[0], inspect.Parameter.empty
        elif default is MISSING:
            default = {}
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def extend(component: Component) -> Component:
        signature = inspect.signature(component)
        own = list(signature.parameters.values())[:-1]
        shared = [parameter(name) for name in names]
        described: Any = component  # to mypy, not every callable has a signature
        described.__signature__ = signature.replace(parameters=[*own, *shared])
        lines = [f"    {name}: {docs[name]}" for name in names]
        described.__doc__ = "\n".join([inspect.getdoc(component) or "", *lines])
        return component

    return extend


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
    text = docs.get(field.name, "")
    default = field.default
    is_shown = all(default is not none for none in (MISSING, None, False, ()))
    if is_shown and not text.endswith("]"):
        text = f"{text} [{default}]"
    return text.replace("%", "%%")


def _field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings that follow the fields in the source."""
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
    return docs
