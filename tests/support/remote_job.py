"""Embedding servers in threads, one trainer, and models whose tables they hold."""

import threading
import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from persia_torchrec import SGD, EmbeddingClient, RemoteEmbeddingBagCollectionSharder
from persia_torchrec.pipeline.pipeline import BatchPipeline, PrefetchedBatch
from persia_torchrec.server.server import EmbeddingServer, ServerConfig
from persia_torchrec.sharding.mixed import MixedCollection
from persia_torchrec.sharding.sharded_module import ShardedRemoteCollection
from persia_torchrec.sharding.stored_tensor import StoredTensor
from tests.support.servers import DEADLINE_S

CPU = torch.device("cpu")
META = torch.device("meta")


class Servers:
    """Embedding servers, each served by a thread of this process."""

    def __init__(
        self,
        num_servers: int = 2,
        capacity_rows: int = 100_000,
        *,
        first_port: int = 0,
        **settings: Any,
    ) -> None:
        self.servers = [
            EmbeddingServer(
                ServerConfig(
                    shard=shard,
                    num_shards=num_servers,
                    capacity_rows=capacity_rows,
                    port=first_port and first_port + shard,
                    **settings,
                )
            )
            for shard in range(num_servers)
        ]
        self.addresses = [server.address for server in self.servers]
        self._threads = [
            threading.Thread(target=server.serve, name=f"server {shard}", daemon=True)
            for shard, server in enumerate(self.servers)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


class PatientClient(EmbeddingClient):
    """A client that reads rows and counters after the lookups begun before.

    A model answers before its lookup is done, so that a row which the lookup makes may
    be missing when a test reads it. Here it cannot be.
    """

    pulled: "weakref.WeakSet[PrefetchedBatch]"

    def watch(self, pipeline: BatchPipeline) -> None:
        """Wait for the lookups of a pipeline from now on."""
        start = pipeline.start

        def watched(*args, **kwargs):
            batch = start(*args, **kwargs)
            self.pulled.add(batch)
            return batch

        pipeline.start = watched

    def read_numbers(self, *args):
        self.wait_for_lookups()
        return super().read_numbers(*args)

    def counters(self, timeout_s=None):
        self.wait_for_lookups()
        return super().counters(timeout_s)

    def wait_for_lookups(self) -> None:
        """Wait for all lookups but those that wait for a permit themselves."""
        for batch in list(self.pulled):
            semaphore = batch._pipeline.semaphore
            while not batch.arrived.wait(0.01):
                is_out = batch.permit in semaphore._out
                if (
                    batch.is_training
                    and not is_out
                    and len(semaphore._out) >= (semaphore._num)
                ):
                    break


class RemoteJob:
    """Servers, a client of them, and this process as the only trainer."""

    def __init__(
        self,
        *,
        num_servers: int = 2,
        capacity_rows: int = 100_000,
        timeout_s: float = DEADLINE_S,
        first_port: int = 0,
    ) -> None:
        self.servers = Servers(num_servers, capacity_rows, first_port=first_port)
        self._timeout_s = timeout_s
        self._models: list[DistributedModelParallel] = []

    def __enter__(self) -> Self:
        self.servers.__enter__()
        self.client = PatientClient.connect(
            self.servers.addresses, timeout_s=self._timeout_s
        )
        self.client.pulled = weakref.WeakSet()
        # As trainers on GPUs have it: gloo's copies to the host would be waited for.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        dist.destroy_process_group()
        for model in self._models:
            for module in remote_modules(model):
                module.pipeline.close()
        self.client.close()
        self.servers.stop()

    def put_on_servers(
        self,
        model: nn.Module,
        optimizer=None,
        *,
        device: torch.device = CPU,
        **settings,
    ) -> DistributedModelParallel:
        """Shard a model as a user does: one more sharder, the stock planner."""
        sharder = RemoteEmbeddingBagCollectionSharder(
            self.client, optimizer or SGD(1.0), **settings
        )
        return self.shard(model, [sharder], device=device)

    def shard(
        self, model: nn.Module, sharders: list, *, device: torch.device = CPU
    ) -> DistributedModelParallel:
        """Shard a model, and close its pipelines at the end."""
        sharded = shard(model, *sharders, device=device)
        self.adopt(sharded)
        return sharded

    def adopt(self, model: DistributedModelParallel) -> None:
        """Close what a model started, at the end of the job."""
        self._models.append(model)
        for module in remote_modules(model):
            self.client.watch(module.pipeline)

    def read(self, table: str, ids: list[int] | range) -> np.ndarray:
        """Return weights and state of ids, zeros without a row; ids may be int64."""
        return self.client.read(table, ids_of(ids), initial=False)

    def total(self, counter: str) -> int:
        """Return a counter, summed over the servers."""
        return sum(counters.get(counter, 0) for counters in self.client.counters())


class Bags(nn.Module):
    """Nothing but an embedding bag collection; its output is the pooled columns."""

    def __init__(self, tables, device: torch.device = META) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables, device=device)

    def forward(self, ids: KeyedJaggedTensor):
        return self.bags(ids)


def collided(tables) -> ManagedCollisionEmbeddingBagCollection:
    """Return bags behind modules that map raw ids to the rows of a short table."""
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=CPU,
            input_hash_size=1000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for table in tables
    }
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables, device=META),
        ManagedCollisionCollection(modules, tables),
    )


def shard(model: nn.Module, *sharders, device=CPU, constraints=None, **settings):
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
            compute_device=device.type,
        ),
        constraints=constraints,
    )
    sharders = list(sharders)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(
        model, sharders=sharders, plan=plan, device=device, **settings
    )


def remote_modules(model: nn.Module) -> list[ShardedRemoteCollection]:
    """Return what has tables on the servers, also as a part of a mixed collection."""
    parts = (
        module.remote if isinstance(module, MixedCollection) else module
        for module in model.modules()
    )
    return [part for part in parts if isinstance(part, ShardedRemoteCollection)]


class HeldPushes:
    """Lets no push of a model's collections go until it is told to."""

    def __init__(self, model):
        self.may_push = threading.Event()
        for module in remote_modules(model):
            self.hold(module.pipeline.lookup)

    def hold(self, lookup):
        push = lookup.push

        def held(*args):
            assert self.may_push.wait(DEADLINE_S)
            return push(*args)

        lookup.push = held


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's state without the tables on the servers."""
    state, tables = model.state_dict().items(), str | StoredTensor
    return {key: value for key, value in state if not isinstance(value, tables)}


def ids_of(ids) -> np.ndarray:
    return np.array([id_ % 2**64 for id_ in ids], dtype=np.uint64)


def kjt_of(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    """Build a KeyedJaggedTensor from each feature's bags, as {"ad": [[7, 8], []]}."""
    ids = [id_ for feature in bags.values() for bag in feature for id_ in bag]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(
            [len(bag) for feature in bags.values() for bag in feature],
            dtype=torch.int32,
        ),
    )
