"""The image that all roles share."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_versions_come_from_make_install_and_packages_from_the_users_index():
    (install,) = [run for run in instructions("RUN") if "make install" in run]
    assert 'DEVICE="$DEVICE"' in install
    assert "==" not in TEXT
    assert "://" not in TEXT
    assert instructions("ARG") == ["DEVICE=cpu", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"]


def test_copied_files_exist():
    for copy in instructions("COPY"):
        *sources, _target = copy.split()[1:]
        assert all((ROOT / source).exists() for source in sources)


@pytest.mark.slow
def test_the_package_is_imported_read_only_by_any_user_id_without_a_home(tmp_path):
    if subprocess.run(["unshare", "-Um", "true"], check=False).returncode:
        pytest.skip("this user may not make a namespace")
    mount = f'mount --bind "{ROOT}" "{ROOT}" && mount -o remount,ro,bind "{ROOT}"'
    user = "unshare --user --map-user=123456 --map-group=0"
    code = "import persia_torchrec.store.warm_up"
    variables = f'env -i PATH=/bin PYTHONPATH="{ROOT}" HOME=/proc TMPDIR="{tmp_path}"'
    python = f'{variables} "{sys.executable}" -c "{code}"'
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} && cd / && {user} {python}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "mount: " in run.stderr:
        pytest.skip("this user may not mount")
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("NUMBA_CACHE_DIR") == 1
    assert (tmp_path / "persia_torchrec-123456").is_dir()
