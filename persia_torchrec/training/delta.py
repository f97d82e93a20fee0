"""Joint deltas: what has changed since a checkpoint, of the dense model and of rows.

every trainer   flush: its updates are acknowledged by the servers
rank 0          makes a folder in that of the latest checkpoint; each server ends an
increment, and says where in its log
every trainer   writes its shards of the dense half
rank 0          writes the positions last: the delta is complete
"""

import dataclasses
import os
from datetime import UTC, datetime
from typing import Any

from persia_torchrec import timeouts
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.checkpoint_client import SavedCheckpoint
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.sharding.table_control import Sharders
from persia_torchrec.training.checkpoint import (
    at_first,
    describe_dense,
    flush_all,
    is_first,
    save_dense_beside,
)


def save_delta(
    path: str | os.PathLike[str],
    state: dict[str, Any],
    client: EmbeddingClient,
    sharders: Sharders,
    *,
    step: int | None = None,
    timeout_s: float = timeouts.CHECKPOINT_S,
) -> SavedCheckpoint:
    """Write what has changed since the latest checkpoint, both halves; return it.

    Of the rows those that have changed since the servers' last increments are written,
    once each, and the dense half whole. Every trainer calls it, as
    :func:`save_checkpoint`; the delta belongs to the latest complete checkpoint, which
    :func:`load_checkpoint` loads with all increments before the delta. The servers' own
    increments, at their interval, hold rows again that change again: let the interval
    be longer than the time between two deltas.

    Args:
        path: that of :func:`save_checkpoint`.
        state: the dense half, as there.
        sharders: as there.
        client: of the servers, which must write increments (``incremental_dir``).
        step: of the training.
        timeout_s: seconds that the servers may take.

    Raises:
        CheckpointError: there is no new delta, as a trainer or a server failed, or no
            checkpoint from which increments lead to now: save a whole one.
    """
    limit_s = timeouts.exchange_s(client.recovery_s, timeout_s)
    flush_all(sharders)
    own = client.checkpoints.job
    found = at_first(lambda: catalog.find_checkpoint(path, own=own).url, str)
    checkpoint = Folder(found)
    folder = Folder(at_first(lambda: catalog.begin_delta(checkpoint).url, str))
    servers = None
    if is_first():
        servers = client.checkpoints.start_delta(checkpoint, timeout_s=timeout_s)
    save_dense_beside(servers, state, folder)

    def complete() -> SavedCheckpoint:
        assert servers is not None  # rank 0 does this
        ended = servers.wait()
        delta = catalog.Delta(
            ended[0].folder,
            tuple(of_server.position for of_server in ended),
            catalog.merge_tables([of_server.tables for of_server in ended]),
            describe_dense(state),
            datetime.now(UTC).isoformat(),
            step,
            num_batches=client.batches.trained,
        )
        folder.write_json(catalog.DELTA, delta)
        manifest = catalog.Manifest.read(checkpoint)
        saved = SavedCheckpoint.of(checkpoint, manifest)
        return dataclasses.replace(saved, path=folder.url, step=step)

    return at_first(complete, SavedCheckpoint, limit_s)
