import numpy as np
import pytest

from persia_torchrec.embedding.optim import SGD
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    FrameError,
    LostBatchError,
    ServerError,
)
from persia_torchrec.lookup.bags import encode_bags
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.worker.process import IdBuffer, WorkerProcess
from persia_torchrec.rpc.float_codec import decode_floats, encode_floats
from persia_torchrec.rpc.messages import (
    AGAIN,
    TRAINING,
    Header,
    Kind,
    Precision,
    decode_json,
    encode_json,
)
from persia_torchrec.table import TableSpec
from tests.support.one_feature import FEATURE, bags_of
from tests.support.servers import ids_of

DIM = 2
TABLE = TableSpec(name="item", dim=DIM, optimizer=SGD(1.0))
STREAM = 9


class Asker:
    """Asks a worker process as loaders and trainers do."""

    def __init__(self, client, *, buffer_size=10) -> None:
        self.client = client
        self.buffer = IdBuffer(buffer_size, expires_s=60)
        self.process = WorkerProcess(SlotsLookup(client, [FEATURE]), self.buffer)

    def ask(self, kind, *frames, **header):
        """Return the frames of the reply, which stand after its header."""
        header = Header(kind, stream=header.pop("stream", STREAM), **header)
        return self.process.answer(header, [header.encode(), *frames])

    def add_tables(self, *specs):
        (reply,) = self.ask(Kind.ADD_TABLES, encode_json([s.to_json() for s in specs]))
        return decode_json([b"", reply])

    def buffer_ids(self, bags, number=1, loader=0, **header):
        ids = encode_bags(bags)
        (reply,) = self.ask(
            Kind.BUFFER_IDS, *ids, stream=loader, batch=number, **header
        )
        return decode_json([b"", reply])

    def forward(self, origin, *frames, batch=1, training=True, **header):
        shapes, floats = self.ask(
            Kind.FORWARD,
            *(encode_json(origin), *frames),
            batch=batch,
            flags=TRAINING if training else 0,
            **header,
        )
        shapes = decode_json([b"", shapes])
        ((shape,), places) = shapes["outputs"], shapes["places"]
        assert places == []
        precision = header.get("precision", Precision.FP32)
        return decode_floats(floats, [shape], precision).reshape(shape)

    def backward(self, grads, batch=1, origin=None):
        frame = encode_floats(np.asarray(grads, dtype=np.float32), Precision.FP32)
        frames = encode_json(origin), frame
        (reply,) = self.ask(Kind.BACKWARD, *frames, batch=batch)
        return decode_json([b"", reply])

    def rows(self, *numbers):
        return self.client.read("item", ids_of(*numbers))


@pytest.fixture
def running(servers):
    return servers.start(2)


@pytest.fixture
def asker(servers, running):
    asker = Asker(servers.client(running))
    asker.add_tables(TABLE)
    return asker


def origin(number, loader=0):
    return {"loader": loader, "number": number}


def test_a_buffered_batch_is_pulled_by_its_number_once(asker):
    assert asker.buffer_ids(bags_of([1, 2], [], [2]), 7)
    assert len(asker.buffer) == 1
    pooled = asker.forward(origin(7))
    one, two = asker.rows(1, 2)
    np.testing.assert_allclose(pooled, [one + two, 0 * one, two], rtol=1e-6)
    assert len(asker.buffer) == 0
    with pytest.raises(LostBatchError, match="Batch 7 of data loader 0"):
        asker.forward(origin(7), batch=2)


def test_a_batch_may_bring_its_own_ids(asker):
    pooled = asker.forward(None, *encode_bags(bags_of([1], [1])))
    np.testing.assert_array_equal(pooled, asker.rows(1, 1))


def test_the_gradient_is_applied_before_it_is_acknowledged(asker):
    before = asker.forward(None, *encode_bags(bags_of([1], [1, 2])))
    outcome = {"missed": 0, "refused": 0, "unadmitted": 0, "gradients": 2, "lost": 0}
    assert asker.backward([[1, 2], [10, 20]]) == outcome
    moved = before[0] - asker.rows(1)[0]
    np.testing.assert_allclose(moved, [11, 22], rtol=1e-6)
    assert asker.backward([[1, 2], [10, 20]]) == outcome  # sent again
    np.testing.assert_allclose(before[0] - asker.rows(1)[0], moved)


def test_gradients_that_come_too_late_are_counted(servers):
    asker = Asker(servers.client(servers.start(1, capacity_rows=2)))
    asker.add_tables(TABLE)
    asker.forward(None, *encode_bags(bags_of([1, 2])), batch=1)
    asker.forward(None, *encode_bags(bags_of([3])), batch=2)
    late, last = (asker.backward([[1, 1]], batch=batch) for batch in (1, 2))
    assert late == {
        "missed": 1,
        "refused": 0,
        "unadmitted": 0,
        "gradients": 2,
        "lost": 0,
    }
    assert last == {
        "missed": 0,
        "refused": 0,
        "unadmitted": 0,
        "gradients": 1,
        "lost": 0,
    }


