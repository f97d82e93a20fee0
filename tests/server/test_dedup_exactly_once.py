"""Requests that are sent again, to the same server or to its next start."""

import gc
import itertools
import json
import os
import struct
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from persia_torchrec import AdmitFrequency, Constant
from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.rpc.messages import (
    COUNTS,
    GENERATION_SHIFT,
    PART_SHIFT,
    SHARE,
    STATE,
    TRAINING,
    Header,
    Kind,
    Share,
    encode_json,
)
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.dedup import WINDOW
from persia_torchrec.table import TableSpec
from tests.server.server_model import REJECTED, Model
from tests.server.stranger import Stranger, one_segment
from tests.support.servers import RunningServer

pytestmark = pytest.mark.slow

PLAIN = {"dim": 1, "optimizer": SGD(1.0), "initializer": Constant(0.0)}
COUNT = TableSpec(name="count", keeps_metadata=True, **PLAIN)
RARE = TableSpec(name="rare", admission=AdmitFrequency(2), **PLAIN)
NULL = encode_json(None)
TRAINERS = range(Model.NUM_RANKS + 1)  # the last one trains by itself
NUM_IDS = 6


class Restarted:
    """A server with a memory file, which is killed and restarted."""

    def __init__(self):
        self.file = os.memfd_create("store")
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        self._config = ServerConfig(
            shard=0,
            num_shards=1,
            capacity_rows=1000,
            memory_file=path,
            recovery_s=600.0,
        )
        self._start()
        tables = encode_json([COUNT.to_json(), RARE.to_json()])
        assert self.ask(Header(Kind.ADD_TABLES, 1).encode(), tables)[1]

    def _start(self):
        gc.collect()  # each maps 8 TiB of 128
        self.running = RunningServer(self._config)
        self._stranger = Stranger(self.running.address)

    def stop(self):
        """End as a process that is killed: what waits gets no answer."""
        self._stranger.socket.close(linger=0)
        self.running.server.shard.joint_steps.reject_all = lambda _: None
        self.running.stop()
        self.running = None

    def restart(self):
        self.stop()
        self._start()

    def close(self):
        self.stop()
        os.close(self.file)

    def ask(self, *frames):
        return self._stranger.ask(*frames)

    def ask_json(self, kind, value=None):
        """Return the reply to a request without a number."""
        _, [reply] = self.ask(Header(kind, 1).encode(), encode_json(value))
        return json.loads(reply)

    def read(self, kind, dtype, table=Model.COUNT):
        """Return the first column of what is read of all ids."""
        segment = one_segment(*range(NUM_IDS), table=table)
        _, [frame] = self.ask(Header(kind, 1).encode(), *segment)
        return np.frombuffer(frame, dtype).reshape(NUM_IDS, -1)[:, 0].tolist()


class Connection(Stranger):
    """A trainer's, whose answers are looked for by number: shares wait."""

    def __init__(self, address):
        super().__init__(address)
        self.early = {}

    def answer(self, number):
        while number not in self.early:
            header, body = self.receive()
            self.early[header.request] = header, body
        return self.early.pop(number)


class Request(NamedTuple):
    """A request of a trainer; ``predict`` has the model answer it."""

    trainer: int
    header: Header
    frames: tuple[bytes, ...]
    predict: Callable[[], object]

    @property
    def batch(self):
        return self.header.stream, self.header.batch

    @property
    def is_share(self):
        return bool(self.header.flags & SHARE)


gaps = st.sampled_from([1, 1, 1, 256, WINDOW])
id_sets = st.sets(st.integers(0, NUM_IDS - 1), min_size=1)
gradients = st.dictionaries(
    st.integers(0, NUM_IDS - 1), st.sampled_from([-1.0, -1.0, -2.0, float("nan")])
)


