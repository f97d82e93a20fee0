"""``persia-torchrec``: start jobs, look at them, stop them; checkpoints and rows.

Each verb is a function of a module of this room, which is imported when the verb is
called: ``persia-torchrec ps`` starts without NumPy, zmq and torch. The list of verbs is
read from the text of the modules. Exit codes: 0, 1 where something is wrong, 2 where
the command line is.
"""

import ast
import difflib
import importlib
from pathlib import Path
from typing import Any

import click

from persia_torchrec.errors import PersiaError
from persia_torchrec.logger import printable
from persia_torchrec.version import __version__

_MODULES = {  # of each verb, in the order of use
    **dict.fromkeys(("ps", "status", "top"), "jobs"),
    **dict.fromkeys(("run", "serve", "examples"), "start"),
    "logs": "jobs",
    "report": "start",
    **dict.fromkeys(("kill", "stop"), "jobs"),
    "checkpoint": "checkpoints",
    **dict.fromkeys(("get", "hot"), "rows"),
    **dict.fromkeys(("scale", "rollback"), "restart"),
    "doctor": "doctor",
    "data": "rows",
}


class _Verbs(click.Group):
    """Imports the module of a verb when it is called."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return None
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        close = difflib.get_close_matches(words[0], _MODULES)
        if close and words[0] not in _MODULES:
            context.fail(f"No such command {words[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(context, words)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, _MODULES))
        rows = [
            (name, click.Command(name, help=doc).get_short_help_str(limit))
            for name, doc in _docs().items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PersiaError as exc:
            raise click.ClickException(printable(str(exc))) from exc
        except OSError as exc:
            if exc.filename is None:  # of no file, as a pipe that its reader closed
                raise
            raise click.ClickException(printable(str(exc))) from exc


def _docs() -> dict[str, str]:
    """Return the docstrings of all verbs, of whose modules none is imported."""
    docs: dict[str, str] = {}
    for module in dict.fromkeys(_MODULES.values()):
        text = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        for one in ast.parse(text).body:
            if isinstance(one, ast.FunctionDef) and _MODULES.get(one.name) == module:
                docs[one.name] = ast.get_docstring(one) or ""
    return {name: docs[name] for name in _MODULES}


@click.command(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="persia-torchrec")
def main() -> None:
    """Embedding parameter servers for TorchRec: jobs, checkpoints and rows."""
