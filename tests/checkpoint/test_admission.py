"""A training that is saved and loaded admits ids as one that was never stopped."""

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from persia_torchrec import (
    AdmitAll,
    AdmitBloom,
    AdmitFrequency,
    AdmitProbability,
    Expiry,
)
from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.catalog import Base, Manifest, merge_tables
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.load import ShardLoad, Target
from persia_torchrec.embedding.optim import SGD
from persia_torchrec.routing.shard import is_of_shard
from persia_torchrec.server.checkpoints import ShardDump
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.store.memory import MISSING
from persia_torchrec.table import TableSpec

CAPACITY = 1000
ALL_IDS = np.arange(150, dtype=np.uint64)
BLOOM = AdmitBloom(4, expected_ids=1000)
FILTERS = {
    "all": AdmitAll(),
    "probability": AdmitProbability(0.5),
    "counter": AdmitFrequency(4, max_waiting_rows=200),
    "cbf": BLOOM,
}
EXPIRIES = {
    "none": Expiry(),
    "steps": Expiry(steps_to_live=3),
    "norm": Expiry(min_l2_norm=0.3, spared_steps=2),
}
SPEC = TableSpec(name="item", dim=2, optimizer=SGD(0.1), keeps_metadata=True)

MOVES = {
    "dump and load": (2, 2, False),
    "1 to 3": (1, 3, False),
    "3 to 2": (3, 2, False),
    "full and delta": (2, 2, True),
}
SHARED = {"own rows": 0, "shared rows": 7}
PAIRS = [  # each pair of settings; without an admission nothing is shared
    (*pair, move, rows)
    for move in MOVES
    for rows in SHARED
    for pair in (
        itertools.product(FILTERS, EXPIRIES)
        if move == "1 to 3"
        else zip(FILTERS, [*EXPIRIES, "steps"], strict=True)
    )
    if rows == "own rows" or pair[0] != "all"
]


class Server:
    """One shard of a training, in this process."""

    def __init__(self, shard, num_shards, folder, spec):
        self.config = ServerConfig(
            shard=shard,
            num_shards=num_shards,
            capacity_rows=CAPACITY,
            incremental_dir=str(folder / "increments"),
        )
        self.store = self.config.make_store()
        self.store.add_tables([spec])
        self.target = Target(shard, num_shards, CAPACITY, is_lfu=False)

    def holds(self, ids):
        shared_rows = self.store.tables[0].shared_rows
        return is_of_shard(ids, *self.target[:2], shared_rows)

    def train(self, ids, counts, grads):
        own = self.holds(ids)
        out = np.empty((own.sum(), 2), dtype=np.float32)
        lookup = {"training": True, "counts_N": counts[own]}
        slots = self.store.lookup(0, ids[own], out, **lookup)
        self.store.update(0, ids[own], grads[own], slots)

    def dump(self, folder, log=None):
        dump = ShardDump(folder, self.store, self.config)
        dump.log = log
        deadline = time.monotonic() + 60
        while dump.phase == "dumping" and time.monotonic() < deadline:
            if dump.is_copying and not dump.chunks.full():
                dump.advance()
        assert dump.phase == "dumped", dump.error
        return dump.result

    def load(self, folder, logs=None):
        load = ShardLoad(folder, self.target, self.store, logs=logs)
        load.check()
        load.load()
        return load.result


class Training:
    def __init__(self, num_servers, folder, spec):
        self.folder = folder
        self.servers = [
            Server(shard, num_servers, folder, spec) for shard in range(num_servers)
        ]

    def train(self, steps):
        for step in steps:
            rng = np.random.default_rng(step)
            drawn = rng.zipf(1.3, 60) % len(ALL_IDS)
            ids, counts = np.unique(drawn.astype(np.uint64), return_counts=True)
            ids, counts = ids[::-1], counts[::-1].astype(np.uint32)
            grads = rng.standard_normal((len(ids), 2)).astype(np.float32)
            for server in self.servers:
                server.train(ids, counts, grads)

    def sweep(self):
        for server in self.servers:
            while server.store.sweep(CAPACITY):
                pass

    def save(self, between=None):
        """Dump; with ``between``, write increments of what it does behind that."""
        folder = Folder(self.folder / "checkpoint")
        folder.make()
        logs = [None for _ in self.servers]
        increments = []
        if between is not None:
            for server in self.servers:
                one = Increments(server.config, server.store, Activity())
                one.begin_log(Base("empty"))
                increments.append(one)
            logs = [one.begin_dump(folder.url) for one in increments]
        results = [
            server.dump(folder, log)
            for server, log in zip(self.servers, logs, strict=True)
        ]
        tables = merge_tables([result.tables for result in results])
        shards = tuple(result.shard for result in results)
        Manifest(tables, shards, "2026-01-01T00:00:00+00:00").write(folder)
        if between is not None:
            between()
        for one in increments:
            one.close()
        return folder

    def rows(self):
        """Return weights and metadata of all rows, by id."""
        found = {}
        for server in self.servers:
            store = server.store
            own = ALL_IDS[store.find(0, ALL_IDS) != MISSING]
            kept = store.metadata(0, own)
            columns = own, store.read(0, own), kept.frequency, kept.last_step
            for id_, row, frequency, last_step in zip(*columns, strict=True):
                found[int(id_)] = row.tobytes(), int(frequency), int(last_step)
            for table in range(1, len(store.tables)):
                keys = ALL_IDS[store.find(table, ALL_IDS) != MISSING]
                for key in keys:
                    found["shared", int(key)] = store.read(table, key[None]).tobytes()
        return found

    def waiting(self):
        """Return the ids that wait, and their counts, by the request seen last."""
        found = []
        for server in self.servers:
            state = server.store.states[0]
            if state.spec.admission.has_ids_as_keys:
                found += zip(*state.sightings(), strict=True)
        return sorted((int(u) >> 24, int(k), int(v)) for k, v, u in found)


