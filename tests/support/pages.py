"""The pages of the repository as text, and what they have in blocks and in prose."""

import re
import shlex

from tests.support.repository import ROOT

DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
}
LINKING = PAGES | {
    str(page.relative_to(ROOT)): page.read_text()
    for pattern in ("*.md", "components/*.md", "examples/*/*.md", "tests/**/*.md")
    for page in sorted(ROOT.glob(pattern))
}
"""Those of the site, and others whose links are checked, too."""


def blocks(language, *names):
    """Return the blocks of some pages, or of all, in order."""
    return [
        block
        for name in names or PAGES
        for block in re.findall(rf"```{language}\n(.*?)```", PAGES[name], re.DOTALL)
    ]


def commands(block):
    """Yield the commands of a block; one with an open quote goes over lines."""
    command = ""
    for line in block.splitlines():
        command += line
        try:
            shlex.split(command)
        except ValueError:
            command += "\n"
            continue
        yield command
        command = ""
    assert not command


def prose(text):
    """Return the text of a page without its blocks, with as many lines."""
    return re.sub(
        r"^( *)```.*?^\1```",
        lambda block: "\n" * block[0].count("\n"),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )


def codes(text):
    """Return what a page has in backticks, beside blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))
