"""Phrases that are never right: readers of this field do not search for them.

``CONTRIBUTING.md`` has the words that are meant instead.
"""

import functools
import re

import pytest

from tests.support.repository import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "components").rglob("*.md"),
]
SOURCES = [
    path
    for folder in ("persia_torchrec", "components", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
TESTS = [
    f"{path.relative_to(ROOT)}: {name}"
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
]
INSTEAD = {
    "anew": "again, restart",
    "whoever": "the caller, the client",
    "whomever": "the caller, the client",
    "nobody": "no client, no process",
    "somebody": "a client, another process",
    "onlooker": "reader",
    "of before": "previous, earlier",
    "of now": "current",
    "is no more": "has ended",
    "goes on": "continues",
    "go on": "continue",
    "going on": "in progress",
    "at one stroke": "in one step",
    "for want of": "without",
    "lets go of": "releases, drops",
    "let go of": "release, drop",
    "as ever": "as before",
    "in vain": "without success",
    "sees to it": "ensures",
    "see to it": "ensure",
    "of ones own": "custom, own",
    "change his": "change its own",
}


def is_table_of_words(line):
    """Return whether a line of CONTRIBUTING.md shows what not to write."""
    return line.startswith("|")


@functools.cache
def text_of(path):
    """Return the text of a page or a file in lower case; several tests ask for it."""
    text = path.read_text().lower()
    if path.name != "CONTRIBUTING.md":
        return text
    lines = text.splitlines()
    return "\n".join("" if is_table_of_words(line) else line for line in lines)


@pytest.mark.parametrize("phrase", INSTEAD)
def test_a_phrase_that_is_never_right_does_not_occur(phrase):
    words = r"\s+(?:# )?".join(phrase.split())  # also over the end of a line
    pattern = re.compile(rf"\b{words}\b")
    found = []
    for path in (*PAGES, *SOURCES):
        text = text_of(path)
        if phrase.split()[0] not in text:
            continue
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}")
    words = "_".join(phrase.split())
    found += [name for name in TESTS if re.search(rf"_{words}(_|$)", name)]
    assert not found, f"{phrase!r}: write {INSTEAD[phrase]}. Received: {found}"
