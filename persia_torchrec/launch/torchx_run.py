"""``torchx run``, which by default starts our components on this machine.

torchx's own takes Docker, and removes the logs at the end. An entry point puts this
command in its place: ``persia.NAME`` starts by ``local_cwd``, with logs in ``runs``.
What ``-s``, ``-cfg`` or a ``.torchxconfig`` says wins, and others start as before.
The terminal shows what matters (``console.py``); when a job of this machine has ended,
its report is drawn (``job/report.py``).
"""

import argparse
import logging
import shlex
import sys
import threading
from pathlib import Path

from torchx.cli.cmd_log import get_logs
from torchx.cli.cmd_run import CmdRun
from torchx.runner import Runner
from torchx.runner.config import apply, get_configs
from torchx.schedulers import get_default_scheduler_name

from persia_torchrec import env
from persia_torchrec.errors import PersiaError
from persia_torchrec.job import job_list, report
from persia_torchrec.job.progress import CURVES
from persia_torchrec.launch.console import Console

LOG_DIR = "runs"
_HERE = "local_cwd"
_OURS = "persia."
_SAID = "Job finished", "Launched app"  # what torchx says that matters


class Run(CmdRun):  # type: ignore[misc]  # untyped
    """The command, of torchx's command line; used once."""

    _console: Console | None = None  # None: everything is shown as it is

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Add torchx's own flags; the scheduler's default is known by the component."""
        super().add_arguments(subparser)
        subparser.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            help="Shows whole logs: details, and warnings of frameworks.",
        )
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
            if not args.verbose:
                self._console = Console(sys.stderr)
                for handler in logging.getLogger().handlers:
                    handler.addFilter(_matters)
        command = [sys.executable, "-m", "torchx.cli.main", *sys.argv[1:]]
        env.set_variable("PERSIA_LAUNCH_COMMAND", shlex.join(command))
        super().run(args)

    def _start_log_thread(self, runner: Runner, app_handle: str) -> threading.Thread:
        """Show the logs of a job in a thread."""
        console = self._console
        if console is None:
            thread: threading.Thread = super()._start_log_thread(runner, app_handle)
            return thread

        def show() -> None:
            get_logs(console, app_handle, None, should_tail=True, runner=runner)
            console.close()
            _draw_report(app_handle.rpartition("/")[2])

        thread = threading.Thread(target=show, daemon=True, name="console")
        thread.start()
        return thread


def _matters(record: logging.LogRecord) -> bool:
    """Return whether a line of torchx itself is more than a detail."""
    is_detail = record.name.startswith("torchx") and record.levelno <= logging.INFO
    return not is_detail or record.getMessage().startswith(_SAID)


def _draw_report(job_id: str) -> None:
    """Draw the report of a job that has ended, if it has curves, and say where."""
    found = [one for one in job_list.find_jobs() if one.job_id == job_id]
    if not found or not (Path(found[0].report) / CURVES).is_file():
        return
    try:
        said = report.write(Path(found[0].report), found[0])
    except (PersiaError, OSError) as exc:
        said = [str(exc)]
    lines = [*said, f"report: {found[0].report}"]
    sys.stderr.write("\n".join(lines) + "\n")


def _with_logs(given: str | None) -> str:
    """Add the folder of logs to a scheduler's options, if nothing names one."""
    options = given or ""
    configured: dict[str, object] = {}
    apply(_HERE, configured)
    if "log_dir" in options or configured.get("log_dir"):
        return options
    return ",".join(filter(None, [options, f"log_dir={LOG_DIR}"]))
