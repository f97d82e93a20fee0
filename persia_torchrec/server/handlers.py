"""The kinds of requests that a server answers.

A new kind is a file of its own, which imports from ``shard.py``, and a line in
:data:`KINDS`; CONTRIBUTING.md has an example.

Dimension key:
    N: ids of one table in a request
    D: its embedding dim
"""

import logging
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from persia_torchrec.arrays import Counts, Floats, Ids
from persia_torchrec.errors import BatchError
from persia_torchrec.jit.compiled import read_only
from persia_torchrec.routing.route import split_rows
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.float_codec import (
    UNDERFLOWS,
    encode_floats,
    num_zeroed,
    size_of,
)
from persia_torchrec.rpc.messages import (
    Frames,
    Header,
    Kind,
    Precision,
    Share,
    TableSegments,
    bytes_of,
    encode_json,
)
from persia_torchrec.rpc.sockets import MAX_MESSAGE_BYTES
from persia_torchrec.server.checkpoint_service import CheckpointRequest
from persia_torchrec.server.joint_steps import JointTrainer
from persia_torchrec.server.open_batches import Batch
from persia_torchrec.server.owners import TableOwner
from persia_torchrec.server.shard import (
    RequestKind,
    Shard,
    ShardRequest,
    require_fits,
)
from persia_torchrec.server.update_queue import QueuedUpdate, describe_update
from persia_torchrec.store import memory
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_copy import initial_rows
from persia_torchrec.store.stored_table import TableState
from persia_torchrec.table import TableSpec, describe_tables

logger = logging.getLogger(__name__)


class _Lookup(NamedTuple):
    """What a lookup asks: counts of all ids or None, memory for all rows, flat.

    ``widths`` are those of the tables' rows, with optimizer state if that is asked for.
    """

    asked: TableSegments
    widths: npt.NDArray[np.int64]
    rows: Floats
    counts: Counts | None

    def shapes(self) -> list[tuple[int, int]]:
        """Return the shape of each table's rows."""
        nums = np.diff(self.asked.starts).tolist()
        return list(zip(nums, self.widths.tolist(), strict=True))


def _answer_lookup(shard: Shard, request: ShardRequest) -> Frames:
    header, store = request.header, shard.store
    batch, part = _batch_of(header), header.flags >> messages.PART_SHIFT
    lookup = _read_lookup(shard, request)
    asked, rows = lookup.asked, lookup.rows
    shard.stages.lap("decode")
    use: Frames = []
    if header.flags & messages.STATE:
        use = _look_up_states(shard, header, lookup)
    elif not header.flags & messages.TRAINING:
        store.read_tables(asked.tables, asked.ids, asked.starts, rows)
        shard.counts["requests_lookup_inference"] += 1
        shard.stages.lap("inference")
    elif shard.streams.was_looked_up(batch, part):
        _repeat_lookup(store, lookup, header.batch)
        shard.counts["requests_repeated"] += 1
        shard.stages.lap("inference")
    else:
        if shard.owners.owners:  # whose lookups read state
            shard.owners.require(asked.tables, 0, "a lookup for training")
        with store.rows.transaction() as change:
            slots = store.lookup_tables(
                asked.tables,
                asked.ids,
                asked.starts,
                rows,
                counts_N=lookup.counts,
                batch=header.batch,
            )
            shard.streams.mark(change, batch, 1 << part)
        shard.afterwards = partial(
            shard.updates.open_batches.begin, batch, asked, slots
        )
        shard.stages.lap("lookup")
    shapes = [rows.shape]
    if header.precision is Precision.FP16:  # which has a scale a row
        shapes = lookup.shapes()
    frame = encode_floats(rows, header.precision, shapes)
    shard.counts[UNDERFLOWS] += num_zeroed(frame, header.precision)
    shard.stages.lap("encode")
    return [frame, *use]