class ServerMachine(RuleBasedStateMachine):
    """Any order of requests, sent once or again, agrees with a model of the server.

    Two ranks train jointly, another trainer by itself. Each may send again what it has
    sent, over the same connection or another one; the server may be killed; a rank may
    leave; the trainers may be started again, and older ones come late.
    """

    def __init__(self):
        super().__init__()
        self.server, self.model = Restarted(), Model()
        self.connections, self.sent, self.shares = {}, [], {}
        self.numbers, self.generation, self.group = itertools.count(2), 0, 1
        self.begin_generation()

    def begin_generation(self):
        self.streams = [BatchNumber.new_stream(self.generation) for _ in range(4)]
        self.next, self.looked_up = [0] * 4, [[] for _ in range(4)]
        self.begin_group()

    def begin_group(self):
        self.given = [set() for _ in TRAINERS]

    def connect(self, trainer):
        if trainer in self.connections:
            self.connections[trainer].socket.close(linger=0)
        self.connections[trainer] = Connection(self.server.running.address)

    def number(self, trainer, gap=1):
        self.next[trainer] += gap
        return self.next[trainer]

    def send(self, request):
        """Send a request, again maybe; compare all replies that it brings."""
        if request.trainer not in self.connections:
            self.connect(request.trainer)
        connection, number = self.connections[request.trainer], next(self.numbers)
        header = request.header.encode(request=number)
        connection.socket.send_multipart([header, *request.frames])
        if request.header.stream >> GENERATION_SHIFT < self.generation:
            assert connection.answer(number)[1]["kind"] == "FencedError"
            return
        reply = request.predict()
        if not request.is_share:
            assert answer_of(connection, number) == reply
            return
        self.shares[request.batch] = connection, number
        if request.batch not in reply:  # it waits: the next is answered after it
            connection.socket.send_multipart([Header(Kind.COUNTERS, 1).encode(), NULL])
            connection.answer(1)
            assert number not in connection.early
        self.receive(reply)

    def receive(self, outcomes):
        """Compare the answers to shares with what a model gives."""
        for batch, outcome in outcomes.items():
            connection, number = self.shares.pop(batch)
            if connection in self.connections.values():  # else its answer is lost
                assert answer_of(connection, number) == outcome

    def begin(self, trainer, kind, number, frames, *predict, flags=0):
        header = Header(kind, stream=self.streams[trainer], batch=number, flags=flags)
        request = Request(trainer, header, frames, partial(*predict))
        self.sent.append(request)
        self.send(request)

    @rule(
        trainer=st.sampled_from(TRAINERS),
        table=st.sampled_from([Model.COUNT, Model.RARE]),
        ids=id_sets,
        gap=gaps,
        part=st.integers(0, 6),
        with_state=st.booleans(),
    )
    def look_up(self, trainer, table, ids, gap, part, with_state):
        gap = gap if trainer == TRAINERS[-1] else 1
        number = self.number(trainer, gap) if part < 3 else self.next[trainer]
        batch, ids = (self.streams[trainer], number), sorted(ids)
        if part < 3:
            self.looked_up[trainer].append(number)
        segment = one_segment(*ids, table=table)
        flags = TRAINING | part << PART_SHIFT | (STATE if with_state else 0)
        look_up = self.model.look_up_states if with_state else self.model.look_up
        predict = look_up, batch, part, table, ids
        self.begin(trainer, Kind.LOOKUP, number, segment, *predict, flags=flags)

    def take_number(self, trainer, which):
        """Return the number of a batch that was looked up, or a new one."""
        looked_up = self.looked_up[trainer]
        if not looked_up:
            return self.number(trainer)
        number = looked_up[which % len(looked_up)]
        self.looked_up[trainer] = [n for n in looked_up if n != number]
        return number

    @rule(grads=gradients, which=st.integers(0, 9))
    def push(self, grads, which):
        trainer = TRAINERS[-1]
        number = self.take_number(trainer, which)
        batch = self.streams[trainer], number
        predict = self.model.change, batch, partial(self.model.update, grads)
        self.begin(trainer, Kind.UPDATE, number, frames_of(grads), *predict)

    @rule(
        rank=st.integers(0, Model.NUM_RANKS - 1),
        grads=gradients,
        which=st.integers(0, 9),
        ahead=st.integers(0, 2),
    )
    def push_share(self, rank, grads, which, ahead):
        free = (step for step in itertools.count(1) if step not in self.given[rank])
        step = next(itertools.islice(free, ahead, None))
        self.give(rank, step, grads, which)

    def give(self, rank, step, grads, which=0):
        self.given[rank].add(step)
        number = self.take_number(rank, which)
        share = Share(self.group, step, rank, Model.NUM_RANKS, 600_000).encode()
        frames, batch = (*frames_of(grads), share), (self.streams[rank], number)
        predict = self.model.share, batch, rank, step, grads
        self.begin(rank, Kind.UPDATE, number, frames, *predict, flags=SHARE)

    @rule(
        kind=st.sampled_from([Kind.WRITE, Kind.STEP, Kind.CLEAR]),
        value=st.integers(1, 9),
        use=st.none() | st.tuples(*[st.integers(0, 9)] * 3),
    )
    def change(self, kind, value, use):
        trainer = len(TRAINERS)
        number, flags = self.number(trainer), 0
        batch, model = (self.streams[trainer], number), self.model
        match kind:
            case Kind.WRITE if use:
                row = *one_segment(value % NUM_IDS), struct.pack("<f", value)
                frames = (
                    *row,
                    *(struct.pack(f"<{t}", n) for t, n in zip("IIq", use, strict=True)),
                )
                flags = STATE | COUNTS
                apply = partial(model.write_states, value % NUM_IDS, float(value), *use)
            case Kind.WRITE:
                frames = *one_segment(value % NUM_IDS), struct.pack("<f", value)
                apply = partial(model.write, value % NUM_IDS, float(value))
            case Kind.STEP:
                frames = (encode_json({"table": 0, "step": value}),)
                apply = partial(model.set_step, value)
            case _:
                frames, apply = (NULL,), model.clear
        predict = model.change, batch, apply
        self.begin(trainer, kind, number, frames, *predict, flags=flags)

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(0, 30), reconnects=st.booleans())
    def send_again(self, back, reconnects):
        request = self.sent[-1 - back % len(self.sent)]
        if reconnects:
            self.connect(request.trainer)
        self.send(request)

    @rule()
    def kill_the_server(self):
        self.close_connections()
        self.server.restart()
        self.model.restart()

    @rule(rank=st.integers(0, Model.NUM_RANKS - 1))
    def leave(self, rank):
        self.send_lost_shares(rank)
        if rank in self.model.left:
            return
        last = max(self.given[rank], default=0)
        for step in set(range(1, last)) - self.given[rank]:
            self.give(rank, step, {})
        share = Share(self.group, last + 1, rank, Model.NUM_RANKS, 600_000)
        asked = self.server.ask(Header(Kind.LEAVE, 1).encode(), share.encode())
        assert asked[1] == [NULL]
        self.receive(self.model.leave(rank, last + 1))

    def send_lost_shares(self, rank):
        """Send all shares again that have no answer, as a trainer does."""
        for request in [one for one in self.sent if one.trainer == rank]:
            if request.is_share and request.batch in self.shares:
                self.send(request)

    @precondition(lambda self: len(self.model.left) == Model.NUM_RANKS)
    @rule()
    def train_in_another_group(self):
        assert not self.model.end_group()
        self.group += 1
        self.begin_group()

    @rule()
    def start_the_trainers_again(self):
        self.generation += 1
        self.group += 1
        self.begin_generation()
        self.model.open.clear()
        ended = self.model.end_group()
        self.look_up(TRAINERS[-1], Model.COUNT, {0}, 1, 0, with_state=False)
        self.receive(ended)

    @invariant()
    def the_server_has_what_the_model_has(self):
        model, server, ids = self.model, self.server, range(NUM_IDS)
        # It also applies what is queued, whose answers may be lost.
        assert server.ask_json(Kind.STEP, {"table": 0}) == model.num_steps
        for table in (Model.COUNT, Model.RARE):
            expected = [model.rows.get((table, id_), (0.0, 0)) for id_ in ids]
            assert server.read(Kind.READ, np.float32, table) == [
                weight for weight, _ in expected
            ]
            if table == Model.COUNT:
                seen = server.read(Kind.METADATA, np.uint32)
                assert seen == [num_lookups for _, num_lookups in expected]
        counters = server.ask_json(Kind.COUNTERS)
        assert counters["joint_steps"] == len(
            list(filter(None, model.waiting.values()))
        )
        assert counters["requests_repeated"] == model.num_repeated
        per_stream = [stream for stream, _ in model.open]
        most = max(map(per_stream.count, per_stream), default=0)
        assert counters["open_batches"] == most

    def close_connections(self):
        for connection in self.connections.values():
            connection.socket.close(linger=0)
        self.connections = {}

    def teardown(self):
        try:
            self.end_of_the_training()
        finally:
            self.close_connections()
            self.server.close()

    def end_of_the_training(self):
        """Have all ranks leave: then nothing waits."""
        for rank in range(Model.NUM_RANKS):
            self.leave(rank)
        self.the_server_has_what_the_model_has()
        assert not any(self.model.waiting.values())


