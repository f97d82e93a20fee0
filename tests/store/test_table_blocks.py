"""Frequent ids have more blocks of weights; a model counts them for each server."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from persia_torchrec import AdmitFrequency, DynamicDim, Uniform
from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import find_lines, list_increments
from persia_torchrec.checkpoint.load import Increment
from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.embedding.optim import Adagrad, Adam
from persia_torchrec.errors import ConfigError
from persia_torchrec.rpc.messages import Header, Kind
from persia_torchrec.server.checkpoint_service import ShardDump
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.server.open_batches import LookedUp
from persia_torchrec.server.update_queue import QueuedUpdate, build_gradients
from persia_torchrec.store import (
    memory,
    table_blocks,
)
from persia_torchrec.store.block_statistics import read_statistics
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.memory import MISSING
from persia_torchrec.store.row_copy import RowExport, split_by_table
from persia_torchrec.table import TableSpec
from tests.support.consistency import check_store, rows_oldest_first
from tests.support.processes import wait_until
from tests.support.reference import Row, initial_weights, step
from tests.support.saved_training import Training
from tests.support.servers import ids_of, segments_of

pytestmark = pytest.mark.slow

DIM, PERIOD = 6, 3
IDS = np.arange(12, dtype=np.uint64)
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def spec_of(blocks):
    return TableSpec(
        name="item",
        dim=DIM,
        optimizer=Adam(0.1),
        initializer=Uniform(-1, 1),
        dynamic=DynamicDim(blocks, PERIOD),
    )


def growth(n):
    """Return p, by trying; a quarter of all weights is used."""
    candidates = np.linspace(1.001, 10, 1_000_000)
    used = sum(
        (candidates**i - candidates ** (i - 1)) * (n + 1 - i) / n
        for i in range(1, n + 1)
    )
    return candidates[np.argmin(np.abs(used / (candidates ** (n + 1) - 1) - 0.25))]


class Model:
    """One server's table in dictionaries; periods end for all ids at once."""

    def __init__(self, spec):
        self.spec, self.n = spec, spec.dynamic.blocks
        self.p = growth(self.n)
        self.step = self.t = 0
        self.acc, self.cur = {}, {}
        self.blocks = {}  # rows by id and number of the block
        self.thresholds = [float(k) for k in range(1, self.n + 1)]

    def count_blocks(self, id_):
        acc, cur, t = self.acc.get(id_, 0.0), self.cur.get(id_, 0.0), self.t
        f = (0.9 * acc + (1 - 0.9) * cur) / (1 - 0.9 ** (t + 1))
        f = max(f, acc / (1 - 0.9**t)) if t else f
        return max(1, sum(threshold <= f for threshold in self.thresholds))

    def read(self, id_):
        row = np.zeros(DIM)
        for k, part in enumerate(np.split(row, self.n)):
            if (id_, k) in self.blocks:
                part[:] = self.blocks[id_, k].weights
        return row

    def look_up(self, ids, counts):
        for id_, count in zip(ids, counts, strict=True):
            for k in range(self.count_blocks(id_)):
                if (id_, k) not in self.blocks:
                    self.blocks[id_, k] = self.begin(id_, k)
            self.acc.setdefault(id_, 0.0)
            self.cur[id_] = self.cur.get(id_, 0.0) + count

    def begin(self, id_, k):
        parts = [self.spec, *self.spec.tables_of_blocks()]
        seed, width = id_ ^ parts[k].seed, DIM // self.n
        weights = initial_weights(self.spec.initializer, seed, width)
        state = self.spec.optimizer.initial_state(width).astype(np.float64)
        return Row(weights.astype(np.float64), state)

    def update(self, ids, grads):
        self.step += 1
        for id_, grad in zip(ids, grads.astype(np.float64), strict=True):
            for k, part in enumerate(np.split(grad, self.n)):
                if (id_, k) in self.blocks:
                    step(self.spec.optimizer, self.blocks[id_, k], part, self.step)
        if self.step % PERIOD == 0:
            self.end_period()

    def end_period(self):
        self.t += 1
        for id_ in self.acc:
            self.acc[id_] = 0.9 * self.acc[id_] + (1 - 0.9) * self.cur[id_]
            self.cur[id_] = 0.0
        ranked = sorted((a for a in self.acc.values() if a >= 1e-6), reverse=True)
        if ranked and self.t <= 200:
            n, p = self.n, self.p
            shares = [
                (p ** (n + 1 - k) - 1) / (p ** (n + 1) - 1) for k in range(1, n + 1)
            ]
            ranks = [int(len(ranked) * share) for share in shares]
            self.thresholds = [ranked[r] / (1 - 0.9**self.t) for r in ranks]
        for id_, k in list(self.blocks):
            if k >= self.count_blocks(id_):
                del self.blocks[id_, k]


