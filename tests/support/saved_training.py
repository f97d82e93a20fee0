"""A training on shards in this process, which saves and loads what it has learnt."""

import time

import numpy as np

from persia_torchrec.checkpoint.background import Activity
from persia_torchrec.checkpoint.catalog import Manifest, merge_tables
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.checkpoint.increment_log import Base
from persia_torchrec.checkpoint.load import ShardLoad, Target
from persia_torchrec.routing.route import is_of_shard
from persia_torchrec.server.checkpoint_service import ShardDump
from persia_torchrec.server.config import ServerConfig
from persia_torchrec.server.increments import Increments
from persia_torchrec.store.memory import MISSING

CAPACITY = 1000
ALL_IDS = np.arange(150, dtype=np.uint64)


class Server:
    """One shard of a training, in this process."""

    def __init__(self, shard, num_shards, folder, spec):
        self.config = ServerConfig(
            shard=shard,
            num_shards=num_shards,
            capacity_rows=CAPACITY,
            increments_dir=str(folder / "increments"),
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
