"""Measure this package on this machine: ``python -m benchmarks [NAME]``.

    python -m benchmarks                              a part of three, in two minutes
    python -m benchmarks store --figures sizes --sizes 1000000 60000000
    python -m benchmarks wire --redis /usr/bin/redis-server

``NAME --help`` lists what can be set. A value that is wrong ends the run with exit
status 1. ``--tiny`` only shows that it works. The libraries are the extra ``bench``.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Table

NAMES = (
    *("store", "wire", "engines", "training", "precision", "increments"),
    *("data", "dlrm", "servers", "trainer", "serving", "members", "quality", "cache"),
)
SUMMARY = {
    "store": "--figures rates --dims 16 --repeats 3",
    "wire": "--figures rates --dims 16 --repeats 3",
    "training": (
        "--figures training --dims 16 --rows 1000000 --table-rows 100000 --staleness 0"
        " --batch-size 1024 --batches 8 --steps 8 --repeats 3"
    ),
}
"""Of each of some benchmarks, what tells most in half a minute."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the command line names; return the exit status."""
    if not argv or argv == ["--tiny"]:
        return summarize(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES, help="which benchmark [a summary]")
    name = parser.parse_args(argv[:1]).name
    # Only the one that is asked for: training needs torch, which starts slowly.
    benchmark = import_module(f"benchmarks.{name}").BENCHMARK
    return int(benchmark.main(argv[1:]))


def summarize(argv: Sequence[str]) -> int:
    """Run each part of the summary by itself; print their tables, and the machine."""
    report: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        for name, words in SUMMARY.items():
            given = words.split()
            options = [*given[:2], *argv] if argv else given  # of tiny: its figures
            command = [sys.executable, "-m", "benchmarks", name, *options]
            command += ["--json", str(path)]
            status = subprocess.run(
                command, stdout=subprocess.DEVNULL, check=False
            ).returncode
            if status:
                return status
            report = json.loads(path.read_text())
            sys.stdout.write(f"# {name}\n\n")
            for told in report["results"][name]["tables"].values():
                told["rows"] = [list(row.values()) for row in told["rows"]]
                sys.stdout.write(f"{Table(**told).to_markdown()}\n")
            sys.stdout.flush()
    for name in ("machine", "versions"):
        sys.stdout.write(f"{name}: {json.dumps(report[name])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
