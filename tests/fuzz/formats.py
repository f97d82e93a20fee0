"""The file formats and messages that are fuzzed, each with what reads it."""

import contextlib
import io
import json
import os
import random
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from persia_torchrec import AdmitBloom, AdmitFrequency, Expiry
from persia_torchrec.checkpoint import catalog, increment_log
from persia_torchrec.checkpoint.catalog import LogPosition, Manifest, SavedTable
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Base, Log
from persia_torchrec.checkpoint.load import (
    Increment,
    SeenIds,
    ShardLoad,
    Target,
    apply_increment,
)
from persia_torchrec.checkpoint.restore import restore
from persia_torchrec.checkpoint.row_file import (
    IncrementHead,
    RowFileReader,
    RowFileWriter,
    ShardHead,
    shape_of,
)
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import CheckpointError, PersiaError
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry_server import Journal
from persia_torchrec.job.requests import Register
from persia_torchrec.job.state import AwakeClock, JobState
from persia_torchrec.job.survivable_memory import TwoHalves
from persia_torchrec.lookup.bags import Bags, decode_bags, encode_bags
from persia_torchrec.persia.batch import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    Origin,
    PersiaBatch,
    decode_rest,
    encode_rest,
)
from persia_torchrec.persia.convert import Conversion, convert_checkpoint
from persia_torchrec.persia.predict_requests import parse_json_batch
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.float_codec import decode_floats, encode_floats
from persia_torchrec.rpc.messages import Header, Kind, Share
from persia_torchrec.server.checkpoint_service import CheckpointRequest
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.fuzz.mutations import (
    EXTREMES,
    change_frames,
    change_json,
    flip,
    oversize,
    pack,
    unpack,
)
from tests.fuzz.running import Format
from tests.support.consistency import check_store
from tests.support.persia_files import Row, prefixed, write_checkpoint
from tests.support.row_files import SPECS
from tests.support.servers import ids_of

CAPACITY = 60
CREATED = "2026-01-01T00:00:00+00:00"
PERSIA_CONFIG = """
feature_index_prefix_bit: 8
slots_config:
  user: {dim: 3}
  item: {dim: 2}
"""
SETTINGS: dict[str, Any] = {"optimizer_engine": "compiled", "clock": lambda: 7.0}


def filled_store(specs: Sequence[TableSpec] = SPECS, **settings: Any) -> EmbeddingStore:
    """Return a store with rows in all tables."""
    store = EmbeddingStore(CAPACITY, **{**SETTINGS, **settings})
    store.add_tables(specs)
    rng = np.random.default_rng(7)
    for _ in range(3):
        for table, spec in enumerate(specs):
            ids = rng.integers(0, 30, 12).astype(np.uint64)
            rows = np.empty((len(ids), spec.dim), dtype=np.float32)
            slots = store.lookup(table, ids, rows, training=True)
            store.update(table, ids, np.ones_like(rows), slots)
    return store


def try_store(store: EmbeddingStore) -> None:
    """Use a store: it must be whole, and continue."""
    check_store(store)
    for table, spec in enumerate(store.tables):
        ids = np.arange(20, dtype=np.uint64)
        rows = np.empty((len(ids), spec.dim), dtype=np.float32)
        slots = store.lookup(table, ids, rows, training=True)
        store.update(table, ids, np.zeros_like(rows), slots)
    check_store(store)


def temporary_folder() -> Path:
    """Return a new folder in the process's own, which the test deletes."""
    return Path(tempfile.mkdtemp(dir="."))


# Files of rows


def row_file(head: ShardHead, rng: np.random.Generator) -> bytes:
    """Return a file of rows, and in an increment ids without them."""
    file = io.BytesIO()
    writer = RowFileWriter(file, head)
    for number, table in enumerate(head.tables):
        ids = np.unique(rng.integers(0, 40, 9)).astype(np.uint64)
        rows = shape_of(table).empty(len(ids))
        for column in rows.columns():
            column[:] = 1
        rows.ids[:] = ids
        rows.uses[:] = (np.uint64(number + 1) << np.uint64(24)) + np.arange(len(ids))
        writer.write(number, rows)
        if isinstance(head, IncrementHead):
            writer.write(number, ids_of(100, 101))
    writer.end()
    return file.getvalue()


