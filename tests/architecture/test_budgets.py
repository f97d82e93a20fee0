"""The pages stay short and plain: words of each page, and patterns of unclear prose.

Results of runs, CHANGELOG and pages that ``docs/generate.py`` writes are not counted.
"""

import re
import subprocess

import pytest

from tests.support.pages import prose
from tests.support.repository import ROOT

GENERATED = {
    *("settings.md", "environment.md", "errors.md", "names.rst", "times.md"),
    "persia_names.md",
}
MAX_WORDS = 48_000
MAX_CELL_WORDS = 40
MAX_ROWS = 20
BUDGETS = {
    ".github/pull_request_template.md": 50,
    "CONTRIBUTING.md": 1650,
    "README.md": 700,
    "SECURITY.md": 100,
    "components/README.md": 150,
    "docs/README.md": 50,
    "docs/benchmarks.md": 950,
    "docs/calculator.md": 250,
    "docs/command.md": 950,
    "docs/concepts/README.md": 1050,
    "docs/data.md": 1250,
    "docs/decisions.md": 700,
    "docs/formats/checkpoint.md": 2300,
    "docs/formats/memory.md": 2350,
    "docs/formats/messages.md": 300,
    "docs/from-0.1.md": 500,
    "docs/glossary.md": 300,
    "docs/guarantees.md": 1400,
    "docs/index.rst": 200,
    "docs/install.md": 550,
    "docs/internals.md": 3500,
    "docs/launching.md": 2250,
    "docs/metrics.md": 2350,
    "docs/operations.md": 2500,
    "docs/persia.md": 3100,
    "docs/procedures.md": 1050,
    "docs/quality.md": 650,
    "docs/reference.md": 950,
    "docs/security.md": 1850,
    "docs/serving.md": 950,
    "docs/start.md": 400,
    "docs/torchrec.md": 2550,
    "docs/tutorials/kubernetes.md": 300,
    "docs/tutorials/persia.md": 250,
    "docs/tutorials/recovery.md": 350,
    "docs/tutorials/serving.md": 300,
    "docs/tutorials/slurm.md": 300,
    "docs/tutorials/torchrec.md": 450,
    "examples/adult_income/README.md": 550,
    "examples/dlrm/README.md": 350,
    "examples/metrics/README.md": 300,
    "examples/ple/README.md": 1050,
    "tests/chaos/README.md": 300,
    "tests/differential/README.md": 300,
    "tests/dropin/README.md": 550,
    "tests/fuzz/README.md": 200,
    "tests/resume/README.md": 250,
    "tests/soak/README.md": 150,
    "tests/soak/strangers.md": 150,
    "tests/soak/uneven_job.md": 400,
}


def is_written_by_hand(name):
    """Return whether a tracked page has words that an author has written."""
    folder, _, file = name.rpartition("/")
    is_generated = folder == "docs/reference" and file in GENERATED
    is_result = folder.endswith("/results") or file == "results.md"
    return not (is_generated or is_result or name == "CHANGELOG.md")


def pages():
    """Return the names of the tracked pages that are written by hand."""
    command = ["git", "ls-files", "--cached", "*.md", "*.rst"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in told.stdout.split() if (ROOT / name).exists()]
    return sorted(filter(is_written_by_hand, names))


PAGES = pages()


def faults_of_prose(text):
    """Yield long cells, long tables and unclear words of a page."""
    text = prose(text).partition("The last run:")[0]  # its table is a result
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text):
        rows = table.splitlines()
        if len(rows) - 2 > MAX_ROWS:
            yield f"a table of {len(rows) - 2} rows: {rows[0]}"
        for cell in (cell for row in rows for cell in row.split("|")):
            if len(cell.split()) > MAX_CELL_WORDS:
                yield f"a cell of {len(cell.split())} words: {cell.strip()[:60]}"
    heads = r"(?m)^(?:Of|For|With|In|By|On|To|Without|From) [^.,\n|]{0,80}:$"
    for head in re.findall(heads, text):
        yield f"a head without a verb: {head}"
    for found in re.findall(r"\b(?:no|not|nor)\b[^.|]{0,60}\bany more\b", text):
        yield f"no longer: {found}"


def test_each_tracked_page_has_a_budget_and_their_sum_is_bounded():
    assert sorted(BUDGETS) == PAGES
    assert sum(BUDGETS.values()) <= MAX_WORDS


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_within_its_budget(name):
    assert len((ROOT / name).read_text().split()) <= BUDGETS[name]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_short_cells_short_tables_and_plain_sentences(name):
    assert list(faults_of_prose((ROOT / name).read_text())) == []


def test_a_planted_fault_is_found():
    long_cell = " ".join(["word"] * 41)
    rows = "| a |\n" * 23
    for text, num_faults in (
        ("| a |\n|---|\n| short |\n\nTwo commands follow:\n", 0),
        (f"| {long_cell} |\n", 1),
        (rows, 1),
        ("Of a wheel:\n", 1),
        ("It does not run any more.\n", 1),
        (f"```\n{rows}```\n", 0),
    ):
        assert len(list(faults_of_prose(text))) == num_faults, text
