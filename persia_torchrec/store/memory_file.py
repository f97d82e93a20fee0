"""The memory of a store in a file, which survives the process.

``docs/formats/memory.md`` has it to the byte:

    0         4 KiB             1 MiB ... 2 MiB          6 MiB    70 MiB    134 MiB
    | header | areas, see memory.py |    | reservations | tables | tables | reserved ...

The file is sparse: it is as long as all that may ever be reserved, and costs only what
is allocated. It is mapped once, as a whole, so that nothing moves when something grows,
and all that it holds is numbers and distances, so that any process may map it anywhere.

Loops never touch what is not allocated. Memory is allocated by ``fallocate`` before a
request needs it: where there is none left the request fails, and no later one is
killed by SIGBUS.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from persia_torchrec.arrays import Words
from persia_torchrec.errors import ConfigError, StoreError
from persia_torchrec.jit.kernel import LOST
from persia_torchrec.store import memory
from persia_torchrec.store.memory import (
    CHANGE,
    RECOVERY,
    REQUEST,
    TALLY,
    Area,
    require_sound,
)

logger = logging.getLogger(__name__)

MAGIC = int.from_bytes(b"PERSIAME", "little")
VERSION, READ_TOO = 5, (4,)
"""The layout of new files, and those before it that are used as they are."""

MAGIC_AT, VERSION_AT, BOOT, CAPACITY, CLASSES, STATE = 0, 1, 2, 4, 5, 6
PID, TIMES_OPENED, PUBLISHED, NUM_REGIONS, PARTITIONS, FIRST_AREA = range(7, 13)
FEATURES = 13
"""Words of the header. ``BOOT`` takes two; ``FEATURES`` are bits, of which none means
anything yet: what a file has that its reader must know."""

MAKING, IN_USE, CLOSED = range(3)
"""Values of ``STATE``."""

OFFSET, RESERVED, COMMITTED = range(3)
"""Columns of the lines of reservations, all in bytes; a fourth one is 0."""

FILE_BYTES = 2**43
_MIB = 2**20
_HEADER = Area(0, 64)
_REGIONS = Area(2 * _MIB, 2**19)
_TABLES = Area(6 * _MIB, 2**23), Area(70 * _MIB, 2**23)
_DATA = 134 * _MIB
_HEAD_BYTES = _MIB
_HEAD = Area(0, _HEAD_BYTES // 8)
_HUGE_PAGE = 2 * _MIB
_SMALL_STEP = 2**16
_LARGEST_STEP = 16 * _MIB
_NUM_FIXED = 4  # lines of the head, the lines themselves, and of both halves of tables
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DESCRIPTOR = re.compile(r"/proc/(self|\d+)/fd/\d+")


ROW_COLUMNS = [memory.WEIGHTS, memory.STATE, memory.NUM_STATE]
"""Columns of a layout that say what the rows look like."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class PublishedTable(msgspec.Struct):
    """A table as a memory file describes it; see ``docs/formats/memory.md``."""

    spec: dict[str, Any]
    arena: Count
    row: list[Count]
    remembered: Count
    thresholds: Count = 0
    is_dropped: bool = False

    def require_fits(self, layout: memory.Layout, widths: list[int]) -> None:
        """Reject a table whose rows are none of an arena of so many words a row."""
        num_bytes = int(layout[memory.STATE]) + 4 * int(layout[memory.NUM_STATE])
        fits = self.arena < len(widths) and 8 * widths[self.arena] - num_bytes in range(
            8
        )
        memory.require_sound(fits, "tables")
        if layout[ROW_COLUMNS].tolist() != self.row:
            raise StoreError(
                f"The rows of table {self.spec['name']!r} must have weights, state and "
                f"width at {layout[ROW_COLUMNS].tolist()}. Received: {self.row} in the "
                "memory file. Start the version that made it, or delete the file."
            )


class Published(msgspec.Struct):
    """The JSON of a memory file; ``notes`` and ``journal`` are 0 without any."""

    num_arenas: Count = 0
    tables: list[PublishedTable] = []
    notes: tuple[Count, Count] = (0, 0)
    journal: Count = 0


