"""The folders of increments: one a log, all of a job in one.

    incremental_dir/
      shard-00000-of-00002-6f1c03b95a2e/     one log of one server
        log.json                             what its first increment is to be put on
        000000000001.increment
        000000000002.increment
      shard-00001-of-00002-9a40be77d1c8/
        ...

A log's increments have no gaps: each is put on what those before have made of the
rows that the log begins with. A server begins a new log when its rows are others: when
it starts, when it has loaded a checkpoint, when it could not write.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_file import increment_number
from persia_torchrec.errors import CheckpointError

LOG_FILE = "log.json"
"""Of the file that describes a log; it is written first."""

_FORMAT = "persia_torchrec increments"
_VERSION = 1
_NAME = re.compile(r"shard-(\d{5,})-of-(\d{5,})-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Base:
    """What the first increment of a log is to be put on.

    Attributes:
        kind: ``empty``: no rows. ``checkpoint``: the one that was loaded. ``unknown``:
            rows of which there is no copy; the log can only be followed from a
            checkpoint that was dumped while it was written.
        checkpoint: path of the folder, or URL, of the checkpoint; or "".
        created: of that checkpoint, as its manifest says; or "".
    """

    kind: Literal["empty", "checkpoint", "unknown"]
    checkpoint: str = ""
    created: str = ""


@dataclass(frozen=True, slots=True)
class LogInfo:
    """A log.

    Attributes:
        name: of its folder.
        shard: of the server that writes it.
        num_shards: of how many.
        begun: when, as ISO 8601, UTC.
        base: what its first increment is to be put on.
    """

    name: str
    shard: int
    num_shards: int
    begun: str
    base: Base

    @classmethod
    def new(cls, shard: int, num_shards: int, base: Base) -> "LogInfo":
        """Describe a log that begins now."""
        name = f"shard-{shard:05d}-of-{num_shards:05d}-{secrets.token_hex(6)}"
        return cls(name, shard, num_shards, datetime.now(UTC).isoformat(), base)

    def write(self, folder: Folder) -> None:
        """Write the description into the log's folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        value = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        folder.write(LOG_FILE, json.dumps(value, indent=1).encode())

    @classmethod
    def read(cls, folder: Folder) -> "LogInfo":
        """Read the description in the folder of a log.

        Raises:
            CheckpointError: there is none, or it cannot be understood.
        """
        path = folder.path_of(LOG_FILE)
        try:
            value: dict[str, Any] = json.loads(folder.read(LOG_FILE))
            if (value.pop("format"), value.pop("version")) != (_FORMAT, _VERSION):
                raise ValueError(f"format and version must be {_FORMAT}, {_VERSION}")
            base = Base(**value.pop("base"))
            return cls(**value, base=base)
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{path} describes no log of increments ({exc!r}). Follow another "
                "folder, or delete this one."
            ) from exc


def find_logs(folder: Folder, known: Mapping[str, LogInfo]) -> list[LogInfo]:
    """Return the logs in a folder, those that began first first; none if it is missing.

    A log without a description is one that begins just now, and left out.

    Args:
        folder: of all logs.
        known: logs by name, whose descriptions need not be read.

    Raises:
        CheckpointError: a description cannot be read.
    """
    logs = []
    for name in folder.names():
        if name in known:
            logs.append(known[name])
        elif _NAME.fullmatch(name):
            child = folder.child(name)
            if LOG_FILE in child.names():
                logs.append(LogInfo.read(child))
    return sorted(logs, key=lambda log: (log.begun, log.name))


def increments_in(folder: Folder) -> list[int]:
    """Return the numbers of a log's increments, ascending."""
    numbers = map(increment_number, folder.names())
    return sorted(number for number in numbers if number is not None)
