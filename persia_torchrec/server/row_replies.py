"""Replies that tell of tables, and what rows hold; asking changes nothing."""

from collections.abc import Iterable

import numpy as np

from persia_torchrec.server.requests import RequestReader, require_reply_fits
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.wire.messages import (
    METADATA_COLUMNS,
    Frames,
    Kind,
    bytes_of,
    decode_json,
    encode_json,
)


def rows_reply(
    kind: Kind, store: EmbeddingStore, reader: RequestReader, frames: Frames
) -> Frames:
    """Answer READ, METADATA or EXPORT; return the frames after the header.

    Args:
        kind: of the request.
        store: that holds the rows.
        reader: of requests to it.
        frames: of the request.

    Raises:
        PersiaError: what the sender is told.
    """
    match kind:
        case Kind.READ:
            return _read(store, reader, frames)
        case Kind.METADATA:
            return _metadata(store, reader, frames)
        case _:
            assert kind is Kind.EXPORT
            return _export(store, reader, frames)


def _read(store: EmbeddingStore, reader: RequestReader, frames: Frames) -> Frames:
    tables = reader.tables(frames, num_frames=3)
    for t in tables:
        spec = store.tables[t.table]
        require_reply_fits(4 * len(t.ids) * (spec.dim + spec.num_state_floats))
    return [bytes_of(store.read(t.table, t.ids)) for t in tables]


def _metadata(store: EmbeddingStore, reader: RequestReader, frames: Frames) -> Frames:
    tables = reader.tables(frames, num_frames=3)
    require_reply_fits(4 * METADATA_COLUMNS * sum(len(t.ids) for t in tables))
    answers = [store.metadata(t.table, t.ids) for t in tables]
    columns = [(m.frequency, m.first_step, m.last_step, m.last_s) for m in answers]
    return [bytes_of(np.stack(of_table, axis=1)) for of_table in columns]


def _export(store: EmbeddingStore, reader: RequestReader, frames: Frames) -> Frames:
    asked = reader.export(decode_json(frames))
    found = store.scan(asked.table, asked.start, asked.max_rows)
    place = encode_json({"next": found.next_slot})
    return [place, bytes_of(found.ids), bytes_of(found.rows)]


def tell_tables(
    store: EmbeddingStore, numbers: Iterable[int] | None = None
) -> list[dict[str, object]]:
    """Describe tables to a client.

    Args:
        store: only its tables are read.
        numbers: of the tables; all by default.
    """
    tables = list(store.tables)  # a load may add some meanwhile
    return [
        {
            "number": number,
            "wants_counts": store.wants_counts(number),
            "spec": tables[number].to_json(),
        }
        for number in (range(len(tables)) if numbers is None else numbers)
    ]
