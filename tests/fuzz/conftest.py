"""How many inputs, and the table of the last long run, which ``results.md`` keeps.

``make test`` tries few of each; ``make fuzz`` writes the table.
"""

import os
import random
import tempfile
from pathlib import Path

import pytest

from tests.support.long_table import replace_rows

RESULTS = Path(__file__).with_name("results.md")
COLUMNS = "| what | inputs | accepted | a second | measured | seed | cores |\n"
FEW = 90
LEAST_OF_A_ROW = 10_000


def pytest_addoption(parser):
    group = parser.getgroup("fuzz")
    group.addoption("--inputs", type=int, help="of each format and port")
    group.addoption("--fuzz-seed", type=int, help="of the inputs; drawn for many")


@pytest.fixture(scope="session")
def num_inputs(request):
    return request.config.getoption("inputs", None) or FEW


@pytest.fixture(scope="session")
def fuzz_seed(request, num_inputs):
    seed = request.config.getoption("fuzz_seed", None)
    if seed is None:
        seed = random.SystemRandom().randrange(10**6) if num_inputs > FEW else 1
    return seed


@pytest.fixture
def in_memory():
    """Return a folder whose files are not written to a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def pytest_terminal_summary(terminalreporter):
    """Replace the rows of what has passed with many inputs."""
    rows = {}
    for report in terminalreporter.stats.get("passed", ()):
        row = dict(report.user_properties).get("row")
        if row is not None:
            rows[row[0]] = *row, os.cpu_count()
    replace_rows(RESULTS, COLUMNS, rows)
