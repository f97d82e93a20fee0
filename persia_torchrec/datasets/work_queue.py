"""One queue of work for all trainers: files, or row groups of files, epoch by epoch.

    items x epochs --shuffled by (seed, epoch)--> position 0, 1, 2, ...
    trainers take numbers 0, 1, 2, ... of a counter; each number is a position

The counter is a value of the job's address book, which the coordinator hosts; without
one trainer 0 hosts a book for it, and a trainer alone counts by itself. It is changed
by compare-and-set only:

    {"next": 7, "last": {"0": 4, "1": 6, "2": 5}}    last: what each trainer took last

so that a trainer whose connection breaks sees whether its change was made.

A trainer keeps the items that it took, with the rows that it has trained of each, its
leases. A saved state has the next position and the leases of all trainers. When it is
loaded, by any number of trainers, the leases are the first numbers, at their rows: no
row is trained twice, or left out, along the history that the checkpoints are of.
"""

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch.distributed as dist

from persia_torchrec import env, timeouts
from persia_torchrec.datasets.columns import require
from persia_torchrec.datasets.sources import (
    Source,
    find_sources,
    require_same_files,
)
from persia_torchrec.errors import ConfigError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.trainer_group import exchange_group, gather
from persia_torchrec.parsing.decoding import decoder_of, require_at_least_1
from persia_torchrec.rpc.addresses import LOOPBACK


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of a Parquet file, from ``first`` up to ``stop``."""

    file: Path | str
    first: int
    stop: int


def row_group_slices(
    files: Sequence[str | os.PathLike[str]], num_slices: int | None = None
) -> list[RowGroups]:
    """Divide Parquet files into slices of about as many row groups each.

    Ten times as many slices as trainers keep all of them busy to the end. A slice is of
    one file, so that there are at least as many as files.

    Args:
        files: their paths.
        num_slices: about how many are wanted; None: one for each row group.

    Raises:
        ConfigError: there are fewer row groups than slices.
        DataError: a file is missing or empty.
    """
    require_at_least_1(num_slices=num_slices)
    sizes: dict[Path | str, int] = {}
    for source in find_sources(files):
        with source.open() as opened:
            file = require("pyarrow.parquet").ParquetFile(opened)
            if num_groups := file.metadata.num_row_groups:
                sizes[source.path] = num_groups
    total = sum(sizes.values())
    if (wanted := num_slices or total) > total:
        raise ConfigError(
            f"num_slices must be at most the number of row groups, {total}. Received: "
            f"{num_slices}."
        )
    slices = []
    for path, num_groups in sizes.items():
        parts = min(max(round(wanted * num_groups / total), 1), num_groups)
        cuts = [num_groups * part // parts for part in range(parts + 1)]
        slices += [RowGroups(path, *ends) for ends in pairwise(cuts)]
    return slices


class Item(NamedTuple):
    """What a trainer has taken: rows of a file, from ``row`` on.

    ``number`` is its number among all that were taken since the trainers started,
    ``place`` that of the item in the queue's list.
    """

    number: int
    epoch: int
    place: int
    file: Path | str
    groups: tuple[int, int] | None
    row: int


class _Count(msgspec.Struct):
    """The counter, and what each trainer took last."""

    next: int = 0
    last: dict[str, int] = {}


class WorkQueue:
    """Files, or slices of them, that trainers take one after the other.

    Give it as ``files`` of a dataset. Each trainer makes the same one, on its main
    thread, after ``init_process_group`` if there are several. Any thread may take.

    Args:
        items: paths, folders, globs and URLs of files, or what
            :func:`row_group_slices` returns.
        num_epochs: how often each row is read.
        seed: of the orders, at least 0.
        shuffle: whether the items of each epoch have an order of their own.

    Raises:
        ConfigError: an argument is out of range.
        DataError: a file is missing or empty.
    """

    def __init__(
        self,
        items: Sequence[str | os.PathLike[str] | RowGroups],
        num_epochs: int = 1,
        seed: int = 0,
        *,
        shuffle: bool = True,
    ) -> None:
        require_at_least_1(num_epochs=num_epochs)
        self._items: list[Path | str | RowGroups] = []
        sources: dict[Path | str, Source] = {}
        for item in items:
            found = find_sources(_file(item))
            sources |= {source.path: source for source in found}
            is_slice = isinstance(item, RowGroups)
            self._items += [item] if is_slice else [source.path for source in found]  # type: ignore[list-item]
        if not self._items or len(set(self._items)) < len(self._items) or seed < 0:
            raise ConfigError(
                "items must be different, and at least one; seed must be at least 0. "
                f"Received: {len(self._items)} items, {len(set(self._items))} of them "
                f"different, and seed {seed}."
            )
        self.files = find_sources(list(sources.values()))
        self._num_epochs, self._seed, self._shuffle = num_epochs, seed, shuffle
        self._lock = threading.Lock()
        self._leases: list[tuple[int, int]] = []  # positions and rows; guarded by _lock
        self._first = 0  # position after them; guarded by _lock
        self._num_own = 0  # taken by this trainer; guarded by _lock
        names = {s.path: f"{s.name} ({s.size} bytes)" for s in self.files}
        self._counter = _Counter.of_trainers(
            [self._named(i, names) for i in self._items]
        )

    @property
    def is_shared(self) -> bool:
        """Whether other trainers take from the queue, too."""
        return self._counter.is_shared

    def take(self) -> Item | None:
        """Take the next item; None: none is left.

        Raises:
            JobError: the host of the queue is gone.
        """
        return next(iter(self.take_rows(1, lambda _: 1)), None)

    def take_rows(self, least: int, count: Callable[[Item], int]) -> list[Item]:
        """Take the next item, and those after it until they have enough rows.

        So each trainer that takes any has enough, and what is left is enough, too.

        Args:
            least: how many rows are enough.
            count: returns how many rows an item has, from ``row`` on; ``least`` will do
                for more.

        Returns:
            The items; none at the end of the queue.

        Raises:
            JobError: the host of the queue is gone.
        """
        with self._lock:
            num_left = len(self._items) * self._num_epochs - self._first
            end = len(self._leases) + num_left

            def stop_of(first: int) -> int:
                return self._stop(first, end, least, count)

            first = self._counter.take(end, stop_of)
            if first is None:
                return []
            items = [self._item(number) for number in range(first, stop_of(first))]
            self._num_own += len(items)
            return items

    def _stop(
        self, first: int, end: int, least: int, count: Callable[[Item], int]
    ) -> int:
        """Return the number after those that are taken together."""
        if least <= 1:
            return first + 1

        def after_enough(number: int) -> tuple[int, bool]:
            num_rows = 0
            while number < end and num_rows < least:
                num_rows += count(self._item(number))
                number += 1
            return number, num_rows >= least

        stop, _ = after_enough(first)
        others_have_enough = after_enough(stop)[1]
        return stop if others_have_enough else end

    def _item(self, number: int) -> Item:
        position, row = self._position(number)
        epoch, place = divmod(position, len(self._items))
        index = place
        if self._shuffle:
            rng = np.random.default_rng((self._seed, epoch))
            index = int(rng.permutation(len(self._items))[place])
        item = self._items[index]
        groups = (item.first, item.stop) if isinstance(item, RowGroups) else None
        return Item(number, epoch, index, _path(item), groups, row)

    def num_taken(self) -> int:
        """Return how many items all trainers have taken since they started."""
        return self._counter.num_taken()

    def state(
        self, num_taken: int, leases: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return what is left to train, as JSON's values.

        Args:
            num_taken: the items that count as taken.
            leases: of all trainers, number and row of each such item whose rows are not
                all trained.
        """
        with self._lock:
            open_ = [(self._position(number)[0], row) for number, row in leases]
            left = [*open_, *self._leases[num_taken:]]
            first = self._first + max(num_taken - len(self._leases), 0)
            return {"next": first, "leases": sorted(left)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue at a saved state; every trainer does, before it takes.

        Raises:
            ConfigError: this trainer has taken an item.
        """
        with self._lock:
            if self._num_own:
                raise ConfigError(
                    "The state of a WorkQueue must be loaded before its first item is "
                    f"taken. Received: {self._num_own} that this trainer has taken."
                )
            self._leases = [(int(at), int(row)) for at, row in state["leases"]]
            self._first = int(state["next"])

    def identity(self) -> dict[str, Any]:
        """Return what positions depend on."""
        files = {source.path: source.identity() for source in self.files}
        return {
            "files": [self._named(item, files) for item in self._items],
            "num_epochs": self._num_epochs,
            "seed of the queue": self._seed if self._shuffle else None,
        }

    @staticmethod
    def _named(item: Path | str | RowGroups, names: Mapping[Path | str, str]) -> str:
        name = names[_path(item)]
        if isinstance(item, RowGroups):
            name += f", row groups {item.first} to {item.stop}"
        return name

    def close(self) -> None:
        """Leave the host of the queue. May be called twice."""
        self._counter.close()

    def _position(self, number: int) -> tuple[int, int]:
        """Return the position of a number, and the row at which it begins."""
        if number < len(self._leases):
            return self._leases[number]
        return self._first + number - len(self._leases), 0


class _Counter:
    """Numbers from 0, each of which one of all trainers gets.

    Args:
        book: where it is, under ``key``; None: there is one trainer.
        key: of this start of the trainers.
        rank: of this trainer.
    """

    def __init__(
        self, book: AddressBook | None = None, key: str = "", rank: int = 0
    ) -> None:
        self._book, self._key, self._rank = book, key, str(rank)
        self._count = 0  # of a trainer alone
        if book is not None:
            weakref.finalize(self, book.close)

    @classmethod
    def of_trainers(cls, items: Sequence[str] = ()) -> "_Counter":
        """Return that of all trainers, which call this together; rank 0 makes it.

        Raises:
            ConfigError: their items differ.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size < env.get_world_size():
            raise ConfigError(
                "Trainers must have a process group before they make a WorkQueue. "
                f"Received: none, with WORLD_SIZE {env.get_world_size()}. Call "
                "torch.distributed.init_process_group first."
            )
        if size == 1:
            return cls()
        rank, store = dist.get_rank(), env.job_store()
        book: AddressBook | None = None
        host, port, job_id = store or (env.master()[0] or LOOPBACK, 0, "")
        if store is None and rank == 0:
            book = AddressBook.host(0, everywhere=host != LOOPBACK)
            port = book.port
        nonce, port = _from_first(int.from_bytes(os.urandom(7)), port, items=items)
        if book is None:
            book = AddressBook.join(host, port, job_id)
        return cls(book, f"queue/{nonce}", rank)

    @property
    def is_shared(self) -> bool:
        """Whether there are other trainers."""
        return self._book is not None

    def take(
        self, end: int, stop_of: Callable[[int], int] = lambda first: first + 1
    ) -> int | None:
        """Take the next numbers, those below ``end``; return the first one.

        ``stop_of`` says which number comes after those that are taken with the first.
        """
        if self._book is None:
            first = self._count
            if first >= end:
                return None
            self._count = stop_of(first)
            return first
        held = self._book.note(self._key) or ""
        while True:
            count = _decoded(held)
            if count.next >= end:
                return None
            last = {**count.last, self._rank: count.next}
            wanted = msgspec.json.encode(_Count(stop_of(count.next), last)).decode()
            # Sent again where a connection breaks: then it may be others' by now.
            held = self._book.claim_note(self._key, wanted, held)
            if _decoded(held).last.get(self._rank) == count.next:
                return count.next

    def num_taken(self) -> int:
        """Return the next number."""
        if self._book is None:
            return self._count
        return _decoded(self._book.note(self._key) or "").next

    def close(self) -> None:
        """Leave the book. May be called twice."""
        if self._book is not None:
            self._book.close()


def _decoded(held: str) -> _Count:
    return decoder_of(_Count).decode(held) if held else _Count()


def _file(
    item: str | os.PathLike[str] | RowGroups,
) -> str | os.PathLike[str]:
    return item.file if isinstance(item, RowGroups) else item


def _path(item: Path | str | RowGroups) -> Path | str:
    return item.file if isinstance(item, RowGroups) else item


def _from_first(*numbers: int, items: Sequence[str] = ()) -> list[int]:
    """Return the numbers of rank 0 on every trainer; all must have the same items."""
    group = exchange_group(timeouts.exchange_s())
    kind = tuple[list[int], list[str]]
    texts = gather(msgspec.json.encode((numbers, items)), group)
    told = [decoder_of(kind).decode(text) for text in texts]
    require_same_files([of_trainer for _, of_trainer in told])
    first: list[int] = told[0][0]
    return first