def test_a_pull_for_evaluation_changes_nothing_and_expects_no_gradient(asker):
    pooled = asker.forward(None, *encode_bags(bags_of([1])), training=False)
    assert pooled.tolist() == [[0, 0]]
    assert asker.client.num_rows() == [0, 0]
    with pytest.raises(LostBatchError, match="pulled here for training"):
        asker.backward([[1, 1]])


def test_a_batch_can_be_given_up(asker):
    asker.forward(None, *encode_bags(bags_of([1])))
    before = asker.rows(1)
    asker.ask(Kind.ABANDON, encode_json(None), batch=1)
    np.testing.assert_array_equal(asker.rows(1), before)
    assert all(counters["open_batches"] == 0 for counters in asker.client.counters())
    assert asker.backward([[1, 1]])["gradients"] == 0  # it is settled
    np.testing.assert_array_equal(asker.rows(1), before)


def test_embeddings_travel_in_the_precision_that_is_asked_for(asker):
    exact = asker.forward(None, *encode_bags(bags_of([1])), batch=1)
    half = asker.forward(
        None, *encode_bags(bags_of([1])), batch=2, precision=Precision.FP16
    )
    assert half.tolist() == exact.astype(np.float16).tolist()


def test_a_full_buffer_rejects_without_an_error(servers, running):
    asker = Asker(servers.client(running), buffer_size=1)
    assert asker.buffer_ids(bags_of([1]), 1)
    assert not asker.buffer_ids(bags_of([2]), 2)
    assert asker.buffer_ids(bags_of([3]), 2, loader=1)
    asker.add_tables(TABLE)
    asker.forward(origin(1))
    assert asker.buffer_ids(bags_of([2]), 2)


def test_ids_outlive_a_pull_that_failed(servers, running):
    asker = Asker(servers.client(running))
    asker.buffer_ids(bags_of([1]))
    with pytest.raises(ConfigError, match="Table 'item' is unknown to this client"):
        asker.forward(origin(1))
    asker.add_tables(TABLE)
    assert asker.forward(origin(1)).shape == (1, DIM)


def test_a_server_that_is_gone_is_named(servers, running):
    asker = Asker(servers.client(running, timeout_s=0.3))
    asker.add_tables(TABLE)
    running[1].stop()
    with pytest.raises(ServerError, match=r"embedding server 1 at tcp.*'item'"):
        asker.forward(None, *encode_bags(bags_of([1])))


def test_features_other_than_the_slots_are_rejected_when_they_are_sent(asker):
    message = r"at least one of \['item'\]\. Received: .*unknown \['ad'"
    with pytest.raises(BatchError, match=message):
        asker.buffer_ids(bags_of([1], name="ad"))
    with pytest.raises(BatchError, match=message):
        asker.forward(None, *encode_bags(bags_of([1], name="ad")))
    with pytest.raises(BatchError, match=r"Received: \[\], unknown \[\]"):
        asker.forward(None, *encode_bags({}))
    assert len(asker.buffer) == 0


def test_a_table_that_a_feature_needs_must_come(asker):
    with pytest.raises(ConfigError, match="No table 'item'"):
        asker.add_tables(TableSpec(name="user", dim=2, optimizer=SGD(1.0)))


GOOD = encode_bags(bags_of([1, 2], [3]))


@pytest.mark.parametrize(
    ("kind", "frames", "message"),
    [
        (Kind.LOOKUP, [b"null"], "answers no LOOKUP message.*another role"),
        (Kind.ADD_TABLES, [b"{}"], "Frame 1 must be a list"),
        (Kind.ADD_TABLES, [b"[1]"], r"\[0\] must be a mapping"),
        (Kind.ADD_TABLES, [b"["], "must be JSON"),
        (Kind.BUFFER_IDS, [], "has 3 frames"),
        (Kind.BUFFER_IDS, [GOOD[0], GOOD[1], bytes(GOOD[2])[:-8]], "longer than"),
        (Kind.BUFFER_IDS, [GOOD[0], GOOD[1], bytes(GOOD[2])[:-1]], "multiple of 8"),
        (Kind.FORWARD, [], "must have 2 frames"),
        (Kind.FORWARD, [b"null"], "has 3 frames"),
        (Kind.FORWARD, [b"5"], "must be .*Received: 5"),
        (Kind.FORWARD, [b"[]"], r"must be .*Received: \[\]"),
        (Kind.FORWARD, [b'{"loader": 0}'], "number"),
        (Kind.FORWARD, [b'{"loader": 0, "number": "x"}'], "number"),
    ],
)
def test_a_malformed_message_is_rejected(asker, kind, frames, message):
    with pytest.raises(FrameError, match=message):
        asker.ask(kind, *frames, flags=TRAINING)
    assert len(asker.buffer) == 0
    assert asker.client.num_rows() == [0, 0]


