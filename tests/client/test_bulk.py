"""Whole tables go to the servers and come back, block by block."""

import contextlib

import numpy as np
import pytest

from persia_torchrec import AdmitProbability
from persia_torchrec.client.bulk import RowBlock, blocks_of
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.errors import BatchError, ConfigError, FrameError, RemoteError
from persia_torchrec.routing.route import farmhash64
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Header, Kind, encode_json
from persia_torchrec.store import embedding_store
from persia_torchrec.table import TableSpec
from tests.support.servers import ids_of

ITEM = TableSpec(name="item", dim=3, optimizer=Adagrad(0.1))
OTHER = TableSpec(name="other", dim=6, optimizer=SGD(0.1))  # in the same arena
STATELESS = TableSpec(name="stateless", dim=3, optimizer=SGD(0.1))
ADAM = TableSpec(name="adam", dim=2, optimizer=Adam(0.1))


def connect(servers, num_shards=2, **settings):
    client = servers.client(servers.start(num_shards, **settings))
    client.add_tables([ITEM, OTHER, STATELESS, ADAM])
    return client


def table_of(num, dim=3):
    """Return weights that tell row and column."""
    return (np.arange(num)[:, None] + np.arange(dim) / 8).astype(np.float32)


def gathered(blocks):
    """Return ids, weights and state of all blocks, in the order of the ids."""
    blocks = list(blocks)
    ids = np.concatenate([block.ids for block in blocks])
    order = np.argsort(ids)
    weights = np.concatenate([block.weights for block in blocks])
    state = np.concatenate([block.state for block in blocks])
    return ids[order], weights[order], state[order]


class TestFill:
    @pytest.mark.parametrize("block_rows", [1, 7, 20, 1000])
    def test_rows_are_numbered_unless_ids_are_given(self, servers, block_rows):
        client = connect(servers)
        weights = table_of(20)
        assert client.fill("item", blocks_of(weights, block_rows=block_rows)) == 20
        read = client.read("item", np.arange(20, dtype=np.uint64))
        assert np.array_equal(read[:, :3], weights)
        assert (read[:, 3:] == ITEM.optimizer.initial_state(3)).all()
        assert sum(client.num_rows()) == 20

    def test_ids_may_be_given_or_made_from_the_rows_numbers(self, servers):
        client = connect(servers)
        weights = table_of(20)
        ids = farmhash64(np.arange(20, dtype=np.uint64))
        client.fill("item", blocks_of(weights, ids, block_rows=6))
        client.fill("stateless", blocks_of(-weights, farmhash64, block_rows=6))
        assert np.array_equal(client.read("item", ids)[:, :3], weights)
        assert np.array_equal(client.read("stateless", ids), -weights)

    def test_state_comes_along(self, servers):
        client = connect(servers)
        weights, state = table_of(9), -table_of(9)
        client.fill("item", blocks_of(weights, state=state, block_rows=4))
        read = client.read("item", np.arange(9, dtype=np.uint64))
        assert np.array_equal(read, np.concatenate([weights, state], axis=1))

    def test_a_memory_mapped_table_is_read_block_by_block(self, servers, tmp_path):
        client = connect(servers)
        path = tmp_path / "weights.npy"
        np.save(path, table_of(50))
        mapped = np.load(path, mmap_mode="r")
        blocks = list(blocks_of(mapped, block_rows=16))
        assert [len(block.ids) for block in blocks] == [16, 16, 16, 2]
        assert all(np.shares_memory(block.weights, mapped) for block in blocks)
        client.fill("item", blocks)
        read = client.read("item", np.arange(50, dtype=np.uint64))
        assert np.array_equal(read[:, :3], table_of(50))

    def test_few_blocks_are_asked_for_ahead(self, servers):
        client = connect(servers)
        seen = []

        def blocks():
            for first in range(8):
                rows = sum(client.num_rows())
                seen.append(first - rows)
                yield RowBlock(ids_of(first), table_of(1))

        client.fill("item", blocks())
        assert max(seen) <= 2

    def test_no_rows_are_no_work(self, servers):
        client = connect(servers)
        assert client.fill("item", blocks_of(table_of(0))) == 0
        assert client.num_rows() == [0, 0]

    def test_an_unadmitted_id_gets_its_row(self, servers):
        client = connect(servers)
        spec = TableSpec(
            name="rare", dim=3, optimizer=SGD(0.1), admission=AdmitProbability(0.0)
        )
        client.add_tables([spec])
        client.fill("rare", blocks_of(table_of(5)))
        assert sum(client.num_rows()) == 5

    def test_training_continues_from_the_rows_that_were_written(self, servers):
        client = connect(servers)
        client.fill("stateless", blocks_of(table_of(4)))
        split = client.split(ids_of(1, 2))
        batch = BatchNumber(1, 1)
        (rows,) = client.pull([("stateless", split)], batch=batch)
        assert np.array_equal(rows[split.inverse], table_of(4)[1:3])
        grads = [np.ones((2, 3), dtype=np.float32)]
        client.outcome(client.push([("stateless", split)], grads, batch))
        read = client.read("stateless", ids_of(0, 1, 2, 3))
        moved = np.array([0, 0.1, 0.1, 0])[:, None]
        np.testing.assert_allclose(read, table_of(4) - moved, rtol=1e-6)

    @pytest.mark.parametrize(
        ("weights", "state", "message"),
        [
            ((2, 4), None, r"weights must have the shape \(2, 3\).*\(2, 4\)"),
            ((2, 3), (2, 4), r"state of Adagrad.*shape \(2, 3\).*Received: \(2, 4\)"),
        ],
    )
    def test_other_shapes_are_rejected(self, servers, weights, state, message):
        client = connect(servers)
        state = None if state is None else np.zeros(state, np.float32)
        with pytest.raises(BatchError, match=message):
            client.write("item", ids_of(1, 2), np.zeros(weights, np.float32), state)

    @pytest.mark.parametrize(
        "lengths", [{"ids": ids_of(1)}, {"state": table_of(3)}, {"block_rows": 0}]
    )
    def test_parts_of_different_lengths_are_rejected(self, lengths):
        with pytest.raises(BatchError, match=r"same number of rows.*'weights': 2"):
            blocks_of(table_of(2), **lengths)


