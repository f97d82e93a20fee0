"""Each line of the page on failures has a test, and what it says is printed is printed.

``failures.txt`` has, below an event of the page, the tests of what happens then.
Each guard on the page on trust has a test, too: ``guards.txt``.
"""

import re
from pathlib import Path

import pytest

from tests.support.repository import ROOT

HERE = Path(__file__).parent
# A text in the code may be split over lines.
SOURCE = re.sub(
    r'"\s*\n\s*f?"',
    "",
    "".join(path.read_text() for path in (ROOT / "persia_torchrec").rglob("*.py")),
)


def rows_of(page):
    """Return the rows of the tables of a page, by the heads of their columns."""
    rows = []
    text = (ROOT / "docs" / page).read_text()
    for head, body in re.findall(r"^(\|.*)\n\|[-|]+\n((?:\|.*\n)+)", text, re.M):
        names = [cell.strip() for cell in head.strip("|").split("|")]
        for line in body.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows.append(dict(zip(names, cells, strict=True)))
    return rows


def evidence(file):
    """Return the tests of a list by the line above them."""
    text = (HERE / file).read_text()
    blocks = re.findall(r"^(\S.*)\n((?: .*\n)*)", text, re.M)
    return {title: tests.split() for title, tests in blocks}


FAILURES = [row for row in rows_of("operations.md") if "printed" in row]
EVENTS = [row.get("event") or row["printed"] for row in FAILURES]
GUARDED = [row["attack"] for row in rows_of("security.md") if "attack" in row]
TESTS = {file: evidence(file) for file in ("failures.txt", "guards.txt")}


def test_there_are_lines_to_compare():
    assert len(EVENTS) > 60
    assert len(GUARDED) > 20


def test_each_event_is_on_the_page_once():
    assert len({*EVENTS}) == len(EVENTS)


def test_each_failure_and_each_guard_has_tests():
    without = {row["printed"] for row in FAILURES if "cause" in row}
    tested = [event for event in EVENTS if event in TESTS["failures.txt"]]
    assert [event for event in EVENTS if event not in {*tested, *without}] == []
    assert [*TESTS["failures.txt"]] == tested
    assert [*TESTS["guards.txt"]] == GUARDED


@pytest.mark.parametrize(
    ("file", "title"), [(file, title) for file in TESTS for title in TESTS[file]]
)
def test_the_tests_of_a_line_are_there(file, title):
    assert TESTS[file][title]
    for test in TESTS[file][title]:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test


@pytest.mark.parametrize("row", FAILURES, ids=EVENTS)
def test_what_a_line_says_is_printed_is_printed(row):
    assert all(cell for name, cell in row.items() if name != "printed")
    texts = re.findall("`(.*?)`", row["printed"])
    assert [text for text in texts if text not in SOURCE] == []


def test_what_strangers_cost_is_what_was_measured_last():
    rows = rows_of("security.md")
    [row] = [r for r in rows if r.get("", "").startswith("200 unproven")]
    small, large = map(int, re.findall(r"(\d+) %", row["measured"]))
    measured = (ROOT / "tests/soak/strangers.md").read_text()
    ratio_of = dict(re.findall(r"^\| (.*?) \|.* ([0-9.]+) \|$", measured, re.M))
    *others, token = map(float, ratio_of.values())
    assert [*ratio_of][-1] == "another token"
    assert max(others) <= 1 + small / 100
    assert abs(token - 1 - large / 100) < 0.02
