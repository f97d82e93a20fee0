"""A job without end: its processes, and the work of each."""

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from persia_torchrec import AdmitFrequency, Expiry
from persia_torchrec.checkpoint import catalog
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.client.client import BatchNumber, EmbeddingClient
from persia_torchrec.embedding.optim import Adagrad
from persia_torchrec.errors import ConfigError, RemoteError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.rpc.messages import NO_GENERATION
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.store.change_log import RING_WORDS
from persia_torchrec.table import TableSpec
from tests.support.processes import Processes, Running

NUM_SERVERS = 2
CAPACITY = 5000
IN_FLIGHT = 4
TURN_S, VISIT_S = 0.8, 0.05
"""Least seconds of a hundred batches, and between two visits: the load is the same all
the time, and below what two cores can do."""

TABLES = [
    TableSpec(name="user", dim=16, optimizer=Adagrad(0.1)),
    TableSpec(
        name="item",
        dim=8,
        optimizer=Adagrad(0.1),
        admission=AdmitFrequency(2, 1000),
        expiry=Expiry(steps_to_live=200),
    ),
]


def start(
    processes: Processes, folder: str, *, fills: bool
) -> tuple[dict[str, Running], list[str]]:
    """Start the job; return its processes by name, and the servers' addresses."""
    running = {
        f"server {shard}": processes.start(f"server {shard}", serve, shard, folder)
        for shard in range(NUM_SERVERS)
    }
    addresses = [_word_after(one, "ready") for one in running.values()]
    running["address book"] = processes.start("book", keep_book)
    port = int(_word_after(running["address book"], "ready"))
    running["trainer"] = processes.start("trainer", train, addresses, folder, fills)
    visitor = processes.start("visitor", come_and_go, addresses, port)
    running["clients that come and go"] = visitor
    running["trainer"].has_printed("turn 0")
    visitor.has_printed("visit 0")
    return running, addresses


def _word_after(process: Running, text: str) -> str:
    process.has_printed(f"{text} ")
    return process.output().partition(f"{text} ")[2].split()[0]


def serve(shard: int, folder: str) -> None:
    """Be a server whose rows are evicted, and whose changes are written."""
    config = ServerConfig(
        shard=shard,
        num_shards=NUM_SERVERS,
        capacity_rows=CAPACITY,
        increments_dir=f"{folder}/increments",
        increments_interval_s=0.5,
        memory_file=f"{folder}/memory-{shard}",
    )
    server = EmbeddingServer(config)
    server.serve(lambda address: print("ready", address, flush=True))


def keep_book() -> None:
    """Be the address book."""
    print("ready", AddressBook.host(0).port, flush=True)
    time.sleep(2**20)


def train(addresses: list[str], folder: str, fills: bool) -> None:
    """Train, connect again every hundred batches, dump now and then.

    Writes a line per batch: the milliseconds of its lookup. If it ``fills``, it first
    looks so many rows up that each server has used all of the ring of its changes.
    """
    rng, out = np.random.default_rng(1), Path(folder) / "latencies"
    if fills:
        _fill_rings(addresses)
    begun_s = time.monotonic()
    for turn in itertools.count():
        time.sleep(max(begun_s + turn * TURN_S - time.monotonic(), 0))
        with closing(EmbeddingClient.connect(addresses)) as client:
            client.add_tables(TABLES)
            stream = BatchNumber.new_stream(NO_GENERATION)
            took = _train_some(client, stream, rng)
            with out.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(ms) + b"\n" for ms in took))
            if turn % 4 == 0:
                run = Folder(f"{folder}/checkpoints")
                client.checkpoints.dump(Path(run.url))
                catalog.delete_older(run, 2)
        print("turn", turn, flush=True)


def _fill_rings(addresses: list[str]) -> None:
    """Look rows up until the notes of each server's ring have gone round."""
    ids = np.arange(CAPACITY, dtype=np.uint64)
    with closing(EmbeddingClient.connect(addresses)) as client:
        client.add_tables(TABLES)
        rows, stream = client.split(ids), BatchNumber.new_stream(NO_GENERATION)
        fewest = int(np.diff(rows.offsets).min())
        for number in range(2 * RING_WORDS // fewest + 1):  # two slots a word
            client.pull([("user", rows)], batch=BatchNumber(stream, number))


def _train_some(
    client: EmbeddingClient, stream: int, rng: np.random.Generator
) -> list[float]:
    took, in_flight = [], deque()
    for number in range(100):
        tables = [
            (
                table.name,
                client.split(np.unique(rng.zipf(1.2, 300) % 10**6).astype("u8")),
            )
            for table in TABLES
        ]
        batch = BatchNumber(stream, number)
        began_s = time.perf_counter()
        rows = client.pull(tables, batch=batch)
        took.append(1000 * (time.perf_counter() - began_s))
        grads = [np.full_like(of_table, 0.01) for of_table in rows]
        in_flight.append(client.push(tables, grads, batch))
        if len(in_flight) == IN_FLIGHT:
            client.outcome(in_flight.popleft())
    while in_flight:
        client.outcome(in_flight.popleft())
    return took


def come_and_go(addresses: list[str], port: int) -> None:
    """Be one client after the other: join the book, read some rows, leave."""
    for number in itertools.count():
        time.sleep(VISIT_S)
        with closing(AddressBook.join("localhost", port)) as book:
            book.tell(f"visit/{number % 7}", str(number))
        # There may be no table yet, or no rows while a checkpoint is loaded.
        with (
            closing(EmbeddingClient.connect(addresses)) as client,
            contextlib.suppress(ConfigError, RemoteError),
        ):
            client.learn_tables()
            client.read("user", np.arange(20, dtype=np.uint64))
            client.counters()
        print("visit", number, flush=True)


def leak() -> None:
    """Take more memory, descriptors and threads all the time."""
    kept = []
    for number in itertools.count():
        kept.append((b"x" * 2**20, os.open("/dev/null", os.O_RDONLY)))
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        print("leaked", number, flush=True)
        time.sleep(0.02)
