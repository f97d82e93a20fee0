"""Which rows a trainer has cached, and in which order they leave: files of checkpoints.

A pool has a file, ``slots_HASH``, where HASH is that of the names of its tables. It is
a line of JSON, :class:`_Head`, and uint64 numbers, little-endian: the records and the
hands of a :class:`~persia_torchrec.cache.slot_map.Snapshot`.
"""

from collections.abc import Sequence
from hashlib import blake2s
from typing import NamedTuple

import msgspec
import numpy as np

from persia_torchrec.cache.slot_map import Snapshot
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError
from persia_torchrec.sharding.cache_settings import Cache
from persia_torchrec.sharding.cache_slots import Pool

_WORD = np.dtype("<u8")
_NUM_HANDS = 3


class _Head(msgspec.Struct, frozen=True):
    """A pool when its file was written; ``settings`` are those of the cache."""

    settings: str
    num_slots: int
    batches: int
    most_rows: int


class PoolSnapshot(NamedTuple):
    """A pool of a run that is resumed."""

    pool: Pool
    num_slots: int
    batches: int
    most_rows: int
    snapshot: Snapshot


def _file_of(pool: Pool) -> str:
    return f"slots_{blake2s(repr(pool.tables).encode(), digest_size=8).hexdigest()}"


def files_of(pools: Sequence[Pool], settings: Cache) -> dict[str, bytes]:
    """Return the files of a checkpoint, by name."""
    files = {}
    for pool in pools:
        head = _Head(repr(settings), pool.num_slots, pool.batches, pool.most_rows)
        words = [one.astype(_WORD, copy=False).data for one in pool.map.snapshot()]
        files[_file_of(pool)] = b"".join([msgspec.json.encode(head), b"\n", *words])
    return files


def read(folder: Folder, pools: Sequence[Pool], settings: Cache) -> list[PoolSnapshot]:
    """Return what a checkpoint knows of pools; nothing, if the settings were others.

    Raises:
        CheckpointError: a file is damaged.
    """
    found = []
    for pool in pools:
        name, most = _file_of(pool), settings.num_slots(pool.spec, 1.0)
        if folder.file_size(name) is None:
            return []
        line, _, data = catalog.read_file(folder, name).partition(b"\n")
        try:
            head = msgspec.json.decode(line, type=_Head)
            if head.settings != repr(settings):
                return []
            words = np.frombuffer(data, dtype=_WORD).astype(np.uint64, copy=False)
            hands = words[len(words) - _NUM_HANDS :]
            records = words[: len(words) - _NUM_HANDS].reshape(-1, 2)
            if len(hands) < _NUM_HANDS or not 0 < head.num_slots <= most:
                raise ValueError(f"{len(words)} words, {head.num_slots} slots")
        except (ValueError, msgspec.MsgspecError) as exc:
            raise CheckpointError(
                f"{folder.file_path(name)} must be the slots of a cache. Received: a "
                f"damaged file ({exc}). Remove it: the cache begins empty then."
            ) from exc
        snapshot = Snapshot(records, hands)
        found.append(
            PoolSnapshot(pool, head.num_slots, head.batches, head.most_rows, snapshot)
        )
    return found
