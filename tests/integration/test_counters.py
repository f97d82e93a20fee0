"""Every counter that a file, a row or a message keeps, near its end.

``COUNTERS`` has those that the pages of ``docs/formats`` name. Each is set to a value
near its end, passes or reaches that, and must do what its page says.
"""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec import AdmitBloom, AdmitFrequency, Expiry
from persia_torchrec.checkpoint.catalog import (
    Manifest,
    begin_checkpoint,
    complete_checkpoints,
    delete_older,
    find_checkpoint,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import increment_name, list_increments
from persia_torchrec.checkpoint.row_file import IncrementHead
from persia_torchrec.client.codec import BatchCount, BatchNumber
from persia_torchrec.command import main
from persia_torchrec.data import WorkQueue
from persia_torchrec.datasets.work_queue import _Counter
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    FrameError,
    JobError,
    RemoteError,
)
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.registry_server import Journal
from persia_torchrec.job.requests import Beat, Raise, Read, Register, Report
from persia_torchrec.job.state import Member
from persia_torchrec.metrics.values import readings_of
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.rpc import slab as layout
from persia_torchrec.rpc.messages import NO_GENERATION, Header, Kind, Share
from persia_torchrec.rpc.reply import Reply
from persia_torchrec.rpc.slab import Slab
from persia_torchrec.rpc.slab_client import SharedMemoryTransport
from persia_torchrec.rpc.slab_server import SharedClient
from persia_torchrec.server.dedup import NOTHING, WINDOW, Streams
from persia_torchrec.server.dirty_set import DirtySet
from persia_torchrec.server.joint_steps import JointSteps, SavedGroup
from persia_torchrec.server.joint_steps import JointTrainer as OfGroup
from persia_torchrec.server.update_queue import QueuedUpdate
from persia_torchrec.store.change_log import ChangedSlots, Changes
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import HITS, LARGEST_TICK, POSITION_BITS
from persia_torchrec.store.memory_file import FILE_BYTES, TIMES_OPENED
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, ids_oldest_first
from tests.support.copied_stores import store_of, update, use
from tests.support.processes import wait_until
from tests.support.saved_training import Training
from tests.support.servers import DEADLINE_S, Servers, ids_of, segments_of
from tests.support.threads import InThread

FORMATS = Path(__file__).parents[2] / "docs/formats"
ITEM = TableSpec(name="item", dim=2, optimizer=Adagrad(0.1), keeps_metadata=True)


@dataclass(frozen=True)
class Counter:
    """A row of a page; ``passes`` gets a running job, a new folder, and a value.

    Where a sharper test stands in the room of the counter, ``elsewhere`` names it.
    """

    page: str
    name: str
    bits: str
    values: st.SearchStrategy[int] = field(default_factory=st.nothing)
    passes: Callable[[SimpleNamespace, Path, int], None] | None = None
    elsewhere: str = ""
    num_examples: int = 10


def near(end, below=9, above=5):
    return st.integers(end - below, end + above)


def look_up(store, ids, counts):
    out = np.empty((len(ids), store.tables[0].dim), dtype=np.float32)
    counts_N = np.array(counts, dtype=np.uint32)
    store.lookup(0, ids_of(*ids), out, training=True, counts_N=counts_N)


# Of a checkpoint


def pass_step(job, folder, value):
    if value > 2**62:
        with pytest.raises(RemoteError, match="step must be <= 4611686018427387904"):
            job.client.step("item", value)
        return
    assert job.client.step("item", value) == value
    job.train()
    assert job.client.step("item") == value + 1


def pass_second(job, folder, value):
    now = [value]
    store = EmbeddingStore(100, clock=lambda: now[0])
    store.add_table(replace(ITEM, expiry=Expiry(seconds_to_live=9)))
    for ids in ([1, 2], [1]):
        use(store, 0, ids)
        update(store, 0, ids)
        now[0] += 5
    while store.sweep(100):
        pass
    assert ids_oldest_first(store) == [(0, 1)]