class TestExport:
    @pytest.mark.parametrize("num_shards", [1, 3])
    @pytest.mark.parametrize("block_rows", [1, 8, 1000])
    def test_written_rows_are_restored_once(self, servers, num_shards, block_rows):
        client = connect(servers, num_shards)
        ids = np.sort(farmhash64(np.arange(30, dtype=np.uint64)))
        weights, state = table_of(30), -table_of(30)
        client.fill("item", [RowBlock(ids, weights, state)])
        client.fill("other", blocks_of(table_of(50, 6)))
        blocks = list(client.export("item", block_rows=block_rows))
        assert max(len(block.ids) for block in blocks) <= block_rows
        back = gathered(blocks)
        for array, expected in zip(back, (ids, weights, state), strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)

    def test_returned_arrays_are_writable(self, servers):
        client = connect(servers, 1)
        client.fill("item", blocks_of(table_of(3)))
        (block,) = client.export("item")
        block.weights[:] = 0
        block.ids[:] = 0
        assert client.read("item", ids_of(2)).any()

    def test_rows_without_state_have_an_empty_one(self, servers):
        client = connect(servers)
        client.fill("stateless", blocks_of(table_of(3)))
        ids, weights, state = gathered(client.export("stateless"))
        assert ids.tolist() == [0, 1, 2]
        assert np.array_equal(weights, table_of(3))
        assert state.shape == (3, 0)

    def test_an_empty_table_has_no_blocks(self, servers):
        client = connect(servers)
        client.fill("other", blocks_of(table_of(9, 6)))
        assert list(client.export("item")) == []

    def test_another_job_is_filled_by_an_export(self, servers):
        source, target = connect(servers, 2), connect(servers, 3)
        source.fill("item", blocks_of(table_of(40), state=-table_of(40)))
        target.fill("item", source.export("item", block_rows=7))
        expected = gathered(source.export("item"))
        for array, other in zip(gathered(target.export("item")), expected, strict=True):
            assert np.array_equal(array, other)

    def test_a_row_that_is_trained_meanwhile_comes_once(self, servers):
        client = connect(servers)
        client.fill("item", blocks_of(table_of(60)))
        ids = []
        for number, block in enumerate(client.export("item", block_rows=4)):
            ids += block.ids.tolist()
            split = client.split(np.arange(50, 90, dtype=np.uint64) + number)
            batch = BatchNumber(1, number)
            client.pull([("item", split), ("other", split)], batch=batch)
            grads = [np.ones((40, dim), dtype=np.float32) for dim in (3, 6)]
            tables = [("item", split), ("other", split)]
            client.outcome(client.push(tables, grads, batch))
        assert len(ids) == len(set(ids))
        assert set(range(60)) <= set(ids)

    def test_an_unknown_table_and_an_empty_block_are_rejected_at_once(self, servers):
        client = connect(servers)
        with pytest.raises(ConfigError, match="'nothing' is unknown"):
            client.export("nothing")
        with pytest.raises(BatchError, match=r"at least 1 row\. Received: 0"):
            client.export("item", block_rows=0)

    def test_blocks_are_no_larger_than_a_request_may_be(self, servers):
        client = connect(servers, 1, max_request_ids=10)
        client.fill("item", blocks_of(table_of(25), block_rows=10))
        lengths = [len(block.ids) for block in client.export("item")]
        assert lengths == [10, 10, 5]


