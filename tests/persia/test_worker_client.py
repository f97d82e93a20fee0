import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from persia_torchrec.client.client import BatchNumber
from persia_torchrec.embedding.optim import SGD, Adagrad
from persia_torchrec.errors import (
    BatchError,
    ConfigError,
    DataflowError,
    FrameError,
    RemoteError,
    ServerError,
)
from persia_torchrec.lookup.bags import Bags, FeatureSpec, encode_bags
from persia_torchrec.persia.batch import NO_WORKER, Origin, ReferencedBatch
from persia_torchrec.persia.slots import SlotsLookup
from persia_torchrec.persia.worker.process import IdBuffer, WorkerProcess
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.rpc.listener_thread import Service
from persia_torchrec.rpc.messages import Precision, encode_json
from persia_torchrec.table import TableSpec
from tests.support.one_feature import bags_of
from tests.support.processes import wait_until
from tests.support.servers import (
    DEADLINE_S,
    ids_of,
    missed,
    once_the_port_is_free,
    outcome_of,
)

pytestmark = pytest.mark.slow

TABLE = TableSpec(name="item", dim=2, optimizer=SGD(1.0))
FEATURE = FeatureSpec(name="item", key="item", table="item")


class Workers:
    """Embedding workers behind sockets."""

    def __init__(self, clients, *, buffer_size=10, features=(FEATURE,)) -> None:
        self.clients = clients
        self.buffers = [IdBuffer(buffer_size, expires_s=60) for _ in clients]
        self.services = [
            Service(
                "embedding worker",
                WorkerProcess(SlotsLookup(c, features), buffer).answer,
            )
            for c, buffer in zip(clients, self.buffers, strict=True)
        ]
        self._remotes = []

    def connect(self, **settings) -> RemoteWorkers:
        addresses = [service.address for service in self.services]
        remote = RemoteWorkers(addresses, **{"timeout_s": DEADLINE_S, **settings})
        self._remotes.append(remote)
        return remote

    def end(self, worker):
        """End a worker, with all that it has."""
        self.services[worker].close()

    def restart(self, worker):
        """Start a worker that was ended, at the same address."""
        client, buffer = self.clients[worker], IdBuffer(10, expires_s=60)
        answer = WorkerProcess(SlotsLookup(client, [FEATURE]), buffer).answer
        port = int(self.services[worker].address.rpartition(":")[2])
        listen = partial(Service, "embedding worker", answer, port=port)
        self.services[worker] = once_the_port_is_free(listen)
        self.buffers[worker] = buffer

    def rows(self, *numbers):
        return self.clients[0].read("item", ids_of(*numbers))

    def close(self):
        for remote in self._remotes:
            remote.close()
        for service in self.services:
            service.close()


@pytest.fixture
def workers(servers):
    running = servers.start(2)
    workers = Workers([servers.client(running) for _ in range(2)])
    yield workers
    workers.close()


@pytest.fixture
def remote(workers):
    remote = workers.connect()
    remote.add_tables([TABLE])
    return remote


def waiting(origin):
    """Return a batch whose ids wait; what else it has does not matter."""
    rest = {"batch_size": 1, "non_id_type_features": (), "labels": ()}
    rest |= {"requires_grad": False, "meta": None, "batch_id": 0}
    return ReferencedBatch(origin=origin, **rest)


def leave(remote, origin, bags, **more):
    """Leave ids with the worker of a batch; return whether it has room."""
    return remote.buffer(origin.worker, origin, encode_bags(bags), **more)


def number(batch):
    return BatchNumber(3, batch)


def test_every_worker_knows_the_tables(workers, remote):
    assert remote.num_workers == 2
    for client in workers.clients:
        assert client.table("item") == TABLE


def test_batches_without_a_reference_go_to_the_workers_in_turn(workers, remote):
    turns = [
        remote.pull(bags_of([batch]), number(batch))[1].worker for batch in range(4)
    ]
    assert turns == [0, 1, 0, 1]