def pass_frequency(job, folder, value):
    store = store_of(specs=[ITEM])
    for count in (value, 5):
        look_up(store, [7], [count])
    last = 2**32 - 1
    assert store.metadata(0, ids_of(7)).frequency.tolist() == [min(value + 5, last)]
    spec = replace(ITEM, admission=AdmitFrequency(last, max_waiting_rows=9))
    store = store_of(specs=[spec])
    look_up(store, [7], [value - 4])
    seen = spec.admission.sightings_of(store.states[0].remembered, ids_of(7))
    assert seen.values.tolist() == [value - 4]
    look_up(store, [7], [2**31])  # stays at its end, which is the threshold
    assert store.num_rows == 1


def pass_bloom(job, folder, value):
    spec = replace(ITEM, admission=AdmitBloom(100, expected_ids=10))
    store = store_of(specs=[spec])
    look_up(store, [7], [value])
    store.remove(0, ids_of(7))
    look_up(store, [7], [9])
    assert store.num_rows == 1


def pass_tick_of_use(job, folder, value):
    before, after = Training(1, folder, ITEM), Training(2, folder / "other", ITEM)
    before.servers[0].store.rows.tick = value
    before.train(range(2))
    saved = before.save(lambda: before.train(range(2, 5)))
    assert Manifest.read(saved).shards[0].tick == min(value + 2, LARGEST_TICK)
    for server in after.servers:
        server.load(saved, Folder(folder / "increments"))
        assert server.store.rows.tick < LARGEST_TICK + 20
    assert after.rows() == before.rows()
    for training in (before, after):
        training.train(range(5, 7))
    assert after.rows() == before.rows()
    spec = replace(ITEM, admission=AdmitFrequency(2, max_waiting_rows=9))
    store = store_of(specs=[spec])
    store.rows.tick = value
    for ids in ([1], [2], [3], [1, 3]):
        use(store, 0, ids)
    assert sorted(ids_oldest_first(store)) == [(0, 1), (0, 3)]
    seen = spec.admission.sightings_of(store.states[0].remembered, ids_of(2))
    assert (seen.uses >> np.uint64(POSITION_BITS)).tolist() == [
        min(value + 2, LARGEST_TICK)
    ]


def pass_offset(job, folder, num):
    dirty, slots = DirtySet(9), np.zeros(num, dtype=np.uint32)  # the same row often
    slots[-5:] = range(1, 6)
    dirty.add(Changes(slots=[ChangedSlots(0, 0, 5, slots)], num_rows=num))
    [(_, copy)] = dirty.take({0: num})
    offsets = [min(n, 2**24 - 1) for n in range(num - 5, num)]
    uses = copy.keywords["uses_N"][-5:] - np.uint64(5 << POSITION_BITS)
    assert uses.tolist() == offsets


def pass_names(job, folder, number):
    run = Folder(folder)
    for last in (number, number + 1):
        one = run.child(f"checkpoint-{last:08d}")
        one.make()
        Manifest((), (), "2026-01-01T00:00:00+00:00").write(one)
    assert find_checkpoint(str(folder)).url == one.url
    made = begin_checkpoint(str(folder))
    assert made.url == run.child(f"checkpoint-{number + 2:08d}").url
    delete_older(run, 1)
    assert [found.url for found in complete_checkpoints(run)] == [one.url]
    for last in (number + 1, number):
        (folder / increment_name(last)).touch()
    assert list_increments(run) == [number, number + 1]


def pass_num_batches(job, folder, value):
    saved = {"tables": [], "shards": [], "created": "2026-01-01T00:00:00+00:00"}
    Folder(folder).write_json("manifest.json", {**saved, "num_batches": value})
    if value < 2**47:
        assert Manifest.read(Folder(folder)).num_batches == value
    else:
        with pytest.raises(CheckpointError, match="num_batches"):
            Manifest.read(Folder(folder))