def _look_up_states(shard: Shard, header: Header, lookup: _Lookup) -> Frames:
    """Look rows up with optimizer state; return frames 2 and 3 of the reply.

    It opens no batch: its client writes the rows back.
    """
    batch, part = _batch_of(header), header.flags >> messages.PART_SHIFT
    is_training = bool(header.flags & messages.TRAINING)
    store, asked, group = (
        shard.store,
        lookup.asked,
        shard.store.group(lookup.asked.tables),
    )
    num_ids = len(asked.ids) if group.has_metadata else 0
    frequencies_N = np.zeros(num_ids, dtype=np.uint32)
    unadmitted = np.empty(0, dtype=np.int64)
    if not is_training or shard.streams.was_looked_up(batch, part):
        number = header.batch if is_training else None
        unadmitted = _repeat_lookup(store, lookup, number, with_state=True)
        for t, (table, ids_N) in enumerate(asked.pieces() if num_ids else ()):
            if store.states[table].has_metadata:
                found = store.metadata(table, ids_N).frequency
                frequencies_N[asked.starts[t] : asked.starts[t + 1]] = found
        kind = "requests_repeated" if is_training else "requests_lookup_inference"
        shard.counts[kind] += 1
    else:
        with store.rows.transaction() as change:
            slots_N = store.lookup_states(
                asked.tables,
                asked.ids,
                asked.starts,
                lookup.rows,
                frequencies_N,
                counts_N=lookup.counts,
                batch=header.batch,
            )
            shard.streams.mark_lookup(change, batch, part)
        if any(state.admission for state in group.states):
            unadmitted = np.flatnonzero(slots_N == memory.MISSING)
    shard.stages.lap("lookup")
    return [bytes_of(unadmitted.astype(np.uint32)), bytes_of(frequencies_N)]


def _read_lookup(shard: Shard, request: ShardRequest) -> _Lookup:
    """Return what a lookup asks, and memory for its rows."""
    header, frames = request.header, request.frames
    has_counts = bool(header.flags & messages.COUNTS)
    asked = shard.read_ids(frames, 4 if has_counts else 3)
    counts = messages.decode_counts(frames) if has_counts else None
    if header.flags >> messages.PART_SHIFT >= messages.MAX_PARTS:
        raise BatchError(
            f"A batch may have {messages.MAX_PARTS} lookups, from 0 on. Received: "
            f"lookup {header.flags >> messages.PART_SHIFT}."
        )
    group = shard.store.group(asked.tables)
    widths = group.widths if header.flags & messages.STATE else group.dims
    num_floats = int(np.diff(asked.starts).dot(widths))
    if 4 * num_floats > MAX_MESSAGE_BYTES:
        lookup = _Lookup(asked, widths, np.empty(0, np.float32), counts)
        require_fits(size_of(lookup.shapes(), header.precision))
    if header.precision is Precision.FP32:  # they are the reply, maybe in its place
        num_bytes = 4 * num_floats
        body = shard.slabs.body_in_place(request.peer, header.request, num_bytes)
        rows = body.view(np.float32)
    else:
        rows = np.empty(num_floats, dtype=np.float32)
    return _Lookup(asked, widths, rows, counts)


def _repeat_lookup(
    store: EmbeddingStore,
    lookup: _Lookup,
    batch: int | None,
    *,
    with_state: bool = False,
) -> npt.NDArray[np.int64]:
    """Answer a training lookup once more, and change nothing.

    Returns the positions of ids that have no row because they are not admitted; those
    of all ids without a row, if there was no such batch.

    A row that was evicted since then reads its initial value. That is what it gave if
    it was new, as it was as a rule: the newest are the least frequent ones. One that
    had been trained gave its weights, which nothing has any more. It takes a store in
    which rows leave within a step: under LRU it does not hold the rows of the batches
    in flight. The row is as gone as without the repetition, its gradient is counted as
    missed, and a lookup that makes it again reads the same; one batch sees other
    weights. To give the same, answers would be kept beside the rows until their client
    has them: 9 to 15 % of a lookup of dim 64 (Adagrad, memory file, two shared cores).
    """
    seen = [memory.HITS, memory.MISSES]
    before = store.rows.tally[seen]
    asked = lookup.asked
    if not with_state:
        store.read_tables(asked.tables, asked.ids, asked.starts, lookup.rows)
    store.rows.tally[seen] = before
    rows = split_rows(lookup.rows, asked.starts, lookup.widths)
    unadmitted = [np.empty(0, dtype=np.int64)]
    for t, ((table, ids_N), out_NW) in enumerate(
        zip(asked.pieces(), rows, strict=True)
    ):
        state = store.states[table]
        if with_state:
            out_NW[:] = store.read(table, ids_N)
        gone = np.flatnonzero(store.find(table, ids_N) == memory.MISSING)
        if len(gone) and not state.spec.shared_rows:
            was_admitted = np.zeros(len(gone), dtype=np.bool_)
            if batch is not None:
                was_admitted = state.was_admitted(ids_N[gone], batch)
            others, gone = gone[~was_admitted], gone[was_admitted]
            begun = initial_rows(state.spec, ids_N[gone])
            out_NW[gone] = begun[:, : out_NW.shape[1]]
            unadmitted.append(others + asked.starts[t])
            if with_state:
                out_NW[others] = state.unadmitted_row
    return np.concatenate(unadmitted)


