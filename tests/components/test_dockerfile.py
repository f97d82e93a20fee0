"""The image that all roles share."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

DOCKERFILE = ROOT / "components/Dockerfile"
TEXT = DOCKERFILE.read_text()


def instructions(name):
    joined = re.sub(r"\\\n\s*", "", TEXT)
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def test_the_linter_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    run = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_processes_belong_to_an_ordinary_user():
    assert instructions("USER") == [
        "1000"
    ]  # a number, which Kubernetes can tell from root


def test_versions_come_from_the_makefile_and_packages_from_the_users_index():
    (install,) = [run for run in instructions("RUN") if "make install" in run]
    assert 'DEVICE="$DEVICE"' in install
    assert "==" not in TEXT
    assert "://" not in TEXT
    assert instructions("ARG") == ["DEVICE=cpu", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"]


def test_what_is_copied_is_there():
    for copy in instructions("COPY"):
        *sources, _target = copy.split()[1:]
        assert all((ROOT / source).exists() for source in sources)
