"""Ids without a row read and train a shared row, on any number of servers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec import (
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
    Expiry,
    Uniform,
)
from persia_torchrec.client.codec import BatchNumber
from persia_torchrec.embedding.optim import Adam
from persia_torchrec.errors import CheckpointError, ConfigError, StoreError
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.table import TableSpec
from tests.support.reference import ReferenceStore
from tests.support.saved_training import Training
from tests.support.servers import ids_of

SPEC = TableSpec(
    name="item",
    dim=2,
    optimizer=Adam(0.1),
    initializer=Uniform(-1, 1),
    admission=AdmitFrequency(3),
    expiry=Expiry(steps_to_live=3),
    keeps_metadata=True,
    shared_rows=5,
)
IDS = ids_of(0, 1, 4, 5, 6, 9, 11, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 6)
NEAR = {"rtol": 1e-5, "atol": 1e-5}

seeds = st.integers(0, 2**32 - 1)
requests = st.one_of(
    st.tuples(st.just("train"), seeds),
    st.tuples(st.just("train"), seeds),
    st.tuples(st.just("evaluate"), seeds),
    st.tuples(st.just("sweep"), st.just(0)),
    st.tuples(st.just("move"), st.sampled_from([1, 3])),
)


def drawn(seed):
    """Return ids, counts and gradients of a batch; some gradients are no numbers."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(IDS)[: rng.integers(1, len(IDS) + 1)]
    counts = rng.integers(1, 3, len(ids)).astype(np.uint32)
    grads = rng.normal(size=(len(ids), SPEC.dim)).astype(np.float32)
    grads[rng.random(len(ids)) < 0.05, -1] = np.nan
    return ids, counts, grads


def rows_on(training, ids):
    """Return what evaluation reads on the servers of a training."""
    rows = np.empty((len(ids), SPEC.dim), dtype=np.float32)
    for server in training.servers:
        own = server.holds(ids)
        out = np.empty((own.sum(), SPEC.dim), dtype=np.float32)
        server.store.lookup(0, ids[own], out, training=False)
        rows[own] = out
    return rows


@pytest.mark.slow
@settings(max_examples=12)
@given(
    num_servers=st.sampled_from([1, 3]),
    admission=st.sampled_from(
        [AdmitFrequency(3), AdmitProbability(0.5), AdmitBloom(3, 1000)]
    ),
    script=st.lists(requests, max_size=25),
)
def test_servers_agree_with_the_reference(
    tmp_path_factory, num_servers, admission, script
):
    spec = replace(SPEC, admission=admission)
    folder = tmp_path_factory.mktemp("training")
    fast, slow = Training(num_servers, folder, spec), ReferenceStore(1000)
    # In so many counters, a few ids are counted exactly.
    is_bloom = isinstance(admission, AdmitBloom)
    slow.tables = [replace(spec, admission=AdmitFrequency(3)) if is_bloom else spec]
    for number, (what, seed) in enumerate(script):
        if what == "sweep":
            fast.sweep()
            slow.sweep()
        elif what == "move":
            fast.sweep()  # what has expired is not saved
            slow.sweep()
            before, fast = fast, Training(seed, folder / f"{number}", spec)
            saved = before.save()
            for server in fast.servers:
                assert server.load(saved).forgotten == []
        else:
            ids, counts, grads = drawn(seed)
            if what == "train":
                for server in fast.servers:
                    server.train(ids, counts, grads)
                lists = ids.tolist(), counts.tolist()
                slow.lookup(0, lists[0], training=True, counts=lists[1])
                slow.update(0, lists[0], grads)
            if is_bloom and slow.counts["expired_steps"]:
                return  # an id that had a row gets it back at once
        expected = slow.lookup(0, IDS.tolist(), training=False)
        np.testing.assert_allclose(rows_on(fast, IDS), expected, **NEAR)
    held = [server.store.read(0, IDS) for server in fast.servers]
    np.testing.assert_allclose(sum(held), slow.read(0, IDS.tolist()), **NEAR)


def test_a_client_finds_the_server_of_a_shared_row(servers):
    slow = ReferenceStore(1000)
    slow.tables = [SPEC]
    client = servers.client(servers.start(3, capacity_rows=1000))
    client.add_tables([SPEC])
    for number in range(9):
        ids, counts, grads = drawn(number)
        grads = np.nan_to_num(grads)
        split, batch = client.split(ids, "item"), BatchNumber(1, number + 1)
        grouped, num_each = np.empty_like(grads), np.empty_like(counts)
        grouped[split.inverse], num_each[split.inverse] = grads, counts
        tables, lists = [("item", split)], (ids.tolist(), counts.tolist())
        expected = slow.lookup(0, lists[0], training=True, counts=lists[1])
        for _ in range(2):  # the second time it is only told again
            [rows] = client.pull(tables, batch=batch, counts=[num_each])
            np.testing.assert_allclose(rows[split.inverse], expected, **NEAR)
        assert client.outcome(client.push(tables, [grouped], batch)).num_missed == 0
        slow.update(0, lists[0], grads)
    expected = slow.read(0, IDS.tolist())
    np.testing.assert_allclose(client.read("item", IDS), expected, **NEAR)
    assert client.learn_tables() == [SPEC]
    assert client.step("item") == 9
    assert sum(client.num_rows()) == len(slow.rows) + len(slow.shared)
    client.write("item", IDS, np.full((len(IDS), 2), 7, dtype=np.float32))
    assert (client.read("item", IDS)[:, :2] == 7).all()
    assert sum(client.num_rows()) == len(IDS) + len(slow.shared)


def test_an_admission_that_leaves_ids_without_a_row_is_needed():
    with pytest.raises(ConfigError, match=r"'item': shared_rows need an admission"):
        TableSpec(name="item", dim=2, optimizer=Adam(), shared_rows=3)


def test_shared_rows_that_leave_no_room_are_rejected():
    store = EmbeddingStore(3)
    store.add_table(replace(SPEC, shared_rows=9))
    rows = np.empty((3, 2), dtype=np.float32)
    store.lookup(0, ids_of(1, 2), rows[:2], training=True)
    with pytest.raises(StoreError, match=r"3 shared rows, .* capacity of 3 rows"):
        store.lookup(0, ids_of(3), rows[:1], training=True)


def test_a_gradient_without_a_row_is_missed_and_one_that_is_no_number_rejected():
    store = EmbeddingStore(9)
    store.add_table(SPEC)
    grads = np.array([[np.nan, 1], [1, 1], [np.nan, 1]], dtype=np.float32)
    store.lookup(0, ids_of(1), np.empty_like(grads[:1]), training=True)
    result = store.update(0, ids_of(2, 3, 6), grads)  # 6 shares the row of 1
    assert (result.num_missed, result.num_refused) == (2, 1)


def test_a_table_may_get_shared_rows_but_no_other_number_of_them(tmp_path):
    plain = replace(SPEC, shared_rows=0, expiry=Expiry())
    adaptive = replace(plain, shared_rows=5)
    before = Training(3, tmp_path, plain)
    before.train(range(6))
    folder = before.save()
    after = Training(2, tmp_path / "after", adaptive)
    for server in after.servers:
        server.load(folder)
    assert after.rows() == before.rows()
    assert after.waiting() == before.waiting()
    after.train(range(6, 9))
    folder = after.save()
    for other in (plain, replace(adaptive, shared_rows=6)):
        [server] = Training(1, tmp_path / "other", other).servers
        with pytest.raises(CheckpointError, match="5 shared rows"):
            server.load(folder)
