"""Rules of the conventions that no linter checks."""

import ast
import functools
import graphlib
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import grimp
import pytest
from torchx.specs.finder import get_component

from tests.support.repository import ROOT

MAX_LINES = 1000
MAX_FUNCTION_LINES = 60
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("persia_torchrec", "components", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
COMPONENTS = "components/jobs.py"


@functools.cache
def parsed(path):
    """Return the nodes of a file: they are asked for by several tests."""
    return [*ast.walk(ast.parse((ROOT / path).read_text()))]


def functions(name):
    """Yield every function of a file."""
    for node in parsed(name):
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
    assert COMPONENTS in FILES


def faults_of(rule):
    """Return what a rule finds wrong, by the files where it finds something."""
    found = {name: [*rule(name)] for name in FILES}
    return {name: faults for name, faults in found.items() if faults}


def test_files_and_functions_are_short():
    def rule(name):
        if len((ROOT / name).read_text().splitlines()) > MAX_LINES:
            yield "the file"
        for function in functions(name):
            if num_lines(function) > MAX_FUNCTION_LINES:
                yield function.name

    assert faults_of(rule) == {}


def unpacked(call):
    """Yield what a call unpacks: of its arguments and of its keywords."""
    yield from (arg.value for arg in call.args if isinstance(arg, ast.Starred))
    yield from (one.value for one in call.keywords if one.arg is None)


def has_known_keys(node):
    """Return whether a node is a dictionary that could be keywords."""
    return isinstance(node, ast.Dict) and all(
        isinstance(key, ast.Constant) for key in node.keys
    )


def packed_for_one_call(function):
    """Return the names of a function that are made only to be unpacked in one call."""
    nodes = [*ast.walk(function)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = Counter(name.id for name in names if isinstance(name.ctx, ast.Store))
    used = Counter(name.id for name in names if isinstance(name.ctx, ast.Load))
    literals = {
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Tuple | ast.List | ast.Dict)
    }
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    given = {
        one.id for call in calls for one in unpacked(call) if isinstance(one, ast.Name)
    }
    return {n for n in given & literals if made[n] == used[n] == 1}


def test_a_call_has_its_arguments_and_no_tuple_of_them():
    def rule(name):
        for call in parsed(name):
            for one in unpacked(call) if isinstance(call, ast.Call) else ():
                if isinstance(one, ast.Tuple | ast.List) or has_known_keys(one):
                    yield ast.unparse(one)
        for function in functions(name):
            yield from packed_for_one_call(function)

    assert faults_of(rule) == {}


def test_docstrings_name_only_existing_arguments():
    def rule(name):
        for function in functions(name):
            given = function.args
            names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            names += [argument for argument in (given.vararg, given.kwarg) if argument]
            documented = arguments_of(ast.get_docstring(function) or "")
            if not set(documented) <= {argument.arg for argument in names}:
                yield function.name

    assert faults_of(rule) == {}


def test_torchx_understands_every_component():
    for function in functions(COMPONENTS):
        if not function.name.startswith("_"):
            component = get_component(f"persia.{function.name}")
            assert component.validation_errors == []
            assert component.description


def test_torchx_lists_components_and_no_other_function_of_their_file():
    module = importlib.import_module("persia_torchrec.components.jobs")
    listed = {name for name, _ in inspect.getmembers(module, inspect.isfunction)}
    assert listed == {function.name for function in functions(COMPONENTS)}


def test_nothing_in_the_package_imports_a_component():
    imports = [
        ast.unparse(node)
        for name in FILES
        if name.startswith("persia_torchrec/")
        for node in parsed(name)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert [one for one in imports if "components" in one] == []


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


UNPICKLE = {
    *("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "send_object_list", "recv_object_list"),
    *("allow_pickle", "unsafe_load", "full_load", "eval", "exec"),
}
# torch has written a pickle, of which an unpickler of its own makes but a list of
# tensors.
UNPICKLES = "persia_torchrec/training/dense_reader.py"
# They start processes of this machine with what this process gives them.
START_PROCESSES = {
    "benchmarks/limits.py",
    "benchmarks/servers.py",
    "persia_torchrec/job/children.py",
    "persia_torchrec/job/implicit_member.py",
    "persia_torchrec/job/signals.py",  # ends them
}


def names_in(nodes):
    """Yield modules that are imported, names and attributes, keywords of calls."""
    for node in nodes:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                yield node.module
                yield from (alias.name for alias in node.names)
            case ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Attribute(attr=name) if name not in ("eval", "exec"):  # of modules
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def test_nothing_is_unpickled():
    """Pickle, and what hides it, runs code that the writer of the bytes chose."""

    def rule(name):
        nodes = parsed(name)
        names = {part for found in names_in(nodes) for part in found.split(".")}
        yield from names & UNPICKLE
        if "multiprocessing" in {*imported(nodes)} and name not in START_PROCESSES:
            yield "multiprocessing"
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                kept = {one.arg: ast.unparse(one.value) for one in node.keywords}
                if kept.get("weights_only") != "True":
                    yield ast.unparse(node)

    assert faults_of(rule) == {UNPICKLES: ["pickle"]}


def imported(nodes):
    """Yield the top of each module that is imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


# Folders of tests/ that are no room of the package: their files are about several
# rooms, or about what stands beside the package.
SUITES = {
    *("architecture", "benchmarks", "chaos", "cluster", "components", "docs"),
    *(
        "differential",
        "dropin",
        "examples",
        "fuzz",
        "gpu",
        "integration",
        "prometheus",
        "resume",
        "soak",
    ),
    *("support", "wheel"),
}
TEST_FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))


def modules_beside(path):
    """Return the names of the modules of a test's room, ``__main__`` as ``main``."""
    room = ROOT / "persia_torchrec" / path.parent.relative_to("tests")
    return {module.stem.strip("_") for module in room.glob("*.py")} - {"init"}


SHELL = (
    *("persia", "datasets", "job", "serving", "checkpoint", "training", "launch"),
    *("metrics", "parsing", "device"),
)
TESTED_ELSEWHERE = {
    "job/report.py": "tests/job/test_progress.py, with the curves that it draws",
    "launch/local_run.py": "tests/command/test_start.py, by the verb",
    "persia/feed.py": "tests/persia/ctx/test_data_ctx.py, by the context that has one",
}


def has_tests(path):
    """Return whether a test file of the module's room has its name."""
    room, stem = Path(path).parent.relative_to("persia_torchrec"), Path(path).stem
    name = f"test_{stem.strip('_')}"
    files = [one.stem for one in (ROOT / "tests" / room).glob("test_*.py")]
    return any(one == name or one.startswith(f"{name}_") for one in files)


def test_a_module_of_the_shell_has_tests_under_its_name():
    untested = {
        str(Path(path).relative_to("persia_torchrec"))
        for path in FILES
        if Path(path).parts[1] in SHELL
        and not path.endswith("_pb2.py")
        and any(functions(path))
        and not has_tests(path)
    }
    assert untested == TESTED_ELSEWHERE.keys()


IMPORTS = re.compile(r"^ *(?:from (tests[.\w]*) )?import (\([^)]*\)|.*)$", re.MULTILINE)


@functools.cache
def imported_tests(path):
    """Return each file of tests/ that a file imports."""
    names = []
    for module, imported in IMPORTS.findall((ROOT / path).read_text()):
        words = re.findall(r"[.\w]+", imported)
        names += [module, *(f"{module}.{word}".strip(".") for word in words)]
    files = [Path(*name.split(".")).with_suffix(".py") for name in names if name]
    return [f for f in files if f.parts[0] == "tests" and (ROOT / f).is_file()]


def test_a_test_file_is_named_after_a_module_of_its_room():
    """As ``test_memory_file_layout.py`` of ``store/memory_file.py``."""
    unnamed = []
    for path in TEST_FILES:
        if path.name.startswith("test_") and path.parts[1] not in SUITES:
            words = path.stem.split("_")[1:]
            names = {"_".join(words[:n]) for n in range(1, len(words) + 1)}
            if not names & modules_beside(path):
                unnamed.append(str(path))
    assert unnamed == []


@pytest.mark.slow
def test_no_test_file_is_imported():
    found = {
        f"{path}: {other}"
        for path in TEST_FILES
        for other in imported_tests(path)
        if other.name.startswith("test_")
    }
    assert found == set()


def test_no_test_is_inside_of_another_function():
    """There it would never run."""
    for path in TEST_FILES:
        outer = ""
        for line in (ROOT / path).read_text().splitlines():
            outer = line if line[:1].strip() else outer
            is_test = line.startswith("    def test_") and path.stem[:5] == "test_"
            assert not is_test or outer.startswith("class "), f"{path}: {line}"


def test_helpers_of_several_folders_stand_in_support():
    """A file straight below tests/ is a folder of its own in this."""
    found = {
        f"{path}: {other}"
        for path in TEST_FILES
        for other in imported_tests(path)
        if other.parts[1] not in ("support", path.parts[1])
    }
    assert found == set()


PACKAGE = [name for name in FILES if name.startswith("persia_torchrec/")]
DOORS = {path.stem for path in (ROOT / "persia_torchrec").glob("*.pyi")} - {"__init__"}
"""Modules at PERSIA's paths, each of which leads to one of the same name."""

BEHIND_DOORS = {
    "Block": "a block of PERSIA's PersiaJob, and a column of a block of rows",
    "Coordinator": "a verb of persia-launcher, and the process that it starts",
    "DataLoader": "the same, and PERSIA's class of that name",
}
"""Classes behind doors whose names are PERSIA's, or those of its verbs."""


def twins(named):
    """Return by name the files of which several have it."""
    places = {}
    for name, path in named:
        places.setdefault(name, []).append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_a_module_has_a_name_of_its_own():
    named = [(Path(path).stem, path) for path in PACKAGE]
    found = twins((n, p) for n, p in named if n.strip("_") == n)
    for name, paths in found.items():
        of_door = {f"persia_torchrec/{folder}{name}.py" for folder in ("", "persia/")}
        assert name in DOORS, paths
        assert set(paths) == of_door


def test_a_public_class_has_a_name_of_its_own():
    named = [
        (node.name, path)
        for path in PACKAGE
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(named) > 300
    assert twins(named).keys() == BEHIND_DOORS.keys()


def test_no_import_closes_a_circle_not_even_one_of_types():
    imports = grimp.build_graph("persia_torchrec", cache_dir=None)
    sorter = graphlib.TopologicalSorter()
    for module in imports.modules:
        sorter.add(module, *imports.find_modules_directly_imported_by(module))
    sorter.prepare()  # raises CycleError
