"""The table of the last run of ``make long``, which ``tests/results/long.md`` keeps."""

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.repository import ROOT

PAGE = ROOT / "tests/results/long.md"
COLUMNS = "| test | seconds | cores |\n"


def pytest_terminal_summary(terminalreporter):
    """Replace the rows of the tests that have passed."""
    rows = {}
    for report in terminalreporter.stats.get("passed", ()):
        name = report.nodeid.removeprefix("tests/")
        rows[name] = name, f"{report.duration:.0f}", os.cpu_count()
    replace_rows(PAGE, COLUMNS, rows)


def replace_rows(page: Path, columns: str, new: Mapping[str, tuple]) -> None:
    """Replace rows of a page's table, which is in the order of their first cell."""
    head, _, table = page.read_text().partition(columns)
    line, *old = table.splitlines(keepends=True)
    rows = {row.split("|")[1].strip(): row for row in old}
    rows |= {name: f"| {' | '.join(map(str, row))} |\n" for name, row in new.items()}
    text = "".join([head, columns, line, *map(rows.get, sorted(rows))])
    if text != page.read_text():
        page.write_text(text)