def _answer_update(shard: Shard, request: ShardRequest) -> Frames | None:
    header, frames = request.header, request.frames
    if (outcome := shard.find_outcome(_batch_of(header))) is not None:
        return [describe_update(outcome)]
    is_share = bool(header.flags & messages.SHARE)
    asked = shard.read_ids(frames, 5 if is_share else 4)
    if shard.owners.owners:
        shard.owners.require(asked.tables, 0, "an update")
    dims, grads = shard.read_rows(asked, frames[3], header.precision)
    update = QueuedUpdate(request.peer, header, asked, dims, grads)
    if is_share:
        shard.joint_steps.add(Share.decode(frames, num_frames=5), update)
    else:
        shard.updates.add([update])
    shard.stages.lap("decode")
    return None


class _Join(msgspec.Struct):
    who: Annotated[str, msgspec.Meta(max_length=messages.MAX_MEMBER_CHARS)]
    ended: Annotated[str, msgspec.Meta(max_length=messages.MAX_MEMBER_CHARS)]


def _answer_join(shard: Shard, request: ShardRequest) -> Frames:
    join = messages.decode_json(request.frames[:2], _Join)
    share = Share.decode(request.frames, num_frames=3)
    gone = shard.joint_steps.join(
        share, JointTrainer(request.peer, join.who, join.ended)
    )
    return [encode_json(", ".join(gone))]


def _answer_leave(shard: Shard, request: ShardRequest) -> Frames:
    shard.joint_steps.leave(Share.decode(request.frames, num_frames=2))
    return [encode_json(None)]


def _answer_write(shard: Shard, request: ShardRequest) -> Frames:
    header, frames = request.header, request.frames
    if shard.find_outcome(_batch_of(header)) is not None:
        return [encode_json(None)]
    has_state, has_use = (
        bool(header.flags & flag) for flag in (messages.STATE, messages.COUNTS)
    )
    asked = shard.read_ids(frames, 7 if has_use else 4)
    shard.owners.require(asked.tables, header.stream, "a write")
    if has_use and not has_state:
        raise BatchError("Rows that are written with counts must have optimizer state.")
    widths, rows = shard.read_rows(
        asked, frames[3], header.precision, has_state=has_state
    )
    use = messages.RowUse.decode(frames) if has_use else messages.RowUse()
    store = shard.store
    if use.steps is not None:
        shard.updates.apply_all()  # they count
    shard.stages.lap("decode")
    with store.rows.transaction() as change:
        if has_use or (has_state and store.group(asked.tables).has_one_row):
            store.write_tables(
                asked.tables,
                asked.ids,
                asked.starts,
                rows,
                counts_N=use.counts,
                frequencies_N=use.frequencies,
                steps_T=use.steps,
            )
        else:
            of_tables = split_rows(rows, asked.starts, widths)
            for t, rows_NK in zip(asked.pieces(), of_tables, strict=True):
                store.write(t.table, t.ids, rows_NK)
        shard.streams.settle(change, _batch_of(header))
    shard.stages.lap("write")
    return [encode_json(None)]


def _answer_read(shard: Shard, request: ShardRequest) -> Frames:
    tables = shard.read_ids(request.frames, 3).pieces()
    for t in tables:
        require_fits(len(t.ids) * _row_bytes(shard, t.table))
    rows = [shard.store.read(t.table, t.ids) for t in tables]
    if request.header.flags & messages.INITIAL:
        for t, rows_NK in zip(tables, rows, strict=True):
            gone = shard.store.find(t.table, t.ids) == memory.MISSING
            if gone.any():
                state = shard.store.states[t.table]
                rows_NK[gone] = _begin_rows(state, read_only(t.ids[gone]))
    shard.stages.lap("lookup")
    return [bytes_of(rows_NK) for rows_NK in rows]


def _begin_rows(state: TableState, ids_N: Ids) -> Floats:
    """Return what the rows of ids would begin with now."""
    rows_NK = initial_rows(state.spec, ids_N)
    if state.spec.shared_rows:
        weights_ND = np.empty((len(ids_N), state.spec.dim), dtype=np.float32)
        state.read_only(ids_N, weights_ND)
        rows_NK[:, : state.spec.dim] = weights_ND
    return rows_NK