def saved_tables() -> tuple[SavedTable, ...]:
    specs = [msgspec.json.decode(msgspec.json.encode(s.to_json())) for s in SPECS]
    return tuple(
        SavedTable(description, 7, spec.has_metadata)
        for description, spec in zip(specs, SPECS, strict=True)
    )


def increment_head(**more: Any) -> IncrementHead:
    values = {"log": "", "number": 1, "created_s": 5.0, "tick": 9, "was_cleared": False}
    return IncrementHead(
        shard=0, num_shards=1, tables=saved_tables(), **{**values, **more}
    )


def change_row_file(rng: random.Random, data: bytes) -> bytes:
    """Change the header, or a block, and make all checksums right again."""
    magic, version, size, _ = struct.unpack_from("<8sIII", data)
    text, rest = data[20 : 20 + size], data[20 + size :]
    blocks, at = [], 0
    row_bytes = [shape_of(table).row_bytes for table in saved_tables()]
    while rest[at : at + 4] != b"ENDS":
        kind, table, num, _ = struct.unpack_from("<4sIII", rest, at)
        length = num * (row_bytes[table] if kind == b"ROWS" else 8)
        blocks.append([kind, table, num, rest[at + 16 : at + 16 + length]])
        at += 16 + length
    if rng.random() < 0.5:
        text = change_json(rng, text)
    else:
        block = rng.choice(blocks)
        what = rng.randrange(4)
        if what == 0:
            block[3] = rng.choice((flip, oversize))(rng, block[3])
        elif what == 1:
            at = rng.randrange(3)
            block[at] = rng.choice((b"GONE", b"ROWS")) if at == 0 else rng.randrange(9)
        elif what == 2:
            blocks.append(block)
        else:
            blocks.remove(block)
    parts, heads, total = [], 0, 0
    for kind, table, num, payload in blocks:
        head = struct.pack("<4sIII", kind, table, num, zlib.crc32(payload))
        heads, total = zlib.crc32(head, heads), total + num
        parts += [head, payload]
    begin = struct.pack("<8sIII", magic, version, len(text), zlib.crc32(text))
    return b"".join([begin, text, *parts, struct.pack("<4sIQ", b"ENDS", heads, total)])


def shard_files() -> Format:
    rng, folder = np.random.default_rng(1), temporary_folder()
    head = ShardHead(shard=0, num_shards=1, tables=saved_tables())
    store = filled_store()
    file = folder / "shard-00000-of-00001.rows"

    def check(data: bytes) -> None:
        reader = RowFileReader(io.BytesIO(data), "a file", ShardHead)
        for _ in reader.blocks():
            pass
        file.write_bytes(data)
        shard = catalog.SavedShard(file.name, *reader.written, 9, {})
        manifest = Manifest(reader.head.tables, (shard,), CREATED)
        manifest.write(Folder(folder))
        load = ShardLoad(Folder(folder), Target(0, 1, CAPACITY, False), store)
        load.check()
        load.load()
        try_store(store)

    return Format([row_file(head, rng) for _ in range(3)], change_row_file, check)


def increments() -> Format:
    rng, folder = np.random.default_rng(2), temporary_folder()
    heads = [increment_head(), increment_head(was_cleared=True)]
    store = filled_store()
    file = folder / increment_log.increment_name(1)

    def check(data: bytes) -> None:
        file.write_bytes(data)
        increment = Increment.read(Folder(folder), 1)
        target = Target(0, 1, CAPACITY, False)
        part = increment.select(target)
        seen = SeenIds(store, target)
        for _ in apply_increment(store, part, seen):
            pass
        seen.put()
        try_store(store)

    return Format([row_file(head, rng) for head in heads], change_row_file, check)


# Folders: manifests, and logs of increments


def run_with_log(folder: Path) -> tuple[bytes, bytes, str]:
    """Write a checkpoint, and a log that follows it; return their texts."""
    rng = np.random.default_rng(3)
    head = ShardHead(shard=0, num_shards=1, tables=saved_tables())
    name = "shard-00000-of-00001-0123456789ab"
    checkpoint = folder / "run" / "checkpoint-00000001"
    log = folder / "logs" / name
    log.mkdir(parents=True)
    checkpoint.mkdir(parents=True)
    data = row_file(head, rng)
    (checkpoint / "shard-00000-of-00001.rows").write_bytes(data)
    reader = RowFileReader(io.BytesIO(data), "", ShardHead)
    for _ in reader.blocks():
        pass
    file = "shard-00000-of-00001.rows"
    shard = catalog.SavedShard(
        file, *reader.written, 3, {"capacity_rows": 60}, LogPosition(name, 1)
    )
    manifest = Manifest(head.tables, (shard,), CREATED, 12)
    manifest.write(Folder(checkpoint))
    increment = row_file(increment_head(log=name), rng)
    (log / increment_log.increment_name(1)).write_bytes(increment)
    begun = Log(name, 0, 1, CREATED, Base("checkpoint", "x", CREATED), "0123")
    Folder(log).write_json(increment_log.LOG_FILE, begun)
    texts = [checkpoint / catalog.MANIFEST, log / increment_log.LOG_FILE]
    return *(path.read_bytes() for path in texts), name


