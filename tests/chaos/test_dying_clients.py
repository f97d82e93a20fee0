"""Clients that are killed in the middle of their requests, mostly with the server."""

import itertools
import os
import time
from collections import deque
from contextlib import closing

import numpy as np
import pytest

from persia_torchrec import Constant
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.rpc.messages import NO_GENERATION
from persia_torchrec.table import TableSpec
from tests.support.faults import Killed
from tests.support.processes import Processes
from tests.support.servers import ids_of

IN_FLIGHT = 8
IDS = ids_of(*range(50))
TABLES = [
    TableSpec(name=name, dim=1, optimizer=SGD(1.0), initializer=Constant(0.0))
    for name in ("one", "two")
]

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def train_for_ever(address):
    """Count batches in all weights, several in flight; say which are acknowledged."""
    client = EmbeddingClient.connect([address])
    client.add_tables(TABLES)
    tables = [(table.name, client.split(IDS)) for table in TABLES]
    stream = BatchNumber.new_stream(NO_GENERATION)
    in_flight = deque()
    for number in itertools.count():
        batch = BatchNumber(stream, number)
        grads = [-np.ones_like(rows) for rows in client.pull(tables, batch=batch)]
        in_flight.append(client.push(tables, grads, batch))
        if len(in_flight) == IN_FLIGHT:
            client.outcome(in_flight.popleft())
            print("trained", flush=True)


def test_nothing_is_half_applied_when_clients_and_their_server_are_killed(
    tmp_path, draw, kills
):
    num_rounds, num_trained, allocated = kills(30), 0, 0
    with Processes(tmp_path) as processes, closing(Killed(processes)) as server:
        server.start()
        for n in range(num_rounds):
            trainer = processes.start(f"trainer {n}", train_for_ever, server.address)
            trainer.has_printed("trained\ntrained")
            time.sleep(draw.uniform(0, 0.1))  # they are killed anywhere
            victims = [trainer] if n % 3 == 0 else [server.process, trainer]
            for victim in draw.sample(victims, len(victims)):
                victim.process.kill()
            for victim in victims:
                victim.process.join()
            if n % 3:
                server.start()
            num_trained += trainer.output().count("trained")
            with server.connect() as client:
                client.learn_tables()
                split = client.split(IDS)
                weights = np.stack(client.pull([(t.name, split) for t in TABLES]))
                num = int(weights[0, 0, 0])
                assert (weights == num).all()
                most = num_trained + (n + 1) * (IN_FLIGHT + 1)
                assert num_trained <= num <= most
                [counters] = client.counters()
                assert counters["open_batches"] <= IN_FLIGHT + 1
            if n == 3:
                allocated = os.fstat(server.memory).st_blocks
        grown = 512 * (os.fstat(server.memory).st_blocks - allocated)
        assert grown <= 2**15 * num_rounds  # what is remembered of so many streams
