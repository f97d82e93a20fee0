"""Requests that read or write rows as they are, beside training."""

import numpy as np

from persia_torchrec.server.requests import RequestReader, require_reply_fits
from persia_torchrec.server.stages import Stages
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.wire.messages import (
    METADATA_COLUMNS,
    Frames,
    Header,
    Kind,
    bytes_of,
    encode_json,
)


class WholeRows:
    """Answers WRITE, READ and METADATA. Owned by the store's thread.

    Args:
        store: of the server.
        reader: of requests.
        stages: where the time goes.
    """

    def __init__(
        self, store: EmbeddingStore, reader: RequestReader, stages: Stages
    ) -> None:
        self._store = store
        self._reader = reader
        self._stages = stages

    def answer(self, header: Header, frames: Frames) -> Frames:
        """Return what follows the header of the reply.

        Raises:
            FrameError: frames are missing, or do not fit one another.
            BatchError: too many ids, or a reply that would be too large.
            ConfigError: an unknown table, or one without metadata.
            StoreError: more rows to write than fit.
        """
        match header.kind:
            case Kind.WRITE:
                return self._write(header, frames)
            case Kind.READ:
                return self._read(frames)
            case _:
                return self._metadata(frames)

    def _write(self, header: Header, frames: Frames) -> Frames:
        tables = self._reader.tables(frames, num_frames=4)
        weights = self._reader.rows(tables, frames[3], header.precision)
        self._stages.lap("decode")
        for t, weights_ND in zip(tables, weights, strict=True):
            self._store.write(t.table, t.ids, weights_ND)
        self._stages.lap("update")
        return [encode_json(None)]

    def _read(self, frames: Frames) -> Frames:
        tables = self._reader.tables(frames, num_frames=3)
        for t in tables:
            spec = self._store.tables[t.table]
            require_reply_fits(4 * len(t.ids) * (spec.dim + spec.num_state_floats))
        self._stages.lap("decode")
        rows = [bytes_of(self._store.read(t.table, t.ids)) for t in tables]
        self._stages.lap("lookup")
        return list(rows)

    def _metadata(self, frames: Frames) -> Frames:
        tables = self._reader.tables(frames, num_frames=3)
        require_reply_fits(4 * METADATA_COLUMNS * sum(len(t.ids) for t in tables))
        self._stages.lap("decode")
        answers = [self._store.metadata(t.table, t.ids) for t in tables]
        columns = [(m.frequency, m.first_step, m.last_step, m.last_s) for m in answers]
        reply: Frames = [bytes_of(np.stack(of_table, axis=1)) for of_table in columns]
        self._stages.lap("lookup")
        return reply
