import errno
import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import FunctionCache
from numba.core.datamodel import default_manager
from numba.core.errors import NumbaError

import persia_torchrec
from persia_torchrec.jit import compiled as compiled_module
from persia_torchrec.jit.compiled import (
    compiled,
    compiled_as_written,
    inlined,
    inlined_kernel,
    read_only,
    report_compilation,
    share,
    sources_stamp,
    specialized,
)
from persia_torchrec.jit.kernel import as_written, divide
from tests.support.processes import Processes, wait_until

pytestmark = pytest.mark.slow

NUMBAS_PRIVATE_NAMES = {
    "_cache": "a dispatcher's cache, which loads and saves its machine code",
    "_index_key": "what an entry of the cache is found by",
    "_load_overload": "loads machine code without preparing to compile",
}
"""All that this package uses, in ``compiled.py`` alone."""
CHECKED_WITH = (0, 61), (0, 68)
"""The first and the last version of numba in which they were read."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "loops.py").write_text("@compiled\ndef f(): pass\n")
    (tmp_path / "plain.py").write_text("def g(): pass\n")
    return tmp_path


def test_loops_are_compiled_again_when_a_file_with_loops_has_changed(folder):
    before = sources_stamp(folder)
    assert sources_stamp(folder) == before
    (folder / "plain.py").write_text("def g(): return 1\n")
    assert sources_stamp(folder) == before
    (folder / "inner" / "loops.py").write_text("@compiled\ndef f(): return 1\n")
    assert sources_stamp(folder) != before
    changed = sources_stamp(folder)
    (folder / "new.py").write_text("@inlined\ndef h(): pass\n")
    assert sources_stamp(folder) != changed


@pytest.mark.parametrize(
    "line",
    [
        "from persia_torchrec.inner.numbers import TEN",
        "from persia_torchrec.inner import numbers",
        "from persia_torchrec.inner import (\n    letters,\n    numbers,\n)",
    ],
)
def test_loops_are_compiled_again_when_a_file_that_they_import_from_has_changed(
    folder, line
):
    (folder / "inner" / "loops.py").write_text(f"{line}\n@compiled\ndef f(): pass\n")
    (folder / "inner" / "numbers.py").write_text("TEN = 10\n")
    before = sources_stamp(folder)
    (folder / "inner" / "numbers.py").write_text("TEN = 11\n")
    assert sources_stamp(folder) != before


@pytest.mark.parametrize("decorate", [compiled, compiled_as_written, inlined])
def test_machine_code_is_kept_for_one_state_of_the_sources(decorate):
    def double(x):
        return 2 * x

    dispatcher = decorate(double)
    assert dispatcher(np.float32(1.5)) == 3
    codegen = dispatcher.targetctx.codegen()
    *_, code, kernel, package = dispatcher._cache._index_key((numba.float32,), codegen)
    assert (len(code), kernel, len(package)) == (64, "", 64)


def test_an_array_that_was_passed_through_cannot_be_written_to():
    array = np.arange(6)[::2]
    view = read_only(array)
    assert view.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    array[0] = 7


def test_a_loop_that_is_compiled_is_told_of_and_one_that_is_loaded_is_not(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP)

    def told():
        module = load(path)
        said = []
        with report_compilation(said.append):
            assert module.double(np.float32(1.5)) == 3
        return said

    assert told() == [True, False]
    assert told() == []


LOOP = (
    "from persia_torchrec.jit.compiled import compiled\n\n\n"
    "@compiled\ndef double(x):\n    return 2 * x\n"
)


def load(path):
    spec = importlib.util.spec_from_file_location("loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_at_once(path, go):
    sys.path.insert(0, str(path.parent))  # loops are loaded by the name of their module
    module = importlib.import_module(path.stem)
    Path(f"{go}-{os.getpid()}").touch()
    wait_until(go.exists, "all processes are ready")
    assert module.double(np.float32(1.5)) == 3
    print("misses", sum(module.double.stats.cache_misses.values()))


def test_of_processes_that_miss_a_loop_at_once_the_first_compiles_it(tmp_path):
    path, go = tmp_path / "loop.py", tmp_path / "go"
    path.write_text(LOOP)
    with Processes(tmp_path) as processes:
        started = [
            processes.start(f"process {n}", compile_at_once, path, go) for n in range(3)
        ]
        wait_until(lambda: len(list(tmp_path.glob("go-*"))) == 3, "all are ready")
        go.touch()
        assert [one.status() for one in started] == [0] * 3
    found = [re.search(r"misses (\d)", one.output())[1] for one in started]
    assert sorted(found) == ["0", "0", "1"]


TWO_LOOPS = LOOP + "\n\n@compiled\ndef triple(x):\n    return 3 * x\n"


def compile_parts(path):
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)

    def part(loop):
        Path(f"{path}-{loop.__name__}-{os.getpid()}").touch()
        wait_until(
            lambda: len(list(path.parent.glob("loop.py-*"))) >= 2, "both compile"
        )
        loop(np.float32(1.5))

    both = module.double, module.triple
    share({loop.__name__: partial(part, loop) for loop in both})
    print("misses", *(sum(loop.stats.cache_misses.values()) for loop in both))


def test_processes_that_share_loops_compile_different_ones_and_load_the_others(
    tmp_path,
):
    path = tmp_path / "loop.py"
    path.write_text(TWO_LOOPS)
    with Processes(tmp_path) as processes:
        started = [
            processes.start(f"process {n}", compile_parts, path) for n in range(2)
        ]
        assert [one.status() for one in started] == [0] * 2
    found = [re.search(r"misses (\d) (\d)", one.output()).groups() for one in started]
    assert sorted(found) == [("0", "1"), ("1", "0")]


def hold_turns(path, begun):
    module = load(path)

    def compile_for_ever():
        assert module.double._cache.turn.take()
        begun.touch()
        signal.pause()

    share({"double": compile_for_ever})


def test_a_process_that_is_killed_while_it_compiles_keeps_no_other_waiting(tmp_path):
    path, begun, go = tmp_path / "loop.py", tmp_path / "begun", tmp_path / "go"
    path.write_text(LOOP)
    with Processes(tmp_path) as processes:
        killed = processes.start("killed", hold_turns, path, begun)
        wait_until(begun.exists, "it compiles")
        other = processes.start("other", compile_at_once, path, go)
        wait_until(lambda: list(tmp_path.glob("go-*")), "it waits")
        go.touch()
        killed.kill()
        assert other.status() == 0, other.output()
    assert "misses 1" in other.output()


def test_what_was_kept_in_part_is_compiled_again(tmp_path):
    path, go = tmp_path / "loop.py", tmp_path / "go"
    path.write_text(LOOP)
    go.touch()
    with Processes(tmp_path) as processes:
        assert processes.start("first", compile_at_once, path, go).status() == 0
        [code] = tmp_path.glob("__pycache__/*.nbc")
        code.unlink()  # the index was written, the machine code not yet
        again = processes.start("again", compile_at_once, path, go)
        assert again.status() == 0, again.output()
    assert "misses 1" in again.output()


def require_free(path):
    assert load(path).double._cache.turn.take()


def test_a_loop_that_cannot_be_compiled_keeps_no_other_process_waiting(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP.replace("2 * x", "x.y"))
    with pytest.raises(NumbaError):
        load(path).double(np.float32(1.5))
    with Processes(tmp_path) as processes:
        process = processes.start("other", require_free, path)
        assert process.status() == 0, process.output()


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A module in a folder where nothing can be kept, and a user without a home."""
    path = tmp_path / "image" / "loop.py"
    path.parent.mkdir()
    path.write_text(LOOP)
    path.with_name("__pycache__").touch()  # no folder: root may write to any
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    yield path
    for told in compiled_module._temporary_folder, compiled_module._say_not_kept:
        told.cache_clear()