class TestStep:
    def test_it_counts_updates_and_continues_from_where_it_is_set(self, servers):
        client = connect(servers)
        split = client.split(ids_of(1, 2, 3))

        def train(table, dim, number):
            batch = BatchNumber(1, number)
            client.pull([(table, split)], batch=batch)
            grads = [np.ones((3, dim), dtype=np.float32)]
            client.outcome(client.push([(table, split)], grads, batch))

        assert client.step("adam") == 0
        train("adam", 2, 1)
        assert client.step("adam") == 1
        assert client.step("adam", 1000) == 1000
        train("adam", 2, 2)
        assert (client.step("adam"), client.step("item")) == (1001, 0)

    def test_a_row_of_adam_moves_as_at_that_step(self, servers):
        client = connect(servers, 1)
        one = ids_of(1)
        state = np.array([[0.5, 0.5, 0.25, 0.25]], dtype=np.float32)
        client.write("adam", one, np.zeros((1, 2), np.float32), state)
        client.step("adam", 9)
        split, batch = client.split(one), BatchNumber(1, 1)
        client.pull([("adam", split)], batch=batch)
        grads = [np.full((1, 2), 0.5, dtype=np.float32)]
        client.outcome(client.push([("adam", split)], grads, batch))
        # Both means stay what they are; only their corrections are those of step 10.
        root = np.sqrt(0.25 / (1 - 0.999**10))
        expected = -0.1 * 0.5 / (1 - 0.9**10) / root
        np.testing.assert_allclose(client.read("adam", one)[0, :2], expected, rtol=1e-5)


