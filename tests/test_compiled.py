import importlib.util

import numpy as np
import pytest

from persia_torchrec.compiled import (
    compiled,
    compiled_as_written,
    inlined,
    read_only,
    sources_stamp,
    telling_of_compilation,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "loops.py").write_text("@compiled\ndef f(): pass\n")
    (tmp_path / "plain.py").write_text("def g(): pass\n")
    return tmp_path


def test_loops_are_compiled_anew_when_a_file_with_loops_has_changed(folder):
    before = sources_stamp(folder)
    assert sources_stamp(folder) == before
    (folder / "plain.py").write_text("def g(): return 1\n")
    assert sources_stamp(folder) == before
    (folder / "inner" / "loops.py").write_text("@compiled\ndef f(): return 1\n")
    assert sources_stamp(folder) != before
    changed = sources_stamp(folder)
    (folder / "new.py").write_text("@inlined\ndef h(): pass\n")
    assert sources_stamp(folder) != changed


@pytest.mark.parametrize("decorate", [compiled, compiled_as_written, inlined])
def test_machine_code_is_kept_for_one_state_of_the_sources(decorate):
    def double(x):
        return 2 * x

    dispatcher = decorate(double)
    assert dispatcher(np.float32(1.5)) == 3
    signature = dispatcher.signatures[0]
    codegen = dispatcher.targetctx.codegen()
    stamp = dispatcher._cache._index_key(signature, codegen)[-1]
    assert len(stamp) == 64


def test_an_array_that_was_passed_through_cannot_be_written_to():
    array = np.arange(6)[::2]
    view = read_only(array)
    assert view.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    array[0] = 7


def test_a_loop_that_is_compiled_is_told_of_and_one_that_is_loaded_is_not(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(
        "from persia_torchrec.compiled import compiled\n\n\n"
        "@compiled\ndef double(x):\n    return 2 * x\n"
    )

    def told():
        spec = importlib.util.spec_from_file_location("loop", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        said = []
        with telling_of_compilation(said.append):
            assert module.double(np.float32(1.5)) == 3
        return said

    assert told() == [True, False]
    assert told() == []
