import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from persia_torchrec.version import (
    NEEDS,
    OLDEST_TORCH,
    TORCH,
    __version__,
    require_set_that_fits,
)
from tests.support.repository import ROOT

pytestmark = pytest.mark.slow

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def install(monkeypatch):
    """Let packages be installed, by name and version, and no others."""

    def install(**versions):
        versions = {name.replace("_", "-"): text for name, text in versions.items()}

        def version(name):
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    return install


@pytest.mark.parametrize("minor", [11, 12, 13, 14, 15])
def test_a_torch_has_its_torchrec_and_its_fbgemm(install, minor):
    twin = f"1.{minor - 5}.1"
    install(torch=f"2.{minor}.0+cpu", torchrec=twin, fbgemm_gpu_cpu=twin)
    require_set_that_fits()
    install(torch=f"2.{minor}.0+cu130", torchrec=twin, fbgemm_gpu=twin)
    require_set_that_fits()


@pytest.mark.parametrize(
    ("nvidia_smi", "build"),
    [(None, "fbgemm-gpu-cpu"), ("/usr/bin/nvidia-smi", "fbgemm-gpu")],
)
def test_without_torch_the_whole_set_is_installed_by_two_commands(
    install, monkeypatch, nvidia_smi, build
):
    install()
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(shutil, "which", lambda _: nvidia_smi)
    message = (
        "Received: no torch and no torchrec and no fbgemm_gpu. Run: pip install "
        f"'torch==2.13.*' '{build}==1.8.*' {NEEDS} && "
        "pip install --no-deps 'torchrec==1.8.*'"
    )
    with pytest.raises(ImportError, match=re.escape(message) + "$"):
        require_set_that_fits()


