"""Files of torch.export that were changed to run code, or to name what could."""

import contextlib
import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from persia_torchrec.errors import CheckpointError
from persia_torchrec.sharding.exported_program import checked_program, read_program

MODEL = "archive/models/model.json"
CONSTANTS = "archive/data/constants/model_constants_config.json"


class Small(nn.Module):
    """A model with a parameter and a constant, for batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"user tower/1": nn.Linear(3, 2)})
        self.constant = torch.ones(2)

    def forward(self, numbers):
        output = self.towers["user tower/1"](numbers) + self.constant
        return torch.cat([output, output]).reshape(numbers.shape[0], -1)


@pytest.fixture(scope="module")
def exported():
    """The files of an exported model, by name."""
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(
        Small(), (torch.ones(4, 3),), dynamic_shapes=sizes, strict=False
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(files, more=()):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in (*files.items(), *more):
            archive.writestr(name, content)
    return written.getvalue()


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def pickled(path):
    file = io.BytesIO()
    torch.save((Touch(path),), file)
    return file.getvalue()


def code(path):
    return f"__import__('pathlib').Path('{path}').touch()"


def changed_model(files, change):
    model = json.loads(files[MODEL])
    change(model, model["graph_module"]["graph"])
    return files | {MODEL: json.dumps(model).encode()}


def is_rejected(files, message):
    with pytest.raises(CheckpointError, match=message):
        checked_program(archive_of(files))


def first_size(graph):
    sizes = [size for meta in graph["tensor_values"].values() for size in meta["sizes"]]
    return next(size["as_expr"] for size in sizes if "as_expr" in size)


def in_samples(files, path):
    name = next(name for name in files if "sample_inputs" in name)
    return files | {name: pickled(path)}


def in_a_constant(files, path):
    config = json.loads(files[CONSTANTS])
    about = next(iter(config["config"].values()))
    about["use_pickle"] = True
    name = f"archive/data/constants/{about['path_name']}"
    return files | {CONSTANTS: json.dumps(config).encode(), name: pickled(path)}


def in_an_object(files, path):
    config = json.loads(files[CONSTANTS])
    about = next(iter(config["config"].values()))
    about |= {"use_pickle": True, "path_name": "opaque_obj_0"}
    name = "archive/data/constants/opaque_obj_0"
    content = pickle.dumps(Touch(path))
    return files | {CONSTANTS: json.dumps(config).encode(), name: content}


def in_an_expression(files, path):
    def change(model, graph):
        first_size(graph)["expr_str"] = code(path)

    return changed_model(files, change)


def in_a_guard(files, path):
    return changed_model(files, lambda model, _: model.update(guards_code=[code(path)]))


def in_a_tree(files, path):
    module = Path(path).stem  # importing it makes the file
    Path(path).with_name(f"{module}.py").write_text(code(path))

    def change(model, graph):
        signature = model["graph_module"]["module_call_graph"][0]["signature"]
        spec = json.loads(signature["in_spec"])
        keys = {"__enum__": True, "fqn": f"{module}:A", "name": "A"}
        spec[1]["children_spec"][1]["context"] = json.dumps([keys])
        signature["in_spec"] = json.dumps(spec)

    return changed_model(files, change)


ATTACKS = [
    in_samples,
    in_a_constant,
    in_an_object,
    in_an_expression,
    in_a_guard,
    in_a_tree,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_code_of_a_file_is_run(exported, tmp_path, monkeypatch, attack):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / f"pwned_{attack.__name__}"
    data = archive_of(attack(exported, path))
    if attack in (in_samples, in_a_guard):  # which are left out
        read_program(data)(torch.ones(4, 3))
    else:
        why = "known not to run code|Weights only load failed"
        with pytest.raises((CheckpointError, pickle.UnpicklingError), match=why):
            read_program(data)
    assert not path.exists()
    with contextlib.suppress(Exception):  # torch's reader runs what it was given
        torch.export.load(io.BytesIO(data)).module()(torch.ones(4, 3))
    assert path.exists(), "the attack is none any more"


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.add",
        "torch.ops.aten.__class__.default",
        "torch.ops.fbgemm.new_managed_tensor.default",
        "torch.ops.load_library",
        "torch.hub.load",
        "_operator.attrgetter",
        "math.factorial",
        "#extension:op",
    ],
)
def test_an_operator_that_is_not_listed_is_rejected(exported, target):
    def change(model, graph):
        graph["nodes"][0]["target"] = target

    is_rejected(changed_model(exported, change), f"an operator.*{target}.*--factory")


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('a b')",
        "Symbol(Integer(1).__class__)",
        "Symbol('s0', positive='x')",
        "Symbol(**{'name': 's0'})",
        "sympify('1')",
        "Integer('1')",
        "x.y",
        "lambda: 1",
        "[1]",
        "1 if 1 else 1",
        "(",
    ],
)
def test_an_expression_that_is_no_size_is_rejected(exported, text):
    def change(model, graph):
        first_size(graph)["expr_str"] = text

    is_rejected(changed_model(exported, change), "an expression of sizes")


@pytest.mark.parametrize("name", ["a=print()", "a b", "é", "a.b"])
def test_a_name_that_would_be_code_is_rejected(exported, name):
    def change(model, graph):
        graph["inputs"][0]["as_tensor"]["name"] = name

    is_rejected(changed_model(exported, change), "a name")


def test_a_name_of_a_tensor_that_would_be_code_is_rejected(exported):
    def change(model, graph):
        specs = model["graph_module"]["signature"]["input_specs"]
        specs[0]["parameter"]["parameter_name"] = 'a"+print()+"'

    is_rejected(changed_model(exported, change), "a name of a tensor")


def test_files_beside_those_of_an_export_are_rejected(exported):
    library = {"archive/data/aotinductor/model/a.so": b"code"}
    for files, more in (
        (exported | library, ()),
        (exported | {"archive/data/constants/custom_obj_0": b""}, ()),
        (exported | {"version": b"8.8"}, ()),
    ):
        with pytest.raises(CheckpointError, match="a file that is known"):
            checked_program(archive_of(files, more))
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = archive_of(exported, [(MODEL, b"{}")])
    with pytest.raises(CheckpointError, match="a file that is known"):
        checked_program(twice)


def test_a_checked_program_predicts_as_before_and_has_no_samples(exported):
    data = archive_of(exported)
    expected = torch.export.load(io.BytesIO(data)).module()
    checked = checked_program(data)
    assert checked_program(checked) == checked
    with zipfile.ZipFile(io.BytesIO(checked)) as archive:
        assert archive.read("archive/data/sample_inputs/model.pt") == b""
        assert b"stack_trace" not in archive.read(MODEL)
    for num in (1, 5):
        numbers = torch.rand(num, 3)
        torch.testing.assert_close(read_program(checked)(numbers), expected(numbers))