def pass_increment(job, folder, value):
    told = {"log": "a", "number": value, "shard": 0, "num_shards": 1, "tables": []}
    told |= {"created_s": 1.0, "tick": 1, "was_cleared": False}
    if value < 2**63:
        assert msgspec.convert(told, IncrementHead).number == value
    else:
        with pytest.raises(msgspec.ValidationError, match="number"):
            msgspec.convert(told, IncrementHead)


# Of a memory file


def pass_tick(job, folder, value):
    store = store_of(10, specs=[ITEM])
    store.rows.tick = value
    for number in range(20):
        use(store, 0, [number, number // 2])
        update(store, 0, [number])
    check_store(store)
    assert store.rows.tick == value + 20
    assert ids_oldest_first(store)[-2:] == [(0, 9), (0, 19)]


def pass_tally(job, folder, value):
    job.store.rows.tally[HITS] = value
    job.train()
    job.train()
    [counters] = job.client.counters()
    assert value < counters["hits"] <= value + 4
    [hits] = [r.value for r in readings_of(counters) if r.name == "persia_hits"]
    assert hits == counters["hits"]


def pass_generation(job, folder, value):
    streams = Streams(EmbeddingStore(10))
    if value >= NO_GENERATION:
        with pytest.raises(ConfigError, match=r"at most 65534 times again\."):
            job.client.begin_generation(value)
        return
    for generation in (value - 1, value):
        assert streams.admit(BatchNumber.new_stream(generation), 1)
    assert not streams.admit(BatchNumber.new_stream(NO_GENERATION), 1)
    with pytest.raises(FencedError, match=f"generation {value}"):
        streams.admit(BatchNumber.new_stream(value - 1), 1)


@contextlib.contextmanager
def streams_in(path):
    """Open streams in a memory file, which maps much, and close them."""
    store = EmbeddingStore(10, memory_file=path)
    try:
        yield store, Streams(store)
    finally:
        store.close()


def note(store, streams, batch, *, is_settled):
    with store.rows.transaction() as request:
        if is_settled:
            streams.settle(request, batch, (7, 0, 0, 0))
        else:
            streams.mark(request, batch, 1 << 3)


def pass_number_in_stream(job, folder, number):
    path, batch, before = str(folder / "memory"), (5, number), (5, number - 1)
    with streams_in(path) as (store, streams):
        if number >= 2**63:
            with pytest.raises(FrameError, match="must have 63 bits"):
                streams.admit(*batch)
            return
        streams.admit(*batch)
        note(store, streams, batch, is_settled=False)
        note(store, streams, before, is_settled=True)
    with streams_in(path) as (_, streams):
        assert streams.was_looked_up(batch, 3)
        assert streams.open_batches() == [batch]
        assert streams.outcome(before) == (7, 0, 0, 0)
        assert streams.outcome(batch) is None
        assert streams.outcome((5, number - WINDOW)) == NOTHING


def pass_uses_of_streams(job, folder, value):
    path = str(folder / "memory")
    with streams_in(path) as (store, streams):
        streams._tick = value
        for stream in (1, 2, 3, 1):
            note(store, streams, (stream, 1), is_settled=False)
    with streams_in(path) as (_, streams):
        assert [stream for stream, _ in streams.open_batches()] == [2, 3, 1]


def pass_times_opened(job, folder, value):
    path = folder / "memory"
    EmbeddingStore(10, memory_file=str(path)).close()
    with path.open("r+b") as file:
        file.seek(8 * TIMES_OPENED)
        file.write(struct.pack("<Q", value % 2**64))
    EmbeddingStore(10, memory_file=str(path)).close()
    with path.open("rb") as file:
        file.seek(8 * TIMES_OPENED)
        assert struct.unpack("<Q", file.read(8)) == ((value + 1) % 2**64,)


def pass_place_of_log(job, folder, value):
    assert FILE_BYTES // 8 == value == 2**40


# Of messages


def pass_request(job, folder, value):
    (connection,) = job.client._servers.connections
    connection._numbers = itertools.count(value)
    for _ in range(3):
        job.train()
    assert job.client.num_rows() == [2]
    assert next(connection._numbers) > value + 3


def pass_batch(job, folder, begun):
    rank = 2**16 - 1
    if begun < 2**47:
        number = BatchCount.number(rank, begun)
        assert (number >> 47, number % 2**47) == (rank, begun)
        job.train(number)
    else:
        with pytest.raises(ConfigError, match="at most 140737488355327 batches"):
            BatchCount.number(0, begun)


def pass_joint_step(job, folder, value):
    shares = [Trainers(None, Share(value - 5, value - 5, r, 2, 10**4)) for r in (0, 1)]
    applied, kept = [], []
    make = partial(
        JointSteps,
        lambda updates: applied.append([update.peer for update in updates]),
        reject=pytest.fail,
        is_connected=lambda peer: True,
        max_bytes=10**6,
        keep=lambda groups: kept.append(groups),
    )
    steps = make()
    for rank, of_rank in enumerate(shares):
        steps.join(of_rank._next, OfGroup(b"%d" % rank))
    for _ in range(3):
        for rank, of_rank in enumerate(shares):
            asked, grads = segments_of([(0, [1])]), np.ones(2, np.float32)
            dims, header = np.array([2]), Header(Kind.UPDATE)
            given = QueuedUpdate(b"%d" % rank, header, asked, dims, grads)
            encoded = of_rank.next_share().encode()
            steps.add(Share.decode([encoded], num_frames=1), given)
    for of_rank in shares:
        steps.leave(Share.decode([of_rank.next_group().encode()], num_frames=1))
    assert applied == [[b"0", b"1"]] * 3
    again = make()
    saved = [msgspec.json.decode(one, type=SavedGroup) for one in kept[-1]]
    again.restore(saved)
    assert list(again._groups) == list(reversed([one.number for one in saved]))


class Shared:
    """Both ends of one slab, whose counters begin at a value."""

    def __init__(self, value):
        fd = layout.make_memory(layout.LEAST_BYTES)
        ends = socket.socketpair()
        self.server = SharedClient(b"a", Slab(fd), ends[0])
        self.client = SharedMemoryTransport(Slab(fd), ends[1])
        os.close(fd)
        words = self.client.slab.words
        words[layout.REQUESTS] = words[layout.REPLIES] = value
        self.server.num_taken = self.client._num_taken = value
        self.client.deliver = self.deliver
        self.replies = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.socket.close()

    def ask(self, number, num_over_tcp=0):
        frames = [Header(Kind.PING, number).encode(), b"%d" % number]
        reply = self.replies[number] = Reply(DEADLINE_S)
        reply.message = frames
        assert self.client.send(number, reply, 0, num_over_tcp)
        return reply

    def answer(self):
        header, frames = self.server.take()
        opened = self.server.opened.pop(header.request)
        message = [header.encode(), bytes(frames[1])]
        assert self.server.answer(message, opened, header.request) is not None

    def deliver(self):
        for number, frames in self.client.take():
            self.replies.pop(number).set_result((Header(Kind.REPLY), frames))


def pass_messages(job, folder, value):
    with Shared(value) as shared:
        for number in range(1, 300):  # round the ring
            reply = shared.ask(number)
            assert shared.server.has_message()
            shared.answer()
            assert not shared.server.has_message()
            assert bytes(reply.frames()[1]) == b"%d" % number
        assert not shared.client.has_replies()
    with Shared(value) as shared:
        reply = shared.ask(1)
        caller = InThread(reply.frames)
        wait_until(lambda: shared.client.num_sleeps, "the caller sleeps on the futex")
        shared.answer()
        caller.result()
        assert reply.done()


def pass_messages_over_tcp(job, folder, value):
    with Shared(0) as shared:
        shared.server.num_over_tcp = value
        shared.ask(1, num_over_tcp=value + 1)
        assert not shared.server.has_message()
        shared.server.num_over_tcp += 1
        assert shared.server.has_message()
        shared.answer()


def pass_sleeps(job, folder, value):
    with Shared(0) as shared:
        words = shared.client.slab.words
        for sleep in (value, value, value + 1):
            words[layout.SLEEPS] = sleep
            shared.client.announce()
        assert shared.client.num_bells == 2


def pass_number_of_member(job, folder, value):
    with job.hosted_book() as (book, memory):
        me = ProcessIdentity.of_this_process()
        register = Register("trainer", 0, replace_pid(me, value))
        requests = {
            register: str,
            Report("trainer", 0, progress=value, pid=value): bool,
            Raise("trainer", 0, value, "a.py:1", value): bool,
        }
        for request, kind in requests.items():
            if value < 2**48:
                book.call(request, kind)
            else:
                with pytest.raises(JobError, match=f"< {2**48}|<= {2**48 - 1}"):
                    book.call(request, kind)
        book.call(Beat("trainer", 0, me.nonce), object)
        book.tell("a note", "is written")
        state = Journal(memory).read()
        assert state.notes["a note"] == "is written"
        if value < 2**48:
            assert state.members["trainer 0"].progress == value
            assert state.progress() == 2**62 + value


def replace_pid(process, pid):
    return msgspec.structs.replace(process, pid=pid)


def pass_heartbeats(job, folder, value):
    with job.hosted_book() as (book, memory):
        me = ProcessIdentity.of_this_process()
        book.call(Register("trainer", 0, me), str)
        member = job.book.job.members["trainer 0"]
        member.num_beats = member.restarts_in_all = value
        book.call(Beat("trainer", 0, me.nonce), object)
        member.count_restart(1)
        book.tell("a note", "is written")
        kept = Journal(memory).read().members["trainer 0"]
        assert (kept.num_beats, kept.restarts_in_all) == (value + 1, value + 1)
        assert book.call(Read("trainer", 0), Member).num_beats == value + 1


def pass_work_queue(job, folder, value):
    for name in ("a", "b"):
        (folder / name).touch()
    queue = WorkQueue([folder / "a", folder / "b"], num_epochs=value)
    queue.load({"next": 2 * value - 3, "leases": [[2 * value - 9, value]]})
    taken = list(iter(queue.take, None))
    assert [(item.epoch, item.row) for item in taken] == [
        (value - 5, value),
        *((value - 2, 0), (value - 1, 0), (value - 1, 0)),
    ]
    state = json.loads(json.dumps(queue.state(1, [])))
    assert state == {"next": 2 * value - 3, "leases": []}
    with job.hosted_book() as (book, _):
        book.tell("queue", json.dumps({"next": value, "last": {"1": value - 1}}))
        counter = _Counter(book, "queue", 0)
        assert [counter.take(value + 2) for _ in range(3)] == [value, value + 1, None]
        assert counter.num_taken() == value + 2


def pass_json(job, folder, value):
    beat = Beat("server", 0, "", figures={"hits": value, "loss": math.nan})
    told = msgspec.json.decode(msgspec.json.encode(beat), type=Beat).figures
    assert told == {"hits": value, "loss": None}
    [reading] = readings_of({"hits": told["hits"]})
    assert float(reading.value) == pytest.approx(value, rel=2**-52)


CHECKPOINT, MEMORY, MESSAGES = (
    partial(Counter, page) for page in ("checkpoint", "memory", "messages")
)
CAPACITY, OPTIM, BLOCKS, SWEEP, NOTES = (
    "tests/store/test_embedding_store.py test_a_capacity_out_of_its_range_is_rejected",
    "tests/embedding/test_optim_steps.py test_periods_beyond_what_a_float_counts_",
    "tests/store/test_table_blocks.py test_what_is_counted_of_an_id_stays_however_",
    "tests/store/test_embedding_store_sweep.py test_ages_in_steps_are_right_where_a_",
    "tests/store/test_change_log.py test_notes_go_round_after_any_number_of_words",
)
COUNTERS = [
    CHECKPOINT("step of a table", "63", near(2**62), pass_step),
    CHECKPOINT("first and last step of a row", "32", elsewhere=SWEEP),
    CHECKPOINT("last second of a row", "32", near(2**32, 30, -11), pass_second),
    CHECKPOINT(
        "frequency of a row, or of an id in `AdmitFrequency`",
        "32",
        near(2**32, 9, -1),
        pass_frequency,
    ),
    CHECKPOINT("counters of `AdmitBloom`", "8", near(255), pass_bloom),
    CHECKPOINT("tick of a use", "40", near(2**40), pass_tick_of_use, num_examples=2),
    CHECKPOINT(
        "offset of a use", "24", st.just(2**24 + 2), pass_offset, num_examples=1
    ),
    CHECKPOINT(
        "`acc`, `cur`, `t` of `DynamicDim`",
        "float64, float32, float32",
        elsewhere=BLOCKS,
    ),
    CHECKPOINT("period of `AdagradDecay`", "float32", elsewhere=OPTIM),
    CHECKPOINT(
        "numbers of checkpoints, deltas, increments",
        "8, 8, 12 digits",
        near(10**8) | near(10**12) | near(2**63, 9, -2),
        pass_names,
        num_examples=6,
    ),
    CHECKPOINT("`num_batches`", "47", near(2**47), pass_num_batches),
    CHECKPOINT(
        "rows, bytes, `number` of an increment", "63", near(2**63), pass_increment
    ),
    MEMORY(
        "tick",
        "64; 48 in a row's word; 8 in a tag",
        near(2**40) | near(2**48, 60, -21),
        pass_tick,
    ),
    MEMORY(
        "counters of the tally", "63", near(2**53) | near(2**63, 20, -9), pass_tally
    ),
    MEMORY(
        "generation of trainers", "16, of 63 of a stream", near(2**16), pass_generation
    ),
    MEMORY(
        "number of a request in its stream", "63", near(2**63), pass_number_in_stream
    ),
    MEMORY("uses of streams", "64", near(2**64, 20, -9), pass_uses_of_streams),
    MEMORY("words of the journal", "64", elsewhere=NOTES),
    MEMORY("times opened", "64", near(2**64), pass_times_opened),
    MEMORY(
        "places in the undo log",
        "40, in words",
        st.just(2**40),
        pass_place_of_log,
    ),
    MEMORY("slots and rows", "32", elsewhere=CAPACITY),
    MESSAGES(
        "number of a request of a client",
        "64",
        near(2**32) | near(2**63) | near(2**64, 40, -30),
        pass_request,
    ),
    MESSAGES("number of a batch", "47, and 16 of its rank", near(2**47), pass_batch),
    MESSAGES(
        "group of trainers, joint step",
        "64",
        near(2**62) | near(2**63) | near(2**64, 3, -1),
        pass_joint_step,
    ),
    MESSAGES(
        "messages in shared memory",
        "64; 32 of the futex",
        near(2**32, 299, 0) | near(2**63, 299, 0) | near(2**64, 400, -301),
        pass_messages,
        num_examples=6,
    ),
    MESSAGES(
        "messages over TCP before one in shared memory",
        "64",
        near(2**32) | near(2**63) | near(2**64, 9, -2),
        pass_messages_over_tcp,
    ),
    MESSAGES("sleeps of a server", "64", near(2**64, 9, -2), pass_sleeps),
    MESSAGES(
        "progress, starts and number of a process, of a member",
        "48",
        near(2**48) | near(2**64),
        pass_number_of_member,
    ),
    MESSAGES(
        "heartbeats and restarts of a member",
        "64",
        near(2**63) | near(2**64, 9, -2),
        pass_heartbeats,
    ),
    MESSAGES(
        "position of a work queue",
        "any",
        near(2**53) | near(2**63) | near(2**64),
        pass_work_queue,
    ),
    MESSAGES(
        "counters of servers and members in JSON",
        "any; 53 where a reader has float64",
        near(2**53) | near(2**63) | near(2**64),
        pass_json,
    ),
]


class Job(SimpleNamespace):
    """A server, its client, and the address book of a job with a memory."""

    def train(self, number=1):
        """Look two ids up, in a batch of its own, and update them."""
        self.stream = BatchNumber.new_stream(NO_GENERATION)
        batch = BatchNumber(self.stream, number)
        tables = [("item", self.client.split(ids_of(1, 2)))]
        [rows] = self.client.pull(tables, batch=batch)
        outcome = self.client.outcome(self.client.push(tables, [rows], batch))
        assert outcome.num_missed == 0

    @contextlib.contextmanager
    def hosted_book(self):
        memory = os.memfd_create("book")
        with contextlib.closing(AddressBook.host(0, memory=os.dup(memory))) as hosted:
            self.book = hosted
            joined = AddressBook.join("127.0.0.1", hosted.port)
            with contextlib.closing(joined):
                yield joined, memory
        os.close(memory)


@pytest.fixture(scope="module")
def job():
    with Servers() as servers:
        running = servers.start()
        client = servers.client(running)
        client.add_tables([ITEM])
        yield Job(client=client, store=running[0].server.shard.store)


@pytest.mark.slow
@pytest.mark.parametrize("counter", COUNTERS, ids=lambda counter: counter.name)
def test_a_counter_near_its_end_does_what_its_page_says(counter, job, tmp_path):
    if counter.elsewhere:
        file, name = counter.elsewhere.split()
        assert f"def {name}" in (FORMATS.parents[1] / file).read_text()
        return
    folders = (tmp_path / str(number) for number in itertools.count())

    @settings(max_examples=counter.num_examples)
    @given(counter.values)
    def passes(value):
        folder = next(folders)
        folder.mkdir()
        counter.passes(job, folder, value)

    passes()


def test_every_counter_is_on_a_page_and_tried_here():
    documented = []
    for page in sorted(FORMATS.glob("*.md")):
        _, _, text = page.read_text().partition("## Where counters end\n")
        rows = re.findall(r"^\| (.*?) \| (.*?) \|", text.partition("\n## ")[0], re.M)
        documented += [(page.stem, *row) for row in rows if row != ("counter", "bits")]
    assert documented == [(one.page, one.name, one.bits) for one in COUNTERS]


@pytest.mark.slow
def test_converted_checkpoints_loaded_again_and_again_count_few_requests(tmp_path):
    def convert(*paths):
        result = CliRunner().invoke(main, ["checkpoint", "convert", *map(str, paths)])
        assert result.exit_code == 0, result.output

    rows, ids = np.array([[1, 2], [3, 4], [5, 6]], np.float32), ids_of(1, 2, 3)
    with Servers() as servers:
        [running] = servers.start()
        client = servers.client([running])
        client.add_tables([TableSpec(name="item", dim=2, optimizer=SGD(lr=0.01))])
        running.server.shard.store.rows.tick = LARGEST_TICK - 1
        client.write("item", ids, rows)
        for number in range(2):
            state, made = tmp_path / f"{number}.pt", tmp_path / f"made {number}"
            client.checkpoints.dump(tmp_path / "run")
            convert(tmp_path / "run", state)
            convert(state, made)
            client.checkpoints.load(made, replace=False)
        assert client.read("item", ids).tolist() == rows.tolist()
        assert running.server.shard.store.rows.tick < LARGEST_TICK + 20
        check_store(running.server.shard.store)
