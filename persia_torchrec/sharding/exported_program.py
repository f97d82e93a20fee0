"""The file of ``torch.export`` is read without running anything that it names.

torch's own reader unpickles parts of the file, gives its symbolic expressions to sympy,
which evaluates them as Python, executes its guards, imports what its tree specs name,
and makes Python code of the names of its nodes. So torch is given another file, with

    data/weights, data/constants    numbers; a pickle is written again, of its tensors
    models/model.json               the graph, of which each string was looked at
    no sample inputs, no guards, no stack traces

and what is not in the lists below is an error that names it. A program can still
calculate for long, and take memory.
"""

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from persia_torchrec.errors import CheckpointError
from persia_torchrec.sharding.torchrec_api import arguments_of

_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_CONFIGS = {
    "data/weights/": "data/weights/model_weights_config.json",
    "data/constants/": "data/constants/model_constants_config.json",
}
_MEMBERS = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_format|archive_version"
    r"|byteorder|\.data/(version|serialization_id)|"
    + "|".join(re.escape(name) for name in (_MODEL, _SAMPLES, *_CONFIGS.values()))
)
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)
_FUNCTIONS = re.compile(
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_"
    r"|or_|lshift|rshift|getitem)"
    r"|math\.(trunc|ceil|floor|sqrt)"
    r"|torch\.sym_(not|int|float|ite|max|min|sqrt|sum)"
    r"|torch\.ops\.higher_order\.(cond|wrap_with_set_grad_enabled|wrap_with_autocast)"
)
_OF_FBGEMM = re.compile(
    "(asynchronous_|jagged_|dense_to_jagged|permute_|kt_regroup_|regroup_keyed_tensor"
    "|keyed_jagged_index_select_|expand_into_jagged_|invert_permute|lengths_range"
    "|offsets_range|segment_sum_csr|batched_dense_vec_jagged_|repeat_arange)"
    r"\w*"
)
"""Names of fbgemm's operators, of tensors without the memory that they are given."""
_OF_SIZES = re.compile(
    "Integer|Float|Rational|Symbol|Add|Mul|Pow|Max|Min|Abs|And|Or|Not|Eq|Ne|Lt|Le|Gt|Ge"
    "|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan"
    "|FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilDiv|CeilToInt|FloorToInt"
    "|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat"
    "|TruncToInt|RoundToInt|RoundDecimal|ToFloat|Identity"
    "|IsNonOverlappingAndDenseIndicator"
)
"""Functions of symbolic expressions."""
_CONSTANTS = re.compile("oo|int_oo|true|false")
_WORD = re.compile("[A-Za-z0-9_.+-]*")
_NAME = re.compile("([A-Za-z_][A-Za-z0-9_]*)?")
_OF_TEXT = {"Symbol": _NAME, "Float": _WORD}
_TREES = "builtins.tuple", "builtins.list", "builtins.dict"
_TEXTS = frozenset({"as_string", "as_strings"})  # arguments, which torch quotes
_PATHS = frozenset({"parameter_name", "buffer_name", "tensor_constant_name"})


def read_program(data: bytes) -> torch.nn.Module:
    """Return the module of a file of ``torch.export.save``, checked as below."""
    program = torch.export.load(io.BytesIO(checked_program(data)))
    return program.module()


def checked_program(data: bytes) -> bytes:
    """Return a file of ``torch.export.save`` with what is needed of it alone.

    Raises:
        CheckpointError: something in it could run code.
    """
    members = dict(_members(data))
    members[_SAMPLES] = b""
    members[_MODEL] = json.dumps(_checked_model(json.loads(members[_MODEL]))).encode()
    for folder, config in _CONFIGS.items():
        found = json.loads(members[config])["config"]
        for name, about in found.items():
            _require(_is_path(name), "a name of a tensor", name)
            if about["use_pickle"]:
                file = folder + about["path_name"]
                members[file] = _saved_again(members[file])
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in members.items():
            # By its own date, the same program would be other bytes 2 s later.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return written.getvalue()


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive, without the folder that all are in."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        seen: set[str] = set()
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            is_known = _MEMBERS.fullmatch(name) is not None and name not in seen
            _require(is_known, "a file", info.filename)
            _require(info.compress_type == zipfile.ZIP_STORED, "a file", "a packed one")
            seen.add(name)
            yield name, archive.read(info)


