"""The checkpoints of a run, in one folder.

    run-7/
      checkpoint-00000001/
        manifest.json                  written last: the checkpoint is complete
        shard-00000-of-00002.rows      one a server
        shard-00001-of-00002.rows
        dense/                         the dense half, if it was saved too
      checkpoint-00000002/             without a manifest: not complete

Each dump takes a new number, so that one that is interrupted leaves those of before as
they are; what remains of it may be deleted.
"""

import os
import re
from collections.abc import Iterator

from persia_torchrec.checkpoint import manifest
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError

DENSE = "dense"
"""Name of the folder of the dense half."""

_NAME = re.compile(r"checkpoint-(\d{8,})")
_ATTEMPTS = 100


def begin_checkpoint(path: str | os.PathLike[str]) -> Folder:
    """Make the folder of the next checkpoint.

    Args:
        path: of the run's folder, which is made if it is missing.

    Raises:
        CheckpointError: it cannot be made.
        ConfigError: the path is a URL that fsspec does not know.
    """
    run = Folder(path)
    number = max(_numbers(run), default=0)
    for _ in range(_ATTEMPTS):
        number += 1
        folder = run.child(f"checkpoint-{number:08d}")
        if folder.make():
            return folder
    raise CheckpointError(
        f"A new folder was to be made in {run.url}, and {_ATTEMPTS} others were first. "
        "How many jobs write there?"
    )


def find_checkpoint(path: str | os.PathLike[str]) -> Folder:
    """Return a complete checkpoint.

    Args:
        path: of a checkpoint, or of a run's folder, for its latest complete one.

    Raises:
        CheckpointError: there is none.
        ConfigError: the path is a URL that fsspec does not know.
    """
    run = Folder(path)
    folder = next(complete_checkpoints(run), None)
    if folder is None:
        raise CheckpointError(
            f"{run.url} must be a checkpoint, or hold one that is complete (that has a "
            f"{manifest.NAME}). Received: a folder with "
            f"{sorted(run.names())[:8] or 'nothing'}."
        )
    return folder


def complete_checkpoints(run: Folder) -> Iterator[Folder]:
    """Yield the complete checkpoints of a run, the latest first.

    Args:
        run: their folder; or a checkpoint, which is the only one then.
    """
    if manifest.NAME in run.names():
        yield run
        return
    for number in sorted(_numbers(run), reverse=True):
        folder = run.child(f"checkpoint-{number:08d}")
        if manifest.NAME in folder.names():
            yield folder


def shard_name(shard: int, num_shards: int) -> str:
    """Return the name of a server's file."""
    return f"shard-{shard:05d}-of-{num_shards:05d}.rows"


def _numbers(run: Folder) -> list[int]:
    matches = (_NAME.fullmatch(name) for name in run.names())
    return [int(match[1]) for match in matches if match]
