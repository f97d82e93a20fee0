"""Measure this package on this machine: ``python -m benchmarks NAME``.

    python -m benchmarks store --figures sizes --sizes 1000000 60000000
    python -m benchmarks wire --redis /usr/bin/redis-server

``NAME --help`` lists what can be set. A value that is wrong ends the run with exit
status 1. ``--tiny`` only shows that it works. The libraries are the extra ``bench``.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

NAMES = (
    *("store", "wire", "engines", "training", "precision", "increments"),
    *("data", "dlrm", "servers", "trainer", "serving", "members", "quality"),
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES, help="which benchmark")
    name = parser.parse_args(argv[:1]).name
    # Only the one that is asked for: training needs torch, which starts slowly.
    benchmark = import_module(f"benchmarks.{name}").BENCHMARK
    return int(benchmark.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
