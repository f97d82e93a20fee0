"""Cut fbgemm's CUDA wheel to one GPU architecture, to carry it where no index is.

    python tests/gpu/prune_fbgemm.py fbgemm_gpu-1.6.0-...whl fbgemm.tar.xz --arch 90

The wheel has 465 MB, the archive some 42 MiB. Its libraries hold the same kernels for
each architecture, in the section ``.nv_fatbin``. A kernel that is not kept is filled
with zeros where it is, so that nothing else of a library moves, and compresses to
nothing. Kept are those of one architecture that the tests and the benchmark start:
the libraries of ``UNUSED`` lose all, and kernels with a name of ``RARE`` are not kept.
Starting a missing kernel is torch's error "no kernel image is available".

Layout of the section, all numbers little-endian, sizes in bytes:

    container   u32 magic, u16 version, u16 size of this header, u64 size of the rest
      entry     u16 kind, u16 version, u32 size of this header, u64 size of the code,
                12 bytes, u32 architecture at 28, ... then the code
      entry     ...
    padding     zeros, up to the next container

Takes some minutes and 3 GB of the temporary folder. Needs GNU tar and xz.
"""

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from typing import NamedTuple

SECTION = b".nv_fatbin"
MACHINE_CODE = 2
"""The kind of an entry with code for one architecture; others are compiled later."""

UNUSED = ("_vbe.so", "_gwd.so", "_inference.so", "_index_select.so")
"""Variable batches, global weight decay, inference, and selection: no test of these."""

RARE = (
    b"rowwise_adagrad_with_counter",
    b"partial_rowwise",
    b"codegen_lamb",
    b"codegen_lars",
    b"codegen_none",
)
"""Optimizers that neither tests nor the benchmark give to plain TorchRec."""

LEFT_OUT = "fbgemm_gpu/left_out.txt"
"""Names them, for tests that start their kernels all the same."""

_CONTAINER, _MAGIC = Struct("<IHHQ"), 0xBA55ED50
_ENTRY = Struct("<HHIQ12xI")
_ELF = Struct("<16s2HI3QI6H")
_SECTION = Struct("<2I4Q2I2Q")
_PADDING = 8


class Kernel(NamedTuple):
    """The code of one entry, and for what it is."""

    start: int
    stop: int
    kind: int
    arch: int


def fat_binaries(data: mmap) -> tuple[int, int]:
    """Return where the section begins and ends in a library; equal without one."""
    *_, first, _flags, _size, _, _, each, num, names = _ELF.unpack_from(data)
    sections = [_SECTION.unpack_from(data, first + each * n) for n in range(num)]
    if not sections:
        return 0, 0
    strings = sections[names][4]
    for name, _, _, _, start, size, *_ in sections:
        at = strings + name
        if data[at : data.find(b"\0", at)] == SECTION:
            return start, start + size
    return 0, 0


def kernels(data: mmap, start: int, stop: int) -> Iterator[Kernel]:
    """Yield all kernels of a section.

    Raises:
        ValueError: the section is not as described above.
    """
    while start < stop:
        magic, _, header, size = _CONTAINER.unpack_from(data, start)
        if not magic:
            start += _PADDING
            continue
        end = start + header + size
        if magic != _MAGIC or end > stop:
            raise ValueError(
                f"A container must begin with {_MAGIC:#x} and end before {stop}. "
                f"Received: {magic:#x} at {start}, with an end at {end}."
            )
        entry = start + header
        while entry < end:
            kind, _, own, length, arch = _ENTRY.unpack_from(data, entry)
            if own < _ENTRY.size or entry + own + length > end:
                raise ValueError(
                    f"A kernel must end with its container, at {end}. Received: one "
                    f"at {entry} of {own} + {length} bytes."
                )
            yield Kernel(entry + own, entry + own + length, kind, arch)
            entry += own + length
        start = end


def prune(path: Path, arch: int) -> tuple[int, int]:
    """Fill what is not kept with zeros; return how many bytes were, and are, kept."""
    before = after = 0
    with path.open("r+b") as file, mmap(file.fileno(), 0) as data:
        for kernel in kernels(data, *fat_binaries(data)):
            size = kernel.stop - kernel.start
            before += size
            if _is_kept(path, data, kernel, arch):
                after += size
            else:
                data[kernel.start : kernel.stop] = bytes(size)
    return before, after


def _is_kept(path: Path, data: mmap, kernel: Kernel, arch: int) -> bool:
    if path.name.endswith(UNUSED) or (kernel.kind, kernel.arch) != (MACHINE_CODE, arch):
        return False
    return all(data.find(name, kernel.start, kernel.stop) < 0 for name in RARE)


def pack(folder: Path, archive: Path) -> None:
    """Write all of a folder to an archive."""
    names = sorted(path.name for path in folder.iterdir())
    command = ["tar", "--owner=0", "--group=0", "-I", "xz -9e -T1"]
    subprocess.run([*command, "-C", folder, "-cf", archive, *names], check=True)


def main() -> None:
    """Do what the command line says; say what is left of each library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="90: H100 and H200 [90]")
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(given.wheel) as wheel:
            wheel.extractall(folder)
        (folder / LEFT_OUT).write_bytes(b"\n".join(RARE))
        left = 0
        for path in sorted(folder.rglob("*.so")):
            before, after = prune(path, given.arch)
            left += after
            print(
                f"{path.name}: {after / 1e6:.1f} of {before / 1e6:.1f} MB", flush=True
            )
        if not left:
            sys.exit(f"{given.wheel.name} must have kernels for sm_{given.arch}.")
        pack(folder, given.archive.resolve())
    print(f"{given.archive}: {given.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