def _answer_metadata(shard: Shard, request: ShardRequest) -> Frames:
    tables = shard.read_ids(request.frames, 3).pieces()
    require_fits(4 * messages.METADATA_COLUMNS * sum(len(t.ids) for t in tables))
    reply: Frames = []
    for t in tables:
        found = shard.store.metadata(t.table, t.ids)
        columns = found.frequency, found.first_step, found.last_step, found.last_s
        reply.append(bytes_of(np.stack(columns, axis=1)))
    shard.stages.lap("lookup")
    return reply


class _Export(msgspec.Struct):
    table: int
    start: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    max_rows: Annotated[int, msgspec.Meta(ge=1)]


def _answer_export(shard: Shard, request: ShardRequest) -> Frames:
    asked = messages.decode_json(request.frames, _Export)
    shard.require_table(asked.table)
    max_rows, most = asked.max_rows, shard.config.max_request_ids
    if max_rows > most:
        raise BatchError(
            f"An export may have {most} rows. Received: max_rows {max_rows}."
        )
    require_fits(max_rows * _row_bytes(shard, asked.table))
    found = shard.store.scan(asked.table, asked.start, max_rows)
    shard.stages.lap("lookup")
    position = encode_json({"next": found.next_slot})
    return [position, bytes_of(found.ids), bytes_of(found.rows)]


class _Ids(msgspec.Struct):
    table: int
    start: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    first: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def _answer_ids(shard: Shard, request: ShardRequest) -> Frames:
    asked = messages.decode_json(request.frames, _Ids)
    shard.require_table(asked.table)
    most = MAX_MESSAGE_BYTES // 8
    found = shard.store.scan(asked.table, asked.start, most, only_ids=True)
    ids_N = found.ids[found.ids >= np.uint64(asked.first)]
    shard.stages.lap("lookup")
    met = encode_json({"next": found.next_slot, "rows": len(found.ids)})
    return [met, bytes_of(ids_N)]


def _row_bytes(shard: Shard, table: int) -> int:
    spec = shard.store.states[table].spec
    return 4 * (spec.dim + spec.num_state_floats)


class _Step(msgspec.Struct):
    table: int
    step: Annotated[int, msgspec.Meta(ge=0, le=messages.MAX_STEP)] | None = None


def _answer_step(shard: Shard, request: ShardRequest) -> Frames:
    asked = messages.decode_json(request.frames, _Step)
    shard.require_table(asked.table)
    shard.updates.apply_all()  # they count
    batch = _batch_of(request.header)
    if asked.step is not None:
        shard.owners.require([asked.table], request.header.stream, "a step")
        if (outcome := shard.find_outcome(batch)) is not None:
            return [encode_json(outcome[0])]
        with shard.store.rows.transaction() as change:
            shard.store.set_step(asked.table, asked.step)
            shard.streams.settle(change, batch, (asked.step, 0, 0, 0))
    return [encode_json(shard.store.states[asked.table].num_updates)]


class _Own(msgspec.Struct):
    tables: list[int]
    who: Annotated[str, msgspec.Meta(max_length=messages.MAX_MEMBER_CHARS)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)] | None = None


def _answer_own(shard: Shard, request: ShardRequest) -> Frames:
    asked = messages.decode_json(request.frames, _Own)
    stream, tables = request.header.stream, set(asked.tables)
    for number in tables:
        shard.require_table(number)
    if shard.find_outcome(batch := _batch_of(request.header)) is not None:
        return [encode_json(None)]
    shard.updates.apply_all()  # their senders wait for the acknowledgements
    shard.owners.require([], stream, "a request to own tables")
    if asked.rank is None or not stream:
        shard.owners.disown(tables, stream)
    else:
        shard.owners.own(TableOwner(asked.rank, stream, asked.who, tables))
    shard.keep_owners()
    with shard.store.rows.transaction() as change:
        shard.streams.settle(change, batch)
    return [encode_json(None)]


def _answer_hello(shard: Shard, _: ShardRequest) -> Frames:
    value = {
        "shard": shard.config.shard,
        "num_shards": shard.config.num_shards,
        "incarnation": shard.checkpoints.incarnation,
        "generation": shard.streams.generation,
        "max_request_ids": shard.config.max_request_ids,
        "serves": shard.checkpoints.serves,
        "tables": [
            _describe_table(shard, number)
            for number, state in enumerate(shard.store.states)
            if not (state.is_part or state.is_dropped)
        ],
    }
    return [encode_json(value)]


class _Added(msgspec.Struct):
    tables: list[dict[str, Any]]
    who: Annotated[str, msgspec.Meta(max_length=messages.MAX_MEMBER_CHARS)]


