"""How long the job runs; ``results.md`` keeps the table of the last long run.

``make test`` runs it for seconds; ``make soak`` for an hour, and writes the table.
"""

from pathlib import Path

import pytest

RESULTS = Path(__file__).with_name("results.md")
COLUMNS = "| of | what | median | growth | z | tolerated |\n"
LEAST_OF_A_TABLE = 5.0


def pytest_addoption(parser):
    group = parser.getgroup("soak")
    group.addoption("--minutes", type=float, help="that the job runs")


@pytest.fixture(scope="session")
def minutes(request):
    return request.config.getoption("minutes", None) or 0.03