def test_a_batch_is_asked_for_where_its_ids_wait(workers, remote):
    other, origin = Origin(5, 1, worker=0), Origin(5, 2, worker=1)
    assert leave(remote, other, bags_of([1], [2]))
    assert leave(remote, origin, bags_of([7], [], [7, 8]))
    assert [len(buffer) for buffer in workers.buffers] == [1, 1]
    (pooled,), handle = remote.pull(waiting(origin), number(1))
    assert handle.worker == 1
    assert not origin.is_settled
    seven, eight = workers.rows(7, 8)
    np.testing.assert_allclose(pooled, [seven, 0 * seven, seven + eight], rtol=1e-6)
    assert [len(buffer) for buffer in workers.buffers] == [1, 0]
    assert remote.pull(waiting(other), None)[0][0].shape == (2, 2)
    assert other.is_settled
    missed(remote.push(handle, (pooled,)))
    assert origin.is_settled


def test_pulled_rows_are_writable(remote):
    (pooled,), _ = remote.pull(bags_of([1]), number(1))
    pooled += 1
    assert pooled.flags.c_contiguous
    assert pooled.dtype == np.float32


def test_the_gradient_goes_to_the_worker_that_pulled(workers, remote):
    handles = [remote.pull(bags_of([1]), number(batch))[1] for batch in (1, 2)]
    before = workers.rows(1)
    grads = np.array([[1, 2]], dtype=np.float32)
    replies = [remote.push(handle, (grads,)) for handle in handles]
    assert [missed(reply) for reply in replies] == [0, 0]
    np.testing.assert_allclose(before - workers.rows(1), 2 * grads, rtol=1e-6)


def test_ids_whose_row_is_gone_are_counted(servers):
    workers = Workers([servers.client(servers.start(1, capacity_rows=2))])
    remote = workers.connect()
    remote.add_tables([TABLE])
    _, handle = remote.pull(bags_of([1, 2]), number(1))
    remote.pull(bags_of([3, 4]), number(2))
    grads = (np.ones((1, 2), dtype=np.float32),)
    assert missed(remote.push(handle, grads)) == 2
    workers.close()


def test_a_batch_that_is_given_up_changes_nothing(workers, remote):
    _, handle = remote.pull(bags_of([1]), number(1))
    before = workers.rows(1)
    assert missed(remote.abandon(handle)) == 0
    np.testing.assert_array_equal(workers.rows(1), before)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(Precision.FP16, 1e-3), (Precision.BF16, 1e-2)]
)
def test_embeddings_and_gradients_may_travel_as_halves(workers, precision, tolerance):
    exact, half = workers.connect(), workers.connect(precision=precision)
    exact.add_tables([TABLE])
    (expected,), _ = exact.pull(bags_of([1, 2]), number(1))
    (pooled,), handle = half.pull(bags_of([1, 2]), number(2))
    np.testing.assert_allclose(pooled, expected, rtol=tolerance)
    before = workers.rows(1)
    grads = np.array([[0.1, 100.1]], dtype=np.float32)
    missed(half.push(handle, (grads,)))
    np.testing.assert_allclose(before - workers.rows(1), grads, rtol=tolerance)


def test_a_full_buffer_rejects(servers):
    client = servers.client(servers.start(1))
    workers = Workers([client], buffer_size=1)
    remote = workers.connect()
    assert leave(remote, Origin(0, 1, 0), bags_of([1]))
    assert not leave(remote, Origin(0, 2, 0), bags_of([1]))
    workers.close()


def test_a_rejection_names_the_worker_and_the_features(remote):
    message = r"embedding worker 1 at tcp://.*one of \['item'\].*unknown \['ad'\]"
    with pytest.raises(RemoteError, match=message) as raised:
        leave(remote, Origin(0, 1, worker=1), bags_of([1], name="ad"))
    assert raised.value.kind == "BatchError"


def test_bags_that_do_not_fit_are_rejected_before_they_are_sent(remote):
    with pytest.raises(BatchError, match="Feature 'item': lengths must not be negati"):
        remote.pull({"item": Bags(ids_of(1), np.array([2], dtype=np.int32))}, None)