def test_an_fbgemm_that_does_not_load_learns_what_does(install, monkeypatch, tmp_path):
    install(torch="2.13.0", torchrec="1.8.0", fbgemm_gpu="1.8.0")
    (tmp_path / "fbgemm_gpu.py").write_text("raise OSError('libcuda.so: not there')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
    fits = "libcuda.so: not there. Run: .* && pip install 'fbgemm-gpu-cpu==1.8.*'$"
    with pytest.raises(ImportError, match=fits):
        require_set_that_fits()


def test_the_extras_hold_what_the_commands_install():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert set(extras["torchrec-needs"]) == set(shlex.split(NEEDS)) - {"tqdm"}
    for name, build in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        assert extras[name][:2] == [f"torch==2.{TORCH}.*", f"{build}==1.{TORCH - 5}.*"]


@pytest.mark.parametrize(
    ("torch", "missing", "command"),
    [
        (
            "2.13.0+cpu",
            ("torchrec", "fbgemm_gpu"),
            f"pip install 'fbgemm-gpu-cpu==1.8.*' {NEEDS} && "
            "pip install --no-deps 'torchrec==1.8.*'",
        ),
        ("2.14.1+cu130", ("fbgemm_gpu",), "pip install 'fbgemm-gpu==1.9.*'"),
        (
            "2.11.0",
            ("torchrec",),
            f"pip install {NEEDS} iopath && pip install --no-deps 'torchrec==1.6.*'",
        ),
    ],
)
def test_missing_packages_are_named_with_the_command(
    install, monkeypatch, torch, missing, command
):
    install(torch=torch)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    no = " and no ".join(missing)
    message = f"beside torch {torch}. Received: no {no}. Run: {command}"
    with pytest.raises(ImportError, match=re.escape(message) + "$"):
        require_set_that_fits()


def test_the_command_for_torchrecs_needs_is_what_the_extras_have():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["torchrec-needs"]
    own = {re.split(r"\W", need)[0] for need in project["dependencies"]}
    needs = set(NEEDS.replace("'", "").split())
    assert {need for need in needs if need not in own} == {*extra}


def test_the_installation_offers_the_torch_that_the_package_takes():
    script = (ROOT / "components/install.sh").read_text()
    oldest, newest = re.findall(r"^oldest=(\d+) newest=(\d+)", script, re.M)[0]
    assert int(oldest) == OLDEST_TORCH
    assert (
        f'"torch>=2.{oldest},<2.{int(newest) + 1}"'
        in (ROOT / "pyproject.toml").read_text()
    )
    makefile = (ROOT / "Makefile").read_text()
    assert f"VERSIONS ?= 2.{oldest} 2.{newest}\n" in makefile


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("2.10",), "TORCH must be 2.11 to 2.14, or a release of one. Received: 2.10"),
        (("2.13", "tpu"), "DEVICE must be cpu or cuda. Received: tpu"),
    ],
)
def test_an_installation_that_cannot_be_is_an_error_before_it_begins(
    tmp_path, words, message
):
    folder = tmp_path / "venv"
    command = ["bash", ROOT / "components/install.sh", folder, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == message
    assert not folder.exists()


def test_each_door_to_torchrec_reports_that_it_is_missing():
    code = (
        "import os, sys\n"
        "import torch\n"
        "sys.modules['torchrec'] = None\n"
        "for statement in sys.argv[1:]:\n"
        "    if pid := os.fork():\n"  # each without what the others have imported
        "        assert os.waitpid(pid, 0)[1] == 0, statement\n"
        "        continue\n"
        "    try:\n"
        "        exec(statement)\n"
        "    except ImportError as exc:\n"
        "        assert 'Received: no torchrec. Run: pip install' in str(exc), exc\n"
        "        assert exc.__suppress_context__ or exc.__context__ is None\n"
        "        os._exit(0)\n"
        "    os._exit(1)\n"
    )
    doors = [
        "from persia_torchrec.ctx import TrainCtx",
        "import persia_torchrec.data as d; d.CsvDataset",
        "from persia_torchrec import recoverable",
    ]
    subprocess.run([sys.executable, "-c", code, *doors], check=True)


@pytest.mark.parametrize(
    ("versions", "fits"),
    [
        (
            {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm_gpu_cpu": "1.8.0"},
            r"torch 2.14 install torchrec==1.9.\* and fbgemm-gpu-cpu==1.9.\*",
        ),
        (
            {"torch": "2.11.0", "torchrec": "1.8.0", "fbgemm_gpu": "1.6.0"},
            r"torch 2.11 install torchrec==1.6.\* and fbgemm-gpu==1.6.\*",
        ),
        (
            {"torch": "2.9.0", "torchrec": "1.4.0", "fbgemm_gpu_cpu": "1.4.0"},
            r"make install TORCH=2.11",
        ),
        (
            {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm_gpu": "1.8.0"},
            r"fbgemm-gpu fbgemm-gpu-cpu && pip install 'fbgemm-gpu-cpu==1.8.\*'",
        ),
        (
            {"torch": "2.13.0", "fbgemm_gpu": "1.8.0", "fbgemm_gpu_cpu": "1.8.0"},
            r"one build of fbgemm .* pip install 'fbgemm-gpu==1.8.\*'",
        ),
        (
            {"torch": "2.13.0", "torchrec": "1.7.0"},
            r"torchrec==1.8.\* and fbgemm-gpu-cpu==1.8.\*",
        ),
    ],
)
def test_a_set_that_does_not_fit_learns_what_does(install, versions, fits):
    install(**versions)
    with pytest.raises(ImportError, match=fits) as caught:
        require_set_that_fits()
    assert f"Received: torch {versions['torch']}" in str(caught.value)


def test_the_changelog_has_this_version_below_what_is_unreleased():
    unreleased, latest, *_ = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)", latest)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {__version__}\n" in citation
    assert latest.split()[1] == re.findall(r'released: "(.*)"', citation)[0].join("()")


def test_the_commands_of_pages_install_this_version():
    names = r"persia_torchrec-([\d.]+)-py3|persia-torchrec:(\d[\d.]*)"
    found = [
        (page.name, wheel or image)
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for wheel, image in re.findall(names, page.read_text())
    ]
    assert len(found) > 5
    assert [one for one in found if one[1] != __version__] == []


def test_the_sharders_look_at_it_before_they_import_torchrec():
    """In a process of its own, where the packages say that they are others."""
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "metadata.version = lambda name: '1.3.0'\n"
        "try:\n"
        "    from persia_torchrec import remote_sharders\n"
        "except ImportError as exc:\n"
        "    assert 'Received: torch 1.3.0' in str(exc), exc\n"
        "    assert 'torchrec' not in sys.modules\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
