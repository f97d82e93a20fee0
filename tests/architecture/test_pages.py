"""Headings, links and names of the pages: what they lead to and name is there.

Nothing is imported or started: names are looked up in the source.
"""

import builtins
import functools
import re
from pathlib import Path

import pytest

from docs import conf
from persia_torchrec.command import _MODULES as VERBS
from tests.support.pages import LINKING, PAGES, codes, prose
from tests.support.repository import ROOT

PACKAGE = ROOT / "persia_torchrec"
# Of Python and torch, on pages that show what becomes of them.
OF_OTHERS = {
    *("attach", "clone", "concat", "construct_module_sharding_plan", "device_count"),
    *("eval", "no_grad", "requires_grad_", "row_wise", "SparseAdam", "sqrt", "Stream"),
    *("exit", "timedelta"),
}
SOME_PAGE = ROOT / "README.md"
SITE = {
    page
    for pattern in conf.include_patterns
    for page in ROOT.glob(pattern.replace("**", "**/*"))
}
# PERSIA's own names are on these pages: test_migration.
OF_PERSIA = "docs/persia.md", "docs/reference/persia_names.md"


def faults_of_headings(text):
    """Yield headings that are two levels or more below the previous one."""
    level = 0
    for number, line in enumerate(prose(text).splitlines(), 1):
        if heading := re.match(r"(#+) ", line):
            if len(heading[1]) > level + 1:
                yield f"line {number}: {line}, below a heading of level {level}"
            level = len(heading[1])


def anchors(page):
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def faults_of_links(text, folder):
    """Yield the targets of links that are not there, or no page of the site."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = ROOT / folder / path if path else SOME_PAGE
        own = page.read_text() if path and anchor and page.is_file() else text
        is_there = page.is_dir() or page.suffix != ".md" or page.resolve() in SITE
        if not (page.exists() and is_there) or (anchor and anchor not in anchors(own)):
            yield target


@functools.cache
def defined(path):
    """Return the names that a file of Python defines or imports, and its fields."""
    text = path.read_text()
    names = set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    names |= set(re.findall(r"^ *(\w+)(?:: [^\n]*)? = ", text, re.MULTILINE))
    names |= set(re.findall(r"^ +(?:\w+ as )?(\w+),$", text, re.MULTILINE))
    for imported in re.findall(r"^from \S+ import (.*)$", text, re.MULTILINE):
        names |= set(re.findall(r"\w+", imported))
    return names


@functools.cache
def known():
    """Return all names that the package and its examples define."""
    folders = PACKAGE, ROOT / "examples", ROOT / "docs"
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return set().union(*map(defined, files), OF_OTHERS, dir(builtins))


def exists(name):
    """Return whether a dotted name is a module of the repository, or what one has."""
    # As setup.py maps it.
    name = name.replace("persia_torchrec.components", "components")
    path, parts = ROOT, name.split(".")
    while parts:
        below = path / parts[0]
        if below.is_dir():
            path = below
        elif below.with_suffix(".py").is_file():
            return len(parts) == 1 or parts[1] in defined(below.with_suffix(".py"))
        else:
            files = (path / "__init__.py", path / "__init__.pyi")
            return any(parts[0] in defined(file) for file in files if file.is_file())
        parts = parts[1:]
    return True


def is_program(name):
    """Return whether ``python -m`` runs a module."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@functools.cache
def targets():
    """Return the targets of the Makefile."""
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def is_component(name):
    """Return whether torchx finds a component as ``persia.NAME``."""
    return name in defined(ROOT / "components/jobs.py")


NAMES = (  # how each kind is written in code, and whether one exists
    (r"\b(persia_torchrec(?:\.[A-Za-z_]\w*)+)", exists),
    (r"\bpython3? -m ((?:persia_torchrec|benchmarks)[\w.]*)", is_program),
    (r"\bpersia-torchrec ([a-z]+)\b", VERBS.__contains__),
    (r"(?:^|\s)make ([a-z-]+)\b", lambda name: name in targets()),
)
OWN_NAMES = (
    (r"(?<![\w./-])persia\.([a-z_]+)\b", is_component),
    (r"(?<!\w)([A-Za-z_]\w*)\(", lambda name: name in known()),
)


def faults_of_names(text, *, is_of_persia=False):
    """Yield modules, functions and commands that do not exist."""
    in_bash = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for code in (*codes(text), *in_bash):
        for pattern, is_there in NAMES:
            yield from (n for n in re.findall(pattern, code) if not is_there(n))
    for code in () if is_of_persia else codes(text):
        for pattern, is_there in OWN_NAMES:
            yield from (n for n in re.findall(pattern, code) if not is_there(n))


@pytest.mark.parametrize("name", LINKING)
def test_headings_are_one_level_below_the_previous_one_at_most(name):
    assert list(faults_of_headings(LINKING[name])) == []


@pytest.mark.parametrize("name", LINKING)
def test_every_link_leads_somewhere(name):
    assert list(faults_of_links(LINKING[name], Path(name).parent)) == []


@pytest.mark.parametrize("name", [*PAGES, "components/README.md", "CONTRIBUTING.md"])
def test_modules_functions_and_commands_that_a_page_names_exist(name):
    found = faults_of_names(LINKING[name], is_of_persia=name in OF_PERSIA)
    assert sorted(found) == []


def test_a_planted_fault_is_found():
    for text, faults in (
        ("# Title\n\n```bash\n# no heading\n```\n\n## A\n\n### B\n\n# C\n", []),
        ("# Title\n\n### Deep\n", ["line 3: ### Deep, below a heading of level 1"]),
    ):
        assert list(faults_of_headings(text)) == faults
    text = "# A title\n[a](#a-title) [b](#none) [c](data.md#columns) [d](data.md#none)"
    text += " [e](none.md) [f](../tests/rpc/none.md) [g](https://none)"
    text += ' <img src="images/none.svg">'
    faults = ["#none", "data.md#none", "none.md", "../tests/rpc/none.md"]
    faults += ["images/none.svg"]
    assert list(faults_of_links(text, "docs")) == faults
    right = (
        "`persia_torchrec.export_for_serving(model)` `persia_torchrec.data` "
        "`python -m persia_torchrec.serving --port 1` `persia-torchrec serve runs/7` "
        "`torchx run persia.train` `make test` `run.epochs(4)` `persia_torchrec.errors`"
        "\n```bash\npersia-torchrec data a\n```\n"
    )
    assert list(faults_of_names(right)) == []
    wrong = (
        "`persia.export_for_serving` `persia_torchrec.nowhere.x` `run.epoch_loop(4)` "
        "`python -m benchmarks.none` `make nothing` `persia_torchrec.data.Nothing`"
        "\n```bash\npersia-torchrec dataset a\n```\n"
    )
    assert sorted(faults_of_names(wrong)) == [
        *("benchmarks.none", "dataset", "epoch_loop", "export_for_serving", "nothing"),
        *("persia_torchrec.data.Nothing", "persia_torchrec.nowhere.x"),
    ]


@pytest.fixture(scope="module")
def python_files():
    return [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py")]


@pytest.mark.parametrize("name", PAGES)
def test_the_files_that_a_page_names_exist(name, python_files):
    for file in re.findall(r"`([\w/]+\.py)`", PAGES[name]):
        assert any(known.endswith(f"/{file}") for known in python_files), file
    folders = "persia_torchrec|tests|examples|components|docs"
    for file in re.findall(rf"`((?:{folders})/[\w/]+\.\w+)`", PAGES[name]):
        assert (ROOT / file).exists(), file