@pytest.mark.parametrize(("filter_", "expiry", "move", "rows"), PAIRS)
def test_what_was_saved_goes_on_as_if_never_stopped(
    tmp_path, filter_, expiry, move, rows
):
    num_before, num_after, has_delta = MOVES[move]
    spec = replace(
        SPEC,
        admission=FILTERS[filter_],
        expiry=EXPIRIES[expiry],
        shared_rows=SHARED[rows],
    )
    undisturbed = Training(num_after, tmp_path / "other", spec)
    before = Training(num_before, tmp_path, spec)
    for training in (undisturbed, before):
        training.train(range(12))
    undisturbed.sweep()  # what has expired is not saved
    delta = None
    if has_delta:
        before.sweep()
        undisturbed.train(range(12, 20))
        delta = lambda: before.train(range(12, 20))  # noqa: E731
    folder = before.save(delta)
    after = Training(num_after, tmp_path, spec)
    logs = Folder(tmp_path / "increments") if has_delta else None
    for server in after.servers:
        assert server.load(folder, logs).forgotten == []
    is_exact = filter_ != "cbf" or num_before == num_after
    for steps in (range(20, 20), range(20, 30)):
        for training in (undisturbed, after):
            training.train(steps)
        assert after.waiting() == undisturbed.waiting()
        if is_exact:
            assert after.rows() == undisturbed.rows()
        else:
            assert after.rows().keys() >= undisturbed.rows().keys()
    assert len(after.rows()) > 10
    num_shared = sum(isinstance(key, tuple) for key in after.rows())
    assert num_shared == SHARED[rows]
    assert bool(after.waiting()) == (filter_ == "counter")


def test_a_filter_admits_what_exact_counts_admit_through_a_change_of_servers(tmp_path):
    exact = Training(3, tmp_path / "exact", replace(SPEC, admission=FILTERS["counter"]))
    before = Training(2, tmp_path, replace(SPEC, admission=BLOOM))
    for training in (exact, before):
        training.train(range(12))
    folder = before.save()
    after = Training(3, tmp_path, replace(SPEC, admission=BLOOM))
    for server in after.servers:
        server.load(folder)
    for step in range(12, 24):
        for training in (exact, after):
            training.train([step])
        assert after.rows().keys() >= exact.rows().keys()


@pytest.mark.parametrize(
    ("saved", "known"),
    [(BLOOM, replace(BLOOM, expected_ids=500)), (BLOOM, FILTERS["counter"])],
)
def test_a_filter_of_another_size_begins_anew_and_the_load_says_so(
    tmp_path, saved, known
):
    before = Training(1, tmp_path, replace(SPEC, admission=saved))
    before.train(range(3))
    folder = before.save()
    after = Training(1, tmp_path, replace(SPEC, admission=known))
    [server] = after.servers
    assert server.load(folder).forgotten == ["item"]
    assert len(server.store.states[0].sightings().keys) == 0


def test_a_threshold_that_is_changed_keeps_the_counts(tmp_path):
    training = Training(1, tmp_path, replace(SPEC, admission=AdmitFrequency(9)))
    [server] = training.servers
    ids, once = np.array([5], dtype=np.uint64), np.array([1], dtype=np.uint32)
    grads = np.ones((1, 2), dtype=np.float32)
    for _ in range(3):
        server.train(ids, once, grads)
    for admission in (AdmitFrequency(5), AdmitFrequency(5, max_waiting_rows=7)):
        server.store.add_tables([replace(SPEC, admission=admission)])
        assert training.waiting() == [(3, 5, 3)]
    server.train(ids, once, grads)
    assert server.store.num_rows == 0
    server.train(ids, once, grads)
    assert server.store.metadata(0, ids).frequency.tolist() == [5]


@dataclass(frozen=True)
class AdmitOwn(AdmitFrequency):
    """An admission of somebody else, which says nothing of what it remembers."""

    kind = "own"

    def counts_as(self, other):
        return False


@pytest.mark.parametrize("admission", [AdmitOwn(3), *FILTERS.values()])
def test_the_same_settings_once_more_keep_what_is_remembered(tmp_path, admission):
    spec = replace(SPEC, admission=admission)
    [server] = Training(1, tmp_path, spec).servers
    before = server.store.states[0].remembered
    server.store.add_tables([spec])  # as each client does
    assert server.store.states[0].remembered is before


def test_an_increment_has_the_ids_that_wait_and_that_wait_no_more(tmp_path):
    training = Training(1, tmp_path, replace(SPEC, admission=AdmitFrequency(2)))
    [server] = training.servers
    ids = np.array([5, 6], dtype=np.uint64)
    once, grads = np.ones(2, dtype=np.uint32), np.ones((2, 2), dtype=np.float32)
    server.train(ids, once, grads)
    folder = training.save(lambda: server.train(ids[:1], once[:1], grads[:1]))
    other = Training(1, tmp_path, replace(SPEC, admission=AdmitFrequency(2)))
    other.servers[0].load(folder, Folder(tmp_path / "increments"))
    assert [id_ for _, id_, _ in other.waiting()] == [6]
    assert other.rows() == training.rows()
