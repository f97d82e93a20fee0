"""Files that an earlier revision wrote are loaded as that revision loaded them."""

import contextlib
import json
from contextlib import closing

import numpy as np
import pytest

from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import Target
from persia_torchrec.checkpoint.restore import restore
from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.errors import FrameError, PersiaError, RemoteError
from persia_torchrec.lookup.bags import decode_bags, encode_bags
from persia_torchrec.persia.batch import Origin, decode_rest, encode_rest
from persia_torchrec.rpc import messages
from persia_torchrec.rpc.connections import Connections
from persia_torchrec.rpc.float_codec import decode_floats, encode_floats
from persia_torchrec.rpc.messages import Header, Kind, Precision, Share
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec, with_parts
from tests.support import kills
from tests.support.batches import content, small_batch
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S
from tests.support.stored_files import (
    CAPACITY_ROWS,
    FUSED,
    SPECS,
    describe,
    describe_memory,
    expected,
    open_store,
    table_of_settings,
    unpack_memory,
    unpacked,
)

pytestmark = pytest.mark.slow

SMALL_ROWS = 14
"""Capacity of the stores that died in the middle of a request."""


def stopped(running):
    """Stop servers; return what they held."""
    for server in running:
        server.stop()
    return [describe(server.server.shard.store) for server in running]


def test_a_checkpoint_of_servers_is_loaded(servers, tmp_path):
    run = unpacked("checkpoint", tmp_path)
    running = servers.start(2, **FUSED)
    client = servers.client(running)
    saved = client.checkpoints.load(run)
    assert (saved.step, saved.num_rows, saved.num_left_out) == (40, 80, 0)
    assert client.learn_tables() == SPECS
    assert stopped(running) == expected("checkpoint.json")


@pytest.mark.parametrize("run", ["run", None])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_server_without_memory_restores_its_rows_from_increments(
    tmp_path, shard, run
):
    """Behind the checkpoint, or from the first one on; a second log continues each."""
    folder = unpacked("increments", tmp_path)
    store = EmbeddingStore(CAPACITY_ROWS, eviction="lfu", optimizer_engine="compiled")
    target = Target(shard, 2, CAPACITY_ROWS, True)
    logs = Folder(folder / "logs")
    restored = restore(store, target, run and Folder(folder / run), logs)
    assert restored.num_increments == (2 if run else 3)
    assert describe(store) == expected("increments.json")[shard]


def test_a_checkpoint_is_loaded_with_its_increments(servers, tmp_path):
    folder = unpacked("increments", tmp_path)
    running = servers.start(2, eviction="lfu", **FUSED)
    client = servers.client(running)
    saved = client.checkpoints.load(folder / "run", increments=folder / "logs")
    assert (saved.num_increments, saved.forgotten) == (4, ())
    assert stopped(running) == expected("increments.json")


def test_a_server_of_inference_follows_the_increments(servers, tmp_path):
    folder = unpacked("increments", tmp_path)
    running = servers.start(
        2,
        checkpoint=str(folder / "run"),
        increments_dir=str(folder / "logs"),
        eviction="lfu",
        **FUSED,
    )
    client = servers.client(running)

    def is_ready():
        with contextlib.suppress(PersiaError):  # it loads
            return sum(client.num_rows()) > 0
        return False

    wait_until(is_ready, "the servers are ready")
    for found, other in zip(stopped(running), expected("increments.json"), strict=True):
        for table, of_other in zip(found["tables"], other["tables"], strict=True):
            rows = table["rows"]  # of weights alone; the stored ones have their state
            assert all(rows.values())
            assert rows == {i: r[: len(rows[i])] for i, r in of_other["rows"].items()}


@pytest.mark.parametrize(("name", "eviction"), [("closed", "lfu"), ("killed", "lru")])
def test_a_memory_file_of_a_server_is_opened(path, name, eviction):
    unpack_memory(f"memory-{name}.npz", path)
    store = open_store(path, eviction=eviction)
    assert store.tables == with_parts(SPECS)
    assert describe_memory(store) == expected("memory.json")[name]
    store.close()


@pytest.mark.parametrize(
    ("name", "eviction"),
    [("update", "lru"), ("lookup", "lfu"), ("clear", "lru"), ("load", "lru")],
)
def test_a_request_that_a_death_interrupted_is_undone_or_completed(
    path, name, eviction
):
    """The process died in its middle; a clear, and a load, leave no rows."""
    unpack_memory(f"memory-interrupted-{name}.npz", path)
    store = open_store(path, SMALL_ROWS, eviction)
    assert store.tables == with_parts(kills.TABLES)
    assert describe_memory(store) == expected("interrupted.json")[name]
    store.close()


