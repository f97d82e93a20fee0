"""What the page for PERSIA's users says of names, it says truly."""

import ast
import importlib
import inspect
import logging
import re

import pytest

from docs import generate
from persia_torchrec import env, k8s_utils
from persia_torchrec.distributed import ALGORITHMS, REJECTED_ALGORITHMS
from persia_torchrec.parsing.yaml_file import DIFFERENCES
from persia_torchrec.persia import launcher
from tests.support.repository import ROOT

FOLDER = ROOT / "persia_torchrec"
PAGE = (ROOT / "docs/persia.md").read_text()
GENERATED = (ROOT / "docs/reference/persia_names.md").read_text()
NAMES = [
    (module, signature)
    for module, signatures in generate.names_of_persia().items()
    for signature in signatures
]


def rows_of(head):
    """Yield each name of the page's tables with such a head, and what stands beside."""
    for table in re.findall(rf"^\| name \| {head} \|\n((?:\|.*\n)+)", PAGE, re.M):
        for names, why in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|$", table, re.M):
            for name in re.findall(r"`([^`]*)`", names):
                yield name, why.strip()


DIFFERENT = dict(rows_of("what differs"))
MISSING = dict(rows_of("instead"))
SAME = [
    (module, signature)
    for module, signature in NAMES
    if f"{module}.{signature.partition('(')[0]}" not in MISSING
]
OTHERWISE = {  # their names are here, for other arguments or purposes
    "data.StreamingDataset.consume_dataset",
    "distributed.DistributedBaseOption",
    "logger.get_default_logger",
}


def find(module, path):
    """Return what a dotted name leads to in a module, None where there is none."""
    found = importlib.import_module(f"persia_torchrec.{module}")
    for name in path.split("."):
        at = found
        found = getattr(at, name, None)
        if found is None:  # which __init__ may set
            init = getattr(at, "__init__", None)
            code = getattr(init, "__code__", None)
            return name if code and name in code.co_names else None
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
    assert len(DIFFERENT) > 35


def test_the_page_lists_no_other_names():
    names = {(module, name.partition("(")[0]) for module, name in NAMES}
    assert set(MISSING) <= {f"{module}.{name}" for module, name in names}
    assert set(DIFFERENT) <= {name for _, name in names}


def test_a_name_that_differs_or_is_missing_has_a_reason():
    assert [name for name, why in (DIFFERENT | MISSING).items() if not why] == []


def test_a_name_that_is_missing_is_not_here():
    found = {
        f"{module}.{name}"
        for module, signature in NAMES
        if f"{module}.{(name := signature.partition('(')[0])}" in MISSING
        if find(module, name) is not None
    }
    assert found == OTHERWISE


@pytest.mark.parametrize(("module", "name"), SAME, ids=[name for _, name in SAME])
def test_functions_of_the_same_name_have_the_same_arguments_and_defaults(module, name):
    found = find(module, name.partition("(")[0])
    assert found is not None
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
    ("title", "kind"), [("Other names of keys", "renamed"), ("Ignored keys", "ignored")]
)
def test_exactly_the_keys_that_differ_are_explained(title, kind):
    table = [row for rows in DIFFERENCES.values() for row in rows if row.kind == kind]
    text = GENERATED.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.*]+)` of .*? \| (.*) \|$", text, re.M))
    assert list(rows) == [row.key_path for row in table]
    for row in table:
        assert (row.right_key or "none") in rows[row.key_path]


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
    tables = [
        PAGE.partition(f"| field of {kind} |")[2].partition("\n\n")[0]
        for kind in ("PersiaJob", "a role")
    ]
    rows = re.findall(r"^\| `([\w.]+)` \|", "\n".join(tables), re.M)
    spec = [f"spec.{name}" for name in k8s_utils.Spec.__struct_encode_fields__]
    files = k8s_utils.PersiaEnv.__struct_encode_fields__
    spec.remove("spec.persiaEnv")
    of_blocks = k8s_utils.NNWorkerBlock.__struct_encode_fields__
    expected = [*(f"spec.persiaEnv.{name}" for name in files), *spec, *of_blocks]
    assert sorted(rows) == sorted(["metadata", *expected])
    table = PAGE.partition("| command of `persia-k8s-utils` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(k8s_utils.INSTEAD)