def test_an_unknown_batch_names_the_worker(remote):
    message = "embedding worker 1 at .*Batch 99 of data loader 4"
    with pytest.raises(RemoteError, match=message) as raised:
        remote.pull(waiting(Origin(4, 99, worker=1)), number(1))
    assert raised.value.kind == "LostBatchError"


def test_a_server_that_rejects_a_table_is_named_through_the_worker(remote):
    other = TableSpec(name="item", dim=2, optimizer=Adagrad())
    message = "embedding worker 0 at .*embedding server 0 at .*'item'"
    with pytest.raises(RemoteError, match=message):
        remote.add_tables([other])


def test_a_worker_that_is_gone_is_named(workers):
    remote = workers.connect(timeout_s=0.3)
    remote.add_tables([TABLE])
    first, other = workers.services
    first.close()
    with contextlib.suppress(ServerError):  # unless it is known to be gone
        remote.pull(bags_of([1]), number(1))
    # The other one continues.
    assert remote.pull(bags_of([1]), number(2))[0][0].shape == (1, 2)
    other.close()
    with pytest.raises(ServerError, match=r"embedding worker \d at .*: lookup: "):
        remote.pull(bags_of([1]), number(3))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (None, "Frame 1 must be a mapping. Received: None"),
        (
            {"slots": ["item"], "outputs": [[1, 2]], "places": []},
            r"as many arrays\. Received: 2 frames, _Forw",
        ),
    ],
    ids=["no mapping", "without its arrays"],
)
def test_an_invalid_reply_is_rejected(told, message):
    service = Service("embedding worker", lambda _header, _frames: [encode_json(told)])
    remote = RemoteWorkers([service.address], timeout_s=DEADLINE_S)
    with pytest.raises(FrameError, match=message):
        remote.pull(bags_of([1]), number(1))
    remote.close()
    service.close()


def test_workers_of_other_slots_are_rejected(servers):
    client = servers.client(servers.start(1))
    client.add_tables([TABLE])
    services = [
        Service(
            "embedding worker", WorkerProcess(lookup, IdBuffer(1, expires_s=60)).answer
        )
        for lookup in (
            SlotsLookup(client, [FEATURE]),
            SlotsLookup(client, [FeatureSpec(name="ad", key="ad", table="item")]),
        )
    ]
    remote = RemoteWorkers([service.address for service in services])
    with pytest.raises(ConfigError, match=r"same slots\. Received: embedding worker 1"):
        remote.hello()
    for closable in (remote, *services):
        closable.close()


def test_a_job_without_workers_is_rejected():
    with pytest.raises(ConfigError, match="At least one address"):
        RemoteWorkers([])


def test_closing_twice_does_nothing(workers):
    remote = workers.connect()
    remote.close()
    remote.close()
    with pytest.raises(ServerError, match="connections are closed"):
        leave(remote, Origin(0, 1, 0), bags_of([1]))


def test_gradients_that_are_not_finite_are_counted_through_a_worker(remote):
    remote.add_tables([TABLE])
    _, handle = remote.pull(bags_of([1, 2]), number(1))
    bad = np.full((1, 2), np.inf, dtype=np.float32)
    outcome = outcome_of(remote.push(handle, (bad,)))
    assert (outcome.num_missed, outcome.num_refused) == (0, 2)


def test_changed_tables_reach_the_servers_through_every_worker(workers, remote):
    pull = {"item": Bags(ids_of(1), np.array([1], dtype=np.int32))}
    remote.change_tables(lambda spec: replace(spec, optimizer=SGD(4.0)))
    for batch in (1, 2):  # to the one worker and to the other
        _, handle = remote.pull(pull, number(batch))
        before = workers.rows(1)
        outcome_of(remote.push(handle, (np.ones((1, 2), dtype=np.float32),)))
        np.testing.assert_allclose(before - workers.rows(1), 4.0, rtol=1e-6)
    assert [c.table("item").optimizer for c in workers.clients] == [SGD(4.0)] * 2


def test_a_change_that_alters_nothing_asks_no_worker(workers, remote):
    def added():
        return [c["requests_add_tables"] for c in workers.clients[0].counters()]

    before = added()
    remote.change_tables(lambda spec: spec)
    assert added() == before


