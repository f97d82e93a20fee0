"""fbgemm's wheel cut to one architecture: what stays in a library, and where."""

import re
import subprocess
import sys
import zipfile
from struct import pack

import pytest

from tests.gpu import prune_fbgemm
from tests.gpu.prune_fbgemm import MACHINE_CODE, prune

PTX = 1
HEAD = 64  # of a kernel


def kernel(code, arch, kind=MACHINE_CODE, head=HEAD):
    entry = pack("<HHIQ12xI", kind, 0x101, head, len(code), arch)
    return entry.ljust(head, b"\1") + code


def container(*kernels):
    body = b"".join(kernels)
    return pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*sections):
    """Return an ELF file with named sections, and one of their names."""
    names, offsets = b"\0", []
    for name, _ in [*sections, (b".shstrtab", b"")]:
        offsets.append(len(names))
        names += name + b"\0"
    bodies = [body for _, body in sections] + [names]
    starts = [64 + sum(map(len, bodies[:n])) for n in range(len(bodies))]
    first = 64 + sum(map(len, bodies))
    num = len(bodies)
    head = pack(
        "<16s2HI3QI6H",
        *(b"\x7fELF\2\1\1", 3, 62, 1, 0, 0, first, 0, 64, 0, 0, 64, num, num - 1),
    )
    table = [
        pack("<2I4Q2I2Q", name, 1, 0, 0, start, len(body), 0, 0, 1, 0)
        for name, start, body in zip(offsets, starts, bodies, strict=True)
    ]
    return head + b"".join(bodies) + b"".join(table)


KEPT, OTHER, LATER, SELDOM = (
    *(b"kept code" * 50, b"for others" * 40),
    *(b"text" * 30, b"codegen_lamb_kernel" * 9),
)
FAT = (
    container(kernel(OTHER, 80), kernel(KEPT, 90), kernel(OTHER, 100))
    + bytes(24)  # padding
    + container(kernel(LATER, 90, kind=PTX), kernel(SELDOM, 90), kernel(b"", 90))
)
LIBRARY = library((b".text", b"90" * 99), (b".nv_fatbin", FAT), (b".data", b"rest"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "fbgemm_gpu_kernels.so"
    path.write_bytes(LIBRARY)
    return path


def test_kernels_of_one_architecture_stay_where_they_were(path):
    assert prune(path, 90) == (
        2 * len(OTHER) + len(KEPT) + len(LATER) + len(SELDOM),
        len(KEPT),
    )
    expected = LIBRARY
    for gone in (OTHER, LATER, SELDOM):
        expected = expected.replace(gone, bytes(len(gone)))
    assert path.read_bytes() == expected


def test_a_library_that_nothing_starts_loses_all(path):
    unused = path.rename(path.with_name("fbgemm_gpu_vbe.so"))
    assert prune(unused, 90)[1] == 0
    assert KEPT not in unused.read_bytes()


def test_a_library_without_kernels_is_left_alone(path):
    for content in (library((b".text", KEPT)), library()):
        path.write_bytes(content)
        assert prune(path, 90) == (0, 0)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("fat", "message"),
    [
        (b"\1" * 32, "A container must begin with 0xba55ed50"),
        (container(kernel(KEPT, 90))[:-8], "must begin with .* and end before"),
        (container(kernel(KEPT, 90)[:-8]), "A kernel must end with its container"),
        (container(kernel(KEPT, 90, head=8)), "A kernel must end with its container"),
    ],
)
def test_a_section_of_another_layout_is_an_error(path, fat, message):
    path.write_bytes(library((b".nv_fatbin", fat)))
    with pytest.raises(ValueError, match=message):
        prune(path, 90)


def prune_wheel(folder, arch):
    script = [sys.executable, prune_fbgemm.__file__, "fbgemm.whl", "out.tar.xz"]
    return subprocess.run(
        [*script, "--arch", arch],
        check=False,
        cwd=folder,
        text=True,
        capture_output=True,
    )


def test_a_wheel_becomes_an_archive(path, tmp_path):
    with zipfile.ZipFile(tmp_path / "fbgemm.whl", "w") as wheel:
        wheel.write(path, "fbgemm_gpu/kernels.so")
        wheel.writestr("fbgemm_gpu/__init__.py", "")
    result = prune_wheel(tmp_path, "90")
    assert re.search(r"out.tar.xz: 0.0 MiB", result.stdout), result
    (tmp_path / "site").mkdir()
    subprocess.run(
        ["tar", "-C", "site", "-xJf", "out.tar.xz"], cwd=tmp_path, check=True
    )
    prune(path, 90)
    folder = tmp_path / "site/fbgemm_gpu"
    assert (folder / "kernels.so").read_bytes() == path.read_bytes()
    assert (folder / "__init__.py").exists()
    assert "must have kernels for sm_75" in prune_wheel(tmp_path, "75").stderr
