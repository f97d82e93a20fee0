"""A plugin of pytest: at the end one table, a line for each file with tests."""

from collections import Counter

import pytest

OUTCOMES = ("passed", "failed", "skipped")


def pytest_terminal_summary(terminalreporter) -> None:
    """Count the tests of each file by their outcome; say why tests were skipped."""
    files: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for outcome in (*OUTCOMES, "error"):
        for report in terminalreporter.stats.get(outcome, []):
            if not isinstance(report, pytest.TestReport):
                continue
            column = "failed" if outcome == "error" else outcome
            files.setdefault(report.location[0], Counter())[column] += 1
            if outcome == "skipped":
                reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    lines = [("file", *OUTCOMES), ("---",) * 4]
    lines += [(name, *(n[o] for o in OUTCOMES)) for name, n in sorted(files.items())]
    terminalreporter.section("by file")
    for line in lines:
        terminalreporter.write_line(f"| {' | '.join(map(str, line))} |")
    for reason, num in reasons.most_common():
        terminalreporter.write_line(f"{num} skipped: {reason}")
