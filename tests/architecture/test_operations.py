"""Each line of the pages on operations and on trust is a test that is there.

What the former says is printed is really printed.
"""

import re

import pytest

from tests.support.repository import ROOT

PAGE = ROOT / "docs/operations.md"
TRUST = ROOT / "docs/security.md"
LINES = re.findall(r"^\| (?!event |---)(.*) \|$", PAGE.read_text(), re.M)
GUARDED = re.findall(r"^\| .* \| (`tests/.*`) \|$", TRUST.read_text(), re.M)
ROWS = [[cell.strip() for cell in line.split("|")] for line in LINES]
# A text in the code may be split over lines.
SOURCE = re.sub(
    r'"\s*\n\s*f?"',
    "",
    "".join(path.read_text() for path in (ROOT / "persia_torchrec").rglob("*.py")),
)


def assert_is_there(test):
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test


def test_there_are_lines_to_compare():
    assert len(ROWS) > 15
    assert len(GUARDED) >= 10


@pytest.mark.parametrize("tests", GUARDED)
def test_each_guard_has_a_test(tests):
    file = ""
    for test in re.findall("`(.*?)`", tests):  # the first one names the file
        file = test.partition("::")[0] or file
        assert_is_there(f"{file}::{test.partition('::')[2]}")


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_line_has_a_test_and_prints_what_it_says(row):
    event, happens, printed, to_do, test = row
    assert event
    assert happens
    assert to_do
    assert_is_there(test.strip("`"))
    assert [text for text in re.findall("`(.*?)`", printed) if text not in SOURCE] == []
