"""``torchx run``, which by default starts our components on this machine.

torchx's own takes Docker, and removes the logs at the end. An entry point puts this
command in its place: ``persia.NAME`` starts by ``local_cwd``, with logs in ``runs``.
What ``-s``, ``-cfg`` or a ``.torchxconfig`` says wins, and others start as before.
"""

import argparse
import shlex
import sys

from torchx.cli.cmd_run import CmdRun
from torchx.runner.config import apply, get_configs
from torchx.schedulers import get_default_scheduler_name

from persia_torchrec import env

LOG_DIR = "runs"
_HERE = "local_cwd"
_OURS = "persia."


class Run(CmdRun):  # type: ignore[misc]  # untyped
    """The command, of torchx's command line; used once."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Add torchx's own flags; the scheduler's default is known by the component."""
        super().add_arguments(subparser)
        if "scheduler" not in get_configs(prefix="cli", name="run"):
            subparser.set_defaults(scheduler=None)

    def run(self, args: argparse.Namespace) -> None:
        """Start a job, and wait for one of this machine."""
        words = args.component_name_and_args
        component = words[0] if words else ""
        if component in ("", "--"):
            component = get_configs(prefix="cli", name="run").get("component", "")
        if args.scheduler is None:
            is_ours = component.startswith(_OURS)
            args.scheduler = _HERE if is_ours else get_default_scheduler_name()
        if args.scheduler == _HERE and component.startswith(_OURS):
            args.scheduler_args = _with_logs(args.scheduler_args)
        command = [sys.executable, "-m", "torchx.cli.main", *sys.argv[1:]]
        env.set_variable("PERSIA_LAUNCH_COMMAND", shlex.join(command))
        super().run(args)


def _with_logs(given: str | None) -> str:
    """Add the folder of logs to a scheduler's options, if nothing names one."""
    options = given or ""
    configured: dict[str, object] = {}
    apply(_HERE, configured)
    if "log_dir" in options or configured.get("log_dir"):
        return options
    return ",".join(filter(None, [options, f"log_dir={LOG_DIR}"]))
