"""Which rows a trainer has cached, and in which order they leave: files of checkpoints.

A pool has a file, ``slots_HASH.npz``, where HASH is that of the names of its tables:

    settings   str, of the cache
    numbers    int64 (3,): slots, batches that had some, rows of the largest batch
    records, hands   uint64: of the map, see ``Snapshot``
"""

import io
import zipfile
from collections.abc import Sequence
from hashlib import blake2s
from typing import NamedTuple

import numpy as np

from persia_torchrec.cache.slot_map import Snapshot
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError
from persia_torchrec.sharding.cache_slots import Pool


class PoolSnapshot(NamedTuple):
    """A pool of a run that is resumed."""

    pool: Pool
    num_slots: int
    batches: int
    most_rows: int
    snapshot: Snapshot


def _file_of(pool: Pool) -> str:
    return f"slots_{blake2s(repr(pool.tables).encode(), digest_size=8).hexdigest()}.npz"


def files_of(pools: Sequence[Pool], settings: str) -> dict[str, bytes]:
    """Return the files of a checkpoint, by name."""
    files = {}
    for pool in pools:
        records, hands = pool.map.snapshot()
        numbers = np.array([pool.num_slots, pool.batches, pool.most_rows])
        file = io.BytesIO()
        np.savez(file, settings=settings, numbers=numbers, records=records, hands=hands)
        files[_file_of(pool)] = file.getvalue()
    return files


def read(folder: Folder, pools: Sequence[Pool], settings: str) -> list[PoolSnapshot]:
    """Return what a checkpoint knows of pools; nothing, if the settings were others.

    Raises:
        CheckpointError: a file is damaged.
    """
    found = []
    for pool in pools:
        name = _file_of(pool)
        if folder.file_size(name) is None:
            return []
        try:
            with np.load(io.BytesIO(folder.read(name)), allow_pickle=False) as file:
                is_same = file["settings"].item() == settings
                num_slots, batches, most_rows = file["numbers"].tolist()
                snapshot = Snapshot(file["records"], file["hands"])
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as exc:
            raise CheckpointError(
                f"{folder.file_path(name)} must be the slots of a cache. Received: a "
                f"damaged file ({exc}). Remove it: the cache begins empty then."
            ) from exc
        if not is_same:
            return []
        found.append(PoolSnapshot(pool, num_slots, batches, most_rows, snapshot))
    return found