ONES = (np.ones((1, 2), dtype=np.float32),)


@pytest.fixture
def recovering(workers):
    """A client of workers that end, and are started again at the same addresses."""
    remote = workers.connect(recovery_s=DEADLINE_S)
    remote.add_tables([TABLE])
    return remote


class TestSharedMemory:
    """Workers whose memory is shared: what went over TCP before goes through it."""

    @pytest.fixture
    def near(self, workers, monkeypatch):
        monkeypatch.setenv("PERSIA_TRANSPORT", "shm")
        remote = workers.connect()
        remote.add_tables([TABLE])
        wait_until(lambda: all(self.memories(remote)), "shared memory")
        return remote

    @pytest.fixture
    def far(self, workers, monkeypatch):
        monkeypatch.setenv("PERSIA_TRANSPORT", "tcp")
        return workers.connect()

    @staticmethod
    def memories(remote):
        return [remote.connections[worker].memory for worker in range(2)]

    def sent(self, remote):
        """Return how many requests went through memory, and how many replies came."""
        each = [(one.num_requests, one._num_taken) for one in self.memories(remote)]
        return tuple(map(sum, zip(*each, strict=True)))

    def test_all_that_is_sent_goes_through_memory(self, workers, near):
        (requests, replies), origin = self.sent(near), Origin(5, 1, worker=1)
        assert leave(near, origin, bags_of([7], [], [7, 8]))
        (pooled,), handle = near.pull(waiting(origin), number(1))
        rows = workers.rows(7)
        missed(near.push(handle, (np.ones_like(pooled),)))
        np.testing.assert_allclose(workers.rows(7), rows - 2, rtol=1e-6)
        assert self.sent(near) == (requests + 3, replies + 3)

    def test_embeddings_and_gradients_are_those_over_tcp(self, near, far):
        bags = bags_of(*np.arange(6000).reshape(3000, 2))
        for batch in range(1, 4):
            pulled = [remote.pull(bags, None)[0][0].tobytes() for remote in (near, far)]
            assert pulled[0] == pulled[1]
            remote = (near, far)[batch % 2]
            (pooled,), handle = remote.pull(bags, number(batch))
            missed(remote.push(handle, (0.25 * pooled,)))

    def test_large_replies_come_through_memory_from_the_second_on(self, near):
        bags = bags_of(*np.arange(3000)[:, None])
        for batch in range(4):  # of which two to each worker
            requests, replies = self.sent(near)
            near.pull(bags, None)
            assert self.sent(near) == (requests + 1, replies + bool(batch))

    def test_memory_is_shared_again_with_a_worker_that_is_back(self, workers, near):
        former = self.memories(near)[0]
        workers.end(0)
        wait_until(lambda: near.connections[0].memory is None, "it is lost")
        workers.restart(0)
        wait_until(lambda: near.connections[0].memory, "shared memory")
        assert self.memories(near)[0] is not former
        assert leave(near, Origin(5, 1, worker=0), bags_of([7]))
        assert self.memories(near)[0].num_requests == 1

    def test_outputs_of_many_raw_slots_fit_into_a_message(self, servers, monkeypatch):
        monkeypatch.setenv("PERSIA_TRANSPORT", "shm")
        names = [f"slot{i}" for i in range(20)]
        features = [FEATURE._replace(name=n, key=n, num_places=2) for n in names]
        workers = Workers([servers.client(servers.start(1))], features=features)
        with contextlib.closing(workers):
            remote = workers.connect()
            remote.add_tables([TABLE])
            wait_until(lambda: remote.connections[0].memory, "shared memory")
            before = remote.connections[0].memory._num_taken
            bags = {name: bags_of([7], [8, 9])["item"] for name in names}
            outputs, handle = remote.pull(bags, number(1))
            assert len(outputs) == 21
            missed(remote.push(handle, tuple(map(np.ones_like, outputs))))
            assert remote.connections[0].memory._num_taken == before + 2


