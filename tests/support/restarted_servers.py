"""Trainers of servers that are killed in turn, and started again."""

import random
import threading
from collections import Counter
from contextlib import ExitStack, closing

import numpy as np

from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import PersiaError
from persia_torchrec.lookup.sharded_lookup import ShardedLookup
from persia_torchrec.pipeline.joint import Trainers
from persia_torchrec.pipeline.pipeline import BatchPipeline
from persia_torchrec.rpc.messages import Share
from persia_torchrec.server.cluster import EmbeddingCluster
from persia_torchrec.table import TableSpec
from tests.support.count_table import COUNT, FEATURE, ONE_UPDATE, bags_of
from tests.support.processes import is_running
from tests.support.servers import DEADLINE_S, ids_of

NUM_IDS = 300
EXACT = TableSpec(
    name="exact", dim=3, optimizer=Adagrad(0.1), keeps_metadata=True, seed=3
)


class Trainer(threading.Thread):
    """Counts how often it trained each id, until it is told to end."""

    def __init__(self, cluster, seed, share=None):
        super().__init__(name=f"trainer {seed}", daemon=True)
        self.client = EmbeddingClient.connect(
            cluster.addresses, timeout_s=30.0, recovery_s=cluster.recovery_s
        )
        lookup = ShardedLookup(self.client, [FEATURE])
        lookup.add_tables([COUNT])
        self.pipeline = BatchPipeline(lookup, staleness=4, timeout_s=DEADLINE_S)
        if share is not None:
            trainers = Trainers(self.client, share)
            trainers.join()
            self.pipeline.set_trainers(trainers)
        self.counts, self.num_steps = Counter(), 0
        self.last_step = None
        self.error = None
        self._random = random.Random(seed)

    def run(self):
        try:
            while self.last_step is None or self.num_steps < self.last_step:
                ids = self._random.sample(range(NUM_IDS), 20)
                batch = self.pipeline.start(bags_of(*ids), training=True)
                batch.wait().push(ONE_UPDATE)
                self.counts.update(ids)
                self.num_steps += 1
            self.pipeline.flush()
            self.pipeline.leave()
        except PersiaError as exc:
            self.error = exc

    def close(self):
        self.pipeline.close()
        self.client.close()


def train_exactly(client, number):
    """Train a batch of a table of its own, and wait for the acknowledgement."""
    draw = np.random.default_rng(number)
    ids = np.unique(draw.integers(0, 200, 50).astype(np.uint64))
    tables = [("exact", client.split(ids))]
    batch = BatchNumber(77, number)
    [rows] = client.pull(tables, batch=batch)
    grads = draw.normal(size=rows.shape).astype(np.float32) + rows
    assert client.outcome(client.push(tables, [grads], batch)).num_missed == 0


def train_through_kills(servers, num_kills):
    """Train on two servers that are killed in turn; check each weight and each row.

    Four trainers count, two of them jointly, with staleness 4. Another table is trained
    by one client that waits for each acknowledgement.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(
            EmbeddingCluster.local(servers=2, capacity=5000, restarts=True)
        )
        shares = [None, None, *(Share(9, 1, rank, 2, 600_000) for rank in range(2))]
        trainers = [Trainer(cluster, n, share) for n, share in enumerate(shares)]
        for trainer in trainers:
            stack.callback(trainer.close)
            trainer.start()
        client = stack.enter_context(
            closing(
                EmbeddingClient.connect(
                    cluster.addresses, recovery_s=cluster.recovery_s
                )
            )
        )
        client.add_tables([EXACT, COUNT])
        undisturbed = servers.client(servers.start(2))
        undisturbed.add_tables([EXACT])
        draw, number, killed = random.Random(1), 0, set()
        for n in range(num_kills):
            before = [trainer.num_steps + 5 for trainer in trainers]
            while any(t.num_steps < b for t, b in zip(trainers, before, strict=True)):
                assert not any(trainer.error for trainer in trainers)
                number += 1
                train_exactly(client, number)
                train_exactly(undisturbed, number)
            shard = n % 2
            killed.add(cluster.processes[shard].pid)
            threading.Event().wait(draw.uniform(0.0, 0.05))
            cluster.processes[shard].kill()
        for _ in range(5):
            number += 1
            train_exactly(client, number)
            train_exactly(undisturbed, number)
        last_step = max(trainer.num_steps for trainer in trainers) + 10
        for trainer in trainers:
            trainer.last_step = last_step
        for trainer in trainers:
            trainer.join(DEADLINE_S)
            assert not trainer.is_alive()
            assert trainer.error is None
        assert not any(map(is_running, killed))
        expected = sum((trainer.counts for trainer in trainers), Counter())
        weights = client.read("count", ids_of(*range(NUM_IDS)))[:, 0]
        assert weights.tolist() == [float(expected[id_]) for id_ in range(NUM_IDS)]
        ids = ids_of(*range(200))
        rows = [each.read("exact", ids).tobytes() for each in (client, undisturbed)]
        assert rows[0] == rows[1]
        seen = [each.metadata("exact", ids).frequency for each in (client, undisturbed)]
        assert seen[0].tolist() == seen[1].tolist()