def _answer_add_tables(shard: Shard, request: ShardRequest) -> Frames:
    asked = messages.decode_json(request.frames, list[dict[str, Any]] | _Added)
    given = asked.tables if isinstance(asked, _Added) else asked
    specs = [TableSpec.from_json(description) for description in given]
    shard.updates.apply_all()  # with the settings that they were sent under
    shard.stages.lap("update")
    num_known, batch = len(shard.store.states), _batch_of(request.header)
    known = {state.spec.name: state.number for state in shard.store.present}
    if shard.find_outcome(batch) is not None and all(s.name in known for s in specs):
        return [encode_json([_describe_table(shard, known[s.name]) for s in specs])]
    shard.replace_restored(specs)
    numbers = shard.store.add_tables(specs)
    if isinstance(asked, _Added):
        shard.note_user(request.peer, asked.who, numbers)
    with shard.store.rows.transaction() as change:
        shard.streams.settle(change, batch)
    states = shard.store.states[num_known:]
    added = [state.spec for state in states if not state.is_part]
    if added and shard.config.shard == 0:  # the other servers have the same
        logger.info("new tables on all servers:\n%s", describe_tables(added))
        logger.info("optimizer engine: %s", shard.config.optimizer_engine)
    logger.debug("tables %s", specs)
    return [encode_json([_describe_table(shard, number) for number in numbers])]


def _describe_table(shard: Shard, number: int) -> dict[str, object]:
    wants_counts = shard.store.wants_counts(number)
    spec = shard.store.states[number].spec.to_json()
    return {"number": number, "wants_counts": wants_counts, "spec": spec}


def _answer_counters(shard: Shard, _: ShardRequest) -> Frames:
    return [encode_json(shard.counters())]


def _answer_clear(shard: Shard, request: ShardRequest) -> Frames:
    shard.updates.apply_all()  # their senders wait for the acknowledgements
    batch = _batch_of(request.header)
    if shard.find_outcome(batch) is None:
        shard.owners.require(None, request.header.stream, "a clear")
        shard.checkpoints.cancel("the rows were dropped")
        with shard.store.rows.transaction() as change:
            shard.streams.settle(change, batch)
            shard.store.clear()
        shard.updates.open_batches.clear_slots()
    return [encode_json(None)]


def _batch_of(header: Header) -> Batch:
    return header.stream, header.batch


def _shut_down(shard: Shard, _: ShardRequest) -> Frames:
    shard.stopping.set()
    return [encode_json(None)]


def _answer_checkpoint(shard: Shard, request: ShardRequest) -> Frames:
    asked = messages.decode_json(request.frames, CheckpointRequest)
    if asked.do != "progress":
        shard.updates.apply_all()  # acknowledged updates are in a dump
    if asked.do in ("unused", "drop"):
        number = (*asked.numbers, -1)[: shard.config.num_shards][shard.config.shard]
        if number >= 0:
            shard.owners.require([number], request.header.stream, "a drop")
            shard.require_unused(number, asked.table, request.peer)
    if asked.do == "load":
        shard.owners.require(None, request.header.stream, "a load")
    state = shard.checkpoints.handle(asked, request.header.stream)
    return [msgspec.json.encode(state)]


KINDS = {
    kind.kind: kind
    for kind in (
        RequestKind(Kind.LOOKUP, _answer_lookup, in_inference=True),
        RequestKind(Kind.UPDATE, _answer_update),
        RequestKind(Kind.JOIN, _answer_join, needs_rows=False),
        RequestKind(Kind.LEAVE, _answer_leave, needs_rows=False),
        RequestKind(Kind.WRITE, _answer_write),
        RequestKind(Kind.READ, _answer_read, in_inference=True),
        RequestKind(Kind.METADATA, _answer_metadata, in_inference=True),
        RequestKind(Kind.EXPORT, _answer_export, in_inference=True),
        RequestKind(Kind.IDS, _answer_ids, in_inference=True),
        RequestKind(Kind.STEP, _answer_step),
        RequestKind(Kind.OWN, _answer_own),
        RequestKind(Kind.HELLO, _answer_hello, needs_rows=False, in_inference=True),
        RequestKind(Kind.ADD_TABLES, _answer_add_tables),
        RequestKind(Kind.COUNTERS, _answer_counters, in_inference=True),
        RequestKind(Kind.CLEAR, _answer_clear),
        RequestKind(Kind.SHUTDOWN, _shut_down, needs_rows=False, in_inference=True),
        RequestKind(Kind.CHECKPOINT, _answer_checkpoint, needs_rows=False),
        RequestKind(Kind.PROGRESS, _answer_checkpoint, needs_rows=False),
    )
}
"""Every kind that a server answers, by its number on the wire."""