def test_ids_of_an_impossible_loader_are_rejected(asker):
    with pytest.raises(FrameError, match=r"must be below 65536\. Received: 65536"):
        asker.ask(Kind.BUFFER_IDS, *encode_bags(bags_of([1])), stream=65536)
    with pytest.raises(LostBatchError):
        asker.buffer.peek(65536, 0)
    assert len(asker.buffer) == 0


@pytest.mark.parametrize("num_floats", [1, 3])
def test_a_gradient_of_another_size_is_rejected(asker, num_floats):
    asker.forward(None, *encode_bags(bags_of([1])))
    before = asker.rows(1)
    with pytest.raises(FrameError, match=r"2 numbers as FP32 take 8 bytes"):
        asker.backward([1.0] * num_floats)
    np.testing.assert_array_equal(asker.rows(1), before)


def test_a_gradient_without_its_array_is_rejected(asker):
    asker.forward(None, *encode_bags(bags_of([1])))
    with pytest.raises(FrameError, match=r"BACKWARD has 3 frames\. Received: 2"):
        asker.ask(Kind.BACKWARD, encode_json(None), batch=1)


def test_ids_that_come_twice_are_kept_once(servers, running):
    asker = Asker(servers.client(running), buffer_size=1)
    asker.add_tables(TABLE)
    assert asker.buffer_ids(bags_of([1]), 1)
    assert asker.buffer_ids(bags_of([1]), 1)
    assert len(asker.buffer) == 1
    asker.forward(origin(1))
    assert asker.buffer_ids(bags_of([1]), 1)  # the first message, late
    assert len(asker.buffer) == 0
    assert asker.buffer_ids(bags_of([1]), 1, incarnation=2)  # of a new process
    assert len(asker.buffer) == 1


def test_ids_that_were_lost_are_kept_in_a_full_buffer_too(servers, running):
    asker = Asker(servers.client(running), buffer_size=1)
    asker.add_tables(TABLE)
    assert asker.buffer_ids(bags_of([1]), 1)
    assert asker.buffer_ids(bags_of([2]), 2, flags=AGAIN)
    asker.forward(origin(2))
    assert asker.buffer_ids(bags_of([2]), 2, flags=AGAIN)
    assert len(asker.buffer) == 2


def test_a_lookup_that_is_asked_for_twice_opens_one_batch(asker):
    asker.buffer_ids(bags_of([1, 2]))
    first, second = asker.forward(origin(1)), asker.forward(origin(1))
    np.testing.assert_array_equal(first, second)
    assert len(asker.process.open) == 1
    asker.backward([[1, 1]])
    assert len(asker.process.open) == 0
    late = asker.forward(None, *encode_bags(bags_of([1, 2])))
    np.testing.assert_allclose(late, first - 2, rtol=1e-6)
    assert len(asker.process.open) == 0


def test_a_gradient_is_applied_by_another_worker_that_has_the_ids(
    asker, servers, running
):
    asker.buffer_ids(bags_of([1], [1, 2]))
    pooled = asker.forward(origin(1))
    other = Asker(servers.client(running))  # it does not know the tables yet
    grads = [[1, 2], [10, 20]]
    with pytest.raises(LostBatchError, match="Batch 1 of data loader 0"):
        other.backward(grads, origin=origin(1))
    other.buffer_ids(bags_of([1], [1, 2]), flags=AGAIN)
    assert other.backward(grads, origin=origin(1))["gradients"] == 2
    assert len(other.buffer) == 0
    np.testing.assert_allclose(pooled[0] - asker.rows(1)[0], [11, 22], rtol=1e-6)
    assert all(counters["open_batches"] == 0 for counters in asker.client.counters())


def test_a_worker_that_was_restarted_learns_the_tables_with_its_first_lookup(
    asker, servers, running
):
    other = Asker(servers.client(running))
    pooled = other.forward(None, *encode_bags(bags_of([1])))
    np.testing.assert_array_equal(pooled, asker.rows(1))


def test_a_batch_that_another_worker_has_pulled_can_be_given_up(
    asker, servers, running
):
    asker.forward(None, *encode_bags(bags_of([1])))
    other = Asker(servers.client(running))
    other.ask(Kind.ABANDON, encode_json(None), batch=1)
    assert all(counters["open_batches"] == 0 for counters in asker.client.counters())


def test_an_update_that_failed_can_be_sent_again(asker):
    pooled = asker.forward(None, *encode_bags(bags_of([1])))
    with pytest.raises(FrameError, match="2 numbers as FP32 take 8 bytes"):
        asker.backward([1.0])
    asker.backward([[1, 2]])
    np.testing.assert_allclose(pooled - asker.rows(1), [[1, 2]], rtol=1e-6)