def _saved_again(pickled: bytes) -> bytes:
    """Return a pickle of the tensors of one, of which nothing was run."""
    tensors = torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=True)
    written = io.BytesIO()
    torch.save(tensors, written)
    return written.getvalue()


def _checked_model(model: Any) -> Any:
    """Return a program without what is not needed; each string in it was looked at."""
    model["guards_code"] = []
    graph_module = model["graph_module"]
    graph_module["metadata"] = graph_module["treespec_namedtuple_fields"] = {}
    del graph_module["module_call_graph"][1:]  # of the modules in the first one
    _check(model, "")
    return model


def _check(value: Any, key: str) -> None:
    """Look at a value, and at what it holds, which stands at a key of the file."""
    if isinstance(value, dict):
        if "target" in value:  # a node
            value["metadata"] = {}
        for name, one in value.items():
            _require(_NAME.fullmatch(name) is not None, "a name", name)
            _check(one, name)
    elif isinstance(value, list):
        for one in value:
            _check(one, key)
    elif isinstance(value, str):
        _check_text(value, key)


def _check_text(text: str, key: str) -> None:
    match key:
        case "expr_str":
            _check_expression(text)
        case "target" | "as_operator":
            _require(_is_operator(text), "an operator", text)
        case "in_spec" | "out_spec":
            _check_tree(json.loads(text)[1])
        case "torch_version":
            _require(_WORD.fullmatch(text) is not None, "a version", text)
        case _ if key in _PATHS:
            _require(_is_path(text), "a name of a tensor", text)
        case _ if key not in _TEXTS:
            _require(_NAME.fullmatch(text) is not None, f"a name, {key}", text)


def _is_path(text: str) -> bool:
    """Return whether a name can stand between quotes in Python code."""
    return text.isprintable() and not {"'", '"', "\\"} & {*text}


def _is_operator(target: str) -> bool:
    """Return whether a program may call a function."""
    if _FUNCTIONS.fullmatch(target):
        return True
    match = _OPERATOR.fullmatch(target)
    if match is None:
        return False
    namespace, name, overload = match.groups()
    if namespace != "aten" and not (
        namespace == "fbgemm" and _OF_FBGEMM.fullmatch(name)
    ):
        return False
    packet = getattr(getattr(torch.ops, namespace), name, None)
    arguments = arguments_of(getattr(packet, overload, None))
    return arguments is not None and "filename" not in arguments


def _check_tree(spec: Any) -> None:
    """Look at how arguments are nested: in tuples, lists and dicts without keys."""
    if spec["type"] is not None:
        _require(spec["type"] in _TREES, "a container", spec["type"])
        context = spec["context"]
        _require(context in ("null", "[]", None), "names of arguments", context)
    for child in spec["children_spec"]:
        _check_tree(child)


def _check_expression(text: str) -> None:
    """Look at an expression of sizes, of which sympy makes Python code."""
    try:
        parsed = ast.parse(text, mode="eval").body
    except SyntaxError:
        parsed = ast.Name("?")
    _require(_is_of_sizes(parsed), "an expression of sizes", text)


def _is_of_sizes(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.Name(id=name):
            return _CONSTANTS.fullmatch(name) is not None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_of_sizes(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = [word.value for word in keywords if word.arg is not None]
            if len(named) != len(keywords) or not _OF_SIZES.fullmatch(name):
                return False
            of_text = _OF_TEXT.get(name)
            if of_text is not None:
                args = [arg for arg in args if not _is_text(arg, of_text)]
            return all(map(_is_of_sizes, [*args, *named]))
    return False


def _is_text(node: ast.expr, pattern: re.Pattern[str]) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return pattern.fullmatch(text) is not None
    return False


def _require(holds: bool, what: str, received: str) -> None:
    if not holds:
        raise CheckpointError(
            f"An exported model must have {what} that is known not to run code. "
            f"Received: {received!r:.300}. Export the model again, or with "
            'factory="module:function", which --factory of the server must name.'
        )
