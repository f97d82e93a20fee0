"""PERSIA's import paths load nothing until they are used."""

import importlib
import json
import subprocess
import sys

import pytest

import persia_torchrec
from tests.support.repository import ROOT

DOORS = [
    *("ctx", "data", "distributed", "embedding.data", "helper", "k8s_utils"),
    *("launcher", "prelude", "service", "utils", "worker"),
]
MAX_TOP_MODULES = 9


def run(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("door", DOORS)
def test_a_door_loads_nothing_until_it_is_used(door):
    code = (
        f"import persia_torchrec.{door}, json, sys;"
        "print(json.dumps([m for m in sys.modules if m.startswith('persia_torchrec')]))"
    )
    loaded = json.loads(run("-c", code).stdout)
    packages = {"persia_torchrec", *("embedding" for _ in door.split(".")[1:])}
    parents = {f"persia_torchrec.{part}" for part in packages - {"persia_torchrec"}}
    assert set(loaded) == {"persia_torchrec", f"persia_torchrec.{door}"} | parents


def test_nothing_but_doors_and_foundations_stands_at_the_top():
    top = {path.stem for path in (ROOT / "persia_torchrec").glob("*.py")}
    assert len(top - {*DOORS}) <= MAX_TOP_MODULES


@pytest.mark.parametrize("door", [*DOORS, "embedding"])
def test_a_name_that_a_door_lacks_is_missing(door):
    found = importlib.import_module(f"persia_torchrec.{door}")
    lacks = f"module 'persia_torchrec.{door}' has no attribute 'nothing'"
    with pytest.raises(AttributeError, match=lacks):
        _ = found.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from persia_torchrec.{door} import nothing")


def test_a_name_that_the_package_lacks_is_missing():
    lacks = "module 'persia_torchrec' has no attribute 'nothing'"
    with pytest.raises(AttributeError, match=lacks):
        _ = persia_torchrec.nothing
