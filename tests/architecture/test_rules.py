"""Rules of the conventions that no linter checks."""

import ast
import re
from pathlib import Path

import pytest
from torchx.specs.finder import get_component

ROOT = Path(__file__).parents[2]
MAX_LINES = 600
MAX_FUNCTION_LINES = 40
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("persia_torchrec", "components", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
COMPONENTS = [name for name in FILES if name.startswith("components/")]


def functions(name):
    """Yield every function of a file."""
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines(function):
    """Count the lines of a function, but for signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.body[-1].end_lineno - body[0].lineno + 1 if body else 0


def arguments_of(docstring):
    """Return the names under ``Args:``."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{docstring}\n", re.MULTILINE)
    return re.findall(r"^    (\w+): ", section[1], re.MULTILINE) if section else []


def test_there_is_something_to_check():
    assert len(FILES) > 50
    assert len(COMPONENTS) == 3


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= MAX_LINES
    assert [f.name for f in functions(name) if num_lines(f) > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("name", FILES)
def test_docstrings_name_only_existing_arguments(name):
    for function in functions(name):
        given = function.args
        names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        names += [argument for argument in (given.vararg, given.kwarg) if argument]
        documented = arguments_of(ast.get_docstring(function) or "")
        assert set(documented) <= {argument.arg for argument in names}, function.name


@pytest.mark.parametrize("name", COMPONENTS)
def test_torchx_understands_every_component(name):
    for function in functions(name):
        if not function.name.startswith("_"):
            component = get_component(f"{ROOT / name}:{function.name}")
            assert component.validation_errors == []
            assert component.description


def test_no_test_bets_on_a_duration_below_a_minute():
    """``DEADLINE_S / 2`` is one: what did not wait for the deadline takes less."""
    duration = r"(?:monotonic|perf_counter)\(\) - \w+"
    bets = re.compile(
        rf"{duration} <=? (?!DEADLINE_S(?: / 2)?$|AT_ONCE_S$)"
        r"|timeout=[1-9]\d?\b|mark\.timeout"
    )
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tests
        for line in path.read_text().splitlines()
        if bets.search(line.rstrip())
    ]
    assert found == []