def test_a_server_continues_with_a_stored_memory_file(servers, path):
    unpack_memory("memory-killed.npz", path)
    found = expected("memory.json")["killed"]
    [running] = servers.start(memory_file=path, **FUSED)
    client = servers.client([running])
    assert client.learn_tables() == SPECS
    assert client.num_rows() == [found["counters"]["rows"]]
    for spec, table in zip(SPECS, found["tables"], strict=False):
        assert client.step(spec.name) == table["updates"]
        ids = np.array(list(table["rows"]), dtype=np.uint64)
        rows = [row.tobytes().hex() for row in client.read(spec.name, ids)]
        assert rows == list(table["rows"].values())
    client.add_tables(SPECS)
    split = client.split(np.array([1], dtype=np.uint64))
    stream, number, outcome = found["streams"]["settled"][-1]
    again = BatchNumber(stream, number)
    grads = np.ones((1, 4), dtype=np.float32)
    replies = client.push([("plain", split)], [grads], again)
    repeated = client.outcome(replies)  # it was answered before
    assert [
        repeated.num_missed,
        repeated.num_refused,
        repeated.num_unadmitted,
        repeated.num_gradients,
    ] == outcome


def test_settings_of_every_kind_are_read_and_written():
    found = expected("settings.json")
    tables = found["tables"]
    specs = [TableSpec.from_json(table) for table in tables]
    assert specs == [table_of_settings(n, t["name"]) for n, t in enumerate(tables)]
    assert json.loads(json.dumps([spec.to_json() for spec in specs])) == tables
    described = [spec.describe_rows(with_metadata=spec.has_metadata) for spec in specs]
    assert described == found["described"]


def test_a_stored_conversation_with_a_server_is_answered_alike(servers):
    [running] = servers.start(capacity_rows=100, optimizer_engine="compiled")
    running.server.shard.store.rows.seconds.clock = lambda: 7.0
    with closing(Connections("embedding server", [running.address])) as connections:
        for message in expected("messages.json")["conversation"]:
            stored = bytes.fromhex(message["header"])
            with pytest.raises(FrameError, match=r"version must be 4\. Received: 3"):
                Header.decode(stored)
            # Since then only FP16 travels otherwise.
            header = Header.decode(stored[:4] + b"\4" + stored[5:])
            assert header.encode() == stored[:4] + b"\4" + stored[5:]
            assert header.kind.name == message["kind"]
            assert {k: int(v) for k, v in header._asdict().items()} == message["fields"]
            frames = [bytes.fromhex(frame) for frame in message["frames"]]
            reply = connections[0].send(header, frames, timeout_s=DEADLINE_S, what="it")
            if "error" in message:
                with pytest.raises(RemoteError) as caught:
                    reply.frames()
                text = str(caught.value).partition(": ")[2]
                assert [caught.value.kind, text] == message["error"]
                continue
            received = [bytes(frame).hex() for frame in reply.frames()[1:]]
            if header.kind is Kind.HELLO:
                assert greeting_in(received) == greeting_in(message["reply"])
            elif header.precision is not Precision.FP16:
                assert received == message["reply"]


def greeting_in(frames):
    """Return what a HELLO is answered, but the number of the server's start."""
    [greeting] = [json.loads(bytes.fromhex(frame)) for frame in frames]
    assert greeting.pop("incarnation") > 0
    assert greeting.pop("serves", "") == ""  # told by later servers
    return greeting


def test_stored_frames_are_decoded_and_encoded_alike():
    found = expected("messages.json")
    segments = found["segments"]
    frames = [b"", *map(bytes.fromhex, segments["frames"])]
    tables = messages.decode_segments(frames, num_frames=3).pieces()
    assert [[table, ids.tolist()] for table, ids in tables] == segments["tables"]
    numbers = np.array([[table, len(ids)] for table, ids in tables])
    again = messages.encode_segments(numbers, [ids for _, ids in tables])
    assert [bytes(frame).hex() for frame in again] == segments["frames"]
    share = Share.decode([b"", bytes.fromhex(found["share"]["frame"])], num_frames=2)
    assert list(share) == found["share"]["fields"]
    assert share.encode().hex() == found["share"]["frame"]
    bags = decode_bags([bytes.fromhex(frame) for frame in found["bags"]["frames"]])
    assert [
        [name, bag.ids.tolist(), bag.lengths.tolist()] for name, bag in bags.items()
    ] == found["bags"]["bags"]
    assert [bytes(f).hex() for f in encode_bags(bags)] == found["bags"]["frames"]
    for one in found["floats"]:
        precision = Precision(one["precision"])
        if precision is Precision.FP16:  # of protocol 3: another scale
            continue
        floats = decode_floats(bytes.fromhex(one["frame"]), [(6,)], precision)
        assert floats.tobytes().hex() == one["bits"]
        assert bytes(encode_floats(floats, precision)).hex() == one["frame"]


def test_the_stored_rest_of_a_batch_is_read_and_written():
    data = bytes.fromhex(expected("messages.json")["rest of a batch"])
    assert encode_rest(small_batch()) == data
    rest = decode_rest(bytearray(data), Origin(0, 12, 0))
    assert rest.batch_id == 12
    assert content(small_batch())[1] == [
        (type(d), d.name, d.data.dtype, d.data.shape, d.data.tobytes())
        for d in rest.non_id_type_features + rest.labels
    ]