def drawn(seed):
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.zipf(1.5, rng.integers(1, 15)) % len(IDS)).astype(np.uint64)
    counts = rng.integers(1, 4, len(ids)).astype(np.uint32)
    return ids, counts, rng.normal(size=(len(ids), DIM)).astype(np.float32)


@settings(max_examples=15)
@given(
    st.sampled_from([1, 3]),
    st.sampled_from([2, 3]),
    st.lists(st.integers(0, 2**32 - 1), min_size=10, max_size=40),
    st.booleans(),
)
def test_servers_agree_with_a_model_of_each(
    tmp_path_factory, num_servers, blocks, seeds, is_moved
):
    spec, folder = spec_of(blocks), tmp_path_factory.mktemp("training")
    training = Training(num_servers, folder, spec)
    models = [Model(spec) for _ in training.servers]
    for number, seed in enumerate(seeds):
        if is_moved and number == len(seeds) // 2:
            saved, before = training.save(), training
            training = Training(num_servers, folder / "other", spec)
            for server in training.servers:
                server.load(saved)
            del before
        ids, counts, grads = drawn(seed)
        for server, model in zip(training.servers, models, strict=True):
            own, store = server.holds(ids), server.store
            rows = np.empty((own.sum(), DIM), dtype=np.float32)
            given = {"training": True, "counts_N": counts[own]}
            slots = store.lookup(0, ids[own], rows, **given)
            model.look_up(ids[own].tolist(), counts[own].tolist())
            expected = [model.read(id_) for id_ in ids[own].tolist()]
            np.testing.assert_allclose(rows, np.reshape(expected, rows.shape), **NEAR)
            result = store.update(0, ids[own], grads[own], slots)
            assert tuple(result) == (0, 0, 0)
            model.update(ids[own].tolist(), grads[own])
            np.testing.assert_allclose(store.states[0].thresholds, model.thresholds)
            rows = np.empty((len(IDS), DIM), dtype=np.float32)
            store.lookup(0, IDS, rows, training=False)
            expected = [model.read(id_) for id_ in IDS.tolist()]
            np.testing.assert_allclose(rows, expected, **NEAR)
            assert store.num_rows == len(model.blocks)
            np.testing.assert_array_equal(store.read(0, IDS)[:, :DIM], rows)
            check_store(store)


@pytest.mark.parametrize(("num_before", "num_after"), [(2, 2), (1, 3), (3, 2)])
def test_a_checkpoint_and_its_increments_have_all_blocks(
    tmp_path, num_before, num_after
):
    before = Training(num_before, tmp_path, spec_of(2))

    def train(seeds):
        for ids, counts, grads in map(drawn, seeds):
            for server in before.servers:
                own = server.holds(ids)
                rows = np.empty((own.sum(), DIM), dtype=np.float32)
                given = {"training": True, "counts_N": counts[own]}
                server.store.lookup(0, ids[own], rows, **given)
                server.store.update(0, ids[own], grads[own])

    train(range(20))
    has_delta = num_before == num_after
    folder = before.save((lambda: train(range(20, 40))) if has_delta else None)
    after = Training(num_after, tmp_path, spec_of(2))
    for server in after.servers:
        server.load(folder, Folder(tmp_path / "increments") if has_delta else None)
    assert rows_of(after) == rows_of(before)
    if has_delta:
        for one, other in zip(before.servers, after.servers, strict=True):
            states = one.store.states[0], other.store.states[0]
            assert states[0].thresholds.tolist() == states[1].thresholds.tolist()


def rows_of(training):
    """Return the rows of all tables, with what is counted of an id."""
    found = []
    for server in training.servers:
        for number, state in enumerate(server.store.states):
            slots = server.store.find(number, IDS)
            rows = state.read_slots(slots)[slots != MISSING]
            ids = IDS[slots != MISSING].tolist()
            found += [
                (number, id_, r.tobytes()) for id_, r in zip(ids, rows, strict=True)
            ]
    return sorted(found)


