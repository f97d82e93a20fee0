"""Checkpoints as PERSIA writes them, by the description of their format.

Nothing here is shared with the code under test.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.reference import farmhash64

MARKER = """---
num_shards: {servers}
num_internal_shards: {shards}
datetime:
  secs_since_epoch: 1637000000
  nanos_since_epoch: 123456789
"""


@dataclass
class Row:
    """A row: its id with the prefix; weights and state, and how many are weights."""

    id: int
    floats: np.ndarray
    dim: int

    def packed(self) -> bytes:
        floats = self.floats.astype("<f4").tobytes()
        tail = struct.pack("<QQ", self.dim, self.id)
        return struct.pack("<I", len(self.floats)) + floats + tail


def prefixed(id_: int, group: int, bits: int) -> int:
    """Return what PERSIA makes of an id; groups are numbered from 1."""
    return id_ % (2 ** (64 - bits) - 1) + group * 2 ** (64 - bits)


def file_bytes(rows: Sequence[Row], num_slots: int, rng: np.random.Generator) -> bytes:
    """Return a file whose list has the rows in this order, in random slots."""
    order = [int(slot) + 1 for slot in rng.permutation(num_slots)]
    used, free = order[: len(rows)], order[len(rows) :]
    row_of = dict(zip(used, rows, strict=True))
    following = {
        slot: other
        for chain in (used, free)
        for slot, other in zip(chain, [*chain[1:], 0], strict=False)
    }
    before = dict(zip(used, [0, *used], strict=False))
    first, last = (used[0], used[-1]) if used else (0, 0)
    head = (len(rows), first, last, free[0] if free else 0, num_slots, num_slots)
    slots = [struct.pack("<QIIIII", *head)]
    for slot in range(1, num_slots + 1):
        slots.append(struct.pack("<II", following[slot], before.get(slot, 0)))
        row = row_of.get(slot)
        slots.append(b"\0" if row is None else b"\1" + row.packed())
    return b"".join(slots)


def write_checkpoint(
    folder: Path,
    rows: Sequence[Row],
    rng: np.random.Generator,
    *,
    num_servers: int = 1,
    num_shards: int = 1,
    num_free: int = 3,
) -> list[Path]:
    """Write rows, the next to leave first; return the files of rows.

    PERSIA spreads rows over a server's internal shards by a hash that differs between
    its builds.
    """
    parts = [[[] for _ in range(num_shards)] for _ in range(num_servers)]
    for row in rows:
        server = parts[farmhash64(row.id) % num_servers]
        server[int(rng.integers(num_shards))].append(row)
    marker = MARKER.format(servers=num_servers, shards=num_shards)
    paths = []
    for server, of_server in enumerate(parts):
        (folder / f"s{server}").mkdir(parents=True)
        for shard, of_shard in enumerate(of_server):
            path = folder / f"s{server}" / f"replica_{server}_shard_{shard}.emb"
            path.write_bytes(file_bytes(of_shard, len(of_shard) + num_free, rng))
            paths.append(path)
        (folder / f"s{server}" / "embedding_dump_done").write_text(marker)
    (folder / "embedding_dump_done").write_text(marker)
    return paths
