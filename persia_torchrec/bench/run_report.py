"""What a run of benchmarks leaves behind: text on stdout, and a file of figures."""

import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from persia_torchrec import env
from persia_torchrec.bench.machine import (
    OtherWork,
    describe_machine,
    describe_versions,
)
from persia_torchrec.bench.report import Table
from persia_torchrec.errors import PersiaError

logger = logging.getLogger("persia_torchrec.bench")


def exit_status_of(run: Callable[[], None]) -> int:
    """Run a benchmark; return the process's exit status, after an error that is told.

    Args:
        run: raises a PersiaError or an OSError if it fails.
    """
    logging.basicConfig(
        level=env.log_level(), format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        run()
    except (PersiaError, OSError) as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1
    return 0


class RunReport:
    """The report of one run, which begins when it is made.

    Args:
        argv: the command line, behind ``python -m persia_torchrec.bench``.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._command = shlex.join(["python", "-m", "persia_torchrec.bench", *argv])
        self._machine, self._versions = describe_machine(), describe_versions()
        self._results: dict[str, object] = {}
        self._other_work = OtherWork()

    def add(
        self,
        name: str,
        tables: Sequence[Table],
        cores: str,
        settings: Mapping[str, object],
    ) -> None:
        """Print the tables of one benchmark, and keep them for the file.

        Args:
            name: of the benchmark.
            tables: its answers.
            cores: which were used, in words.
            settings: what was measured; a path is written as text.
        """
        sys.stdout.write(f"# {name}\n\n")
        sys.stdout.writelines(table.to_markdown() + "\n" for table in tables)
        sys.stdout.write(f"Cores: {cores}.\n\n")
        self._results[name] = {
            "cores": cores,
            "settings": {
                k: str(v) if isinstance(v, Path) else v for k, v in settings.items()
            },
            "tables": {table.name: table.to_json() for table in tables},
        }

    def finish(self, json_file: Path | None) -> None:
        """Print machine, versions and command; write the file, if one is wanted."""
        others = self._other_work.cores_used()
        for title, facts in (("Machine", self._machine), ("Versions", self._versions)):
            items = ", ".join(f"{name} {value}" for name, value in facts.items())
            sys.stdout.write(f"{title}: {items}.\n")
        if others is not None:
            sys.stdout.write(f"Other processes used {others:.2f} cores meanwhile.\n")
        sys.stdout.write(f"Command: `{self._command}`\n")
        if json_file is not None:
            report = {
                "command": self._command,
                "machine": self._machine,
                "cores_used_by_others": others,
                "versions": self._versions,
                "results": self._results,
            }
            json_file.write_text(json.dumps(report, indent=2) + "\n")