def _restores(store: EmbeddingStore, folder: Path) -> None:
    """Restore what is in a run and its logs; then follow the logs, too."""
    store.clear()
    target = Target(0, 1, CAPACITY, False)
    restore(store, target, Folder(folder / "run"), Folder(folder / "logs"))
    check_store(store)
    lines = increment_log.find_lines(Folder(folder / "logs"), {})
    found = catalog.find_checkpoint(folder / "run")
    manifest = Manifest.read(found)
    end = increment_log.find_end(lines, found, manifest)
    if end is None:
        raise CheckpointError("nothing to follow")
    for line, position in zip(end.lines, end.positions, strict=True):
        line.next_position(position)
        start = end.leads_over(replace(position, number=position.number + 1))
        assert isinstance(start, bool)


def manifests() -> Format:
    folder = temporary_folder()
    text, _, _ = run_with_log(folder)
    file = folder / "run" / "checkpoint-00000001" / catalog.MANIFEST
    store = filled_store()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        _restores(store, folder)

    return Format([text], change_json, check)


def logs() -> Format:
    folder = temporary_folder()
    _, text, name = run_with_log(folder)
    file = folder / "logs" / name / increment_log.LOG_FILE
    store = filled_store()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        _restores(store, folder)

    return Format([text], change_json, check)


def books() -> Format:
    """The coordinator's memory, which the next one reads."""
    file = os.memfd_create("book")
    job = JobState("x", AwakeClock(1.0), notes={"n": "7"}, addresses={"server 0": "é"})
    job.register(Register("server", 0, ProcessIdentity.of_this_process()))
    journal, halves = Journal(file), TwoHalves(file)
    state = msgspec.msgpack.encode(job)

    def check(data: bytes) -> None:
        halves.write(data)
        found = journal.read()
        if found is not None:
            found.resume(2.0)
            found.tick(found.members.values())
            journal.write(found)

    return Format([state], flip, check)


# Memory of a store


MEMORY_SPECS = [
    TableSpec(name="a", dim=3, optimizer=Adagrad(0.1), admission=AdmitFrequency(2, 50)),
    TableSpec(
        name="b",
        dim=2,
        optimizer=SGD(0.1),
        admission=AdmitBloom(3, 50),
        expiry=Expiry(steps_to_live=30),
    ),
]
HEAD_BYTES = 2**20
LINES_AT, TABLES_AT = 2**21, 6 * 2**20


