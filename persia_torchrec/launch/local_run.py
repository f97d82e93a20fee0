"""Run a component on this machine, and show what matters: ``persia-torchrec run``.

    python -m persia_torchrec.launch.local_run persia.train_torchrec --script train.py

It is ``torchx run -s local_cwd`` with a terminal of its own (``job_output.py``), and
draws the report of the job at its end (``job/report.py``). The last line of a job that
has failed says why. A ``.torchxconfig`` counts, too.
"""

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchx.cli.cmd_log import get_logs
from torchx.runner import Runner, get_runner
from torchx.runner.config import apply, load_sections
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import AppState
from torchx.specs.finder import (
    ComponentNotFoundException,
    ComponentValidationException,
)

from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.job import job_list, report
from persia_torchrec.job.progress import CURVES
from persia_torchrec.job.status import failed
from persia_torchrec.launch.job_output import Console

_HERE = "local_cwd"
_REJECTED = (ConfigError, ComponentNotFoundException, ComponentValidationException)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a component until it ends; return the exit status."""
    prog = "python -m persia_torchrec.launch.local_run"
    about = "Run a component on this machine."
    parser = argparse.ArgumentParser(prog, description=about)
    parser.add_argument("-v", "--verbose", action="store_true", help="show whole logs")
    parser.add_argument("component", metavar="COMPONENT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    try:
        return _run(given.component, given.arguments, is_verbose=given.verbose)
    except _REJECTED as exc:
        raise SystemExit(f"persia-torchrec: {exc}") from exc
    except SignalException as exc:
        return 128 + int(exc.sigval)


def _run(component: str, arguments: list[str], *, is_verbose: bool) -> int:
    options: dict[str, Any] = {}
    apply(_HERE, options)
    with get_runner(component_defaults=load_sections(prefix="component")) as runner:
        # No workspace: this machine has the files.
        try:
            handle = runner.run_component(component, arguments, _HERE, cfg=options)
        except OSError as exc:  # of --run-dir, or --python
            raise ConfigError(
                "The job must be able to write its folder, and to run its Python. "
                f"Received: {exc}. Choose another --run-dir or --python."
            ) from exc
        job_id = handle.rpartition("/")[2]
        sys.stderr.write(f"job {job_id} starts\n")
        shown = threading.Thread(
            target=_show, args=(runner, handle, is_verbose), name="console", daemon=True
        )
        shown.start()
        status = runner.wait(handle, wait_interval=0.2)
        shown.join()
    found = [one for one in job_list.find_jobs() if one.job_id == job_id]
    for record in found:
        _draw_report(record)
        for problem in failed(job_id, record.state, record.reason, None):
            sys.stderr.write(f"{problem.text}. Run: {problem.remedy}\n")
    return 0 if status is not None and status.state == AppState.SUCCEEDED else 1


def _show(runner: Runner, handle: str, is_verbose: bool) -> None:
    """Show the logs of all roles until they end."""
    console = Console(sys.stderr)
    file = sys.stderr if is_verbose else console
    get_logs(file, handle, None, should_tail=True, runner=runner)
    console.close()


def _draw_report(record: job_list.JobRecord) -> None:
    """Draw the report of a job that has ended, if it has curves, and say where."""
    if not (Path(record.report) / CURVES).is_file():
        return
    try:
        said = report.write(Path(record.report), record)
    except (PersiaError, OSError) as exc:
        said = [str(exc)]
    lines = [*said, f"report: {record.report}"]
    sys.stderr.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