class TestRequests:
    """Requests that no client of this package sends."""

    @pytest.mark.parametrize(
        ("kind", "value", "message"),
        [
            (Kind.EXPORT, None, "must be a mapping"),
            (Kind.EXPORT, {"table": 0, "start": 0}, "must have the key 'max_rows'"),
            (Kind.EXPORT, {"table": 9, "start": 0, "max_rows": 1}, "Unknown table"),
            (Kind.EXPORT, {"table": -1, "start": 0, "max_rows": 1}, "Unknown table"),
            (
                Kind.EXPORT,
                {"table": 0, "start": -1, "max_rows": 1},
                "start must .*: -1",
            ),
            (
                Kind.EXPORT,
                {"table": 0, "start": 2**32, "max_rows": 1},
                "start must .*: 4294",
            ),
            (
                Kind.EXPORT,
                {"table": 0, "start": 0, "max_rows": 0},
                "max_rows must .*: 0",
            ),
            (Kind.EXPORT, {"table": 0, "start": 0, "max_rows": 2**40}, "max_rows 109"),
            (Kind.IDS, {"table": 0, "start": 0}, "must have the key 'first'"),
            (Kind.IDS, {"table": 9, "start": 0, "first": 0}, "Unknown table"),
            (Kind.IDS, {"table": 0, "start": 2**32, "first": 0}, "start must .*: 4294"),
            (Kind.IDS, {"table": 0, "start": 0, "first": 2**63}, "first must .*: 9223"),
            (Kind.STEP, {"step": 1}, "must have the key 'table'"),
            (Kind.STEP, {"table": 0, "step": "1"}, "step must be an integer"),
            (Kind.STEP, {"table": 0, "step": -1}, "step must .*: -1"),
            (Kind.STEP, {"table": 0, "step": 2**63}, "step must .*: 9223"),
            (Kind.STEP, {"table": 9, "step": 0}, "Unknown table number 9"),
        ],
    )
    def test_an_invalid_request_is_rejected(self, servers, kind, value, message):
        client = connect(servers, 1)
        with pytest.raises(RemoteError, match=message):
            client._servers.ask(kind, value, "nonsense")
        assert client.step("item") == 0  # it lives on

    def test_a_start_behind_the_last_row_is_the_end(self, servers):
        client = connect(servers, 1)
        value = {"table": 0, "start": 77, "max_rows": 5}
        header, body = Header(Kind.EXPORT), [encode_json(value)]
        (reply,) = client._servers.send_all(header, body, "end")
        _, place, ids, rows = reply.frames()
        assert (bytes(place), len(ids), len(rows)) == (b'{"next": null}', 0, 0)


class TestIds:
    @pytest.mark.parametrize("scanned", [1, 5, 1 << 20])
    def test_rows_are_counted_and_ids_found_from_a_bound_on(
        self, servers, scanned, monkeypatch
    ):
        monkeypatch.setattr(embedding_store, "MAX_SCANNED_SLOTS", scanned)
        client = connect(servers)
        ids = ids_of(0, 1, 2, 3, 9, 2**40, 2**64 - 1)
        client.fill("item", blocks_of(table_of(7), ids))
        client.fill("other", blocks_of(table_of(30, 6)))
        for first, expected in ((0, ids), (3, ids[3:]), (10, ids[5:])):
            num_rows, found = client.count_ids("item", first)
            assert num_rows == 7
            assert sorted(found.tolist()) == sorted(expected.tolist())
        assert client.count_ids("adam")[0] == 0

    def test_an_id_without_a_row_may_read_what_it_would_begin_with(self, servers):
        client = connect(servers)
        client.write("adam", ids_of(1, 5), np.zeros((2, 2), np.float32))
        ids = np.arange(8, dtype=np.uint64)
        read = client.read("adam", ids, initial=True)
        assert not read[[1, 5]].any()
        split = client.split(ids)
        (rows,) = client.pull([("adam", split)], batch=BatchNumber(1, 1))
        assert np.array_equal(read[:, :2], rows[split.inverse])
        assert np.array_equal(read, client.read("adam", ids))

    def test_a_reply_without_its_frames_is_rejected(self):
        with (
            silent_server([encode_json({"next": None, "rows": 1})]) as client,
            pytest.raises(FrameError, match=r"must have 3 frames\. Received: 2"),
        ):
            client.count_ids("item")


@contextlib.contextmanager
def silent_server(frames):
    """A client of a server that knows one table, and answers the rest with frames."""

    def answer(header, _frames):
        if header.kind == Kind.HELLO:
            hello = {"shard": 0, "num_shards": 1, "incarnation": 1}
            return [encode_json({**hello, "max_request_ids": 100})]
        if header.kind == Kind.ADD_TABLES:
            told = {"number": 0, "wants_counts": False, "spec": ITEM.to_json()}
            return [encode_json([told])]
        return frames

    service = Service("embedding server", answer)
    client = EmbeddingClient.connect([service.address])
    client.add_tables([ITEM])
    yield client
    client.close()
    service.close()


def test_an_export_without_its_frames_is_rejected():
    with (
        silent_server([encode_json({"next": None})]) as client,
        pytest.raises(FrameError, match=r"must have 4 frames\. Received: 2"),
    ):
        list(client.export("item"))
