"""The script for machines with a GPU, run here with a folder of one small wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "run.sh"
SOME_OF_IT = "tests/persia/test_kjt.py"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    info = "carried-1.0.dist-info"
    with zipfile.ZipFile(folder / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "print('imported from the folder')")
        metadata = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def run(*arguments, python=sys.executable):
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        check=False,
        env={**os.environ, "PYTHON": str(python)},
        text=True,
        capture_output=True,
        timeout=170,
    )


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_it_runs_the_tests_marked_gpu_or_reports_that_there_is_no_device(wheels):
    result = run(wheels, "tests", "-p", "carried", SOME_OF_IT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "imported from the folder" in result.stdout
    if not torch.cuda.is_available():
        assert "devices: none, so that tests marked gpu are skipped" in result.stderr
        assert f"| {SOME_OF_IT} | 0 | 0 | 1 |" in result.stdout
        assert "1 skipped: no CUDA device" in result.stdout


def python_that(folder, *, says="", fails=""):
    """Return a program that says how it is called, and fails for some arguments."""
    python = folder / "python"
    cases = f"*{fails}*) exit 3 ;;" if fails else ""
    python.write_text(
        f'#!/bin/sh\ncase "$*" in {cases} -m\\ pip*) ;; -m*) echo "$@" ;; '
        f"-) {says} ;; esac\n"
    )
    python.chmod(0o755)
    return python


def test_its_status_is_that_of_the_part_that_failed(tmp_path):
    for fails in ("pytest", "benchmarks\\ dlrm"):
        result = run(tmp_path, python=python_that(tmp_path, fails=fails))
        assert result.returncode == 3, result
    assert run(tmp_path, "dlrm", python=python_that(tmp_path)).returncode == 0


def test_without_a_part_all_run_and_without_a_device_the_benchmarks_are_small(tmp_path):
    tests, *lines = run(tmp_path, python=python_that(tmp_path)).stdout.splitlines()
    assert tests.startswith("-m pytest -q -m gpu ")
    assert {
        "tests/gpu/test_device.py",
        "tests/sharding/test_on_device.py",
        "tests/persia/ctx/test_base_ctx.py",
        "tests/integration/test_same_as_torchrec.py",
    } <= set(tests.split())
    *lines, sanitized = lines
    assert lines == ["-m tests.gpu.job", "-m benchmarks dlrm --tiny"]
    assert sanitized.endswith("-p tests.gpu.sanitizer tests/sharding/test_on_device.py")
    python = python_that(tmp_path, says="echo 1")
    *_, line = run(tmp_path, "dlrm", "--dims", "64", python=python).stdout.splitlines()
    assert line == "-m benchmarks dlrm --dims 64"
    *_, line = run(tmp_path, "servers", python=python).stdout.splitlines()
    assert line == "-m benchmarks servers"


@pytest.mark.long
def test_packages_are_installed_once_into_a_folder_that_stays(
    wheels, tmp_path, monkeypatch
):
    archive = tmp_path / "carried"
    shutil.copytree(wheels, archive)
    (tmp_path / "fbgemm_gpu.py").write_text("print('of the archive')")
    pack = ["tar", "-C", tmp_path, "-cJf", archive / "fbgemm.tar.xz", "fbgemm_gpu.py"]
    subprocess.run(pack, check=True)
    # Of the same name as the archive's, which is taken.
    shutil.copy(*archive.glob("*.whl"), archive / "fbgemm_gpu_cpu-1-py3-none-any.whl")
    monkeypatch.setenv("PACKAGES", str(tmp_path / "packages"))
    for _ in range(2):
        result = run(archive, "setup")
        assert result.returncode == 0, result.stderr
        installed = {path.name for path in (tmp_path / "packages").iterdir()}
        assert {"carried.py", "fbgemm_gpu.py", "complete"} <= installed
        shutil.rmtree(archive)  # the second run needs nothing of it
        archive.mkdir()


def test_the_log_of_a_part_has_its_output(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGS", str(tmp_path / "logs"))
    assert run(tmp_path, "job", python=python_that(tmp_path)).returncode == 0
    assert (tmp_path / "logs/job.log").read_text() == "-m tests.gpu.job\n"
    python = python_that(tmp_path, fails="gpu.job")
    assert run(tmp_path, "job", python=python).returncode == 3


def test_an_unknown_part_is_an_error(tmp_path):
    result = run(tmp_path, "training")
    assert (result.returncode, result.stdout) == (2, "")
    expected = (
        "must be one of tests job dlrm sanitizer servers setup. Received: training"
    )
    assert expected in result.stderr


def test_a_python_without_torch_is_an_error(tmp_path):
    python = tmp_path / "python"  # of this one, without the packages of its venv
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    result = run(tmp_path, python=python)
    assert result.returncode == 1
    assert "without torch, numpy, numba" in result.stderr


def test_the_folder_of_the_wheels_is_required():
    result = run()
    assert (result.returncode, result.stderr[:6]) == (2, "usage:")


@pytest.mark.parametrize(
    ("arch", "arguments", "says"),
    [("90", [], "usage:"), ("sm_90", ["folder"], "ARCH must be none or a number")],
)
def test_the_parts_to_collect_are_required(arch, arguments, says, tmp_path):
    result = subprocess.run(
        ["bash", SCRIPT.with_name("collect.sh"), *arguments],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "ARCH": arch},
        text=True,
        capture_output=True,
    )
    assert (result.returncode, result.stderr[: len(says)]) == (2, says)
