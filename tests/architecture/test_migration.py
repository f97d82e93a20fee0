"""What the page for PERSIA's users says of names, it says truly."""

import ast
import importlib
import inspect
import logging
import re
from pathlib import Path

import pytest

from persia_torchrec import env, k8s_utils
from persia_torchrec.distributed import ALGORITHMS, REJECTED_ALGORITHMS
from persia_torchrec.parsing.yaml_file import DIFFERENCES
from persia_torchrec.persia import launcher
from tests.support.repository import ROOT

FOLDER = ROOT / "persia_torchrec"
PAGE = (ROOT / "docs/persia.md").read_text()


def names_of_persia():
    """Yield module and name of PERSIA's public names, with arguments and defaults."""
    module = ""
    for line in (Path(__file__).parent / "persia_names.txt").read_text().splitlines():
        if line.startswith(" "):
            yield module, line.strip()
        else:
            module = line


def rows_of_names():
    """Yield modules, PERSIA's spelling of a name, what it is here, and why."""
    for title, text in re.findall(r"^### (.*?)\n(.*?)(?=^##)", PAGE, re.M | re.S):
        modules = re.findall(r"persia\.([\w.]+)", title)
        rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \| ([^|]*)\|$", text, re.M)
        for names, here, why in rows if modules else []:
            for name in re.findall(r"`([^`]*)`", names):
                yield modules, name, here.strip(), why.strip()


NAMES = list(names_of_persia())
ROWS = {
    (module, name): (here, why)
    for modules, name, here, why in rows_of_names()
    for module in modules
}
SAME = [
    (modules, name) for modules, name, here, _ in rows_of_names() if here == "the same"
]


def find(modules, path):
    """Return what a dotted name leads to in the first module that has it."""
    first, *rest = path.split(".")
    for module in modules:
        found = getattr(
            importlib.import_module(f"persia_torchrec.{module}"), first, None
        )
        if found is not None:
            break
    else:
        pytest.fail(f"{path} is in none of {modules}")
    for name in rest:  # which __init__ may set
        found = getattr(found, name, name in found.__init__.__code__.co_names)
        assert found, path
    return found


def parameters_of(signature):
    """Return names and defaults of ``f(a, b=1)``, as text; None is no default."""
    if "(" not in signature:
        return []
    function = ast.parse(f"def {re.sub(r'^.*?[(]', 'f(', signature)}: ...").body[0]
    arguments = [argument.arg for argument in function.args.args]
    defaults = [
        getattr(logging, default.attr)
        if isinstance(default, ast.Attribute)
        else ast.literal_eval(default)
        for default in function.args.defaults
    ]
    num_required = len(arguments) - len(defaults)
    required = [inspect.Parameter.empty] * num_required
    return list(zip(arguments, [*required, *defaults], strict=True))


def test_there_are_names_to_compare():
    assert len(NAMES) > 110
    assert len(SAME) > 70


def test_every_public_name_of_persia_has_a_row_with_its_arguments():
    assert [name for name in NAMES if name not in ROWS] == []


def test_a_name_that_is_not_the_same_has_a_reason():
    other = {name: why for name, (here, why) in ROWS.items() if here != "the same"}
    assert [name for name, why in other.items() if not why] == []


def test_the_page_lists_no_other_names():
    known = {name for _, name in NAMES}
    assert {name for _, name in SAME} <= known


@pytest.mark.parametrize(("modules", "name"), SAME, ids=[name for _, name in SAME])
def test_functions_of_the_same_name_have_the_same_arguments_and_defaults(modules, name):
    found = find(modules, name.partition("(")[0])
    expected = parameters_of(name)
    if not expected:
        return
    parameters = inspect.signature(found).parameters.values()
    ours = [p for p in parameters if p.name != "self"][: len(expected)]
    assert [p.name for p in ours] == [argument for argument, _ in expected]
    for parameter, (_, default) in zip(ours, expected, strict=True):
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if default is not inspect.Parameter.empty:
            assert parameter.default == default


@pytest.mark.parametrize(
    ("title", "kind"), [("other name", "renamed"), ("ignored key", "ignored")]
)
def test_exactly_the_keys_that_differ_are_explained(title, kind):
    table = [row for rows in DIFFERENCES.values() for row in rows if row.kind == kind]
    text = PAGE.partition(f"| {title} |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `([\w.*]+)`.*? \| (.*) \|$", text, re.M))
    assert list(rows) == [row.key_path for row in table]
    for row in table:
        if row.right_key:
            assert row.right_key.rpartition(".")[2] in rows[row.key_path] or (
                "the same" in rows[row.key_path]
            )


def test_exactly_the_rejected_variables_are_listed_as_rejected():
    table = PAGE.partition("| variable of PERSIA |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \| (.*) \|", table, re.M)
    rejected = [
        name
        for names, here in rows
        if here.startswith("rejected")
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert rejected == list(env.REJECTED)
    files = ("env.py", "persia/utils.py", "persia/launcher.py", "parsing/settings.py")
    read = "".join((FOLDER / file).read_text() for file in files)
    for names, here in rows:
        if here.startswith("the same"):
            assert all(f'"{name}"' in read for name in re.findall(r"`(\w+)`", names))


def test_every_algorithm_of_bagua_is_documented():
    for algorithm in (*ALGORITHMS, *REJECTED_ALGORITHMS):
        assert f"`{algorithm}`" in PAGE


def test_the_commands_equal_those_of_the_launcher():
    shown = re.findall(r"^persia-launcher ([\w-]+)", PAGE, re.M)
    listed = re.findall(r"^\| `([\w-]+)(?: \[FILE\])?` \| the same \|", PAGE, re.M)
    usage = launcher.parser().format_help()
    commands = re.findall(r"^    ([\w-]+)", usage, re.M)
    assert sorted(shown) == sorted(commands)
    assert sorted(name for name in listed if name in commands) == sorted(
        set(commands) - {"coordinator"}
    )


def test_every_field_of_a_persia_job_and_every_command_for_kubernetes_is_explained():
    table = PAGE.partition("| field of PersiaJob |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([\w.]+)` \|", table, re.M)
    spec = [f"spec.{name}" for name in k8s_utils.Spec.__struct_encode_fields__]
    files = k8s_utils.PersiaEnv.__struct_encode_fields__
    spec.remove("spec.persiaEnv")
    of_blocks = k8s_utils.NNWorkerBlock.__struct_encode_fields__
    expected = [*(f"spec.persiaEnv.{name}" for name in files), *spec, *of_blocks]
    assert sorted(rows) == sorted(["metadata", *expected])
    table = PAGE.partition("| command of `persia-k8s-utils` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(k8s_utils.INSTEAD)