def memory_files() -> Format:
    """All that says where things are: header, directories, reservations, tables.

    Rows, and what compiled loops write beside them, are as trusted as the process's own
    memory.
    """
    made = os.memfd_create("made")
    store = filled_store(MEMORY_SPECS, memory_file=f"/proc/self/fd/{made}")
    store.notes(64)
    store.close()
    extents = list(_extents(made))
    parts = [os.pread(made, 256, at) for at in (0, LINES_AT)]
    areas = [os.pread(made, 640, at) for at in (4096, 4608, 8192, 16384, 933_888)]
    (published,) = struct.unpack_from("<Q", parts[0], 72)
    tables_at = TABLES_AT + (published >> 63) * 64 * 2**20
    tables = os.pread(made, published & (2**32 - 1), tables_at)
    places = [0, LINES_AT, 4096, 4608, 8192, 16384, 933_888, tables_at]
    size = os.fstat(made).st_size

    def change(rng: random.Random, data: bytes) -> bytes:
        frames = unpack(data)
        at = rng.randrange(len(frames))
        if at == len(frames) - 1:
            frames[at] = change_json(rng, frames[at])
        else:
            word = rng.randrange(len(frames[at]) // 8)
            number = rng.choice((*EXTREMES, rng.randrange(2**20), rng.getrandbits(64)))
            part = bytearray(frames[at])
            struct.pack_into("<Q", part, 8 * word, number % 2**64)
            frames[at] = bytes(part)
        return pack(frames)

    def check(data: bytes) -> None:
        file = os.memfd_create("changed")
        try:
            os.truncate(file, size)
            for at, content in extents:
                os.pwrite(file, content, at)
            for at, content in zip(places, unpack(data), strict=False):
                os.pwrite(file, content[: 2**16], at)
            opened = EmbeddingStore(
                CAPACITY, memory_file=f"/proc/self/fd/{file}", **SETTINGS
            )
            with contextlib.closing(opened):
                opened.notes(64)
        finally:
            os.close(file)

    return Format([pack([*parts, *areas, tables])], change, check)


def _extents(file: int) -> Any:
    """Yield where a sparse file has data, and the data that is not zero."""
    at, size = 0, os.fstat(file).st_size
    while at < size:
        try:
            at = os.lseek(file, at, os.SEEK_DATA)
        except OSError:
            return
        stop = os.lseek(file, at, os.SEEK_HOLE)
        for begin in range(at, stop, 2**16):
            content = os.pread(file, min(2**16, stop - begin), begin)
            if any(content):
                yield begin, content
        at = stop


# What travels


def wire_messages() -> Format:
    ids = ids_of(1, 2, 3)
    header = Header(Kind.LOOKUP, 5, flags=messages.TRAINING).encode()
    lookup = messages.encode_segments(np.array([[0, 3], [1, 1]]), [ids, ids[:1]])
    counts = np.ones(4, dtype=np.uint32).tobytes()
    share = Share(1, 2, 0, 2, 1000).encode()
    rows = np.ones((3, 2), dtype=np.float32)
    bags = encode_bags({"x": Bags(ids, np.array([2, 1], dtype=np.int32))})
    jsons = [
        {"kind": "ServerError", "message": "x"},
        {"phase": "dumped", "progress": 0.5, "error": None, "result": [1]},
        {"do": "dump", "task": 7, "folder": "/tmp", "replace": True},
    ]
    seeds = [
        [header, *map(bytes, lookup), counts],
        [header, *map(bytes, lookup), np.ones(4, np.float32).tobytes(), share],
        [
            header,
            *map(bytes, lookup),
            bytes(16),
            counts,
            counts,
            np.ones(2, int).tobytes(),
        ],
        [header, *map(bytes, bags)],
        *([header, json.dumps(value).encode()] for value in jsons),
        *([header, bytes(encode_floats(rows, p))] for p in messages.Precision),
    ]

    def check(data: bytes) -> None:
        frames: list[Any] = unpack(data)
        error, num_accepted = None, 0
        for decode in _DECODERS:
            try:
                decode(frames)
                num_accepted += 1
            except PersiaError as exc:
                error = exc
        if error is not None and not num_accepted:
            raise error

    return Format([pack(frames) for frames in seeds], change_frames, check)


def _decode_lookup(frames: list[Any], num_frames: int) -> None:
    messages.decode_segments(frames, num_frames=num_frames)
    if num_frames > 3:
        messages.decode_counts(frames)


def _decode_write(frames: list[Any]) -> None:
    messages.decode_segments(frames, num_frames=7)
    messages.RowUse.decode(frames)


_PAIR_BYTES = {
    messages.Precision.FP32: 8,
    messages.Precision.FP16: 5,  # and 4 of a frame
    messages.Precision.BF16: 4,
}

_DECODERS: list[Callable[[list[Any]], object]] = [
    lambda frames: Header.decode(frames[0]),
    partial(_decode_lookup, num_frames=3),
    partial(_decode_lookup, num_frames=4),
    partial(_decode_lookup, num_frames=5),
    _decode_write,
    *(partial(Share.decode, num_frames=num) for num in (2, 3, 5)),
    lambda frames: decode_bags(frames[1:]),
    *(
        partial(messages.decode_json, type_=kind)
        for kind in (messages.ErrorReply, messages.TaskState, CheckpointRequest)
    ),
    *(
        lambda frames, p=p: decode_floats(
            frames[-1], [(len(frames[-1]) // _PAIR_BYTES[p], 2)], p
        )
        for p in messages.Precision
    ),
]


def table_settings() -> Format:
    """What ADD_TABLES carries, and files of rows have."""
    seeds = [json.dumps(s.to_json()).encode() for s in (*SPECS, *MEMORY_SPECS)]

    def check(data: bytes) -> None:
        spec = TableSpec.from_json(messages.decode_json([b"", data], dict[str, Any]))
        step, dim = 2**40, spec.dim
        numbers = spec.optimizer.step_numbers(dim, step)
        for floats in (numbers, spec.initializer.fill_numbers(dim)):
            np.array(floats, dtype=np.float32)
        np.array(spec.admission.kernel_numbers(spec.seed), dtype=np.uint64)
        assert spec.num_state_floats >= 0
        assert spec.describe_rows()

    return Format(seeds, change_json, check)


def batches() -> Format:
    many = IDTypeFeature("item", [ids_of(7, 8), ids_of(), ids_of(7)])
    single = IDTypeFeatureWithSingleID("user", ids_of(1, 2, 3))
    labels = [Label(np.ones((3, 1), dtype=np.float32))]
    dense = [NonIDTypeFeature(np.ones((3, 2), dtype=np.uint8))]
    one = PersiaBatch([many, single], dense, labels, meta=b"meta")
    other = PersiaBatch([single], requires_grad=False)
    seeds = [one.to_bytes(), encode_rest(one), other.to_bytes()]

    def change(rng: random.Random, data: bytes) -> bytes:
        _, _, size = struct.unpack_from("<4sIQ", data)
        text = change_json(rng, data[16 : 16 + size])
        begin = struct.pack("<4sIQ", b"PTRB", 1, len(text))
        return begin + text + bytes(-len(text) % 8) + data[16 + size + -size % 8 :]

    def check(data: bytes) -> None:
        try:
            PersiaBatch.from_bytes(data)
        except PersiaError:
            decode_rest(bytearray(data), Origin(0, 1, 0))

    return Format(seeds, change, check)


def http_bodies() -> Format:
    value = {
        "id_type_features": {"item": [[7, 8], []], "user": [[3], [2**64 - 1]]},
        "non_id_type_features": [[[0.5, 1.0], [0.0, 2.0]], [1, 2]],
    }
    return Format([json.dumps(value).encode()], change_json, parse_json_batch)


# PERSIA's checkpoints


def persia_checkpoints() -> Format:
    """A folder of PERSIA's: which of its files, then what it holds."""
    rng, folder = np.random.default_rng(5), temporary_folder()
    groups = {"user": 3, "item": 2}
    (folder / "config.yml").write_text(PERSIA_CONFIG)
    rows = []
    for number, dim in enumerate(groups.values(), 1):
        for id_ in (1, 5, 2**40):
            floats = np.ones(2 * dim, dtype=np.float32)
            rows.append(Row(prefixed(id_, number, 8), floats, dim))
    source = folder / "source"
    write_checkpoint(source, rows, rng, num_servers=1, num_shards=1)
    names = ["embedding_dump_done", "s0/embedding_dump_done"]
    names.append("s0/replica_0_shard_0.emb")
    contents = [(source / name).read_bytes() for name in names]

    def change(rng: random.Random, data: bytes) -> bytes:
        return data[:1] + rng.choice((flip, oversize))(rng, data[1:])

    def check(data: bytes) -> None:
        which = (data or b"\0")[0] % len(names)
        for number, (name, content) in enumerate(zip(names, contents, strict=True)):
            (source / name).write_bytes(data[1:] if number == which else content)
        out = folder / "out"
        try:
            convert_checkpoint(
                Conversion(
                    source=str(source),
                    destination=str(out),
                    embedding_config=str(folder / "config.yml"),
                )
            )
        finally:
            shutil.rmtree(out, ignore_errors=True)

    seeds = [bytes([n]) + content for n, content in enumerate(contents)]
    return Format([*seeds, seeds[-1], seeds[-1]], change, check)


FORMATS: dict[str, Callable[[], Format]] = {
    "checkpoint shard": shard_files,
    "checkpoint manifest": manifests,
    "increment": increments,
    "log of increments": logs,
    "memory of a coordinator": books,
    "memory of a store": memory_files,
    "messages": wire_messages,
    "settings of a table": table_settings,
    "PERSIA batch": batches,
    "HTTP body": http_bodies,
    "PERSIA checkpoint": persia_checkpoints,
}
"""By name, what makes a format."""
