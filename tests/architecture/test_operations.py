"""Each line of the page for operators is a test, and says what is really printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "persia_torchrec/OPERATIONS.md"
LINES = re.findall(r"^\| (?!what |---)(.*) \|$", PAGE.read_text(), re.M)
ROWS = [[cell.strip() for cell in line.split("|")] for line in LINES]
# A text in the code may be split over lines.
SOURCE = re.sub(
    r'"\s*\n\s*f?"',
    "",
    "".join(path.read_text() for path in (ROOT / "persia_torchrec").rglob("*.py")),
)


def test_there_are_lines_to_compare():
    assert len(ROWS) > 15


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_line_has_a_test_and_prints_what_it_says(row):
    dies, happens, printed, to_do, test = row
    assert dies
    assert happens
    assert to_do
    path, _, name = test.strip("`").partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test
    assert [text for text in re.findall("`(.*?)`", printed) if text not in SOURCE] == []
