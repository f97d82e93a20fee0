"""Anonymous memory that survives the process, by its file descriptor.

``TwoHalves`` keeps a value there that is replaced as a whole, as the tables of a store
are (``docs/formats/memory.md``): written to the half that is not published, and then
published by one word. A process that is killed leaves the previous value or the new.

    0        magic
    8        published: the half (bit 63), and the length of the value (bits 0 to 31)
    4 KiB    first half
    4 GiB    second half

Small pages make lookups and updates up to a third slower (``docs/formats/memory.md``),
so that huge ones are looked for: of a memfd where the system gives them to shared
memory, else of a tmpfs that is mounted for it.
"""

import contextlib
import ctypes
import logging
import os
import re
import socket
import struct
from pathlib import Path

from persia_torchrec.errors import ConfigError, FrameError

logger = logging.getLogger(__name__)

AUTO, PRIVATE = "auto", "private"  # values of memory_dir

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000

_MAGIC = b"PJOB\0\0\0\1"  # the last byte is the version
_PUBLISHED = 8
_HALVES = 2**12, 2**32


class TwoHalves:
    """A value in a file of which a descriptor is known; owned by its caller."""

    def __init__(self, memory: int) -> None:
        self._file = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
        if not os.fstat(self._file).st_size:
            os.pwrite(self._file, _MAGIC, 0)

    def read(self) -> bytes:
        """Return the value, empty at first; FrameError if the file holds another."""
        head = os.pread(self._file, 16, 0)
        half, length = self._published()
        value = os.pread(self._file, length, _HALVES[half])
        if not head.startswith(_MAGIC) or len(value) != length:
            raise FrameError(
                f"A memory with two halves must begin with {_MAGIC!r}, and have what "
                f"is published. Received: {head!r}, and {len(value)} bytes."
            )
        return value

    def write(self, value: bytes) -> None:
        """Replace the value."""
        half = 1 - self._published()[0]
        left, place = memoryview(value), _HALVES[half]
        while left:
            written = os.pwrite(self._file, left, place)
            left, place = left[written:], place + written
        os.pwrite(self._file, struct.pack("<Q", half << 63 | len(value)), _PUBLISHED)

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._file)

    def _published(self) -> tuple[int, int]:
        word = os.pread(self._file, 8, _PUBLISHED).ljust(8, b"\0")
        (published,) = struct.unpack("<Q", word)
        return published >> 63, published & (2**32 - 1)


def open_memory(memory_dir: str) -> int:
    """Return the descriptor of memory without a name; log what it is and costs."""
    if memory_dir in ("", AUTO):
        descriptor, kind = _open_shared(seeks_huge_pages=memory_dir == AUTO)
    else:
        kind = f"a file of {memory_dir}, at the speed of that"
        try:
            descriptor = os.open(memory_dir, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"memory_dir must be {AUTO}, {PRIVATE}, or a folder on tmpfs or on a "
                f"local disk, for example ext4 or xfs. Received: {memory_dir!r} "
                f"({exc})."
            ) from exc
    if memory_dir:
        logger.info("memory that survives the process: %s", kind)
    return descriptor


def _open_shared(*, seeks_huge_pages: bool) -> tuple[int, str]:
    if seeks_huge_pages:
        enabled = ""
        with contextlib.suppress(OSError):  # a kernel without huge pages
            enabled = _SHMEM_ENABLED.read_text()
        if not re.search(r"\[(always|within_size|force)\]", enabled):
            descriptor = _open_in_own_mount()
            if descriptor is not None:
                return descriptor, "huge pages, of a tmpfs that only this job sees"
        else:
            return _memfd(), "huge pages, of a memfd"
    return _memfd(), (
        "small pages: lookups and updates may take a third longer than in huge ones "
        "(docs/formats/memory.md)"
    )


def _memfd() -> int:
    descriptor = os.memfd_create("persia_torchrec", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _open_in_own_mount() -> int | None:
    """Return a file on a tmpfs with huge pages, or None where the system allows none.

    Any user may mount one in a user and mount namespace of its own. A child has these
    for a moment: the file system lives as long as the file is open.
    """
    libc = ctypes.CDLL(None)  # before the fork: another thread may hold its lock
    receiver, sender = socket.socketpair()
    with receiver, sender:
        pid = os.fork()
        if pid == 0:
            try:
                socket.send_fds(sender, [b"."], [_mount_and_open(libc)])
            finally:
                os._exit(0)
        sender.close()
        flags = socket.MSG_CMSG_CLOEXEC
        _, descriptors, _, _ = socket.recv_fds(receiver, 1, 1, flags)
        os.waitpid(pid, 0)
    return descriptors[0] if descriptors else None


def _mount_and_open(libc: ctypes.CDLL) -> int:
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        os._exit(1)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"huge=within_size,size=0"):
        os._exit(1)
    return os.open("/tmp/memory", os.O_RDWR | os.O_CREAT, 0o600)