def test_where_nothing_can_be_written_loops_are_kept_in_a_temporary_folder(
    image, tmp_path, caplog
):
    assert load(image).double(np.float32(1.5)) == 3
    again = load(image).double
    assert again(np.float32(1.5)) == 3
    assert sum(again.stats.cache_hits.values()) == 1
    (folder,) = (tmp_path / "tmp").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    (line,) = caplog.messages
    assert str(folder) in line
    assert "NUMBA_CACHE_DIR" in line


def test_a_temporary_folder_that_others_can_write_to_is_not_used(
    image, tmp_path, caplog
):
    (tmp_path / "tmp" / f"persia_torchrec-{os.getuid()}").mkdir()
    next((tmp_path / "tmp").iterdir()).chmod(0o777)
    loop = load(image).double
    assert loop(np.float32(1.5)) == 3
    assert not isinstance(loop._cache, FunctionCache)
    assert "NUMBA_CACHE_DIR" in caplog.text
    assert len(caplog.messages) == 1


def test_a_user_without_a_home_gets_no_folder_named_like_one(
    image, tmp_path, monkeypatch
):
    def unknown(_):
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    can = os.access
    unwritable = image.with_name("__pycache__")
    monkeypatch.setattr(os, "access", lambda p, mode: p != unwritable and can(p, mode))
    monkeypatch.chdir(tmp_path)
    assert load(image).double(np.float32(1.5)) == 3
    assert not Path("~").exists()


