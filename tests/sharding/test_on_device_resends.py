"""Gradients on their way to a server that is killed: their memory is not written."""

import contextlib
import gc
import signal
from contextlib import closing

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from persia_torchrec import SGD, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.client.client import EmbeddingClient
from persia_torchrec.sharding.on_device import DeviceGradients
from tests.support.faults import Killed
from tests.support.processes import Processes, wait_until
from tests.support.remote_job import Bags, remote_modules, shard
from tests.support.servers import DEADLINE_S

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("group")]

# No id is in two batches; ZeroMQ does not copy the gradients of one.
NUM_BATCHES, NUM_IDS, DIM = 50, 2000, 16
ALL_IDS = np.arange(NUM_BATCHES * NUM_IDS, dtype=np.uint64)
CAPACITY = 2 * len(ALL_IDS)
TABLE = EmbeddingBagConfig(1, DIM, name="item", feature_names=["item"])


class Kept:
    """Arrays that were handed over, and what they held then."""

    def __init__(self):
        self._arrays = []

    def add(self, given):
        arrays = given.arrays() if isinstance(given, DeviceGradients) else given
        self._arrays += [(array, array.tobytes()) for array in arrays]

    def num_changed(self):
        assert len(self._arrays) == NUM_BATCHES
        return sum(array.tobytes() != then for array, then in self._arrays)


class KeepingClient(EmbeddingClient):
    """Keeps what it is given to push, and the replies."""

    def __init__(self, servers):
        super().__init__(servers)
        self.pushed, self.replies = Kept(), []

    def push(self, tables, grads, batch, **settings):
        self.pushed.add(grads)
        replies = super().push(tables, grads, batch, **settings)
        self.replies += replies
        return replies

    def num_acknowledged(self):
        return sum(reply.done() for reply in self.replies)


class KeepingLookup:
    """Stands before a lookup; keeps the gradients that have left the trainer."""

    def __init__(self, lookup):
        self._lookup, self.left = lookup, Kept()

    def push(self, batch, grads):
        self.left.add(grads)
        return self._lookup.push(batch, grads)

    def __getattr__(self, name):
        return getattr(self._lookup, name)


@pytest.fixture
def server(tmp_path):
    with Processes(tmp_path) as processes, closing(Killed(processes)) as server:
        server.start("--capacity", str(CAPACITY))
        yield server


def connect(address):
    return KeepingClient.connect([address], timeout_s=DEADLINE_S, recovery_s=DEADLINE_S)


def ids_of_batch(number):
    """Return each id of a batch in two bags, in another order in the second."""
    ids = torch.arange(NUM_IDS * number, NUM_IDS * (number + 1))
    lengths = torch.full([NUM_IDS], 2, dtype=torch.int32)
    bags = torch.stack([ids, ids.flip(0).roll(number)], dim=1).reshape(-1)
    return KeyedJaggedTensor(["item"], bags, lengths=lengths)


def train(client, before=lambda: None, after=lambda: None):
    """Train all batches at once, with ``before`` and ``after`` their gradients.

    Returns the rows as bytes.
    """
    sharder = RemoteEmbeddingBagCollectionSharder(
        client, SGD(0.5), staleness=NUM_BATCHES
    )
    with contextlib.closing(sharder):
        model = shard(Bags([TABLE]), sharder)
        (module,) = remote_modules(model)
        lookup = module.pipeline.lookup = KeepingLookup(module.pipeline.lookup)
        outputs = [model(ids_of_batch(n)).values() for n in range(NUM_BATCHES)]
        before()
        draw = torch.Generator().manual_seed(1)
        grads = [torch.randn(output.shape, generator=draw) for output in outputs]
        for output, grad in zip(outputs, grads, strict=True):
            output.backward(grad)
        wait_until(lambda: len(client.replies) == NUM_BATCHES, "all have left")
        assert lookup.left.num_changed() == 0
        # Memory that is the trainer's again, or free by now, is written.
        for grad in grads:
            grad.fill_(np.nan)
        del output, outputs
        gc.collect()
        written = [torch.full((NUM_IDS, DIM), np.nan) for _ in range(2 * NUM_BATCHES)]
        after()
        sharder.flush()
        assert client.pushed.num_changed() == 0
        assert client.num_acknowledged() == NUM_BATCHES
        del written
    return client.read("item", ALL_IDS).tobytes()


@pytest.mark.parametrize("least_acknowledged", [0, 1])
def test_gradients_that_are_sent_again_are_what_left_the_trainer(
    server, servers, least_acknowledged, caplog
):
    [other] = servers.start(capacity_rows=CAPACITY)
    with closing(connect(other.address)) as undisturbed:
        expected = train(undisturbed)

    with closing(connect(server.address)) as client:

        def stop():
            server.process.send(signal.SIGSTOP)

        def kill():
            assert client.num_acknowledged() == 0
            if least_acknowledged:
                server.process.send(signal.SIGCONT)
                wait_until(
                    lambda: client.num_acknowledged() >= least_acknowledged, "a reply"
                )
            server.process.kill()
            server.start("--capacity", str(CAPACITY))

        assert train(client, stop, kill) == expected
        assert client.step("item") == NUM_BATCHES
    if not least_acknowledged:
        assert f"requests resent: {NUM_BATCHES}" in caplog.text
