"""PERSIA's import paths load nothing until used; previous paths lead to modules."""

import importlib
import json
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest

import persia_torchrec
from persia_torchrec.moved import MOVED
from tests.support.repository import ROOT

DOORS = [
    *("ctx", "data", "distributed", "embedding.data", "helper", "k8s_utils"),
    *("launcher", "prelude", "service", "utils", "worker"),
]
COMMANDS = [
    "checkpoint.from_persia",
    *("launch.coordinator", "launch.script", "launch.supervisor", "launch.torchrun"),
]
MAX_TOP_MODULES = 14


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
    assert len(top - {*DOORS, "bench"}) <= MAX_TOP_MODULES
    assert find_spec("persia_torchrec.wire") is not None  # a previous path
    assert not (ROOT / "persia_torchrec/wire").is_dir()


@pytest.mark.parametrize("path", [path for path, now in MOVED.items() if now])
def test_a_previous_path_warns_and_has_the_names_of_its_module(path):
    previous = f"persia_torchrec.{path}"
    sys.modules.pop(previous, None)
    with pytest.warns(FutureWarning, match=f"{previous} has moved: import persia_"):
        module = importlib.import_module(previous)
    for now in MOVED[path]:
        found = importlib.import_module(f"persia_torchrec.{now}")
        for name in [name for name in vars(found) if not name.startswith("_")]:
            assert getattr(module, name) is not None, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_each_module_that_a_previous_path_leads_to_has_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for now in {name for names in MOVED.values() for name in names}:
            assert find_spec(f"persia_torchrec.{now}") is not None, now


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_previous_command_runs_with_a_warning(command):
    done = run("-m", f"persia_torchrec.{command}", "--help")
    assert done.returncode == 0, done.stderr
    assert f"persia_torchrec.{command} has moved" in done.stderr
    assert "usage: python -m persia_torchrec." in done.stdout


@pytest.mark.parametrize(
    ("door", "name", "meant"),
    [
        ("data", "Dataloder", "DataLoader"),
        ("data", "Dataloader", "DataLoader"),
        ("data", "DataLoder", "DataLoader"),
        ("data", "StreamDataset", "StreamingDataset"),
        ("data", "PersiaDataset", "IterableDataset"),
        ("embedding.data", "PersiaBatches", "PersiaBatch"),
        ("ctx", "TrainCTX", "TrainCtx"),
        ("ctx", "DataLoader", "persia_torchrec.data.DataLoader"),
        ("data", "PersiaBatch", "persia_torchrec.embedding.data.PersiaBatch"),
    ],
)
def test_a_name_that_is_misspelt_learns_what_is_meant(door, name, meant):
    with pytest.raises(ImportError, match=rf"{name}.*Did you mean '{meant}'\?"):
        exec(f"from persia_torchrec.{door} import {name}")
    assert not hasattr(importlib.import_module(f"persia_torchrec.{door}"), name)


@pytest.mark.parametrize(
    ("name", "meant"), [("TrainCtx", "ctx.TrainCtx"), ("Dataloder", "data.DataLoader")]
)
def test_a_name_that_stands_elsewhere_learns_where(name, meant):
    with pytest.raises(ImportError, match=f"Did you mean 'persia_torchrec.{meant}'?"):
        exec(f"from persia_torchrec import {name}")
    with pytest.raises(AttributeError, match=f"Did you mean 'persia_torchrec.{meant}'"):
        getattr(persia_torchrec, name)


def test_a_name_that_is_near_to_none_is_missing():
    with pytest.raises(ImportError, match="cannot import name 'nothing'") as missing:
        from persia_torchrec.data import nothing  # noqa: F401
    assert "mean" not in str(missing.value)


def test_the_benchmarks_say_where_they_are():
    done = run("-m", "persia_torchrec.bench", "dlrm", "--tiny")
    assert done.returncode == 2
    assert "python -m benchmarks dlrm --tiny" in done.stderr