class TestRecovery:
    """Workers that end, and are started again at the same addresses."""

    def test_lookups_continue_through_another_worker_until_it_is_back(
        self, workers, recovering
    ):
        def turns(*batches):
            pulled = [recovering.pull(bags_of([1]), number(n))[1] for n in batches]
            return [handle.worker for handle in pulled]

        workers.end(0)
        assert turns(1, 2) == [1, 1]
        workers.restart(0)
        wait_until(lambda: recovering.connections[0].fails_with is None, "it is back")
        assert turns(3, 4) == [0, 1]

    def test_a_lookup_waits_for_the_only_worker(self, servers):
        workers = Workers([servers.client(servers.start(1))])
        remote = workers.connect(recovery_s=DEADLINE_S)
        remote.add_tables([TABLE])
        workers.end(0)
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(remote.pull, bags_of([1]), number(1))
            workers.restart(0)
            _, handle = pulled.result(DEADLINE_S)
        before = workers.rows(1)
        missed(remote.push(handle, ONES))
        np.testing.assert_allclose(before - workers.rows(1), ONES[0], rtol=1e-6)
        workers.close()

    @pytest.mark.parametrize("is_back", [True, False])
    def test_gradients_go_to_a_worker_that_has_not_pulled(
        self, workers, recovering, is_back
    ):
        _, handle = recovering.pull(bags_of([1]), number(1))
        before = workers.rows(1)
        workers.end(handle.worker)
        if is_back:
            workers.restart(handle.worker)
        assert missed(recovering.push(handle, ONES)) == 0
        np.testing.assert_allclose(before - workers.rows(1), ONES[0], rtol=1e-6)
        assert [len(buffer) for buffer in workers.buffers] == [0, 0]

    def test_a_batch_is_given_up_through_another_worker(self, workers, recovering):
        _, handle = recovering.pull(bags_of([1]), number(1))
        workers.end(handle.worker)
        assert missed(recovering.abandon(handle)) == 0
        counters = workers.clients[1].counters()
        assert [of_server["open_batches"] for of_server in counters] == [0, 0]

    def test_ids_of_a_loader_that_are_lost_are_waited_for(self, workers, recovering):
        origin = Origin(4, 1, worker=0)
        leave(recovering, origin, bags_of([1]))
        workers.end(0)
        workers.restart(0)

        def find(worker):
            wait_until(lambda: origin.is_lost, "the ids are asked for")
            ids = encode_bags(bags_of([1]))

            def leave_again(to):
                recovering.buffer(to, origin, ids, again=True)
                return to

            origin.move(recovering.insist(worker, leave_again))

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(find, 1)
            _, handle = recovering.pull(waiting(origin), number(1))
            found.result(DEADLINE_S)
            assert handle.worker == 1
            before = workers.rows(1)
            workers.end(1)
            workers.restart(1)
            found = pool.submit(find, 1)
            missed(recovering.push(handle, ONES))
            found.result(DEADLINE_S)
        np.testing.assert_allclose(before - workers.rows(1), ONES[0], rtol=1e-6)
        assert origin.is_settled

    def test_the_wait_ends_in_the_error_that_began_it(self, workers):
        remote = workers.connect(recovery_s=0.2)
        remote.add_tables([TABLE])
        for worker in range(2):
            workers.end(worker)
        with pytest.raises(ServerError, match=r"embedding worker \d at .*: lookup: "):
            remote.pull(bags_of([1]), number(1))

    def test_closing_ends_the_wait(self, workers, recovering):
        for worker in range(2):
            workers.end(worker)
        with ThreadPoolExecutor(1) as pool:
            pulled = pool.submit(recovering.pull, bags_of([1]), number(1))
            recovering.close()
            with pytest.raises(ServerError):
                pulled.result(DEADLINE_S)


def test_ids_that_no_process_has_are_an_error(recovering):
    origin = Origin(4, 1, worker=0)
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(recovering.pull, waiting(origin), number(1))
        wait_until(lambda: origin.is_lost, "the ids are asked for")
        origin.move(NO_WORKER)
        with pytest.raises(DataflowError, match="batch 1 of data loader 4 must be"):
            pulled.result(DEADLINE_S)
