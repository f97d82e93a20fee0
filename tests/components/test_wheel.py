"""The wheel, without what it needs: installed beside it and used outside of a checkout.

``make wheel`` installs it in a fresh environment, and trains there.
"""

import re
import sys
import tarfile
import zipfile

import pytest

from persia_torchrec.version import __version__
from tests.support import wheel
from tests.support.components import COMPONENTS
from tests.support.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

TORCHX = [sys.executable, "-m", "torchx.cli.main"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return wheel.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def run(built, tmp_path_factory):
    """Run a command in an empty folder, with the wheel installed in another one."""
    site, bare = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("bare")
    zipfile.ZipFile(built.wheel).extractall(site)

    def run(*command):
        return wheel.run([*map(str, command)], cwd=bare, PYTHONPATH=str(site))

    run.bare = bare
    return run


def test_examples_and_types_are_in_it_and_no_machine_code(built):
    names = set(zipfile.ZipFile(built.wheel).namelist())
    of_checkout = {
        f"persia_torchrec/{path.relative_to(ROOT)}"
        for path in (ROOT / "examples").rglob("*")
        if path.is_file() and path.suffix in (".py", ".yml", ".md", ".json")
    }
    assert of_checkout <= names
    assert {"persia_torchrec/__init__.pyi", "persia_torchrec/py.typed"} <= names
    assert not [name for name in names if name.endswith((".nbi", ".nbc", ".pyc"))]
    with tarfile.open(built.sdist) as sdist:
        inner = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "examples/quickstart.py"} <= inner


def test_torchx_knows_our_components_and_its_own(run):
    listed = re.findall(r"\d+\. (\S+)", run(*TORCHX, "builtins"))
    assert {"dist.ddp", "utils.echo"} <= set(listed)
    ours = {name for name in listed if name.startswith("persia.")}
    assert ours == {f"persia.{name}" for name in COMPONENTS}


def test_a_job_is_of_this_machine_with_one_python_and_its_logs_stay(run):
    component = "persia.train_torchrec"
    options = "--dryrun", "-s", "local_cwd"
    shown = run(*TORCHX, "run", *options, component, "--script", "train.py")
    assert f"'args': [ '{sys.executable}'" in shown
    assert "python3'" not in shown.replace(sys.executable, "")
    assert re.search(
        r"'combined': '.*/runs/persia-\w+/logs/server/0/combined.log'", shown
    )


def test_the_command_has_the_version_and_copies_the_examples(run):
    code = "from persia_torchrec.command import main; main()"
    command = (sys.executable, "-c", code)
    assert run(*command, "--version").split()[-1] == __version__
    run(*command, "examples", "mine")
    mine, ours = run.bare / "mine/quickstart.py", ROOT / "examples/quickstart.py"
    assert mine.read_bytes() == ours.read_bytes()