def store_with_a_late_block():
    """Return a store in which id 1 has got its second block, and hints from before."""
    store = EmbeddingStore(9)
    store.add_table(spec_of(2))
    rows = np.empty((1, DIM), dtype=np.float32)
    hints = [store.lookup(0, ids_of(1), rows, training=True) for _ in range(3)]
    assert rows.all()
    return store, hints


def test_a_gradient_does_not_reach_a_block_that_its_lookup_has_not_found():
    store, (_, before, after) = store_with_a_late_block()
    grads, width = np.ones((1, DIM), dtype=np.float32), DIM // 2
    second = store.read(0, ids_of(1))[:, width:DIM]
    store.update(0, ids_of(1), grads, before)
    row = store.read(0, ids_of(1))
    np.testing.assert_array_equal(row[:, width:DIM], second)
    assert row[:, DIM : DIM + width].all()  # the first block has momentum
    assert not row[:, DIM + width : 2 * DIM].any()
    store.update(0, ids_of(1), grads, after)
    assert (store.read(0, ids_of(1))[:, width:DIM] != second).all()


def test_trainers_that_step_together_add_up_what_their_lookups_have_found():
    _, (_, before, after) = store_with_a_late_block()
    one, none, dims = segments_of([(0, [1])]), segments_of([(0, [])]), np.array([DIM])
    grads = [np.full(DIM, value, dtype=np.float32) for value in (1, 2)]
    updates = [
        QueuedUpdate(b"", Header(Kind.UPDATE), one, dims, each) for each in grads
    ]
    for hints, second in ([before, after], 2), ([None, before], 1), ([before] * 2, 0):
        slots = [[LookedUp(one, [s], 0)] if s is not None else [] for s in hints]
        [part] = build_gradients(updates, slots)
        assert part.grads[0].tolist() == [3] * (DIM // 2) + [second] * (DIM // 2)
        assert (part.hints[0] == MISSING).tolist() == [False, second == 0]
    # Of the second trainer's ids, none is of this server.
    updates[1] = updates[1]._replace(asked=none, grads=grads[1][:0])
    slots = [[LookedUp(one, [after], 0)], [LookedUp(none, [after[:0]], 0)]]
    [part] = build_gradients(updates, slots)
    assert part.grads.tolist() == [grads[0].tolist()]


@pytest.mark.parametrize(
    "optimizer", [Adam(0.1), Adagrad(0.1), Adagrad(0.1, vectorwise_shared=True)]
)
def test_state_is_written_as_if_there_were_no_blocks(optimizer):
    rows, stores = np.empty((1, DIM), dtype=np.float32), []
    for spec in spec_of(2), replace(spec_of(2), dynamic=DynamicDim()):
        stores.append(store := EmbeddingStore(9))
        store.add_table(spec := replace(spec, optimizer=optimizer))
        for _ in range(3):
            store.lookup(0, ids_of(1), rows, training=True)
        width = DIM + stores[0].tables[0].num_state_floats
        written = np.arange(1, 1 + width, dtype=np.float32)[None]
        written = written[:, : DIM + spec.num_state_floats]
        store.write(0, ids_of(1), written)
        np.testing.assert_array_equal(store.read(0, ids_of(1)), written)
        store.update(0, ids_of(1), np.ones((1, DIM), dtype=np.float32))
    found = [store.read(0, ids_of(1)) for store in stores]
    assert found[0].shape != found[1].shape or (found[0] == found[1]).all()
    store = stores[0]
    store.write(0, ids_of(2), 7 * np.ones((1, width), dtype=np.float32))
    [row] = store.read(0, ids_of(2))  # a new row has one block
    assert row[: DIM // 2].all()
    assert np.count_nonzero(row) == width // 2


def test_the_bytes_of_rare_ids_fall_to_a_block():
    ids = np.arange(20_000, dtype=np.uint64)
    num_bytes = []
    for dynamic in (DynamicDim(), DynamicDim(2)):
        spec = TableSpec(name="item", dim=64, optimizer=Adam(), dynamic=dynamic)
        store = EmbeddingStore(50_000)
        store.add_table(spec)
        rows = np.empty((len(ids), 64), dtype=np.float32)
        store.lookup(0, ids, rows, training=True)
        for _ in range(3):  # a few are frequent
            store.lookup(0, ids[:500], rows[:500], training=True)
        num_bytes.append(store.counters()["bytes"])
    assert store.num_rows == len(ids) + 500
    assert num_bytes[1] < 0.65 * num_bytes[0]


def test_a_memory_file_keeps_blocks_and_thresholds(path):
    spec = spec_of(2)
    clock = {"eviction": "lfu", "clock": lambda: 7.0}
    kept = EmbeddingStore(100, memory_file=path, **clock)
    plain = EmbeddingStore(100, **clock)
    for store in (kept, plain):
        store.add_table(spec)
    for seed in range(25):
        ids, counts, grads = drawn(seed)
        found = []
        for store in (kept, plain):
            rows = np.empty((len(ids), DIM), dtype=np.float32)
            store.lookup(0, ids, rows, training=True, counts_N=counts)
            store.update(0, ids, grads)
            found.append([rows.tobytes(), store.read(0, IDS).tobytes()])
            found[-1] += [store.states[0].thresholds.tobytes(), store.num_rows]
            found[-1] += [str(store.metadata(table, IDS)) for table in range(2)]
            if seed % 7 == 4:
                store.set_step(0, store.num_updates + 4)
        assert found[0] == found[1]
        if seed % 5 == 2 or seed == 4:
            kept.rows.memory.close(is_clean=False)
            kept = EmbeddingStore(100, memory_file=path, **clock)


def test_a_client_sees_all_weights_of_an_id(servers):
    spec = replace(spec_of(2), admission=AdmitFrequency(2))
    client = servers.client(servers.start(2))
    client.add_tables([spec])
    split = client.split(IDS, "item")
    for number in range(3):
        tables, batch = [("item", split)], BatchNumber(1, number + 1)
        [rows] = client.pull(tables, batch=batch)
        assert rows.any() == (number > 0)
        client.outcome(client.push(tables, [np.ones_like(rows)], batch))
    assert rows.shape == (len(IDS), DIM)
    assert not rows[:, DIM // 2 :].any()  # seen once since there are rows
    [rows] = client.pull(tables, batch=BatchNumber(1, 9))
    assert client.learn_tables() == [spec]
    assert client.read("item", IDS).shape == (len(IDS), DIM + 2 * DIM)
    blocks = list(client.export("item"))
    assert sorted(np.concatenate([b.ids for b in blocks]).tolist()) == IDS.tolist()
    client.write("item", IDS, np.full((len(IDS), DIM), 7, dtype=np.float32))
    assert (client.read("item", IDS)[:, : DIM // 2] == 7).all()
    weights = np.arange(len(IDS) * DIM, dtype=np.float32).reshape(-1, DIM)
    state = np.arange(2 * len(IDS) * DIM, dtype=np.float32).reshape(-1, 2 * DIM)
    client.write("item", IDS, weights, state)
    written = np.concatenate([weights, state], axis=1)
    np.testing.assert_array_equal(client.read("item", IDS), written)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ConfigError, match="multiple of the blocks"):
        replace(spec_of(2), dim=7)
    with pytest.raises(ConfigError, match="cannot be combined"):
        replace(spec_of(2), shared_rows=3, admission=AdmitFrequency(2))
    store = EmbeddingStore(9)
    store.add_table(spec_of(2))
    with pytest.raises(ConfigError, match="2 blocks"):
        store.add_table(spec_of(1))


def test_the_log_does_not_grow_with_the_blocks_that_a_period_frees(path, monkeypatch):
    monkeypatch.setattr(table_blocks, "SLICE_ROWS", 64)
    store = EmbeddingStore(8000, memory_file=path)
    store.add_table(spec_of(2))
    ids = np.arange(4000, dtype=np.uint64)
    for some in np.split(ids, 40):
        rows = np.empty((len(some), DIM), dtype=np.float32)
        for _ in range(4):
            store.lookup(0, some, rows, training=True)
    grads = np.zeros((1, DIM), dtype=np.float32)
    for _ in range(PERIOD - 1):
        store.update(0, ids[:1], grads)
    for some in np.split(ids[1000:], 30):
        store.remove(0, some)
    num_bytes = store.rows.undo_log._num_bytes
    assert store.num_rows == 1000 + 4000
    store.update(0, ids[:1], grads)
    assert store.num_rows > 1000 + 1000
    while store.must_free_blocks:
        store.sweep(64)
    assert store.num_rows == 1000 + 1000
    assert store.rows.undo_log._num_bytes == num_bytes
    store.close()


MANY_IDS = np.arange(40, dtype=np.uint64)


def open_store(path=None, capacity_rows=30):
    store = EmbeddingStore(capacity_rows, memory_file=path, clock=lambda: 7.0)
    if not store.states:
        store.add_tables([spec_of(3), replace(spec_of(1), name="other")])
    return store


def do_request(store, seed):
    """Do one request that a seed says, and return what it answers."""
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.zipf(1.3, 8) % len(MANY_IDS)).astype(np.uint64)
    counts = rng.integers(1, 9, len(ids)).astype(np.uint32)
    rows = np.zeros((len(ids), DIM), dtype=np.float32)  # a write leaves them
    action, table = rng.integers(8), int(rng.integers(4) == 0)
    if action < 3:
        store.lookup(table, ids, rows, training=True, counts_N=counts)
    elif action < 6:
        grads = rng.normal(size=rows.shape).astype(np.float32)
        return store.update(table, ids, grads)
    elif action == 6:
        store.lookup(table, ids, rows, training=False)
    else:
        table, written = 0, store.read(0, ids) + 1
        store.write(0, ids, written[:, :DIM] if seed % 2 else written)
    return rows.tobytes(), store.read(table, ids).tobytes()


def content_of(store):
    """Return all rows, the next to leave first, with what is known of each."""
    found = []
    for arena, slot in rows_oldest_first(store.rows.logs, store.rows.arenas.directory):
        words = store.rows.arenas.words[arena][slot].copy()
        found.append((arena, words.tobytes()))
    evicted = int(store.rows.tally[memory.EVICTED])
    return (
        found,
        evicted,
        store.states[0].thresholds.tolist(),
        store.rows.steps.tolist(),
    )


def free_all(store):
    while store.must_free_blocks:
        store.sweep(1)
    return store


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=70),
    st.integers(0, 4),
    st.booleans(),
)
@example(  # blocks are left when the next period ends, of an id at its threshold
    [0, 1, 1, 16, 22, 37, 143, 1218, 5757939], 0, False
)
def test_blocks_freed_in_slices_between_requests_are_as_those_freed_at_once(
    tmp_path_factory, seeds, sweeps, is_killed
):
    path = str(tmp_path_factory.mktemp("store") / "rows") if is_killed else None
    at_once, sliced = open_store(), open_store(path)
    for number, seed in enumerate(seeds):
        answers = []
        for store, slice_rows in (at_once, 1000), (sliced, 1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(table_blocks, "SLICE_ROWS", slice_rows)
                patch.setattr(table_blocks, "MAX_SLOTS", 7 * slice_rows)
                if number % 5 < sweeps:
                    store.sweep(1)
                answers.append(do_request(store, seed))
        assert answers[0] == answers[1]
        assert not at_once.must_free_blocks
        if is_killed and number % 6 == 5:
            sliced.rows.memory.close(is_clean=False)
            sliced = open_store(path)
    free_all(sliced)
    assert content_of(sliced) == content_of(at_once)
    check_store(sliced)


def store_with_lost_blocks(monkeypatch, path=None):
    """Return a store whose ids have lost blocks, of which few are freed yet."""
    monkeypatch.setattr(table_blocks, "SLICE_ROWS", 2)
    return lose_blocks(open_store(path, capacity_rows=200))


def lose_blocks(store):
    """End a period, and return the store."""
    rows = np.empty((len(MANY_IDS), DIM), dtype=np.float32)
    counts = np.arange(50, 50 - len(MANY_IDS), -1).astype(np.uint32)
    for _ in range(3):
        store.lookup(0, MANY_IDS, rows, training=True, counts_N=counts)
    for _ in range(PERIOD):
        store.update(0, IDS, np.ones((len(IDS), DIM), dtype=np.float32))
    assert store.must_free_blocks
    return store


def test_a_block_that_is_lost_reads_as_if_it_were_freed(monkeypatch):
    store = store_with_lost_blocks(monkeypatch)
    num_rows = store.num_rows
    read = store.read(0, MANY_IDS[-3:])
    assert store.must_free_blocks
    assert store.num_rows < num_rows
    np.testing.assert_array_equal(free_all(store).read(0, MANY_IDS[-3:]), read)


def test_a_copy_of_all_rows_has_no_block_that_is_lost(monkeypatch):
    store = store_with_lost_blocks(monkeypatch)
    export, num_copied = RowExport(store), 0
    while not export.is_done:
        if (chunk := export.advance()) is not None:
            split = split_by_table(chunk, export.tables)
            num_copied += sum(len(columns) for _, columns in split)
    assert not store.must_free_blocks
    assert num_copied == store.num_rows


def thresholds_of(tables):
    (found,) = [table.thresholds for table in tables if table.name == "item"]
    return found


def test_a_dump_has_the_thresholds_of_a_period_that_ends_before_it_does(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(table_blocks, "MAX_SLOTS", 7)
    store = free_all(store_with_lost_blocks(monkeypatch))
    before = store.states[0].thresholds.tolist()
    dump = ShardDump(Folder(str(tmp_path)), store, ServerConfig())
    while dump.progress < 1:
        if not dump.chunks.full():
            dump.advance()
    lose_blocks(store)
    while dump.is_copying:
        if not dump.chunks.full():
            dump.advance()
    assert not store.must_free_blocks
    wait_until(lambda: dump.phase == "dumped", "it is written")
    assert thresholds_of(dump.result.tables) == store.states[0].thresholds.tolist()
    assert store.states[0].thresholds.tolist() != before


def test_the_end_of_a_log_has_the_thresholds_of_the_period_that_has_ended(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(table_blocks, "MAX_SLOTS", 7)
    monkeypatch.setattr(table_blocks, "SLICE_ROWS", 2)
    store = open_store(capacity_rows=200)
    before = store.states[0].thresholds.tolist()
    config = ServerConfig(capacity_rows=200, increments_dir=str(tmp_path))
    increments = Increments(config, store, Activity())
    increments.work(0)  # begins the log
    lose_blocks(store)
    increments.close()
    assert not store.must_free_blocks
    (line,) = find_lines(Folder(str(tmp_path)), {})
    folder = Folder(str(tmp_path)).child(line.logs[0].name)
    head = Increment.read(folder, list_increments(folder)[-1]).head
    assert thresholds_of(head.tables) == store.states[0].thresholds.tolist() != before


@pytest.mark.parametrize("does", ["remove", "change the period"])
def test_what_changes_the_ranked_rows_or_the_rule_waits_for_the_end(monkeypatch, does):
    left, at_once = (store_with_lost_blocks(monkeypatch) for _ in range(2))
    free_all(at_once)
    for store in left, at_once:
        if does == "remove":
            store.remove(0, MANY_IDS[:9])
        else:
            spec = store.states[0].spec
            dynamic = replace(spec.dynamic, period=spec.dynamic.period + 5)
            store.add_table(replace(spec, dynamic=dynamic))
        assert not store.must_free_blocks
        check_store(store)
    assert content_of(left) == content_of(at_once)


def test_a_store_that_is_cleared_frees_no_blocks_of_what_comes_then(monkeypatch):
    store = store_with_lost_blocks(monkeypatch)
    store.clear()
    assert not store.must_free_blocks
    assert store.num_rows == 0
    check_store(store)


def test_a_table_that_is_dropped_frees_no_blocks(monkeypatch, path):
    store = store_with_lost_blocks(monkeypatch, path)
    store.drop_tables([0])
    while store.sweep(100):
        pass
    assert store.num_rows == 0
    assert not store.must_free_blocks
    store.close()


def test_the_process_after_a_killed_one_frees_the_rest(monkeypatch, path):
    expected = free_all(store_with_lost_blocks(monkeypatch))
    store = store_with_lost_blocks(monkeypatch, path)
    store.sweep(1)
    store.rows.memory.close(is_clean=False)
    store = open_store(path, capacity_rows=200)
    check_store(store)
    assert content_of(store)[0] == content_of(expected)[0]
    store.close()


@pytest.mark.parametrize("t", [2**24 - 1, 2**24 + 1, 2**24 + 3, 2**30 + 17])
def test_what_is_counted_of_an_id_stays_however_many_periods_have_ended(t):
    store = EmbeddingStore(100)
    store.add_table(spec_of(2))
    state = store.states[0]
    state.num_updates = PERIOD * t
    out = np.empty((1, DIM), dtype=np.float32)
    counted = []
    for _ in range(3):  # in one period
        store.lookup(
            0, IDS[:1], out, training=True, counts_N=np.array([100], np.uint32)
        )
        acc, cur, is_seen = read_statistics(
            state.layout, store.find(0, IDS[:1]), state._num_periods
        )
        counted.append((float(acc[0]), float(cur[0]), bool(is_seen[0])))
    assert counted == [(0.0, 100.0, True), (0.0, 200.0, True), (0.0, 300.0, True)]