class MemoryFile:
    """A file that keeps a store's arrays: see ``StoreMemory``.

    One store at a time has it. ``path`` may be on tmpfs or a local disk; the path of a
    descriptor, as ``/proc/self/fd/3``, is that of a file that a parent handed over. The
    file is empty, does not exist, or is that of a store of the same capacity and number
    of logs, ``num_classes``.
    """

    def __init__(self, path: str, capacity_rows: int, num_classes: int) -> None:
        self.path = path
        self._file = _open_locked(path)
        try:
            self._map = self._map_file()
            self._words: Words = np.frombuffer(self._map, dtype=np.uint64)
            self._base = self._words.ctypes.data
            self._header = self.area(_HEADER)
            self._lines = self.area(_REGIONS).reshape(-1, 4)
            # Only advised ones do not come by fallocate.
            has_huge_pages = os.fstat(self._file).st_blksize >= _HUGE_PAGE
            self._step = _HUGE_PAGE if has_huge_pages else _SMALL_STEP
            self.is_new = bool(self._header[STATE] == MAKING)
            if self.is_new:
                self._make(capacity_rows, num_classes)
            else:
                self._require_usable(capacity_rows, num_classes)
                self._require_sound_lines()
            lines = self._lines[: int(self._header[NUM_REGIONS])]
            self._numbers = {
                self._base + offset: number
                for number, (offset, *_) in enumerate(lines.tolist())
            }
            self.tables = self._read_tables()
            if not self.is_new:
                self.rewind()
                self._begin()
                self._header[STATE] = IN_USE
        except BaseException:
            self.close(is_clean=False)
            raise
        logger.info(
            "memory %s is %s, in %s",
            path,
            "new" if self.is_new else "that of a previous process",
            "huge pages"
            if has_huge_pages
            else "small pages: lookups and updates may take a third longer than in "
            "huge ones (docs/formats/memory.md)",
        )

    def area(self, area: Area) -> Words:
        """Return an area of the head."""
        return area.of(self._words)

    def reserve(self, *num_words: int) -> list[Words]:
        """Reserve stretches behind all others; each can be allocated by itself."""
        return [self._reserve(num) for num in num_words]

    def find(self, address: int) -> Words:
        """Return all words of the reservation at an address."""
        require_sound(address in self._numbers, "distances to reservations")
        line = self._lines[self._numbers[address]]
        return self.area(Area(int(line[OFFSET]), int(line[RESERVED]) // 8))

    def commit(self, words: Words, num_words: int) -> int:
        """Allocate the first words; return how many may be used."""
        number = self._numbers[words.ctypes.data]
        if 8 * num_words > self._lines[number, COMMITTED]:
            self._allocate(number, 8 * num_words)
        return min(int(self._lines[number, COMMITTED]) // 8, words.size)

    def emptied(self, *stretches: Words) -> list[Words]:
        """Give the memory of stretches back; they read zeros when next allocated."""
        for words in stretches:
            line = self._lines[self._numbers[words.ctypes.data]]
            line[COMMITTED] = 0
            self._give_back(int(line[OFFSET]), int(line[RESERVED]))
        return list(stretches)

    def publish(self, tables: bytes) -> None:
        """Replace ``tables`` by one word, written last; keep what is reserved."""
        half = 1 - (int(self._header[PUBLISHED]) >> 63)
        area = _TABLES[half]
        if len(tables) > 8 * area.num_words:
            raise StoreError(
                f"The settings of all tables must fit {8 * area.num_words} bytes. "
                f"Received: {len(tables)} bytes. Start more servers with fewer tables."
            )
        self._allocate(2 + half, len(tables))
        bytes_at = self.area(area).view(np.uint8)
        bytes_at[: len(tables)] = np.frombuffer(tables, dtype=np.uint8)
        num_regions = int(self._header[NUM_REGIONS])
        self._header[PUBLISHED] = half << 63 | num_regions << 32 | len(tables)
        self._header[STATE] = IN_USE
        self.tables = tables

    def rewind(self) -> None:
        """Give back what was reserved since the last :meth:`publish`."""
        num_regions = int(self._header[PUBLISHED]) >> 32 & (2**31 - 1)
        for line in self._lines[num_regions : int(self._header[NUM_REGIONS])].tolist():
            self._numbers.pop(self._base + line[OFFSET], None)
        self._header[NUM_REGIONS] = num_regions
        last = self._lines[num_regions - 1]
        end = int(last[OFFSET] + last[RESERVED])
        self._give_back(end, FILE_BYTES - end)

    def close(self, *, is_clean: bool = True) -> None:
        """End the use of the memory, written to disk as a whole if ``is_clean``."""
        if self._file < 0:
            return
        if is_clean:
            os.fsync(self._file)
            self._header[STATE] = CLOSED
            os.fsync(self._file)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file = -1

    def _reserve(self, num_words: int) -> Words:
        if num_words == 0:
            return np.empty(0, dtype=np.uint64)
        number = int(self._header[NUM_REGIONS])
        last = self._lines[number - 1]
        offset = int(last[OFFSET] + last[RESERVED])
        num_bytes = _round_up(8 * num_words, _HUGE_PAGE)
        if offset + num_bytes > FILE_BYTES:
            raise StoreError(
                f"The capacity of a store must fit the {FILE_BYTES} bytes of a memory "
                f"file. Received: {num_bytes} bytes more than the {offset} that are "
                "reserved. Lower the capacity."
            )
        self._allocate(1, 8 * 4 * (number + 1))
        self._lines[number] = offset, num_bytes, 0, 0
        self._header[NUM_REGIONS] = number + 1
        self._numbers[self._base + offset] = number
        return self.area(Area(offset, num_words))

    def _map_file(self) -> mmap.mmap:
        try:
            if os.fstat(self._file).st_size == 0:
                os.truncate(self._file, FILE_BYTES)
            size = os.fstat(self._file).st_size
            if size != FILE_BYTES:
                raise ConfigError(
                    f"A memory file must be empty, or of a store. Received: {size} "
                    f"bytes in {self.path}. Name another file, or delete it."
                )
            self._allocate_at(0, _HEAD_BYTES)  # before the header is read
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)
            memory = mmap.mmap(self._file, FILE_BYTES, flags=flags)
        except OSError as exc:
            raise StoreError(
                f"A memory file must be mapped with {FILE_BYTES} bytes, of which only "
                f"the used ones cost anything. Received: {exc} for {self.path}. Use a "
                "file on tmpfs, ext4 or xfs, and no limit of the address space or of "
                "files (ulimit -v, ulimit -f). Where these must be, let rows end with "
                'the process: memory_dir="private" (a flag of components and launchers)'
                ", restarts=False of a cluster, no --memory-file."
            ) from exc
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _make(self, capacity_rows: int, num_classes: int) -> None:
        """Write the header of an empty file, or of one that was not finished."""
        self._give_back(0, FILE_BYTES)
        fixed = _HEAD, _REGIONS, *_TABLES
        self._allocate_at(0, _HEAD_BYTES)
        self._allocate_at(_REGIONS.offset, self._step)
        for number, (offset, num_words) in enumerate(fixed):
            self._lines[number] = offset, 8 * num_words, 0, 0
        self._lines[_NUM_FIXED] = _DATA, 0, 0, 0  # behind it the others follow
        self._lines[:2, COMMITTED] = _HEAD_BYTES, self._step
        header = self._header
        header[NUM_REGIONS] = _NUM_FIXED + 1
        header[[CAPACITY, CLASSES]] = capacity_rows, num_classes
        header[[PARTITIONS, FIRST_AREA]] = 1, TALLY.offset
        header[[MAGIC_AT, VERSION_AT]] = MAGIC, VERSION
        self._begin()

    def _begin(self) -> None:
        header = self._header
        header[BOOT : BOOT + 2] = _boot_words()
        header[PID] = os.getpid()
        header[TIMES_OPENED] = (int(header[TIMES_OPENED]) + 1) % 2**64

    def _require_usable(self, capacity_rows: int, num_classes: int) -> None:
        """Reject memory that this store cannot continue with; it is not changed."""
        header = self._header.tolist()
        known, newer = [VERSION, *READ_TOO], header[PARTITIONS : FEATURES + 1]
        if header[MAGIC_AT] != MAGIC or header[VERSION_AT] not in known:
            raise StoreError(
                f"The memory file {self.path} must have layout {VERSION}. Received: "
                f"layout {header[VERSION_AT]}, magic {header[MAGIC_AT]:#x}. Start the "
                "version that made it, or delete the file and load a checkpoint."
            )
        if newer != [1, TALLY.offset, 0]:
            raise StoreError(
                f"The memory file {self.path} must have one partition and no features "
                "that this version does not know. Received: partitions, first area and "
                f"features {newer}. Start the version that made it, or delete the file "
                "and load a checkpoint."
            )
        made_for, asked = header[CAPACITY : CLASSES + 1], [capacity_rows, num_classes]
        if made_for != asked:
            raise ConfigError(
                f"The memory file {self.path} must be used with the capacity and the "
                f"eviction that it was made for: {_describe(*made_for)}. Received: "
                f"{_describe(*asked)}. Give these, or delete the file."
            )
        if header[STATE] != CLOSED and header[BOOT : BOOT + 2] != _boot_words():
            raise StoreError(
                f"The memory file {self.path} must have been closed before the machine "
                "started again. Received: one that was in use when it stopped, so that "
                "parts of it may be older. Delete the file, and load a checkpoint."
            )
        is_lost = bool(self.area(RECOVERY)[int(LOST) // 8])
        if is_lost and self.area(TALLY)[CHANGE] == REQUEST:
            raise StoreError(
                f"The memory file {self.path} must hold the undo log of its request. "
                f"Received: one whose process, {header[PID]}, died in the middle of a "
                "request that changed more than was kept, as one does whose table has "
                "an admission with a large memory that keeps nothing itself "
                "(num_kept_bytes). Delete the file, and load a checkpoint."
            )

    def _require_sound_lines(self) -> None:
        """Reject reservations that do not stand one behind the other."""
        num, published = int(self._header[NUM_REGIONS]), int(self._header[PUBLISHED])
        num_kept, num_bytes = published >> 32 & (2**31 - 1), published & (2**32 - 1)
        is_sound = _NUM_FIXED < num_kept <= num <= len(self._lines)
        require_sound(is_sound, "numbers of reservations")
        require_sound(num_bytes <= 8 * _TABLES[0].num_words, "a length of tables")
        fixed = [(a.offset, 8 * a.num_words) for a in (_HEAD, _REGIONS, *_TABLES)]
        lines, end = self._lines[:num].tolist(), _DATA
        is_sound = [(line[OFFSET], line[RESERVED]) for line in lines[:4]] == fixed
        for offset, reserved, committed, _ in lines[_NUM_FIXED:]:
            is_sound &= offset == end and reserved % _HUGE_PAGE == 0
            is_sound &= committed <= reserved
            end += reserved
        require_sound(is_sound and end <= FILE_BYTES, "lines of reservations")

    def _read_tables(self) -> bytes:
        published = int(self._header[PUBLISHED])
        area = _TABLES[published >> 63]
        return self.area(area).view(np.uint8)[: published & (2**32 - 1)].tobytes()

    def _allocate(self, number: int, num_bytes: int) -> None:
        """Allocate more of a reservation, and a little ahead."""
        line = self._lines[number]
        offset, reserved, committed, _ = line.tolist()
        if num_bytes <= committed:
            return
        step = min(max(committed // 8, self._step), _LARGEST_STEP)
        end = min(_round_up(max(num_bytes, committed + step), self._step), reserved)
        self._allocate_at(offset + committed, end - committed)
        line[COMMITTED] = end

    def _allocate_at(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._file, offset, num_bytes)
        except OSError as exc:
            raise StoreError(
                f"The file system of {self.path} must have room for the store. "
                f"Received: {exc} for {num_bytes} bytes more. Lower the capacity, name "
                "another --memory-dir, or give it more room: docker's --shm-size, in "
                "Kubernetes an emptyDir with medium: Memory at /dev/shm."
            ) from exc

    def _give_back(self, offset: int, num_bytes: int) -> None:
        try:
            self._map.madvise(mmap.MADV_REMOVE, offset, num_bytes)
        except OSError as exc:
            raise StoreError(
                f"The file system of {self.path} must give back parts of a file. "
                f"Received: {exc}. Use a file on tmpfs, ext4 or xfs."
            ) from exc


def _open_locked(path: str) -> int:
    # What a parent hands over is a link to a file without a name.
    is_handed_over = _DESCRIPTOR.fullmatch(path)
    flags = os.O_RDWR | os.O_CREAT | (0 if is_handed_over else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, 0o600)
    except OSError as exc:
        raise ConfigError(
            "A memory file must be a file that can be read and written, and no link. "
            f"Received: {exc}."
        ) from exc
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(file)
        raise ConfigError(
            "A memory file must be a regular file of the user whose process uses it: "
            f"others could read its rows and change them. Received: {path}, "
            f"{stat.filemode(status.st_mode)}, of user {status.st_uid}."
        )
    if status.st_mode & 0o077:
        os.fchmod(file, status.st_mode & 0o700)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        pid = int.from_bytes(os.pread(file, 8, 8 * PID), "little")
        os.close(file)
        raise StoreError(
            f"One store at a time must use the memory file {path}. Received: {exc}; "
            f"process {pid} has it. End that first."
        ) from exc
    return file


def _boot_words() -> list[int]:
    number = uuid.UUID(_BOOT_ID.read_text().strip()).int
    return [number >> 64, number & (2**64 - 1)]


def _describe(capacity_rows: int, num_classes: int) -> str:
    return f"{capacity_rows} rows, {'lru' if num_classes == 1 else 'lfu'}"


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
