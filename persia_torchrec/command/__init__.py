"""``persia-torchrec``: start jobs, look at them, stop them; checkpoints and rows.

Each verb is a function of a module of this room, which is imported when the verb is
called: ``persia-torchrec ps`` starts without torch. Exit codes: 0, 1 where something is
wrong, 2 where the command line is.
"""

import importlib
from typing import Any

import click

from persia_torchrec.errors import PersiaError
from persia_torchrec.logger import printable
from persia_torchrec.version import __version__

_MODULES = {  # of each verb, in the order of use
    **dict.fromkeys(("ps", "status", "top"), "jobs"),
    **dict.fromkeys(("run", "serve", "examples"), "start"),
    **dict.fromkeys(("logs", "report", "kill", "stop"), "jobs"),
    "checkpoint": "checkpoints",
    **dict.fromkeys(("get", "hot"), "rows"),
    **dict.fromkeys(("scale", "rollback"), "jobs"),
    "doctor": "doctor",
    "data": "rows",
}


class _Verbs(click.Group):
    """Imports the module of a verb when it is called or described."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return None
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PersiaError as exc:
            raise click.ClickException(printable(str(exc))) from exc


@click.command(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="persia-torchrec")
def main() -> None:
    """Embedding parameter servers for TorchRec: jobs, checkpoints and rows."""
