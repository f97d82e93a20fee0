import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from persia_torchrec.version import __version__, require_set_that_fits

CHANGELOG = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()


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


def test_what_is_not_installed_is_not_looked_at(install):
    for versions in ({}, {"torch": "2.13.0"}, {"torchrec": "1.9.0"}):
        install(**versions)
        require_set_that_fits()


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
            {"torch": "2.13.0", "torchrec": "1.7.0"},
            r"torchrec==1.8.\* and fbgemm-gpu-cpu==1.8.\*",
        ),
    ],
)
def test_a_set_that_does_not_fit_is_told_what_does(install, versions, fits):
    install(**versions)
    with pytest.raises(ImportError, match=fits) as caught:
        require_set_that_fits()
    assert f"Received: torch {versions['torch']}" in str(caught.value)


def test_the_changelog_has_this_version_below_what_is_unreleased():
    unreleased, latest, *_ = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert unreleased == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)", latest)


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
