"""The base of the increments: a checkpoint that servers write by themselves.

    incremental_dir/base/shard-00000-of-00002-4f2a.rows    a server's rows
                         shard-00000-of-00002.json         its entry: file, position
                         manifest.json                     of the latest entries of all

Where the log is many times the rows, each server writes its rows there, so that older
increments can go. No process brings the servers together: each of them, when its entry
is written, writes the manifest of all entries there are. Their moments differ; with the
increments behind each position they are the rows of the training.
"""

import contextlib
import re
import secrets
from datetime import UTC, datetime

from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.catalog import DumpResult, Manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Line
from persia_torchrec.errors import CheckpointError

_ATTEMPTS = 10


def base_of(logs: Folder) -> Folder:
    """Return the folder of the base of the logs in a folder."""
    return logs.child("base")


def draw_name(shard: int, num_shards: int) -> str:
    """Return a name for the next file of a server's rows."""
    return f"{_prefix(shard, num_shards)}-{secrets.token_hex(4)}.rows"


def read_base(logs: Folder) -> tuple[Folder, Manifest] | None:
    """Return the base, if all servers have written their part of it."""
    folder = base_of(logs)
    with contextlib.suppress(CheckpointError):  # none, or one of another version
        return folder, Manifest.read(folder)
    return None


def newer_base(logs: Folder, lines: list[Line], than: Manifest) -> Folder | None:
    """Return the base if it is newer than a checkpoint, and all lines continue it."""
    found = read_base(logs)
    if found is None or found[1].created <= than.created or not lines:
        return None
    is_continued = all(line.position_in(found[1]) for line in lines)
    return found[0] if is_continued else None


def add_to_base(folder: Folder, part: DumpResult, shard: int, num_shards: int) -> None:
    """Make a file part of the base; of its server only the one before it stays.

    The manifest that another server writes meanwhile may still name that.
    """
    entry = f"{_prefix(shard, num_shards)}.json"
    kept = {part.shard.file}
    if folder.file_size(entry) is not None:
        previous: DumpResult = folder.read_json(entry, DumpResult)
        kept.add(previous.shard.file)
    folder.write_json(entry, part)
    for _ in range(_ATTEMPTS):
        parts = _read_parts(folder, num_shards)
        if len(parts) < num_shards:
            break
        tables = catalog.merge_tables([of_server.tables for of_server in parts])
        shards = tuple(of_server.shard for of_server in parts)
        Manifest(tables, shards, datetime.now(UTC).isoformat()).write(folder)
        if [p.shard for p in _read_parts(folder, num_shards)] == list(shards):
            break  # else another server has written an entry meanwhile
    own = re.compile(rf"{_prefix(shard, num_shards)}-[0-9a-f]+\.rows")
    for name in folder.names():
        if own.fullmatch(name) and name not in kept:
            folder.remove(name)


def _prefix(shard: int, num_shards: int) -> str:
    return f"shard-{shard:05d}-of-{num_shards:05d}"


def _read_parts(folder: Folder, num_shards: int) -> list[DumpResult]:
    parts: list[DumpResult] = []
    for shard in range(num_shards):
        name = f"{_prefix(shard, num_shards)}.json"
        if folder.file_size(name) is not None:
            parts.append(folder.read_json(name, DumpResult))
    return parts