def test_compiled_loops_of_an_image_are_reused(image, monkeypatch):
    image.with_name("__pycache__").unlink()
    assert load(image).double(np.float32(1.5)) == 3  # as its build does
    of_image = FunctionCache.__init__

    def read_only(cache, function):
        if not numba.config.CACHE_DIR:
            raise RuntimeError
        of_image(cache, function)

    monkeypatch.setattr(FunctionCache, "__init__", read_only)
    loop = load(image).double
    assert loop(np.float32(1.5)) == 3
    assert sum(loop.stats.cache_hits.values()) == 1
    assert "tmp" in Path(loop._cache.cache_path).parts[-3]


def test_a_full_disk_does_not_end_what_compiles(tmp_path, monkeypatch, caplog):
    path = tmp_path / "loop.py"
    path.write_text(LOOP)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", full)
    assert load(path).double(np.float32(1.5)) == 3
    compiled_module._say_not_kept.cache_clear()
    assert "No space left on device" in caplog.text


def double(x):
    return x + x


def negate(x):
    return -x


def negate_twice_as_much(x):
    return negate(double(x))


def build(kernel):
    inner = inlined_kernel(kernel)

    def run(x):
        return inner(x)

    return specialized(run, kernel)


def test_a_plain_function_is_compiled_with_those_that_it_calls():
    assert build(negate_twice_as_much)(np.float32(1.5)) == -3


def test_each_kernel_has_a_loop_of_its_own_in_memory_and_on_disk():
    one, other = build(double), build(negate)
    assert (one(np.float32(1)), other(np.float32(1))) == (2, -1)
    again = build(double), build(negate)
    assert [loop(np.float32(1)) for loop in again] == [2, -1]
    assert [sum(loop.stats.cache_hits.values()) for loop in again] == [1, 1]


def test_a_function_may_keep_the_order_of_its_operations():
    assert inlined_kernel(divide).targetoptions["fastmath"] == set()
    assert inlined_kernel(double).targetoptions["fastmath"]
    exact = inlined_kernel(double, is_as_written=True)
    assert exact.targetoptions["fastmath"] == set()
    assert as_written(lambda x: x).is_as_written


def test_a_loop_that_closes_over_others_is_not_kept_on_disk_without_their_names():
    inner = inlined_kernel(double)
    loop = compiled(lambda x: inner(x))
    assert not isinstance(loop._cache, FunctionCache)


def test_machine_code_of_a_release_whose_classes_are_gone_is_compiled_again(tmp_path):
    text = (
        "from typing import NamedTuple\n"
        "from persia_torchrec.jit.compiled import compiled\n\n\n"
        "class NAME(NamedTuple):\n    x: float\n\n\n"
        "@compiled\ndef first(pair):\n    return pair.x\n"
    )

    def run(name):
        (tmp_path / "pairs.py").write_text(text.replace("NAME", name))
        code = f"import pairs; assert pairs.first(pairs.{name}(1.5)) == 1.5"
        path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
        environment = os.environ | {"PYTHONPATH": path}
        # Else Python's own cache takes two texts of one second for the same.
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        subprocess.run(command, check=True, env=environment)

    run("Old")
    assert list(tmp_path.glob("__pycache__/*.nbi"))
    run("New")


def test_numba_has_the_private_names_that_the_cache_needs():
    dispatcher = compiled(double)
    assert isinstance(dispatcher._cache, FunctionCache)
    assert list(inspect.signature(FunctionCache._index_key).parameters) == [
        "self",
        "sig",
        "codegen",
    ]
    version = tuple(map(int, numba.__version__.split(".")[:2]))
    assert CHECKED_WITH[0] <= version
    # intrinsics.unowned sets the first two members of an array to nothing.
    array = default_manager.lookup(numba.typeof(np.zeros(1)))
    assert list(array._fields[:2]) == ["meminfo", "parent"]


def test_no_other_file_uses_private_names_of_numba():
    root = Path(persia_torchrec.__file__).parent
    names = "|".join(NUMBAS_PRIVATE_NAMES)
    used = re.compile(rf"\.({names})\b|def _index_key")
    for path in root.rglob("*.py"):
        is_adapter = path == Path(compiled_module.__file__)
        assert bool(used.search(path.read_text())) == is_adapter, path


ARGUMENTS = [
    np.zeros(2),
    np.zeros(2, np.float32),
    np.zeros((2, 2)),
    np.zeros((2, 2)).T,
    np.zeros(4)[::2],
    read_only(np.zeros(2)),
    (np.zeros(2), None),
    (np.zeros(2), np.uint64(1)),
    1,
    1.0,
    np.int32(1),
    True,
    None,
]


@pytest.mark.parametrize("one", range(len(ARGUMENTS)))
def test_types_of_arguments_differ_where_numbas_do(one):
    for other in ARGUMENTS:
        is_same = compiled_module._type_of(ARGUMENTS[one]) == compiled_module._type_of(
            other
        )
        assert is_same == (numba.typeof(ARGUMENTS[one]) == numba.typeof(other))