def frames_of(grads):
    segment = one_segment(*grads) if grads else (b"", b"")
    return *segment, struct.pack(f"<{len(grads)}f", *grads.values())


def answer_of(connection, number):
    """Return rows as a list, what else was done as four numbers, or ``REJECTED``."""
    header, body = connection.answer(number)
    if header.kind is Kind.ERROR:
        return REJECTED
    if len(body) > 1:  # rows with state, and what is said of them
        numbers = zip(body, (np.float32, np.uint32, np.uint32), strict=True)
        return tuple(np.frombuffer(frame, dtype).tolist() for frame, dtype in numbers)
    [frame] = body
    try:
        found = json.loads(bytes(frame))
    except ValueError:
        return np.frombuffer(frame, np.float32).tolist()
    return tuple(found.values()) if isinstance(found, dict) else (found or 0, 0, 0, 0)


def test_any_order_of_requests_and_restarts_is_as_in_the_model():
    some = settings(max_examples=settings().max_examples // 5)
    run_state_machine_as_test(ServerMachine, settings=some)


@pytest.fixture
def server():
    with closing(Restarted()) as server:
        yield server


def request(kind, number, *frames, stream=5, flags=0):
    header = Header(kind, 3, stream=stream, batch=number, flags=flags)
    return header.encode(), *frames


def test_a_batch_has_seven_lookups(server):
    flags = TRAINING | 7 << PART_SHIFT
    _, error = server.ask(*request(Kind.LOOKUP, 1, *one_segment(7), flags=flags))
    assert "A batch may have 7 lookups" in error["message"]


def test_tables_that_are_added_again_get_the_settings_that_came_later(server):
    slower = encode_json([{**COUNT.to_json(), "weight_bound": 5.5}])
    added = request(Kind.ADD_TABLES, 3, slower)
    first = server.ask(*added)[1]
    for frames in (added, request(Kind.ADD_TABLES, 4, encode_json([COUNT.to_json()]))):
        server.restart()
        server.ask(*frames)
    assert server.ask(*added)[1] != first


def test_an_update_that_failed_is_not_tried_again(server, monkeypatch):
    def fail(*_):
        raise MemoryError("none left")

    update = request(Kind.UPDATE, 1, *frames_of({7: -1.0}))
    with monkeypatch.context() as patch:
        patch.setattr(server.running.server.shard.store, "add_updates", fail)
        assert "none left" in server.ask(*update)[1]["message"]
    server.restart()
    must = "must not have been rejected before"
    assert must in server.ask(*update)[1]["message"]


def test_a_checkpoint_of_an_older_generation_is_rejected(server):
    older, newer = (BatchNumber.new_stream(generation) for generation in (1, 2))
    server.ask(*request(Kind.LOOKUP, 1, *one_segment(7), stream=newer, flags=TRAINING))
    dump = encode_json({"do": "dump", "task": 1, "folder": "none"})
    _, error = server.ask(*request(Kind.CHECKPOINT, 3, dump, stream=older))
    assert error["kind"] == "FencedError"
    assert server.ask(*request(Kind.CLEAR, 1, NULL, stream=0))[1] == [NULL]


def test_members_of_a_group_survive_a_restart(server):
    names = [encode_json({"who": f"trainer {n}", "ended": ""}) for n in range(2)]
    first, second, third = (Share(9, 1, rank, 3, 600_000) for rank in range(3))
    with Stranger(server.running.address) as gone:
        gone.ask(*request(Kind.JOIN, 1, names[0], first.encode()))
    server.ask(*request(Kind.LEAVE, 2, third.encode()))
    server.restart()
    joined = server.ask(*request(Kind.JOIN, 3, names[1], second.encode()))
    assert b"rank 0 (trainer 0: " in joined[1][0]
