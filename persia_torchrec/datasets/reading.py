"""Which rows of files are read, in which order, and by threads ahead of their use.

A group is what is read at once. A window is groups whose rows are put in a random order
together; without a random order, each group is one.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from persia_torchrec.datasets.columns import Int64s, Rows, join_rows
from persia_torchrec.datasets.files import CsvFile, ParquetFile
from persia_torchrec.errors import ConfigError

SHUFFLE_ROWS = 262_144
"""Rows that are put in a random order together, at least."""


class Group(NamedTuple):
    """Rows of a file that are read at once; all of them, or some."""

    file: CsvFile | ParquetFile
    group: int
    num_rows: int
    kept: Int64s | None = None

    def read(self) -> Rows:
        """Return the rows."""
        rows = self.file.read(self.group)
        return rows if self.kept is None else rows.take(self.kept)


class Window(NamedTuple):
    """Groups whose rows come together, in their order or in a random one."""

    groups: Sequence[Group]
    seed: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all its groups."""
        return sum(group.num_rows for group in self.groups)

    def rows(self, groups: Sequence[Rows], start: int) -> Rows:
        """Return the rows of the groups that were read, from one on."""
        rows = join_rows(groups)
        if self.seed is not None:
            order = np.random.default_rng(self.seed).permutation(rows.num_rows)
            return rows.take(order[start:])
        return rows.take(np.arange(start, rows.num_rows)) if start else rows


def select(files: Sequence[CsvFile | ParquetFile], rows: Int64s | None) -> list[Group]:
    """Return the groups of files with the rows that are wanted; empty ones, too."""
    groups = [Group(f, g, n) for f in files for g, n in enumerate(f.group_rows)]
    if rows is None:
        return groups
    wanted, total = np.unique(rows), sum(group.num_rows for group in groups)
    if (
        len(wanted) != len(rows)
        or not len(rows)
        or wanted[0] < 0
        or wanted[-1] >= total
    ):
        raise ConfigError(
            f"rows must be different row numbers in [0, {total}), at least one. "
            f"Received: {len(rows)}, {len(wanted)} of them different."
        )
    starts = [0, *accumulate(group.num_rows for group in groups)]
    cuts = np.searchsorted(wanted, starts)
    return [
        group._replace(num_rows=int(stop - begin), kept=wanted[begin:stop] - start)
        for group, start, begin, stop in zip(
            groups, starts, cuts, cuts[1:], strict=False
        )
    ]


def partition(groups: list[Group], count: int, index: int) -> list[Group]:
    """Return one of some parts of the groups, without those that are empty."""
    if count > len(groups):
        raise ConfigError(
            "partition_count must be at most the number of groups of rows, "
            f"{len(groups)}. Received: {count}. Write files with "
            "smaller row groups, or give a WorkQueue of more files."
        )
    own = groups[index::count]
    return [group for group in own if group.num_rows]


def windows_of(groups: list[Group], seed: tuple[int, ...] | None) -> Iterator[Window]:
    """Return all groups as windows; with a seed, in an order that follows from it."""
    if seed is None:
        yield from (Window([group]) for group in groups)
        return
    number, members, num_rows = 0, list[int](), 0
    for index in np.random.default_rng(seed).permutation(len(groups)).tolist():
        members.append(index)
        num_rows += groups[index].num_rows
        if num_rows >= SHUFFLE_ROWS:
            number += 1
            yield Window([groups[i] for i in sorted(members)], (*seed, number))
            members, num_rows = [], 0
    if members:
        yield Window([groups[i] for i in sorted(members)], (*seed, number + 1))


def from_row(windows: Iterator[Window], row: int) -> Iterator[tuple[Window, int]]:
    """Return the windows from a row on, and at which of its rows each begins."""
    for window in windows:
        if row < window.num_rows:
            yield window, row
        row = max(row - window.num_rows, 0)


def read_ahead(
    windows: Iterator[tuple[Window, int]], num_threads: int
) -> Iterator[Rows]:
    """Yield the rows of windows, read ahead by threads."""
    pool = ThreadPoolExecutor(num_threads, "rows")
    ahead: deque[tuple[Window, int, list[Future[Rows]]]] = deque()

    def begin() -> None:
        """Read one window ahead, or as many groups as there are threads."""
        while not ahead or sum(len(reads) for *_, reads in ahead) < num_threads:
            if (following := next(windows, None)) is None:
                return
            window, row = following
            reads = [pool.submit(group.read) for group in window.groups]
            ahead.append((window, row, reads))

    try:
        begin()
        while ahead:
            window, row, reads = ahead.popleft()
            rows = window.rows([read.result() for read in reads], row)
            begin()
            yield rows
    finally:
        pool.shutdown(cancel_futures=True)
