"""What a checkpoint consists of: the file that makes it complete.

``manifest.json`` is written last. A folder without one is a dump that has not ended, or
never will, and is not loaded. Its JSON value, ``version`` 1:

    {"format": "persia_torchrec checkpoint", "version": 1,
     "created": time as ISO 8601, "step": given by the user or null,
     "dense": null, or {"begun": names of the optimizers that have state} if the folder
              ``dense`` holds the dense half,
     "tables": [{"spec": as TableSpec.to_json, "num_updates": Adam's t}, ...],
     "shards": [{"file", "num_rows", "size_bytes", "checksum", "tick": of the server's
                 last request, "server": its settings, "log": null, or {"log", "number"}
                 of the first increment that can be put on these rows}, ...]}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.table import TableSpec

NAME = "manifest.json"
"""Of the file."""

VERSION = 1
"""Version of the manifest that is written, and the only one that is read so far."""

_FORMAT = "persia_torchrec checkpoint"


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table of a checkpoint.

    Attributes:
        spec: its settings.
        num_updates: update requests that it has had: its step.
    """

    spec: TableSpec
    num_updates: int


@dataclass(frozen=True, slots=True)
class SavedShard:
    """What one server wrote.

    Attributes:
        file: its name in the folder.
        num_rows: rows in it.
        size_bytes: its length.
        checksum: see ``shard_file.Written``.
        tick: of the server's last request.
        server: the server's settings, for people.
        log: where in the server's log of increments the dump began, ``{"log",
            "number"}`` (see ``log_folder.py``); None if it wrote none.
    """

    file: str
    num_rows: int
    size_bytes: int
    checksum: int
    tick: int
    server: Mapping[str, object]
    log: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        tables: of all servers.
        shards: one a server, in their order.
        created: when, as ISO 8601.
        step: what the user said.
        begun: names of the dense half's optimizers that have state; None if that half
            is not there.
    """

    tables: tuple[SavedTable, ...]
    shards: tuple[SavedShard, ...]
    created: str
    step: int | None = None
    begun: tuple[str, ...] | None = None

    @property
    def capacity_rows(self) -> int | None:
        """Rows that all servers together could hold; None if that was not said."""
        most = [shard.server.get("capacity_rows") for shard in self.shards]
        told = [number for number in most if isinstance(number, int)]
        return sum(told) if len(told) == len(most) else None

    @property
    def num_rows(self) -> int:
        """Rows of all servers."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of the files of all servers."""
        return sum(shard.size_bytes for shard in self.shards)

    def write(self, folder: Folder) -> None:
        """Make the checkpoint in a folder complete.

        Raises:
            CheckpointError: a server's file is not there as the server wrote it, or the
                manifest cannot be written.
        """
        for shard in self.shards:
            size_bytes = folder.size_of(shard.file)
            if size_bytes != shard.size_bytes:
                raise CheckpointError(
                    f"{folder.path_of(shard.file)} must have the {shard.size_bytes} "
                    f"bytes that a server wrote. Received: {size_bytes or 'no file'}. "
                    "Give a path that all servers and trainers share."
                )
        value = {
            "format": _FORMAT,
            "version": VERSION,
            "created": self.created,
            "step": self.step,
            "dense": None if self.begun is None else {"begun": self.begun},
            "tables": [saved_table_to_json(table) for table in self.tables],
            "shards": [asdict(shard) for shard in self.shards],
        }
        folder.write(NAME, json.dumps(value, indent=1).encode())

    @classmethod
    def read(cls, folder: Folder) -> "Manifest":
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: there is none, or it cannot be understood.
        """
        path = folder.path_of(NAME)
        if folder.size_of(NAME) is None:
            raise CheckpointError(
                f"{path} is missing: its checkpoint is not complete, or not there."
            )
        try:
            value = json.loads(folder.read(NAME))
            if value["format"] != _FORMAT or value["version"] != VERSION:
                raise CheckpointError(
                    f"{path} must be of the format {_FORMAT!r}, version {VERSION}. "
                    f"Received: {value['format']!r}, version {value['version']}."
                )
            dense = value["dense"]
            return cls(
                tuple(saved_table_from_json(table) for table in value["tables"]),
                tuple(SavedShard(**shard) for shard in value["shards"]),
                value["created"],
                value["step"],
                None if dense is None else tuple(dense["begun"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{path} is no manifest of a checkpoint ({exc!r}). "
                "Load another checkpoint."
            ) from exc


def saved_table_to_json(table: SavedTable) -> dict[str, object]:
    """Describe a table in plain JSON values."""
    return {"spec": table.spec.to_json(), "num_updates": table.num_updates}


def saved_table_from_json(value: Any) -> SavedTable:
    """Read a table.

    Raises:
        ConfigError: it is none.
    """
    try:
        return SavedTable(TableSpec.from_json(value["spec"]), int(value["num_updates"]))
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"Not a table of a checkpoint: {value!r}.") from exc


def tables_of_all(servers: Sequence[Sequence[SavedTable]]) -> tuple[SavedTable, ...]:
    """Return the tables of a job: those of each server, each once.

    A table's step is that of the server that has counted most: all get every update, so
    that they differ by those under way.
    """
    tables: dict[str, SavedTable] = {}
    for table in (table for of_server in servers for table in of_server):
        known = tables.setdefault(table.spec.name, table)
        if known.num_updates < table.num_updates:
            tables[table.spec.name] = table
    return tuple(tables.values())
