"""The seed of the kills, and the table of the last runs, which ``results.md`` keeps.

A test adds to its row by ``record_property``: ``kills``, and what it has ``measured``.
"""

import os
import random
from pathlib import Path

import pytest

from persia_torchrec import env
from tests.support.long_table import replace_rows

RESULTS = Path(__file__).with_name("results.md")
COLUMNS = "| test | kills | seconds | measured | seed | transport | cores |\n"


def pytest_addoption(parser):
    group = parser.getgroup("chaos")
    group.addoption("--seed", type=int, help="of the kills; drawn by default")
    group.addoption("--kills", type=int, help="of each job; a test has its own number")
    group.addoption("--seeds", type=int, default=5, help="trainings that are compared")


def pytest_configure(config):
    if config.getoption("seed") is None:
        config.option.seed = random.SystemRandom().randrange(10**6)


def pytest_report_header(config):
    return f"the kills follow from --seed {config.getoption('seed')}"


@pytest.fixture
def draw(request):
    """Return the random numbers that say who is killed, and when."""
    return random.Random(request.config.getoption("seed"))


@pytest.fixture
def kills(request, record_property):
    """Return a function of a test's own number of kills, which ``--kills`` replaces."""

    def decide(num):
        num = request.config.getoption("kills") or num
        record_property("kills", num)
        return num

    return decide


def pytest_terminal_summary(terminalreporter, config):
    """Replace the rows of the tests that have passed."""
    rows = {}
    for report in terminalreporter.stats.get("passed", ()):
        told = dict(report.user_properties)
        name = report.nodeid.removeprefix("tests/chaos/")
        if name == report.nodeid:  # another test of the same run
            continue
        rows[name] = (
            *(name, told.get("kills", "-"), f"{report.duration:.0f}"),
            *(told.get("measured", "-"), config.getoption("seed")),
            *(env.transport(None), os.cpu_count()),
        )
    replace_rows(RESULTS, COLUMNS, rows)
