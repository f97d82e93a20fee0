"""The table of the last run of ``make long``, which ``tests/long.md`` keeps."""

import os

from tests.support.repository import ROOT

PAGE = ROOT / "tests/long.md"
COLUMNS = "| test | seconds | cores |\n"


def pytest_terminal_summary(terminalreporter):
    """Replace the rows of the tests that have passed."""
    head, columns, table = PAGE.read_text().partition(COLUMNS)
    line, *old = table.splitlines(keepends=True)
    rows = {row.split("|")[1].strip(): row for row in old}
    for report in terminalreporter.stats.get("passed", ()):
        name = report.nodeid.removeprefix("tests/")
        rows[name] = f"| {name} | {report.duration:.0f} | {os.cpu_count()} |\n"
    PAGE.write_text("".join([head, columns, line, *map(rows.get, sorted(rows))]))
