"""What the verbs print: tables for people, JSON for programs.

rich knows ``NO_COLOR``, ``TERM=dumb`` and pipes; in a pipe a table has no colours, and
one line a row, whatever the terminal's width.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from persia_torchrec.logger import printable

Line = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

as_json: Callable[[F], F] = click.option(
    "--json", "is_json", is_flag=True, help="Print JSON, for programs."
)
_UNITS = ("", "k", "M", "G", "T")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_WHOLE = "pid", "port", "index", "id", "step"  # never 18.4k: it is typed again
_GOOD = "running", "finished", "ok", "yes"
_BAD = "failed", "lost", "killed", "stalled", "no", "bad"


def console() -> Console:
    """Return where to print; it is as wide as it takes where no person looks."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else 500
    # Paths, reasons and names are those of others: no tag in them is one of rich.
    return Console(width=width, soft_wrap=not is_terminal, markup=False, emoji=False)


def show(lines: Sequence[Line], columns: Iterable[str] = (), title: str = "") -> None:
    """Print a table of lines; a column that no line has is left out."""
    console().print(table(lines, columns, title))


def table(
    lines: Sequence[Line],
    columns: Iterable[str] = (),
    title: str = "",
    *,
    is_narrow: bool = False,
) -> Table:
    """Return a table of lines, with ``-`` for what a line lacks.

    In a narrow one a line of the head has one word.
    """
    names = list(columns) or list(dict.fromkeys(name for one in lines for name in one))
    names = [name for name in names if any(one.get(name) is not None for one in lines)]
    made = Table(
        title=printable(title) or None, title_justify="left", box=None, pad_edge=False
    )
    if is_narrow:
        made.padding = 0, 1, 0, 0
    for name in names:
        values = [one.get(name) for one in lines]
        is_number = any(isinstance(value, int | float) for value in values)
        head = _head(name)
        if is_narrow:
            head = head.replace(" ", "\n").replace("/s", "\n/s")
        fold: Any = {"overflow": "fold"} if is_narrow else {}  # not cut, as a host
        made.add_column(head, justify="right" if is_number else "left", **fold)
    for line in lines:
        made.add_row(*(_cell(name, line.get(name)) for name in names))
    return made


def show_pairs(pairs: Line) -> None:
    """Print names and values, a line each; None is left out."""
    made = Table(box=None, show_header=False, pad_edge=False)
    for name, value in pairs.items():
        if value not in (None, ""):
            made.add_row(_head(name), _cell(name, value))
    console().print(made)


def echo(text: object, *, err: bool = False) -> None:
    """Print lines in which names and paths of others are printable."""
    click.echo(printable(str(text)), err=err)


def show_json(value: object) -> None:
    """Print a value as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value)))


def _head(name: str) -> str:
    """Return the head of a column: the unit stands in its cells."""
    return name.replace("_a_second", "/s").removesuffix("_s").replace("_", " ")


def _cell(name: str, value: Any) -> Text:
    if value is None:
        return Text("-", style="dim")
    if name.endswith("_bytes") or name in ("memory", "bytes", "size"):
        return Text(size(value))
    if name.endswith("_s") or name in ("since", "age", "uptime"):
        return Text(duration(value))
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(value, int) and name in _WHOLE:
        return Text(str(value))
    if isinstance(value, int | float):
        return Text(short(value) if abs(value) >= 10_000 else f"{value:.4g}")
    style = "green" if value in _GOOD else "red" if value in _BAD else ""
    return Text(printable(str(value)), style=style)


def short(number: float) -> str:
    """Return a number with a unit: ``12.3M``."""
    return _scaled(number, 1000.0, _UNITS)


def size(num_bytes: float) -> str:
    """Return a number of bytes with a unit: ``11.7MiB``."""
    return _scaled(num_bytes, 1024.0, _BYTES)


def _scaled(number: float, base: float, units: Sequence[str]) -> str:
    first, *_, last = units
    for unit in units[:-1]:
        if abs(number) < base:
            return f"{number:.4g}{unit}" if unit == first else f"{number:.3g}{unit}"
        number /= base
    return f"{number:.3g}{last}"


def duration(seconds: float) -> str:
    """Return a duration: ``4.0s``, ``12m``, ``3h05m``, ``2d04h``."""
    if seconds < 120:
        return f"{seconds:.3g}s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    days, of_day = divmod(hours, 24)
    return f"{days}d{of_day:02}h" if days else f"{hours}h{minutes:02}m"
